"""On-policy distillation: the student samples, and is fitted to the steps that teachers would take."""

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
    """On-policy distillation: fit the teacher's step at the student's own samples (arXiv 2306.13649, 2605.15055).

    Several teachers can be distilled into one student; each teaches the prompts of its source. A teacher may use guidance
    that the student does not need.

    Args:
        teacher: Folder of the teacher's weights or adapter, as written by a run's export. With several teachers, one
            SOURCE=FOLDER each, where SOURCE is the name of a `prompts` file without its extension, or of a prompt set.
        guidance: Guidance scale of the teachers, 4.5 for all, or SOURCE=4.5 for some; by default the update's.
        match: Distance to the teacher: mean_kl (KL between the two Gaussian steps, in nats per dimension), or a mean squared
            distance, which deterministic steps have too: of the predictions (velocity_mse), of the next samples, halved
            (sample_mse), or of a flow's predicted clean samples (clean_mse), also relative to their mean distance
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
        """No reward is needed; matching of clean samples needs a flow."""
        return Needs(prediction="velocity" if self.match.startswith("clean") else None, rewards=None)

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if self.match == "mean_kl" and self.sampling.sampler.is_deterministic:
            hint = f"mean_kl compares distributions, and steps of {self.sampling.sampler.kind} have no noise"
            yield UsageError("match", "mean_kl", "velocity_mse", hint)

    @property
    def rows(self) -> RecordedRows:
        """Train on recorded steps, in form unscaled unless the KL is matched, so that they may be deterministic."""
        return RecordedRows("density" if self.match == "mean_kl" else "unscaled", trained=self.trained)

    def networks(self) -> Networks:
        """Declare the teachers, and the references of the KL terms."""
        return {"teacher": parse_teachers(self.teacher, self.guidance), **self.kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the teacher's step at each recorded step of the student."""
        items = run.record_steps(batch, key, trained=self.trained, keep=run.grade(batch).keep)
        for part in run.minibatches(items, key, self.passes):
            yield run.update(run.predict(part), self.loss)

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, ErrorInfo]:
        """Return the distance between the student's and the teacher's step, with the KL terms."""
        return fit_prediction(self._distance(v, rows.predictions["teacher"], rows), v, rows, self.kl)

    def _distance(self, v: Tensor, v_teacher: Tensor, rows: RecordedSteps) -> Tensor:
        if self.match == "mean_kl":
            return distill.mean_kl(rows.transition, v, v_teacher)
        if self.match == "velocity_mse":
            return velocity_error(v, v_teacher)
        if self.match == "sample_mse":
            return distill.scaled_mse(v, v_teacher, rows.transition.b) / 2
        return distill.scaled_mse(v, v_teacher, rows.level, relative=self.match == "clean_relative")
