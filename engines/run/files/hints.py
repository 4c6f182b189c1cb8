"""Find the setting that a name means: by its last part, an alias, or the name of another trainer."""

import csv
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# Names that stand for the first of these settings that there is: words of other commands, last parts of several settings.
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
    """Return the settings that a name stands for: by `ALIASES`, else each whose last part it is; none for a setting itself.

    Args:
        name: what was typed, with underscores.
        names: settings that there are.
    """
    if name in names:
        return []
    known = [each for each in ALIASES.get(name, ()) if each in names]
    return known[:1] or [each for each in names if "." not in name and each.endswith(f".{name}")]


class ForeignSetting(NamedTuple):
    """A setting of other trainers.

    Args:
        name: its name there, with underscores.
        ours: name of the setting here; a command or a recipe where it begins with `fluvial `.
        of: trainers that have it.
        note: what differs.
    """

    name: str
    ours: str
    of: str
    note: str


@cache
def load_foreign_settings() -> dict[str, list[ForeignSetting]]:
    """Return the settings of other trainers by their name; one name may mean several of ours."""
    text = files(__package__).joinpath("names.csv").read_text(encoding="utf-8")
    names = dict[str, list[ForeignSetting]]()
    for row in csv.DictReader(text.splitlines()):
        names.setdefault(row["name"], []).append(ForeignSetting(**row))
    return names


def explain_unknown(
    name: str, names: Sequence[str], show: Callable[[str], str] = str, *, of_method: bool = True
) -> str | None:
    """Return a hint for a setting that a run does not have; None for a name that nothing knows.

    It had another name once, another trainer calls it so, or other methods have it.

    Args:
        name: what was typed, with underscores.
        names: settings that there are.
        show: function of one of these that returns it as it is typed.
        of_method: whether the settings of a method are among them.
    """
    from fluvial.engines.methods.table import METHODS
    from fluvial.engines.run.renames import has_field, rename

    if (now := rename(name).removeprefix("method.").removesuffix(".kind")) != name and now in names:
        return f"it is {show(now)} now"
    for row in load_foreign_settings().get(name.rpartition(".")[2].lower(), []):
        if (is_command := row.ours.startswith("fluvial ")) or row.ours in names:
            note = f" ({row.note})" if row.note else ""
            return f"here it is {row.ours if is_command else show(row.ours)}{note}; the name is that of {row.of}"
    having = [method for method, kind in METHODS.items() if of_method and has_field(kind, now.split("."))]
    return f"this method has none, and {', '.join(having)} {'have' if len(having) > 1 else 'has'} it" if having else None
