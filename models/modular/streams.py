"""Streams: the tensors that schedulers step, where they are among the values that enter a step, and their noise levels.

No names are needed. A value is filled with the digits of its own places, and the sample that a scheduler is given shows
which of them it consists of: packing, leading tokens of an image, frames that are left out. What the schedulers return then
shows which elements come back as samples, and which stay, as given frames do.

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

from fluvial.models.modular.blocks import Entered, Ran, is_scheduler
from fluvial.models.replay.checks import refusal
from fluvial.models.replay.latents import read_places

ROUNDING = 1e-3  # relative error of a scheduler's step

Run = Callable[..., Ran]  # values, variables and `give` of `run_step`


class LoopStream(NamedTuple):
    """A tensor that a scheduler steps: the generated elements of one value."""

    scheduler: str  # empty for one whose steps return its clean estimate
    field: str  # name of the value
    places: Tensor  # [n] int64 elements of the flat value, in the sample's order
    live: Tensor  # [n] int64 elements of the scheduler's flat sample
    whole: torch.Size  # of the value
    dtype: torch.dtype  # of the value
    sign: float = 1.0  # of the velocity: -1 for one that points from noise to data
    levels: Tensor = torch.empty(0)  # [T+1] float32 on the host
    is_whole: bool = False  # whether the sample is the whole value as it is

    def take(self, value: Tensor) -> Tensor:
        """Return the elements `[n]` of a scheduler's output or sample."""
        return value.flatten() if self.is_whole else value.flatten()[self.live]

    def place(self, x: Tensor, value: Tensor | None) -> Tensor:
        """Return the value with the elements `[n]`, differentiable; without others there are none to keep."""
        x = x.to(self.dtype)
        if value is None:
            value = x.new_zeros(self.whole)
        placed = x if self.is_whole else value.flatten().index_copy(0, self.places, x)
        return placed.reshape(self.whole)


def find_streams(pipeline: str, run: Run, entered: Entered) -> list[LoopStream]:
    """Return the streams of a pipeline in the order in which its schedulers step.

    Raises:
        ReplayError: no scheduler steps, or what one is given, or does, is not understood.
    """
    values, variables = entered.values[0], entered.variables[0]
    asked = run(values, variables).asked
    if not asked:
        raise refusal(pipeline, "its step calls no scheduler, in whose place a rollout could step")
    if not all(each.output.requires_grad for each in asked):
        raise refusal(pipeline, "its step computes without gradients")
    afters = [_return_noise(run, values, variables, asked, seed) for seed in range(2)]
    moved = [name for name, value in values.items() if isinstance(value, Tensor) and value.is_floating_point()]
    moved = [name for name in moved if not _same(getattr(afters[0][1], name, None), values[name])]
    place_lists = [_find_places(run, values, variables, name) for name in moved]
    streams = []
    for call, each in enumerate(asked):
        fields = [(name, places[call]) for name, places in zip(moved, place_lists, strict=True) if places[call] is not None]
        if len(fields) != 1 or each.output.numel() != each.sample.numel():
            raise refusal(pipeline, f"what its {each.name} steps is not one selection of elements of what enters the step")
        (name, places), value = fields[0], values[fields[0][0]]
        assert places is not None
        kept = value.flatten()[places]
        live, fixed = torch.ones(len(places), dtype=torch.bool), torch.ones(len(places), dtype=torch.bool)
        for noise, state in afters:
            after = getattr(state, name)
            if not isinstance(after, Tensor) or after.shape != value.shape:
                raise refusal(pipeline, f"its step changes the shape of {name}")
            live &= after.flatten()[places].cpu() == noise[call].to(after.dtype)
            fixed &= (after.flatten()[places] == kept).cpu()
        rests = each.output.detach().flatten().cpu() == 0  # given frames of some pipelines are kept by a velocity of zero
        if not (live | fixed | rests).all():
            raise refusal(pipeline, f"its step changes {name} besides what its {each.name} returns, as for inpainting")
        chosen = torch.nonzero(live & ~rests).flatten()
        if not len(chosen):
            raise refusal(pipeline, f"what its {each.name} returns has no effect")
        every = torch.arange(value.numel())
        stream = LoopStream(
            each.name, name, places[chosen].to(value.device), chosen.to(value.device), value.shape, value.dtype
        )
        streams.append(stream._replace(is_whole=torch.equal(chosen, every) and torch.equal(places, every)))
    return streams


def find_clean_estimates(pipeline: str, run: Run, entered: Entered) -> list[LoopStream]:
    """Return the streams of a loop without a scheduler, whose last step returns clean estimates.

    Raises:
        ReplayError: its steps move nothing, or change shapes.
    """
    values, levels = entered.values[0], [float(variables["t"]) for variables in entered.variables]
    after, streams = run(values, entered.variables[0]).after, list[LoopStream]()
    for name, value in values.items():
        moved = getattr(after, name, None)
        if not isinstance(value, Tensor) or not value.is_floating_point() or moved is value or _same(moved, value):
            continue
        if not isinstance(moved, Tensor) or moved.shape != value.shape or not moved.requires_grad:
            raise refusal(pipeline, f"its step changes the shape of {name}, or computes it without gradients")
        places = torch.nonzero(moved.detach().flatten() != value.flatten()).flatten()  # given frames stay
        whole = len(places) == value.numel()
        streams.append(
            LoopStream("", name, places, places, value.shape, value.dtype, 1.0, torch.tensor([*levels, 0.0]), whole)
        )
    if not streams:
        raise refusal(pipeline, "its step calls no scheduler, in whose place a rollout could step")
    return streams


def read_levels(pipeline: str, stream: LoopStream, scheduler: Any, asked: Any, steps: int) -> LoopStream:
    """Return a stream with its noise levels, and the sign of its velocity, by a trial step of its scheduler.

    Args:
        pipeline: class of the pipeline, for messages.
        stream: the stream.
        scheduler: its scheduler, whose schedule is set.
        asked: call of its step.
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
        ends = _try_step(pipeline, stream, scheduler, asked)
        near = all(abs(end - other) <= ROUNDING * max(1, abs(other)) for end, other in zip(ends, expected, strict=True))
        if len(levels) != steps + 1 or not (levels.diff() > 0).all() or not near:
            raise refusal(pipeline, f"its {stream.scheduler} is a {kind}, whose steps are not DDIM's")
        return stream._replace(levels=levels)
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None:
        raise refusal(pipeline, f"its {stream.scheduler} ({kind}) has no noise levels")
    levels = torch.as_tensor(sigmas).detach().float().cpu()
    if len(levels) != steps + 1:
        raise refusal(pipeline, f"it takes {steps} steps of a schedule of {len(levels) - 1}, as from an image")
    if levels[-1] != 0 or levels[0] > 1 or not (levels.diff() < 0).all():
        raise refusal(pipeline, f"the noise levels of its {stream.scheduler} ({kind}) do not fall from at most 1 to 0")
    ends = _try_step(pipeline, stream, scheduler, asked)
    slope = ends[0] / float(levels[1] - levels[0])
    if abs(abs(slope) - 1) > ROUNDING or abs(ends[1] - 1) > ROUNDING:
        raise refusal(pipeline, f"its {stream.scheduler} is a {kind}, whose steps are not Euler's of a flow")
    return stream._replace(levels=levels, sign=1.0 if slope > 0 else -1.0)


def _try_step(pipeline: str, stream: LoopStream, scheduler: Any, asked: Any) -> list[float]:
    """Return where the first step leads from 0 with an output of 1, and from 1 with an output of 0."""
    ends = []
    for x, v in ((0.0, 1.0), (1.0, 0.0)):
        like = torch.ones_like(asked.sample.detach(), dtype=torch.float32)
        try:
            ends.append(float(copy.deepcopy(scheduler).step(v * like, asked.t, x * like, return_dict=False)[0].flatten()[0]))
        except Exception as error:
            raise refusal(pipeline, f"its {stream.scheduler} ({type(scheduler).__name__}) cannot step: {error}") from error
    return ends


def find_scheduler(pipe: Any, entered: Entered, name: str) -> Any:
    """Return the scheduler of a name, which is a part of the pipeline or enters the loop."""
    value = entered.values[0].get(name)
    return value if is_scheduler(value) else pipe.components[name]


def _return_noise(
    run: Run, values: Mapping[str, Any], variables: Mapping[str, Any], asked: Sequence[Any], seed: int
) -> tuple[list[Tensor], Any]:
    """Return noise for each scheduler's step, and the state after a step that returns it."""
    source = torch.Generator().manual_seed(seed)
    noise = [torch.randn(each.sample.numel(), generator=source).to(each.sample.dtype) for each in asked]
    ran = run(values, variables, give=lambda call, sample: noise[call].reshape(sample.shape).to(sample))
    return noise, ran.after


def _find_places(run: Run, values: Mapping[str, Any], variables: Mapping[str, Any], name: str) -> list[Tensor | None]:
    """Return for each scheduler's step the elements of a value that its sample consists of, `[m]`; None for another."""
    whole = values[name]

    def samples(value: Tensor) -> list[Tensor]:
        asked = run({**values, name: value.reshape(whole.shape).to(whole)}, variables).asked
        return [each.sample.detach().flatten() for each in asked]

    # Other numbers tell whether the sample is those elements, and no function of them.
    probe = torch.randn(whole.numel(), generator=torch.Generator().manual_seed(0)).to(whole.dtype)
    probed = [sample.to(whole.dtype).cpu() for sample in samples(probe)]
    read = read_places(lambda digits: torch.cat([each.float() for each in samples(digits)]), whole.numel())
    places = list[Tensor | None]()
    for sample, place in zip(probed, read.split([*map(len, probed)]), strict=True):
        inside = bool(((place >= 0) & (place < len(probe))).all()) and len(place.unique()) == len(place)
        places.append(place if inside and torch.equal(sample, probe[place]) else None)
    return places


def _same(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and torch.equal(one, other)
