"""Lookup of methods, samplers, rewards, recipes and models by name, including user-defined ones.

A name is built in (a key of the caller's table), declared by an installed package through an entry point
(`[project.entry-points."fluvial.methods"]`), or `module:attribute`. The extensions of `engines/extensions` are declared
here, so that they work without installation; the spine imports none of them.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from fluvial.engines.errors import UsageError

# Objects that the spine uses and does not import, by group and name, as in entry points of `fluvial.<group>`:
#   sources        by the scheme of `rollout.source`: function that opens a source, see `sampling.build.OpenSource`
#   trackers       by the value of `tracker`: function or class of a `run.log.trackers.TrackedRun`
#   reward_makers  mappings from a reward's name to the function that makes it from its options; all are used
#   reports        functions of a finished run's folder that write a file and return its path; all are called
#   curves         functions (path, title, points, unit) that draw a curve as a PNG; all are called
#   extensions     single functions: settings that fit a GPU, stored rollouts, published runs
EXTENSIONS: dict[str, dict[str, str]] = {
    "sources": {
        "http": "fluvial.engines.extensions.remote.remote:open_remote",
        "https": "fluvial.engines.extensions.remote.remote:open_remote",
        "replayed": "fluvial.engines.extensions.remote.stored:open_replayed",
    },
    "trackers": {
        "tensorboard": "fluvial.engines.extensions.report.trackers:TensorBoard",
        "wandb": "fluvial.engines.extensions.report.trackers:Wandb",
        "trackio": "fluvial.engines.extensions.report.trackers:Trackio",
        "swanlab": "fluvial.engines.extensions.report.trackers:SwanLab",
        "mlflow": "fluvial.engines.extensions.report.trackers:Mlflow",
    },
    "reward_makers": {"clients": "fluvial.engines.extensions.judges.table:MAKERS"},
    "reports": {"page": "fluvial.engines.extensions.report.page:finish"},
    "curves": {"png": "fluvial.engines.extensions.report.charts:draw_curve"},
    "extensions": {
        "fit": "fluvial.engines.extensions.plan.fit:fit_config",
        "stored": "fluvial.engines.extensions.remote.stored:StoringSource",
        "published": "fluvial.engines.extensions.published.resolve:configure",
    },
}

# Returns the problem of a loaded object, e.g. "is of type list, expected a function", or None.
Check = Callable[[Any], str | None]


def load(
    spec: str, group: str, check: Check | None = None, *, table: Mapping[str, Any] | None = None, field: str | None = None
) -> Any:
    """Load an object by name.

    Args:
        spec: name in `table`, name of an entry point of `fluvial.<group>`, or `module:attribute`.
        group: kind of object in the plural, e.g. "methods".
        check: check of the object, see `Check`.
        table: built-in objects by name; they come before entry points of the same name.
        field: start of each message, e.g. "rollout.sampler"; by default the group's singular.

    Raises:
        UsageError: the name, module or attribute is unknown, importing it fails, or the check fails; in one line.
    """
    label, table = f"`{field or group.removesuffix('s')}`", table or {}
    where = f"{label} {spec!r}"
    if spec in table:
        loaded = table[spec]
    elif ":" in spec:
        loaded = _import(where, spec)
    elif spec in (declared := _list_declared(group)):
        where += f" (entry point {declared[spec]})"
        loaded = _import(where, declared[spec])
    else:
        known = list_names(group, table)
        expected = f"one of {', '.join(known)}, or module:name" if known else "module:name"
        raise UsageError(f"{label} is {spec!r}, expected {expected}{suggest(spec, known)}")
    if check is not None and (problem := check(loaded)) is not None:
        raise UsageError(f"{where} {problem}")
    return loaded


def list_names(group: str, table: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names that `load` accepts besides `module:attribute`: the table's, then those of entry points."""
    return list(dict.fromkeys([*(table or {}), *_list_declared(group)]))


def load_all(group: str) -> list[Any]:
    """Load all objects that are declared for a group.

    Raises:
        UsageError: one of them cannot be imported.
    """
    return [load(name, group) for name in _list_declared(group)]


def spec_of(thing: Any) -> str:
    """Return the `module:attribute` of a class or function; `load` accepts it if it is at the top level of a module."""
    return f"{thing.__module__}:{thing.__qualname__}"


def make_call_check(*parameters: str) -> Check:
    """Return a check that an object is a function of these positional arguments."""

    def check(value: Any) -> str | None:
        expected = f"a function of ({', '.join(parameters)})"
        if not callable(value) or inspect.isclass(value):
            return f"is {'a class' if inspect.isclass(value) else f'of type {type(value).__name__}'}, expected {expected}"
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):  # some functions written in C have no signature
            return None
        try:
            signature.bind(*parameters)
        except TypeError as error:
            return f"has the signature {signature}, expected {expected}: {error}"
        return None

    return check


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the nearest of the known words, or an empty text."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _list_declared(group: str) -> dict[str, str]:
    """Return `module:attribute` by name: the extensions above, then those of installed packages."""
    here, paths = EXTENSIONS.get(group, {}), tuple(map(os.path.abspath, sys.path))
    installed = _read_entry_points(group, paths, tuple(map(_read_time, paths)))
    return here | {name: spec for name, spec in installed.items() if name not in here}


def _read_time(path: str) -> int | None:
    """Return when a path was changed; None where there is none."""
    with suppress(OSError):
        return os.stat(path).st_mtime_ns
    return None


@lru_cache(maxsize=32)
def _read_entry_points(group: str, paths: tuple[str, ...], times: tuple[int | None, ...]) -> dict[str, str]:
    """Return `module:attribute` by name of installed packages; it takes 20 ms, and again if one of the paths has changed."""
    return {point.name: point.value for point in entry_points(group=f"fluvial.{group}")}


def _import(label: str, spec: str) -> Any:
    """Import the attribute of `module:attribute`."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise UsageError(f"{label}: expected module:name")
    if module == "__main__" or "<" in name:
        where = "inside of a function" if "<" in name else "in the script that was run"
        raise UsageError(f"{label} is defined {where}, from where it cannot be imported: move it to the top of a module")
    try:
        target: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if f"{module}.".startswith(f"{missing}."):
            raise UsageError(
                f"{label}: there is no module {missing!r}, expected a file in the working folder or an installed package"
            ) from error
        raise UsageError(f"{label}: importing {module} raised ModuleNotFoundError: {_join_lines(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{label}: importing {module} raised {type(error).__name__}: {_join_lines(error)}") from error
    for part in name.split("."):
        if not hasattr(target, part):
            public = [word for word in vars(target) if not word.startswith("_")] if hasattr(target, "__dict__") else []
            raise UsageError(f"{label}: {module} has no {name!r}{suggest(part, public)}")
        target = getattr(target, part)
    return target


def _join_lines(error: BaseException) -> str:
    return " ".join(str(error).split())
