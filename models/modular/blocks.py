"""Blocks of a modular pipeline of diffusers, called apart: the layer that knows its classes.

A modular pipeline is a list of blocks, one of them a loop of blocks. The blocks before the loop run once per prompt. The
loop runs once with an empty step, which gives what enters each step without a forward pass. A velocity is one step of the
loop's own blocks, with gradients, and with schedulers that say what they are asked to step with.

A loop over chunks of a sample has a block in it that takes all steps of a chunk. With one chunk, that block takes each step
as the only one, and the blocks before and after it in the loop run once.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin

import optree
import torch
from torch import Tensor, nn

from fluvial.models.pipelines.folder import quietly
from fluvial.models.replay.checks import foreign, refusal
from fluvial.models.replay.experts import Through
from fluvial.models.replay.kinds import Frames, Sound

PROMPT = "prompt"  # argument of the call, and output of blocks that rewrite it
SIGMA = "sigma"  # variable of loops that add new noise at each step, see `streams`
VALUES = (Tensor, int, float)  # inputs of a network whose values are compared
Give = Callable[[int, Tensor], Tensor]  # what the schedulers' k-th step returns for a sample


class Blocks(NamedTuple):
    """The blocks that run for a call; the loop alone has blocks in it."""

    before: tuple[Any, ...]
    loop: Any
    after: tuple[Any, ...]
    inputs: tuple[Any, ...]  # of the call
    inner: Any = None  # block of a loop over chunks that takes the steps
    clock: str = "t"  # name of the loop's variable that tells the noise level

    def parts(self) -> dict[str, Any]:
        """Return the specifications of the parts that they use, by name."""
        return {spec.name: spec for block in (*self.before, self.loop, *self.after) for spec in block.expected_components}

    def networks(self) -> dict[str, Any]:
        """Return the classes of the networks that the loop calls, by part."""
        kinds = {spec.name: spec.type_hint for spec in (self.inner or self.loop).expected_components}
        return {name: kind for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}

    def outputs(self) -> set[str]:
        """Return the names of what the blocks after the loop make."""
        return {output.name for block in self.after for output in block.intermediate_outputs}


class Entered(NamedTuple):
    """What enters each step of the loop for a prompt."""

    state: Any  # after the blocks before the loop
    values: list[dict[str, Any]]  # by name, per step
    variables: list[dict[str, Any]]  # of the loop, per step: i and t


class Asked(NamedTuple):
    """One call of a scheduler's step."""

    name: str  # of the scheduler
    output: Tensor  # of the model
    t: Any
    sample: Tensor


class Ran(NamedTuple):
    """One step of the loop's blocks."""

    asked: list[Asked]
    after: Any  # state after it; None if it was ended by the last call of a scheduler


def split(pipe: Any, arguments: Mapping[str, Any]) -> Blocks:
    """Return the blocks that run for a call, without those that rewrite its prompt, which are random.

    Raises:
        ReplayError: they do not have one loop.
    """
    from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

    name = type(pipe).__name__
    with foreign(name, "be split into blocks"):
        every = pipe.blocks
        chosen = every.get_execution_blocks(**{key: value for key, value in arguments.items() if value is not None})
        flat = [*chosen.sub_blocks.values()]
    kept = [block for block in flat if PROMPT not in {output.name for output in block.intermediate_outputs}]
    places = [place for place, block in enumerate(kept) if isinstance(block, LoopSequentialPipelineBlocks)]
    if len(places) != 1:
        raise refusal(name, f"its blocks have {len(places)} loops, expected one")
    (place,) = places
    if any(isinstance(block, LoopSequentialPipelineBlocks) for block in kept[place].sub_blocks.values()):
        raise refusal(name, "its loop has a loop in it: it makes samples in chunks, each from the ones before")
    inner = next((block for block in kept[place].sub_blocks.values() if _takes_all_steps(block)), None)
    takes = {each for block in kept[place].sub_blocks.values() for each in _parameters(block)}
    clock = SIGMA if SIGMA in takes and "t" not in takes else "t"
    return Blocks(tuple(kept[:place]), kept[place], tuple(kept[place + 1 :]), tuple(every.inputs), inner, clock)


def _parameters(block: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(type(block).__call__)).parameters


def _takes_all_steps(block: Any) -> bool:
    """Return whether a block in a loop calls a network and a scheduler, and is given no step."""
    from diffusers import SchedulerMixin

    kinds = [spec.type_hint for spec in block.expected_components if inspect.isclass(spec.type_hint)]
    both = any(issubclass(kind, SchedulerMixin) for kind in kinds) and any(issubclass(kind, nn.Module) for kind in kinds)
    return both and "i" not in _parameters(block)


def wrap_media(blocks: Blocks, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, with lists of media as those of the classes that the blocks take in their place.

    MiniMax-H3 takes a list of references, each of the class of its kind, whose first field is `image`, `frames` or `audio`.
    """
    wrapped = dict(asked)
    for entry in blocks.inputs:
        media, kinds = asked.get(entry.name), get_args(entry.type_hint)
        if media is not None and get_origin(entry.type_hint) is list and dataclasses.is_dataclass(kinds[0]):
            base: Any = kinds[0]
            classes = {dataclasses.fields(kind)[0].name: kind for kind in base.__subclasses__()}
            wrapped[entry.name] = [_wrap(classes, each) for each in (media if type(media) is list else [media])]
    return wrapped


def _wrap(classes: Mapping[str, Any], media: Any) -> Any:
    """Return an image, a video or a sound as the class of its kind."""
    if isinstance(media, Sound):
        return classes["audio"](media.wave, sample_rate=media.rate)
    return classes["frames"](list(media), fps=media.rate) if isinstance(media, Frames) else classes["image"](media)


def set_inputs(blocks: Blocks, asked: Mapping[str, Any], seed: int) -> Any:
    """Return the state that the first block is given, as the pipeline's call does."""
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    state, asked = PipelineState(), wrap_media(blocks, asked)
    for entry in blocks.inputs:
        if entry.name in asked:
            state.set(entry.name, asked[entry.name], entry.kwargs_type)
        elif entry.name is not None and entry.name not in state.values:
            state.set(entry.name, entry.default, entry.kwargs_type)
        if entry.name == "generator":
            state.set("generator", torch.Generator().manual_seed(seed))
    return state


@torch.no_grad()
def run_whole(pipe: Any, blocks: Blocks, networks: Mapping[str, Any], asked: Mapping[str, Any], seed: int) -> Any:
    """Return the state after a call of the pipeline, loop included, with the networks that it calls."""
    state, components = set_inputs(blocks, asked, seed), Components(pipe, {**networks})
    with quietly(), foreign(type(pipe).__name__, "be run"):
        for block in (*blocks.before, blocks.loop, *blocks.after):
            _, state = block(components, state)
    return state


@torch.no_grad()
def enter(pipe: Any, blocks: Blocks, networks: Sequence[str], asked: Mapping[str, Any], seed: int) -> Entered:
    """Return what enters each step of the loop for a call, which the trained networks must have no part in.

    Raises:
        ValueError: a block fails or calls a trained network, or the loop is of another kind; the message names the pipeline.
    """
    from diffusers.modular_pipelines.modular_pipeline import BlockState

    name, state = type(pipe).__name__, set_inputs(blocks, asked, seed)
    values, variables, dry = list[dict[str, Any]](), list[dict[str, Any]](), copy.copy(blocks.loop)

    def note(components: Any, block_state: Any, **arguments: Any) -> tuple[Any, Any]:
        if not isinstance(block_state, BlockState):
            raise refusal(name, "the steps of its loop are given no BlockState")
        values.append(dict(vars(block_state)))
        variables.append(arguments)
        return components, block_state

    def refuse(*_: Any) -> None:
        raise refusal(name, "it calls its network before the loop, so that what it computes would not follow the weights")

    dry.loop_step, dry.set_block_state = note, lambda *_: None
    hooks = [getattr(pipe, network).register_forward_pre_hook(refuse) for network in networks]
    try:
        with quietly(), foreign(name, "encode a prompt"):
            for block in blocks.before:
                _, state = block(pipe, state)
            type(blocks.loop).__call__(dry, pipe, state)
            if blocks.inner is not None:
                values, variables = _enter_chunk(pipe, blocks, values, variables)
    finally:
        for hook in hooks:
            hook.remove()
    names = {*variables[0]} if variables else set()
    if not {"i", blocks.clock} <= names:
        raise refusal(name, f"a step of its loop is given {', '.join(sorted(names)) or 'nothing'}, expected i and t")
    if blocks.clock != "t":  # each step is the last one at its own level
        variables = [{**variables[-1], "t": step_values[blocks.clock]} for step_values in variables]
    return Entered(state, values, variables)


def _enter_chunk(
    pipe: Any, blocks: Blocks, values: list[dict[str, Any]], variables: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what enters each step of the one chunk of a loop, and the variables of the loop and of the step."""
    from diffusers.modular_pipelines.modular_pipeline import BlockState

    if len(values) != 1:
        raise refusal(type(pipe).__name__, f"it makes a sample in {len(values)} chunks, each from the ones before")
    state: Any = BlockState(**values[0])
    for block in blocks.loop.sub_blocks.values():
        if block is blocks.inner:
            break
        _, state = block(pipe, state, **variables[0])
    if getattr(state, "timesteps", None) is None:
        raise refusal(type(pipe).__name__, "a chunk of its loop has several schedules, as of stages of other sizes")
    steps = [{**variables[0], "i": i, "t": t} for i, t in enumerate(state.timesteps)]
    return [dict(vars(state)) for _ in steps], steps


@torch.no_grad()
def leave(pipe: Any, blocks: Blocks, entered: Entered, values: Mapping[str, Any], fields: Collection[str]) -> Any:
    """Return the state after the blocks that follow the steps.

    Args:
        pipe, blocks: the pipeline and its blocks.
        entered: what entered the steps of the prompt.
        values: those of its first step, with the last sample in its place.
        fields: names of the values that hold it.
    """
    from diffusers.modular_pipelines.modular_pipeline import BlockState

    state = copy.copy(entered.state)
    state.values = {**entered.state.values, **{name: values[name] for name in fields}}
    for name, value in state.values.items():
        if isinstance(value, torch.Generator):  # which decoding may draw from, for each sample alike
            state.values[name] = copy_generator(value)
    if blocks.inner is not None:
        every, variables = [*blocks.loop.sub_blocks.values()], _without_step(entered.variables[0])
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
    give: Give | None = None,
    calls: int | None = None,
    schedulers: Mapping[str, Any] | None = None,
) -> Ran:
    """Run the loop's blocks for one step, with gradients.

    Args:
        pipe: the pipeline.
        blocks: its blocks.
        values: what enters the step; dicts and lists must be the caller's to change.
        variables: of the loop; `t` is that of `Blocks.clock`.
        networks: parts of the pipeline in whose place others are called, by name.
        give: what a scheduler's step returns; by default the sample.
        calls: number of schedulers' steps after which nothing more is run.
        schedulers: schedulers in whose place others are read, by name.
    """
    from diffusers.guiders.guider_utils import BaseGuidance
    from diffusers.modular_pipelines.modular_pipeline import BlockState

    seen, pipe_parts = list[Asked](), dict(pipe.components)
    step = _Step(seen, give, calls)
    replaced = schedulers or {}
    # A guider keeps what a step is given, so that each step has its own.
    parts = {name: copy.copy(part) for name, part in pipe_parts.items() if isinstance(part, BaseGuidance)}
    parts |= {
        name: _Stepped(replaced.get(name, part), name, step) for name, part in pipe_parts.items() if is_scheduler(part)
    }
    held = {name: _Stepped(value, name, step) if is_scheduler(value) else value for name, value in values.items()}
    if blocks.inner is not None:
        held["timesteps"] = torch.as_tensor(variables["t"])[None]
        variables = _without_step(variables)
    elif blocks.clock != "t":
        variables = {**variables, blocks.clock: variables["t"]}
        del variables["t"]
    components, state = Components(pipe, {**parts, **networks}), BlockState(**held)
    try:
        for block in blocks.loop.sub_blocks.values() if blocks.inner is None else (blocks.inner,):
            components, state = inspect.unwrap(type(block).__call__)(block, components, state, **variables)
    except _Ended:
        return Ran(seen, None)
    return Ran(seen, state)


def _without_step(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a loop over chunks."""
    return {name: value for name, value in variables.items() if name not in ("i", "t")}


def is_scheduler(value: Any) -> bool:
    """Return whether a part or a value is a scheduler."""
    return hasattr(value, "set_timesteps") and hasattr(value, "step")


class Components:
    """A pipeline as its blocks see it, with some parts replaced; what they set is not the pipeline's."""

    def __init__(self, pipe: Any, parts: dict[str, Any]) -> None:
        vars(self).update(_pipe=pipe, _parts=parts)

    def __getattr__(self, name: str) -> Any:
        parts = vars(self)["_parts"]
        return parts[name] if name in parts else getattr(vars(self)["_pipe"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._parts[name] = value


class Network:
    """A network as the blocks see it: in the dtype of the computation, whatever that of its weights.

    Args:
        module: the network.
        device, dtype: of the computation.
    """

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
        """The forward pass of the network itself, whose parameters tell the blocks what to pass."""
        module = vars(self)["_module"]
        return module.experts[module.part].forward if isinstance(module, Through) else module.forward


def _is_matrix(leaf: Any) -> bool:
    """Return whether an input is a tensor of numbers, and not of times, whose values the host may know."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1


class Watched(Network):
    """A network whose inputs are kept, and whose outputs are noise: the same at each k-th call, and with a gradient.

    Args:
        stand_in: network that returns outputs of the right shapes, see `replay.stand_in`.
        inputs: list that the tensors and numbers of each call's inputs are added to.
    """

    def __init__(self, stand_in: Any, inputs: list[list[Tensor]]) -> None:
        super().__init__(stand_in, stand_in.device, stand_in.dtype)
        vars(self).update(_inputs=inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = optree.tree_leaves((args, kwargs))
        self._inputs.append([torch.as_tensor(leaf).detach().clone() for leaf in leaves if isinstance(leaf, VALUES)])
        output, source = self._module(*args, **kwargs), torch.Generator().manual_seed(len(self._inputs))

        def noise(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.randn(leaf.shape, generator=source).to(leaf).requires_grad_()

        return map_output(noise, output)


class Wanted(Exception):
    """A network was called whose output is not known yet."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.inputs = inputs  # args and kwargs


class Answered(Network):
    """A network whose first outputs are given; the call after them raises `Wanted`.

    Args:
        network: the network.
        answers: outputs of the calls of all networks of a step, in their order.
    """

    def __init__(self, network: Network, answers: Iterator[Any]) -> None:
        super().__init__(*(vars(network)[name] for name in ("_module", "device", "dtype")))
        vars(self).update(_answers=answers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for output in self._answers:
            return output
        raise Wanted((args, kwargs))


def map_output(function: Callable[[Any], Any], output: Any) -> Any:
    """Return the output of a network with a function of each of its leaves."""
    if not hasattr(output, "to_tuple"):
        return optree.tree_map(function, output)
    return type(output)(**{name: optree.tree_map(function, value) for name, value in output.items()})


class _Ended(Exception):
    """All schedulers were asked to step."""


class _Step:
    """The step of every scheduler of a pipeline, which keeps what it is asked for."""

    def __init__(self, seen: list[Asked], give: Give | None, calls: int | None) -> None:
        self.seen, self.give, self.calls = seen, give, calls

    def __call__(self, name: str, output: Tensor, t: Any, sample: Tensor, return_dict: bool) -> Any:
        from diffusers.modular_pipelines.modular_pipeline import BlockState

        self.seen.append(Asked(name, output, t, sample))
        if len(self.seen) == self.calls:
            raise _Ended
        moved = sample if self.give is None else self.give(len(self.seen) - 1, sample)
        return BlockState(prev_sample=moved) if return_dict else (moved,)


class _Stepped:
    """A scheduler with another step; what is set is not the scheduler's."""

    def __init__(self, scheduler: Any, name: str, step: _Step) -> None:
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
