"""Find out how a pipeline of diffusers makes a step's velocity from its transformer's outputs, by watching a run."""

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.models.protocol import Cond
from fluvial.models.replay.checks import ReplayError, check_chain, refusal
from fluvial.models.replay.experts import trained_parts
from fluvial.models.replay.places import Places, places_in_input, places_in_output

MOST_PARTS = 4  # outputs that a velocity may be a weighted sum of
LEAST_WEIGHT = 1e-6  # weights below are rounding
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}  # of a weighted sum
SCALES = ("guidance_scale", "true_cfg_scale")  # names that diffusers' pipelines have for the scale of guidance
FURTHER_SCALES = ("guidance_scale_2",)  # of some of the steps, or of a part of the sample


class Latent(NamedTuple):
    """An input that is the sample: cast, and repeated along the batch for guidance."""

    dtype: torch.dtype
    repeats: int


class Holds(NamedTuple):
    """An input that holds the sample, cast, among other numbers, which are the next row."""

    dtype: torch.dtype
    repeats: int
    places: Places  # in the elements of the sample followed by the other numbers


class Row(NamedTuple):
    """An input with one row per sample, repeated along the batch for guidance."""

    repeats: int
    each_step: bool  # whether it differs from step to step


class Fixed(NamedTuple):
    """An input that all samples and steps share, tensor or not."""

    value: Any


Leaf = Latent | Holds | Row | Fixed


class Call(NamedTuple):
    """One call of the transformer: the source of each input, as leaves of the pytree (args, kwargs)."""

    tree: Any  # an optree.PyTreeSpec
    leaves: tuple[Leaf, ...]  # a Holds is followed by the Row of its other numbers
    dtype: torch.dtype  # of the output

    @property
    def repeats(self) -> int:
        """Number of copies of the batch in the call."""
        return next(leaf.repeats for leaf in self.leaves if isinstance(leaf, Latent | Holds))


class Combination(NamedTuple):
    """A step's velocity as a function of one part, or of two with classifier-free guidance: c + g (c - u) or u + g (c - u).

    A part is the transformer's output for one copy of the batch; the parts of all calls are numbered in order.
    """

    cond: int | None = None  # index of c among two parts; None if there is one part
    scale: float = 1.0  # g
    from_cond: bool = False  # starts from c, as in Z-Image
    keep_norm: bool = False  # rescaled to the norm of c over the last dimension, as in Lumina 2
    first_half: bool = False  # takes the first half of the channels; the other half is a learned variance
    negative: bool = False  # the transformer predicts x0 - eps
    dtype: torch.dtype | None = None  # dtype that the parts are cast to first
    places: Places | None = None  # elements of the output that the velocity consists of; None if it is the whole

    def __call__(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`, at samples x."""
        if self.dtype is not None:
            parts = [part.to(self.dtype) for part in parts]
        v = parts[0]
        if self.cond is not None:
            c, u = parts[self.cond], parts[1 - self.cond]
            v = (c if self.from_cond else u) + self.scale * (c - u)
            if self.keep_norm:
                v = v * (torch.norm(c, dim=-1, keepdim=True) / torch.norm(v, dim=-1, keepdim=True))
        if self.first_half:
            v = v.chunk(2, dim=1)[0]
        if self.places is not None:
            v = self.places.gather(v.flatten(1))
        return -v if self.negative else v


class Fitted(NamedTuple):
    """A step's velocity as a weighted sum of parts and of the sample, fitted where no formula of `Combination` gives it."""

    weights: tuple[float, ...]  # of the parts
    of_sample: float
    dtype: torch.dtype  # of the velocity

    def __call__(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`, at samples x; the sum is taken in float64."""
        v = sum(weight * part.double() for weight, part in zip(self.weights, parts, strict=True))
        return (v + self.of_sample * x.double()).to(self.dtype)


@dataclass(frozen=True)
class StepRecipe:
    """Calls and combination that give the velocity of one or more recorded steps."""

    calls: tuple[Call, ...]
    combination: Combination | Fitted
    positions: tuple[int, ...]  # indices of the steps among the recorded ones

    def predict(self, module: nn.Module, x: Tensor, rows: Sequence[Tensor], place: Tensor) -> Tensor:
        """Return the velocity of P pairs of a sample and a step.

        Args:
            module: the transformer.
            x: samples, `[P, *event]`.
            rows: inputs with one row per sample, `[P, repeats, ...]`, or `[P, S, repeats, ...]` if they differ by step.
            place: index of each pair's step among the S steps, `[P]` int64.
        """
        values, pairs, parts = iter(rows), torch.arange(len(x), device=x.device), []
        for call in self.calls:
            leaves = []
            kinds = iter(call.leaves)
            for leaf in kinds:
                if isinstance(leaf, Latent):
                    leaves.append(x.to(leaf.dtype).repeat(leaf.repeats, *[1] * (x.ndim - 1)))
                elif isinstance(leaf, Holds | Row):
                    row = next(kinds) if isinstance(leaf, Holds) else leaf
                    value = next(values)
                    value = value[pairs, place] if isinstance(row, Row) and row.each_step else value
                    if isinstance(leaf, Holds):
                        sample = x.to(leaf.dtype).flatten(1)[:, None].expand(-1, leaf.repeats, -1)
                        value = leaf.places.gather(torch.cat([sample, value], dim=-1))
                    leaves.append(value.transpose(0, 1).flatten(0, 1))
                else:
                    leaves.append(leaf.value.to(x.device) if isinstance(leaf.value, Tensor) else leaf.value)
            args, kwargs = optree.tree_unflatten(call.tree, leaves)
            parts.extend(_output(module(*args, **kwargs)).chunk(call.repeats))
        return self.combination(parts, x)


class _Group(NamedTuple):
    """Recorded steps with the same recipe."""

    calls: list[Call]
    combinations: list[Combination | Fitted]  # combinations that gave the velocity of all these steps
    positions: list[int]
    rows: list[list[Tensor]]  # rows of each step; the same objects where they are equal


class Capture:
    """Record the inputs and outputs of a part within each step until the scheduler receives the velocity.

    `asked` are the arguments of the pipeline's call.

    Raises:
        ValueError: the pipeline does not take those arguments.
    """

    def __init__(self, pipe: Any, component: str, asked: dict[str, Any]) -> None:
        self.pipeline, self.component, self.scales = type(pipe).__name__, component, _scales(pipe, asked)
        self.taken: list[int] = []  # steps of the schedule, in the order they were taken
        self.initial: Tensor | None = None  # samples before the first step
        self._output: Tensor | None = None  # of the last step
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._outputs: list[Any] = []
        self._groups: list[_Group] = []
        self._recorded = 0

    @contextmanager
    def watching(self, pipe: Any, scheduler: Any) -> Iterator[None]:
        """Run a pipeline with another scheduler and watch its transformer and the scheduler's steps."""
        own = pipe.scheduler
        networks = [pipe.components[name] for name in trained_parts(pipe, self.component)]
        handles = [module.register_forward_pre_hook(self._before, with_kwargs=True) for module in networks]
        handles += [module.register_forward_hook(self._after) for module in networks]
        scheduler.step = self._following(scheduler.step)
        pipe.scheduler = scheduler
        try:
            yield
        finally:
            pipe.scheduler = own
            vars(scheduler).pop("step", None)  # the class has its own
            for handle in handles:
                handle.remove()

    def step(self, step: int, x: Tensor, v: Tensor, recorded: bool) -> None:
        """Find the calls and combinations that give a step's velocity v; steps that are not recorded are only checked.

        Raises:
            ReplayError: the step does not start from the output of the one before, or its velocity is not understood.
        """
        if self._output is None:
            self.initial = x.detach().clone()
        else:
            check_chain(self.pipeline, step, x, self._output)
        self.taken.append(step)
        inputs, outputs = self._inputs, self._outputs
        self._inputs, self._outputs = [], []
        if not recorded:
            return
        if not inputs:
            raise self._refusal(step, f"the {self.component} is not called")
        calls: list[Call] = []
        rows: list[Tensor] = []
        parts: list[Tensor] = []
        for given, output in zip(inputs, outputs, strict=True):
            leaves, tree = optree.tree_flatten(given)
            copies = [_copies(leaf, x) for leaf in leaves]
            held = [None if count else places_in_input(leaf, x) for leaf, count in zip(leaves, copies, strict=True)]
            repeats = next(
                (
                    count or len(leaf) // len(x)
                    for leaf, count, inside in zip(leaves, copies, held, strict=True)
                    if count or inside is not None
                ),
                None,
            )
            if repeats is None:
                raise self._refusal(step, f"the {self.component} is called without the sample that the scheduler has")
            kinds: list[Leaf] = []
            for leaf, count, inside in zip(leaves, copies, held, strict=True):
                if count:
                    kinds.append(Latent(leaf.dtype, count))
                elif inside is not None:
                    places, others = inside
                    kinds += [Holds(leaf.dtype, others.shape[1], places), Row(others.shape[1], False)]
                    rows.append(others)
                elif isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) in (repeats * len(x), len(x)):
                    kinds.append(Row(len(leaf) // len(x), False))
                    rows.append(leaf.detach().unflatten(0, (-1, len(x))).transpose(0, 1))
                else:
                    kinds.append(Fixed(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf))
            returned = _output(output)
            if not isinstance(returned, Tensor) or len(returned) != repeats * len(x):
                raise self._refusal(step, f"the {self.component} does not return one output per sample")
            calls.append(Call(tree, tuple(kinds), returned.dtype))
            parts.extend(returned.chunk(repeats))
        combinations: list[Combination | Fitted] = [
            found for made in _combinations(parts, v, self.scales) if (found := _fitting(made, parts, v, x))
        ]
        if not combinations and (sum_of_parts := _fitted(parts, v, x)) is not None:
            combinations.append(sum_of_parts)
        if not combinations:
            scales = " or ".join(f"{scale:g}" for scale in self.scales) or "none"
            raise self._refusal(
                step,
                f"its velocity is no known combination of {len(parts)} outputs of the {self.component} (guidance {scales})",
            )
        self._add(calls, rows, combinations)

    def recipes(self) -> tuple[tuple[StepRecipe, ...], Cond]:
        """Return the recipes of the recorded steps, and the inputs with one row per sample.

        Raises:
            ReplayError: several combinations give the velocities of some steps.
        """
        recipes, cond = [], []
        for group in self._groups:
            if len(group.combinations) > 1:
                raise self._refusal(
                    None,
                    "several combinations of the outputs give its velocity; use prompts other than the negative one",
                )
            each_step = [any(row is not first for row in others) for first, *others in zip(*group.rows, strict=True)]
            flags = iter(each_step)
            calls = []
            for call in group.calls:
                leaves = (leaf._replace(each_step=next(flags)) if isinstance(leaf, Row) else leaf for leaf in call.leaves)
                calls.append(call._replace(leaves=tuple(leaves)))
            recipes.append(StepRecipe(tuple(calls), group.combinations[0], tuple(group.positions)))
            columns = zip(zip(*group.rows, strict=True), each_step, strict=True)
            cond.append(tuple(torch.stack(column, dim=1) if differs else column[0] for column, differs in columns))
        return tuple(recipes), tuple(cond)

    def _following(self, step: Any) -> Any:
        """Return a scheduler's step that keeps its output, to compare the next step's sample with."""

        @functools.wraps(step)  # pipelines look at its signature
        def following(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._output = result[0].detach().clone()  # the pipeline may write to the sample
            return result

        return following

    def _add(self, calls: list[Call], rows: list[Tensor], combinations: list[Combination | Fitted]) -> None:
        """Add a step to the group of its recipe; tensors that equal those of another step are stored once."""
        position, self._recorded = self._recorded, self._recorded + 1
        for at, group in enumerate(self._groups):
            both = [known for known in group.combinations if known in combinations]
            if both and _alike(group.calls, calls) and [_kind(row) for row in group.rows[0]] == [_kind(row) for row in rows]:
                kept = [
                    first if torch.equal(first, row) else row.clone() for first, row in zip(group.rows[0], rows, strict=True)
                ]
                group.positions.append(position)
                group.rows.append(kept)
                self._groups[at] = group._replace(combinations=both)
                return
        self._groups.append(_Group(calls, combinations, [position], [[row.clone() for row in rows]]))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Containers are copied, because the transformer may change them.
        self._inputs.append(optree.tree_map(lambda leaf: leaf, (args, kwargs)))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._outputs.append(output)

    def _refusal(self, step: int | None, reason: str) -> ReplayError:
        return refusal(self.pipeline, reason, step=step)


def same_steps(left: Sequence[StepRecipe], right: Sequence[StepRecipe]) -> bool:
    """Return whether two runs of a pipeline have the same recipes, apart from the inputs with one row per sample."""
    return len(left) == len(right) and all(
        one.positions == other.positions and one.combination == other.combination and _alike(one.calls, other.calls)
        for one, other in zip(left, right, strict=True)
    )


def _combinations(parts: Sequence[Tensor], v: Tensor, scales: Sequence[float]) -> Iterator[Combination]:
    """Yield the combinations of parts that have the shape of v, simple ones first."""
    if len(parts) > 2 or any(part.shape != parts[0].shape for part in parts):
        return
    dtype = None if parts[0].dtype == v.dtype else v.dtype
    half = parts[0].shape[1:] == (2 * v.shape[1], *v.shape[2:])
    for negative in (False, True):
        made = partial(Combination, first_half=half, negative=negative, dtype=dtype)
        if len(parts) == 1:
            yield made()
            continue
        for scale, cond, from_cond, keep_norm in product(scales, (1, 0), (False, True), (False, True)):
            yield made(cond=cond, scale=scale, from_cond=from_cond, keep_norm=keep_norm)


def _fitting(combination: Combination, parts: Sequence[Tensor], v: Tensor, x: Tensor) -> Combination | None:
    """Return a combination that gives v to the bit, as it is or by some elements of it; None if it does not."""
    made = combination(parts, x)
    if made.shape == v.shape:
        return combination if _same(made, v) else None
    places = places_in_output(-v if combination.negative else v, combination._replace(negative=False)(parts, x))
    return None if places is None else combination._replace(places=places)


def _fitted(parts: Sequence[Tensor], v: Tensor, x: Tensor) -> Fitted | None:
    """Return the weighted sum of parts and sample that v is up to rounding; None if it is not one.

    The weights are least squares in float64, rounded to seven digits, so that two prompts give the same. Several parts only:
    one part with another weight would be a scale that no guidance has.
    """
    if len(parts) < 2 or len(parts) > MOST_PARTS or v.dtype not in ROUNDING or any(part.shape != v.shape for part in parts):
        return None
    columns = torch.stack([tensor.detach().double().flatten() for tensor in (*parts, x)], dim=1).cpu()
    wanted = v.detach().double().flatten().cpu()
    solved = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0].tolist()
    *weights, of_sample = (0.0 if abs(weight) < LEAST_WEIGHT else float(f"{weight:.7g}") for weight in solved)
    found = Fitted(tuple(weights), of_sample, v.dtype)
    error = (found(parts, x).double() - v.double()).norm() / v.double().norm()
    return found if float(error) <= ROUNDING[v.dtype] else None


def _copies(leaf: Any, x: Tensor) -> int:
    """Return the number of copies of the sample that an input consists of, along the batch; 0 for any other input."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.shape[1:] != x.shape[1:] or leaf.ndim != x.ndim:
        return 0
    count, rest = divmod(len(leaf), len(x))
    if rest or not count:
        return 0
    return count if torch.equal(leaf, x.to(leaf.dtype).repeat(count, *[1] * (x.ndim - 1))) else 0


def _output(output: Any) -> Any:
    """Return the first output of a transformer, which returns a tensor, a tuple or diffusers' output."""
    return output if isinstance(output, Tensor) else output[0]


def _same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _alike(left: Sequence[Call], right: Sequence[Call]) -> bool:
    """Return whether two steps call the transformer with the same inputs, apart from the sample and rows per sample."""
    return len(left) == len(right) and all(
        one.tree == other.tree and one.dtype == other.dtype and all(map(_equal, one.leaves, other.leaves))
        for one, other in zip(left, right, strict=True)
    )


def _equal(left: Leaf, right: Leaf) -> bool:
    if not isinstance(left, Fixed) or not isinstance(right, Fixed):
        return left == right
    one, other = left.value, right.value
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and _same(one, other)
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _scales(pipe: Any, asked: dict[str, Any]) -> list[float]:
    """Return the scales of guidance among the arguments of a pipeline's call, defaults included."""
    try:
        bound = inspect.signature(pipe.__call__).bind(**asked)
    except TypeError as error:
        raise ValueError(f"{type(pipe).__name__} cannot be called so: {error}") from error
    bound.apply_defaults()
    # A part of the pipeline may guide instead of an argument.
    names = (*SCALES, *FURTHER_SCALES)
    given = (*(bound.arguments.get(name) for name in names), getattr(getattr(pipe, "guider", None), "guidance_scale", None))
    return list(dict.fromkeys(float(scale) for scale in given if isinstance(scale, int | float)))
