"""BranchGRPO: trees of paths, with an advantage per edge."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fluvial.core.advantages import edge_advantages
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import Splits
from fluvial.engines.scoring.advantages import AdvantageConfig, clip_advantages
from fluvial.models import host_values

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class BranchGrpo(Grpo, name="branchgrpo"):
    """BranchGRPO: each edge of a tree of paths is compared with the other edges of its step (arXiv 2509.06040).

    An edge's reward is the mean over the leaves below it, and each edge is trained on once, see
    `core.advantages.edge_advantages`. Samples are computed path by path, so a tree saves updates, not rollouts.

    Not offered: means weighted by the children's probabilities, pruning of depths, and the published code's noise at a
    split, which is four times the noise of the density in its ratio.
    """

    sampling: SamplingConfig = SamplingConfig(steps=20, sampler=Stochastic("dance_sde", 0.3), window=Splits())
    advantage: AdvantageConfig = AdvantageConfig(eps=1e-8, clip=5.0)

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if not isinstance(self.sampling.window, Splits):
            hint = "branchgrpo compares the edges of trees"
            yield UsageError("sampling.window", self.sampling.window.kind, "splits", hint)
        known = AdvantageConfig(eps=self.advantage.eps, clip=self.advantage.clip, ddof=self.advantage.ddof)
        if self.advantage != known:
            yield no_effect("advantage", "with branchgrpo, except for eps, clip and ddof")

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Optimize the surrogate of every edge, with its advantage among the edges of its step."""
        grades, window = run.grade(batch, self.advantage), self.sampling.window
        assert isinstance(window, Splits)
        steps = host_values.read(batch.trajectory.steps)[0].tolist()
        edge = torch.tensor([[window.first_leaf(i, step) for step in steps] for i in batch.kept_ids.tolist()])
        edges = edge_advantages(grades.reward, edge, batch.group, eps=self.advantage.eps, ddof=self.advantage.ddof)
        advantage, once = clip_advantages(edges.advantage, self.advantage), edges.first.to(grades.keep.dtype)
        run.log(advantage=advantage[edges.first])
        yield from self.optimize(run, batch, key, grades._replace(advantage=advantage, keep=once))
