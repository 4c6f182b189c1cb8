"""Recipes: a run is a frozen dataclass, built by a function here. The command line is generated from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fluvial.core import transitions
from fluvial.core.advantages import Scale
from fluvial.core.checks import check_number
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.transitions import Sampler
from fluvial.engines.generate import Guidance
from fluvial.engines.optimizer import OptimizerConfig
from fluvial.engines.parallelize import EngineConfig
from fluvial.kernels import Implementation
from fluvial.models import LoraConfig


class SamplerRule(NamedTuple):
    """What a recipe must know of a sampler."""

    bind: Callable[[float, Tensor], Sampler]  # (eta, sigmas) -> the sampler with its hyper-parameters bound
    max_eta: float
    last_step_is_deterministic: bool
    guard: bool  # whether GRPO-Guard is defined: its std is a rate times sqrt(|dt|)


SAMPLERS: dict[str, SamplerRule] = {
    "flow_sde": SamplerRule(
        lambda eta, sigmas: partial(transitions.flow_sde, eta=eta, sigma_max=sigmas[1]), math.inf, False, True
    ),
    "dance_sde": SamplerRule(lambda eta, sigmas: partial(transitions.dance_sde, eta=eta), math.inf, False, True),
    "cps": SamplerRule(lambda eta, sigmas: partial(transitions.cps, eta=eta), 1.0, True, False),
}


@dataclass(frozen=True)
class RolloutConfig:
    """How samples are made and which steps of them are trained on.

    Args:
        prompts: prompts an update.
        group: samples a prompt, at least 2: a sample is judged against the others of its group.
        shared_noise: the samples of a group begin with the same noise, as DanceGRPO's do (arXiv 2505.07818), so that they
            differ by the steps that are trained on and by nothing else.
        steps: of the schedule, in training and in evaluation.
        sampler: flow_sde (Flow-GRPO, arXiv 2505.05470), dance_sde (DanceGRPO, 2505.07818) or cps (Flow-CPS, 2509.05952).
        eta: scale of the sampler's noise, > 0.
        window: contiguous stochastic steps, placed at random for each update and trained on; the others are ODE steps
            (Flow-GRPO-Fast; MixGRPO, 2507.21802). None makes all steps of the range stochastic.
        window_low: first step that the window may cover.
        window_high: end of the steps that the window may cover; None is the end of the schedule.
        form: of the log-probability: density, no_const or unscaled.
        reduction: of the log-probability over pixels: mean (nats a dimension, which the clip range is in) or sum.
        guidance: classifier-free guidance of every step, in rollout, update and evaluation alike.
    """

    prompts: int = 8
    group: int = 16
    shared_noise: bool = False
    steps: int = 10
    sampler: Literal["flow_sde", "dance_sde", "cps"] = "flow_sde"
    eta: float = 0.8
    window: int | None = 3
    window_low: int = 0
    window_high: int | None = None
    form: Form = "density"
    reduction: Reduction = "mean"
    guidance: Guidance = field(default_factory=Guidance)

    def __post_init__(self) -> None:
        check_number("rollout", "prompts", self.prompts, low=1)
        check_number("rollout", "steps", self.steps, low=1)
        check_number("rollout", "eta", self.eta, low=0)
        if self.group < 2:
            raise ValueError(
                f"rollout: group is {self.group}, expected at least 2: a group of one has no advantage to learn from"
            )
        if self.eta == 0:
            raise ValueError(
                "rollout: eta is 0, so every step is deterministic and has no log-probability to train on: use eta > 0"
            )
        rule = SAMPLERS[self.sampler]
        if self.eta > rule.max_eta:
            raise ValueError(f"rollout: eta is {self.eta}, expected at most {rule.max_eta:g} for {self.sampler}")
        low, high = self.window_range
        if not 0 <= low < high <= self.steps or not 1 <= self.window_size <= high - low:
            raise ValueError(
                f"rollout: a window of {self.window_size} steps does not fit steps {low} to {high} of {self.steps}: "
                "expected 0 <= window_low < window_high <= steps, and 1 <= window <= window_high - window_low"
            )
        if rule.last_step_is_deterministic and self.form != "unscaled" and self.window_size == 1 and high == self.steps:
            raise ValueError(
                f"rollout: the last step of {self.sampler} is deterministic and has no log-probability, and a window of 1 "
                f"may be just that step: use a longer window, window_high <= {self.steps - 1}, or form=unscaled"
            )

    @property
    def window_range(self) -> tuple[int, int]:
        """The steps that a window may cover, first and end."""
        return self.window_low, self.steps if self.window_high is None else self.window_high

    @property
    def window_size(self) -> int:
        """Number of steps of a window."""
        low, high = self.window_range
        return high - low if self.window is None else self.window

    @property
    def batch(self) -> int:
        """Samples an update."""
        return self.prompts * self.group

    def bound_sampler(self, sigmas: Tensor) -> Sampler:
        """Return the sampler with its hyper-parameters bound for a schedule."""
        return SAMPLERS[self.sampler].bind(self.eta, sigmas)


@dataclass(frozen=True)
class PolicyConfig:
    """The policy objective and its advantages.

    Args:
        objective: clipped (the surrogate of PPO and GRPO) or guard (GRPO-Guard, arXiv 2510.22319: the same gradient size at
            every step of the schedule; flow_sde and dance_sde, with a mean density).
        clip_low: the ratio is clipped to [1 - clip_low, 1 + clip_high]; in nats a dimension when the log-probability's
            reduction is mean.
        clip_high: upper end of that range.
        advantage: what a reward's distance to its group's mean is divided by: the standard deviation of its group (group)
            or of the batch (batch), or nothing (none).
        advantage_eps: added to that standard deviation.
        kl_coef: weight of the KL to the reference policy (the weights that training starts from) in the loss, which keeps
            the model from drifting where the reward does not look; 0 leaves it out, and the reference's forward passes.
        kl_weight: rate (the KL of a step times |dt|, what Flow-GRPO publishes: its std is a rate) or exact.
        max_log_ratio: stop if a first-pass |log ratio| exceeds this: rollout and update then disagree about the policy.
    """

    objective: Literal["clipped", "guard"] = "clipped"
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    advantage: Scale = "batch"
    advantage_eps: float = 1e-4
    kl_coef: float = 0.0
    kl_weight: Literal["rate", "exact"] = "rate"
    max_log_ratio: float = 1e-3

    def __post_init__(self) -> None:
        check_number("policy", "kl_coef", self.kl_coef, low=0)
        check_number("policy", "clip_low", self.clip_low, low=0, high=1)
        check_number("policy", "clip_high", self.clip_high, low=0)
        check_number("policy", "advantage_eps", self.advantage_eps, low=1e-12)
        check_number("policy", "max_log_ratio", self.max_log_ratio, low=0)
        if self.objective == "guard" and self.clip_low != self.clip_high:
            raise ValueError(
                f"policy: clip_low is {self.clip_low} and clip_high {self.clip_high}, expected one value for both: guard's "
                "clip is symmetric"
            )


@dataclass(frozen=True)
class TrainConfig:
    """One run of post-training with Flow-GRPO.

    Args:
        out: the run folder.
        seed: of everything random; the same seed gives the same bits on the same machine and number of processes.
        updates: optimizer updates.
        train: full (all weights) or lora.
        weights: folder of the weights to start from, as `fluvial pretrain` and a run's export write them; the shipped base
            by default.
        prompts: text file of prompts to train on, one a line; all training codes by default.
        micro_batch: samples a forward pass in rollout and update; decides the memory, and the result only by rounding.
        init: "sharded" lets each rank read its own shards of the base weights, so that none holds the whole model; "whole"
            loads them on every rank and shards them then, as a model must that is not read from a folder.
        implementation: of the per-step log-prob and loss: auto (Triton on an accelerator, else the reference), triton,
            compiled or reference.
        eval_every: updates between evaluations on held-out prompts; 0 evaluates only before and after.
        eval_samples: samples an evaluation in the course of the run.
        final_samples: samples of the evaluations before and after it.
        checkpoint_every: updates between checkpoints.
        checkpoint_async: write checkpoints in the background, from a copy on the host.
        checkpoints: folder of the checkpoints, or a URL that fsspec opens (s3://bucket/run); by default in `out`.
        keep_checkpoints: how many are kept.
        export_dtype: of the weights that are exported at the end.
        collective_timeout: seconds that processes wait for each other in a collective, before they give up on one that died
            or hangs.
        resume: continue the run in `out` from its newest checkpoint, with its own settings where none is given.
        resume_from: the same from this checkpoint, a folder or a URL.
    """

    out: Path
    seed: int = 0
    updates: int = 100
    train: Literal["full", "lora"] = "full"
    weights: Path | None = None
    prompts: Path | None = None
    micro_batch: int = 64
    init: Literal["sharded", "whole"] = "sharded"
    implementation: Implementation = "auto"
    eval_every: int = 20
    eval_samples: int = 200
    final_samples: int = 1000
    checkpoint_every: int = 20
    checkpoint_async: bool = False
    checkpoints: str | None = None
    keep_checkpoints: int = 2
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    collective_timeout: float = 600.0
    resume: bool = False
    resume_from: str | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name in ("updates", "micro_batch", "eval_samples", "final_samples", "checkpoint_every", "keep_checkpoints"):
            check_number("train", name, getattr(self, name), low=1, high=2**31)
        check_number("train", "eval_every", self.eval_every, low=0)
        check_number("train", "collective_timeout", self.collective_timeout, low=1, high=1e6)
        check_number("train", "seed", self.seed, low=0, high=2**63 - 1)
        rollout, rule = self.rollout, SAMPLERS[self.rollout.sampler]
        if self.policy.objective == "guard" and not rule.guard:
            raise ValueError(
                f"train: guard is not defined for {rollout.sampler}: it takes samplers whose std is a rate times "
                "sqrt(|dt|), flow_sde and dance_sde"
            )
        reaches_end = rollout.window_range[1] == rollout.steps
        takes_last_step = rule.last_step_is_deterministic and rollout.form == "unscaled" and reaches_end
        if self.policy.kl_coef > 0 and takes_last_step:
            raise ValueError(
                f"train: the last step of {rollout.sampler} is deterministic and has no KL, and form=unscaled trains on it: "
                f"use policy.kl_coef 0, rollout.window_high <= {rollout.steps - 1} or another form"
            )
        if self.policy.objective == "guard" and (self.rollout.form, self.rollout.reduction) not in (
            ("density", "mean"),
            ("no_const", "mean"),
        ):
            raise ValueError("train: guard takes log-probabilities of form density or no_const and reduction mean")

    @property
    def checkpoint_folder(self) -> Path | str:
        """Where checkpoints are: a folder, or a URL as text."""
        if self.checkpoints is None:
            return self.out / "checkpoints"
        return self.checkpoints if "://" in self.checkpoints else Path(self.checkpoints)


@dataclass(frozen=True)
class PretrainConfig:
    """The supervised training that makes the base weights: flow matching on handwriting (arXiv 2210.02747).

    Args:
        out: folder for the weights.
        seed: of everything random.
        updates: AdamW steps; stopped early on purpose, so that there is something left to learn.
        batch: pictures an update.
        micro_batch: pictures a forward pass.
        optimizer: AdamW and its schedule.
    """

    out: Path
    seed: int = 0
    updates: int = 400
    batch: int = 64
    micro_batch: int = 64
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3, ema_decay=0.9))

    def __post_init__(self) -> None:
        for name in ("updates", "batch", "micro_batch"):
            check_number("pretrain", name, getattr(self, name), low=1, high=2**31)
        check_number("pretrain", "seed", self.seed, low=0, high=2**63 - 1)


def handwriting(out: Path = Path("runs/handwriting")) -> TrainConfig:
    """Flow-GRPO (arXiv 2505.05470) on the built-in job: teach a flow model to write 4-digit codes legibly.

    Published are the SDE, group advantages over the batch's standard deviation, the clip and the KL of a step times |dt|;
    a random window of stochastic steps is Flow-GRPO-Fast's and MixGRPO's (2507.21802). The numbers were found by measuring
    on this job: LoRA, which went further than full fine-tuning and costs less; a window within the six noisiest steps, which
    decide what is written; 16 prompts of 8 samples; a learning rate that falls to 0. Full fine-tuning wants another rate and
    a KL to the reference: --train full --optimizer.lr 2e-4 --policy.kl-coef 0.1.
    """
    return TrainConfig(
        out=out,
        updates=80,
        train="lora",
        micro_batch=128,
        rollout=RolloutConfig(prompts=16, group=8, window=5, window_high=6),
        optimizer=OptimizerConfig(lr=5e-4, schedule="cosine", ema_decay=0.9),
    )


def handwriting_pretraining(out: Path = Path("runs/handwriting-base")) -> PretrainConfig:
    """Flow matching on pictures of random training codes; makes the base weights that ship."""
    return PretrainConfig(out=out)


def recorded(record: dict[str, Any]) -> TrainConfig:
    """Return the run that a run folder's config.json records."""
    parts = {
        "rollout": RolloutConfig, "policy": PolicyConfig, "optimizer": OptimizerConfig, "lora": LoraConfig,
        "engine": EngineConfig,
    }  # fmt: skip
    paths = ("out", "weights", "prompts")
    rollout = record["rollout"]
    record = {**record, "rollout": {**rollout, "guidance": Guidance(**rollout["guidance"])}}
    values = {name: parts[name](**value) if name in parts else value for name, value in record.items()}
    config = TrainConfig(**values | {name: Path(values[name]) for name in paths if values[name] is not None})
    low, high = config.optimizer.betas
    return replace(config, optimizer=replace(config.optimizer, betas=(low, high)))
