"""On-policy distillation: the student samples, teachers say which step they would have taken."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fluvial.core import distill
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import ErrorInfo, KLConfig, fit_prediction
from fluvial.engines.run.declared import Networks, parse_teachers
from fluvial.engines.run.method import Method, Needs, PassesConfig, RecordedRows
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.engines.sampling.window import AllRecorded, Trained
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class Distill(Method, name="distill"):
    """On-policy distillation: fit a teacher's step at the samples that the student reaches (arXiv 2306.13649, 2605.15055).

    Several teachers share the prompts by their source, and become one student. Each may have guidance that the student does
    without.

    Args:
        teacher: The teacher: a folder of weights or of an adapter, as a run's export writes them. Several have a source of
            prompts each, as SOURCE=FOLDER: the name of a file of `prompts` without its ending, or of a prompt set.
        guidance: Scale of the teachers' guidance, 4.5 for all, or SOURCE=4.5 for some; by default that of the update.
        match: What is matched: mean_kl (the KL between the two Gaussian steps, in nats per dimension); or the mean squared
            distance, which deterministic steps have too, of the predictions (velocity_mse), of the next samples, halved
            (sample_mse), or of a flow's clean samples that are predicted (clean_mse), also relative to their mean distance
            (clean_relative).
    """

    sampling: SamplingConfig = SamplingConfig()
    trained: Trained = AllRecorded()
    passes: PassesConfig = PassesConfig()
    kl: KLConfig = KLConfig()
    teacher: tuple[str, ...] = ()
    guidance: tuple[str, ...] = ()
    match: Literal["mean_kl", "velocity_mse", "sample_mse", "clean_mse", "clean_relative"] = "mean_kl"

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Learn from no reward; clean samples are those of a flow."""
        return Needs(prediction="velocity" if self.match.startswith("clean") else None, rewards=None)

    def problems(self) -> Iterator[UsageError]:
        """Yield what has no meaning among the hyper-parameters."""
        yield from super().problems()
        if self.match == "mean_kl" and self.sampling.sampler.is_deterministic:
            hint = f"mean_kl compares distributions, and steps of {self.sampling.sampler.kind} have no noise"
            yield UsageError("match", "mean_kl", "velocity_mse", hint)

    @property
    def rows(self) -> RecordedRows:
        """Train on recorded steps, in a form that deterministic ones have too unless their KL is matched."""
        return RecordedRows("density" if self.match == "mean_kl" else "unscaled", trained=self.trained)

    def networks(self) -> Networks:
        """Keep the teachers, and the references of the KL terms."""
        return {"teacher": parse_teachers(self.teacher, self.guidance), **self.kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the teacher's step at each step that the student took."""
        items = run.record_steps(batch, key, trained=self.trained, keep=run.grade(batch).keep)
        for part in run.minibatches(items, key, self.passes):
            yield run.update(run.predict(part), self.loss)

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, ErrorInfo]:
        """Return the distance between the student's and the teacher's step, and the KL terms."""
        return fit_prediction(self._distance(v, rows.predictions["teacher"], rows), v, rows, self.kl)

    def _distance(self, v: Tensor, v_teacher: Tensor, rows: RecordedSteps) -> Tensor:
        if self.match == "mean_kl":
            return distill.mean_kl(rows.transition, v, v_teacher)
        if self.match == "velocity_mse":
            return velocity_error(v, v_teacher)
        if self.match == "sample_mse":
            return distill.scaled_mse(v, v_teacher, rows.transition.b) / 2
        return distill.scaled_mse(v, v_teacher, rows.level, relative=self.match == "clean_relative")
