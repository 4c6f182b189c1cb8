"""Protocol of a method: a frozen dataclass of hyper-parameters that collects a batch and learns from it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import KLConfig, LossConfig
from fluvial.engines.run.declared import Networks

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


TrainsOn = Literal["steps", "noised", "preferences"]
RewardUse = Literal["advantages", "order", "gradients", "nothing"]


def nothing(config: Any) -> Iterator[UsageError]:
    """Yield no problem."""
    return iter(())


@dataclass(frozen=True)
class ObjectiveTraits:
    """Properties of a method that decide which settings of a run have a meaning with it.

    Args:
        trains_on: kind of items: steps (recorded ones), noised (clean samples with noise) or preferences (pairs of these).
        rewards: what is learnt from: advantages or the order of the rewards in a group, the gradients of differentiable
            rewards, or nothing.
        has_ratio: the loss compares log-probabilities with the old policy's, so that steps need noise where it trains on
            steps. The diagnostics have a field `log_ratio`, which is bounded in a first pass (`max_log_ratio`).
        flows_only: the loss is defined for models that predict a velocity alone.
        takes_kl: the loss adds a KL to the reference (`LossConfig.kl_coef`); otherwise kl.coef > 0 is an error.
        takes_implementation: the loss calls a kernel (`LossConfig.implementation`); otherwise a choice is an error.
        offline: samples are given, and there is no rollout.
        groups: what the samples of a group have in common: their prompt; or, offline, their caption, each being another
            image of it, or nothing, each being the next one of the data.
        preferences: folder of given preferences.
        refuses: `config -> problems`, a UsageError or a line for each setting that has no meaning with this method.
    """

    trains_on: TrainsOn
    rewards: RewardUse = "advantages"
    has_ratio: bool = False
    flows_only: bool = False
    takes_kl: bool = False
    takes_implementation: bool = False
    offline: bool = False
    groups: Literal["prompt", "caption", "data"] = "prompt"
    preferences: Path | None = None
    refuses: Callable[..., Iterator[UsageError | str]] = nothing

    def __post_init__(self) -> None:
        check_fields(self, "traits")


class Method:
    """A method: what it needs, and two functions that read like the box in its paper.

    A subclass is a frozen dataclass whose fields are its hyper-parameters. It says what it learns by, `traits`, and has
    `learn` and the loss that this calls. `collect` and `learn` are apart so that batches may be collected ahead.
    """

    traits: Any  # `ObjectiveTraits`; a property where they depend on the hyper-parameters
    record: Any = None  # `Record`: what a rollout records of its stochastic steps; None records nothing

    def networks(self, kl: KLConfig) -> Networks:
        """Return the networks beside the policy that are read, by name: here those of the KL terms."""
        return kl.networks() if self.traits.takes_kl else {}

    def collect(self, run: "Run", key: Key) -> "Batch":
        """Return the next batch: here samples of the policy."""
        return run.sample(key)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Yield each update on a batch: `epochs * minibatches` of them."""
        raise NotImplementedError

    def loss(self, v: Tensor, rows: Any, config: LossConfig) -> tuple[Tensor, Any]:
        """Return the loss of each row, `[P]`, and a NamedTuple of diagnostics `[P]` without gradient.

        Args:
            v: the policy's prediction at each row, `[P, *event]` (`[P, 2, *event]` for pairs).
            rows: P rows, of the kind that `traits.trains_on` names.
            config: settings of the run's losses.
        """
        raise NotImplementedError


Objective = Method  # as `TrainConfig.objective` is called
