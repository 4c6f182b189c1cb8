"""Checkpoints of a run: when one is written, what it holds besides the engine's state, and what a resumption must match."""

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
from fluvial.engines.run.log.records import flat
from fluvial.engines.run.metrics import PHASES, versions
from fluvial.engines.run.monitoring.diagnostics import EvaluationPoint, best_of
from fluvial.engines.run.prefetch import PREFIX, RolloutPrefetcher
from fluvial.engines.run.record import Finder, as_record, read_record, with_absolute_paths
from fluvial.engines.run.renames import migrate
from fluvial.engines.run.run import Run
from fluvial.models.device import describe_processor
from fluvial.models.lora import describe_lora

# Settings that may change between the start of a run and its resumption.
NEVER = -1  # update of no checkpoint
NETWORK = "network."  # prefix of the state of a network that learns beside the policy
SHARDING = tuple(f"engine.{each.name}" for each in fields(EngineConfig))  # what changes the bits of an update, and no more
FREE = {
    *("out", "prompts", "pipeline.weights", "updates", "tracker", "resume", "evaluation", "checkpoint", "export"),
    *(*SHARDING, "engine.timeout", "rollout.max_invalid"),
    *("rollout.source", "rollout.servers", "rollout.store"),  # where samples come from
}


@dataclass
class Progress:
    """Counters of a run; they are saved with every checkpoint."""

    samples: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    max_log_ratio: float = 0.0  # largest |log ratio| of a first pass
    before: dict[str, Any] | None = None  # scores of the evaluation before training
    rewards: dict[str, list[float]] = field(default_factory=dict)  # last rewards of each prompt, see `PromptStatistics`
    state: dict[str, list[float]] = field(default_factory=dict)  # numbers of the method's own
    evaluations: list[EvaluationPoint] = field(default_factory=list)  # during the run, see `gaming`
    recent: list[float] = field(default_factory=list)  # mean reward of each rollout since the last of them
    multipliers: dict[str, float] = field(default_factory=dict)  # of rewards with a floor, see `scoring.floors`


class Saver:
    """Writes and reads the checkpoints of a run.

    Args:
        run: the run, whose networks are saved.
        base: fingerprint of the weights that training starts from.
        console: where a failed background checkpoint and a changed environment are reported; None is silent.
        ahead: rollouts ahead of the updates, which a checkpoint holds too.
    """

    def __init__(self, run: Run, base: str, *, console: Console | None, ahead: RolloutPrefetcher | None) -> None:
        self.config, self.engine, self.world, self.console = run.config, run.engine, run.world, console
        self.trained, self.pairs = run.networks.trained, list(run.pairs)
        self.prompts, self.base, self.ahead = digest_prompts(run.job.prompts), base, ahead
        self.saved_at = NEVER
        self.background = self.world.background() if self.config.checkpoint.background else None
        self.pending: Future[Any] | None = None

    def save(self, progress: Progress, *, blocking: bool = False, ends: bool = False) -> None:
        """Write a checkpoint, unless this update already has one; in the background if the run is configured so.

        Args:
            blocking: write it at once.
            ends: the process ends soon, perhaps before rollouts made ahead are there: write what is finished first.
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
            self._say(f"{error}: update {self.engine.updates} is saved, and rollouts made ahead are made again on resume")

    def save_alone(self, progress: Progress) -> None:
        """Write a checkpoint without rollouts made ahead, which are made again by a run that resumes from it."""
        if self.saved_at != self.engine.updates:
            self._write(progress, blocking=True)

    def _write(self, progress: Progress, *, blocking: bool, ahead: RolloutPrefetcher | None = None) -> None:
        """Write a checkpoint to the configured storage or, where that fails, to the run folder."""
        update = self.engine.updates
        meta = {
            "engine": self.engine.counters(),
            "networks": {name: engine.counters() for name, engine in self.trained.items()},
            **asdict(progress),
            "runs_on": self._environment(),
            "run": as_record(with_absolute_paths(self.config)),
            "lora": describe_lora(self.engine.module),  # with these it can be exported alone
        }
        fingerprint = run_fingerprint(self.config, self.prompts, self.base)
        written: dict[str, Any] = {"update": update, "fingerprint": fingerprint, "keep": self.config.checkpoint.keep}
        best = best_of(progress.evaluations)
        if self.config.evaluation.stop_when_gamed and best is not None:
            written["spare"] = best.update
        state = self.state()
        if self.ahead is not None:
            tensors, meta["ahead"] = ({}, {}) if ahead is None else ahead.state()
            state = {**state, **tensors}
        where, *instead = self.config.checkpoint_folders
        try:
            if self.background is None or blocking:
                checkpoint.save(where, state, meta, **written, world=self.world)
                self._remove_others()
            else:
                self.pending = checkpoint.save_async(where, state, meta, **written, world=self.background)
        except RunError as error:
            if not instead or (self.world.size > 1 and not error.on_all_ranks):
                raise
            saved = checkpoint.save(instead[0], state, meta, **written, world=self.world)
            self._say(f"{error}; weights and state are in {saved}")
        self.saved_at = update

    def wait(self, progress: Progress) -> None:
        """Wait until the background checkpoint is complete; if it failed, write one of the present state.

        Raises:
            RunError: neither could be written.
        """
        if self.pending is None:
            return
        saving, self.pending = self.pending, None
        try:
            saving.result()
            self._remove_others()
        except RunError as error:
            self.saved_at = NEVER
            self.save(progress, blocking=True)
            self._say(f"{error}; saved after update {self.engine.updates} instead")

    def _remove_others(self) -> None:
        """Remove the checkpoints that the run folder holds because the storage failed; a newer one is in the storage now."""
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
        """Load a checkpoint into the engine, and return what the run had counted.

        What follows is the same to the bit as in a run that was not interrupted.

        Raises:
            UsageError: it is of another run, or more updates than planned would raise the learning rate again.
            RunError: it is damaged.
        """
        state = optree.tree_map(torch.empty_like, self.state())
        fingerprint = run_fingerprint(self.config, self.prompts, self.base)
        requested: dict[str, Tensor] = {}
        if self.ahead is not None:  # whose shapes only the checkpoint knows
            requested, _ = checkpoint.read(path, lambda name: name.startswith(PREFIX), world=self.world)
        manifest = checkpoint.read_manifest(path, world=self.world)
        saved, run = flat(migrate(manifest["fingerprint"])), manifest["meta"]["run"]
        if newer := fingerprint.keys() - saved.keys():  # settings that the run that saved it could not have changed
            then = flat(as_record(with_absolute_paths(read_record(run))))
            saved |= {name: then[name] for name in newer & then.keys()}
        places = Finder(Path(run["out"]), self.config.out)
        known = {name: saved[name] for name, value in fingerprint.items() if name in saved and saved[name] != value}
        fingerprint |= {name: value for name, value in known.items() if places.same(name, value, fingerprint[name])}
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
        done, asked = self.engine.updates, self.config.updates
        if done > asked:
            self._say(f"{path} is after update {done}, and updates is {asked}: evaluate and export these weights")
        elif replanned:
            line = f"updates is {asked} now: from here the learning rate follows the schedule of {asked} updates"
            self._say(line)
        now, then = self._environment(), meta["runs_on"]
        changed = [f"{name} {was} then, {now.get(name)} now" for name, was in then.items() if now.get(name) != was]
        if changed:
            self._say(f"resumed with {', '.join(changed)}: bits may differ")
        self._say(f"resumed {path} after update {self.engine.updates}")
        known = {name: meta[name] for name in asdict(Progress()) if name in meta}
        return Progress(**{**known, "evaluations": [EvaluationPoint(*point) for point in known["evaluations"]]})

    def state(self) -> dict[str, Tensor]:
        """Return the state of every network that learns, that of another than the policy under its name."""
        others = {
            f"{NETWORK}{name}.{key}": tensor
            for name, engine in self.trained.items()
            for key, tensor in engine.state().items()
        }
        return {**self.engine.state(), **others}

    def _is_replanned(self, planned: int, *, done: int) -> bool:
        """Return whether the learning rate from here on is another one than that of the schedule of `planned` updates."""
        asked, optimizer = self.config.updates, self.config.optimizer
        was, now = lr_factor(self.engine.optimizer, optimizer, updates=planned)(done), self.engine.lr_factor(done)
        if was != now and asked > planned:
            raise UsageError(
                "updates",
                asked,
                f"at most {planned}",
                f"the learning rate was planned for {planned} updates, and would go from {optimizer.lr * was:g} to "
                f"{optimizer.lr * now:g}; to train longer, start another run with `model` set to the folder of this one",
            )
        return was != now

    def _environment(self) -> dict[str, Any]:
        """Return what the bits of a run depend on besides its settings, with the numbers of pairs that were chosen there."""
        chosen = {"update_micro_batch": self.pairs} if self.pairs else {}
        return {**runs_on(self.config, self.world), **chosen}


@collective
def read_micro_batch(path: Path | str, world: World) -> int:
    """Return the number of samples per forward pass of the run that a checkpoint is of."""
    recorded: int = flat(migrate(checkpoint.read_manifest(path, world=world)["fingerprint"]))["engine.micro_batch"]
    return recorded


def runs_on(config: TrainConfig, world: World) -> dict[str, Any]:
    """Return the machine, the versions and the engine that the bits of a run depend on."""
    engine = {name: getattr(config.engine, name.partition(".")[2]) for name in SHARDING}
    return {
        **versions(),
        "processor": describe_processor(world.device),
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        **engine,
    }


def run_fingerprint(config: TrainConfig, prompts: str, base: str) -> dict[str, Any]:
    """Return what a run that resumes from this one's checkpoints must have in common with it.

    Args:
        prompts: digest of its prompts, see `digest_prompts`.
        base: digest of its base weights.
    """
    settings = {name: value for name, value in flat(as_record(with_absolute_paths(config))).items() if not _is_free(name)}
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
    """Return whether a setting, or the group of settings that it is in, may change."""
    parts = name.split(".")
    return any(".".join(parts[:depth]) in FREE for depth in (1, 2))
