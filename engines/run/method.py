"""A method: a frozen dataclass of hyper-parameters that declares what it needs, collects a batch and learns from it."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.random import Key
from fluvial.engines.choices import find_default, is_set
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.plugins import spec_of
from fluvial.engines.run.declared import Networks, Start
from fluvial.engines.sampling.config import Correction, NoCorrection, ReadingConfig, SamplingConfig, Truncate
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.sampling.solvers import Solver
from fluvial.engines.sampling.window import AllRecorded, Trained
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.models import Prediction


@dataclass(frozen=True)
class EpochsConfig:
    """Epochs over a batch, for a method with one optimizer update per epoch.

    Args:
        epochs: Number of epochs over the samples of a batch.
    """

    epochs: int = 1
    minibatches: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self, "passes", **dict.fromkeys(("epochs", "minibatches"), (1, 2**31)))

    @cached_property
    def updates(self) -> int:
        """Number of optimizer updates on a batch."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class PassesConfig(EpochsConfig):
    """Passes over a batch: its epochs and minibatches. These are not forward passes, see `run/passes`.

    Args:
        minibatches: Number of optimizer updates per epoch, each on an equal part of the samples.
    """

    minibatches: int = 1  # type: ignore[misc]


@dataclass(frozen=True)
class RecordedRows:
    """Rows of an update that are recorded steps of the rollout: x, x_next and the log-probability.

    Args:
        form: form of the log-probability.
        reduction: its reduction over the event.
        velocity: whether the prediction is recorded as well.
        trained: which recorded steps are trained on.
    """

    form: Form = "density"
    reduction: Reduction = "mean"
    velocity: bool = False
    trained: Trained = AllRecorded()


@dataclass(frozen=True)
class NoisedRows:
    """Rows of an update that are noised clean samples, or pairs of samples with the same noise.

    Args:
        noising: the noise levels.
        paired: whether they are pairs.
    """

    noising: NoisingConfig
    paired: bool = False


@dataclass(frozen=True)
class Images:
    """Source of samples: images of a dataset, with captions.

    Args:
        compare: scope in which images are compared: one caption, or the whole data; None neither compares nor scores.
        column: metadata column that each image's record must have.
        values: accepted values of that column.
    """

    compare: Literal["caption", "data"] | None = None
    column: str | None = None
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Preferences:
    """Source of samples: pairs of a preference dataset.

    Args:
        folder: folder of the dataset.
    """

    folder: Path


@dataclass(frozen=True)
class Needs:
    """Requirements of a method on the model, the rewards and the machine.

    Args:
        prediction: required prediction of the model; None accepts any.
        ratio: the loss has a ratio of the policy to the rollout's, so both must compute the same numbers. On recorded steps
            it is a ratio of densities, so the steps need noise. Diagnostics have a field `log_ratio`.
        candidates: recorded states may differ from those that sampling continues from (the window candidates).
        conditional: recorded steps may be trained on without the guidance of the rollout.
        off_schedule: networks are evaluated at noise levels off the sampling schedule, whatever the rows.
        least_rewards: smallest number of rewards.
        rewards: scores, or gradients of differentiable rewards; None needs no reward.
        graphs: largest number of forward passes per row whose graphs a loss holds until its backward pass.
        images: prompts of rollouts are captions of a dataset's images, which are trained on as well.
    """

    prediction: Prediction | None = None
    ratio: bool = False
    candidates: bool = False
    conditional: bool = False
    off_schedule: bool = False
    least_rewards: int = 0
    rewards: Literal["scores", "gradients"] | None = "scores"
    graphs: int = 1
    images: bool = False


class Method:
    """A method: its hyper-parameters, its needs, and two functions that read like the algorithm box of its paper.

    A subclass is a frozen dataclass whose fields are its hyper-parameters. It has `sampling`, `passes`, `rows`, `learn`, and
    the loss that `learn` optimizes; `name="..."` after the base class is its name on the command line, by default
    module:Class. `collect` and `learn` are separate, so that batches can be collected ahead.

    Fields without a description in the subclass have these:

    Args:
        sampling: How samples are generated.
        noising: Noise levels at which clean samples are trained on.
        trained: Which recorded steps are trained on.
        advantage: How rewards become advantages.
        passes: How often a batch is trained on.
        kl: KL terms that keep the policy near its reference, where training starts.
    """

    method_name: ClassVar[str]
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}  # smallest and largest value of hyper-parameters
    needs: ClassVar[Needs] = Needs()
    sampling: ReadingConfig = SamplingConfig()
    passes: EpochsConfig = PassesConfig()
    advantage: AdvantageConfig | None = None
    correction: Correction | None = None
    serving_solver: ClassVar[Solver | None] = None  # solver that the trained model must be sampled with; None accepts any
    learns_from_sums: ClassVar[bool] = True  # a group of equal weighted rewards has no gradient

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        cls.method_name = f"{cls.__module__}:{cls.__qualname__}" if name is None else name

    def __post_init__(self) -> None:
        check_kinds(self)
        check_fields(self, "", **self.bounds)
        for problem in self.problems():
            raise problem

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        sampling, rows = self.sampling, self.rows
        if sampling.batch % self.passes.minibatches:
            expected = f"a divisor of the {sampling.batch} samples of a rollout"
            yield UsageError("passes.minibatches", self.passes.minibatches, expected)
        name, reference = "kl.guidance" if hasattr(self, "kl") else "ref_guidance", self.networks().get("ref")
        if reference is None and hasattr(self, "kl") and self.kl.guidance is not None:
            yield no_effect(name, "with `kl.coef` 0, without a reference")
        if isinstance(reference, Start) and reference.guidance is not None and sampling.guidance.update == "conditional":
            yield no_effect(name, "with `sampling.guidance.update` conditional, where the policy has none")
        if sampling.window.records_candidates and not self.needs.candidates:
            hint = f"{self.method_name} learns from whole samples"
            yield UsageError("sampling.window", sampling.window.kind, "another than candidates", hint)
        yield from self._check_groups()
        yield from self._check_steps(rows) if isinstance(rows, RecordedRows) else self._check_levels(rows)

    def _check_groups(self) -> Iterator[UsageError]:
        """Yield conflicts about the comparison of samples in a group."""
        sampling, advantage = self.sampling, self.advantage or AdvantageConfig()
        scores = self.needs.rewards == "scores" or self.needs.ratio
        compares = scores and self.is_scored and not advantage.history
        if compares and sampling.group < 2:
            hint = f"{self.method_name} compares a sample with others of its group"
            yield UsageError("sampling.group", sampling.group, "at least 2", hint)
        if sampling.groups.kind != "all" and (self.source is not None or not scores):
            yield no_effect("sampling.groups", f"with {self.method_name} here, which compares no samples of a rollout")
        if sampling.groups.kind == "refilled" and (advantage.history or advantage.floors):
            name = "advantage.history" if advantage.history else "advantage.floors"
            hint = "with it, samples of equal rewards have an advantage, and `sampling.groups` refilled replaces them"
            yield UsageError(name, getattr(advantage, name.partition(".")[2]), "its default", hint)
        if sampling.groups.kind == "refilled" and not (self.learns_from_sums and advantage.combine == "sum"):
            hint = f"{self.method_name} learns from groups whose weighted sums of rewards are equal, too"
            yield UsageError("sampling.groups", "refilled", "all or scouted", hint)
        compared = sampling.window.count_compared(sampling.group)
        if 2 * advantage.extremes > compared:
            yield UsageError("advantage.extremes", advantage.extremes, f"at most half of the {compared} that are compared")

    def _check_levels(self, rows: NoisedRows) -> Iterator[UsageError]:
        """Yield conflicts of a method that trains on clean samples."""
        sampling = self.sampling
        rows.noising.check_steps(sampling.steps)
        if self.source is None:
            return
        hint = f"{self.method_name} learns from data here, without a rollout"
        if (sampling.sampler.kind, sampling.sampler.solver) != ("ode", "euler"):
            yield UsageError("sampling.sampler", sampling.sampler.kind, "ode with solver euler", hint)
        if sampling.shared_noise:
            yield no_effect("sampling.shared_noise", f"with {hint}")

    def _check_steps(self, rows: RecordedRows) -> Iterator[UsageError]:
        """Yield conflicts of a method that trains on recorded steps."""
        sampling, sampler, name = self.sampling, self.sampling.sampler, self.method_name
        window, unscaled, ratio = sampling.window, rows.form == "unscaled", self.needs.ratio
        high = sampling.steps - 1
        if ratio and sampler.is_deterministic:
            hint = f"{name} needs the log-probability of each step, which deterministic steps do not have"
            yield UsageError("sampling.sampler", sampler.kind, "a stochastic one, e.g. flow_sde", hint)
        elif sampler.solver != "euler":
            hint = f"{name} trains on steps, which are transitions"
            yield UsageError("sampling.sampler.solver", sampler.solver, "euler", hint)
        if self.correction is not None and self.correction.kind != "none" and unscaled:
            yield UsageError("form", "unscaled", "density or no_const", "a correction takes a ratio of densities")
        if sampling.guidance.update == "conditional" and not self.needs.conditional:
            hint = f"{name} trains on steps of guided rollouts"
            yield UsageError("sampling.guidance.update", "conditional", "guided", hint)
        if not (sampler.rule.last_step_is_deterministic and window.range(sampling.steps)[1] == sampling.steps):
            return
        if not unscaled and (window.differs or window.count(sampling.steps) == 1):
            hint = f"the last step of {sampler.kind} has no log-probability, except in `form` unscaled"
            yield UsageError("sampling.window.high", window.high, f"at most {high}", hint)
        recorded = window.count(sampling.steps)
        left_out = rows.trained.kind == "first" and rows.trained.count(recorded) < recorded
        if unscaled and ratio and self.networks() and not left_out:
            hint = f"the last step of {sampler.kind} has no KL, and form unscaled trains on it"
            yield UsageError("sampling.window.high", window.high, f"at most {high}, or another form, or kl.coef 0", hint)

    @property
    def rows(self) -> RecordedRows | NoisedRows:
        """The rows of the loss: noised clean samples if the method has `noising`, else recorded steps."""
        if hasattr(self, "noising"):
            return NoisedRows(self.noising)
        return RecordedRows(trained=getattr(self, "trained", AllRecorded()))

    @property
    def source(self) -> Images | Preferences | None:
        """The dataset of images or pairs that samples come from; None for rollouts."""
        return None

    @property
    def is_scored(self) -> bool:
        """Whether rewards score the samples: of a rollout, or of a dataset whose images are compared."""
        return self.source is None or (isinstance(self.source, Images) and self.source.compare is not None)

    @cached_property
    def is_paired(self) -> bool:
        """Whether a row is a pair of samples."""
        return isinstance(self.rows, NoisedRows) and self.rows.paired

    @cached_property
    def recorded(self) -> RecordedRows | None:
        """The rows of a method that trains on recorded steps; None for other methods."""
        return self.rows if isinstance(self.rows, RecordedRows) else None

    def networks(self) -> Networks:
        """Declare the networks beside the policy, by name; by default those of the KL terms."""
        return self.kl.networks() if hasattr(self, "kl") else {}

    def collect(self, run: Any, key: Key) -> Any:
        """Return the next batch: by default a rollout, collected as `sampling.groups` says."""
        return self.sampling.groups.collect(run, key)

    def learn(self, run: Any, batch: Any, key: Key) -> Iterator[Any]:
        """Make the policy's `passes.updates` optimizer updates on a batch, and yield each."""
        raise NotImplementedError

    def loss(self, v: Tensor, rows: Any) -> tuple[Tensor, Any]:
        """Return the loss of each row, `[P]`, and a NamedTuple of diagnostics `[P]` without gradient.

        Args:
            v: the policy's prediction at each row, `[P, *event]` (`[P, 2, *event]` for pairs).
            rows: P rows, of the kind that `rows` declares.
        """
        raise NotImplementedError


# Functions of a method and their arguments.
CALLS = {
    "networks": (),
    "collect": ("run", "key"),
    "learn": ("run", "batch", "key"),
    "loss": ("v", "rows"),
}
KINDS: dict[str, tuple[type, ...]] = {
    "needs": (Needs,),
    "sampling": (ReadingConfig,),
    "passes": (EpochsConfig,),
    "rows": (RecordedRows, NoisedRows),
    "correction": (NoCorrection, Truncate, NoneType),
}


def explain_no_method(kind: Any) -> str | None:
    """Return why a class is not a method; None if it is one."""
    if not isinstance(kind, type):
        return f"is of type {type(kind).__name__}, expected a class"
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "is not a frozen dataclass: decorate it with @dataclass(frozen=True)"
    if not issubclass(kind, Method):
        return "is not a method: let it inherit from `fluvial.engines.methods.Method`"
    for name, parameters in CALLS.items():
        method = getattr(kind, name)
        expected = f"{name}(self, {', '.join(parameters)})"
        if method is Method.learn:
            return f"has no method {expected}"
        try:
            inspect.signature(method).bind("self", *parameters)
        except TypeError as error:
            return f"has {name}{inspect.signature(method)}, expected {expected}: {error}"
    return None


def check_method(method: Any) -> None:
    """Raise UsageError unless an object is a method."""
    kind = type(method)
    if isinstance(method, type):
        raise UsageError(f"method is the class {method.__name__}, expected an instance: {method.__name__}()")
    if (problem := explain_no_method(kind)) is not None:
        raise UsageError(f"method {spec_of(kind)} {problem}")


def check_kinds(method: Method) -> None:
    """Raise UsageError unless the members of a method have the expected types."""
    for name, kinds in KINDS.items():
        if not isinstance(value := getattr(method, name), kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            got = type(value).__name__
            raise UsageError(f"method {method.method_name} has {name} of type {got}, expected {expected}")
    fields: tuple[Any, ...] = dataclasses.fields(method)  # type: ignore[arg-type]
    default = next((find_default(field) for field in fields if field.name == "sampling"), method.sampling)
    for field in dataclasses.fields(method.sampling):
        if field.name not in vars(default) and is_set(method.sampling, field.name):
            raise no_effect(f"sampling.{field.name}", f"with {method.method_name}, which has no such setting")
