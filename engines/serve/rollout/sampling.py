"""A batch of orders as samples, by `engines.rollout.generate`: there is no second sampler."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core import gaussian
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.transitions import Sampler, Transition
from fluvial.engines.rollout.generate import (
    Chunk,
    Requests,
    Sampling,
    SharedPrefix,
    StochasticSteps,
    deterministic_step,
    generate,
)
from fluvial.engines.rollout.streams import Stream
from fluvial.engines.serve.rollout.orders import Order, Recipe, words
from fluvial.engines.serve.rollout.policy import Policy
from fluvial.engines.wire.response import DitTrajectory
from fluvial.models import Cond, Schedule
from fluvial.models.guidance import Guided


class Made(NamedTuple):
    """A sample as it was ordered, on the host."""

    image: Tensor  # [C, H, W] or [C, F, H, W] in [0, 1]
    log_probs: Tensor | None  # [T] float32
    debug: dict[str, Tensor] | None
    conditioning: dict[str, Any] | None
    trajectory: DitTrajectory | None
    version: int
    seconds: float


class _Steps:
    """The samples and the predictions of every step of a batch."""

    def __init__(self) -> None:
        self.x: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, v: Tensor, step: int) -> None:
        self.x[step], self.v[step] = x, v


def made(policy: Policy, module: nn.Module, recipe: Recipe, orders: Sequence[Order], *, micro_batch: int) -> list[Made]:
    """Return the samples of at most `micro_batch` orders with one recipe.

    The batch is filled up with repeats of the first order, so that the network always computes as many rows.

    Args:
        policy: the model.
        module: its network.
        recipe: how the samples are made.
        orders: the orders.
        micro_batch: rows of a batch.
    """
    start, count = time.perf_counter(), len(orders)
    filled = [*orders, *[orders[0]] * (micro_batch - count)]
    schedule, steps = policy.schedule(recipe.steps, recipe.shape), _Steps()
    sampler = None if recipe.sampler is None else policy.sampler(recipe.sampler, recipe.eta, schedule)
    needed = any(order.boundaries or order.debug for order in orders)
    sampling = _sampling(recipe, filled, schedule, sampler, observe=steps if needed else None)
    keys = words([order.key for order in filled], policy.device)
    requests = Requests(
        [order.prompt for order in filled],
        [order.id for order in filled],
        keys if recipe.shared is None else recipe.shared[1],
        [order.initial_id for order in filled],
    )
    (chunk,) = generate(policy.model, module, requests, sampling, micro_batch=micro_batch)
    log_probs, images = _log_probs(chunk, recipe), chunk.images.float().cpu()
    debug: dict[str, Tensor] = {}
    if names := {name for order in orders for name in order.debug}:
        own = fold_in(keys, torch.tensor(requests.ids, device=policy.device))
        windows = [frozenset(order.window) for order in filled]
        deterministic = deterministic_step(policy.model.prediction)
        debug = _debug(names, steps, windows, own, schedule, sampler, deterministic)
    latents = _latents(steps, chunk, recipe)
    seconds = time.perf_counter() - start
    return [
        Made(
            images[row].clone(),
            log_probs[row].clone() if order.rollout else None,
            {name: debug[name][row].clone() for name in order.debug} if order.debug else None,
            _conditioning(chunk.cond, row) if order.conditioning else None,
            _trajectory(order, row, latents, schedule) if order.trajectory else None,
            policy.version,
            seconds,
        )
        for row, order in enumerate(orders)
    ]


def _sampling(
    recipe: Recipe, orders: Sequence[Order], schedule: Schedule, sampler: Sampler | None, *, observe: _Steps | None
) -> Sampling:
    """Return how a batch is made."""
    stochastic = None
    if sampler is not None:
        own = torch.tensor([order.window for order in orders])  # used where each sample has a window of its own
        stochastic = StochasticSteps(
            sampler, (lambda ids: own) if recipe.window is None else recipe.window, record=recipe.record, form=recipe.form,
            reduction=recipe.reduction,
        )  # fmt: skip
    reuse: Any = recipe.reuse
    return Sampling(
        recipe.shape, schedule, recipe.guidance, recipe.solver, recipe.eta if sampler is None else 0.0, stochastic,
        autocast=recipe.autocast, prefix=None if recipe.prefix is None else SharedPrefix(*recipe.prefix),
        text_tokens=recipe.text_tokens, after=recipe.after, reuse=reuse, observe=observe,
    )  # fmt: skip


def _log_probs(chunk: Chunk, recipe: Recipe) -> Tensor:
    """Return the log-probability of every step, `[B, T]` float32, 0 at steps without noise."""
    recorded = chunk.trajectory.log_prob.float().cpu()
    found = torch.zeros(len(recorded), recipe.steps)
    steps = chunk.trajectory.steps.cpu()
    return found.scatter_(1, steps.expand(len(recorded), -1), recorded)


def _latents(steps: _Steps, chunk: Chunk, recipe: Recipe) -> dict[int, Tensor]:
    """Return the samples at the boundaries of steps, as far as they are known."""
    found, trajectory = dict(steps.x), chunk.trajectory
    if recipe.window is not None:  # with `after` the step behind the window is not observed
        found.update({step + 1: trajectory.x_next[:, place] for place, step in enumerate(trajectory.steps.tolist())})
    found[recipe.steps] = trajectory.final
    return found


def _trajectory(order: Order, row: int, latents: Mapping[int, Tensor], schedule: Schedule) -> DitTrajectory:
    chosen = [latents[boundary][row] for boundary in order.boundaries]
    kept = torch.stack(chosen).cpu() if chosen else latents[max(latents)][row][None][:0].cpu()
    return DitTrajectory(kept, schedule.timesteps.float().cpu(), schedule.levels.clone(), order.boundaries)


def _debug(
    names: Collection[str], steps: _Steps, windows: Sequence[frozenset[int]], own: Key, schedule: Schedule,
    sampler: Sampler | None, deterministic: Sampler,
) -> dict[str, Tensor]:  # fmt: skip
    """Return what each step was computed from, `[B, T, ...]`; the noise is drawn again from its keys.

    Args:
        names: names of the tensors to return.
        steps: samples and predictions.
        windows: stochastic steps of each sample.
        own: key of each sample.
        schedule: levels.
        sampler, deterministic: samplers of the stochastic steps and of the others.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    noise_keys, levels = fold_in(own, Stream.STEPS), schedule.levels
    for step in range(len(levels) - 1):
        x, v = steps.x[step], steps.v[step]
        level, level_next = levels[step].to(x.device).expand(len(x)), levels[step + 1].to(x.device).expand(len(x))
        holds = torch.tensor([step in window for window in windows], device=x.device)
        transition = deterministic(level, level_next)
        if sampler is not None and holds.any():
            parts = zip(sampler(level, level_next), transition, strict=True)
            transition = Transition(*(torch.where(holds, ours, other) for ours, other in parts))
        if "rollout_model_outputs" in found:
            found["rollout_model_outputs"].append(v)
        if "rollout_prev_sample_means" in found:
            found["rollout_prev_sample_means"].append(gaussian.mean(transition, x, v))
        if "rollout_noise_std_devs" in found:
            found["rollout_noise_std_devs"].append(transition.std)
        if "rollout_variance_noises" in found:
            drawn = normal(fold_in(noise_keys, step), tuple(x.shape)) if holds.any() else torch.zeros_like(x)
            found["rollout_variance_noises"].append(drawn * holds.view(-1, *[1] * (x.ndim - 1)))
    return {name: torch.stack(tensors, dim=1).cpu() for name, tensors in found.items()}


def _conditioning(cond: Cond, row: int) -> dict[str, Any]:
    """Return the conditioning of a sample as maps, under the names of the model's own fields."""
    guided = isinstance(cond, Guided)
    return {
        "image_kwargs": {},
        "pos_cond_kwargs": _named(cond.cond if guided else cond, row),
        "neg_cond_kwargs": _named(cond.uncond, row) if guided else None,
        "guidance": float(cond.scale[row]) if guided else None,
    }


def _named(cond: Cond, row: int) -> dict[str, Any]:
    fields = cond._asdict() if hasattr(cond, "_asdict") else cond if isinstance(cond, Mapping) else {"cond": cond}
    return {str(name): _row(value, row) for name, value in fields.items()}


def _row(value: Any, row: int) -> Any:
    """Return a sample's part of a tree of tensors, with its batch dimension."""
    if isinstance(value, Tensor):
        return value[row : row + 1].cpu()
    if isinstance(value, Mapping) or hasattr(value, "_asdict"):
        return _named(value, row)
    if isinstance(value, list | tuple):
        return [_row(item, row) for item in value]
    return value
