"""Distribution matching: a few-step student is trained on the difference of a teacher and a model of its own samples."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from fluvial.core.checks import per_sample
from fluvial.core.distill import MatchForm, matching_loss
from fluvial.core.random import Key
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.run.declared import Base, Networks, Teacher, Trained
from fluvial.engines.run.method import EpochsConfig, Method, Needs, PassesConfig, RecordedRows
from fluvial.engines.sampling.items import RecordedSteps, RenoisedSamples
from fluvial.engines.sampling.window import AllRecorded
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch, Items


class MatchInfo(NamedTuple):
    """Diagnostics of the student, one number per item, without gradient."""

    gap: Tensor  # mean |x0_real - x0_fake|^2, 0 for a perfect student


class FakeInfo(NamedTuple):
    """Diagnostics of the model of the student's samples, one number per item, without gradient."""

    error: Tensor  # mean squared error before the item's weight


@dataclass(frozen=True)
class Matching(Method):
    """Base of DMD2 and TDM: a student, its teacher (real), and a model of the student's samples (fake).

    Args:
        teacher: Folder of the teacher's weights; None is the model without adapters.
        guidance: Guidance scale of the teacher.
        fake: Optimizer of the model of the student's samples.
        form: Form of the matching loss, see `core.distill.matching_loss`.
        huber: Size of a correction above which form huber takes its sign.
    """

    needs: ClassVar[Needs] = Needs(prediction="velocity", rewards=None, off_schedule=True)
    passes: ClassVar[EpochsConfig] = EpochsConfig()  # type: ignore[misc] # on-policy: one update per rollout
    follows_ode: ClassVar[bool] = False  # whether the student's steps are deterministic
    shares: ClassVar[bool] = False  # whether each update of the fake takes a part of the samples
    bounds: ClassVar = {"guidance": (0, 1e4), "fake_updates": (1, 2**31), "huber": (1e-12, 1e4)}
    teacher: Path | None = None
    guidance: float = 4.5
    fake: OptimizerConfig = OptimizerConfig()
    form: MatchForm = "dmd"
    huber: float = 1e-3

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if self.form != "huber" and self.huber != 1e-3:
            yield no_effect("huber", f"with `form` {self.form}")
        if self.follows_ode and self.sampling.sampler.kind != "ode":
            yield UsageError("sampling.sampler", self.sampling.sampler.kind, "ode", f"{self.method_name} follows the ODE")
        if self.shares and (total := self.sampling.batch) % (shares := getattr(self, "fake_updates", 1)):
            yield UsageError("fake_updates", shares, f"a divisor of the {total} samples of a rollout")

    @property
    def rows(self) -> RecordedRows:
        """Train on recorded steps, including deterministic ones, with the rollout's velocity."""
        return RecordedRows("unscaled", velocity=True, trained=getattr(self, "trained", AllRecorded()))

    def networks(self) -> Networks:
        """Declare the teacher, and the trained model of the student's samples."""
        real = Base(self.guidance) if self.teacher is None else Teacher(self.teacher, self.guidance)
        return {"real": real, "fake": Trained(self.fake)}

    def split(self, run: "Run", batch: "Batch", key: Key, count: int, **samples: Tensor) -> "Iterator[Items]":
        """Yield the recorded steps in `count` parts of the samples, with further tensors per sample, `[slots, ...]`."""
        steps = run.record_steps(batch, key, trained=self.rows.trained, keep=run.grade(batch).keep)
        steps = steps.with_predictions(**{name: values[steps.rows.sample] for name, values in samples.items()})
        return run.minibatches(steps, key, PassesConfig(minibatches=count))

    def correct(self, run: "Run", part: "Items", noisy: "Items") -> "Items":
        """Return the steps with the teacher's correction of their clean samples, and its prediction of them."""
        rows: RenoisedSamples = run.predict(noisy, "real", "fake").rows
        level, real, fake = per_sample(rows.level, rows.x), rows.predictions["real"], rows.predictions["fake"]
        return part.with_predictions(correction=level * (fake - real), reference=clean(rows, real))

    def loss(
        self, v: Tensor, rows: RecordedSteps, reward: Any = lambda rows, x0: 0.0, coef: float = 1.0
    ) -> tuple[Tensor, MatchInfo]:
        """Return `core.distill.matching_loss` of the student's predicted clean sample, with the reward term."""
        x0 = clean(rows, v)
        d, reference = rows.predictions["correction"], rows.predictions["reference"]
        loss = matching_loss(x0, d, reference, form=self.form, huber=self.huber)
        return coef * loss + reward(rows, x0), MatchInfo((d**2).flatten(1).mean(1))

    def fake_loss(self, v: Tensor, rows: RenoisedSamples) -> tuple[Tensor, FakeInfo]:
        """Return the flow matching error on the student's samples."""
        error = velocity_error(v, rows.target)
        return error, FakeInfo(error.detach())


def clean(rows: RecordedSteps | RenoisedSamples, v: Tensor) -> Tensor:
    """Return the clean sample of each row as predicted by a velocity, `[P, *event]`."""
    return rows.x - per_sample(rows.level, rows.x) * v
