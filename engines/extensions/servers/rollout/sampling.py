"""Sampling of a batch of orders, by `engines.sampling.generate`, as in training."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.checks import first_block, per_sample
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import Step
from fluvial.core.table import StepPlan, mask, plan
from fluvial.core.transitions import Sampler
from fluvial.engines.errors import RunError
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.batching import Batcher
from fluvial.engines.extensions.servers.rollout.orders import CLASSES, BatchSpec, SampleOrder, stack_keys
from fluvial.engines.extensions.servers.rollout.policy import ServedPolicy
from fluvial.engines.extensions.servers.rollout.ranks import on_all_ranks
from fluvial.engines.extensions.wire.request import RolloutRequest
from fluvial.engines.extensions.wire.response import DitTrajectory, RolloutSample
from fluvial.engines.sampling.generate import Chunk, Requests, Sampling, SharedPrefix, StochasticSteps, generate
from fluvial.engines.sampling.solvers import deterministic_step
from fluvial.engines.scoring.scores import one_line
from fluvial.engines.streams import Stream
from fluvial.models import Cond, DiffusionModel, Schedule
from fluvial.models.guidance import Guided
from fluvial.models.pipelines.layouts import PLAIN, embed_guidance, find_layout

NOT_LAID_OUT = "rollout_noise_std_devs"  # debug tensor with one number per step


class ReplyForm:
    """Form of the reply to a request: fluvial's with `extra_sampling_params["fluvial"]`, else sglang's.

                   fluvial                               sglang
    latents        [K, *event]                           in its pipeline's layout, e.g. tokens [K, H W / 4, 4 C]
    timesteps      of the schedule, [T]                  of the returned boundaries, [K], 0 at the last one
    debug tensors  [T, *event]                           in the layout of the latents; standard deviations are [T, 1]
    image          [C, H, W], or [C, F, H, W]            [C, 1, H, W] for pipelines with a video VAE
    conditioning   fields of the model, [1, ...]         arguments of sglang's network, without the batch dimension
    """

    def __init__(self, request: RolloutRequest, model: DiffusionModel, event: tuple[int, ...]) -> None:
        self.sglang, self.event, self.video_dtype = request.wants_sglang_form, event, request.rollout_video_dtype
        self.layout = find_layout(model) if self.sglang else PLAIN

    def format_image(self, image: Tensor) -> Tensor:
        """Format an image or a video, which is quantised if requested."""
        if image.ndim == 4 and self.video_dtype == "uint8":
            return (image * 255).round().to(torch.uint8)
        return image.unsqueeze(1) if image.ndim == 3 and self.layout.framed else image.clone()

    def format_trajectory(self, latents: Tensor, boundaries: Sequence[int], schedule: Schedule) -> DitTrajectory:
        """Format latents `[K, *event]` at K step boundaries as a trajectory."""
        timesteps = schedule.timesteps.float().cpu()
        if self.sglang:
            timesteps = torch.cat([timesteps, timesteps.new_zeros(1)])[list(boundaries)]
        levels = first_block(schedule.levels).clone()
        return DitTrajectory(self.layout.from_event(latents), timesteps, levels, tuple(boundaries))

    def format_debug(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Format debug tensors `[T, ...]` by name."""
        convert = self.layout.from_event
        return {name: (tensor if name == NOT_LAID_OUT else convert(tensor)).clone() for name, tensor in tensors.items()}

    def format_conditioning(self, cond: Cond, row: int) -> dict[str, Any]:
        """Format the conditioning of one sample of a batch."""
        index = slice(row, row + 1) if not self.sglang else row
        on_host = optree.tree_map(lambda tensor: tensor[index].cpu(), cond)
        positive, negative = (on_host.cond, on_host.uncond) if isinstance(on_host, Guided) else (on_host, None)
        guidance: Any = embed_guidance(positive)
        if not self.sglang:
            guidance = float(on_host.scale) if isinstance(on_host, Guided) else None
        return {
            "image_kwargs": None if self.sglang else {},
            "pos_cond_kwargs": self._to_arguments(positive),
            "neg_cond_kwargs": None if negative is None else self._to_arguments(negative),
            "guidance": guidance,
        }

    def _to_arguments(self, cond: Cond) -> Any:
        """Convert the conditioning of one sample to maps."""
        if self.sglang:
            return _to_maps(self.layout.arguments(cond, self.event))
        return _to_maps(cond if isinstance(cond, Mapping) or hasattr(cond, "_asdict") else {"cond": cond})


def _to_maps(value: Any) -> Any:
    """Convert a value to a tree of maps and lists; fields of a named tuple that are None are left out."""
    if hasattr(value, "_asdict"):
        value = {name: each for name, each in value._asdict().items() if each is not None}
    if isinstance(value, Mapping):
        return {str(name): _to_maps(each) for name, each in value.items()}
    return [_to_maps(each) for each in value] if isinstance(value, list | tuple) else value


class _StepObserver:
    """Observer that stores the samples and predictions of every step of a batch."""

    def __init__(self) -> None:
        self.x: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    def __call__(self, step: Step) -> None:
        self.x[step.t], self.v[step.t] = step.x, step.v


def build_batcher(
    policy: ServedPolicy, *, micro_batch: int, linger: float, most_waiting: int
) -> Batcher[SampleOrder, RolloutSample]:
    """Build the batcher of a policy's samples; see `generate_samples` and `Batcher`."""
    make = partial(generate_samples, policy, micro_batch=micro_batch)
    return Batcher(make, alike=lambda order: order.spec, size=micro_batch, linger=linger, most_waiting=most_waiting)


def generate_samples(policy: ServedPolicy, orders: Sequence[SampleOrder], *, micro_batch: int) -> list[RolloutSample]:
    """Generate the samples of at most `micro_batch` orders with one spec.

    The batch is padded with repeats of the first order. So the network always computes the same number of rows, and the bits
    of a sample do not depend on other requests.

    Raises:
        RequestError: the orders are wrong, or need other weights.
        RunError: sampling failed.
    """
    try:
        with policy.hold_weights():
            for order in orders:
                policy.check_version(order.request.fluvial.version)
            return _generate(policy, orders, micro_batch)
    except RequestError:
        raise
    except Exception as error:
        problem = one_line(error) or type(error).__name__
        if isinstance(error, ValueError):
            raise RequestError(problem) from None
        raise RunError(f"sampling failed: {problem}") from None


@on_all_ranks(*CLASSES)
def _generate(policy: ServedPolicy, orders: Sequence[SampleOrder], micro_batch: int) -> list[RolloutSample]:
    start, spec, padded = time.perf_counter(), orders[0].spec, [*orders, *[orders[0]] * (micro_batch - len(orders))]
    schedule, steps = policy.schedule(spec.steps, spec.shape), _StepObserver()
    sampler = None if spec.sampler is None else policy.bind_sampler(spec.sampler, spec.eta, schedule)
    names = {name for order in orders for name in order.request.debug}
    observes = names or any(order.boundaries for order in orders)
    window = torch.tensor([order.window for order in padded]) if spec.window is None else spec.window
    sampling = _build_sampling(spec, window, schedule, sampler, observe=steps if observes else None)
    keys = stack_keys([order.key for order in padded], policy.device)
    requests = Requests(
        [order.prompt for order in padded],
        [order.id for order in padded],
        keys if spec.shared is None else spec.shared[1],
        [order.initial_id for order in padded],
    )
    (chunk,) = generate(policy.model, policy.weights.module, requests, sampling, micro_batch=len(padded))
    log_probs, images = _scatter_log_probs(chunk, spec), chunk.images.float().cpu()
    debug: dict[str, Tensor] = {}
    if names:
        deterministic = deterministic_step(policy.model.prediction)
        table = plan(
            schedule.levels,
            deterministic if sampler is None else sampler,
            batch=len(padded),
            window=window,
            deterministic=deterministic,
            record=(),
            device=policy.device,
        )
        debug = _compute_debug(names, steps, fold_in(keys, torch.tensor(requests.ids, device=policy.device)), table)
    latents = _collect_latents(steps, chunk, spec)
    seconds = time.perf_counter() - start
    samples = []
    for row, order in enumerate(orders):
        request = order.request
        form = ReplyForm(request, policy.model, spec.shape)
        has_env = request.rollout and request.rollout_return_denoising_env
        trajectory = None
        if request.rollout and request.rollout_return_dit_trajectory:
            trajectory = form.format_trajectory(_choose_latents(order, row, latents), order.boundaries, schedule)
        samples.append(
            RolloutSample(
                request_id="",
                prompt=request.prompt,
                seed=request.seed,
                generated_output=form.format_image(images[row]),
                rollout_log_probs=log_probs[row].clone() if request.rollout else None,
                rollout_debug_tensors=form.format_debug({name: debug[name][row] for name in request.debug}) or None,
                denoising_env=form.format_conditioning(chunk.cond, row) if has_env else None,
                dit_trajectory=trajectory,
                inference_time_s=seconds,
                weight_version=policy.version,
            )
        )
    return samples


def _build_sampling(
    spec: BatchSpec,
    window: tuple[int, ...] | Tensor,
    schedule: Schedule,
    sampler: Sampler | None,
    *,
    observe: _StepObserver | None,
) -> Sampling:
    options, stochastic = spec.options, None
    if sampler is not None:
        windows = (lambda ids: window) if isinstance(window, Tensor) else window
        stochastic = StochasticSteps(sampler, windows, record=spec.record, form=spec.form, reduction=options.reduction)
    return Sampling(
        spec.shape,
        schedule,
        spec.guidance,
        options.solver,
        spec.eta if sampler is None else 0.0,
        stochastic,
        autocast=options.autocast,
        prefix=None if options.prefix is None else SharedPrefix(*options.prefix),
        text_tokens=options.text_tokens,
        after=options.after,
        reuse=options.reuse,
        observe=observe,
    )


def _scatter_log_probs(chunk: Chunk, spec: BatchSpec) -> Tensor:
    """Return the log-probability of every step, `[B, T]` float32, 0 at steps without noise."""
    recorded = chunk.trajectory.log_prob.float().cpu()
    table = torch.zeros(len(recorded), spec.steps)
    return table.scatter_(1, chunk.trajectory.steps.cpu(), recorded)


def _collect_latents(steps: _StepObserver, chunk: Chunk, spec: BatchSpec) -> dict[int, Tensor]:
    """Return the known latents by step boundary."""
    latents, trajectory = dict(steps.x), chunk.trajectory
    if spec.window is not None:  # with `after`, the step after the window is not observed
        latents.update({step + 1: trajectory.x_next[:, index] for index, step in enumerate(trajectory.steps[0].tolist())})
    latents[spec.steps] = trajectory.final
    return latents


def _choose_latents(order: SampleOrder, row: int, latents: Mapping[int, Tensor]) -> Tensor:
    """Return the latents of a sample at its requested boundaries, `[K, *event]`."""
    chosen = [latents[boundary][row] for boundary in order.boundaries]
    return torch.stack(chosen).cpu() if chosen else latents[max(latents)][row][None][:0].cpu()


def _compute_debug(names: Collection[str], steps: _StepObserver, keys: Key, table: StepPlan) -> dict[str, Tensor]:
    """Compute debug tensors, `[B, T, ...]`; the noise is drawn again from the key of each sample."""
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
