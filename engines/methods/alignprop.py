"""AlignProp and DRaFT: the gradient of a differentiable reward, back through the last steps of the rollout."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.methods.losses import LossConfig
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.declared import Record
from fluvial.engines.sampling.backprop import final_samples, number_of_steps
from fluvial.engines.sampling.items import LastSteps
from fluvial.engines.sampling.window import AllSteps
from fluvial.models import host_values

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch, Items
    from fluvial.engines.run.run import Run


def _refuses(config: Any) -> Iterator[UsageError]:
    rollout = config.rollout
    last = getattr(config.objective, "last", 1)
    if last > rollout.steps:
        yield UsageError("objective.last", last, f"at most the {rollout.steps} steps of the schedule")
    if rollout.window != AllSteps():
        yield UsageError("rollout.window", rollout.window.kind, "all steps, which alignprop takes with the sampler again")
    if rollout.trained.kind != "all":
        yield no_effect("rollout.trained", "with alignprop, which trains on the last steps")
    for name in ("minibatches", "epochs"):
        if (count := getattr(config, name)) > 1:
            yield UsageError(name, count, "1", "alignprop goes back through the policy that made the rollout")


class AlignPropInfo(NamedTuple):
    """Diagnostics of AlignProp, one number per item, without gradient."""

    reward_again: Tensor  # weighted sum of the rewards of the samples, as the update computes them


@dataclass(frozen=True)
class AlignProp(Method):
    """AlignProp's loss: minus a differentiable reward, whose gradient flows back through the last steps (arXiv 2310.03739).

        loss = -scale R(x_0), or scale |R(x_0) - target| with a target

    With `spread` 0 it is DRaFT-K (arXiv 2309.17400). Rewards must be differentiable: PyTorch functions of the images that
    return a tensor with a gradient.

    Args:
        last: Number of last steps that the gradient flows through, K.
        spread: Standard deviation of that number, which is drawn per rollout; 0 always takes `last`.
        target: Reward that is aimed at; None maximises it.
        scale: Factor of the loss.
    """

    last: int = 1
    spread: float = 0.0
    target: float | None = None
    scale: float = 1.0
    traits = ObjectiveTraits(trains_on="steps", rewards="gradients", refuses=_refuses)
    record = Record(form="unscaled")

    def __post_init__(self) -> None:
        check_fields(
            self, "objective", last=(1, 2**31), spread=(0, math.inf), target=(-math.inf, math.inf), scale=(1e-12, math.inf)
        )

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Take the last steps again, and follow the gradient of the reward of where they lead."""
        steps = len(batch.plan.sampling.schedule.timesteps)
        count = number_of_steps(key, steps, last=self.last, spread=self.spread)
        for part in run.minibatches(run.return_to(batch, key, count, keep=run.grade(batch).keep), key):
            yield run.update(part, partial(self._loss_of, run, part))

    def _loss_of(self, run: "Run", items: "Items", v: Tensor, rows: LastSteps, config: LossConfig) -> tuple[Tensor, Any]:
        """Return the loss of rows of a run, whose rewards score where the last steps lead."""
        batch, sampling = items.batch, items.batch.plan.sampling
        assert sampling.stochastic is not None
        transition = sampling.stochastic.transition

        def reward(v: Tensor, rows: LastSteps) -> Tensor:
            final = final_samples(v, rows, transition, sampling.schedule, partial(run.forward, items))
            assert rows.place is not None
            prompts = [
                batch.prompt(place) for place in host_values.read(rows.place).clamp(max=batch.share.batch - 1).tolist()
            ]
            return run.rewards_of(final, prompts, method="alignprop")

        return self.loss(v, rows, config._replace(reward=reward))

    def loss(self, v: Tensor, items: LastSteps, config: LossConfig) -> tuple[Tensor, AlignPropInfo]:
        """Return minus the reward of the samples that the last steps lead to, or its distance to the target."""
        assert config.reward is not None
        reward = config.reward(v, items)
        loss = -reward if self.target is None else (reward - self.target).abs()
        return self.scale * loss, AlignPropInfo(reward.detach())
