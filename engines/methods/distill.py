"""On-policy distillation: the student samples, the teacher says which step it would have taken."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from fluvial.core import distill
from fluvial.core.checks import check_fields
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import ErrorInfo, KLConfig, LossConfig, fit_prediction
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.declared import Networks, Record, Teacher
from fluvial.engines.sampling.items import RecordedSteps

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


def _mean_kl_needs(config: Any) -> Iterator[UsageError]:
    if config.rollout.sampler.is_deterministic:
        hint = f"mean_kl compares distributions, and steps of {config.rollout.sampler.kind} have no noise"
        yield UsageError("objective.match", "mean_kl", "velocity_mse", hint)


@dataclass(frozen=True)
class Distill(Method):
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
        common = ObjectiveTraits(trains_on="steps", rewards="nothing", takes_kl=True)
        if self.match == "velocity_mse":
            return replace(common, takes_implementation=True)
        return replace(common, refuses=_mean_kl_needs)

    @property
    def record(self) -> Record:
        """Record the steps, in a form that deterministic ones have too if predictions are matched."""
        return Record(form="unscaled" if self.match == "velocity_mse" else None)

    def networks(self, kl: KLConfig) -> Networks:
        """Keep the teacher, and the references of the KL terms."""
        return {"teacher": Teacher(self.teacher), **kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the teacher's step at each step that the student took."""
        items = run.record_steps(batch, key, keep=run.grade(batch).keep)
        for part in run.minibatches(items, key):
            yield run.update(run.predict(part, "teacher", "ref", "ema"), self.loss)

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """Return the distance between the student's and the teacher's step."""
        v_teacher, predictions = items.predictions["teacher"], self.match == "velocity_mse"
        error = config.error(v, v_teacher) if predictions else distill.mean_kl(items.transition, v, v_teacher)
        return fit_prediction(error, v, items, config)
