"""On-policy distillation: the student samples, a teacher says which step it would have taken."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fluvial.core import distill
from fluvial.core.checks import check_fields
from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.losses import ErrorInfo, LossConfig, add_velocity_kl
from fluvial.engines.objectives.protocol import ObjectiveTraits, equal_weights
from fluvial.engines.rollout.items import RecordedSteps
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.train.config import TrainConfig


def _refuses_mean_kl(config: "TrainConfig") -> Iterator[UsageError]:
    if config.rollout.sampler.is_deterministic:
        hint = f"mean_kl compares distributions, and steps of {config.rollout.sampler.kind} have no noise"
        yield UsageError("objective.match", "mean_kl", "velocity_mse", hint)


@dataclass(frozen=True)
class Distill:
    """On-policy distillation: fit the teacher's step at the samples that the student reaches (arXiv 2306.13649).

    Args:
        teacher: Folder of the teacher's weights, as a run's export writes them.
        match: What is matched: mean_kl (the KL between the two Gaussian steps, in nats per dimension) or velocity_mse (the
            mean squared distance of the two predictions, which deterministic steps have too).
    """

    teacher: Path | None = None
    match: Literal["mean_kl", "velocity_mse"] = "mean_kl"

    def __post_init__(self) -> None:
        check_fields(self, "objective")

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """Matching predictions has a kernel and needs no density of a step; matching steps is the other way round."""
        common = ObjectiveTraits(
            trains_on="steps", compares_with=("teacher",), rewards="nothing", takes_kl=True, teacher=self.teacher
        )
        if self.match == "velocity_mse":
            return replace(common, takes_implementation=True, recorded_form="unscaled")
        return replace(common, refuses=_refuses_mean_kl)

    target_weight = equal_weights

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """Return the distance between the student's and the teacher's step."""
        v_teacher = items.predictions["teacher"]
        if self.match == "velocity_mse":
            error = velocity_error(v, v_teacher, implementation=config.implementation)
        else:
            error = distill.mean_kl(items.transition, v, v_teacher)
        loss, kl = add_velocity_kl(error, v, items, config)
        return loss, ErrorInfo(error.detach(), kl)
