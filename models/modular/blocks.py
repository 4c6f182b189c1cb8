"""Blocks of a modular pipeline of diffusers, called one by one; other modules do not depend on diffusers' block classes.

A modular pipeline is a list of blocks, one of them a loop of blocks. The blocks before the loop run once per prompt. The
loop runs once with an empty step, which records the inputs of each step without a forward pass. A velocity is one step of
the loop's own blocks, with gradients, and with schedulers that record their calls.

A loop over chunks of a sample contains a block that takes all steps of a chunk. With one chunk, that block is run for one
step at a time, and the blocks before and after it in the loop run once.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin

import optree
import torch
from torch import Tensor, nn

from fluvial.models.pipelines.folder import silence
from fluvial.models.replay.checks import build_error, wrap_errors
from fluvial.models.replay.experts import ExpertProxy
from fluvial.models.replay.kinds import Frames, Sound

PROMPT = "prompt"  # argument of the call, and output of blocks that rewrite it
SIGMA = "sigma"  # variable of loops that add new noise at each step, see `streams`
VALUES = (Tensor, int, float)  # inputs of a network whose values are compared
SampleSource = Callable[[int, Tensor], Tensor]  # (k, sample) -> the sample that the schedulers' k-th step returns


class Blocks(NamedTuple):
    """Blocks that run for a call; only the loop contains blocks."""

    before: tuple[Any, ...]
    loop: Any
    after: tuple[Any, ...]
    inputs: tuple[Any, ...]  # of the call
    inner: Any = None  # block of a loop over chunks that takes the steps
    clock: str = "t"  # name of the loop's variable that determines the noise level

    def list_parts(self) -> dict[str, Any]:
        """Return the specifications of the parts that the blocks use, by name."""
        return {spec.name: spec for block in (*self.before, self.loop, *self.after) for spec in block.expected_components}

    def list_networks(self) -> dict[str, Any]:
        """Return the classes of the networks that the loop calls, by part."""
        kinds = {spec.name: spec.type_hint for spec in (self.inner or self.loop).expected_components}
        return {name: kind for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}

    def list_outputs(self) -> set[str]:
        """Return the names of the outputs of the blocks after the loop."""
        return {output.name for block in self.after for output in block.intermediate_outputs}


class LoopInputs(NamedTuple):
    """Inputs of each step of the loop for a prompt."""

    state: Any  # state after the blocks before the loop
    values: list[dict[str, Any]]  # values of the state by name, per step
    variables: list[dict[str, Any]]  # variables of the loop, per step: i and t


class SchedulerCall(NamedTuple):
    """One call of a scheduler's step."""

    name: str  # of the scheduler
    output: Tensor  # of the model
    t: Any
    sample: Tensor


class StepResult(NamedTuple):
    """Result of one step of the loop's blocks."""

    calls: list[SchedulerCall]
    after: Any  # state after the step; None if a scheduler's call ended it


def split_blocks(pipe: Any, arguments: Mapping[str, Any]) -> Blocks:
    """Return the blocks that run for a call, without blocks that rewrite its prompt, which are random.

    Raises:
        ReplayError: the blocks do not contain exactly one loop, or the loop contains another.
    """
    from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

    name = type(pipe).__name__
    with wrap_errors(name, "be split into blocks"):
        every = pipe.blocks
        chosen = every.get_execution_blocks(**{key: value for key, value in arguments.items() if value is not None})
        flat = [*chosen.sub_blocks.values()]
    kept = [block for block in flat if PROMPT not in {output.name for output in block.intermediate_outputs}]
    loops = [index for index, block in enumerate(kept) if isinstance(block, LoopSequentialPipelineBlocks)]
    if len(loops) != 1:
        raise build_error(name, f"its blocks have {len(loops)} loops, expected one")
    index, loop = loops[0], kept[loops[0]]
    if any(isinstance(block, LoopSequentialPipelineBlocks) for block in loop.sub_blocks.values()):
        raise build_error(name, "its loop has a loop in it: it makes samples in chunks, each from the ones before")
    inner = next((block for block in loop.sub_blocks.values() if _takes_all_steps(block)), None)
    names = {each for block in loop.sub_blocks.values() for each in _list_parameters(block)}
    clock = SIGMA if SIGMA in names and "t" not in names else "t"
    return Blocks(tuple(kept[:index]), loop, tuple(kept[index + 1 :]), tuple(every.inputs), inner, clock)


def _list_parameters(block: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(type(block).__call__)).parameters


def _takes_all_steps(block: Any) -> bool:
    """Return whether a block in a loop calls a network and a scheduler, and takes no step as an argument."""
    from diffusers import SchedulerMixin

    kinds = [spec.type_hint for spec in block.expected_components if inspect.isclass(spec.type_hint)]
    both = any(issubclass(kind, SchedulerMixin) for kind in kinds) and any(issubclass(kind, nn.Module) for kind in kinds)
    return both and "i" not in _list_parameters(block)


def wrap_media(blocks: Blocks, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, with media wrapped in the classes that the blocks take.

    MiniMax-H3 takes a list of references, each of the class of its kind, whose first field is `image`, `frames` or `audio`.
    """
    wrapped = dict(arguments)
    for entry in blocks.inputs:
        media, kinds = arguments.get(entry.name), get_args(entry.type_hint)
        if media is not None and get_origin(entry.type_hint) is list and dataclasses.is_dataclass(kinds[0]):
            base: Any = kinds[0]
            classes = {dataclasses.fields(kind)[0].name: kind for kind in base.__subclasses__()}
            wrapped[entry.name] = [_wrap_medium(classes, each) for each in (media if type(media) is list else [media])]
    return wrapped


def _wrap_medium(classes: Mapping[str, Any], media: Any) -> Any:
    """Return an image, a video or a sound wrapped in the class of its kind."""
    if isinstance(media, Sound):
        return classes["audio"](media.wave, sample_rate=media.rate)
    return classes["frames"](list(media), fps=media.rate) if isinstance(media, Frames) else classes["image"](media)


def set_inputs(blocks: Blocks, arguments: Mapping[str, Any], seed: int) -> Any:
    """Return the input state of the first block, as the pipeline's call builds it."""
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    state, arguments = PipelineState(), wrap_media(blocks, arguments)
    for entry in blocks.inputs:
        if entry.name in arguments:
            state.set(entry.name, arguments[entry.name], entry.kwargs_type)
        elif entry.name is not None and entry.name not in state.values:
            state.set(entry.name, entry.default, entry.kwargs_type)
        if entry.name == "generator":
            state.set("generator", torch.Generator().manual_seed(seed))
    return state


@torch.no_grad()
def run_whole(pipe: Any, blocks: Blocks, networks: Mapping[str, Any], arguments: Mapping[str, Any], seed: int) -> Any:
    """Return the state after a call of the pipeline, loop included, with `networks` in place of its parts."""
    state, components = set_inputs(blocks, arguments, seed), BlockComponents(pipe, {**networks})
    with silence(), wrap_errors(type(pipe).__name__, "be run"):
        for block in (*blocks.before, blocks.loop, *blocks.after):
            _, state = block(components, state)
    return state


@torch.no_grad()
def run_to_loop(pipe: Any, blocks: Blocks, networks: Sequence[str], arguments: Mapping[str, Any], seed: int) -> LoopInputs:
    """Return the inputs of each step of the loop for a call; the trained `networks` must not be called before the loop.

    Raises:
        ValueError: a block fails or calls a trained network, or the loop is not supported; the message names the pipeline.
    """
    from diffusers.modular_pipelines.modular_pipeline import BlockState

    name, state = type(pipe).__name__, set_inputs(blocks, arguments, seed)
    values, variables, empty_loop = list[dict[str, Any]](), list[dict[str, Any]](), copy.copy(blocks.loop)

    def keep_inputs(components: Any, block_state: Any, **arguments: Any) -> tuple[Any, Any]:
        if not isinstance(block_state, BlockState):
            raise build_error(name, "the steps of its loop are given no BlockState")
        values.append(dict(vars(block_state)))
        variables.append(arguments)
        return components, block_state

    def refuse(*_: Any) -> None:
        raise build_error(name, "it calls its network before the loop, so its outputs would not follow the weights")

    empty_loop.loop_step, empty_loop.set_block_state = keep_inputs, lambda *_: None
    hooks = [getattr(pipe, network).register_forward_pre_hook(refuse) for network in networks]
    try:
        with silence(), wrap_errors(name, "encode a prompt"):
            for block in blocks.before:
                _, state = block(pipe, state)
            type(blocks.loop).__call__(empty_loop, pipe, state)
            if blocks.inner is not None:
                values, variables = _enter_chunk(pipe, blocks, values, variables)
    finally:
        for hook in hooks:
            hook.remove()
    names = {*variables[0]} if variables else set()
    if not {"i", blocks.clock} <= names:
        raise build_error(name, f"a step of its loop is given {', '.join(sorted(names)) or 'nothing'}, expected i and t")
    if blocks.clock != "t":  # each step is the last one at its own level
        variables = [{**variables[-1], "t": step_values[blocks.clock]} for step_values in variables]
    return LoopInputs(state, values, variables)


def _enter_chunk(
    pipe: Any, blocks: Blocks, values: list[dict[str, Any]], variables: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the inputs of each step of a loop's one chunk, and the variables of the loop and of the step."""
    from diffusers.modular_pipelines.modular_pipeline import BlockState

    if len(values) != 1:
        raise build_error(type(pipe).__name__, f"it makes a sample in {len(values)} chunks, each from the ones before")
    state: Any = BlockState(**values[0])
    for block in blocks.loop.sub_blocks.values():
        if block is blocks.inner:
            break
        _, state = block(pipe, state, **variables[0])
    if getattr(state, "timesteps", None) is None:
        raise build_error(type(pipe).__name__, "a chunk of its loop has several schedules, as of stages of other sizes")
    steps = [{**variables[0], "i": i, "t": t} for i, t in enumerate(state.timesteps)]
    return [dict(vars(state)) for _ in steps], steps


@torch.no_grad()
def run_from_loop(
    pipe: Any, blocks: Blocks, loop_inputs: LoopInputs, values: Mapping[str, Any], fields: Collection[str]
) -> Any:
    """Return the state after the blocks that follow the steps.

    Args:
        pipe, blocks: the pipeline and its blocks.
        loop_inputs: inputs of the steps for the prompt.
        values: values of the first step, with the last sample in place of the first.
        fields: names of the values that hold the sample.
    """
    from diffusers.modular_pipelines.modular_pipeline import BlockState

    state = copy.copy(loop_inputs.state)
    state.values = {**loop_inputs.state.values, **{name: values[name] for name in fields}}
    for name, value in state.values.items():
        if isinstance(value, torch.Generator):  # a copy, because decoding may draw from it: all samples get the same numbers
            state.values[name] = copy_generator(value)
    if blocks.inner is not None:
        every, variables = [*blocks.loop.sub_blocks.values()], _drop_step(loop_inputs.variables[0])
        chunk: Any = BlockState(**{name: [*value] if isinstance(value, list) else value for name, value in values.items()})
        for block in every[every.index(blocks.inner) + 1 :]:
            _, chunk = block(pipe, chunk, **variables)
        blocks.loop.set_block_state(state, chunk)
    for block in blocks.after:
        _, state = block(pipe, state)
    return state


def copy_generator(source: torch.Generator) -> torch.Generator:
    """Return a generator that draws the same numbers."""
    return torch.Generator(source.device).set_state(source.get_state())


def run_step(
    pipe: Any,
    blocks: Blocks,
    values: Mapping[str, Any],
    variables: Mapping[str, Any],
    networks: Mapping[str, Any],
    *,
    give: SampleSource | None = None,
    last_call: int | None = None,
    schedulers: Mapping[str, Any] | None = None,
) -> StepResult:
    """Run the loop's blocks for one step, with gradients.

    Args:
        pipe, blocks: the pipeline and its blocks.
        values: inputs of the step by name; the blocks may write into their dicts and lists.
        variables: variables of the loop; `t` holds the variable named by `Blocks.clock`.
        networks: replacements of parts of the pipeline, by name.
        give: function that returns the result of a scheduler's step; by default the sample.
        last_call: number of the schedulers' step that ends the run; by default it ends after all blocks.
        schedulers: replacements of schedulers whose attributes the blocks read, by name.
    """
    from diffusers.guiders.guider_utils import BaseGuidance
    from diffusers.modular_pipelines.modular_pipeline import BlockState

    calls, pipe_parts = list[SchedulerCall](), dict(pipe.components)
    step = _StepCallback(calls, give, last_call)
    replaced = schedulers or {}
    # A guider keeps the inputs of a step, so that each step has its own.
    parts = {name: copy.copy(part) for name, part in pipe_parts.items() if isinstance(part, BaseGuidance)}
    parts |= {
        name: _WatchedScheduler(replaced.get(name, part), name, step)
        for name, part in pipe_parts.items()
        if is_scheduler(part)
    }
    step_values = {
        name: _WatchedScheduler(value, name, step) if is_scheduler(value) else value for name, value in values.items()
    }
    if blocks.inner is not None:
        step_values["timesteps"] = torch.as_tensor(variables["t"])[None]
        variables = _drop_step(variables)
    elif blocks.clock != "t":
        variables = {**variables, blocks.clock: variables["t"]}
        del variables["t"]
    components, state = BlockComponents(pipe, {**parts, **networks}), BlockState(**step_values)
    try:
        for block in blocks.loop.sub_blocks.values() if blocks.inner is None else (blocks.inner,):
            components, state = inspect.unwrap(type(block).__call__)(block, components, state, **variables)
    except _StepEnded:
        return StepResult(calls, None)
    return StepResult(calls, state)


def _drop_step(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a loop over chunks, without those of a step."""
    return {name: value for name, value in variables.items() if name not in ("i", "t")}


def is_scheduler(value: Any) -> bool:
    """Return whether a part or a value is a scheduler."""
    return hasattr(value, "set_timesteps") and hasattr(value, "step")


class BlockComponents:
    """A pipeline as its blocks see it, with some parts replaced; attributes that they set do not reach the pipeline."""

    def __init__(self, pipe: Any, parts: dict[str, Any]) -> None:
        vars(self).update(_pipe=pipe, _parts=parts)

    def __getattr__(self, name: str) -> Any:
        parts = vars(self)["_parts"]
        return parts[name] if name in parts else getattr(vars(self)["_pipe"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._parts[name] = value


class BlockNetwork:
    """A network as the blocks see it: it reports the device and dtype of the computation, not those of its weights."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        vars(self).update(_module=module, device=device, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # a block may write into its samples afterwards, which a backward pass would read
            args, kwargs = optree.tree_map(lambda leaf: leaf.clone() if _is_matrix(leaf) else leaf, (args, kwargs))
        return self._module(*args, **kwargs)

    @property
    def forward(self) -> Any:
        """The forward pass of the network itself: blocks choose their arguments by its signature."""
        module = vars(self)["_module"]
        return module.experts[module.part].forward if isinstance(module, ExpertProxy) else module.forward


def _is_matrix(leaf: Any) -> bool:
    """Return whether an input has features; times, whose values the host may know, have not more than one dimension."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1


class ProbedNetwork(BlockNetwork):
    """A network that records its inputs and returns noise with a gradient, the same at each k-th call.

    Args:
        stand_in: network that returns outputs of the right shapes, see `replay.stand_in`.
        inputs: list to which each call appends the tensors and numbers among its inputs.
    """

    def __init__(self, stand_in: Any, inputs: list[list[Tensor]]) -> None:
        super().__init__(stand_in, stand_in.device, stand_in.dtype)
        vars(self).update(_inputs=inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = optree.tree_leaves((args, kwargs))
        self._inputs.append([torch.as_tensor(leaf).detach().clone() for leaf in leaves if isinstance(leaf, VALUES)])
        output, source = self._module(*args, **kwargs), torch.Generator().manual_seed(len(self._inputs))

        def draw_noise(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.randn(leaf.shape, generator=source).to(leaf).requires_grad_()

        return map_output(draw_noise, output)


class OutputNeeded(Exception):
    """Call of a `ReplayedNetwork` beyond its known outputs."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.inputs = inputs  # args and kwargs


class ReplayedNetwork(BlockNetwork):
    """A network that returns given outputs, shared by all networks of a step; the call after them raises `OutputNeeded`."""

    def __init__(self, network: BlockNetwork, outputs: Iterator[Any]) -> None:
        super().__init__(*(vars(network)[name] for name in ("_module", "device", "dtype")))
        vars(self).update(_outputs=outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for output in self._outputs:
            return output
        raise OutputNeeded((args, kwargs))


def map_output(function: Callable[[Any], Any], output: Any) -> Any:
    """Apply a function to each leaf of a network's output."""
    if not hasattr(output, "to_tuple"):
        return optree.tree_map(function, output)
    return type(output)(**{name: optree.tree_map(function, value) for name, value in output.items()})


class _StepEnded(Exception):
    """End of a step's run at the last scheduler call that is needed."""


class _StepCallback:
    """Step function of every scheduler of a pipeline, which records its calls."""

    def __init__(self, calls: list[SchedulerCall], give: SampleSource | None, last_call: int | None) -> None:
        self.calls, self.give, self.last_call = calls, give, last_call

    def __call__(self, name: str, output: Tensor, t: Any, sample: Tensor, return_dict: bool) -> Any:
        from diffusers.modular_pipelines.modular_pipeline import BlockState

        self.calls.append(SchedulerCall(name, output, t, sample))
        if len(self.calls) == self.last_call:
            raise _StepEnded
        x_next = sample if self.give is None else self.give(len(self.calls) - 1, sample)
        return BlockState(prev_sample=x_next) if return_dict else (x_next,)


class _WatchedScheduler:
    """A scheduler whose step is a `_StepCallback`; attributes cannot be set."""

    def __init__(self, scheduler: Any, name: str, step: _StepCallback) -> None:
        vars(self).update(_scheduler=scheduler, _name=name, _step=step)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_scheduler"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Leave the scheduler as it is: several calls share it."""

    def set_begin_index(self, *_: Any) -> None:
        """Leave the scheduler as it is."""

    def step(
        self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, return_dict: bool = True, **kwargs: Any
    ) -> Any:
        return self._step(self._name, model_output, timestep, sample, return_dict)
