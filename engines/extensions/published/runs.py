"""Published runs: overlays on a run's configuration, each with its sources, deviations and notes."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from fluvial.engines.errors import UsageError
from fluvial.engines.run.log.records import flatten
from fluvial.engines.run.renames import OBJECTIVES, has_field, rename

DATA = files("fluvial.engines.extensions.published") / "data"
COMMON = "common"  # file of the blocks that runs of several sources extend, and of the constants of every run of fluvial

# hardware: number of GPUs and its consequences. precision: dtypes. reward: a package, server or data set that does not
# come with fluvial. model: no adapter for the model or its condition. method: a setting that fluvial does not have.
Kind = Literal["hardware", "precision", "reward", "model", "method"]


class Citation(NamedTuple):
    """Source of settings: a file at a commit."""

    repo: str
    path: str
    commit: str
    note: str = ""


class Deviation(NamedTuple):
    """Setting that fluvial does not run as published, described by hand."""

    kind: Kind
    why: str
    published: Any = None  # None: see `PublishedRun.published`
    ours: Any = None  # None: the value in the configuration


class Setting(NamedTuple):
    """Value of the configuration."""

    value: Any
    source: Citation | None  # None: no source states the value, it is assumed


@dataclass(frozen=True)
class PublishedRun:
    """Published run, as an overlay on a run's configuration. Mappings have dotted names, e.g. `optimizer.lr`."""

    name: str  # project/model/task
    algorithm: str = ""  # as its authors write it
    paper: str = ""  # arXiv id; empty without a paper
    gpus: int = 0  # of the launcher; 0 if not stated
    settings: Mapping[str, Setting] = field(default_factory=dict)  # values of the configuration
    published: Mapping[str, Any] = field(default_factory=dict)  # values in the words or unit of the source
    deviations: Mapping[str, Deviation] = field(default_factory=dict)  # settings that fluvial does not run as published
    unusual: tuple[str, ...] = ()  # behaviour of the source that no setting shows
    headline: Mapping[str, Any] = field(default_factory=dict)  # published result, hours, and their source

    @property
    def model(self) -> str:
        """Id of the base model on the Hub."""
        return str(self.settings["model"].value)

    @property
    def sources(self) -> list[Citation]:
        """Sources of the settings, each once."""
        return list(dict.fromkeys(setting.source for setting in self.settings.values() if setting.source is not None))

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Settings that the method fixes at the published value, so that a configuration has no field for them."""
        if "method.name" not in self.settings:
            return {}
        from fluvial.engines.methods.losses import KLConfig
        from fluvial.engines.methods.table import method_type
        from fluvial.engines.scoring.advantages import AdvantageConfig

        defaults = {"advantage": AdvantageConfig(), "kl": KLConfig()}  # behaviour of a method without these settings
        kind, values, of_run = method_type(self.settings["method.name"].value), dict[str, Any](), _list_run_settings()
        for name, setting in self.settings.items():
            *parents, last = name.split(".")
            if (parents or [last])[0] in of_run or has_field(kind, name.split(".")):
                continue
            owner: Any = kind
            for parent in parents:
                owner = getattr(owner, parent, None) or defaults.get(parent)
            if getattr(owner, last, None) == setting.value:
                values[name] = setting.value
        return values

    def build_overlay(self) -> dict[str, Any]:
        """Return the settings nested as in a run's config.json, without those that the method fixes."""
        record, fixed, names = dict[str, Any](), self.fixed, _list_run_settings()
        for name, setting in self.settings.items():
            if name in fixed:
                continue
            *parents, last = name.split(".")
            table = record if (parents or [last])[0] in names else record.setdefault("method", {})
            for parent in parents:
                table = table.setdefault(parent, {})
            table[last] = setting.value
        return record


@cache
def _list_run_settings() -> frozenset[str]:
    """Return the names of a run's settings outside of its method."""
    from fluvial.engines.run.config import TrainConfig  # imports torch, which listing the runs does not need

    return frozenset(each.name for each in fields(TrainConfig))


@cache
def load_published() -> Mapping[str, PublishedRun]:
    """Return all published runs by name, source by source."""
    shared = _read(COMMON)["block"]
    names = sorted(entry.name for entry in DATA.iterdir() if entry.name.endswith(".toml"))
    return {run.name: run for name in names for run in _parse_runs(_read(name.removesuffix(".toml")), shared)}


@cache
def load_constants() -> Mapping[str, Any]:
    """Return the settings that are the same in every run of fluvial, by the names that published runs have for them."""
    constants: dict[str, Any] = _read(COMMON)["always"]
    return constants


def find_run(name: str) -> PublishedRun:
    """Return the published run of a name.

    Raises:
        UsageError: no run has this name; the message suggests the nearest one.
    """
    runs = load_published()
    if name in runs:
        return runs[name]
    near = difflib.get_close_matches(name, runs, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"there is no published run {name!r}{hint} (fluvial runs lists all {len(runs)})")


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


def _parse_runs(table: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[PublishedRun]:
    """Yield the runs of a file; each extends blocks of the file, and `shared` ones."""
    blocks = {**shared, **table.get("block", {})}
    for name, entry in table.get("run", {}).items():
        run, source = PublishedRun(name), None
        for part in _expand_blocks(entry, blocks):
            source = _inherit_source(part.get("source", {}), source)
            run = _extend(run, part, source)
        yield _rename_settings(run)


def as_flag(name: str) -> str:
    """Return the dotted name of a setting's flag: settings of the method have no `method.` before them."""
    return name if name == "method.name" else name.removeprefix("method.")


def _rename_settings(run: PublishedRun) -> PublishedRun:
    """Return a run with the current names of its settings; the files have the names that were first recorded."""
    stated = run.settings.get("objective.name")
    method = "" if stated is None else OBJECTIVES.get(stated.value, stated.value)
    settings = {as_flag(rename(name, method)): setting for name, setting in run.settings.items()}
    if stated is not None:
        settings["method.name"] = Setting(method, stated.source)
    published, deviations = (
        {as_flag(rename(name, method)): setting for name, setting in table.items()}
        for table in (run.published, run.deviations)
    )
    return replace(run, settings=settings, published=published, deviations=deviations)


def _expand_blocks(entry: Mapping[str, Any], blocks: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the blocks that an entry extends, the most general first, and the entry."""
    for name in entry.get("extends", ()):
        yield from _expand_blocks(blocks[name], blocks)
    yield entry


def _inherit_source(stated: Mapping[str, str], inherited: Citation | None) -> Citation | None:
    """Return the source of a block; without a repository it changes parts of the inherited source."""
    if "repo" in stated:
        return Citation(**stated)
    return None if inherited is None else inherited._replace(**stated)


def _extend(run: PublishedRun, part: Mapping[str, Any], source: Citation | None) -> PublishedRun:
    """Return a run updated with the values of a block."""
    settings = dict(run.settings)
    for table, origin in (("assumed", None), ("settings", source)):
        for path, value in flatten(part.get(table, {})).items():
            if origin is None and path in settings and settings[path].source is not None:
                continue  # a stated value goes before an assumed one
            union, _, last = path.rpartition(".")
            if last in ("kind", "name") and path in settings and settings[path].value != value:
                # Another variant of a union has other fields.
                settings = {other: setting for other, setting in settings.items() if not other.startswith(f"{union}.")}
            settings[path] = Setting(value, origin)
    deviations = {path: Deviation(**setting) for path, setting in part.get("deviations", {}).items()}
    return replace(
        run,
        settings=settings,
        published={**run.published, **part.get("published", {})},
        deviations={**run.deviations, **deviations},
        unusual=(*run.unusual, *part.get("unusual", ())),
        headline={**run.headline, **part.get("headline", {})},
        **{name: part[name] for name in ("algorithm", "paper", "gpus") if name in part},
    )
