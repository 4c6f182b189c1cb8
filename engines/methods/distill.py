"""On-policy distillation: the student samples, the teacher says which step it would have taken."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from fluvial.core import distill
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import ErrorInfo, KLConfig, fit_prediction
from fluvial.engines.run.declared import Networks, Teacher
from fluvial.engines.run.method import Method, Needs, PassesConfig, RecordedRows
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.engines.sampling.window import AllRecorded, Trained
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


@dataclass(frozen=True)
class Distill(Method, name="distill"):
    """On-policy distillation: fit the teacher's step at the samples that the student reaches (arXiv 2306.13649).

    Args:
        sampling: How samples are made.
        trained: Which of the recorded steps are trained on: `AllRecorded`, `FirstRecorded` or `RandomRecorded`.
        passes: How often a batch is learnt from.
        kl: KL terms that keep the policy near the one that training starts from.
        teacher: Folder of the teacher's weights, as a run's export writes them.
        match: What is matched: mean_kl (the KL between the two Gaussian steps, in nats per dimension) or velocity_mse (the
            mean squared distance of the two predictions, which deterministic steps have too).
    """

    needs: ClassVar[Needs] = Needs(rewards=None)
    sampling: SamplingConfig = SamplingConfig()
    trained: Trained = AllRecorded()
    passes: PassesConfig = PassesConfig()
    kl: KLConfig = KLConfig()
    teacher: Path | None = None
    match: Literal["mean_kl", "velocity_mse"] = "mean_kl"

    def problems(self) -> Iterator[UsageError]:
        """Yield what has no meaning among the hyper-parameters."""
        yield from super().problems()
        if self.match == "mean_kl" and self.sampling.sampler.is_deterministic:
            hint = f"mean_kl compares distributions, and steps of {self.sampling.sampler.kind} have no noise"
            yield UsageError("match", "mean_kl", "velocity_mse", hint)

    @property
    def rows(self) -> RecordedRows:
        """Train on recorded steps, in a form that deterministic ones have too if predictions are matched."""
        return RecordedRows("unscaled" if self.match == "velocity_mse" else "density", trained=self.trained)

    def networks(self) -> Networks:
        """Keep the teacher, and the references of the KL terms."""
        return {"teacher": Teacher(self.teacher), **self.kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the teacher's step at each step that the student took."""
        items = run.record_steps(batch, key, trained=self.trained, keep=run.grade(batch).keep)
        for part in run.minibatches(items, key, self.passes):
            yield run.update(run.predict(part, *self.networks()), self.loss)

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, ErrorInfo]:
        """Return the distance between the student's and the teacher's step, and the KL terms."""
        v_teacher, predictions = rows.predictions["teacher"], self.match == "velocity_mse"
        error = velocity_error(v, v_teacher) if predictions else distill.mean_kl(rows.transition, v, v_teacher)
        return fit_prediction(error, v, rows, self.kl)
