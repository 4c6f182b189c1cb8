"""DenseGRPO and TP-GRPO: a reward per step, from the ODE's samples before and after it."""

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
    """DenseGRPO: each step's advantage comes from its own gain in reward (arXiv 2601.20218).

        gain_k = R_{k+1} - R_k, with R_k the reward of the sample that the ODE reaches from the state before step k

    The gains of a sample add up to R_S - R_0. Each is compared with its group's gains at the same step. T steps cost about
    T^2 / 2 more forward passes, and T more rewards, per sample.

    The paper's calibration of each step's noise before training is not offered, because the paper has no numbers for it.
    Your own sampler may have an eta per step.
    """

    learns_from_sums = False

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        window, advantage, name = self.sampling.window, self.advantage, self.method_name
        if window.differs:
            hint = f"{name} starts the ODE from the same step of all samples"
            yield UsageError("sampling.window", window.kind, "one window for all samples of a rollout", hint)
        if window.tail != NO_TAIL:
            yield no_effect("sampling.window.tail", f"with {name}, which takes Euler's steps to the end")
        for field, default in {"combine": "sum", "history": 0, "floors": ()}.items():
            if getattr(advantage, field) != default:
                hint = f"{name} compares gains of the weighted sum of the rewards"
                yield UsageError(f"advantage.{field}", getattr(advantage, field), str(default), hint)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Score every recorded step by the ODE from it, then optimize the surrogate with each step's gain."""
        batch, rewards = score_steps(run, batch)
        yield from self.optimize(run, batch, key, run.grade(batch, self.advantage, self.gains(rewards)))

    def gains(self, rewards: Tensor) -> Tensor:
        """Return each step's reward, `[N, S]`, given the rewards before and after the steps, `[N, S+1]`."""
        return rewards.diff(dim=1)


@dataclass(frozen=True)
class TurningPointGrpo(DenseGrpo, name="tpgrpo"):
    """TP-GRPO: a turning point, where a sample starts to get better or worse, gets all of the later gain (arXiv 2602.06422).

    At other steps the reward is the step's own gain, as in DenseGRPO, see `core.advantages.turning_point_gains`.

    Args:
        balanced: Use equally many turning points for better and for worse, those with the largest changes, if a rollout has
            both.
    """

    balanced: bool = True

    def gains(self, rewards: Tensor) -> Tensor:
        """Return each step's reward, `[N, S]`, given the rewards before and after the steps, `[N, S+1]`."""
        return turning_point_gains(rewards, balanced=self.balanced).gain


def score_steps(run: "Run", batch: "Batch") -> "tuple[Batch, Tensor]":
    """Return the rewards of the ODE's samples from each recorded step, and of the samples, `[N, S+1]`. Collective.

    The returned batch lacks groups with an intermediate sample whose reward failed.
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
    return kept[-1], torch.stack([run.weigh_rewards(each) for each in kept], dim=1)
