"""Requests as orders of single samples, and what samples must have in common to be made in one batch."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fluvial.core.gaussian import Form, Reduction
from fluvial.core.random import Key, key
from fluvial.engines.rollout.after import AfterWindow
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.rollout.solvers import Solver
from fluvial.engines.serve.asgi import RequestError
from fluvial.engines.serve.rollout.policy import Policy
from fluvial.engines.wire.request import RequestLimits, RolloutRequest, check_steps, guidance_of
from fluvial.models.padding import trims_padding


@dataclass(frozen=True)
class ServeLimits:
    """Largest requests and responses.

    Args:
        request: limits of a request.
        body: bytes of a request's body.
        response: bytes of the tensors of a response, counted before they are made.
    """

    request: RequestLimits
    body: int = 16_000_000
    response: int = 2_000_000_000


@dataclass(frozen=True)
class Recipe:
    """How the samples of one batch are made; samples with different recipes are made in different batches.

    Args:
        shape: shape of a sample.
        steps: steps of the schedule.
        sampler: name of the sampler of the stochastic steps; None takes none.
        eta: scale of the noise.
        window: the stochastic steps; None where each sample has a window of its own.
        window_size: number of steps of such a window.
        record: whether log-probabilities are recorded.
        form, reduction: of the log-probabilities.
        guidance: guidance of every step.
        solver: solver of the ODE, where no step is stochastic.
        text_tokens: length that prompts are padded to; None is the model's own.
        autocast: let the model compute in bfloat16 under torch's autocast.
        reuse: layers that see the prompt alone whose results are computed once.
        after: how the deterministic steps after the window are taken.
        prefix: number of steps that are computed once per group, and samples per group.
        shared: prompt and key of the samples that share these steps.
    """

    shape: tuple[int, ...]
    steps: int
    sampler: str | None
    eta: float
    window: tuple[int, ...] | None
    window_size: int
    record: bool
    form: Form
    reduction: Reduction
    guidance: Guidance
    solver: Solver
    text_tokens: int | None
    autocast: bool
    reuse: str
    after: AfterWindow
    prefix: tuple[int, int] | None
    shared: tuple[str, Key] | None


class Order(NamedTuple):
    """One sample to make."""

    prompt: str
    key: Key
    id: int
    initial_id: int
    window: tuple[int, ...]  # its stochastic steps
    boundaries: tuple[int, ...]  # boundaries of steps whose latents are returned
    rollout: bool  # whether log-probabilities are returned
    debug: tuple[str, ...]  # debug tensors that are returned
    conditioning: bool  # whether the conditioning is returned
    trajectory: bool  # whether latents and schedule are returned
    version: int | None  # version of the weights that must make it


class Ordered(NamedTuple):
    """A request as orders."""

    seed: int | None  # None where the noise comes from a key
    recipe: Recipe
    orders: list[Order]


def orders_of(request: RolloutRequest, policy: Policy, limits: ServeLimits) -> Ordered:
    """Return the orders of a request.

    Raises:
        RequestError: the model cannot make these samples, or they are too large.
        WireError: the request names steps that its schedule does not have.
    """
    own, guidance = request.fluvial, guidance_of(request, policy.guidance)
    _check_texts(request, guidance, policy)
    policy.check_guidance(guidance)
    shape = policy.latent_shape(request.height, request.width, request.num_frames)
    steps = request.num_inference_steps or policy.steps
    check_steps(request, steps)
    try:
        schedule = policy.schedule(steps, shape)
    except ValueError as error:
        raise RequestError(400, str(error)) from None
    recipe = Recipe(
        shape=shape, steps=steps, sampler=None, eta=0.0, window=(), window_size=0, record=False, form=request.form,
        reduction=own.reduction, guidance=guidance, solver=own.solver, text_tokens=own.text_tokens, autocast=own.autocast,
        reuse=own.reuse, after=own.after, prefix=own.prefix, shared=None,
    )  # fmt: skip
    first = 0 if own.prefix is None else own.prefix[0]
    if request.rollout and request.sampler != "ode":
        sampler = policy.sampler(request.sampler, request.rollout_noise_level, schedule)
        positive = (sampler(schedule.levels[:-1], schedule.levels[1:]).std > 0).expand(steps).tolist()
        noisy = {step for step in range(steps) if request.form == "unscaled" or positive[step]}
        windows = _windows(request, steps, first)
        size = len(windows[0])
        if own.windows is not None and (size == 0 or not noisy.issuperset(step for row in windows for step in row)):
            raise RequestError(
                400, "windows are empty, or hold a step that takes no noise: expected stochastic steps for each sample"
            )
        if size:
            recipe = replace(
                recipe, sampler=request.sampler, eta=request.rollout_noise_level,
                window=windows[0] if own.windows is None else None, window_size=size,
                record=not noisy.isdisjoint(windows[0]),
            )  # fmt: skip
    else:
        windows = [()] * request.outputs
        if own.solver == "sa_solver":
            recipe = replace(recipe, eta=request.rollout_noise_level)
    _check_parts(request, recipe, windows, policy)
    keys, ids, seed = _noise(request)
    if own.prefix is not None:
        recipe = replace(recipe, shared=(request.prompt, keys[0]))
    initial = ids if own.initial_ids is None else own.initial_ids
    traced = request.rollout and request.rollout_return_dit_trajectory
    orders = [
        Order(
            prompt=request.prompt, key=keys[row], id=ids[row], initial_id=initial[row], window=windows[row],
            boundaries=_boundaries(request, recipe, windows[row]) if traced else (), rollout=request.rollout,
            debug=own.debug if request.rollout and request.rollout_debug_mode else (),
            conditioning=request.rollout and request.rollout_return_denoising_env, trajectory=traced, version=own.version,
        )
        for row in range(request.outputs)
    ]  # fmt: skip
    _check_size(orders, recipe, limits)
    return Ordered(seed, recipe, orders)


def _check_texts(request: RolloutRequest, guidance: Guidance, policy: Policy) -> None:
    """Raise RequestError for prompts that the model cannot encode, and for what it has no input for."""
    named = {"prompt": request.prompt}
    if guidance.negative and guidance.is_guided(policy.model):
        named["negative_prompt"] = guidance.negative
    for field, text in named.items():
        try:
            policy.model.check_prompt(text)
        except ValueError as error:
            raise RequestError(400, f"{field}: {error}") from None
    if request.image_path:
        raise RequestError(400, "image_path is set, and this server makes samples from prompts alone: leave it out")
    tokens, own = request.fluvial.text_tokens, getattr(policy.model, "text_tokens", 0)
    if tokens is not None and (not trims_padding(policy.model) or tokens > own):
        raise RequestError(
            400, f"text_tokens is {tokens}, expected at most {own}, or null for a model that keeps its padding"
        )


def _windows(request: RolloutRequest, steps: int, first: int) -> list[tuple[int, ...]]:
    """Return the stochastic steps of each sample."""
    if request.fluvial.windows is not None:
        return list(request.fluvial.windows)
    shared = request.rollout_sde_step_indices
    return [tuple(range(first, steps)) if shared is None else shared] * request.outputs


def _check_parts(request: RolloutRequest, recipe: Recipe, windows: Sequence[tuple[int, ...]], policy: Policy) -> None:
    """Raise RequestError for steps that do not fit together."""
    own, taken = request.fluvial, [step for row in windows for step in row]
    if own.prefix is not None and (not taken or min(taken) < own.prefix[0]):
        raise RequestError(400, f"prefix has {own.prefix[0]} steps, expected stochastic steps after it, and none within")
    if own.after != AfterWindow() and (recipe.window is None or not taken or policy.model.prediction != "velocity"):
        raise RequestError(400, "after is set, expected one window for all samples, and a model that predicts a velocity")
    if request.rollout and request.rollout_debug_mode and own.debug and len(_observed(recipe)) < recipe.steps + 1:
        raise RequestError(400, "prefix or after is set, so that not all steps are taken here: set rollout_debug_mode false")


def _observed(recipe: Recipe) -> list[int]:
    """Return the boundaries of steps at which the latents of a batch are known."""
    first = 0 if recipe.prefix is None else recipe.prefix[0]
    if recipe.after == AfterWindow() or recipe.window is None:
        return list(range(first, recipe.steps + 1))
    return [*range(first, min(max(recipe.window) + 2, recipe.steps)), recipe.steps]


def _boundaries(request: RolloutRequest, recipe: Recipe, window: tuple[int, ...]) -> tuple[int, ...]:
    """Return the boundaries whose latents are returned.

    Raises:
        RequestError: one of them is not known.
    """
    if request.fluvial.recorded_only:
        return tuple(sorted({*window, *(step + 1 for step in window), recipe.steps}))
    asked = request.rollout_return_step_indices
    wanted = tuple(range(recipe.steps + 1)) if asked is None else asked
    if missing := sorted(set(wanted) - set(_observed(recipe))):
        raise RequestError(
            400, f"latents at boundary {missing[0]} are asked for, and prefix or after is set, so that they are not known: "
            "set rollout_return_step_indices, or recorded_only"
        )  # fmt: skip
    return wanted


def _noise(request: RolloutRequest) -> tuple[list[Key], tuple[int, ...], int | None]:
    """Return key and id of each sample's noise, and the seed; without a seed one is drawn."""
    own = request.fluvial
    if own.key is not None and own.ids is not None:
        return [Key(*own.key)] * request.outputs, own.ids, request.seed
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    return [key(seed + row) for row in range(request.outputs)], (0,) * request.outputs, seed


def _check_size(orders: Sequence[Order], recipe: Recipe, limits: ServeLimits) -> None:
    """Raise RequestError if the tensors of the response, images aside, take too many bytes."""
    numbers = sum(len(order.boundaries) + len(order.debug) * recipe.steps for order in orders)
    size = 4 * math.prod(recipe.shape) * numbers
    if size > limits.response:
        raise RequestError(
            413, f"the response would have {size / 1e6:.0f} MB, expected at most {limits.response / 1e6:.0f}: ask for fewer "
            "samples, set rollout_return_step_indices, or rollout_debug_mode false"
        )  # fmt: skip


def words(keys: Sequence[Key], device: torch.device) -> Key:
    """Return keys as one key per sample."""
    low, high = zip(*keys, strict=True)
    return Key(torch.tensor(low, device=device), torch.tensor(high, device=device))
