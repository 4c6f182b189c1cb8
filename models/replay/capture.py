"""Capture of a pipeline's run: the transformer's inputs, and how its outputs are combined into a step's velocity."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.models.protocol import Cond
from fluvial.models.replay.checks import ReplayError, build_error, check_chain
from fluvial.models.replay.combinations import Combined, find_combinations
from fluvial.models.replay.experts import list_trained
from fluvial.models.replay.gather_maps import GatherMap, WholeInputs, find_in_input, find_whole_inputs, list_block_maps
from fluvial.models.replay.recipe import (
    CONTROL,
    Call,
    ControlOutput,
    InputSource,
    MixedInput,
    RowInput,
    SampleInput,
    SharedInput,
    StepRecipe,
    get_spec,
    list_tensors,
    split_parts,
    stack_lists,
)

UNGUIDED = ("unconditional_transformer",)  # networks of the negative prediction of guidance, as Ideogram 4's
SCALES = ("guidance_scale", "true_cfg_scale")  # arguments of diffusers' pipelines for the guidance scale
FURTHER_SCALES = ("guidance_scale_2",)  # scales of some of the steps, or of a part of the sample
RESCALES = ("guidance_rescale", "audio_guidance_rescale")  # strengths of rescaled guidance

SampleMatch = tuple[int, tuple[GatherMap, Tensor] | None]  # see `_match_sample`


class _StepGroup(NamedTuple):
    """Recorded steps with the same recipe."""

    calls: list[Call]
    combinations: list[Combined]  # combinations that give the velocity of all these steps
    positions: list[int]
    rows: list[list[Tensor]]  # rows of each step; the same objects where they are equal


class Capture:
    """Record of the inputs and outputs of a part within each step, until the scheduler receives the velocity.

    Args:
        pipe, component, call: the pipeline, the name of its trained part, and the arguments of its call.
        apart: whether samples have separate forward passes; tensors without a batch dimension then belong to a prompt.
        single: whether there is one sample; with many equal elements in low precision, it is searched for as one block.
        gather_maps: maps known from a run on several samples, see `find_in_input`.

    Raises:
        ValueError: the pipeline does not take those arguments.
    """

    def __init__(
        self,
        pipe: Any,
        component: str,
        call: dict[str, Any],
        *,
        apart: bool = False,
        single: bool = False,
        gather_maps: Sequence[GatherMap] = (),
    ) -> None:
        self.apart, self.match_sample = apart, partial(_match_sample, single=single, known=gather_maps)
        self.pipeline, self.component, self.scales = type(pipe).__name__, component, _list_scales(pipe, call)
        self.frozen = find_frozen_networks(pipe)
        self.rescales = _read_numbers(pipe, call, RESCALES)
        self.taken: list[int] = []  # steps of the schedule, in the order they were taken
        self.initial: Tensor | None = None  # samples before the first step
        self._output: Tensor | None = None  # samples after the last step
        self._calls: list[tuple[str, Any, Any]] = []  # calls of a step: part, (args, kwargs), output
        self._inputs: Any = None  # inputs of the call under way
        self._groups: list[_StepGroup] = []
        self._levels: Callable[[int], Tensor]  # noise level of a step
        self._recorded = 0

    @contextmanager
    def watch(self, pipe: Any, scheduler: Any) -> Iterator[None]:
        """Run a pipeline with another scheduler and watch its transformer and the scheduler's steps."""
        scheduler_before, self._levels = pipe.scheduler, lambda step: scheduler.sigmas[step]
        networks = {name: pipe.components[name] for name in (*list_trained(pipe, self.component), *self.frozen)}
        handles = [module.register_forward_pre_hook(self._keep_inputs, with_kwargs=True) for module in networks.values()]
        for name, module in networks.items():
            component = name if name in self.frozen else self.component
            handles.append(module.register_forward_hook(partial(self._keep_output, component)))
        pipe.scheduler = scheduler
        try:
            yield
        finally:
            pipe.scheduler = scheduler_before
            for handle in handles:
                handle.remove()

    def take_step(self, step: int, x: Tensor, v: Tensor, x_next: Tensor, recorded: bool) -> None:
        """Find the calls and combinations that give a step's velocity v; a step that is not recorded is only checked.

        Raises:
            ReplayError: the step does not start from the output of the one before, or no known combination gives v.
        """
        if self._output is None:
            self.initial = x.detach().clone()
        else:
            check_chain(self.pipeline, step, x, self._output)
        self._output = x_next.detach().clone()  # the pipeline may write to the sample
        self.taken.append(step)
        observed, self._calls = self._calls, []
        if not recorded:
            return
        if not any(component == self.component for component, *_ in observed):
            raise self._build_error(step, f"the {self.component} is not called")
        calls: list[Call] = []
        rows: list[Tensor] = []
        parts: list[Tensor] = []
        controls: list[list[Tensor]] = []  # outputs of control networks that depend on the sample, by call
        for component, arguments, output in observed:
            gives_parts = component not in CONTROL
            returned = split_parts(output, x) if gives_parts else list_tensors(output)
            if not returned:
                raise self._build_error(step, f"the {component} does not return one output per sample")
            sources, others, tree = _trace_inputs(arguments, x, controls, self.apart, self.match_sample)
            if not any(isinstance(source, SampleInput | MixedInput) for source in sources):
                if not gives_parts:
                    continue  # its output depends on the prompt alone
                raise self._build_error(step, f"the {component} is called without the sample that the scheduler has")
            calls.append(Call(component, tree, tuple(sources), returned[0].dtype))
            rows += others
            controls.append([] if gives_parts else returned)
            parts += returned if gives_parts else []
        if not bool(v.isfinite().all()):
            raise self._build_error(
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
            sizes=_list_piece_sizes(observed, x),
            whole=_locate_whole(calls[0], rows, observed[-1][2], x),
        )
        if not combinations:
            scales = " or ".join(f"{scale:g}" for scale in self.scales) or "none"
            without = "; try it with guidance_rescale=0" if any(self.rescales) else ""
            raise self._build_error(
                step,
                f"its velocity is no known combination of {len(parts)} outputs of the {self.component} "
                f"(guidance {scales}){without}",
            )
        self._add_step(calls, rows, combinations)

    def build_recipes(self) -> tuple[tuple[StepRecipe, ...], Cond]:
        """Return the recipes of the recorded steps, and the inputs with one row per sample.

        Raises:
            ReplayError: several combinations give the velocities of some steps.
        """
        recipes, cond = [], []
        for group in self._groups:
            if len(group.combinations) > 1:
                raise self._build_error(
                    None, "several combinations of the outputs give its velocity; use prompts other than the negative one"
                )
            each_step = [any(row is not first for row in others) for first, *others in zip(*group.rows, strict=True)]
            flags = iter(each_step)
            calls = []
            for call in group.calls:
                leaves = [leaf._replace(each_step=next(flags)) if type(leaf) is RowInput else leaf for leaf in call.leaves]
                calls.append(call._replace(leaves=tuple(leaves)))
            recipes.append(StepRecipe(tuple(calls), group.combinations[0], tuple(group.positions)))
            columns = zip(zip(*group.rows, strict=True), each_step, strict=True)
            cond.append(tuple(torch.stack(column, dim=1) if differs else column[0] for column, differs in columns))
        return tuple(recipes), tuple(cond)

    def _add_step(self, calls: list[Call], rows: list[Tensor], combinations: list[Combined]) -> None:
        """Add a step to the group of its recipe; tensors that equal those of another step are stored once."""
        position, self._recorded = self._recorded, self._recorded + 1
        for number, group in enumerate(self._groups):
            both = [known for known in group.combinations if known in combinations]
            same_specs = [*map(get_spec, group.rows[0])] == [*map(get_spec, rows)]
            if both and same_specs and _inputs_match(group.calls, calls):
                kept = [
                    first if torch.equal(first, row) else row.clone() for first, row in zip(group.rows[0], rows, strict=True)
                ]
                group.positions.append(position)
                group.rows.append(kept)
                self._groups[number] = group._replace(combinations=both)
                return
        self._groups.append(_StepGroup(calls, combinations, [position], [[row.clone() for row in rows]]))

    def _keep_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Containers are copied, because the transformer may change them.
        self._inputs = optree.tree_map(lambda leaf: leaf, (args, kwargs))

    def _keep_output(self, component: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._calls.append((component, self._inputs, output))

    def _build_error(self, step: int | None, reason: str) -> ReplayError:
        return build_error(self.pipeline, reason, step=step)


def have_same_recipes(left: Sequence[StepRecipe], right: Sequence[StepRecipe]) -> bool:
    """Return whether two runs of a pipeline have the same recipes; inputs with one row per sample may differ."""
    return len(left) == len(right) and all(
        one.positions == other.positions and one.combination == other.combination and _inputs_match(one.calls, other.calls)
        for one, other in zip(left, right, strict=True)
    )


def _list_piece_sizes(observed: Sequence[tuple[str, Any, Any]], x: Tensor) -> tuple[int, ...]:
    """Return the size of each piece of flat samples x, if each of a step's calls returns one piece; else none."""
    outputs = list_tensors(observed[-1][2])
    return tuple(output[0].numel() for output in outputs) if x.ndim == 2 and len(outputs) > 1 else ()


def _locate_whole(call: Call, rows: Sequence[Tensor], output: Any, x: Tensor) -> tuple[WholeInputs, Tensor] | None:
    """Return the maps of flat samples in a call's larger outputs, and the inputs in place of x, `[B, m]`; else None.

    `call` is the first call of a step, `output` that of its last call; `rows` are inputs with one row per sample.
    """
    if x.ndim != 2:
        return None
    row_leaves = [number for number, leaf in enumerate(call.leaves) if isinstance(leaf, RowInput)]
    numbered = [(number, leaf) for number, leaf in enumerate(call.leaves) if isinstance(leaf, MixedInput)]
    mixed = [(leaf.gather_map, rows[row_leaves.index(number + 1)]) for number, leaf in numbered]
    whole = find_whole_inputs([gather_map for gather_map, _ in mixed], list_tensors(output), x.shape[1])
    if whole is None:
        return None
    inputs = [gather_map.gather(torch.cat([x, others[:, 0].to(x.dtype)], 1)) for gather_map, others in mixed]
    return whole, whole.join(inputs)


def _match_sample(leaf: Any, x: Tensor, *, single: bool, known: Sequence[GatherMap]) -> SampleMatch:
    """Return the number of copies of the sample that an input consists of; or, if it is 0, see `find_in_input`."""
    count = _count_copies(leaf, x)
    if low := single and isinstance(leaf, Tensor) and leaf.is_floating_point() and torch.finfo(leaf.dtype).bits < 32:
        known = [each for each in (*known, *list_block_maps(leaf.shape[1:], x.shape[1:])) if each.shape == leaf.shape[1:]]
    return count, None if count or (low and not known) else find_in_input(leaf, x, known)


def _count_copies(leaf: Any, x: Tensor) -> int:
    """Return the number of copies of the sample that an input consists of, along the batch; 0 for any other input."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.shape[1:] != x.shape[1:] or leaf.ndim != x.ndim:
        return 0
    count, rest = divmod(len(leaf), len(x))
    if rest or not count:
        return 0
    return count if torch.equal(leaf, x.to(leaf.dtype).repeat(count, *[1] * (x.ndim - 1))) else 0


def _trace_inputs(
    arguments: Any, x: Tensor, controls: list[list[Tensor]], apart: bool, match_sample: Callable[[Any, Tensor], SampleMatch]
) -> tuple[list[InputSource], list[Tensor], Any]:
    """Return the source of each input of a call, the inputs with one row per sample, and the pytree.

    Args:
        arguments: (args, kwargs) of the call.
        x: samples `[B, *event]`.
        controls: tensors that each earlier call of the step returned; empty for calls other than a control network's.
        apart, match_sample: see `Capture` and `_match_sample`.
    """
    leaves, tree = optree.tree_flatten(arguments)
    copies, mixed = zip(*(match_sample(leaf, x) for leaf in leaves), strict=True)
    if listed := not any(copies) and all(inside is None for inside in mixed):
        leaves, tree = optree.tree_flatten(stack_lists(arguments, len(x)))
        copies, mixed = zip(*(match_sample(leaf, x) for leaf in leaves), strict=True)
    triples = zip(leaves, copies, mixed, strict=True)
    samples = [count or len(leaf) // len(x) for leaf, count, inside in triples if count or inside]
    repeats = sum(samples) if listed else samples[0] if samples else 1  # copies of the batch
    sources, rows = list[InputSource](), list[Tensor]()
    for leaf, count, inside in zip(leaves, copies, mixed, strict=True):
        if count:
            sources.append(SampleInput(leaf.dtype, count))
        elif isinstance(leaf, Tensor) and (control := _find_control_output(leaf, controls)) is not None:
            sources.append(ControlOutput(leaf.dtype, *control))
        elif inside is not None:
            gather_map, others = inside
            sources += [MixedInput(leaf.dtype, others.shape[1], gather_map), RowInput(others.shape[1], False)]
            rows.append(others)
        elif isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) in (repeats * len(x), len(x)):
            sources.append(RowInput(len(leaf) // len(x), False))
            rows.append(leaf.detach().unflatten(0, (-1, len(x))).transpose(0, 1))
        elif apart and isinstance(leaf, Tensor) and leaf.ndim > 0:
            sources.append(RowInput(0, False))
            rows.append(leaf.detach().expand(len(x), *leaf.shape))
        else:
            sources.append(SharedInput(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf))
    return sources, rows, tree


def find_frozen_networks(pipe: Any) -> dict[str, Any]:
    """Return the frozen networks of a pipeline that are called in each step, by part.

    They are control networks, whose outputs the transformer is given, and networks of the negative prediction of guidance.

    Raises:
        ReplayError: one shares layers with the transformer, as Z-Image's, and so would change as the transformer is trained.
    """
    networks = {name: part for name in (*CONTROL, *UNGUIDED) if isinstance(part := getattr(pipe, name, None), nn.Module)}
    trained = {id(each) for each in getattr(pipe, "transformer", nn.Identity()).parameters()}
    if any(id(each) in trained for network in networks.values() for each in network.parameters()):
        raise build_error(type(pipe).__name__, "a network beside the transformer shares layers with it, which are trained")
    return networks


def _find_control_output(leaf: Tensor, controls: Sequence[Sequence[Tensor]]) -> tuple[int, int] | None:
    """Return (call, output) of a control network that returned an input; the same object before an equal one."""
    known = [(call, number, tensor) for call, tensors in enumerate(controls) for number, tensor in enumerate(tensors)]
    same = (entry for entry in known if entry[2] is leaf)
    equal = (entry for entry in known if entry[2].shape == leaf.shape and torch.equal(entry[2].to(leaf.dtype), leaf))
    return next((entry[:2] for entry in (*same, *equal)), None)


def _inputs_match(left: Sequence[Call], right: Sequence[Call]) -> bool:
    """Return whether two steps call the transformer with the same inputs, apart from the sample and rows per sample."""
    return len(left) == len(right) and all(
        one.component == other.component
        and one.tree == other.tree
        and one.dtype == other.dtype
        and all(map(_is_same_leaf, one.leaves, other.leaves))
        for one, other in zip(left, right, strict=True)
    )


def _is_same_leaf(left: InputSource, right: InputSource) -> bool:
    if not isinstance(left, SharedInput) or not isinstance(right, SharedInput):
        return type(left) is type(right) and left == right
    one, other = left.value, right.value
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _list_scales(pipe: Any, call: dict[str, Any]) -> list[float]:
    """Return the guidance scales among the arguments of a pipeline's call, defaults included, and that of its guider."""
    guider_scale = getattr(getattr(pipe, "guider", None), "guidance_scale", None)
    scales = _read_numbers(pipe, call, (*SCALES, *FURTHER_SCALES))
    return list(dict.fromkeys([*scales, float(guider_scale)] if isinstance(guider_scale, int | float) else scales))


def _read_numbers(pipe: Any, call: dict[str, Any], names: Sequence[str]) -> list[float]:
    """Return the distinct numbers among named arguments of a pipeline's call, defaults included."""
    try:
        bound = inspect.signature(pipe.__call__).bind(**call)
    except TypeError as error:
        raise ValueError(f"{type(pipe).__name__} cannot be called with these arguments: {error}") from error
    bound.apply_defaults()
    values = (bound.arguments.get(name) for name in names)
    return list(dict.fromkeys(float(number) for number in values if isinstance(number, int | float)))
