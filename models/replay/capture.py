"""Find out how a pipeline of diffusers makes a step's velocity from its transformer's outputs, by watching a run."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple, get_args

import optree
import torch
from torch import Tensor, nn

from fluvial.models.protocol import Cond
from fluvial.models.replay.checks import ReplayError, check_chain, refusal
from fluvial.models.replay.experts import trained_parts
from fluvial.models.replay.places import Places, places_in_input, places_in_output
from fluvial.models.replay.recipe import (
    Call,
    Combination,
    Fitted,
    Fixed,
    Holds,
    Joined,
    Latent,
    Leaf,
    Made,
    Norm,
    Row,
    StepRecipe,
    kind_of,
    parts_of,
    stacked,
    tails,
    tensors_of,
)

CONTROL = ("controlnet",)  # parts whose outputs the transformer is given
MOST_PARTS = 4  # outputs that a velocity may be a weighted sum of
LEAST_WEIGHT = 1e-6  # weights below are rounding
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}  # of a weighted sum
SCALES = ("guidance_scale", "true_cfg_scale")  # names that diffusers' pipelines have for the scale of guidance
FURTHER_SCALES = ("guidance_scale_2",)  # of some of the steps, or of a part of the sample


class _Group(NamedTuple):
    """Recorded steps with the same recipe."""

    calls: list[Call]
    combinations: list[Combination | Fitted | Joined]  # combinations that gave the velocity of all these steps
    positions: list[int]
    rows: list[list[Tensor]]  # rows of each step; the same objects where they are equal


class Capture:
    """Record the inputs and outputs of a part within each step until the scheduler receives the velocity.

    `asked` are the arguments of the pipeline's call. With `apart`, each sample will have a pass of its own, and tensors
    that all samples share are those of their prompt.

    Raises:
        ValueError: the pipeline does not take those arguments.
    """

    def __init__(self, pipe: Any, component: str, asked: dict[str, Any], *, apart: bool = False) -> None:
        self.apart = apart
        self.pipeline, self.component, self.scales = type(pipe).__name__, component, _scales(pipe, asked)
        self.frozen = control_networks(pipe)
        rescales = "guidance_rescale" in inspect.signature(pipe.__call__).parameters
        self.hint = "; a rescaled guidance is not one: call it with guidance_rescale=0" if rescales else ""
        self.taken: list[int] = []  # steps of the schedule, in the order they were taken
        self.initial: Tensor | None = None  # samples before the first step
        self._output: Tensor | None = None  # of the last step
        self._calls: list[tuple[str, Any, Any]] = []  # of a step: part, (args, kwargs), output
        self._given: Any = None  # inputs of the call under way
        self._groups: list[_Group] = []
        self._recorded = 0

    @contextmanager
    def watching(self, pipe: Any, scheduler: Any) -> Iterator[None]:
        """Run a pipeline with another scheduler and watch its transformer and the scheduler's steps."""
        own = pipe.scheduler
        networks = {name: pipe.components[name] for name in (*trained_parts(pipe, self.component), *self.frozen)}
        handles = [module.register_forward_pre_hook(self._before, with_kwargs=True) for module in networks.values()]
        for name, module in networks.items():
            component = name if name in self.frozen else self.component
            handles.append(module.register_forward_hook(partial(self._after, component)))
        pipe.scheduler = scheduler
        try:
            yield
        finally:
            pipe.scheduler = own
            for handle in handles:
                handle.remove()

    def step(self, step: int, x: Tensor, v: Tensor, x_next: Tensor, recorded: bool) -> None:
        """Find the calls and combinations that give a step's velocity v; steps that are not recorded are only checked.

        Raises:
            ReplayError: the step does not start from the output of the one before, or its velocity is not understood.
        """
        if self._output is None:
            self.initial = x.detach().clone()
        else:
            check_chain(self.pipeline, step, x, self._output)
        self._output = x_next.detach().clone()  # the pipeline may write to the sample
        self.taken.append(step)
        seen, self._calls = self._calls, []
        if not recorded:
            return
        if not any(component == self.component for component, *_ in seen):
            raise self._refusal(step, f"the {self.component} is not called")
        calls: list[Call] = []
        rows: list[Tensor] = []
        parts: list[Tensor] = []
        made: list[list[Tensor]] = []  # outputs of control networks that depend on the sample, by call
        for component, given, output in seen:
            returned = parts_of(output, x) if component == self.component else tensors_of(output)
            if not returned:
                raise self._refusal(step, f"the {component} does not return one output per sample")
            kinds, others, tree = _sources(given, x, made, self.apart)
            if not any(isinstance(kind, Latent | Holds) for kind in kinds):
                if component != self.component:
                    continue  # what it returns depends on the prompt alone
                raise self._refusal(step, f"the {component} is called without the sample that the scheduler has")
            calls.append(Call(component, tree, tuple(kinds), returned[0].dtype))
            rows += others
            made.append([] if component == self.component else returned)
            parts += returned if component == self.component else []
        combinations: list[Combination | Fitted | Joined] = [
            found for made in _combinations(parts, v, self.scales) if (found := _fitting(made, parts, v, x))
        ]
        if not combinations or any(len(part.shape) == 3 and part.shape != v.shape for part in parts):
            cut = tails(parts, v)
            same = [made for made in _combinations(cut, v, self.scales) if made(cut, x).shape == v.shape]
            combinations = [made for made in same if _fitting(made, cut, v, x)] or combinations
        sizes = _sizes(seen, x)
        if not combinations and (sum_of_parts := _joined(parts, v, x, sizes) if sizes else _fitted(parts, v, x)) is not None:
            combinations.append(sum_of_parts)
        if not combinations:
            scales = " or ".join(f"{scale:g}" for scale in self.scales) or "none"
            raise self._refusal(
                step,
                f"its velocity is no known combination of {len(parts)} outputs of the {self.component} (guidance {scales})"
                f"{self.hint}",
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

    def _add(self, calls: list[Call], rows: list[Tensor], combinations: list[Combination | Fitted | Joined]) -> None:
        """Add a step to the group of its recipe; tensors that equal those of another step are stored once."""
        position, self._recorded = self._recorded, self._recorded + 1
        for at, group in enumerate(self._groups):
            both = [known for known in group.combinations if known in combinations]
            if both and _alike(group.calls, calls) and [*map(kind_of, group.rows[0])] == [*map(kind_of, rows)]:
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
        self._given = optree.tree_map(lambda leaf: leaf, (args, kwargs))

    def _after(self, component: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._calls.append((component, self._given, output))

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
        for scale, cond, from_cond, norm in product(scales, (1, 0), (False, True), get_args(Norm)):
            yield made(cond=cond, scale=scale, from_cond=from_cond, norm=norm)


def _fitting(combination: Combination, parts: Sequence[Tensor], v: Tensor, x: Tensor) -> Combination | None:
    """Return a combination that gives v to the bit, as it is or by some elements of it; None if it does not."""
    made = combination(parts, x)
    if made.shape == v.shape:
        return combination if _same(made, v) else None
    places = places_in_output(-v if combination.negative else v, combination._replace(negative=False)(parts, x))
    return None if places is None else combination._replace(places=places)


def _fitted(parts: Sequence[Tensor], v: Tensor, x: Tensor) -> Fitted | None:
    """Return the weighted sum of parts and sample that v is up to rounding; None if it is not one.

    The weights are least squares in float64, rounded to at most seven digits, so that two prompts give the same.
    One part has the weight 1: another would be a scale that no guidance has.
    """
    if len(parts) > MOST_PARTS or v.dtype not in ROUNDING or any(part.shape != v.shape for part in parts):
        return None
    columns = torch.stack([tensor.detach().double().flatten() for tensor in (*parts, x)], dim=1).cpu()
    wanted = v.detach().double().flatten().cpu()
    solved = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0].tolist()
    found = [_rounded(solved, digits, v.dtype) for digits in range(2, 8)]
    errors = [float((each(parts, x).double() - v.double()).norm() / v.double().norm()) for each in found]
    # The fewest digits that fit as well, because scales have few, and rounding moves the last ones from prompt to prompt.
    best = next(each for each, error in zip(found, errors, strict=True) if error <= 2 * errors[-1])
    if len(parts) == 1 and (best.weights[0] != 1 or best.of_sample != 0):
        return None
    return best if errors[-1] <= ROUNDING[v.dtype] else None


def _rounded(weights: Sequence[float], digits: int, dtype: torch.dtype) -> Fitted:
    """Return the sum of some weights, the last of the sample, rounded to a number of digits."""
    *of_parts, of_sample = (0.0 if abs(weight) < LEAST_WEIGHT else float(f"{weight:.{digits}g}") for weight in weights)
    return Fitted(tuple(of_parts), of_sample, dtype)


def _sizes(seen: Sequence[tuple[str, Any, Any]], x: Tensor) -> tuple[int, ...]:
    """Return the numbers of each piece of flat samples x, of which a step's calls return one output each; else none."""
    made = tensors_of(seen[-1][2])
    return tuple(output[0].numel() for output in made) if x.ndim == 2 and len(made) > 1 else ()


def _joined(parts: Sequence[Tensor], v: Tensor, x: Tensor, sizes: tuple[int, ...]) -> Joined | None:
    """Return the weighted sums of the pieces of flat samples; None if a piece has no such sum, see `_fitted`."""
    if sum(sizes) != x.shape[1] or any(part.shape != x.shape for part in parts):
        return None
    pieces = zip(*(tensor.split(sizes, dim=1) for tensor in (*parts, v, x)), strict=True)
    sums = [_fitted(made, velocity, sample) for *made, velocity, sample in pieces]
    return None if None in sums else Joined(sizes, tuple(one for one in sums if one is not None))


def _sought(leaf: Any, x: Tensor) -> tuple[int, tuple[Places, Tensor] | None]:
    """Return the number of copies of the sample that an input consists of, or where it has the sample among others."""
    count = _copies(leaf, x)
    return count, None if count else places_in_input(leaf, x)


def _copies(leaf: Any, x: Tensor) -> int:
    """Return the number of copies of the sample that an input consists of, along the batch; 0 for any other input."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.shape[1:] != x.shape[1:] or leaf.ndim != x.ndim:
        return 0
    count, rest = divmod(len(leaf), len(x))
    if rest or not count:
        return 0
    return count if torch.equal(leaf, x.to(leaf.dtype).repeat(count, *[1] * (x.ndim - 1))) else 0


def _sources(given: Any, x: Tensor, made: list[list[Tensor]], apart: bool) -> tuple[list[Leaf], list[Tensor], Any]:
    """Return the source of each input of a call, the inputs with one row per sample, and the pytree.

    Args:
        given: (args, kwargs) of the call.
        x: samples `[B, *event]`.
        made: tensors that each earlier call of the step returned, if it is a control network's.
        apart: see `Capture`.
    """
    leaves, tree = optree.tree_flatten(given)
    copies, held = zip(*(_sought(leaf, x) for leaf in leaves), strict=True)
    if listed := not any(copies) and all(inside is None for inside in held):
        leaves, tree = optree.tree_flatten(stacked(given, len(x)))
        copies, held = zip(*(_sought(leaf, x) for leaf in leaves), strict=True)
    samples = [
        count or len(leaf) // len(x) for leaf, count, inside in zip(leaves, copies, held, strict=True) if count or inside
    ]
    repeats = sum(samples) if listed else samples[0] if samples else 1  # copies of the batch
    kinds, rows = list[Leaf](), list[Tensor]()
    for leaf, count, inside in zip(leaves, copies, held, strict=True):
        if count:
            kinds.append(Latent(leaf.dtype, count))
        elif isinstance(leaf, Tensor) and (source := _maker(leaf, made)) is not None:
            kinds.append(Made(leaf.dtype, *source))
        elif inside is not None:
            places, others = inside
            kinds += [Holds(leaf.dtype, others.shape[1], places), Row(others.shape[1], False)]
            rows.append(others)
        elif isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) in (repeats * len(x), len(x)):
            kinds.append(Row(len(leaf) // len(x), False))
            rows.append(leaf.detach().unflatten(0, (-1, len(x))).transpose(0, 1))
        elif apart and isinstance(leaf, Tensor) and leaf.ndim > 0:
            kinds.append(Row(0, False))
            rows.append(leaf.detach().expand(len(x), *leaf.shape))
        else:
            kinds.append(Fixed(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf))
    return kinds, rows, tree


def control_networks(pipe: Any) -> dict[str, Any]:
    """Return the frozen networks of a pipeline whose outputs its transformer is given, by part.

    Raises:
        ReplayError: one shares layers with the transformer, as Z-Image's, and so would change as that is trained.
    """
    found = {name: part for name in CONTROL if isinstance(part := getattr(pipe, name, None), nn.Module)}
    trained = {id(each) for each in getattr(pipe, "transformer", nn.Identity()).parameters()}
    if any(id(each) in trained for network in found.values() for each in network.parameters()):
        raise refusal(type(pipe).__name__, "its control network shares layers with the transformer, which is trained")
    return found


def _maker(leaf: Tensor, made: Sequence[Sequence[Tensor]]) -> tuple[int, int] | None:
    """Return which call returned an input, and as which of its tensors; the same object before an equal one."""
    known = [(call, place, tensor) for call, tensors in enumerate(made) for place, tensor in enumerate(tensors)]
    same = (entry for entry in known if entry[2] is leaf)
    equal = (entry for entry in known if entry[2].shape == leaf.shape and torch.equal(entry[2].to(leaf.dtype), leaf))
    return next((entry[:2] for entry in (*same, *equal)), None)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def _alike(left: Sequence[Call], right: Sequence[Call]) -> bool:
    """Return whether two steps call the transformer with the same inputs, apart from the sample and rows per sample."""
    return len(left) == len(right) and all(
        one.component == other.component
        and one.tree == other.tree
        and one.dtype == other.dtype
        and all(map(_equal, one.leaves, other.leaves))
        for one, other in zip(left, right, strict=True)
    )


def _equal(left: Leaf, right: Leaf) -> bool:
    if not isinstance(left, Fixed) or not isinstance(right, Fixed):
        return type(left) is type(right) and left == right
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
