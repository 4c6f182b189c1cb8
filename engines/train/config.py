"""A run as frozen dataclasses, and the combinations that have no meaning, each refused in words when the run is built."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from fluvial.core import correction
from fluvial.core.advantages import Scale
from fluvial.core.checks import check_number
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.transitions import Sampler, bind
from fluvial.engines.fsdp.optimizer import OptimizerConfig
from fluvial.engines.fsdp.parallelize import EngineConfig
from fluvial.engines.objectives.table import AnyObjective, Clipped, Distill, Dpo, Dppo, Guard, Nft, name_of
from fluvial.engines.rollout.generate import Guidance, deterministic_step
from fluvial.engines.rollout.solvers import Solver
from fluvial.kernels import Implementation
from fluvial.models import LoraConfig, Prediction

BUILT_IN = ("handwriting", "handwriting-unet")  # the models that come with fluvial


class SamplerRule(NamedTuple):
    """What a run must know of a sampler."""

    max_eta: float  # 0 for one that takes no noise
    last_step_is_deterministic: bool
    guard: bool  # whether GRPO-Guard is defined: its std is a rate times sqrt(|dt|)
    prediction: Prediction | None  # of the models that it samples from; None: any


SAMPLERS: dict[str, SamplerRule] = {
    "flow_sde": SamplerRule(math.inf, False, True, "velocity"),
    "dance_sde": SamplerRule(math.inf, False, True, "velocity"),
    "cps": SamplerRule(1.0, True, False, "velocity"),
    "ddim": SamplerRule(1.0, True, False, "epsilon"),
    "ode": SamplerRule(0.0, True, False, None),
}


@dataclass(frozen=True)
class RolloutConfig:
    """How samples are made, and which of their steps are recorded for objectives that train on steps.

    Args:
        prompts: prompts a rollout.
        group: samples a prompt; a sample is judged against the others of its group.
        shared_noise: the samples of a group begin with the same noise, as DanceGRPO's do (arXiv 2505.07818), so that they
            differ by the steps that are trained on and by nothing else.
        steps: of the schedule, in training and in evaluation.
        sampler: flow_sde (Flow-GRPO, arXiv 2505.05470), dance_sde (DanceGRPO, 2505.07818), cps (Flow-CPS, 2509.05952), ddim
            (DDPO, 2305.13301; for models of epsilon), or ode, which takes no noise (DDIM
            without any for models of epsilon).
        eta: scale of the sampler's noise; 0 with ode, else > 0.
        solver: of ode: euler, or dpmpp_2m (DPM-Solver++ 2M, 2211.01095).
        window: contiguous stochastic steps, placed at random for each rollout and trained on; the others are ODE steps
            (Flow-GRPO-Fast; MixGRPO, 2507.21802). None makes all steps of the range stochastic.
        window_low: first step that the window may cover.
        window_high: end of the steps that the window may cover; None is the end of the schedule.
        fraction: part of the recorded steps that is trained on, drawn for each sample anew, as DanceGRPO does.
        form: of the log-probability: density, no_const or unscaled.
        reduction: of the log-probability over pixels: mean (nats a dimension, which the clip range is in) or sum.
        guidance: classifier-free guidance of every step, in rollout, update and evaluation alike.
        autocast: let the rollout compute in bfloat16 where torch's autocast does; it then is another program than the
            update.
    """

    prompts: int = 8
    group: int = 16
    shared_noise: bool = False
    steps: int = 10
    sampler: Literal["flow_sde", "dance_sde", "cps", "ddim", "ode"] = "flow_sde"
    eta: float = 0.8
    solver: Solver = "euler"
    window: int | None = None
    window_low: int = 0
    window_high: int | None = None
    fraction: float = 1.0
    form: Form = "density"
    reduction: Reduction = "mean"
    guidance: Guidance = field(default_factory=Guidance)
    autocast: bool = False

    def __post_init__(self) -> None:
        for name in ("prompts", "group", "steps"):
            check_number("rollout", name, getattr(self, name), low=1, high=2**31)
        check_number("rollout", "eta", self.eta, low=0)
        check_number("rollout", "fraction", self.fraction, low=1e-6, high=1)
        rule = SAMPLERS[self.sampler]
        if self.sampler == "ode" and self.eta > 0:
            raise ValueError(f"rollout: eta is {self.eta:g}, and ode takes no noise: use eta 0, or another sampler")
        if self.sampler != "ode" and self.eta == 0:
            raise ValueError(
                f"rollout: eta is 0, so every step of {self.sampler} is deterministic and has no density: use eta > 0, or "
                "sampler ode for an objective that asks for none"
            )
        if self.eta > rule.max_eta:
            raise ValueError(f"rollout: eta is {self.eta}, expected at most {rule.max_eta:g} for {self.sampler}")
        if self.solver != "euler" and self.sampler != "ode":
            raise ValueError(f"rollout: solver {self.solver} solves the ODE, and sampler is {self.sampler}: use sampler ode")
        if self.shared_noise and self.sampler == "ode" and self.group > 1:
            raise ValueError("rollout: with shared_noise and ode all samples of a group are the same: use another sampler")
        low, high = self.window_range
        if not 0 <= low < high <= self.steps or not 1 <= self.window_size <= high - low:
            raise ValueError(
                f"rollout: a window of {self.window_size} steps does not fit steps {low} to {high} of {self.steps}: "
                "expected 0 <= window_low < window_high <= steps, and 1 <= window <= window_high - window_low"
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
    def may_be_last_alone(self) -> bool:
        """Whether a window may be the last step of the schedule and nothing else."""
        return self.window_size == 1 and self.window_range[1] == self.steps

    @property
    def batch(self) -> int:
        """Samples a rollout."""
        return self.prompts * self.group

    def bound_sampler(self, levels: Tensor, prediction: Prediction = "velocity") -> Sampler:
        """Return the sampler with its hyper-parameters bound for a schedule of a model that predicts this."""
        if self.sampler == "ode":
            return deterministic_step(prediction)
        return bind(self.sampler, self.eta, levels)


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages.

    Args:
        scale: what a reward's distance to its group's mean is divided by: the standard deviation of its group (group) or of
            the batch (batch), or nothing (none).
        eps: added to that standard deviation.
        clip: advantages are clipped to [-clip, clip]; None leaves them.
        combine: of several rewards: sum (their weighted sum is the reward) or gdpo (each is normalised in its group, then
            weighted and normalised over the batch, arXiv 2601.05242).
    """

    scale: Scale = "group"
    eps: float = 1e-4
    clip: float | None = None
    combine: Literal["sum", "gdpo"] = "sum"

    def __post_init__(self) -> None:
        check_number("advantage", "eps", self.eps, low=1e-12)
        if self.clip is not None:
            check_number("advantage", "clip", self.clip, low=1e-12)


@dataclass(frozen=True)
class NoisingConfig:
    """The noise levels that clean samples are put at anew, for objectives that train on them.

    Args:
        each: levels a sample, each with noise of its own.
        levels: schedule (steps of the sampling schedule, for one sample different ones), continuous (uniform along the
            schedule, between its steps too), or logit_normal (sigmoid of a standard normal, arXiv 2403.03206).
    """

    each: int = 4
    levels: Literal["schedule", "continuous", "logit_normal"] = "schedule"

    def __post_init__(self) -> None:
        check_number("noising", "each", self.each, low=1, high=2**31)


@dataclass(frozen=True)
class KLConfig:
    """The term that keeps the policy near the reference, the weights that training starts from.

    Args:
        coef: its weight in the loss; 0 leaves it out, and the reference's forward passes.
        weight: of recorded steps: rate (the KL of a step times |dt|, what Flow-GRPO publishes: its std is a rate) or exact.
            On re-noised samples the term is mean |v - v_ref|^2.
    """

    coef: float = 0.0
    weight: Literal["rate", "exact"] = "rate"

    def __post_init__(self) -> None:
        check_number("kl", "coef", self.coef, low=0)


@dataclass(frozen=True)
class CorrectionConfig:
    """Weights that make up for a rollout by another program than the update (other precision, engine or weights).

    The update then computes the old log-probabilities itself, in one more forward pass, and weighs each pair by what
    `core.correction` makes of the difference to the rollout's.

    Args:
        mode: none, truncate, reject or mask.
        level: a weight a step, or a trajectory.
        threshold: bound of the ratio; in the unit of the log-probability, so near 1 where its reduction is mean.
    """

    mode: Literal["none", "truncate", "reject", "mask"] = "none"
    level: correction.Level = "step"
    threshold: float = 1.01

    def __post_init__(self) -> None:
        check_number("correction", "threshold", self.threshold, low=1, high=1e30)


@dataclass(frozen=True)
class PipelineConfig:
    """What a model from a folder or the Hub is asked for.

    Args:
        height: of the images, in pixels.
        width: of the images, in pixels.
        frames: of videos; 1 for images.
        call: what a pipeline that there is no adapter for is called with besides, name=value each, e.g.
            max_sequence_length=128; a value is JSON, or else text.
        heldout: text file of prompts to evaluate on, one a line; by default every tenth of the training ones is put aside.
        text_cache: folder for encoded prompts. All are encoded before training, and the text encoders dropped; without it
            they stay, and encode each batch anew.
        frozen: dtype of text encoders and VAE; auto is bfloat16 on CUDA, else float32.
        trust_remote_code: run code that the folder brings along.
    """

    height: int = 512
    width: int = 512
    frames: int = 1
    call: tuple[str, ...] = ()
    heldout: Path | None = None
    text_cache: Path | None = None
    frozen: Literal["auto", "float32", "bfloat16"] = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("height", "width", "frames"):
            check_number("pipeline", name, getattr(self, name), low=1, high=2**20)
        if wrong := [word for word in self.call if not word.partition("=")[0].isidentifier() or "=" not in word]:
            raise ValueError(f"pipeline: call holds {wrong[0]!r}, expected name=value")


@dataclass(frozen=True)
class TrainConfig:
    """One run of post-training.

    Args:
        out: the run folder.
        model: what is trained: handwriting (the built-in flow), handwriting-unet (the built-in model of epsilon), or a
            pipeline of diffusers, by its folder or its id on the Hub (fluvial models lists which).
        seed: of everything random; the same seed gives the same bits on the same machine and number of world.
        updates: optimizer updates.
        epochs: passes over a rollout's samples.
        minibatches: optimizer updates a pass, each on its share of the samples.
        train: full (all weights) or lora.
        weights: folder of the weights to start from, as `fluvial pretrain` and a run's export write them; the shipped base
            by default.
        prompts: text file of prompts to train on, one a line; all training codes by default.
        rewards: names of the job's rewards or functions of your own, reward(images, prompts) -> [B], each with a weight or
            without, e.g. characters mymodule:neat=0.5; the job's first by default. --reward is the same.
        micro_batch: samples a forward pass in rollout and update; decides the memory, and the result only by rounding.
        init: "sharded" lets each rank read its own shards of the base weights, so that none holds the whole model; "whole"
            loads them on every rank and shards them then, as a model must that is not read from a folder.
        implementation: of the per-step log-prob and loss: auto (Triton on an accelerator, else the reference), triton,
            compiled or reference.
        max_log_ratio: stop if a first-pass |log ratio| exceeds this: rollout and update then disagree about the policy.
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
    model: str = "handwriting"
    seed: int = 0
    updates: int = 100
    epochs: int = 1
    minibatches: int = 1
    train: Literal["full", "lora"] = "full"
    weights: Path | None = None
    prompts: Path | None = None
    rewards: tuple[str, ...] = ()
    micro_batch: int = 64
    init: Literal["sharded", "whole"] = "sharded"
    implementation: Implementation = "auto"
    max_log_ratio: float = 1e-3
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
    objective: AnyObjective = field(default_factory=Clipped)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    noising: NoisingConfig = field(default_factory=NoisingConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        for name in (
            "updates", "epochs", "minibatches", "micro_batch", "eval_samples", "final_samples", "checkpoint_every",
            "keep_checkpoints",
        ):  # fmt: skip
            check_number("train", name, getattr(self, name), low=1, high=2**31)
        check_number("train", "eval_every", self.eval_every, low=0)
        check_number("train", "max_log_ratio", self.max_log_ratio, low=0)
        check_number("train", "collective_timeout", self.collective_timeout, low=1, high=1e6)
        check_number("train", "seed", self.seed, low=0, high=2**63 - 1)
        for problem in config_problems(self):
            raise ValueError(f"train: {problem}")

    @property
    def checkpoint_folder(self) -> Path | str:
        """Where checkpoints are: a folder, or a URL as text."""
        if self.checkpoints is None:
            return self.out / "checkpoints"
        return self.checkpoints if "://" in self.checkpoints else Path(self.checkpoints)

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer updates on the samples of one rollout."""
        return self.epochs * self.minibatches

    @property
    def makes_samples(self) -> bool:
        """Whether there is a rollout: neither supervised fine-tuning nor a file of preferences has one."""
        return not self.objective.offline

    @property
    def takes_ratios(self) -> bool:
        """Whether the objective compares log-probabilities of recorded steps."""
        return self.objective.has_ratio and self.objective.trains_on == "steps"

    @property
    def keeps_old(self) -> bool:
        """Whether there is an old policy that lags behind, an adapter of its own, which makes the rollouts."""
        return isinstance(self.objective, Nft) and self.objective.old != "none"

    @property
    def recorded_form(self) -> Form:
        """The form of the log-probabilities that a rollout records; where nobody reads them, one that every step has."""
        matches = isinstance(self.objective, Distill) and self.objective.match == "velocity_mse"
        return "unscaled" if matches else self.rollout.form


def config_problems(config: TrainConfig) -> Iterator[str]:
    """Yield what has no meaning in a run: which settings, why, and what to use."""
    objective, rollout, name = config.objective, config.rollout, name_of(config.objective)
    rule = SAMPLERS[rollout.sampler]
    on_steps = objective.trains_on == "steps"
    if objective.rewards != "nothing" and config.makes_samples and rollout.group < 2:
        yield (
            f"rollout.group is {rollout.group}, expected at least 2: {name} judges a sample by the others of its group, and "
            "a group of one has nothing to be learnt from"
        )
    if rollout.batch % config.minibatches:
        yield f"minibatches is {config.minibatches}, expected a divisor of the {rollout.batch} samples of a rollout"
    if config.updates % config.updates_per_rollout:
        yield (
            f"updates is {config.updates}, expected a multiple of epochs x minibatches = {config.updates_per_rollout}, the "
            "updates that are made on each rollout"
        )
    if config.takes_ratios and rollout.sampler == "ode":
        yield f"{name} needs the log-probability of each step, and ode's steps are deterministic and have none: use flow_sde"
    if isinstance(objective, Guard):
        if not rule.guard and rollout.sampler != "ode":
            yield (
                f"guard is not defined for {rollout.sampler}: it takes samplers whose std is a rate times sqrt(|dt|), "
                "flow_sde and dance_sde"
            )
        if rollout.form == "unscaled" or rollout.reduction != "mean":
            yield "guard takes log-probabilities of form density or no_const and reduction mean"
    if isinstance(objective, Dppo) and (rollout.form == "unscaled" or rollout.reduction != "mean"):
        yield "dppo takes log-probabilities of form density or no_const and reduction mean, as its KL is"
    yield from _of_steps(config, name) if on_steps else _of_samples(config, name)
    if objective.rewards != "advantages" and config.advantage != AdvantageConfig(combine=config.advantage.combine):
        yield f"advantage is set, and {name} takes no advantages: leave it as it is"
    if not config.takes_ratios and config.correction.mode != "none":
        yield f"correction weighs log-probabilities of recorded steps, and {name} takes none: use correction.mode none"
    if config.correction.mode != "none" and rollout.form == "unscaled":
        yield "correction takes a ratio of densities, and form unscaled is none: use form density or no_const"
    if config.takes_ratios and rollout.autocast and config.correction.mode == "none":
        yield (
            "rollout.autocast makes the rollout another program than the update, so that ratios are wrong from the start: "
            "use --correction.mode truncate as well, or no autocast"
        )
    if not objective.has_ratio and config.max_log_ratio != TrainConfig.max_log_ratio:
        yield f"max_log_ratio is set, and {name} has no ratio: leave it as it is"
    if isinstance(objective, Distill) and objective.teacher is None:
        yield "distill needs a teacher: name the folder of its weights with --objective.teacher"
    if isinstance(objective, Dpo) and config.kl.coef > 0:
        yield "kl.coef is above 0, and dpo has the reference in its loss already: use kl.coef 0, or another beta"
    if config.keeps_old and config.train == "full":
        yield (
            "nft without an old policy: it is kept as a second LoRA adapter, and train is full; use --train lora, or "
            "--objective.old none, which learns from the policy as it is"
        )
    if config.kl.coef == 0 and config.kl.weight != "rate":
        yield "kl.weight is set and kl.coef is 0, so that there is no KL: use kl.coef > 0"
    if config.model in BUILT_IN and config.pipeline != PipelineConfig():
        yield f"pipeline is set, and {config.model} is built in: leave it as it is, or name another --model"
    if config.model not in BUILT_IN and config.weights is not None:
        yield "weights is set, and a pipeline has its own: name another folder with --model"
    if config.prompts is not None and isinstance(objective, Dpo) and objective.offline:
        yield "prompts is set, and a file of preferences has its own: leave it as it is"


def _of_steps(config: TrainConfig, name: str) -> Iterator[str]:
    """Yield what has no meaning for an objective that trains on recorded steps."""
    objective, rollout = config.objective, config.rollout
    rule, reaches_end = SAMPLERS[rollout.sampler], rollout.window_range[1] == rollout.steps
    last_too = rule.last_step_is_deterministic and config.recorded_form == "unscaled" and reaches_end
    if config.noising != NoisingConfig():
        yield f"noising is set, and {name} trains on the steps of its rollouts: leave it as it is"
    if rollout.solver != "euler":
        yield f"solver {rollout.solver} takes steps that are no transition, and {name} trains on steps: use euler"
    if isinstance(objective, Distill):
        if rollout.sampler == "ode" and objective.match == "mean_kl":
            yield "mean_kl compares the noise of steps, and ode's have none: use --objective.match velocity_mse"
        if (rollout.form, rollout.reduction) != ("density", "mean"):
            yield "form or reduction is set, and distill takes no log-probability: leave them as they are"
        if config.kl.weight != "rate":
            yield f"kl.weight is {config.kl.weight}, and distill's term is mean |v - v_ref|^2: leave it as it is"
    if rule.last_step_is_deterministic and config.recorded_form != "unscaled" and rollout.may_be_last_alone:
        yield (
            f"the last step of {rollout.sampler} is deterministic and has no log-probability, and a window of 1 may be just "
            f"that step: use a longer window, window_high <= {rollout.steps - 1}, or form=unscaled"
        )
    if config.takes_ratios and config.kl.coef > 0 and last_too:
        yield (
            f"the last step of {rollout.sampler} is deterministic and has no KL, and form=unscaled trains on it: use "
            f"kl.coef 0, rollout.window_high <= {rollout.steps - 1} or another form"
        )


def _of_samples(config: TrainConfig, name: str) -> Iterator[str]:
    """Yield what has no meaning for an objective that trains on clean samples."""
    rollout = config.rollout
    if (rollout.form, rollout.reduction) != ("density", "mean"):
        yield f"form or reduction is set, and {name} takes no log-probability: leave them as they are"
    if rollout.fraction != 1:
        yield f"rollout.fraction is {rollout.fraction:g}, and {name} trains on no recorded steps: use noising.each"
    if config.kl.weight != "rate":
        yield f"kl.weight is {config.kl.weight}, and {name}'s term is mean |v - v_ref|^2: leave it as it is"
    if rollout.sampler == "ode" and (rollout.window is not None or rollout.window_low or rollout.window_high is not None):
        yield f"a window of stochastic steps is set, and sampler is ode, which has none: leave the window of {name} out"
    if config.noising.levels == "schedule" and config.noising.each > rollout.steps:
        yield (
            f"noising.each is {config.noising.each}, expected at most the {rollout.steps} steps of the schedule: use fewer, "
            "or --noising.levels continuous"
        )
    if config.makes_samples:
        return
    if rollout.sampler != "ode" or rollout.solver != "euler" or rollout.shared_noise or rollout.autocast:
        yield f"{name} learns from given data and makes no rollout: use sampler ode, and leave the rollout's other settings"
    if config.rewards:
        yield f"rewards is set, and {name} makes no samples that could be judged: leave it as it is"


def check_model(config: TrainConfig, prediction: Prediction, *, recorded: bool = False) -> None:
    """Raise ValueError if a run does not fit a model that predicts this, or that is a recorded pipeline."""
    rule = SAMPLERS[config.rollout.sampler]
    if rule.prediction not in (prediction, None):
        fitting = [name for name, other in SAMPLERS.items() if other.prediction in (prediction, None)]
        raise ValueError(
            f"train: sampler {config.rollout.sampler} is for models of {rule.prediction}, and {config.model} predicts "
            f"{prediction}: use {' or '.join(fitting)}"
        )
    if prediction == "epsilon" and config.objective.flows_only:
        raise ValueError(f"train: {name_of(config.objective)} is defined for flows, and {config.model} predicts epsilon")
    if (prediction == "epsilon" or recorded) and config.noising.levels != "schedule":
        raise ValueError(
            f"train: noising.levels is {config.noising.levels}, and {config.model} knows only the levels of its schedule: "
            "use schedule"
        )
