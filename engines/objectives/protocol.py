"""What an objective is: a frozen dataclass of hyper-parameters with `traits`, `target_weight` and `loss`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.gaussian import Form
from fluvial.core.transitions import Transition
from fluvial.engines.fsdp.config import EngineConfig
from fluvial.engines.objectives.advantages import AdvantageConfig
from fluvial.engines.objectives.losses import KLConfig, LossConfig
from fluvial.engines.rollout.ahead import AsyncConfig
from fluvial.engines.rollout.config import RolloutConfig
from fluvial.engines.rollout.correction import CorrectionConfig
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.rollout.items import Items
from fluvial.engines.rollout.noising import NoisingConfig
from fluvial.kernels import Implementation
from fluvial.models import LoraConfig

TrainsOn = Literal["steps", "noised", "preferences"]
OtherPolicy = Literal["old", "ref", "teacher"]
FollowerName = Literal["old", "ema", "sampling", "ref"]
RewardUse = Literal["advantages", "order", "gradients", "nothing"]


@dataclass(frozen=True)
class Follower:
    """A policy that lags behind the trained one, as a LoRA adapter of its own: it <- d it + (1 - d) policy.

    Args:
        name: what it is to the run: old (`Items.v_old`), ema (`Items.v_ema`), ref (the reference, `Items.v_ref`, in place of
            the base model) or sampling (it makes rollouts and nothing else).
        decay: `(rollouts, updates) -> d`, of the numbers made so far; called after each rollout.
        samples_from: number of updates from which on it makes the rollouts; None: the policy makes them.
    """

    name: FollowerName
    decay: Callable[[int, int], float]
    samples_from: int | None = None


class RunSettings(Protocol):
    """The settings of a run that rules about it read; `TrainConfig` has them, and explains them."""

    @property
    def objective(self) -> "Objective": ...
    @property
    def model(self) -> str: ...
    @property
    def train(self) -> Literal["full", "lora"]: ...
    @property
    def updates(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def minibatches(self) -> int: ...
    @property
    def micro_batch(self) -> int | Literal["auto"]: ...
    @property
    def prompts(self) -> tuple[str, ...]: ...
    @property
    def data(self) -> tuple[str, ...]: ...
    @property
    def data_cache(self) -> Path | None: ...
    @property
    def data_errors(self) -> str: ...
    @property
    def weights(self) -> Path | None: ...
    @property
    def lora(self) -> LoraConfig: ...
    @property
    def rewards(self) -> tuple[Any, ...]: ...
    @property
    def stop_when_gamed(self) -> int: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def implementation(self) -> Implementation: ...
    @property
    def max_log_ratio(self) -> float: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def advantage(self) -> AdvantageConfig: ...
    @property
    def noising(self) -> NoisingConfig: ...
    @property
    def kl(self) -> KLConfig: ...
    @property
    def correction(self) -> CorrectionConfig: ...
    @property
    def asynchronous(self) -> AsyncConfig: ...
    @property
    def evaluation_steps(self) -> int: ...
    @property
    def evaluation_solver(self) -> str: ...
    @property
    def evaluation_guidance(self) -> Guidance: ...
    @property
    def is_built_in(self) -> bool: ...
    @property
    def asks_of_pipeline(self) -> bool: ...
    @property
    def updates_per_rollout(self) -> int: ...
    @property
    def makes_samples(self) -> bool: ...
    @property
    def scores_samples(self) -> bool: ...
    @property
    def takes_ratios(self) -> bool: ...
    @property
    def followers(self) -> tuple[Follower, ...]: ...
    @property
    def recorded_form(self) -> Form: ...


def nothing(config: RunSettings) -> Iterator[str]:
    """Yield no problem."""
    return iter(())


@dataclass(frozen=True)
class ObjectiveTraits:
    """What the trainer must know of an objective besides its loss.

    Args:
        trains_on: items of an update: steps (the recorded steps of a rollout), noised (clean samples with noise on them) or
            preferences (pairs of clean samples with the same noise, the preferred one first).
        compares_with: other policies whose prediction at each item the loss reads: old (the policy that made the rollout,
            `Items.v_old`), ref (the policy that training started from, `v_ref`), teacher (another model, `v_teacher`).
        rewards: what is learnt from: advantages or the order of the rewards in a group, which `target_weight` reads, the
            gradients of differentiable rewards (`LossConfig.reward`), or nothing.
        has_ratio: the loss compares log-probabilities with the old policy's, so that steps need noise where it trains on
            steps. The diagnostics have a field `log_ratio`, which is bounded in a first pass (`max_log_ratio`).
        skips_zero: items of target weight 0 add nothing to the loss, so that they need not be computed.
        mean_over_kept: the loss is averaged over the items whose target weight is not 0; the others get no KL either.
        flows_only: the loss is defined for models that predict a velocity alone.
        takes_kl: the loss adds a KL to the reference (`LossConfig.kl_coef`); otherwise kl.coef > 0 is an error.
        folds_guidance: the loss combines the halves of classifier-free guidance itself: where there is guidance, `v` is the
            conditional prediction, and the items have `v_uncond` and `guidance`. Models with guidance of their own, and
            the predictions of other policies, are guided before.
        takes_implementation: the loss calls a kernel (`LossConfig.implementation`); otherwise a choice is an error.
        offline: samples are given, and there is no rollout.
        groups: what the samples of a group have in common: their prompt; or, offline, their caption, each being another
            image of it, or nothing, each being the next one of the data.
        recorded_form: form of the log-probabilities that the rollout records, if not `rollout.form`.
        teacher: folder of the teacher's weights.
        preferences: folder of given preferences.
        followers: policies that follow the trained one; without one named old, the old policy is the policy before the
            rollout's first update.
        gathers: what the loss takes depends on the other samples. The objective then has two more methods, which are called
            before each update: `statistic(v, items) -> [P]`, without gradient, and `gathered(statistic, target_weight,
            group, counts) -> [B, M, ...]`. Their statistics `[B, M]` are of all samples at their M noise levels, of which
            `counts` marks those of this update. The loss finds the result as `Items.context`.
        through: with gradients, the number of last steps that these flow through, and its standard deviation.
        refuses: `config -> problems`, one line per combination of settings that has no meaning with this objective.
    """

    trains_on: TrainsOn
    compares_with: tuple[OtherPolicy, ...] = ()
    rewards: RewardUse = "advantages"
    has_ratio: bool = False
    skips_zero: bool = False
    mean_over_kept: bool = False
    flows_only: bool = False
    takes_kl: bool = False
    folds_guidance: bool = False
    takes_implementation: bool = False
    offline: bool = False
    groups: Literal["prompt", "caption", "data"] = "prompt"
    recorded_form: Form | None = None
    teacher: Path | None = None
    preferences: Path | None = None
    followers: tuple[Follower, ...] = ()
    gathers: bool = False
    through: tuple[int, float] | None = None
    refuses: Callable[[RunSettings], Iterator[str]] = nothing

    def __post_init__(self) -> None:
        check_fields(self, "traits")
        if self.folds_guidance and self.trains_on != "steps":
            raise ValueError(f"traits.folds_guidance is set, and trains_on is {self.trains_on}, expected steps")


class Objective(Protocol):
    """An objective: a frozen dataclass whose fields are its hyper-parameters."""

    @property
    def traits(self) -> ObjectiveTraits:
        """What the trainer must know; a class attribute, or a property where it depends on the hyper-parameters."""
        ...

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return what each sample's reward is to the loss, `[B]`; the loss finds it as `Items.target_weight`.

        Args:
            reward: weighted sum of the rewards, `[B]`.
            advantage: `[B]`.
            group: index of each sample's group, `[B]`.
        """
        ...

    def loss(self, v: Tensor, items: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, Any]:
        """Return the loss of each item, `[P]`, and a NamedTuple of diagnostics `[P]` without gradient.

        Args:
            v: the policy's prediction at each item, `[P, *event]` (`[P, 2, *event]` for preferences).
            items: P items.
            transition: coefficients of the recorded steps; None where there are none.
            config: settings of the run's loss.
        """
        ...
