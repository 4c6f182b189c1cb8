"""Streams: the tensors that schedulers step, their elements among the inputs of a step, and their noise levels.

Streams are found by probes, without names. A value is filled with the digits of its elements' indices, and the scheduler's
sample shows which elements it consists of: packing, leading tokens of an image, frames that are left out. The scheduler's
output then shows which elements return as samples, and which stay, as the first frames of an image to video do.

A loop without a scheduler may add new noise at each step: x' = (1 - s') x0 + s' eps, with the clean estimate x0 of its
network (Echo). Its last step, to s' = 0, returns x0, so that at any level s its velocity is (x - x0) / s. Flow-CPS at eta 1
takes the same steps.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.models.modular.blocks import LoopInputs, StepResult, is_scheduler
from fluvial.models.replay.checks import build_error
from fluvial.models.replay.latents import read_positions

ROUNDING = 1e-3  # relative error of a scheduler's step

Run = Callable[..., StepResult]  # values, variables and `give` of `run_step`


class LoopStream(NamedTuple):
    """A tensor that a scheduler steps: the generated elements of one value."""

    scheduler: str  # name of the scheduler; empty if the steps return a clean estimate
    field: str  # name of the value
    elements: Tensor  # [n] int64 elements of the flat value, in the sample's order
    sample_elements: Tensor  # [n] int64 elements of the scheduler's flat sample
    shape: torch.Size  # of the value
    dtype: torch.dtype  # of the value
    sign: float = 1.0  # of the velocity: -1 for one that points from noise to data
    levels: Tensor = torch.empty(0)  # [T+1] float32 on the host
    is_whole: bool = False  # whether the flat sample equals the flat value

    def gather(self, value: Tensor) -> Tensor:
        """Return the elements `[n]` of a scheduler's output or sample."""
        return value.flatten() if self.is_whole else value.flatten()[self.sample_elements]

    def scatter(self, x: Tensor, value: Tensor | None) -> Tensor:
        """Return the value with the elements x `[n]`, differentiable; None stands for a value without other elements."""
        x = x.to(self.dtype)
        if value is None:
            value = x.new_zeros(self.shape)
        filled = x if self.is_whole else value.flatten().index_copy(0, self.elements, x)
        return filled.reshape(self.shape)


def find_streams(pipeline: str, run: Run, loop_inputs: LoopInputs) -> list[LoopStream]:
    """Return the streams of a pipeline in the order in which its schedulers step.

    Raises:
        ReplayError: no scheduler takes a step, a scheduler's sample is not a selection of a value's elements, or the step
            changes it further.
    """
    values, variables = loop_inputs.values[0], loop_inputs.variables[0]
    calls = run(values, variables).calls
    if not calls:
        raise build_error(pipeline, "its step calls no scheduler that a rollout could replace")
    if not all(each.output.requires_grad for each in calls):
        raise build_error(pipeline, "its step computes without gradients")
    afters = [_return_noise(run, values, variables, calls, seed) for seed in range(2)]
    changed = [name for name, value in values.items() if isinstance(value, Tensor) and value.is_floating_point()]
    changed = [name for name in changed if not _is_same(getattr(afters[0][1], name, None), values[name])]
    indices = [_find_indices(run, values, variables, name) for name in changed]
    streams = []
    for call, each in enumerate(calls):
        fields = [(name, index[call]) for name, index in zip(changed, indices, strict=True) if index[call] is not None]
        if len(fields) != 1 or each.output.numel() != each.sample.numel():
            raise build_error(pipeline, f"the sample of its {each.name} is not a selection of elements of one value")
        (name, index), value = fields[0], values[fields[0][0]]
        assert index is not None
        before = value.flatten()[index]
        live, fixed = torch.ones(len(index), dtype=torch.bool), torch.ones(len(index), dtype=torch.bool)
        for noise, state in afters:
            after = getattr(state, name)
            if not isinstance(after, Tensor) or after.shape != value.shape:
                raise build_error(pipeline, f"its step changes the shape of {name}")
            live &= after.flatten()[index].cpu() == noise[call].to(after.dtype)
            fixed &= (after.flatten()[index] == before).cpu()
        rests = each.output.detach().flatten().cpu() == 0  # some pipelines keep given frames by a velocity of zero
        if not (live | fixed | rests).all():
            raise build_error(pipeline, f"its step changes {name} besides what its {each.name} returns, as for inpainting")
        chosen = torch.nonzero(live & ~rests).flatten()
        if not len(chosen):
            raise build_error(pipeline, f"the output of its {each.name} has no effect")
        every, device = torch.arange(value.numel()), value.device
        stream = LoopStream(each.name, name, index[chosen].to(device), chosen.to(device), value.shape, value.dtype)
        streams.append(stream._replace(is_whole=torch.equal(chosen, every) and torch.equal(index, every)))
    return streams


def find_clean_estimates(pipeline: str, run: Run, loop_inputs: LoopInputs) -> list[LoopStream]:
    """Return the streams of a loop without a scheduler, whose last step returns clean estimates.

    Raises:
        ReplayError: its steps change no value, or change a value's shape.
    """
    values, levels = loop_inputs.values[0], [float(variables["t"]) for variables in loop_inputs.variables]
    after, streams = run(values, loop_inputs.variables[0]).after, list[LoopStream]()
    for name, value in values.items():
        clean = getattr(after, name, None)
        if not isinstance(value, Tensor) or not value.is_floating_point() or clean is value or _is_same(clean, value):
            continue
        if not isinstance(clean, Tensor) or clean.shape != value.shape or not clean.requires_grad:
            raise build_error(pipeline, f"its step changes the shape of {name}, or computes it without gradients")
        index = torch.nonzero(clean.detach().flatten() != value.flatten()).flatten()  # given frames stay
        whole = len(index) == value.numel()
        ends = torch.tensor([*levels, 0.0])
        streams.append(LoopStream("", name, index, index, value.shape, value.dtype, 1.0, ends, whole))
    if not streams:
        raise build_error(pipeline, "its step calls no scheduler that a rollout could replace")
    return streams


def read_levels(pipeline: str, stream: LoopStream, scheduler: Any, call: Any, steps: int) -> LoopStream:
    """Return a stream with its noise levels, and the sign of its velocity, by a trial step of its scheduler.

    Args:
        pipeline: class of the pipeline, for messages.
        stream: the stream.
        scheduler: its scheduler, whose schedule is set.
        call: call of its step.
        steps: number of steps of the loop.

    Raises:
        ReplayError: the scheduler has no levels that fall to 0, or its steps are not Euler's; for one of epsilon, no signal
            powers that rise, or its steps are not DDIM's.
    """
    kind = type(scheduler).__name__
    if (powers := getattr(scheduler, "alphas_cumprod", None)) is not None:
        levels = torch.cat([powers[scheduler.timesteps.cpu()], scheduler.final_alpha_cumprod[None]]).cpu()
        now, then = levels[0].item(), levels[1].item()
        expected = (math.sqrt(1 - then) - math.sqrt(then * (1 - now) / now), math.sqrt(then / now))
        ends = _try_step(pipeline, stream, scheduler, call)
        near = all(abs(end - other) <= ROUNDING * max(1, abs(other)) for end, other in zip(ends, expected, strict=True))
        if len(levels) != steps + 1 or not (levels.diff() > 0).all() or not near:
            raise build_error(pipeline, f"its {stream.scheduler} is a {kind}, whose steps are not DDIM's")
        return stream._replace(levels=levels)
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None:
        raise build_error(pipeline, f"its {stream.scheduler} ({kind}) has no noise levels")
    levels = torch.as_tensor(sigmas).detach().float().cpu()
    if len(levels) != steps + 1:
        raise build_error(pipeline, f"it takes {steps} steps of a schedule of {len(levels) - 1}, as from an image")
    if levels[-1] != 0 or levels[0] > 1 or not (levels.diff() < 0).all():
        raise build_error(pipeline, f"the noise levels of its {stream.scheduler} ({kind}) do not fall from at most 1 to 0")
    ends = _try_step(pipeline, stream, scheduler, call)
    slope = ends[0] / float(levels[1] - levels[0])
    if abs(abs(slope) - 1) > ROUNDING or abs(ends[1] - 1) > ROUNDING:
        raise build_error(pipeline, f"its {stream.scheduler} is a {kind}, whose steps are not Euler's of a flow")
    return stream._replace(levels=levels, sign=1.0 if slope > 0 else -1.0)


def _try_step(pipeline: str, stream: LoopStream, scheduler: Any, call: Any) -> list[float]:
    """Return the results of the first step from 0 with an output of 1, and from 1 with an output of 0."""
    ends = []
    for x, v in ((0.0, 1.0), (1.0, 0.0)):
        like = torch.ones_like(call.sample.detach(), dtype=torch.float32)
        try:
            ends.append(float(copy.deepcopy(scheduler).step(v * like, call.t, x * like, return_dict=False)[0].flatten()[0]))
        except Exception as error:
            raise build_error(pipeline, f"its {stream.scheduler} ({type(scheduler).__name__}) fails: {error}") from error
    return ends


def find_scheduler(pipe: Any, loop_inputs: LoopInputs, name: str) -> Any:
    """Return the named scheduler, which is an input of the loop or a part of the pipeline."""
    value = loop_inputs.values[0].get(name)
    return value if is_scheduler(value) else pipe.components[name]


def _return_noise(
    run: Run, values: Mapping[str, Any], variables: Mapping[str, Any], calls: Sequence[Any], seed: int
) -> tuple[list[Tensor], Any]:
    """Return noise for each scheduler's step, and the state after a step that returns it."""
    source = torch.Generator().manual_seed(seed)
    noise = [torch.randn(each.sample.numel(), generator=source).to(each.sample.dtype) for each in calls]
    result = run(values, variables, give=lambda call, sample: noise[call].reshape(sample.shape).to(sample))
    return noise, result.after


def _find_indices(run: Run, values: Mapping[str, Any], variables: Mapping[str, Any], name: str) -> list[Tensor | None]:
    """Return per scheduler step the indices of a value's elements that form its sample, `[m]`; None if it has others."""
    whole = values[name]

    def run_samples(value: Tensor) -> list[Tensor]:
        calls = run({**values, name: value.reshape(whole.shape).to(whole)}, variables).calls
        return [each.sample.detach().flatten() for each in calls]

    # Random numbers verify that the sample consists of those elements, unchanged.
    probe = torch.randn(whole.numel(), generator=torch.Generator().manual_seed(0)).to(whole.dtype)
    probed = [sample.to(whole.dtype).cpu() for sample in run_samples(probe)]
    read = read_positions(lambda digits: torch.cat([each.float() for each in run_samples(digits)]), whole.numel())
    indices = list[Tensor | None]()
    for sample, index in zip(probed, read.split([*map(len, probed)]), strict=True):
        inside = bool(((index >= 0) & (index < len(probe))).all()) and len(index.unique()) == len(index)
        indices.append(index if inside and torch.equal(sample, probe[index]) else None)
    return indices


def _is_same(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and torch.equal(one, other)
