"""Protocol of objectives: a frozen dataclass of hyper-parameters with `traits`, `target_weight` and `loss`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.gaussian import Form
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import LossConfig

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig

TrainsOn = Literal["steps", "noised", "preferences"]
OtherPolicy = Literal["old", "ref", "teacher"]
FollowerName = Literal["old", "ema", "sampling", "ref"]
RewardUse = Literal["advantages", "order", "gradients", "nothing"]


@dataclass(frozen=True)
class Follower:
    """A policy that lags behind the trained one, as a LoRA adapter of its own: it <- d it + (1 - d) policy.

    Args:
        name: role in the run, and its name in the items' `predictions`: old, ema, ref (the reference, in place of the base
            model) or sampling (it makes rollouts, and no prediction of it is read).
        decay: `(rollouts, updates) -> d`, of the numbers made so far; called after each rollout.
        samples_from: number of updates from which on it makes the rollouts; None: the policy makes them.
    """

    name: FollowerName
    decay: Callable[[int, int], float]
    samples_from: int | None = None


def ramp(rollouts: int, updates: int, *, rise: float, cap: float, start: float = 0.0, delay: int = 0) -> float:
    """Return a follower's decay d after n updates: start while n < delay, then min(start + rise (n - delay), cap)."""
    return start if updates < delay else min(start + rise * (updates - delay), cap)


def nothing(config: "TrainConfig") -> Iterator[UsageError]:
    """Yield no problem."""
    return iter(())


@dataclass(frozen=True)
class ObjectiveTraits:
    """Properties of an objective that the trainer reads, besides its loss.

    Args:
        trains_on: kind of items: steps (`RecordedSteps`; `LastSteps` where gradients flow `through` them), noised
            (`NoisedSamples`) or preferences (`Pairs`), see `sampling.items`.
        compares_with: other policies whose prediction at each item the loss reads, in the items' `predictions`: old (the
            policy that made the rollout), ref (the policy that training started from), teacher (another model).
        rewards: what is learnt from: advantages or the order of the rewards in a group, which `target_weight` reads, the
            gradients of differentiable rewards (`LossConfig.reward`), or nothing.
        has_ratio: the loss compares log-probabilities with the old policy's, so that steps need noise where it trains on
            steps. The diagnostics have a field `log_ratio`, which is bounded in a first pass (`max_log_ratio`).
        skips_zero: items of target weight 0 add nothing to the loss, so that they need not be computed.
        mean_over_kept: the loss is averaged over the items whose target weight is not 0; the others get no KL either.
        flows_only: the loss is defined for models that predict a velocity alone.
        takes_kl: the loss adds a KL to the reference (`LossConfig.kl_coef`); otherwise kl.coef > 0 is an error.
        folds_guidance: the loss combines the halves of classifier-free guidance itself: with guidance, `v` is the
            conditional prediction, and the items have `predictions["uncond"]` and `guidance`. Models with guidance of their
            own, and the predictions of other policies, are guided before.
        takes_implementation: the loss calls a kernel (`LossConfig.implementation`); otherwise a choice is an error.
        offline: samples are given, and there is no rollout.
        groups: what the samples of a group have in common: their prompt; or, offline, their caption, each being another
            image of it, or nothing, each being the next one of the data.
        recorded_form: form of the log-probabilities that the rollout records, if not `rollout.form`.
        teacher: folder of the teacher's weights.
        preferences: folder of given preferences.
        followers: policies that follow the trained one; without one named old, the old policy is the policy before the
            rollout's first update.
        gathers: the loss depends on the other samples: the objective is a `Gathering`.
        through: number of last steps that the rewards' gradients flow through, and its standard deviation.
        refuses: `config -> problems`, a UsageError or a line for each setting that has no meaning with this objective.
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
    refuses: Callable[..., Iterator[UsageError | str]] = nothing

    def __post_init__(self) -> None:
        check_fields(self, "traits")
        if self.folds_guidance and self.trains_on != "steps":
            raise ValueError(f"traits.folds_guidance is set, and trains_on is {self.trains_on}, expected steps")


class Objective(Protocol):
    """An objective: a frozen dataclass whose fields are its hyper-parameters."""

    @property
    def traits(self) -> ObjectiveTraits:
        """Its traits; a class attribute, or a property where they depend on the hyper-parameters."""
        ...

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return each sample's target weight in the loss, `[B]`; its items have it as `target_weight`.

        Args:
            reward: weighted sum of the rewards, `[B]`.
            advantage: `[B]`.
            group: index of each sample's group, `[B]`.
        """
        ...

    def loss(self, v: Tensor, items: Any, config: LossConfig) -> tuple[Tensor, Any]:
        """Return the loss of each item, `[P]`, and a NamedTuple of diagnostics `[P]` without gradient.

        Args:
            v: the policy's prediction at each item, `[P, *event]` (`[P, 2, *event]` for pairs).
            items: P items, of the kind that `traits.trains_on` names.
            config: settings of the run's loss.
        """
        ...


class Gathering(Objective, Protocol):
    """An objective whose loss depends on the other samples, through statistics that are gathered before each update."""

    def statistic(self, v: Tensor, items: Any) -> Tensor:
        """Return the statistic of each item, `[P]`, without gradient."""
        ...

    def gathered(self, statistic: Tensor, target_weight: Tensor, group: Tensor, counts: Tensor) -> Tensor:
        """Return what the loss of each item reads of the other samples, `[B, M, ...]`; its items have it as `context`.

        Args:
            statistic: statistics of all samples at their M noise levels, `[B, M]`.
            target_weight: `[B]`.
            group: index of each sample's group, `[B]`.
            counts: 1 for the items of this update, else 0, `[B, M]`.
        """
        ...


def the_advantage(self: object, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
    """Return the advantage: the `target_weight` of a policy gradient."""
    return advantage


def equal_weights(self: object, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
    """Return 1 for every sample: the `target_weight` of an objective that learns from all of them alike."""
    return torch.ones_like(reward)
