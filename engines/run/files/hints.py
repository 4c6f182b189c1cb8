"""Lookup of the setting that a name means: by its last part, an alias, or the name in another trainer."""

import csv
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# Aliases for the first of these settings that exists: words of other commands, and last parts of several settings.
ALIASES = {
    "reward": ("rewards",),
    "transformer": ("weights", "pipeline.weights"),
    "weights": ("pipeline.weights",),
    "lora": ("lora.weights",),
    "data": ("data.images",),
    "micro_batch": ("engine.micro_batch",),
    "lr": ("optimizer.lr",),
    "weight_decay": ("optimizer.weight_decay",),
    "steps": ("sampling.steps",),
    "height": ("pipeline.height",),
    "width": ("pipeline.width",),
}


def find_settings(name: str, names: Sequence[str]) -> list[str]:
    """Return the settings that a name may mean: by `ALIASES`, else those with this last part; none for a full name.

    Args:
        name: name as typed, with underscores.
        names: existing settings.
    """
    if name in names:
        return []
    known = [each for each in ALIASES.get(name, ()) if each in names]
    return known[:1] or [each for each in names if "." not in name and each.endswith(f".{name}")]


class ForeignSetting(NamedTuple):
    """A setting of other trainers.

    Args:
        name: its name there, with underscores.
        ours: name of the setting here; a command or a recipe if it begins with `fluvial `.
        of: trainers that have it.
        note: difference in meaning.
    """

    name: str
    ours: str
    of: str
    note: str


@cache
def load_foreign_settings() -> dict[str, list[ForeignSetting]]:
    """Load the settings of other trainers by name; one name may have several counterparts."""
    text = files(__package__).joinpath("names.csv").read_text(encoding="utf-8")
    names = dict[str, list[ForeignSetting]]()
    for row in csv.DictReader(text.splitlines()):
        names.setdefault(row["name"], []).append(ForeignSetting(**row))
    return names


def explain_unknown(
    name: str, names: Sequence[str], show: Callable[[str], str] = str, *, of_method: bool = True
) -> str | None:
    """Return a hint for a setting that a run does not have; None for an unknown name.

    It is an old name, a name in another trainer, or a setting of other methods.

    Args:
        name: name as typed, with underscores.
        names: existing settings.
        show: formats a setting as it is typed.
        of_method: whether `names` includes the settings of a method.
    """
    from fluvial.engines.methods.table import METHODS
    from fluvial.engines.run.renames import has_field, rename

    if (now := rename(name).removeprefix("method.").removesuffix(".kind")) != name and now in names:
        return f"it is {show(now)} now"
    for foreign in load_foreign_settings().get(name.rpartition(".")[2].lower(), []):
        if (is_command := foreign.ours.startswith("fluvial ")) or foreign.ours in names:
            note = f" ({foreign.note})" if foreign.note else ""
            return f"here it is {foreign.ours if is_command else show(foreign.ours)}{note}; the name is that of {foreign.of}"
    methods = [method for method, kind in METHODS.items() if of_method and has_field(kind, now.split("."))]
    return f"this method has none, and {', '.join(methods)} {'have' if len(methods) > 1 else 'has'} it" if methods else None
