"""How the samples of a method are made, and where a run makes them: here, ahead of the updates, or on servers."""

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
from fluvial.engines.choices import check_variant, refuse_unused
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.sampling.generate import Guidance, on_device
from fluvial.engines.sampling.samplers import Ode, SamplerChoice, Stochastic, isolate
from fluvial.engines.sampling.solvers import deterministic_step
from fluvial.engines.sampling.tail import NO_TAIL
from fluvial.engines.sampling.window import AllSteps, Window
from fluvial.models import DiffusionModel, Prediction, Schedule
from fluvial.models.step_cache import NoCache, StepCacheChoice


@dataclass(frozen=True)
class NoCorrection:
    """Rollout and update are one program, whose ratio is exactly 1 at first."""

    kind: ClassVar[Literal["none"]] = "none"


@dataclass(frozen=True)
class Truncate:
    """Weights that correct for a rollout made by another program than the update (precision, engine or weights).

    The update then computes the old log-probabilities itself, with one more forward pass, and weights each pair by what
    `core.correction` makes of their difference to the rollout's: here the ratio of densities, bounded by the threshold.

    Args:
        level: What a ratio is taken over: a step, or a whole trajectory.
        threshold: Bound of the ratio of densities, per dimension if the log-probability's reduction is mean, so near 1.
    """

    kind: ClassVar[correction.Mode] = "truncate"
    level: correction.Level = "step"
    threshold: float = 1.01

    def __post_init__(self) -> None:
        check_fields(self, "correction", threshold=(1, 1e30))


@dataclass(frozen=True)
class Reject(Truncate):
    """The same, and a ratio beyond the threshold has weight 0."""

    kind: ClassVar[correction.Mode] = "reject"


@dataclass(frozen=True)
class Mask(Truncate):
    """Pairs whose ratio is beyond the threshold have weight 0, the others 1."""

    kind: ClassVar[correction.Mode] = "mask"


Correction = NoCorrection | Truncate | Reject | Mask


REPLAYED = "replayed:"  # first letters of a source of stored rollouts


@dataclass(frozen=True)
class ServersConfig:
    """How the servers that `rollout.source` names are asked.

    Args:
        timeout: Seconds that one request may take, from the connection to the last byte of the reply.
        patience: Seconds without a reply from any server after which the run ends; 10 at most until one has answered.
        in_flight: Largest number of requests at the same time, per server and process.
        most_mb: Largest reply, in megabytes.
        key_env: Environment variable with the API key of the servers. Empty sends none.
        admin_env: Environment variable with the key of the endpoints that change weights. Empty sends that of `key_env`.
        weights: How they are given the weights after an update: auto (a LoRA as its file, all weights in a folder), disk
            (always all weights in a folder), shared_memory (a LoRA, or all weights, in buckets that `fluvial serve` on this
            machine reads), or broadcast (the same, from memory to the memory of `fluvial serve` anywhere).
        weights_folder: Folder that trainer and servers see, for these files; by default one in this machine's shared memory.
        weights_verify: Compare the checksum of a server's weights with the trainer's. A server that fuses or renames layers
            has another one, and needs False.
        tolerance: Largest |difference| between a server's log-probability of a step and the trainer's own; a server that is
            farther off is left out.
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
    """Every sample of every group, as it is made."""

    kind: ClassVar[str] = "all"

    def problems(self, sampling: Any) -> Iterator[UsageError]:
        """Yield what has no meaning with the other settings of the samples."""
        yield from ()

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch of a run."""
        return run.sample(key)


@dataclass(frozen=True)
class RefilledGroups:
    """Flat groups, whose samples have equal rewards, are sampled again with other prompts (DAPO, arXiv 2503.14476).

    Groups that are flat after the last round add nothing to the loss, whose denominator stays.

    Args:
        rounds: Largest number of rounds; each samples as many groups as are flat.
        floor: A group is flat if the standard deviation of its weighted reward is no larger.
    """

    kind: ClassVar[str] = "refilled"
    rounds: int = 3
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "sampling.groups", rounds=(1, 1024), floor=(0, 1e30))

    def problems(self, sampling: Any) -> Iterator[UsageError]:
        """Yield what has no meaning with the other settings of the samples."""
        if sampling.group < 2:
            yield UsageError("sampling.group", sampling.group, "at least 2", "a single sample is always flat")
        if sampling.window.draw == "call":
            hint = "samples that are made again are generated with others, which would change their window"
            yield UsageError("sampling.window.draw", "call", "rollout, group, sample or run", hint)

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch of a run, with other groups in place of flat ones."""
        return run.fill(run.sample(key), key, rounds=self.rounds, floor=self.floor)


@dataclass(frozen=True)
class ScoutedGroups:
    """The best and the worst of many initial noises per prompt, by samples of fewer steps (Sol-RL, arXiv 2604.06916).

    Half of a group starts from the best noises, half from the worst. Its samples take all steps, and are scored again.

    Args:
        scouts: Number of initial noises per prompt.
        steps: Number of steps of the samples that choose among them.
    """

    kind: ClassVar[str] = "scouted"
    scouts: int = 96
    steps: int = 6

    def __post_init__(self) -> None:
        check_fields(self, "sampling.groups", scouts=(2, BATCH[1]), steps=STEPS)

    def problems(self, sampling: Any) -> Iterator[UsageError]:
        """Yield what has no meaning with the other settings of the samples."""
        if sampling.group % 2 or sampling.group > self.scouts:
            expected = f"an even number, at most the {self.scouts} of `sampling.groups.scouts`"
            yield UsageError("sampling.group", sampling.group, expected, "half of it are the best, half the worst")
        if sampling.sampler.eta or not sampling.sampler.is_deterministic:
            hint = "the initial noise of a scout says little of a sample with noise in its steps"
            yield UsageError("sampling.sampler", sampling.sampler.kind, "ode", hint)
        if self.steps > sampling.steps:
            yield UsageError("sampling.groups.steps", self.steps, f"at most the {sampling.steps} of `sampling.steps`")

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch of a run, from those initial noises whose scouts are the best and the worst."""
        count = run.config.method.sampling.group // 2
        starts = run.find_extremes(run.score(run.sample(key, group=self.scouts, steps=self.steps)), count)
        return run.sample(key, starts=starts)  # the scouts, and what they hold, are gone


# Which groups of a rollout are learnt from: `groups.collect(run, key)` returns the next batch of a run.
Groups = AllGroups | RefilledGroups | ScoutedGroups


@dataclass(frozen=True)
class ReadingConfig:
    """Which given samples a method learns from, and at which noise levels.

    Args:
        prompts: Number of groups per batch.
        group: Number of samples per group; each is compared with the others of its group, if any are.
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
class SamplingConfig(ReadingConfig):
    """How the samples of a batch are made.

    Args:
        prompts: Number of prompts per rollout.
        group: Number of samples per prompt; each is compared with the others of its group.
        steps: Number of steps of the schedule, in training and in evaluation.
        guidance: Classifier-free guidance of every step, the same in rollout, update and evaluation.
        shared_noise: The samples of a group start from the same noise (DanceGRPO, arXiv 2505.07818), so that only the noise
            of their steps tells them apart.
        sampler: How steps are taken.
        window: Which steps take noise; the others are ODE steps.
        groups: Which groups are learnt from.
    """

    group: int = 16
    shared_noise: bool = False  # type: ignore[misc]
    sampler: SamplerChoice = Stochastic()  # type: ignore[misc]
    window: Window = AllSteps()  # type: ignore[misc]
    groups: Groups = AllGroups()  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_variant(self.sampler, SamplerChoice, "sampling.sampler")
        check_variant(self.window, Window, "sampling.window")
        check_variant(self.groups, Groups, "sampling.groups")
        self.window.check(self.steps, self.group)
        sampler, window = self.sampler, self.window
        same = self.shared_noise and self.group > 1 and not sampler.eta
        if sampler.is_deterministic and (same or window.share_prefix):
            name = "sampling.shared_noise" if same else "sampling.window.share_prefix"
            raise UsageError(name, True, "False", f"{sampler.kind} takes no noise that tells the samples of a group apart")
        if sampler.is_deterministic and (window.tail != NO_TAIL or window.is_tree):
            raise UsageError("sampling.window", window.kind, "all", f"{sampler.kind} has no stochastic steps")
        if self.shared_noise and window.is_tree:
            raise no_effect("sampling.shared_noise", f"with `sampling.window` {window.kind}")
        for problem in self.groups.problems(self):
            raise problem


@dataclass(frozen=True)
class RolloutConfig:
    """Where and when the samples of rollouts are made, and in which precision.

    Args:
        ahead: Number K of rollouts that are made ahead: rollout j is made with the weights that rollouts 0 to j - K - 1 have
            trained, whatever the timing. 0 makes each rollout with the current weights. From 1 on, samples come from
            `rollout.source`, or from a second copy of the network in this process; methods with ratios of log-probabilities
            need `correction`.
        reuse: What the steps of a rollout compute once: none; exact (layers that see the prompt alone, such as keys and
            values of cross-attention, and weights that an update merges, too; the bits stay); or merged (also the sum of
            each frozen weight and its adapter, in the dtype of the weight: fewer launches and a copy of the adapted
            weights; its numbers differ from the update's, so that ratios need `correction` unless computed in float32).
        step_cache: What deterministic steps take over from earlier ones: output of blocks, or the unconditional half of
            guidance. Steps that are recorded are computed whole.
        autocast: Compute the rollout in bfloat16 where torch's autocast does; its numbers then differ from the update's.
        source: Where samples are made: empty (in the trainer's process), the addresses of servers with commas between them
            (http://HOST:PORT,http://HOST:PORT, each `fluvial serve` or each sglang's diffusion server), or replayed:FOLDER
            (they are read from a folder of stored rollouts, of a run with the same seed, prompts and sampling).
        servers: How these servers are asked.
        store: Folder that every rollout is written to, for replayed:FOLDER: images, recorded steps, log-probabilities, and
            the version of the weights; None writes none.
        max_log_ratio: Largest |log ratio| of a first pass, in the unit of the log-probability; the run stops above it,
            because rollout and update then compute different policies.
        max_invalid: Largest share of the groups of a rollout that may be left out, because a reward raised or gave NaN for
            one of their samples, and of the samples of an evaluation; the run stops above it.
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
        check_variant(self.step_cache, StepCacheChoice, "rollout.step_cache")
        check_fields(self, ahead=(0, 64), max_log_ratio=(0, 1e30), max_invalid=(0, 0.999))
        served = self.is_served or not self.scheme.startswith("http")
        if self.source and not (served and self.scheme in plugins.names("sources") and self.source != f"{self.scheme}:"):
            expected = f"addresses of servers with commas between them (http://HOST:PORT), {REPLAYED}FOLDER, or nothing"
            raise UsageError("rollout.source", self.source, expected, "nothing makes samples in the trainer's process")
        refuse_unused(self, "rollout.")
        if self.is_served and self.reuse in ("keys", "merged"):
            hint = "servers merge adapters as they are configured" if self.reuse == "merged" else "servers keep no keys"
            raise UsageError("rollout.reuse", self.reuse, "exact", hint)
        if self.is_served and self.step_cache != NoCache():
            raise UsageError("rollout.step_cache", self.step_cache.kind, "none", "servers compute every step whole")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        if not self.is_served:
            yield "servers", "without servers in `rollout.source`"
        for name in ("store", "ahead", "reuse") if self.source.startswith(REPLAYED) else ():
            yield name, "with rollouts that are stored already"

    @property
    def scheme(self) -> str:
        """What stands before the first colon of the source: http, https, replayed, or one of an installed package."""
        return self.source.partition(":")[0]

    @cached_property
    def is_served(self) -> bool:
        """Whether servers make the samples."""
        urls = self.source.split(",")
        return all(url.startswith(("http://", "https://")) for url in urls)

    def check_sampling(self, sampling: ReadingConfig) -> None:
        """Raise UsageError for samples that no server makes."""
        sampler = sampling.sampler
        if not self.is_served:
            return
        if sampler.solver != "euler":
            raise UsageError("sampling.sampler.solver", sampler.solver, "euler", "servers return Euler's latents alone")
        if sampling.window.noise_of() is not None:
            hint = "a server draws the noise of every sample from its own id"
            raise UsageError("sampling.window", sampling.window.kind, "another than splits or candidates", hint)
        if sampler.kind not in SAMPLERS:
            hint = "a server knows the built-in samplers alone"
            raise UsageError("sampling.sampler", sampler.kind, f"one of {', '.join(SAMPLERS)}", hint)


class Schedules:
    """Schedule and sampler of the rollouts by the shape of a sample, whose size shifts the noise levels of some models."""

    def __init__(self, model: DiffusionModel, sampling: ReadingConfig, device: torch.device) -> None:
        self.model, self.sampling, self.device = model, sampling, device
        self._known: dict[tuple[int, ...], tuple[Schedule, Sampler]] = {}

    def of(self, shape: tuple[int, ...]) -> tuple[Schedule, Sampler]:
        """Return the schedule of samples of a shape, its timesteps on the device, and the sampler bound to its levels."""
        if shape not in self._known:
            schedule = on_device(self.model.schedule(self.sampling.steps, shape), self.device)
            self._known[shape] = schedule, self.sampling.bound_sampler(schedule.levels, self.model.prediction)
        return self._known[shape]
