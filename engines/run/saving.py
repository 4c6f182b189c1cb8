"""Checkpoints of a run: their writing, their contents besides the engine's state, and the checks of a resumption."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import optree
import torch
from rich.console import Console
from torch import Tensor

from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.config import EngineConfig, lr_factor
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import LostProcessError, RunError, UsageError
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.log.records import flatten
from fluvial.engines.run.metrics import PHASES, list_versions
from fluvial.engines.run.monitoring.diagnostics import EvaluationPoint, find_best
from fluvial.engines.run.prefetch import PREFIX, RolloutPrefetcher
from fluvial.engines.run.record import PathFinder, as_record, read_record, with_absolute_paths
from fluvial.engines.run.renames import migrate
from fluvial.engines.run.run import Run
from fluvial.models.device import describe_processor
from fluvial.models.lora import describe_lora

NEVER = -1  # `saved_at` before the first checkpoint
NETWORK = "network."  # prefix of the state of a second trained network
SHARDING = tuple(f"engine.{each.name}" for each in fields(EngineConfig))  # settings that change only the bits of an update
# Settings that may change between the start of a run and its resumption.
FREE = {
    *("out", "prompts", "pipeline.weights", "updates", "tracker", "resume", "evaluation", "checkpoint", "export"),
    *(*SHARDING, "engine.timeout", "rollout.max_invalid"),
    *("rollout.source", "rollout.servers", "rollout.store"),  # origin of the samples
}


@dataclass
class Progress:
    """Counters of a run, part of every checkpoint."""

    samples: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    max_log_ratio: float = 0.0  # largest |log ratio| of a first pass
    before: dict[str, Any] | None = None  # scores of the evaluation before training
    rewards: dict[str, list[float]] = field(default_factory=dict)  # latest rewards of each prompt
    state: dict[str, list[float]] = field(default_factory=dict)  # numbers of the method, by name
    evaluations: list[EvaluationPoint] = field(default_factory=list)  # during the run, see `find_gaming`
    recent: list[float] = field(default_factory=list)  # mean reward of each rollout since the last evaluation
    multipliers: dict[str, float] = field(default_factory=dict)  # of rewards with a floor, see `update_multipliers`


class Saver:
    """Writer and reader of the checkpoints of a run.

    Args:
        run: the run, whose networks are saved.
        base: fingerprint of the weights that training starts from.
        console: console for reports of failed background checkpoints and changed environments; None is silent.
        ahead: prefetcher whose rollouts are part of checkpoints.
    """

    def __init__(self, run: Run, base: str, *, console: Console | None, ahead: RolloutPrefetcher | None) -> None:
        self.config, self.engine, self.world, self.console = run.config, run.engine, run.world, console
        self.trained, self.pairs = run.networks.trained, list(run.pairs)
        self.prompts, self.base, self.ahead = digest_prompts(run.job.prompts), base, ahead
        self.saved_at = NEVER
        self.background = self.world.background() if self.config.checkpoint.background else None
        self.pending: Future[Any] | None = None

    def save(self, progress: Progress, *, blocking: bool = False, ends: bool = False) -> None:
        """Write a checkpoint, unless this update already has one; in the background with `checkpoint.background`.

        Args:
            blocking: write it in the foreground.
            ends: the process ends soon, perhaps before prefetched rollouts are complete: write one without them first.
        """
        self.wait(progress)
        if self.saved_at == self.engine.updates:
            return
        if not ends or self.ahead is None or not self.ahead.requested:
            self._write(progress, blocking=blocking, ahead=self.ahead)
            return
        self._write(progress, blocking=True)
        try:
            self._write(progress, blocking=True, ahead=self.ahead)
        except RunError as error:
            if isinstance(error, LostProcessError) or (self.world.size > 1 and not error.on_all_ranks):
                raise
            self._say(f"{error}: update {self.engine.updates} is saved; on resume, rollouts made ahead are generated again")

    def save_alone(self, progress: Progress) -> None:
        """Write a checkpoint without prefetched rollouts; a resumption generates them again."""
        if self.saved_at != self.engine.updates:
            self._write(progress, blocking=True)

    def _write(self, progress: Progress, *, blocking: bool, ahead: RolloutPrefetcher | None = None) -> None:
        """Write a checkpoint to the configured storage or, if that fails, to the run folder."""
        update = self.engine.updates
        meta = {
            "engine": self.engine.counters(),
            "networks": {name: engine.counters() for name, engine in self.trained.items()},
            **asdict(progress),
            "runs_on": self._describe_environment(),
            "run": as_record(with_absolute_paths(self.config)),
            "lora": describe_lora(self.engine.module),  # enough to export the checkpoint without the run folder
        }
        fingerprint = fingerprint_run(self.config, self.prompts, self.base)
        options: dict[str, Any] = {"update": update, "fingerprint": fingerprint, "keep": self.config.checkpoint.keep}
        best = find_best(progress.evaluations)
        if self.config.evaluation.stop_when_gamed and best is not None:
            options["spare"] = best.update
        state = self.state()
        if self.ahead is not None:
            tensors, meta["ahead"] = ({}, {}) if ahead is None else ahead.state()
            state = {**state, **tensors}
        folder, *fallback = self.config.checkpoint_folders
        try:
            if self.background is None or blocking:
                checkpoint.save(folder, state, meta, **options, world=self.world)
                self._remove_fallbacks()
            else:
                self.pending = checkpoint.save_async(folder, state, meta, **options, world=self.background)
        except RunError as error:
            if not fallback or (self.world.size > 1 and not error.on_all_ranks):
                raise
            saved = checkpoint.save(fallback[0], state, meta, **options, world=self.world)
            self._say(f"{error}; weights and state are in {saved}")
        self.saved_at = update

    def wait(self, progress: Progress) -> None:
        """Wait until the background checkpoint is complete; if it failed, write one of the current state.

        Raises:
            RunError: neither could be written.
        """
        if self.pending is None:
            return
        saving, self.pending = self.pending, None
        try:
            saving.result()
            self._remove_fallbacks()
        except RunError as error:
            self.saved_at = NEVER
            self.save(progress, blocking=True)
            self._say(f"{error}; saved after update {self.engine.updates} instead")

    def _remove_fallbacks(self) -> None:
        """Remove older checkpoints that went to the run folder because the storage had failed."""
        if self.world.is_main:
            for folder in self.config.checkpoint_folders[1:]:
                checkpoint.remove_all(folder)

    def _say(self, line: str) -> None:
        if self.console:
            self.console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Wait for a pending checkpoint."""
        if self.pending is not None:
            wait([self.pending])

    def restore(self, path: Path | str) -> Progress:
        """Load a checkpoint into the engine, and return the counters of the run.

        The run then continues to the same bits as without the interruption.

        Raises:
            UsageError: the checkpoint is of another run, or more updates than planned would raise the learning rate again.
            RunError: the checkpoint is damaged.
        """
        state = optree.tree_map(torch.empty_like, self.state())
        fingerprint = fingerprint_run(self.config, self.prompts, self.base)
        requested: dict[str, Tensor] = {}
        if self.ahead is not None:  # only the checkpoint knows the shapes of its rollouts
            requested, _ = checkpoint.read(path, lambda name: name.startswith(PREFIX), world=self.world)
        manifest = checkpoint.read_manifest(path, world=self.world)
        saved, run = flatten(migrate(manifest["fingerprint"])), manifest["meta"]["run"]
        if newer := fingerprint.keys() - saved.keys():  # settings that did not exist yet: the run had their defaults
            defaults = flatten(as_record(with_absolute_paths(read_record(run))))
            saved |= {name: defaults[name] for name in newer & defaults.keys()}
        finder = PathFinder(Path(run["out"]), self.config.out)
        changed = {name: saved[name] for name, value in fingerprint.items() if name in saved and saved[name] != value}
        fingerprint |= {name: value for name, value in changed.items() if finder.is_same(name, value, fingerprint[name])}
        planned = saved.get("updates")
        if planned is not None:
            fingerprint["updates"] = planned
        meta: dict[str, Any] = checkpoint.load(
            path, {**state, **requested}, fingerprint=fingerprint, saved=saved, world=self.world
        )
        replanned = self._is_replanned(meta["run"]["updates"], done=meta["engine"]["updates"])
        self.engine.restore(state, meta["engine"])
        for name, engine in self.trained.items():
            prefix = f"{NETWORK}{name}."
            network_state = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
            engine.restore(network_state, meta["networks"][name])
        if self.ahead is not None:
            self.ahead.restore(requested, meta["ahead"])
        self.saved_at = self.engine.updates
        done, total = self.engine.updates, self.config.updates
        if done > total:
            self._say(
                f"{path} has {done} updates, more than `updates` {total}: nothing to train, its weights are evaluated and "
                "exported"
            )
        elif replanned:
            self._say(f"updates is {total} now: from here the learning rate follows the schedule of {total} updates")
        now, then = self._describe_environment(), meta["runs_on"]
        differing = [f"{name} {was} then, {now.get(name)} now" for name, was in then.items() if now.get(name) != was]
        if differing:
            self._say(f"resumed with {', '.join(differing)}: bits may differ")
        self._say(f"resumed {path} after update {self.engine.updates}")
        counters = {name: meta[name] for name in asdict(Progress()) if name in meta}
        return Progress(**{**counters, "evaluations": [EvaluationPoint(*point) for point in counters["evaluations"]]})

    def state(self) -> dict[str, Tensor]:
        """Return the state of all trained networks; keys of a second network begin with its name."""
        others = {
            f"{NETWORK}{name}.{key}": tensor
            for name, engine in self.trained.items()
            for key, tensor in engine.state().items()
        }
        return {**self.engine.state(), **others}

    def _is_replanned(self, planned: int, *, done: int) -> bool:
        """Return whether the learning rate from here on differs from the schedule of `planned` updates.

        Raises:
            UsageError: there are more updates than planned, and the learning rate would differ.
        """
        total, optimizer = self.config.updates, self.config.optimizer
        was, now = lr_factor(self.engine.optimizer, optimizer, updates=planned)(done), self.engine.lr_factor(done)
        if was != now and total > planned:
            raise UsageError(
                "updates",
                total,
                f"at most {planned}",
                f"the learning rate was planned for {planned} updates, and would go from {optimizer.lr * was:g} to "
                f"{optimizer.lr * now:g}; to train longer, start another run with `model` set to the folder of this one",
            )
        return was != now

    def _describe_environment(self) -> dict[str, Any]:
        """Return the machine and versions that the bits of a run depend on, with the numbers of pairs chosen there."""
        chosen = {"update_micro_batch": self.pairs} if self.pairs else {}
        return {**describe_machine(self.config, self.world), **chosen}


@collective
def read_micro_batch(path: Path | str, world: World) -> int:
    """Return the number of samples per forward pass that a checkpoint's run has."""
    recorded: int = flatten(migrate(checkpoint.read_manifest(path, world=world)["fingerprint"]))["engine.micro_batch"]
    return recorded


def describe_machine(config: TrainConfig, world: World) -> dict[str, Any]:
    """Return the machine, the versions and the engine that the bits of a run depend on."""
    engine = {name: getattr(config.engine, name.partition(".")[2]) for name in SHARDING}
    return {
        **list_versions(),
        "processor": describe_processor(world.device),
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        **engine,
    }


def fingerprint_run(config: TrainConfig, prompts: str, base: str) -> dict[str, Any]:
    """Return the settings and digests that a resumption must share with the run.

    Args:
        prompts: digest of its prompts, see `digest_prompts`.
        base: digest of its base weights.
    """
    settings = {name: value for name, value in flatten(as_record(with_absolute_paths(config))).items() if not _is_free(name)}
    if config.optimizer.schedule != "constant":
        settings["updates"] = config.updates
    return {**settings, "train_prompts": prompts, "base_weights": base}


def digest_prompts(prompts: Iterable[Prompt]) -> str:
    """Return a digest of prompts, in their order."""
    digest, separator = hashlib.sha256(), ""
    for prompt in prompts:
        digest.update(f"{separator}{(str(prompt.model_input), prompt.source, prompt.weight, prompt.negative)!r}".encode())
        separator = "\n"
    return digest.hexdigest()[:16]


def _is_free(name: str) -> bool:
    """Return whether a setting, or its group of settings, may change."""
    parts = name.split(".")
    return any(".".join(parts[:depth]) in FREE for depth in (1, 2))
