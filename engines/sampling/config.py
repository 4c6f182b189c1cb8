"""Settings of a method's sampling, and of where a run generates rollouts: in process, ahead of updates, or on servers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fluvial.core import correction
from fluvial.core.checks import BATCH, STEPS, check_fields
from fluvial.core.random import Key
from fluvial.core.transitions import SAMPLERS, Sampler
from fluvial.engines import plugins
from fluvial.engines.choices import refuse_unused
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.sampling.generate import Guidance, move_schedule
from fluvial.engines.sampling.samplers import Ode, SamplerChoice, Stochastic, isolate
from fluvial.engines.sampling.solvers import deterministic_step
from fluvial.engines.sampling.tail import NO_TAIL
from fluvial.engines.sampling.window import AllSteps, Window
from fluvial.models import DiffusionModel, Prediction, Schedule
from fluvial.models.step_cache import NoCache, StepCacheChoice


@dataclass(frozen=True)
class NoCorrection:
    """No correction: rollout and update compute the same numbers, so the first ratio is exactly 1."""

    kind: ClassVar[Literal["none"]] = "none"


@dataclass(frozen=True)
class Truncate:
    """Importance weights for a rollout with another precision, engine or weights than the update.

    The update recomputes the old log-probabilities, with one more forward pass, and weights each pair by their density
    ratio to the rollout's, truncated at the threshold (see `core.correction`).

    Args:
        level: Scope of a ratio: a step, or a whole trajectory.
        threshold: Bound of the density ratio, near 1 with reduction mean, where the ratio is per dimension.
    """

    kind: ClassVar[correction.Mode] = "truncate"
    level: correction.Level = "step"
    threshold: float = 1.01

    def __post_init__(self) -> None:
        check_fields(self, "correction", threshold=(1, 1e30))


@dataclass(frozen=True)
class Reject(Truncate):
    """Importance weights that are 0 for ratios beyond the threshold."""

    kind: ClassVar[correction.Mode] = "reject"


@dataclass(frozen=True)
class Mask(Truncate):
    """Weight 0 for pairs whose ratio is beyond the threshold, 1 for the others."""

    kind: ClassVar[correction.Mode] = "mask"


Correction = NoCorrection | Truncate | Reject | Mask


REPLAYED = "replayed:"  # prefix of a source of stored rollouts


@dataclass(frozen=True)
class ServersConfig:
    """Client settings for the servers of `rollout.source`.

    Args:
        timeout: Time limit of a request in seconds, from connecting to the last byte of the reply.
        patience: Seconds without a reply from any server after which the run ends; at most 10 before the first reply.
        in_flight: Maximum number of concurrent requests, per server and process.
        most_mb: Maximum size of a reply, in megabytes.
        key_env: Environment variable with the servers' API key. Empty sends none.
        admin_env: Environment variable with the key of the endpoints that change weights. Empty uses `key_env`.
        weights: How servers get the weights after an update: auto (a LoRA as its file, all weights in a folder), disk
            (always all weights in a folder), shared_memory (a LoRA, or all weights, in buckets that `fluvial serve` on this
            machine reads), or broadcast (the same, sent over the network to `fluvial serve` on any machine).
        weights_folder: Folder for these files, visible to trainer and servers; by default in this machine's shared memory.
        weights_verify: Compare the checksum of a server's weights with the trainer's. Set False for a server that fuses or
            renames layers, because its checksum differs.
        tolerance: Largest |difference| between a server's and the trainer's log-probability of a step; servers beyond it
            are dropped.
    """

    timeout: float = 600.0
    patience: float = 300.0
    in_flight: int = 8
    most_mb: int = 1024
    key_env: str = ""
    admin_env: str = ""
    weights: Literal["auto", "disk", "shared_memory", "broadcast"] = "auto"
    weights_folder: Path | None = None
    weights_verify: bool = True
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        seconds, count = {"timeout": (1e-3, 1e6), "patience": (0, 1e6)}, {"in_flight": (1, 1024), "most_mb": (1, 2**20)}
        check_fields(self, "rollout.servers", **seconds, **count, tolerance=(0, math.inf))


@dataclass(frozen=True)
class AllGroups:
    """All groups of a rollout, unfiltered."""

    kind: ClassVar[str] = "all"

    def problems(self, sampling: Any) -> Iterator[UsageError]:
        """Yield conflicts with the other sampling settings."""
        yield from ()

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch of a run."""
        return run.sample(key)


@dataclass(frozen=True)
class RefilledGroups:
    """Flat groups, whose samples have equal rewards, are replaced by groups of other prompts (DAPO, arXiv 2503.14476).

    Groups that are still flat after the last round contribute nothing to the loss, but count in its denominator.

    Args:
        rounds: Maximum number of rounds; each samples one new group per flat group.
        floor: Largest standard deviation of the weighted reward in a flat group.
    """

    kind: ClassVar[str] = "refilled"
    rounds: int = 3
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "sampling.groups", rounds=(1, 1024), floor=(0, 1e30))

    def problems(self, sampling: Any) -> Iterator[UsageError]:
        """Yield conflicts with the other sampling settings."""
        if sampling.group < 2:
            yield UsageError("sampling.group", sampling.group, "at least 2", "a single sample is always flat")
        if sampling.window.draw == "call":
            hint = "new samples are generated in other micro-batches, which would change their window"
            yield UsageError("sampling.window.draw", "call", "rollout, group, sample or run", hint)

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch of a run, with flat groups replaced."""
        return run.fill(run.sample(key), key, rounds=self.rounds, floor=self.floor)


@dataclass(frozen=True)
class ScoutedGroups:
    """The best and the worst of many initial noises per prompt, ranked by few-step samples (Sol-RL, arXiv 2604.06916).

    Half of a group starts from the best noises, half from the worst. These samples take all steps and are scored again.

    Args:
        scouts: Number of initial noises per prompt.
        steps: Number of steps of the samples that rank the noises.
    """

    kind: ClassVar[str] = "scouted"
    scouts: int = 96
    steps: int = 6

    def __post_init__(self) -> None:
        check_fields(self, "sampling.groups", scouts=(2, BATCH[1]), steps=STEPS)

    def problems(self, sampling: Any) -> Iterator[UsageError]:
        """Yield conflicts with the other sampling settings."""
        if sampling.group % 2 or sampling.group > self.scouts:
            expected = f"an even number, at most the {self.scouts} of `sampling.groups.scouts`"
            yield UsageError("sampling.group", sampling.group, expected, "half of a group is the best, half the worst")
        if sampling.sampler.eta or not sampling.sampler.is_deterministic:
            hint = "the initial noise of a scout predicts little about a sample with noise in its steps"
            yield UsageError("sampling.sampler", sampling.sampler.kind, "ode", hint)
        if self.steps > sampling.steps:
            yield UsageError("sampling.groups.steps", self.steps, f"at most the {sampling.steps} of `sampling.steps`")

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch of a run, started from the initial noises with the best and the worst scouts."""
        count = run.config.method.sampling.group // 2
        starts = run.find_extremes(run.score(run.sample(key, group=self.scouts, steps=self.steps)), count)
        return run.sample(key, starts=starts)  # no scout is referenced any more, so that their memory is free


# Selects the groups that are trained on: `groups.collect(run, key)` returns the next batch of a run.
Groups = AllGroups | RefilledGroups | ScoutedGroups


@dataclass(frozen=True)
class ReadingConfig:
    """Batch size, schedule and guidance of a method that trains on a dataset.

    Args:
        prompts: Number of groups per batch.
        group: Number of samples per group, which are compared with each other if the method compares samples.
        steps: Number of steps of the schedule, in training and in evaluation.
        guidance: Classifier-free guidance, the same in update and evaluation.
    """

    prompts: int = 8
    group: int = 1
    steps: int = 10
    guidance: Guidance = Guidance()
    shared_noise: ClassVar[bool] = False
    sampler: ClassVar[SamplerChoice] = Ode()
    window: ClassVar[Window] = AllSteps()
    groups: ClassVar[Groups] = AllGroups()

    def __post_init__(self) -> None:
        check_fields(self, "sampling", prompts=BATCH, group=BATCH, steps=STEPS)
        if self.batch > BATCH[1]:
            hint = f"with groups of {self.group} it makes {self.batch:,} samples per batch"
            raise UsageError("sampling.prompts", self.prompts, f"at most {BATCH[1] // self.group}", hint)

    @cached_property
    def batch(self) -> int:
        """Number of samples per batch."""
        return self.prompts * self.group

    def bound_sampler(self, levels: Tensor, prediction: Prediction = "velocity") -> Sampler:
        """Return the sampler with its hyper-parameters bound, for a schedule of T+1 noise levels."""
        if self.sampler.is_deterministic:
            return deterministic_step(prediction)
        if self.sampler.kind in SAMPLERS:
            return self.sampler.rule.bind(self.sampler.eta, levels)
        return isolate(self.sampler.rule.bind(self.sampler.eta, levels.clone()))


@dataclass(frozen=True)
class CleanSamplingConfig(ReadingConfig):
    """How rollouts are sampled, for a method that trains on clean samples.

    Args:
        prompts: Number of prompts per rollout.
        group: Number of samples per prompt, which are compared with each other.
        guidance: Classifier-free guidance of every step, the same in rollout, update and evaluation.
        shared_noise: Start all samples of a group from the same noise (DanceGRPO, arXiv 2505.07818), so that they differ
            only in the noise of their steps.
        sampler: Sampler of the steps.
        groups: Which groups are trained on.
    """

    group: int = 16
    shared_noise: bool = False  # type: ignore[misc]
    sampler: SamplerChoice = Ode()  # type: ignore[misc]
    groups: Groups = AllGroups()  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_noise and self.group > 1 and self.sampler.is_deterministic and not self.sampler.eta:
            hint = f"{self.sampler.kind} takes no noise: all samples of a group are equal"
            raise UsageError("sampling.shared_noise", True, "False", hint)
        for problem in self.groups.problems(self):
            raise problem


@dataclass(frozen=True)
class SamplingConfig(CleanSamplingConfig):
    """How rollouts are sampled, for a method that trains on recorded steps.

    Args:
        window: Which steps take noise; the others are ODE steps.
    """

    sampler: SamplerChoice = Stochastic()  # type: ignore[misc]
    window: Window = AllSteps()  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.window.check(self.steps, self.group)
        sampler, window = self.sampler, self.window
        if sampler.is_deterministic and window.share_prefix:
            hint = f"{sampler.kind} takes no noise: all samples of a group are equal"
            raise UsageError("sampling.window.share_prefix", True, "False", hint)
        if sampler.is_deterministic and (window.tail != NO_TAIL or window.is_tree):
            raise UsageError("sampling.window", window.kind, "all", f"{sampler.kind} has no stochastic steps")
        if self.shared_noise and window.is_tree:
            raise no_effect("sampling.shared_noise", f"with `sampling.window` {window.kind}")


@dataclass(frozen=True)
class RolloutConfig:
    """Where, when and in which precision rollouts are generated.

    Args:
        ahead: Number K of rollouts that are generated ahead: rollout j uses the weights trained on rollouts 0 to j - K - 1,
            whatever the timing. 0 generates each rollout with the current weights. Above 0, samples come from
            `rollout.source`, or from a second copy of the network in this process; methods with ratios of log-probabilities
            need `correction`.
        reuse: What is computed once for all steps of a rollout: none; exact (layers that see only the prompt, such as keys
            and values of cross-attention, and weights that an update merges as well; the bits stay the same); or merged
            (also the sum of each frozen weight and its adapter, in the weight's dtype: fewer launches, a copy of the adapted
            weights, and other numbers than the update's, so that ratios need `correction` unless computed in float32).
        step_cache: What deterministic steps reuse from earlier ones: outputs of blocks, or the unconditional half of
            guidance. Recorded steps are computed in full.
        autocast: Compute the rollout in bfloat16 under torch's autocast; its numbers then differ from the update's.
        source: Where samples are generated: empty (in the trainer's process), comma-separated addresses of servers
            (http://HOST:PORT,http://HOST:PORT, each a `fluvial serve` or an sglang diffusion server), or replayed:FOLDER
            (read from the stored rollouts of a run with the same seed, prompts and sampling).
        servers: Client settings for these servers.
        store: Folder that every rollout is written to, for replayed:FOLDER: images, recorded steps, log-probabilities, and
            the version of the weights; None stores nothing.
        max_log_ratio: Largest |log ratio| of a first pass, in the unit of the log-probability. Above it the run stops,
            because rollout and update compute different policies.
        max_invalid: Largest fraction of a rollout's groups, or of an evaluation's samples, that may be dropped because a
            reward raised or returned NaN. Above it the run stops.
    """

    ahead: int = 0
    reuse: Literal["none", "exact", "keys", "merged"] = "exact"
    step_cache: StepCacheChoice = NoCache()
    autocast: bool = False
    source: str = ""
    servers: ServersConfig = ServersConfig()
    store: Path | None = None
    max_log_ratio: float = 1e-3
    max_invalid: float = 0.25

    def __post_init__(self) -> None:
        check_fields(self, ahead=(0, 64), max_log_ratio=(0, 1e30), max_invalid=(0, 0.999))
        served = self.is_served or not self.scheme.startswith("http")
        if self.source and not (
            served and self.scheme in plugins.list_names("sources") and self.source != f"{self.scheme}:"
        ):
            expected = f"addresses of servers, separated by commas (http://HOST:PORT), {REPLAYED}FOLDER, or nothing"
            raise UsageError("rollout.source", self.source, expected, "without a source the trainer's process samples")
        refuse_unused(self, "rollout.")
        if self.is_served and self.reuse in ("keys", "merged"):
            hint = "servers merge adapters as they are configured" if self.reuse == "merged" else "servers keep no keys"
            raise UsageError("rollout.reuse", self.reuse, "exact", hint)
        if self.is_served and self.step_cache != NoCache():
            raise UsageError("rollout.step_cache", self.step_cache.kind, "none", "servers have no step cache")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        if not self.is_served:
            yield "servers", "without servers in `rollout.source`"
        for name in ("store", "ahead", "reuse") if self.source.startswith(REPLAYED) else ():
            yield name, "with rollouts that are stored already"

    @property
    def scheme(self) -> str:
        """Scheme of the source (before its first colon): http, https, replayed, or one of an installed package."""
        return self.source.partition(":")[0]

    @cached_property
    def is_served(self) -> bool:
        """Whether servers generate the samples."""
        urls = self.source.split(",")
        return all(url.startswith(("http://", "https://")) for url in urls)

    def check_sampling(self, sampling: ReadingConfig) -> None:
        """Raise UsageError for sampling settings that servers do not support."""
        sampler = sampling.sampler
        if not self.is_served:
            return
        if sampler.solver != "euler":
            raise UsageError("sampling.sampler.solver", sampler.solver, "euler", "servers return only Euler's latents")
        if sampling.window.noise_of() is not None:
            hint = "a server draws the noise of every sample from its own id"
            raise UsageError("sampling.window", sampling.window.kind, "another than splits or candidates", hint)
        if sampler.kind not in SAMPLERS:
            hint = "servers have only the built-in samplers"
            raise UsageError("sampling.sampler", sampler.kind, f"one of {', '.join(SAMPLERS)}", hint)


class Schedules:
    """Schedule and sampler per sample shape, because some models shift the noise levels with the size."""

    def __init__(self, model: DiffusionModel, sampling: ReadingConfig, device: torch.device) -> None:
        self.model, self.sampling, self.device = model, sampling, device
        self._known: dict[tuple[int, ...], tuple[Schedule, Sampler]] = {}

    def of(self, shape: tuple[int, ...]) -> tuple[Schedule, Sampler]:
        """Return the schedule for a sample shape, with timesteps on the device, and the sampler bound to its levels."""
        if shape not in self._known:
            schedule = move_schedule(self.model.schedule(self.sampling.steps, shape), self.device)
            self._known[shape] = schedule, self.sampling.bound_sampler(schedule.levels, self.model.prediction)
        return self._known[shape]
