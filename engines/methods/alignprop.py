"""AlignProp and DRaFT: backpropagation of a differentiable reward through the last steps of the rollout."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.run.method import EpochsConfig, Method, Needs, RecordedRows
from fluvial.engines.sampling.backprop import final_samples, number_of_steps
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import LastSteps
from fluvial.engines.sampling.window import AllSteps

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch, Items


class AlignPropInfo(NamedTuple):
    """Diagnostics of AlignProp, one number per item, without gradient."""

    reward_again: Tensor  # weighted sum of the rewards, recomputed in the update


@dataclass(frozen=True)
class AlignProp(Method, name="alignprop"):
    """AlignProp's loss: the negative of a reward, differentiated through the last steps (arXiv 2310.03739).

        loss = -scale R(x_0), or scale |R(x_0) - target| with a target

    With `spread` 0 it is DRaFT-K (arXiv 2309.17400). Rewards must be differentiable: PyTorch functions of the images that
    return a tensor with a gradient.

    Args:
        last: Number K of last steps that the gradient flows through.
        spread: Standard deviation of that number, drawn per rollout; 0 always takes `last`.
        target: Target value of the reward; None maximises it.
        scale: Factor of the loss.
    """

    needs: ClassVar[Needs] = Needs(rewards="gradients")
    bounds: ClassVar = {
        **{"last": (1, 2**31), "spread": (0, math.inf), "target": (-math.inf, math.inf), "scale": (1e-12, math.inf)},
    }
    passes: ClassVar[EpochsConfig] = EpochsConfig()  # type: ignore[misc] # on-policy: one update per rollout
    sampling: SamplingConfig = SamplingConfig()
    last: int = 1
    spread: float = 0.0
    target: float | None = None
    scale: float = 1.0

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        window, steps = self.sampling.window, self.sampling.steps
        if self.last > steps:
            yield UsageError("last", self.last, f"at most the {steps} steps of the schedule")
        if window != AllSteps():
            yield UsageError("sampling.window", window.kind, "all steps", "alignprop replays them with the sampler")
        yield from super().problems()

    @property
    def rows(self) -> RecordedRows:
        """Record steps in form unscaled, which is defined for deterministic steps, too."""
        return RecordedRows("unscaled")

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Replay the last steps, and follow the gradient of the reward of their final samples."""
        steps = len(batch.spec.sampling.schedule.timesteps)
        count = number_of_steps(key, steps, last=self.last, spread=self.spread)
        items = run.return_to(batch, key, count, keep=run.grade(batch).keep)
        for part in run.minibatches(items, key, self.passes):
            yield run.update(part, partial(self.loss, reward=partial(self.score, run, part)))

    def score(self, run: "Run", items: "Items", v: Tensor, rows: LastSteps) -> Tensor:
        """Return the reward of the replayed final samples, `[P]`, with gradient."""
        sampling = items.batch.spec.sampling
        assert sampling.stochastic is not None
        final = final_samples(v, rows, sampling.stochastic.transition, sampling.schedule, partial(run.forward, items))
        return run.compute_rewards(items, rows, final)[0]

    def loss(self, v: Tensor, rows: LastSteps, reward: Any = None) -> tuple[Tensor, AlignPropInfo]:
        """Return minus the reward of the replayed final samples, or its distance to the target."""
        scores = reward(v, rows)
        loss = -scores if self.target is None else (scores - self.target).abs()
        return self.scale * loss, AlignPropInfo(scores.detach())
