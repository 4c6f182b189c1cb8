"""Settings under the names that runs before 0.1.0 recorded: `read_record` and the published runs read them by this table."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from fluvial.engines.choices import variants
from fluvial.engines.methods.table import method_type

OBJECTIVES = {"clipped": "grpo"}  # methods with another name
OF_SAMPLING = ("prompts", "group", "shared_noise", "steps", "sampler", "window", "guidance")
# Old name of a setting, or of the table that it stands in, and the new one.
NAMES = {
    **{f"rollout.{name}": f"method.sampling.{name}" for name in OF_SAMPLING},
    **{f"rollout.{name}": f"method.{name}" for name in ("trained", "form", "reduction")},
    **{name: f"method.{name}" for name in ("noising", "advantage", "kl", "correction")},
    **{name: f"method.passes.{name}" for name in ("epochs", "minibatches")},
    "asynchronous": "rollout",
    "objective": "method",
}
# The same of single methods.
OF_METHOD = {
    **{name: {"kl.guidance": "method.ref_guidance"} for name in ("dpo", "d3po")},
    "crd": {
        f"objective.{old}_{was}": f"method.{new}.{now}"
        for old, new in {"old": "old", "sampling": "rollout_policy"}.items()
        for was, now in {"value": "start", "rise": "rise", "cap": "cap", "delay": "delay"}.items()
    },
}


def rename(name: str, method: str = "") -> str:
    """Return the present name of a setting by its dotted old one, with the method's name where that matters."""
    table = {**NAMES, **OF_METHOD.get(method, {})}
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (first := ".".join(parts[:count])) in table:
            return ".".join([table[first], *parts[count:]])
    return name


def migrate(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a run with old names, nested or by dotted names, under the present names, nested.

    Settings that the method does not have are left out: they could not be set.
    """
    found, settings = dict[str, Any](), dict(_flatten(record))
    name = OBJECTIVES.get(settings["objective.name"], settings["objective.name"])
    kind = method_type(name)
    for old, value in settings.items():
        new = rename(old, name).split(".")
        if new[0] == "method" and new[1:] != ["name"] and not has_field(kind, new[1:]):
            continue
        table = found
        for part in new[:-1]:
            table = table.setdefault(part, {})
        table[new[-1]] = value
    found["method"]["name"] = name
    return found


def _flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting."""
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def has_field(kind: Any, path: Sequence[str]) -> bool:
    """Return whether a dataclass has a field, by the parts of its name; a choice has those of each of its kinds."""
    hints = get_type_hints(kind)
    if path[0] not in {each.name for each in dataclasses.fields(kind)}:
        return False
    inner = hints[path[0]]
    if len(path) == 1 or not (variants(inner) or dataclasses.is_dataclass(inner)):
        return True
    kinds = variants(inner) or (inner,)
    return path[1] == "kind" or any(has_field(kind, path[1:]) for kind in kinds)
