"""`fluvial plan MODEL`: work out the memory of training before there is a GPU."""

from fluvial.engines.cli.parse import console, flags_in_errors, named, parsed


def run(args: list[str]) -> None:
    """Print the plan of a configuration, a table of the settings that fit, or a comparison with a real update.

    Raises:
        UsageError: the arguments are wrong.
    """
    from fluvial.engines.plan.plan import MODELS, PlanConfig, show, show_table

    name = named("plan", args, tuple(MODELS), "a model")
    config = parsed(PlanConfig, PlanConfig, f"fluvial plan {name}", args[1:])
    with flags_in_errors(config):
        if config.check:
            from fluvial.engines.plan.check import check

            check(name, config, console=console())
        else:
            (show_table if config.table else show)(name, config, console=console())
