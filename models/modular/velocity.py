"""Velocity of a modular pipeline as a function of network, sample, level and conditioning, found by probes."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fluvial.core.checks import first_block
from fluvial.core.types import Samples
from fluvial.models import host_values
from fluvial.models.modular.blocks import (
    VALUES,
    BlockNetwork,
    Blocks,
    LoopInputs,
    OutputNeeded,
    ProbedNetwork,
    ReplayedNetwork,
    map_output,
    run_step,
)
from fluvial.models.modular.conditioning import ConditioningLayout, PromptTensor, place_samples, split_inputs
from fluvial.models.modular.streams import LoopStream, find_clean_estimates, find_scheduler, find_streams, read_levels
from fluvial.models.pipelines.wan import Experts
from fluvial.models.protocol import Cond, Prediction, Schedule
from fluvial.models.replay.checks import build_error
from fluvial.models.replay.experts import place_network

LINEAR = 1e-4  # relative error of timesteps that are proportional to noise levels, which are rounded


@dataclass(frozen=True)
class ModularVelocity:
    """Velocity of a modular pipeline, guidance included, as `DiffusionModel.predict`.

    The blocks run for each sample alone. If the pipeline itself batches samples in every call of its network, and pads all
    prompts to one length, the samples share the passes of the network; otherwise each sample has its own.
    """

    pipeline: str  # class of the pipeline, for messages
    pipe: Any  # the pipeline, without the trained network
    blocks: Blocks
    parts: tuple[str, ...]  # names of the trained parts
    streams: tuple[LoopStream, ...]
    layout: ConditioningLayout
    variables: tuple[Mapping[str, Any], ...]  # of the loop, per step; with several networks the time is on the host
    schedule: Schedule
    compute: torch.dtype
    passes: tuple[int, ...]  # number of the network's passes, per step
    # Timestep at level 1, if steps differ in the time alone; None if the velocity is defined at the schedule's levels only.
    time: float | None
    prediction: Prediction = "velocity"
    ragged: bool = True  # as `RecordedModel.ragged`
    scale: float = 1.0
    joined: tuple[tuple[bool, ...], ...] = ()  # per call, the input tensors that samples share; empty if passes are separate

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample: that of the stepped value; `[n]` of several; `[R, m]` of R rows with separate levels."""
        first, *others = self.streams
        count = sum(len(stream.elements) for stream in self.streams)
        if self.schedule.levels.ndim == 2:
            return (self.schedule.levels.shape[1], count // self.schedule.levels.shape[1])
        return tuple(first.shape[1:]) if not others and first.is_whole and first.shape[0] == 1 else (count,)

    def to(self, device: torch.device) -> "ModularVelocity":
        """Return the velocity with all inputs of a step on another device than the pipeline's, as in a dry run."""
        move = partial(_move_to, device=device)
        old = self.layout.leaves
        leaves = [leaf._replace(device=device.type) if isinstance(leaf, PromptTensor) else move(leaf) for leaf in old]
        streams = tuple(LoopStream(*map(move, stream)) for stream in self.streams)
        layout, variables = self.layout._replace(leaves=tuple(leaves)), tuple(move(each) for each in self.variables)
        if len(self.parts) > 1:
            variables = tuple({**moved, "t": before["t"]} for moved, before in zip(variables, self.variables, strict=True))
        return replace(self, layout=layout, streams=streams, variables=variables)

    def predict(
        self, module: nn.Module, x: Samples, sigma: Tensor, cond: Cond, *, timestep: Tensor | None = None
    ) -> Samples:
        """Return the velocity `[P, *event]` that the pipeline would step with, differentiable.

        Args:
            module: the trained network, possibly sharded and with adapters.
            x: samples, `[P, *event]`.
            sigma: their noise levels, `[P]`, or those of each row, `[P, R]`; the first row's tells the step.
            cond: tensors of the `ConditioningLayout`, `[P, ...]`, then their sizes and numbers, `[P, n]`.
            timestep: timestep of each sample, `[P]`; it determines the step if the host knows its values.

        Raises:
            ValueError: no step has a level, and the pipeline's velocity depends on more than the time.
        """
        networks = {part: BlockNetwork(place_network(module, part), x.device, self.compute) for part in self.parts}
        sizes = host_values.read(cond[-1]).tolist()
        steps = [(*self._step(numbers, level, x.device), level) for level, numbers in self._read_steps(sigma, timestep)]

        def enter(pair: int) -> dict[str, Any]:
            values = self.layout.restore([row[pair] for row in cond[:-1]], sizes[pair], steps[pair][0])
            return place_samples(values, x[pair].flatten(), self.streams)

        each: list[Mapping[str, Any]] = [networks] * len(x)
        if self.joined and len(x) > 1:
            sample_outputs = self._pass_together(module, networks, enter, [variables for _, variables, _ in steps])
            each = [_replay_outputs(networks, outputs) for outputs in sample_outputs]
        rows = [self._velocity(enter(pair), *step[1:], each[pair]).to(x.dtype) for pair, step in enumerate(steps)]
        return torch.stack(rows).reshape(x.shape)

    def _pass_together(
        self,
        module: nn.Module,
        networks: Mapping[str, BlockNetwork],
        enter: Callable[[int], dict[str, Any]],
        variables: Sequence[Mapping[str, Any]],
    ) -> list[list[Any]]:
        """Return the outputs of the network by sample and call, from one pass for all samples per call.

        The blocks of each sample run until they call the network for the k-th time, given its k - 1 outputs before.
        """
        outputs_of_samples: list[list[Any]] = [[] for _ in variables]
        first = next(iter(networks.values()))
        network: Any = module if isinstance(module, Experts) else first
        for joined in self.joined:
            leaves_of_samples = list[list[Any]]()
            for pair, outputs in enumerate(outputs_of_samples):
                try:
                    run_step(self.pipe, self.blocks, enter(pair), variables[pair], _replay_outputs(networks, outputs))
                except OutputNeeded as call:
                    leaves, tree = optree.tree_flatten(call.inputs)
                    leaves_of_samples.append(leaves)
            several, kinds = list[Any](), iter(joined)
            for leaf, *others in zip(*leaves_of_samples, strict=True):
                together = isinstance(leaf, VALUES) and next(kinds)
                joined_leaf = host_values.join(leaf, *others) if together else leaf
                several.append(
                    host_values.to_device(joined_leaf, first.device) if together and network is module else joined_leaf
                )
            args, kwargs = optree.tree_unflatten(tree, several)
            output = network(*args, **kwargs)
            for pair, outputs in enumerate(outputs_of_samples):
                outputs.append(map_output(partial(_take_sample, count=len(outputs_of_samples), place=pair), output))
        return outputs_of_samples

    def _read_steps(self, sigma: Tensor, timestep: Tensor | None) -> Iterator[tuple[float, list[int]]]:
        """Yield the level of each pair, and the steps at that level; known timesteps spare a wait for the device."""
        levels, times = first_block(self.schedule.levels)[:-1], self.schedule.timesteps
        told = None if timestep is None else host_values.recall(timestep)
        if told is not None and len(times.unique()) == len(times) and bool(torch.isin(told, times).all()):
            for step in (told[:, None] == times).int().argmax(dim=1).tolist():
                yield float(levels[step]), [step]
        else:
            for level in first_block(host_values.read(sigma).float()):
                yield float(level), torch.nonzero(levels == level).flatten().tolist()

    def _step(self, numbers: Sequence[int], level: float, device: torch.device) -> tuple[int, Mapping[str, Any]]:
        """Return the step of a level, and its variables; if steps differ only in time, the first with its time replaced."""
        if numbers:
            return numbers[0], self.variables[numbers[0]]
        if self.time is None:
            raise ValueError(
                f"{self.pipeline} has no step at sigma {level:g}, expected one of "
                f"{', '.join(f'{each:g}' for each in first_block(self.schedule.levels)[:-1])}"
            )
        like = torch.as_tensor(self.variables[0]["t"])
        return 0, {**self.variables[0], "t": torch.tensor(self.time * level, dtype=like.dtype, device=like.device)}

    def _velocity(
        self, values: dict[str, Any], variables: Mapping[str, Any], level: float, networks: Mapping[str, Any]
    ) -> Tensor:
        """Return the velocity `[n]` at step inputs that hold a sample at a noise level."""
        if not self.streams[0].scheduler:
            after = run_step(self.pipe, self.blocks, values, variables, networks).after
            pairs = ((each.gather(values[each.field]), each.gather(getattr(after, each.field))) for each in self.streams)
            return torch.cat([(x - clean) / level for x, clean in pairs])
        calls = run_step(self.pipe, self.blocks, values, variables, networks, last_call=len(self.streams)).calls
        called = zip(self.streams, calls, strict=True)
        return torch.cat([stream.sign * stream.gather(call.output) for stream, call in called])


def _replay_outputs(networks: Mapping[str, BlockNetwork], outputs: Sequence[Any]) -> dict[str, Any]:
    """Return networks that return the given outputs in order, whichever of them is called."""
    shared = iter(outputs)
    return {part: ReplayedNetwork(network, shared) for part, network in networks.items()}


def _take_sample(leaf: Tensor, count: int, place: int) -> Tensor:
    """Return the rows of one of `count` samples."""
    return leaf.chunk(count)[place].contiguous()


def find_velocity(
    pipe: Any,
    blocks: Blocks,
    loop_inputs: LoopInputs,
    parts: tuple[str, ...],
    compute: torch.dtype,
    others: Sequence[LoopInputs] = (),
) -> ModularVelocity:
    """Return the velocity of a pipeline, found by probes with noise in place of its trained network.

    Args:
        pipe, blocks: the pipeline, with stand-ins for its trained parts, and its blocks.
        loop_inputs: inputs of the steps for a prompt.
        parts: names of the trained parts.
        compute: dtype that the network computes in.
        others: inputs of the steps for two samples, the shortest prompt and the longest; empty if there is no such call.

    Raises:
        ReplayError: the steps give no velocity, or it depends on more than the network, the sample and the conditioning.
    """
    pipeline, inputs = type(pipe).__name__, list[list[Tensor]]()
    run = partial(_run_probe, pipe, blocks, parts, inputs)
    if blocks.clock == "t":
        streams = find_streams(pipeline, run, loop_inputs)
        steps, calls = len(loop_inputs.values), run(loop_inputs.values[0], loop_inputs.variables[0]).calls
        for number, stream in enumerate(streams):
            scheduler = find_scheduler(pipe, loop_inputs, stream.scheduler)
            streams[number] = read_levels(pipeline, stream, scheduler, calls[number], steps)
    else:
        streams = find_clean_estimates(pipeline, run, loop_inputs)
    layout, _, _ = split_inputs(pipeline, loop_inputs, streams)
    passes = []
    for values, variables in zip(loop_inputs.values, loop_inputs.variables, strict=True):
        run(values, variables)
        passes.append(len(inputs))
    if len({*passes}) > 1:
        calls = f"{min(passes)} to {max(passes)} times"
        raise build_error(pipeline, f"its steps call the network {calls}, expected the same number in every step")
    times = torch.tensor([float(variables["t"]) for variables in loop_inputs.variables])
    one = all(torch.equal(stream.levels, streams[0].levels) for stream in streams)
    free = _find_time(run, inputs, loop_inputs, layout, streams[0].levels, times) if one else None
    if free is None:
        _check_other_times(pipeline, run, inputs, loop_inputs, pipe)
    schedule = Schedule(streams[0].levels if one else _list_levels(streams), times)
    known: tuple[Mapping[str, Any], ...] = tuple(loop_inputs.variables)
    if len(parts) > 1:  # the host chooses between networks by the time
        known = tuple({**each, "t": torch.as_tensor(each["t"]).cpu()} for each in known)
    every = (tuple(streams), layout, known, schedule, compute, tuple(passes), free)
    joined = _find_joined(run, inputs, loop_inputs, others) if others else ()
    return ModularVelocity(pipeline, pipe, blocks, parts, *every, joined=joined)


def _find_joined(
    run: Any, inputs: list[list[Tensor]], loop_inputs: LoopInputs, others: Sequence[LoopInputs]
) -> tuple[tuple[bool, ...], ...]:
    """Return per call which tensors the pipeline itself batches samples in; empty if passes cannot be shared.

    Every other tensor must be the same for all prompts and steps, and all prompts must have tensors of the same sizes.
    """

    def probe(values: Mapping[str, Any], variables: Mapping[str, Any]) -> list[list[Tensor]]:
        run(values, variables)
        return [*inputs]

    one, (two, *prompts) = probe(loop_inputs.values[0], loop_inputs.variables[0]), others
    both = probe(two.values[0], two.variables[0])
    steps = [probe(*each) for each in zip(loop_inputs.values, loop_inputs.variables, strict=True)]
    texts = [probe(other.values[0], other.variables[0]) for other in prompts]
    if [*map(len, one)] != [*map(len, both)]:
        return ()
    joined = tuple(tuple(a.shape != b.shape for a, b in zip(*pair, strict=True)) for pair in zip(one, both, strict=True))
    for ours, several, kinds in zip(one, both, joined, strict=True):
        for a, b, together in zip(ours, several, kinds, strict=True):
            if together and (not a.ndim or b.shape != (2 * len(a), *a.shape[1:])):
                return ()
            if not together and a.ndim > 1 and len(a) == 1:  # of one sample, as the image of HunyuanVideo 1.5
                return ()
    for other in (*steps, *texts):
        for call, (ours, theirs) in enumerate(zip(one, other, strict=True)):
            for a, b, together in zip(ours, theirs, joined[call], strict=True):
                if a.shape != b.shape or not (together or torch.equal(a, b)):
                    return ()
    return joined if all(map(any, joined)) else ()


def _list_levels(streams: Sequence[LoopStream]) -> Tensor:
    """Return the noise levels `[T+1, R]` of samples `[R, m]`; m is the greatest common divisor of the streams' sizes."""
    counts = [len(stream.elements) for stream in streams]
    rows = torch.tensor(counts) // math.gcd(*counts)
    return torch.stack([stream.levels for stream in streams], dim=1).repeat_interleave(rows, dim=1)


def _run_probe(
    pipe: Any,
    blocks: Blocks,
    parts: Sequence[str],
    inputs: list[list[Tensor]],
    values: Mapping[str, Any],
    variables: Mapping[str, Any],
    **options: Any,
) -> Any:
    """Run a step with noise in place of the trained network, and write the network's inputs by call to `inputs`."""
    inputs.clear()
    networks = {part: ProbedNetwork(getattr(pipe, part), inputs) for part in parts}
    with torch.enable_grad():
        return run_step(pipe, blocks, _deep_copy(values), variables, networks, **options)


def _deep_copy(value: Any) -> Any:
    """Copy nested containers and their tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _deep_copy(one) for name, one in value.items()}
    return type(value)(map(_deep_copy, value)) if type(value) in (list, tuple) else value


def _move_to(value: Any, device: torch.device) -> Any:
    """Return an input of a step on a device."""
    if isinstance(value, Mapping):
        return {name: _move_to(each, device) for name, each in value.items()}
    return device if isinstance(value, torch.device) else value.to(device) if isinstance(value, Tensor) else value


def _find_time(
    run: Any, inputs: list[list[Tensor]], loop_inputs: LoopInputs, layout: ConditioningLayout, levels: Tensor, times: Tensor
) -> float | None:
    """Return the timestep at level 1 if steps differ in t alone and t is proportional to the level; else None."""
    time = float(times[0] / levels[0])
    if any(getattr(leaf, "each_step", False) for leaf in layout.leaves):
        return None
    if not torch.allclose(times, time * levels[:-1], rtol=LINEAR, atol=LINEAR * abs(time)):
        return None

    def probe(step: int, t: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
        calls = run(loop_inputs.values[0], {**loop_inputs.variables[step], "t": t}).calls
        return [*inputs], [each.output.detach() for each in calls]

    every = [torch.as_tensor(variables["t"]) for variables in loop_inputs.variables]
    # A time between steps shows pipelines that look it up in their schedule.
    for t in (every[-1], (every[0] + every[-1]) / 3 * 0.9):
        try:
            one, *others = [probe(step, t.clone()) for step in range(len(every))]
        except Exception:  # of the pipeline's own code
            return None
        if not all(_is_equal(one, other) for other in others):
            return None
    return time


def _check_other_times(pipeline: str, run: Any, inputs: list[list[Tensor]], loop_inputs: LoopInputs, pipe: Any) -> None:
    """Raise ReplayError if a step depends on the time of another step, as a flow map does."""
    times = torch.stack([torch.as_tensor(variables["t"]).float().cpu() for variables in loop_inputs.variables])

    def change(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape == times.shape and torch.equal(value.float().cpu(), times):
            return torch.cat([value[:1], value[1:] * 0.5])
        if isinstance(value, dict):
            return {name: change(one) for name, one in value.items()}
        return value

    def change_schedule(scheduler: Any) -> Any:
        other = copy.copy(scheduler)
        for name in ("timesteps", "sigmas"):
            if isinstance(values := getattr(other, name, None), Tensor):
                setattr(other, name, torch.cat([values[:1], values[1:] * 0.5]))
        return other

    run(loop_inputs.values[0], loop_inputs.variables[0])
    before = [*inputs]
    schedulers = {name: change_schedule(part) for name, part in pipe.components.items() if hasattr(part, "set_timesteps")}
    run(change(loop_inputs.values[0]), loop_inputs.variables[0], schedulers=schedulers)
    if not _is_equal(before, [*inputs]):
        raise build_error(pipeline, "its network is given the time of the next step, so it is a flow map, not a velocity")


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return len(one) == len(other) and all(map(_is_equal, one, other))
