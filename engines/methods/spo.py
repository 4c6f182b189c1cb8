"""SPO and LPO: stepwise preferences between candidates for the next state."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.d3po import D3po
from fluvial.engines.run.method import Needs
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.window import Candidates
from fluvial.engines.scoring.advantages import weigh_rewards
from fluvial.models import host_values

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class ConstantMargin:
    """The same margin at every step (SPO).

    Args:
        size: Minimum difference of the two preference probabilities, p - (1 - p) = tanh((R_best - R_worst) / 2).
    """

    kind: ClassVar[str] = "constant"
    size: float = 0.3

    def __post_init__(self) -> None:
        check_fields(self, "margin", size=(0, 1))

    def at(self, std: Tensor) -> Tensor:
        """Return the margin of steps with noise `std`, `[S]`."""
        return torch.full_like(std, self.size)


@dataclass(frozen=True)
class NoiseMargin:
    """A margin that grows with the noise of the step (LPO).

    Args:
        low: Margin of the step with the least noise.
        high: Margin of the step with the most noise; in between, the margin is linear in the noise.
    """

    kind: ClassVar[str] = "noise"
    low: float = 0.35
    high: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, "margin", low=(0, 1), high=(0, 1))

    def at(self, std: Tensor) -> Tensor:
        """Return the margin of steps with noise `std`, `[S]`."""
        place = (std - std.min()) / (std.max() - std.min()).clamp(min=torch.finfo(std.dtype).tiny)
        return self.low + (self.high - self.low) * place


@dataclass(frozen=True)
class Spo(D3po, name="spo"):
    """SPO: a preference between the best and the worst candidate for each state, with D3PO's loss (arXiv 2406.04314).

    A candidate is scored by the rewards of the clean sample that the model predicts from it. The papers' scorers, a
    step-aware preference model (SPO) and a reward model of noisy latents (LPO, arXiv 2502.01051), are not offered.

    Args:
        sampling: How rollouts are sampled, with window candidates.
        margin: Minimum difference of the best and the worst candidate of a pair, as a function of the step's noise:
            `ConstantMargin` or `NoiseMargin`.
    """

    learns_from_sums = False
    needs: ClassVar[Needs] = Needs(candidates=True)
    sampling: SamplingConfig = SamplingConfig(group=4, window=Candidates(low=4))
    beta: float = 10.0
    margin: ConstantMargin | NoiseMargin = ConstantMargin()

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if not self.sampling.window.records_candidates:
            hint = "spo compares candidates for the same state"
            yield UsageError("sampling.window", self.sampling.window.kind, "candidates", hint)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Score every candidate, and compare the best of each state with the worst."""
        trajectory, window = batch.trajectory, self.sampling.window
        steps = host_values.read(trajectory.steps)[0].tolist()
        rewards = list[Tensor]()
        for place, step in enumerate(steps):
            if step >= window.low:
                batch = run.finish(batch, trajectory.x_next[:, place], step + 1, jump=True)
                assert batch.rewards is not None
                rewards.append(weigh_rewards(batch.rewards.scores, run.runners.weights))
        margins = self.margin.at(batch.noise[steps[len(steps) - len(rewards) :]])
        sides = [torch.zeros(len(batch.kept_ids))] * (len(steps) - len(rewards))
        for reward, margin in zip(rewards, margins.tolist(), strict=True):
            sides.append(self.prefer(reward[batch.kept_ids], batch.group, least=2 * math.atanh(min(margin, 1 - 1e-7))))
        preferred = torch.stack(sides, dim=1)
        run.log(candidate_pairs=int((preferred > 0).sum()))
        yield from self.compare(run, batch, key, preferred)
