"""Generation: numbered samples, in chunks, over ranks.

A sample's noise depends on its number alone, and every chunk has the same size, so that a sample's bits depend neither
on the number of ranks nor on which of them made it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core import transitions
from fluvial.core.checks import check_number
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import Record, Trajectory, rollout, unrecorded
from fluvial.core.transitions import Sampler, Transition
from fluvial.engines.fsdp.world import World
from fluvial.engines.rollout.solvers import Solver, solve
from fluvial.engines.rollout.streams import Stream
from fluvial.kernels import Implementation, step_log_prob
from fluvial.models import Cond, DiffusionModel, Prediction, Schedule, is_recorded
from fluvial.models.guidance import Guided, guided_velocity


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance of every step, arXiv 2207.12598.

    Args:
        scale: g in v_uncond + g (v - v_uncond); 1 is none, and computes no unconditional half.
        negative: the prompt that is guided away from; for most models the empty one.
        forwards: one forward pass of both halves, or two, which takes less memory.
        gradient: in training flows through both halves, or through the conditional one alone.
    """

    scale: float = 1.0
    negative: str = ""
    forwards: Literal["one", "two"] = "one"
    gradient: Literal["both", "conditional"] = "both"

    def __post_init__(self) -> None:
        check_number("guidance", "scale", self.scale, low=0)

    def encode(self, model: DiffusionModel, prompts: Sequence[str]) -> Cond:
        """Return the conditioning of a batch of prompts, with what it is guided away from if there is guidance.

        That of a recorded pipeline holds its guidance already.
        """
        cond = model.encode(prompts)
        if self.scale == 1 or is_recorded(model):
            return cond
        return Guided(cond, model.encode([self.negative] * len(prompts)), torch.full((len(prompts),), self.scale))


NO_GUIDANCE = Guidance()


class Slots(NamedTuple):
    """This rank's part of a batch of numbered samples: `ids` in whole chunks; a slot past the end repeats a sample."""

    ids: list[int]
    real: list[bool]


def slots(samples: int, *, micro_batch: int, world: World) -> Slots:
    """Return this rank's slots of a batch, as many on every rank; gathered by group they are 0, 1, ... and then repeats."""
    share = -(-samples // (micro_batch * world.data_size)) * micro_batch
    mine = range(world.data_rank * share, (world.data_rank + 1) * share)
    return Slots([slot % samples for slot in mine], [slot < samples for slot in mine])


class Chunk(NamedTuple):
    """A chunk of generated samples."""

    prompts: Sequence[str]
    cond: Cond
    trajectory: Trajectory
    images: Tensor  # [b, C, H, W] in [0, 1]


def on_device(schedule: Schedule, device: torch.device) -> Schedule:
    """Return a schedule whose timesteps are where the model is; its levels stay on the host."""
    return Schedule(schedule.levels.cpu(), schedule.timesteps.to(device))


def deterministic_step(prediction: Prediction) -> Sampler:
    """Return the sampler that takes no noise: Euler's of a velocity, DDIM's of epsilon."""
    return transitions.ode if prediction == "velocity" else partial(transitions.ddim, eta=0.0)


def generate(
    model: DiffusionModel,
    module: nn.Module,
    prompts: Sequence[str],
    ids: Sequence[int],
    *,
    shape: tuple[int, ...],
    initial: Sequence[int] | None = None,
    schedule: Schedule,
    key: Key,
    micro_batch: int,
    transition: Sampler | None = None,
    window: Collection[int] = (),
    record: bool = True,
    solver: Solver = "euler",
    form: Form = "density",
    reduction: Reduction = "mean",
    keep_velocity: bool = False,
    implementation: Implementation = "auto",
    guidance: Guidance = NO_GUIDANCE,
    autocast: bool = False,
) -> Iterator[Chunk]:
    """Yield chunks of samples, made without gradient; sample number `ids[i]` is drawn for `prompts[i]`.

    Args:
        model, module: the adapter, and the network to sample from.
        prompts, ids: of this rank, in whole chunks.
        shape: of one sample.
        initial: the numbers that the initial noise is drawn by, where they are not the samples' own: samples that share one
            begin alike.
        schedule: the schedule, its timesteps on the device.
        key: one key, into which a sample's number is folded.
        micro_batch: samples a chunk.
        transition, window: the steps in the window are taken with the transition (None: the deterministic step) and
            recorded; the others are deterministic. Without a window nothing is recorded.
        record: if false, no step is recorded in any case.
        solver: of the deterministic steps where nothing is recorded.
        form, reduction: of the recorded log-probs.
        keep_velocity: also record the model's output.
        implementation: of the log-prob, see `fluvial.kernels.dispatch`.
        guidance: of every step.
        autocast: let the model compute in bfloat16 where torch's autocast does.
    """
    device = schedule.timesteps.device
    deterministic = deterministic_step(model.prediction)

    def log_prob(transition: Transition, x: Tensor, v: Tensor, x_next: Tensor, **options: Any) -> Tensor:
        return step_log_prob(transition, x, v, x_next, implementation=implementation, **options)[0]

    for start in range(0, len(ids), micro_batch):
        chunk = prompts[start : start + micro_batch]
        rows = slice(start, start + micro_batch)
        own, first = (fold_in(key, torch.tensor(list(numbers[rows]), device=device)) for numbers in (ids, initial or ids))
        cond = optree.tree_map(lambda tensor: tensor.to(device), guidance.encode(model, chunk))

        def velocity(x: Tensor, sigma: Tensor, step: int, cond: Cond = cond) -> Tensor:
            timestep = schedule.timesteps[step].expand(len(x))
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                v = guided_velocity(model, module, x, sigma, cond, timestep=timestep, forwards=guidance.forwards)
            return v.float() if autocast else v

        with torch.no_grad():
            noise = normal(fold_in(first, Stream.INITIAL), (len(chunk), *shape))
            if solver != "euler":
                final = solve(solver, velocity, noise, schedule, prediction=model.prediction)
                yield Chunk(chunk, cond, unrecorded(final), model.decode(final))
                continue
            trajectory = rollout(
                velocity,
                noise,
                schedule.levels,
                transition=transition or deterministic,
                deterministic=deterministic,
                key=fold_in(own, Stream.STEPS),
                window=window,
                record=Record(
                    steps=None if window and record else (),
                    form=form,
                    reduction=reduction,
                    log_prob=log_prob,
                    velocity=keep_velocity,
                ),
            )
            images = model.decode(trajectory.final)
        yield Chunk(chunk, cond, trajectory, images)
