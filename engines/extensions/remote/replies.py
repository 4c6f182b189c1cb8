"""Replies of rollout servers as samples. What does not fit the request is a `WireError` of one line, and is never used."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import first_row
from fluvial.engines.errors import convert_errors
from fluvial.engines.extensions.remote.requests import OUTPUTS, RequestOrder, last_boundary
from fluvial.engines.extensions.wire.client import Reply
from fluvial.engines.extensions.wire.decode import WireError
from fluvial.engines.extensions.wire.response import MSGPACK, DitTrajectory, Kind, RolloutSample, read_response
from fluvial.engines.sampling.generate import Sampling
from fluvial.models import DiffusionModel
from fluvial.models.pipelines.layouts import find_layout

NEAR = 1e-5  # largest difference of noise levels
TIMESTEPS = 1000.0  # training timesteps: a timestep of the wire is its sigma times this
NEAR_TIMESTEP = 1e-3


class ServedSample(NamedTuple):
    """A sample, with S recorded steps."""

    x: Tensor  # [S, *event]
    x_next: Tensor
    log_prob: Tensor  # [S]
    velocity: Tensor | None
    final: Tensor  # [*event], or [0] where it is not needed
    image: Tensor  # [C, H, W] or [C, F, H, W] in [0, 1]
    version: int
    server: str  # its address


@dataclass(frozen=True)
class Expected:
    """Properties that replies must have.

    Args:
        kind: what the servers are.
        model: adapter of the architecture, which knows the layout of latents and the size of images.
        version: version of the weights that must make them.
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
        WireError: the reply breaks the schema, or holds something else than what was asked for.
    """
    media_type = reply.headers.get("content-type", MSGPACK)
    samples_read = read_response(reply.body, most_bytes=expected.most_mb * 1_000_000, media_type=media_type)
    if len(samples_read) != len(order.ids):
        raise WireError(f"{len(samples_read)} samples came, expected {len(order.ids)}")
    samples = [_sample(sample, order, row, expected, server) for row, sample in enumerate(samples_read)]
    if len({(sample.image.shape, sample.x.dtype) for sample in samples}) > 1:
        raise WireError("samples of one request have different shapes")
    return samples


def _sample(sample: RolloutSample, order: RequestOrder, row: int, expected: Expected, server: str) -> ServedSample:
    where, recorded = f"sample {row}", order.recorded[row]
    if sample.prompt != order.prompt:
        raise WireError(f"{where} is of the prompt {sample.prompt[:60]!r}, expected {order.prompt[:60]!r}")
    version = sample.weight_version
    if version is None and expected.kind == "fluvial":
        raise WireError(f"{where} does not say which weights made it, expected those of version {expected.version}")
    if version is not None and version != expected.version:
        raise WireError(f"{where} was made by weights of version {version}, expected {expected.version}")
    trajectory = sample.dit_trajectory
    if trajectory is None:
        raise WireError(f"{where} has no dit_trajectory")
    steps = len(expected.sampling.schedule.timesteps)
    last = last_boundary(expected.sampling)
    places = _places(trajectory, order, last, steps, where)
    check_schedule(trajectory, [*places], expected, where)
    needed = sorted({*recorded, *(step + 1 for step in recorded)} | last)
    if missing := [boundary for boundary in needed if boundary not in places]:
        raise WireError(f"{where} has no latents at boundary {missing[0]} of its steps")
    latents = _finite(_events(trajectory.latents.float(), expected, "latents", where), f"{where}'s latents")
    x, x_next = (latents[[places[step + more] for step in recorded]] for more in (0, 1))
    log_prob, velocity = torch.zeros(0), None
    if recorded:
        log_prob = _of_steps(sample.rollout_log_probs, recorded, (steps,), "log-probabilities", where)
    if expected.keeps_velocity:
        outputs = (sample.rollout_debug_tensors or {}).get(OUTPUTS)
        outputs = outputs if outputs is None else _events(outputs, expected, OUTPUTS, where)
        velocity = _of_steps(outputs, recorded, (steps, *expected.sampling.shape), OUTPUTS, where)
    return ServedSample(
        x,
        x_next,
        log_prob,
        velocity,
        latents[places[steps]] if last else latents.new_zeros(0),
        _image(sample.generated_output, expected, where),
        expected.version if version is None else version,
        server,
    )


def check_schedule(trajectory: DitTrajectory, boundaries: Sequence[int], expected: Expected, where: str) -> None:
    """Raise WireError unless a sample was made at the noise levels and timesteps of the trainer's own schedule.

    Args:
        boundaries: boundary of each of its latents. Timesteps are those of the schedule, `[T]` or `[T+1]`, or of these.
    """
    levels, ours = first_row(expected.sampling.schedule.levels), expected.sampling.schedule.timesteps.float().cpu()
    sigmas, timesteps = trajectory.sigmas.float(), trajectory.timesteps
    if len(sigmas) != len(levels):
        raise WireError(f"{where} has {len(sigmas)} sigmas, expected {len(levels)}")
    if (worst := _far(sigmas, levels.float(), NEAR)) is not None:
        raise WireError(
            f"{where} was made at sigma {float(sigmas[worst]):.6g} in step {worst}, where the trainer's schedule has "
            f"{float(levels[worst]):.6g}: serve with the trainer's scheduler and shift"
        )
    if timesteps is None:
        return
    sent = timesteps.float()
    whole = TIMESTEPS * sigmas if expected.kind == "sglang" else torch.cat([ours, ours.new_zeros(1)])
    same = [meant for meant in (whole[[*boundaries]], whole, whole[:-1]) if len(meant) == len(sent)]
    if not same:
        raise WireError(f"{where} has {len(sent)} timesteps, expected {len(boundaries)}, one per boundary")
    if all(_far(sent, meant, NEAR_TIMESTEP) is not None for meant in same):
        farthest = int((sent - same[0]).abs().nan_to_num(math.inf).argmax())
        raise WireError(f"{where} has timestep {float(sent[farthest]):.6g}, expected {float(same[0][farthest]):.6g}")


def _far(values: Tensor, expected: Tensor, most: float) -> int | None:
    """Return the place of the value that is farthest from what was expected; None if none is farther than `most`."""
    far = (values - expected).abs().nan_to_num(math.inf)
    return None if bool((far <= most).all()) else int(far.argmax())


def _places(trajectory: DitTrajectory, order: RequestOrder, last: set[int], steps: int, where: str) -> dict[int, int]:
    """Return the place of each boundary's latents."""
    count, indices = len(trajectory.latents), trajectory.latent_step_indices
    if indices is None:
        indices = tuple(range(steps + 1)) if count == steps + 1 else order.boundaries(last)
    if len(indices) != count:
        raise WireError(f"{where} has {count} latents, expected {steps + 1}, or {len(indices)} at the boundaries asked for")
    return {boundary: place for place, boundary in enumerate(indices)}


def _of_steps(tensor: Tensor | None, recorded: tuple[int, ...], shape: tuple[int, ...], what: str, where: str) -> Tensor:
    """Return the rows of the recorded steps of a tensor with a row per step."""
    if tensor is None or tuple(tensor.shape) != shape:
        shape_sent = "none" if tensor is None else list(tensor.shape)
        raise WireError(f"{where} has {what} of shape {shape_sent}, expected {list(shape)}")
    return _finite(tensor.float()[list(recorded)], f"{where}'s {what}")


def _events(latents: Tensor, expected: Expected, what: str, where: str) -> Tensor:
    """Return latents `[K, *event]` from those of a server, which may be in sglang's layout."""
    layout, event = find_layout(expected.model), expected.sampling.shape
    shape = tuple(latents.shape[1:])
    if shape not in (event, layout.get_shape(event)):
        raise WireError(f"{where} has {what} of shape {list(shape)}, expected {list(layout.get_shape(event))}")
    return latents if shape == event else layout.to_event(latents, event)


def _image(image: Tensor, expected: Expected, where: str) -> Tensor:
    """Return an image in [0, 1], `[C, H, W]`, or `[C, F, H, W]` of a model whose samples have frames."""
    event, shape = expected.sampling.shape, list(image.shape)
    if image.ndim == 4 and shape[1] == 1 and len(event) < 4:
        image = image.squeeze(1)  # a video of one frame
    with convert_errors(WireError, ValueError, says=f"{where} has an image of shape {shape}"):
        frames = image.shape[1] if image.ndim == 4 else 1
        made = tuple(expected.model.latent_shape(image.shape[-2], image.shape[-1], frames))
    if made != event or image.ndim not in (3, 4) or image.shape[0] not in (1, 3):
        raise WireError(f"{where} has an image of shape {shape}, of latents {list(made)}, expected {list(event)}")
    if image.dtype == torch.uint8:
        return image.float() / 255
    image = _finite(image.float(), f"{where}'s image")
    if image.numel() and not -0.05 <= float(image.min()) <= float(image.max()) <= 1.05:
        raise WireError(f"{where} has an image from {float(image.min()):.3g} to {float(image.max()):.3g}, expected [0, 1]")
    return image.clamp(0, 1)


def _finite(tensor: Tensor, what: str) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise WireError(f"{what} are not finite numbers")
    return tensor
