"""Rewards of single steps, of what the ODE makes of a sample before and after each: DenseGRPO and TP-GRPO."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fluvial.core.advantages import turning_point_gains
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.sampling.tail import NO_TAIL
from fluvial.models import host_values

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class DenseGrpo(Grpo, name="densegrpo"):
    """DenseGRPO: each step's advantage is that of its own gain in reward (arXiv 2601.20218).

        gain_k = R_{k+1} - R_k, R_k the reward of what the ODE makes of the sample before step k

    The gains of a sample add up to R_S - R_0. Each is compared with those of the same step in its group. T steps cost about
    T^2 / 2 more forward passes, and T more rewards, per sample.

    Its calibration of each step's noise before training is not offered: the paper gives no numbers for it. A sampler of your
    own may have an eta per step.
    """

    learns_from_sums = False

    def problems(self) -> Iterator[UsageError]:
        """Yield what has no meaning among the hyper-parameters."""
        yield from super().problems()
        window, advantage, name = self.sampling.window, self.advantage, self.method_name
        if window.differs:
            hint = f"{name} takes the ODE from the same step of all samples"
            yield UsageError("sampling.window", window.kind, "one window for all samples of a rollout", hint)
        if window.tail != NO_TAIL:
            yield no_effect("sampling.window.tail", f"with {name}, which takes Euler's steps to the end")
        for field, default in {"combine": "sum", "history": 0, "floors": ()}.items():
            if getattr(advantage, field) != default:
                hint = f"{name} compares gains of the weighted sum of the rewards"
                yield UsageError(f"advantage.{field}", getattr(advantage, field), str(default), hint)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Score what the ODE makes of every recorded step, then climb the surrogate with the gain of each step."""
        batch, rewards = score_steps(run, batch)
        yield from self.climb(run, batch, key, run.grade(batch, self.advantage, self.gains(rewards)))

    def gains(self, rewards: Tensor) -> Tensor:
        """Return the reward of each step, `[N, S]`, from those before and after them, `[N, S+1]`."""
        return rewards.diff(dim=1)


@dataclass(frozen=True)
class TurningPointGrpo(DenseGrpo, name="tpgrpo"):
    """TP-GRPO: a step from which on a sample gets better, or worse, gets the whole of that gain (arXiv 2602.06422).

    At other steps the reward is the step's own gain, as in DenseGRPO, see `core.advantages.turning_point_gains`.

    Args:
        balanced: Take as many turning points to better samples as to worse ones, those of samples that change most, where
            a rollout has both.
    """

    balanced: bool = True

    def gains(self, rewards: Tensor) -> Tensor:
        """Return the reward of each step, `[N, S]`, from those before and after them, `[N, S+1]`."""
        return turning_point_gains(rewards, balanced=self.balanced).gain


def score_steps(run: "Run", batch: "Batch") -> "tuple[Batch, Tensor]":
    """Return the reward of what the ODE makes of each recorded step, and of the samples, `[N, S+1]`; every rank takes part.

    The batch is returned without the groups that a reward fails at on the way.
    """
    trajectory = batch.trajectory
    steps = host_values.read(trajectory.steps)[0].tolist()
    scored, last = [batch], batch
    for place, step in enumerate(steps):
        last = run.finish(last, trajectory.x[:, place], step)
        scored.insert(-1, last)
    assert batch.rewards is not None
    assert last.rewards is not None
    kept = [replace(each, rewards=each.rewards._replace(kept=last.rewards.kept)) for each in scored]  # type: ignore[union-attr]
    return kept[-1], torch.stack([run.reward(each) for each in kept], dim=1)
