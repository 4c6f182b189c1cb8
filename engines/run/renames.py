"""Table of settings' old names, to read older records, checkpoints and published runs."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

from fluvial.engines.choices import find_variant, list_variants
from fluvial.engines.errors import UsageError

OBJECTIVES = {"clipped": "grpo"}  # methods with another name
OF_SAMPLING = ("prompts", "group", "shared_noise", "steps", "sampler", "window", "guidance")
# Old name of a setting, or of its table, and the new one.
NAMES = {
    **{f"rollout.{name}": f"method.sampling.{name}" for name in OF_SAMPLING},
    **{f"rollout.{name}": f"method.{name}" for name in ("trained", "form", "reduction")},
    **{name: f"method.{name}" for name in ("noising", "advantage", "kl", "correction")},
    "rollout.reuse_prompt": "rollout.reuse",
    **{name: f"method.passes.{name}" for name in ("epochs", "minibatches")},
    "optimizer.warmup_ratio": "optimizer.warmup",
    **{f"{group}correction.mode": "method.correction.kind" for group in ("", "method.")},
    "asynchronous": "rollout",
    "objective": "method",
}
# Old names of single settings only; some are names of groups now.
SINGLE = {
    "data": "data.images",
    "prompt_order": "data.order",
    **{f"data_{name}": f"data.{name}" for name in ("seed", "cache", "errors")},
    **{name: f"engine.{name}" for name in ("micro_batch", "update_micro_batch", "init", "implementation")},
    "collective_timeout": "engine.timeout",
    "eval_every": "evaluation.every",
    "eval_samples": "evaluation.samples",
    **{name: f"evaluation.{name}" for name in ("final_samples", "stop_when_gamed")},
    "checkpoint_every": "checkpoint.every",
    "checkpoint_async": "checkpoint.background",
    "checkpoints": "checkpoint.folder",
    "keep_checkpoints": "checkpoint.keep",
    "resume_from": "checkpoint.resume_from",
    **{f"export_{old}": f"export.{new}" for old, new in {"every": "every", "dtype": "dtype", "as": "format"}.items()},
    **{name: f"rollout.{name}" for name in ("max_log_ratio", "max_invalid")},
    "weights": "pipeline.weights",
}
# Old names of settings of single methods.
OF_METHOD = {
    **{name: {"kl.guidance": "method.ref_guidance"} for name in ("dpo", "d3po")},
    "crd": {
        f"objective.{old}_{was}": f"method.{new}.{now}"
        for old, new in {"old": "old", "sampling": "rollout_policy"}.items()
        for was, now in {"value": "start", "rise": "rise", "cap": "cap", "delay": "delay"}.items()
    },
}
# Values without effect of settings that all methods once had; dropped for methods that no longer have them.
DROPPED = {
    **{f"method.sampling.window.{name}": value for name, value in {"kind": "all", "low": 0, "high": None}.items()},
    **{f"method.kl.{name}": value for name, value in {"coef": 0, "ema_coef": 0, "ema_cap": 0.3, "guidance": None}.items()},
    "method.kl.ema_rise": 0.001,
}


def rename(name: str, method: str = "") -> str:
    """Return the present dotted name of a setting by its old one; some depend on the method."""
    if name in SINGLE:
        return SINGLE[name]
    table = {**NAMES, **OF_METHOD.get(method, {})}
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (first := ".".join(parts[:count])) in table:
            return ".".join([table[first], *parts[count:]])
    return name


def migrate(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a record of a run, nested or with dotted names, to the present names, nested.

    A record without old names or values is returned unchanged. Settings that the method or the kind of a choice lacks are
    dropped if that method or choice was renamed, or if they had no effect.
    """
    settings_of, settings = dict[str, Any](), dict(_flatten(record))
    settings |= (changed := dict(_convert(settings)))
    settings = {name: value for name, value in settings.items() if not name.endswith(".warmup_ratio")}
    names = {old: old if isinstance(value, Mapping) else rename(old) for old, value in settings.items()}
    stated = settings.get("objective.name", settings.get("method.name", settings.get("method", "grpo")))  # once a default
    method = OBJECTIVES.get(stated, stated) if isinstance(stated, str) else ""
    idle = any(DROPPED.get(names[old], ...) == value for old, value in settings.items())
    if not changed and not idle and all(old == new for old, new in names.items()):
        return record
    named = {old: old if isinstance(value, Mapping) else rename(old, method) for old, value in settings.items()}
    chosen = {named[old]: value for old, value in settings.items() if named[old] != old and named[old].endswith(".kind")}
    of_kinds = {name.removeprefix("method."): kind for name, kind in chosen.items()}
    for old, value in settings.items():
        new = named[old]
        parts = ["method", "name"] if new == "method" else new.split(".")
        moved = new != old or f"{new.rpartition('.')[0]}.kind" in chosen
        unused = DROPPED[new] == value if new in DROPPED else moved
        of_method = parts[0] == "method" and parts != ["method", "name"]
        if unused and of_method and _lacks(method, parts[1:], of_kinds):
            continue
        table = settings_of
        for part in parts[:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = value
    if method:
        settings_of.setdefault("method", {})["name"] = method
    return settings_of


def _convert(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield settings, by dotted names, whose old values have another form now."""
    threshold = settings.get("rollout.step_cache")  # once a number, 0 without a cache
    if isinstance(threshold, int | float):
        yield "rollout.step_cache", {"kind": "first_block", "threshold": threshold} if threshold else {"kind": "none"}
    if isinstance(reuses := settings.get("rollout.reuse_prompt"), bool):
        yield "rollout.reuse_prompt", "exact" if reuses else "none"
    for name, share in settings.items():
        if name.endswith(".warmup_ratio"):  # once beside a number of updates; one of the two was 0
            number = name.removesuffix("_ratio")
            yield number, share or settings.get(number, 0)


def _lacks(method: str, path: Sequence[str], chosen: Mapping[str, Any]) -> bool:
    """Return whether a method has no such field; False for a method that cannot be imported, as one of a script."""
    from fluvial.engines.methods.table import method_type  # imports torch, which the list of published runs avoids

    try:
        return not has_field(method_type(method), path, chosen)
    except UsageError:
        if ":" not in method:
            raise
        return False


def _flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting."""
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def has_field(kind: Any, path: Sequence[str], chosen: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Return whether a dataclass has a field, by the parts of its name.

    A choice has the fields of its kind, which `chosen` has under its dotted name with `.kind`; otherwise those of any kind.
    """
    if path[0] not in {each.name for each in dataclasses.fields(kind)}:
        return False
    inner = get_type_hints(kind)[path[0]]
    if len(path) == 1 or not (list_variants(inner) or dataclasses.is_dataclass(inner)):
        return True
    kinds = list_variants(inner) or (inner,)
    if (stated := chosen.get(f"{path[0]}.kind")) is not None:
        kinds = (find_variant(inner, stated, path[0])[0],)
    return path[1] == "kind" or any(has_field(kind, path[1:]) for kind in kinds)
