"""Reader of rollout servers' replies. A reply that does not fit its request raises a `WireError` of one line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import first_block
from fluvial.engines.errors import convert_errors
from fluvial.engines.extensions.remote.requests import OUTPUTS, RequestOrder, find_final_boundary
from fluvial.engines.extensions.wire.client import Reply
from fluvial.engines.extensions.wire.decode import WireError
from fluvial.engines.extensions.wire.response import MSGPACK, DitTrajectory, Kind, RolloutSample, read_response
from fluvial.engines.sampling.generate import Sampling
from fluvial.models import DiffusionModel
from fluvial.models.pipelines.layouts import find_layout

NEAR = 1e-5  # largest difference of noise levels
TIMESTEPS = 1000.0  # sglang's timesteps are sigmas times this
NEAR_TIMESTEP = 1e-3  # largest difference of timesteps


class ServedSample(NamedTuple):
    """Sample with S recorded steps."""

    x: Tensor  # [S, *event]
    x_next: Tensor
    log_prob: Tensor  # [S]
    velocity: Tensor | None
    final: Tensor  # [*event], or [0] if it is not needed
    image: Tensor  # [C, H, W] or [C, F, H, W] in [0, 1]
    version: int
    server: str  # address of the server


@dataclass(frozen=True)
class Expected:
    """Properties that replies must have.

    Args:
        kind: kind of the servers.
        model: adapter of the architecture, which knows the layout of latents and the size of images.
        version: version of the weights that must generate the samples.
        most_mb: largest reply, in megabytes.
    """

    kind: Kind
    model: DiffusionModel
    sampling: Sampling
    version: int
    most_mb: int

    @property
    def keeps_velocity(self) -> bool:
        """Whether the predictions of recorded steps are needed."""
        stochastic = self.sampling.stochastic
        return stochastic is not None and stochastic.record and stochastic.keep_velocity


def read_samples(reply: Reply, order: RequestOrder, expected: Expected, server: str = "") -> list[ServedSample]:
    """Return the samples of a reply, in the order of their ids.

    Args:
        server: address of the server that sent it.

    Raises:
        WireError: the reply breaks the schema, or does not fit the request.
    """
    media_type = reply.headers.get("content-type", MSGPACK)
    response = read_response(reply.body, most_bytes=expected.most_mb * 1_000_000, media_type=media_type)
    if len(response) != len(order.ids):
        raise WireError(f"{len(response)} samples came, expected {len(order.ids)}")
    samples = [_read_sample(sample, order, index, expected, server) for index, sample in enumerate(response)]
    if len({(sample.image.shape, sample.x.dtype) for sample in samples}) > 1:
        raise WireError("samples of one request have different shapes")
    return samples


def _read_sample(sample: RolloutSample, order: RequestOrder, index: int, expected: Expected, server: str) -> ServedSample:
    where, recorded = f"sample {index}", order.recorded[index]
    if sample.prompt != order.prompt:
        raise WireError(f"{where} has the prompt {sample.prompt[:60]!r}, expected {order.prompt[:60]!r}")
    version = sample.weight_version
    if version is None and expected.kind == "fluvial":
        raise WireError(f"{where} has no weight_version, expected {expected.version}")
    if version is not None and version != expected.version:
        raise WireError(f"{where} has weights of version {version}, expected {expected.version}")
    trajectory = sample.dit_trajectory
    if trajectory is None:
        raise WireError(f"{where} has no dit_trajectory")
    steps = len(expected.sampling.schedule.timesteps)
    last = find_final_boundary(expected.sampling)
    indices = _locate_latents(trajectory, order, last, steps, where)
    check_schedule(trajectory, [*indices], expected, where)
    needed = sorted({*recorded, *(step + 1 for step in recorded)} | last)
    if missing := [boundary for boundary in needed if boundary not in indices]:
        raise WireError(f"{where} has no latents at boundary {missing[0]} of its steps")
    latents = _check_finite(_to_event_layout(trajectory.latents.float(), expected, "latents", where), f"{where}'s latents")
    x, x_next = (latents[[indices[step + offset] for step in recorded]] for offset in (0, 1))
    log_prob, velocity = torch.zeros(0), None
    if recorded:
        log_prob = _select_steps(sample.rollout_log_probs, recorded, (steps,), "log-probabilities", where)
    if expected.keeps_velocity:
        outputs = (sample.rollout_debug_tensors or {}).get(OUTPUTS)
        outputs = outputs if outputs is None else _to_event_layout(outputs, expected, OUTPUTS, where)
        velocity = _select_steps(outputs, recorded, (steps, *expected.sampling.shape), OUTPUTS, where)
    return ServedSample(
        x,
        x_next,
        log_prob,
        velocity,
        latents[indices[steps]] if last else latents.new_zeros(0),
        _read_image(sample.generated_output, expected, where),
        expected.version if version is None else version,
        server,
    )


def check_schedule(trajectory: DitTrajectory, boundaries: Sequence[int], expected: Expected, where: str) -> None:
    """Raise WireError unless a sample has the noise levels and timesteps of the trainer's schedule.

    Args:
        boundaries: boundary of each latent. A server sends the timesteps of the schedule, `[T]` or `[T+1]`, or of these.
    """
    levels, ours = first_block(expected.sampling.schedule.levels), expected.sampling.schedule.timesteps.float().cpu()
    sigmas, timesteps = trajectory.sigmas.float(), trajectory.timesteps
    if len(sigmas) != len(levels):
        raise WireError(f"{where} has {len(sigmas)} sigmas, expected {len(levels)}")
    if (worst := _find_farthest(sigmas, levels.float(), NEAR)) is not None:
        raise WireError(
            f"{where} has sigma {float(sigmas[worst]):.6g} at step {worst}, and the trainer's schedule has "
            f"{float(levels[worst]):.6g}: serve with the trainer's scheduler and shift"
        )
    if timesteps is None:
        return
    sent = timesteps.float()
    full = TIMESTEPS * sigmas if expected.kind == "sglang" else torch.cat([ours, ours.new_zeros(1)])
    candidates = [each for each in (full[[*boundaries]], full, full[:-1]) if len(each) == len(sent)]
    if not candidates:
        raise WireError(f"{where} has {len(sent)} timesteps, expected {len(boundaries)}, one per boundary")
    if all(_find_farthest(sent, each, NEAR_TIMESTEP) is not None for each in candidates):
        farthest = int((sent - candidates[0]).abs().nan_to_num(math.inf).argmax())
        raise WireError(f"{where} has timestep {float(sent[farthest]):.6g}, expected {float(candidates[0][farthest]):.6g}")


def _find_farthest(values: Tensor, expected: Tensor, most: float) -> int | None:
    """Return the index of the value farthest from its expected one; None if none is farther than `most`."""
    far = (values - expected).abs().nan_to_num(math.inf)
    return None if bool((far <= most).all()) else int(far.argmax())


def _locate_latents(
    trajectory: DitTrajectory, order: RequestOrder, last: set[int], steps: int, where: str
) -> dict[int, int]:
    """Return the index of each boundary's latents."""
    count, indices = len(trajectory.latents), trajectory.latent_step_indices
    if indices is None:
        indices = tuple(range(steps + 1)) if count == steps + 1 else order.list_boundaries(last)
    if len(indices) != count:
        raise WireError(f"{where} has {count} latents, expected {steps + 1}, or {len(indices)} at the requested boundaries")
    return {boundary: index for index, boundary in enumerate(indices)}


def _select_steps(tensor: Tensor | None, recorded: tuple[int, ...], shape: tuple[int, ...], what: str, where: str) -> Tensor:
    """Select the recorded steps of a tensor `[T, ...]`, and check that it is finite."""
    if tensor is None or tuple(tensor.shape) != shape:
        shape_sent = "none" if tensor is None else list(tensor.shape)
        raise WireError(f"{where} has {what} of shape {shape_sent}, expected {list(shape)}")
    return _check_finite(tensor.float()[list(recorded)], f"{where}'s {what}")


def _to_event_layout(latents: Tensor, expected: Expected, what: str, where: str) -> Tensor:
    """Convert a server's latents, which may be in sglang's layout, to `[K, *event]`."""
    layout, event = find_layout(expected.model), expected.sampling.shape
    shape = tuple(latents.shape[1:])
    if shape not in (event, layout.get_shape(event)):
        raise WireError(f"{where} has {what} of shape {list(shape)}, expected {list(layout.get_shape(event))}")
    return latents if shape == event else layout.to_event(latents, event)


def _read_image(image: Tensor, expected: Expected, where: str) -> Tensor:
    """Convert an image to [0, 1], `[C, H, W]`, or `[C, F, H, W]` for a model of videos."""
    event, shape = expected.sampling.shape, list(image.shape)
    if image.ndim == 4 and shape[1] == 1 and len(event) < 4:
        image = image.squeeze(1)  # a video of one frame
    with convert_errors(WireError, ValueError, says=f"{where} has an image of shape {shape}"):
        frames = image.shape[1] if image.ndim == 4 else 1
        latents = tuple(expected.model.latent_shape(image.shape[-2], image.shape[-1], frames))
    if latents != event or image.ndim not in (3, 4) or image.shape[0] not in (1, 3):
        raise WireError(f"{where} has an image of shape {shape}, of latents {list(latents)}, expected {list(event)}")
    if image.dtype == torch.uint8:
        return image.float() / 255
    image = _check_finite(image.float(), f"{where}'s image")
    if image.numel() and not -0.05 <= float(image.min()) <= float(image.max()) <= 1.05:
        raise WireError(f"{where} has an image from {float(image.min()):.3g} to {float(image.max()):.3g}, expected [0, 1]")
    return image.clamp(0, 1)


def _check_finite(tensor: Tensor, what: str) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise WireError(f"{what} are not finite")
    return tensor
