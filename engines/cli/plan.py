"""`fluvial plan MODEL`: work out the memory of training before there is a GPU; without MODEL, servers ahead of a trainer."""

from fluvial.engines.cli.brief import asks
from fluvial.engines.cli.parse import console, flags_in_errors, named, parsed, typed

SECONDS = ("--rollout-seconds", "--update-seconds")


def run(args: list[str]) -> None:
    """Print the plan of a configuration, a table of the settings that fit, or a comparison with a real update.

    With the seconds of rollouts and updates instead of a model, print how many servers keep a trainer busy.
    """
    if asks(args):
        from fluvial.engines.plan.plan import PlanConfig

        parsed(PlanConfig(), "fluvial plan MODEL", ["--help"])
    if any(typed(args, flag) for flag in SECONDS) and args[0].startswith("--"):
        from fluvial.engines.plan import simulate

        ahead = parsed(simulate.AheadConfig(), "fluvial plan", args)
        with flags_in_errors(ahead):
            simulate.show(simulate.checked(ahead), console=console())
        return

    from fluvial.engines.plan.plan import MODELS, PlanConfig, show, show_table

    name = named("plan", args, tuple(MODELS), "a model")
    config = parsed(PlanConfig(), f"fluvial plan {name}", args[1:])
    with flags_in_errors(config):
        if config.check:
            from fluvial.engines.plan.check import check

            check(name, config, console=console())
        elif config.fit is not None:
            from fluvial.engines.plan.fit import show_fit

            show_fit(name, config, console=console())
        elif config.trace:
            from fluvial.engines.plan.trace import show as show_trace

            show_trace(name, config, console=console())
        else:
            (show_table if config.table else show)(name, config, console=console())
