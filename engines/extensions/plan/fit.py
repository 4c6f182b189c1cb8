"""Settings that fit into a GPU's memory: which are turned, and what each of them saves."""

from rich.console import Console
from rich.table import Table

from fluvial.engines.errors import RunError
from fluvial.engines.extensions.plan.plan import KNOBS, Knobs, Plan, PlanConfig, plan, turns_to_fit, unit_of
from fluvial.engines.extensions.report.progress import table


def steps_to_fit(name: str, config: PlanConfig, knobs: Knobs = KNOBS) -> list[tuple[str, Plan]]:
    """Return the plan as it is, and after each setting that is turned, with the setting's flag.

    Raises:
        RunError: no combination of settings fits.
    """
    turned, last = turns_to_fit(name, config, knobs)
    if not last.fits:
        unit = unit_of(last.need)
        raise RunError(
            f"{name} does not fit into {config.room_in_words}: the least is {unit.of(last.need)} {unit.name}, with "
            f"{' '.join(turned) or 'the settings as they are'}"
        )
    found = [("as it is", plan(name, config))]
    for flags in turned:
        found.append((flags, plan(name, knobs[flags](found[-1][1].config))))
    return found


def show_fit(name: str, config: PlanConfig, *, console: Console) -> None:
    """Print the settings that fit, and what each saves.

    Raises:
        RunError: none do.
    """
    steps = steps_to_fit(name, config)
    console.print(saved_by(name, steps), highlight=False)
    flags = " ".join(flags for flags, _ in steps[1:])
    console.print(
        f"It fits into {config.room_in_words}{' with ' + flags if flags else ''}.", highlight=False, soft_wrap=True
    )


def saved_by(name: str, steps: list[tuple[str, Plan]]) -> Table:
    """Return a table of what each setting saves at the peak of the larger phase."""
    unit = unit_of(max(found.need for _, found in steps))
    rows, before = dict[str, tuple[str, ...]](), None
    for flags, found in steps:
        saved = "" if before is None else unit.of(max(0, before - found.need))
        rows[flags] = (unit.of(found.update.total), unit.of(found.rollout.total), saved)
        before = found.need
    return table(f"{name}: {unit.name} on each GPU", ("update", "rollout", "saves"), rows)
