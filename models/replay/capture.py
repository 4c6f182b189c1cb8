"""Find out how a pipeline of diffusers makes a step's velocity from its transformer's outputs, by watching a run."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.models.protocol import Cond
from fluvial.models.replay.checks import ReplayError, check_chain, refusal
from fluvial.models.replay.combinations import Combined, find_combinations
from fluvial.models.replay.experts import list_trained
from fluvial.models.replay.places import Places, Whole, blocks, find_in_input, find_whole
from fluvial.models.replay.recipe import (
    CONTROL,
    Call,
    Fixed,
    Holds,
    Latent,
    Leaf,
    Made,
    SampleInput,
    StepRecipe,
    find_kind,
    list_tensors,
    split_parts,
    stack_lists,
)

UNGUIDED = ("unconditional_transformer",)  # networks whose outputs guidance leads away from, as Ideogram 4's
SCALES = ("guidance_scale", "true_cfg_scale")  # names that diffusers' pipelines have for the scale of guidance
FURTHER_SCALES = ("guidance_scale_2",)  # of some of the steps, or of a part of the sample
RESCALES = ("guidance_rescale", "audio_guidance_rescale")  # strengths of rescaled guidance

Sought = tuple[int, tuple[Places, Tensor] | None]  # see `_find_samples`


class _Group(NamedTuple):
    """Recorded steps with the same recipe."""

    calls: list[Call]
    combinations: list[Combined]  # combinations that gave the velocity of all these steps
    positions: list[int]
    rows: list[list[Tensor]]  # rows of each step; the same objects where they are equal


class Capture:
    """Record the inputs and outputs of a part within each step until the scheduler receives the velocity.

    `asked` are the arguments of the pipeline's call. With `apart`, each sample will have a pass of its own, and tensors
    that all samples share are those of their prompt. With `single`, there is one sample, many of whose numbers are equal in
    low precision, where it is found among others as one block only. `places` are known from a run on several samples, see
    `find_in_input`.

    Raises:
        ValueError: the pipeline does not take those arguments.
    """

    def __init__(
        self,
        pipe: Any,
        component: str,
        asked: dict[str, Any],
        *,
        apart: bool = False,
        single: bool = False,
        places: Sequence[Places] = (),
    ) -> None:
        self.apart, self.sought = apart, partial(_find_samples, single=single, known=places)
        self.pipeline, self.component, self.scales = type(pipe).__name__, component, _scales(pipe, asked)
        self.frozen = frozen_networks(pipe)
        self.rescales = _numbers(pipe, asked, RESCALES)
        self.taken: list[int] = []  # steps of the schedule, in the order they were taken
        self.initial: Tensor | None = None  # samples before the first step
        self._output: Tensor | None = None  # of the last step
        self._calls: list[tuple[str, Any, Any]] = []  # of a step: part, (args, kwargs), output
        self._given: Any = None  # inputs of the call under way
        self._groups: list[_Group] = []
        self._levels: Callable[[int], Tensor]  # noise level of a step
        self._recorded = 0

    @contextmanager
    def watching(self, pipe: Any, scheduler: Any) -> Iterator[None]:
        """Run a pipeline with another scheduler and watch its transformer and the scheduler's steps."""
        scheduler_before, self._levels = pipe.scheduler, lambda step: scheduler.sigmas[step]
        networks = {name: pipe.components[name] for name in (*list_trained(pipe, self.component), *self.frozen)}
        handles = [module.register_forward_pre_hook(self._before, with_kwargs=True) for module in networks.values()]
        for name, module in networks.items():
            component = name if name in self.frozen else self.component
            handles.append(module.register_forward_hook(partial(self._after, component)))
        pipe.scheduler = scheduler
        try:
            yield
        finally:
            pipe.scheduler = scheduler_before
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
        for component, arguments, output in seen:
            gives_parts = component not in CONTROL
            returned = split_parts(output, x) if gives_parts else list_tensors(output)
            if not returned:
                raise self._refusal(step, f"the {component} does not return one output per sample")
            kinds, others, tree = _sources(arguments, x, made, self.apart, self.sought)
            if not any(isinstance(kind, Latent | Holds) for kind in kinds):
                if not gives_parts:
                    continue  # what it returns depends on the prompt alone
                raise self._refusal(step, f"the {component} is called without the sample that the scheduler has")
            calls.append(Call(component, tree, tuple(kinds), returned[0].dtype))
            rows += others
            made.append([] if gives_parts else returned)
            parts += returned if gives_parts else []
        if not bool(v.isfinite().all()):
            raise self._refusal(
                step, f"its velocity is not finite: the {self.component} or its inputs overflow, or hold no text"
            )
        level = self._levels(step).expand(len(x))
        combinations = find_combinations(
            parts,
            v,
            x,
            level,
            scales=self.scales,
            rescales=self.rescales,
            sizes=_sizes(seen, x),
            whole=_whole(calls[0], rows, seen[-1][2], x),
        )
        if not combinations:
            scales = " or ".join(f"{scale:g}" for scale in self.scales) or "none"
            without = "; try it with guidance_rescale=0" if any(self.rescales) else ""
            raise self._refusal(
                step,
                f"its velocity is no known combination of {len(parts)} outputs of the {self.component} "
                f"(guidance {scales}){without}",
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
                    None, "several combinations of the outputs give its velocity; use prompts other than the negative one"
                )
            each_step = [any(row is not first for row in others) for first, *others in zip(*group.rows, strict=True)]
            flags = iter(each_step)
            calls = []
            for call in group.calls:
                leaves = (
                    leaf._replace(each_step=next(flags)) if isinstance(leaf, SampleInput) else leaf for leaf in call.leaves
                )
                calls.append(call._replace(leaves=tuple(leaves)))
            recipes.append(StepRecipe(tuple(calls), group.combinations[0], tuple(group.positions)))
            columns = zip(zip(*group.rows, strict=True), each_step, strict=True)
            cond.append(tuple(torch.stack(column, dim=1) if differs else column[0] for column, differs in columns))
        return tuple(recipes), tuple(cond)

    def _add(self, calls: list[Call], rows: list[Tensor], combinations: list[Combined]) -> None:
        """Add a step to the group of its recipe; tensors that equal those of another step are stored once."""
        position, self._recorded = self._recorded, self._recorded + 1
        for at, group in enumerate(self._groups):
            both = [known for known in group.combinations if known in combinations]
            if both and _alike(group.calls, calls) and [*map(find_kind, group.rows[0])] == [*map(find_kind, rows)]:
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


def _sizes(seen: Sequence[tuple[str, Any, Any]], x: Tensor) -> tuple[int, ...]:
    """Return the size of each piece of flat samples x, if each of a step's calls returns one piece; else none."""
    made = list_tensors(seen[-1][2])
    return tuple(output[0].numel() for output in made) if x.ndim == 2 and len(made) > 1 else ()


def _whole(call: Call, rows: Sequence[Tensor], output: Any, x: Tensor) -> tuple[Whole, Tensor] | None:
    """Return what of a call's larger outputs is the flat sample, and the inputs in its place; None where they are no larger.

    Args:
        call: first call of a step.
        rows: its inputs with one row per sample, then those of other calls.
        output: what the last call returned.
        x: samples, `[B, n]` if they are flat.
    """
    if x.ndim != 2:
        return None
    numbered = {
        number: row for row, number in enumerate(n for n, leaf in enumerate(call.leaves) if isinstance(leaf, SampleInput))
    }
    held = [(leaf.places, rows[numbered[n + 1]]) for n, leaf in enumerate(call.leaves) if isinstance(leaf, Holds)]
    if (known := find_whole([places for places, _ in held], list_tensors(output), x.shape[1])) is None:
        return None
    return known, known.join([places.gather(torch.cat([x, others[:, 0].to(x.dtype)], 1)) for places, others in held])


def _find_samples(leaf: Any, x: Tensor, *, single: bool, known: Sequence[Places]) -> Sought:
    """Return the number of copies of the sample that an input consists of, or where it has the sample among others."""
    count = _copies(leaf, x)
    if low := single and isinstance(leaf, Tensor) and leaf.is_floating_point() and torch.finfo(leaf.dtype).bits < 32:
        known = [each for each in (*known, *blocks(leaf.shape[1:], x.shape[1:])) if each.shape == leaf.shape[1:]]
    return count, None if count or (low and not known) else find_in_input(leaf, x, known)


def _copies(leaf: Any, x: Tensor) -> int:
    """Return the number of copies of the sample that an input consists of, along the batch; 0 for any other input."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.shape[1:] != x.shape[1:] or leaf.ndim != x.ndim:
        return 0
    count, rest = divmod(len(leaf), len(x))
    if rest or not count:
        return 0
    return count if torch.equal(leaf, x.to(leaf.dtype).repeat(count, *[1] * (x.ndim - 1))) else 0


def _sources(
    arguments: Any, x: Tensor, made: list[list[Tensor]], apart: bool, sought: Callable[[Any, Tensor], Sought]
) -> tuple[list[Leaf], list[Tensor], Any]:
    """Return the source of each input of a call, the inputs with one row per sample, and the pytree.

    Args:
        arguments: (args, kwargs) of the call.
        x: samples `[B, *event]`.
        made: tensors that each earlier call of the step returned, if it is a control network's.
        apart: see `Capture`.
        sought: see `_find_samples`.
    """
    leaves, tree = optree.tree_flatten(arguments)
    copies, held = zip(*(sought(leaf, x) for leaf in leaves), strict=True)
    if listed := not any(copies) and all(inside is None for inside in held):
        leaves, tree = optree.tree_flatten(stack_lists(arguments, len(x)))
        copies, held = zip(*(sought(leaf, x) for leaf in leaves), strict=True)
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
            kinds += [Holds(leaf.dtype, others.shape[1], places), SampleInput(others.shape[1], False)]
            rows.append(others)
        elif isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) in (repeats * len(x), len(x)):
            kinds.append(SampleInput(len(leaf) // len(x), False))
            rows.append(leaf.detach().unflatten(0, (-1, len(x))).transpose(0, 1))
        elif apart and isinstance(leaf, Tensor) and leaf.ndim > 0:
            kinds.append(SampleInput(0, False))
            rows.append(leaf.detach().expand(len(x), *leaf.shape))
        else:
            kinds.append(Fixed(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf))
    return kinds, rows, tree


def frozen_networks(pipe: Any) -> dict[str, Any]:
    """Return the frozen networks of a pipeline that are called in each step, by part.

    Their outputs are given to the transformer (control networks), or guided away from.

    Raises:
        ReplayError: one shares layers with the transformer, as Z-Image's, and so would change as that is trained.
    """
    networks = {name: part for name in (*CONTROL, *UNGUIDED) if isinstance(part := getattr(pipe, name, None), nn.Module)}
    trained = {id(each) for each in getattr(pipe, "transformer", nn.Identity()).parameters()}
    if any(id(each) in trained for network in networks.values() for each in network.parameters()):
        raise refusal(type(pipe).__name__, "a network beside the transformer shares layers with it, which are trained")
    return networks


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
    # A part of the pipeline may guide instead of an argument.
    part = getattr(getattr(pipe, "guider", None), "guidance_scale", None)
    scales = _numbers(pipe, asked, (*SCALES, *FURTHER_SCALES))
    return list(dict.fromkeys([*scales, float(part)] if isinstance(part, int | float) else scales))


def _numbers(pipe: Any, asked: dict[str, Any], names: Sequence[str]) -> list[float]:
    """Return the numbers among some arguments of a pipeline's call, defaults included, without doubles."""
    try:
        bound = inspect.signature(pipe.__call__).bind(**asked)
    except TypeError as error:
        raise ValueError(f"{type(pipe).__name__} cannot be called so: {error}") from error
    bound.apply_defaults()
    values = (bound.arguments.get(name) for name in names)
    return list(dict.fromkeys(float(number) for number in values if isinstance(number, int | float)))
