"""ReFL: backpropagates the reward of the clean sample that is predicted at one late step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.run.method import EpochsConfig, Method, Needs, RecordedRows
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.engines.sampling.samplers import Ode
from fluvial.engines.sampling.window import AllSteps, OneRecorded
from fluvial.engines.sampling.window import Trained as TrainedSteps
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch, Items


class RewardInfo(NamedTuple):
    """Diagnostics, one number per item, without gradient."""

    reward: Tensor  # reward of the predicted clean sample


@dataclass(frozen=True)
class Refl(Method, name="refl"):
    """ReFL's loss: the shortfall of the predicted clean sample's reward from a margin (arXiv 2304.05977).

        loss = scale relu(margin - R(x0)),  x0 the clean sample that the policy predicts at one late step, with gradient

    Earlier steps have no gradient. Rewards must be differentiable: PyTorch functions of the images that return a tensor with
    a gradient. As in the published code there is no further term; the paper adds the pre-training loss. Two details follow
    the paper, not the code, which samples with DDPM: the network gets the replayed step's own timestep (the code passes its
    index, 30 to 39), and the clean sample is predicted at the step's own level (the code uses the level of the step before).

    Args:
        sampling: How rollouts are sampled; one step of the window is replayed.
        trained: Which step is replayed: the same for all samples, as published, or one drawn per sample.
        margin: Reward above which there is no gradient; None sets no limit.
        scale: Factor of the loss.
    """

    needs: ClassVar[Needs] = Needs(rewards="gradients")
    bounds: ClassVar = {"margin": (-math.inf, math.inf), "scale": (1e-12, math.inf)}
    sampling: SamplingConfig = SamplingConfig(prompts=64, group=1, steps=40, sampler=Ode(), window=AllSteps(low=30))
    trained: TrainedSteps = OneRecorded("rollout")
    passes: EpochsConfig = EpochsConfig()
    margin: float | None = None
    scale: float = 1.0

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if not self.sampling.sampler.rule.last_step_is_deterministic:
            hint = "a step to the end of the schedule must be the predicted clean sample"
            yield UsageError("sampling.sampler", self.sampling.sampler.kind, "ode, cps or ddim", hint)

    @property
    def rows(self) -> RecordedRows:
        """Record steps in form unscaled, which is defined for deterministic steps, too."""
        return RecordedRows("unscaled", trained=self.trained)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Replay one step per sample, to its predicted clean sample, and follow the gradient of its reward."""
        steps = run.record_steps(batch, key, trained=self.trained, keep=run.grade(batch).keep)
        for part in run.minibatches(steps, key, self.passes):
            yield run.update(part, partial(self.loss, reward=partial(self.score, run, part)))

    def score(self, run: "Run", items: "Items", v: Tensor, rows: RecordedSteps) -> Tensor:
        """Return the reward of the predicted clean samples, `[P]`, with gradient."""
        sampling = items.batch.spec.sampling
        assert sampling.stochastic is not None
        end = to_device(sampling.schedule.levels[-1], rows.level.device).to(rows.level.dtype).expand_as(rows.level)
        return run.compute_rewards(items, rows, gaussian.mean(sampling.stochastic.transition(rows.level, end), rows.x, v))[0]

    def loss(self, v: Tensor, rows: RecordedSteps, reward: Any = None) -> tuple[Tensor, RewardInfo]:
        """Return the reward's shortfall from the margin, or minus the reward without one."""
        scores = reward(v, rows)
        loss = -scores if self.margin is None else (self.margin - scores).relu()
        return self.scale * loss, RewardInfo(scores.detach())
