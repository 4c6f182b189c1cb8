"""Surrogate of TDM-R1: a network that is trained to prefer the better samples of a group, and serves as a teacher."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fluvial.core import dgpo
from fluvial.core.checks import check_fields
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.run.declared import Follower, Networks, Ramp, SameNetwork, Trained
from fluvial.engines.sampling.items import RenoisedSamples
from fluvial.engines.sampling.window import OneRecorded
from fluvial.engines.sampling.window import Trained as TrainedSteps
from fluvial.kernels import velocity_error
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Items

FAR = 0.05  # mean squared distance to the base above which samples that the surrogate prefers have no gradient


@dataclass(frozen=True)
class SurrogateConfig:
    """Surrogate of TDM-R1, trained to prefer the better samples of a group, and used as a teacher.

    Args:
        optimizer: Optimizer of the surrogate.
        trained: Which steps of the student the surrogate is trained on.
        lowest: Lowest noise level at which the surrogate is trained.
        beta: Inverse temperature of the preference of a group, without a unit.
        clip: Half-width of the clip of the ratio to the surrogate's moving average.
        kl: Weight of the surrogate's squared distance to the base.
        read_from: Lowest noise level at which the surrogate teaches the student.
        guidance: Guidance scale of the surrogate as a teacher.
        steps: Number of first steps of the student that the surrogate teaches; None is all.
    """

    optimizer: OptimizerConfig = OptimizerConfig()
    trained: TrainedSteps = OneRecorded("rollout", "late")
    lowest: float = 0.3
    beta: float = 10.0
    clip: float = 1e-3
    kl: float = 1e-3
    read_from: float = 0.3
    guidance: float = 4.5
    steps: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "surrogate", steps=(1, 2**31), **dict.fromkeys(("lowest", "read_from", "clip"), (0, 1)))
        check_fields(self, "surrogate", beta=(1e-12, math.inf), kl=(0, math.inf), guidance=(0, 1e4))

    def networks(self) -> Networks:
        """Declare the surrogate, its moving average, and the surrogate with guidance as a teacher."""
        average = Follower(Ramp(start=0.001, rise=0.001, cap=0.3, delay=1).compute_decay, network="surrogate")
        guide = SameNetwork("surrogate", self.guidance)
        return {"surrogate": Trained(self.optimizer), "average": average, "guide": guide}

    def weigh(self, run: "Run", noisy: "Items") -> "Items":
        """Return the items with their group's weight, whether the surrogate is far from the base, and the step's weight."""
        rows, batch, each = noisy.rows, noisy.batch, noisy.used.shape[1]
        error, error_ref = (velocity_error(rows.predictions[name], rows.target) for name in ("surrogate", "base"))
        margins = run.gather(noisy, dgpo.preference_margin(error, error_ref, rows.signal, beta=self.beta))
        counts = to_device((noisy.used != 0).to(margins.dtype), margins.device)
        group = to_device(torch.arange(batch.share.batch) // batch.compared, margins.device)
        weight = dgpo.group_weight(margins, group, counts=counts)
        distance = run.gather(noisy, velocity_error(rows.predictions["surrogate"], rows.predictions["base"]))
        far = (distance.sum() / counts.sum() > FAR).expand(len(rows.level))
        step = (rows.place % each + 1) / each
        return noisy.with_rows(context=torch.stack([noisy.look_up(weight), far.to(step.dtype), step], dim=1))

    def prefer(self, v: Tensor, rows: RenoisedSamples) -> tuple[Tensor, dgpo.DgpoInfo]:
        """Return `dgpo.dgpo_loss` of the ambient velocity, with the distance to the base."""
        assert rows.context is not None
        weight, far, step = rows.context.unbind(1)
        error, average, base = (
            velocity_error(each, rows.target) for each in (v, *(rows.predictions[n] for n in ("average", "base")))
        )
        masked = (far > 0) & (rows.signal * (base - error) > 0)
        clips = {"clip_low": self.clip, "clip_high": self.clip}
        loss, info = dgpo.dgpo_loss(torch.where(masked, error.detach(), error), average, rows.signal, weight, **clips)
        return step * (loss + self.kl * velocity_error(v, rows.predictions["base"])), info
