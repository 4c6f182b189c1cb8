"""The response of `POST /rollout/generate`: a list with one map per sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fluvial.engines.wire.errors import WireError
from fluvial.engines.wire.fields import SEEDS, Fields
from fluvial.engines.wire.tensors import MessageLimits, is_envelope, packed, tensor_of, tree_of, unpacked, unpacked_json

MSGPACK, JSON = "application/msgpack", "application/json"
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DitTrajectory:
    """The trajectory of a sample.

    Args:
        latents: latents at K boundaries of steps, `[K, ...]`.
        timesteps: timesteps of the schedule: fluvial's server sends `[T]`, others also `[T+1]`, or those of the boundaries.
        sigmas: the schedule's T+1 noise levels, `[T+1]`.
        latent_step_indices: the boundary of each of the latents, `[K]`; None where the server does not say.
    """

    latents: Tensor
    timesteps: Tensor | None
    sigmas: Tensor
    latent_step_indices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RolloutSample:
    """One sample of a response. A field that was not asked for is None.

    Args:
        request_id: name of the request.
        prompt: its prompt.
        seed: seed of the request, which for sample i is not seed + i.
        generated_output: image `[C, H, W]` or video `[C, F, H, W]`, floating-point in [0, 1] or uint8.
        rollout_log_probs: log-probability of each step, `[T]` float32, 0 at steps without noise.
        rollout_debug_tensors: what each step was computed from, each `[T, ...]`.
        denoising_env: conditioning of the network, maps and lists with tensors in them.
        dit_trajectory: latents and schedule.
        inference_time_s: seconds that the sample took.
        peak_memory_mb: largest memory of the device so far.
        weight_version: version of the weights that made the sample; None from servers that do not say.
    """

    request_id: str
    prompt: str
    seed: int | None
    generated_output: Tensor
    rollout_log_probs: Tensor | None = None
    rollout_debug_tensors: Mapping[str, Tensor] | None = None
    denoising_env: Mapping[str, Any] | None = None
    dit_trajectory: DitTrajectory | None = None
    inference_time_s: float | None = None
    peak_memory_mb: float | None = None
    weight_version: int | None = None


@dataclass(frozen=True)
class ResponseLimits:
    """Largest response that a client reads.

    Args:
        message: limits of the message.
        samples: samples per response.
    """

    message: MessageLimits = field(default_factory=MessageLimits)
    samples: int = 4096


def write_response(samples: Sequence[RolloutSample]) -> bytes:
    """Return samples as the msgpack body of a response."""
    return packed([_map_of(sample) for sample in samples])


def read_response(data: bytes, limits: ResponseLimits | None = None, *, media_type: str = MSGPACK) -> list[RolloutSample]:
    """Return the samples of a response.

    Args:
        data: body of the response.
        limits: largest response.
        media_type: media type of the body; JSON is what servers sent before July 2026.

    Raises:
        WireError: it breaks the schema, or is too large.
    """
    limits = limits or ResponseLimits()
    kind = media_type.partition(";")[0].strip().lower()
    if kind not in (MSGPACK, JSON):
        raise WireError(f"the response is of type {kind[:60]!r}, expected {MSGPACK}")
    tree = (unpacked if kind == MSGPACK else unpacked_json)(data, limits.message)
    if not isinstance(tree, list) or len(tree) > limits.samples:
        raise WireError(f"the response is no list of at most {limits.samples} samples")
    return [_sample_of(value, f"sample {number}") for number, value in enumerate(tree)]


def _map_of(sample: RolloutSample) -> dict[str, Any]:
    trajectory = sample.dit_trajectory
    indices = None if trajectory is None else trajectory.latent_step_indices
    return {
        "request_id": sample.request_id,
        "prompt": sample.prompt,
        "seed": sample.seed,
        "generated_output": sample.generated_output,
        "rollout_log_probs": sample.rollout_log_probs,
        "rollout_debug_tensors": None if sample.rollout_debug_tensors is None else dict(sample.rollout_debug_tensors),
        "denoising_env": None if sample.denoising_env is None else dict(sample.denoising_env),
        "dit_trajectory": None
        if trajectory is None
        else {
            "latents": trajectory.latents,
            "timesteps": trajectory.timesteps,
            "sigmas": trajectory.sigmas,
            "latent_step_indices": None if indices is None else torch.tensor(indices, dtype=torch.int64),
        },
        "inference_time_s": sample.inference_time_s,
        "peak_memory_mb": sample.peak_memory_mb,
        "weight_version": sample.weight_version,
    }


def _sample_of(value: Any, where: str) -> RolloutSample:
    given = Fields(value, where)
    log_probs = _tensor(given, "rollout_log_probs")
    if log_probs is not None and (log_probs.ndim != 1 or log_probs.dtype not in FLOATING):
        raise WireError(
            f"{where}.rollout_log_probs is {log_probs.dtype} {list(log_probs.shape)}, expected floating-point numbers [T]"
        )
    output = _tensor(given, "generated_output")
    if output is None or output.ndim < 3 or output.dtype not in (*FLOATING, torch.uint8):
        found = "missing" if output is None else f"{output.dtype} {list(output.shape)}"
        raise WireError(f"{where}.generated_output is {found}, expected an image [C, H, W] or a video")
    trajectory = given.inner("dit_trajectory")
    read = None if trajectory is None else _trajectory_of(trajectory)
    if log_probs is not None and read is not None and len(read.sigmas) != len(log_probs) + 1:
        raise WireError(
            f"{where} has {len(log_probs)} log-probabilities and {len(read.sigmas)} sigmas, expected one sigma more"
        )
    request_id, prompt = given.text("request_id", ""), given.text("prompt", "", most=2**20)
    return RolloutSample(
        request_id=request_id or "",
        prompt=prompt or "",
        seed=given.integer("seed", high=SEEDS[1]),
        generated_output=output,
        rollout_log_probs=log_probs,
        rollout_debug_tensors=_debug_of(given.inner("rollout_debug_tensors")),
        denoising_env=None if (env := given.inner("denoising_env")) is None else tree_of(dict(env.value), env.where),
        dit_trajectory=read,
        inference_time_s=given.number("inference_time_s", high=1e9),
        peak_memory_mb=given.number("peak_memory_mb", high=1e12),
        weight_version=given.integer("weight_version", high=SEEDS[1]),
    )


def _trajectory_of(given: Fields) -> DitTrajectory:
    latents, sigmas, timesteps = (_tensor(given, name) for name in ("latents", "sigmas", "timesteps"))
    if latents is None or latents.ndim < 2 or latents.dtype not in FLOATING:
        raise WireError(f"{given.where}.latents are missing, or no floating-point tensor [K, ...]")
    if sigmas is None or sigmas.ndim != 1 or len(sigmas) < 2 or sigmas.dtype not in FLOATING:
        raise WireError(f"{given.where}.sigmas are missing, or no floating-point numbers [T+1]")
    if timesteps is not None and timesteps.ndim != 1:
        raise WireError(f"{given.where}.timesteps are {list(timesteps.shape)}, expected one dimension")
    indices = _indices(given, most=len(sigmas) - 1)
    if indices is None and len(latents) > len(sigmas):
        raise WireError(
            f"{given.where} has {len(latents)} latents, expected at most {len(sigmas)}, one per boundary of a step"
        )
    if indices is not None and len(indices) != len(latents):
        raise WireError(f"{given.where} has {len(latents)} latents and {len(indices)} latent_step_indices")
    return DitTrajectory(latents, timesteps, sigmas, indices)


def _indices(given: Fields, *, most: int) -> tuple[int, ...] | None:
    """Return the boundaries of the latents, which are a list or a tensor."""
    value = given.value.get("latent_step_indices")
    if is_envelope(value):
        tensor = tensor_of(value, given.name("latent_step_indices"))
        if tensor.ndim != 1 or tensor.dtype not in (torch.int64, torch.int32):
            raise WireError(
                f"{given.name('latent_step_indices')} is {tensor.dtype} {list(tensor.shape)}, expected integers [K]"
            )
        given = Fields({"latent_step_indices": tensor.tolist()[:4097]}, given.where)
    found = given.integers("latent_step_indices", high=most)
    if found is not None and any(after <= before for before, after in pairwise(found)):
        raise WireError(f"{given.name('latent_step_indices')} do not rise")
    return found


def _debug_of(given: Fields | None) -> dict[str, Tensor] | None:
    if given is None:
        return None
    return {str(name): tensor_of(value, given.name(str(name))) for name, value in given.value.items() if value is not None}


def _tensor(given: Fields, field: str) -> Tensor | None:
    value = given.value.get(field)
    return None if value is None else tensor_of(value, given.name(field))
