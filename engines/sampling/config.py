"""How rollouts make their samples, how servers of samples are asked, and how far rollouts are ahead of the updates."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.transitions import SAMPLERS, Sampler
from fluvial.engines import plugins
from fluvial.engines.choices import check_variant
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.sampling.generate import Guidance, on_device
from fluvial.engines.sampling.samplers import SamplerChoice, Stochastic, isolate
from fluvial.engines.sampling.solvers import deterministic_step
from fluvial.engines.sampling.tail import Tail
from fluvial.engines.sampling.window import AllRecorded, AllSteps, Trained, Window
from fluvial.models import DiffusionModel, Prediction, Schedule

REPLAYED = "replayed:"  # first letters of a source of stored rollouts


@dataclass(frozen=True)
class AsyncConfig:
    """Rollouts that are made while earlier ones are learnt from.

    Args:
        ahead: Number K of rollouts that are made ahead: rollout j is made with the weights that rollouts 0 to j - K - 1 have
            trained, whatever the timing. 0 makes each rollout with the current weights. From 1 on, samples come from
            `rollout.source`, or from a second copy of the network in this process; objectives with ratios of
            log-probabilities need `correction`.
    """

    ahead: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "asynchronous", ahead=(0, 64))


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
        weights: How they are given the weights after an update: auto (an adapter as its file, all weights in a folder), disk
            (always all weights in a folder), or shared_memory (all weights in buckets, which `fluvial serve` on this machine
            reads).
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
    weights: Literal["auto", "disk", "shared_memory"] = "auto"
    weights_folder: Path | None = None
    weights_verify: bool = True
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        seconds, count = {"timeout": (1e-3, 1e6), "patience": (0, 1e6)}, {"in_flight": (1, 1024), "most_mb": (1, 2**20)}
        check_fields(self, "rollout.servers", **seconds, **count, tolerance=(0, math.inf))


@dataclass(frozen=True)
class RolloutConfig:
    """How samples are made, and which of their steps are recorded for objectives that train on steps.

    Args:
        prompts: Number of prompts per rollout.
        group: Number of samples per prompt; each is compared with the others of its group.
        shared_noise: The samples of a group start from the same noise (DanceGRPO, arXiv 2505.07818), so that only the noise
            of their steps tells them apart.
        steps: Number of steps of the schedule, in training and in evaluation.
        sampler: How steps are taken: `Stochastic`, `Ode` or `SaSolver`.
        window: Which steps take noise: `AllSteps`, `RandomWindow`, `ScatteredSteps`, `MovingWindow` or `Branches`; the
            others are ODE steps.
        trained: Which of the recorded steps are trained on: `AllRecorded`, `FirstRecorded` or `RandomRecorded`.
        form: Form of the log-probability: density, no_const (without its constant) or unscaled (negative squared error).
        reduction: Reduction of the log-probability over pixels: mean (nats per dimension, the unit of the clip range) or
            sum (nats).
        guidance: Classifier-free guidance of every step, the same in rollout, update and evaluation.
        reuse_prompt: Compute layers that see the prompt alone (projections of its embedding, keys and values of
            cross-attention) once per rollout instead of at every step; the bits stay, and their results take memory.
        step_cache: Let deterministic steps leave out the blocks after the first where the output of that one has changed by
            less than this fraction since an earlier step (first-block cache, after TeaCache, arXiv 2411.19108); about 0.1.
            Stochastic steps, which are trained on, are computed whole. Samples then depend on those they are generated with.
            0 computes every block.
        autocast: Compute the rollout in bfloat16 where torch's autocast does; its numbers then differ from the update's.
        source: Where samples are made: empty (in the trainer's process), the addresses of servers with commas between them
            (http://HOST:PORT,http://HOST:PORT, each `fluvial serve` or each sglang's diffusion server), or replayed:FOLDER
            (they are read from a folder of stored rollouts, of a run with the same seed, prompts and sampling).
        servers: How these servers are asked.
        store: Folder that every rollout is written to, for replayed:FOLDER: images, recorded steps, log-probabilities, and
            the version of the weights; None writes none.
    """

    prompts: int = 8
    group: int = 16
    shared_noise: bool = False
    steps: int = 10
    sampler: SamplerChoice = field(default_factory=Stochastic)
    window: Window = field(default_factory=AllSteps)
    trained: Trained = field(default_factory=AllRecorded)
    form: Form = "density"
    reduction: Reduction = "mean"
    guidance: Guidance = field(default_factory=Guidance)
    reuse_prompt: bool = True
    step_cache: float = 0.0
    autocast: bool = False
    source: str = ""
    servers: ServersConfig = field(default_factory=ServersConfig)
    store: Path | None = None

    def __post_init__(self) -> None:
        count = (1, 2**31)
        check_fields(self, prompts=count, group=count, steps=count, step_cache=(0, 1))
        for name, union in (("sampler", SamplerChoice), ("window", Window), ("trained", Trained)):
            check_variant(getattr(self, name), union, f"rollout.{name}")
        self.window.check(self.steps, self.group)
        self._check_noise()
        self._check_source()

    def _check_noise(self) -> None:
        """Raise UsageError for what needs a sampler, or a window, of another kind."""
        sampler, window = self.sampler, self.window
        same = self.shared_noise and self.group > 1 and not sampler.eta
        if sampler.is_deterministic and (same or window.share_prefix):
            name = "rollout.shared_noise" if same else "rollout.window.share_prefix"
            raise UsageError(name, True, "False", f"{sampler.kind} takes no noise that tells the samples of a group apart")
        if sampler.is_deterministic and (window.tail != Tail() or window.kind == "branches"):
            raise UsageError("rollout.window", window.kind, "all", f"{sampler.kind} has no stochastic steps")
        if self.shared_noise and window.kind == "branches":
            raise no_effect("rollout.shared_noise", "with `rollout.window` branches")
        if self.step_cache and (sampler.is_deterministic or window.count(self.steps) == self.steps):
            raise no_effect("rollout.step_cache", "without deterministic steps beside stochastic ones")

    def _check_source(self) -> None:
        """Raise UsageError unless samples can come from the source, and be stored."""
        served = self.is_served or not self.scheme.startswith("http")
        if self.source and not (served and self.scheme in plugins.names("sources") and self.source != f"{self.scheme}:"):
            expected = f"addresses of servers with commas between them (http://HOST:PORT), {REPLAYED}FOLDER, or nothing"
            raise UsageError("rollout.source", self.source, expected, "nothing makes samples in the trainer's process")
        if self.servers != ServersConfig() and not self.is_served:
            raise no_effect("rollout.servers", "without servers in `rollout.source`")
        if self.is_served:
            self._check_served()
        if self.source.startswith(REPLAYED) and self.store is not None:
            raise no_effect("rollout.store", "with rollouts that are stored already")

    def _check_served(self) -> None:
        """Raise UsageError for samples that no server makes; everything else that they depend on is in a request."""
        sampler = self.sampler
        if sampler.solver != "euler":
            raise UsageError("rollout.sampler.solver", sampler.solver, "euler", "servers return Euler's latents alone")
        if sampler.kind not in SAMPLERS:
            hint = "a server knows the built-in samplers alone"
            raise UsageError("rollout.sampler", sampler.kind, f"one of {', '.join(SAMPLERS)}", hint)
        if self.step_cache:
            hint = "with a cache, samples depend on others of their batch, which servers choose"
            raise UsageError("rollout.step_cache", self.step_cache, "0", hint)

    @property
    def scheme(self) -> str:
        """What stands before the first colon of the source: http, https, replayed, or one of an installed package."""
        return self.source.partition(":")[0]

    @property
    def is_served(self) -> bool:
        """Whether servers make the samples."""
        urls = self.source.split(",")
        return all(url.startswith(("http://", "https://")) for url in urls)

    @property
    def batch(self) -> int:
        """Number of samples per rollout."""
        return self.prompts * self.group

    def bound_sampler(self, levels: Tensor, prediction: Prediction = "velocity") -> Sampler:
        """Return the sampler with its hyper-parameters bound, for a schedule of T+1 noise levels."""
        if self.sampler.is_deterministic:
            return deterministic_step(prediction)
        if self.sampler.kind in SAMPLERS:
            return self.sampler.rule.bind(self.sampler.eta, levels)
        return isolate(self.sampler.rule.bind(self.sampler.eta, levels.clone()))


class Schedules:
    """Schedule and sampler of the rollouts by the shape of a sample, whose size shifts the noise levels of some models."""

    def __init__(self, model: DiffusionModel, rollout: RolloutConfig, device: torch.device) -> None:
        self.model, self.rollout, self.device = model, rollout, device
        self._known: dict[tuple[int, ...], tuple[Schedule, Sampler]] = {}

    def of(self, shape: tuple[int, ...]) -> tuple[Schedule, Sampler]:
        """Return the schedule of samples of a shape, its timesteps on the device, and the sampler bound to its levels."""
        if shape not in self._known:
            schedule = on_device(self.model.schedule(self.rollout.steps, shape), self.device)
            self._known[shape] = schedule, self.rollout.bound_sampler(schedule.levels, self.model.prediction)
        return self._known[shape]
