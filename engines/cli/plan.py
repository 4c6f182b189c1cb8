"""`fluvial plan MODEL`: compute the memory of training without a GPU; without MODEL, servers ahead of a trainer.

MODEL may be a published run; then its requirements are printed, and its settings are planned.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fluvial.engines.cli.brief import HELP, asks_for_help
from fluvial.engines.cli.listing import may_be_model
from fluvial.engines.cli.parse import console, find_values, flags_in_errors, parse_config, parse_name
from fluvial.engines.errors import UsageError

if TYPE_CHECKING:
    from fluvial.engines.extensions.plan.plan import PlanConfig

SECONDS = ("--rollout-seconds", "--update-seconds")


def run(args: list[str]) -> None:
    """Print the plan of a configuration, the settings that fit, or a comparison with a measured update.

    With the seconds of rollouts and updates instead of a model, print how many servers keep a trainer busy.
    """
    if asks_for_help(args):
        from fluvial.engines.extensions.plan.plan import PlanConfig

        parse_config(PlanConfig(), "fluvial plan MODEL", ["--help"])
    if any(find_values(args, flag) for flag in SECONDS) and args[0].startswith("--"):
        from fluvial.engines.extensions.plan import simulate

        ahead = parse_config(simulate.AheadConfig(), "fluvial plan", args)
        with flags_in_errors(ahead):
            simulate.show(ahead, console=console())
        return

    from fluvial.engines.extensions.plan.plan import MODELS, PlanConfig

    name = parse_name("plan", args, tuple(MODELS), "a model or of a published run", fits=may_be_model)
    if _is_run(name):
        _plan_run(name, args[1:])
        return
    config = parse_config(PlanConfig(), f"fluvial plan {name}", args[1:])
    if config.check:
        from fluvial.engines.extensions.plan.check import check

        with flags_in_errors(config):
            check(name, config, console=console())
        return
    _show(name, config)


def _show(name: str, config: "PlanConfig") -> None:
    """Print the plan of a model, the settings that fit, or the table, depending on the flags."""
    from fluvial.engines.extensions.plan.fit import show_fit
    from fluvial.engines.extensions.plan.plan import show, show_table

    show_output = show_fit if config.fit is not None else show_table if config.table else show
    with flags_in_errors(config):
        show_output(name, config, console=console())


def _is_run(name: str) -> bool:
    """Return whether a name is a published run, PROJECT/MODEL/TASK, not a folder."""
    return name.count("/") == 2 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _plan_run(name: str, flags: Sequence[str]) -> None:
    """Print the requirements of a published run and its memory on --gpus GPUs, by default as many as published."""
    import torch

    from fluvial.engines.extensions.plan.fit import to_plan_config
    from fluvial.engines.extensions.plan.hours import count_run
    from fluvial.engines.extensions.plan.plan import PlanConfig
    from fluvial.engines.extensions.published.requirements import describe_requirements
    from fluvial.engines.extensions.published.resolve import resolve
    from fluvial.engines.extensions.published.runs import find_run

    published = find_run(name)
    config = resolve(published)
    count = parse_config(PlanConfig(gpus=published.gpus or 1), f"fluvial plan {name}", flags).gpus
    if not set(HELP) & set(flags):
        print("\n".join(describe_requirements(published, config, gpus=count)))
    try:
        planned = to_plan_config(config, config.model, count, torch.device("cuda"))
    except UsageError as error:
        print(f"  memory   {error}")
        return
    if not set(HELP) & set(flags):
        print(f"  compute  {count_run(config, config.model)}")
    plan_config = parse_config(planned, f"fluvial plan {name}", flags)
    if plan_config.check:
        raise UsageError("--check makes an update of the built-in model, and has no effect with a published run; remove it")
    _show(config.model, plan_config)
