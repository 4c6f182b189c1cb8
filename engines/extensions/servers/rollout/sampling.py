"""A batch of orders as samples, by `engines.sampling.generate`: there is no second sampler."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.checks import first_row, per_sample
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import Step
from fluvial.core.table import StepPlan, mask, plan
from fluvial.core.transitions import Sampler
from fluvial.engines.errors import RunError
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.batching import Batcher
from fluvial.engines.extensions.servers.rollout.orders import CLASSES, Recipe, SampleOrder, words
from fluvial.engines.extensions.servers.rollout.policy import ServedPolicy
from fluvial.engines.extensions.servers.rollout.ranks import together
from fluvial.engines.extensions.wire.request import RolloutRequest
from fluvial.engines.extensions.wire.response import DitTrajectory, RolloutSample
from fluvial.engines.sampling.generate import Chunk, Requests, Sampling, SharedPrefix, StochasticSteps, generate
from fluvial.engines.sampling.solvers import deterministic_step
from fluvial.engines.scoring.scores import one_line
from fluvial.engines.streams import Stream
from fluvial.models import Cond, DiffusionModel, Schedule
from fluvial.models.guidance import Guided
from fluvial.models.pipelines.layouts import PLAIN, embed_guidance, find_layout

NOT_LAID_OUT = "rollout_noise_std_devs"  # debug tensor of a number per step


class ReplyForm:
    """The form of the replies to a request: sglang's where it has no `extra_sampling_params["fluvial"]`, or fluvial's own.

                   fluvial                               sglang
    latents        [K, *event]                           as its pipeline denoises them, e.g. tokens [K, H W / 4, 4 C]
    timesteps      of the schedule, [T]                  of the returned boundaries, [K], 0 at the last one
    debug tensors  [T, *event]                           in the layout of the latents; standard deviations are [T, 1]
    image          [C, H, W], or [C, F, H, W]            [C, 1, H, W] of pipelines whose VAE is one of videos
    conditioning   fields of the model's own, [1, ...]   arguments of sglang's network, without the batch dimension
    """

    def __init__(self, request: RolloutRequest, model: DiffusionModel, event: tuple[int, ...]) -> None:
        self.sglang, self.event, self.video_dtype = request.wants_sglang_form, event, request.rollout_video_dtype
        self.layout = find_layout(model) if self.sglang else PLAIN

    def image(self, image: Tensor) -> Tensor:
        """Return an image or a video; videos are quantised where that is asked for."""
        if image.ndim == 4 and self.video_dtype == "uint8":
            return (image * 255).round().to(torch.uint8)
        return image.unsqueeze(1) if image.ndim == 3 and self.layout.framed else image.clone()

    def trajectory(self, latents: Tensor, boundaries: Sequence[int], schedule: Schedule) -> DitTrajectory:
        """Return latents `[K, *event]` at K boundaries of steps as a trajectory."""
        timesteps = schedule.timesteps.float().cpu()
        if self.sglang:
            timesteps = torch.cat([timesteps, timesteps.new_zeros(1)])[list(boundaries)]
        levels = first_row(schedule.levels).clone()
        return DitTrajectory(self.layout.from_event(latents), timesteps, levels, tuple(boundaries))

    def debug(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return debug tensors `[T, ...]` by name."""
        lay = self.layout.from_event
        return {name: tensor.clone() if name == NOT_LAID_OUT else lay(tensor).clone() for name, tensor in tensors.items()}

    def conditioning(self, cond: Cond, row: int) -> dict[str, Any]:
        """Return the conditioning of one sample of a batch."""
        taken = slice(row, row + 1) if not self.sglang else row
        on_host = optree.tree_map(lambda tensor: tensor[taken].cpu(), cond)
        positive, negative = (on_host.cond, on_host.uncond) if isinstance(on_host, Guided) else (on_host, None)
        guidance: Any = embed_guidance(positive)
        if not self.sglang:
            guidance = float(on_host.scale) if isinstance(on_host, Guided) else None
        return {
            "image_kwargs": None if self.sglang else {},
            "pos_cond_kwargs": self._arguments(positive),
            "neg_cond_kwargs": None if negative is None else self._arguments(negative),
            "guidance": guidance,
        }

    def _arguments(self, cond: Cond) -> Any:
        """Return the conditioning of one sample as maps."""
        return _maps(self.layout.arguments(cond, self.event) if self.sglang else _fields(cond))


def _fields(cond: Cond) -> Any:
    """Return the fields of a conditioning, or itself as the only one."""
    return cond if isinstance(cond, Mapping) or hasattr(cond, "_asdict") else {"cond": cond}


def _maps(value: Any) -> Any:
    """Return a tree of maps and lists; fields of a named tuple that are None are left out."""
    if hasattr(value, "_asdict"):
        value = {name: each for name, each in value._asdict().items() if each is not None}
    if isinstance(value, Mapping):
        return {str(name): _maps(each) for name, each in value.items()}
    return [_maps(each) for each in value] if isinstance(value, list | tuple) else value


class _Steps:
    """The samples and the predictions of every step of a batch."""

    def __init__(self) -> None:
        self.x: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    def __call__(self, step: Step) -> None:
        self.x[step.t], self.v[step.t] = step.x, step.v


def batcher(
    policy: ServedPolicy, *, micro_batch: int, linger: float, most_waiting: int
) -> Batcher[SampleOrder, RolloutSample]:
    """Return what makes the samples of a policy; see `generate_samples` and `Batcher`."""
    make = partial(generate_samples, policy, micro_batch=micro_batch)
    return Batcher(make, alike=lambda order: order.recipe, size=micro_batch, linger=linger, most_waiting=most_waiting)


def generate_samples(policy: ServedPolicy, orders: Sequence[SampleOrder], *, micro_batch: int) -> list[RolloutSample]:
    """Return the samples of at most `micro_batch` orders with one recipe.

    The batch is filled up with repeats of the first order. So the network computes the same number of rows whatever there is
    to make, and the bits of a sample do not depend on what else is asked for.

    Args:
        micro_batch: rows of a batch.

    Raises:
        RequestError: the orders are wrong, or of other weights.
        RunError: the samples cannot be made.
    """
    try:
        with policy.sampling():
            for order in orders:
                policy.check_version(order.request.fluvial.version)
            return _generate(policy, orders, micro_batch)
    except RequestError:
        raise
    except Exception as error:
        said = one_line(error) or type(error).__name__
        if isinstance(error, ValueError):
            raise RequestError(said) from None
        raise RunError(f"the samples cannot be made: {said}") from None


@together(*CLASSES)
def _generate(policy: ServedPolicy, orders: Sequence[SampleOrder], micro_batch: int) -> list[RolloutSample]:
    start, recipe, filled = time.perf_counter(), orders[0].recipe, [*orders, *[orders[0]] * (micro_batch - len(orders))]
    schedule, steps = policy.schedule(recipe.steps, recipe.shape), _Steps()
    sampler = None if recipe.sampler is None else policy.sampler(recipe.sampler, recipe.eta, schedule)
    names = {name for order in orders for name in order.request.debug}
    needed = names or any(order.boundaries for order in orders)
    shared_window = recipe.window
    window: tuple[int, ...] | Tensor = (
        torch.tensor([order.window for order in filled]) if shared_window is None else shared_window
    )
    sampling = _sampling(recipe, window, schedule, sampler, observe=steps if needed else None)
    keys = words([order.key for order in filled], policy.device)
    requests = Requests(
        [order.prompt for order in filled],
        [order.id for order in filled],
        keys if recipe.shared is None else recipe.shared[1],
        [order.initial_id for order in filled],
    )
    (chunk,) = generate(policy.model, policy.weights.module, requests, sampling, micro_batch=len(filled))
    log_probs, images = _log_probs(chunk, recipe), chunk.images.float().cpu()
    debug: dict[str, Tensor] = {}
    if names:
        deterministic = deterministic_step(policy.model.prediction)
        table = plan(
            schedule.levels,
            deterministic if sampler is None else sampler,
            batch=len(filled),
            window=window,
            deterministic=deterministic,
            record=(),
            device=policy.device,
        )
        debug = _debug(names, steps, fold_in(keys, torch.tensor(requests.ids, device=policy.device)), table)
    latents = _latents(steps, chunk, recipe)
    seconds = time.perf_counter() - start
    samples = []
    for row, order in enumerate(orders):
        asked = order.request
        form = ReplyForm(asked, policy.model, recipe.shape)
        traced, env = asked.rollout_return_dit_trajectory, asked.rollout_return_denoising_env
        samples.append(
            RolloutSample(
                request_id="",
                prompt=asked.prompt,
                seed=asked.seed,
                generated_output=form.image(images[row]),
                rollout_log_probs=log_probs[row].clone() if asked.rollout else None,
                rollout_debug_tensors=form.debug({name: debug[name][row] for name in asked.debug}) or None,
                denoising_env=form.conditioning(chunk.cond, row) if asked.rollout and env else None,
                dit_trajectory=form.trajectory(_choose_latents(order, row, latents), order.boundaries, schedule)
                if asked.rollout and traced
                else None,
                inference_time_s=seconds,
                weight_version=policy.version,
            )
        )
    return samples


def _sampling(
    recipe: Recipe, window: tuple[int, ...] | Tensor, schedule: Schedule, sampler: Sampler | None, *, observe: _Steps | None
) -> Sampling:
    options, stochastic = recipe.options, None
    if sampler is not None:
        windows = (lambda ids: window) if isinstance(window, Tensor) else window
        stochastic = StochasticSteps(sampler, windows, record=recipe.record, form=recipe.form, reduction=options.reduction)
    return Sampling(
        recipe.shape,
        schedule,
        recipe.guidance,
        options.solver,
        recipe.eta if sampler is None else 0.0,
        stochastic,
        autocast=options.autocast,
        prefix=None if options.prefix is None else SharedPrefix(*options.prefix),
        text_tokens=options.text_tokens,
        after=options.after,
        reuse=options.reuse,
        observe=observe,
    )


def _log_probs(chunk: Chunk, recipe: Recipe) -> Tensor:
    """Return the log-probability of every step, `[B, T]` float32, 0 at steps without noise."""
    recorded = chunk.trajectory.log_prob.float().cpu()
    table = torch.zeros(len(recorded), recipe.steps)
    return table.scatter_(1, chunk.trajectory.steps.cpu(), recorded)


def _latents(steps: _Steps, chunk: Chunk, recipe: Recipe) -> dict[int, Tensor]:
    """Return the samples at the boundaries of steps, as far as they are known."""
    latents, trajectory = dict(steps.x), chunk.trajectory
    if recipe.window is not None:  # with `after` the step behind the window is not observed
        latents.update({step + 1: trajectory.x_next[:, place] for place, step in enumerate(trajectory.steps[0].tolist())})
    latents[recipe.steps] = trajectory.final
    return latents


def _choose_latents(order: SampleOrder, row: int, latents: Mapping[int, Tensor]) -> Tensor:
    """Return the latents of a sample at the boundaries that it is asked for, `[K, *event]`."""
    chosen = [latents[boundary][row] for boundary in order.boundaries]
    return torch.stack(chosen).cpu() if chosen else latents[max(latents)][row][None][:0].cpu()


def _debug(names: Collection[str], steps: _Steps, keys: Key, table: StepPlan) -> dict[str, Tensor]:
    """Return what each step was computed from, `[B, T, ...]`; the noise is drawn again from the key of each sample."""
    noise_keys, stochastic = fold_in(keys, Stream.STEPS), mask(table.stochastic, len(table.levels) - 1, torch.device("cpu"))

    def noise(step: int) -> Tensor:
        x, holds = steps.x[step], stochastic[step].to(steps.x[step].device)
        drawn = normal(fold_in(noise_keys, step), tuple(x.shape)) if holds.any() else torch.zeros_like(x)
        return drawn * per_sample(holds, x)

    tensors: dict[str, Callable[[int], Tensor]] = {
        "rollout_model_outputs": lambda step: steps.v[step],
        "rollout_prev_sample_means": lambda step: gaussian.mean(table.transition(step), steps.x[step], steps.v[step]),
        "rollout_noise_std_devs": lambda step: table.transition(step).std[:, None],
        "rollout_variance_noises": noise,
    }
    return {name: torch.stack([tensors[name](step) for step in table.steps], dim=1).cpu() for name in names}
