"""Responses of a rollout server to GET /v1/model_info and POST /rollout/generate (a list with one map per sample)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, Raw, Struct
from torch import Tensor

from fluvial.engines.extensions.wire.decode import SEEDS, WireError, unpack
from fluvial.engines.extensions.wire.tensors import Envelope, pack

MSGPACK, JSON = "application/msgpack", "application/json"
MOST_SAMPLES = 4096  # per response
FLOATING = ("torch.float64", "torch.float32", "torch.float16", "torch.bfloat16")
Quantity = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=SEEDS)]
Kind = Literal["fluvial", "sglang"]  # server of `fluvial serve`, or any other with sglang's endpoints


class ServerInfo(Struct, frozen=True):
    """Answer to GET /v1/model_info. A field is None if the server does not report it.

    Args:
        takes_options: whether the server reads `FluvialOptions`.
        prediction: prediction of its model.
        weight_version: number of updates of its weights; other servers report a name.
        micro_batch: number of rows that each batch is padded to.
        media: arguments of the pipeline that take the images of a request, in the order of `image_path`.
    """

    takes_options: bool = False
    prediction: str | None = None
    weight_version: int | str | None = None
    micro_batch: int | None = None
    media: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """Kind of server, for messages and records."""
        return "fluvial" if self.takes_options else "sglang"


@dataclass(frozen=True)
class DitTrajectory:
    """Trajectory of a sample.

    Args:
        latents: latents at K step boundaries, `[K, ...]`.
        timesteps: timesteps of the schedule. fluvial's server sends `[T]`; others send `[T+1]`, or `[K]` at the boundaries.
        sigmas: noise levels of the schedule, `[T+1]`.
        latent_step_indices: boundary of each latent, `[K]`; None if the server does not report it.
    """

    latents: Tensor
    timesteps: Tensor | None
    sigmas: Tensor
    latent_step_indices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RolloutSample:
    """One sample of a response. A field that was not requested is None.

    Args:
        seed: seed of the request, although sample i was generated with seed + i.
        generated_output: image `[C, H, W]` or video `[C, F, H, W]`, floating-point in [0, 1] or uint8.
        rollout_log_probs: log-probability of each step, `[T]` float32, 0 at steps without noise.
        rollout_debug_tensors: inputs and intermediate values of each step, each `[T, ...]`.
        denoising_env: conditioning of the network: maps and lists of tensors. A received one stays msgpack, for
            `tensors.unpack_tree`, because no trainer reads it.
        inference_time_s: sampling time in seconds.
        peak_memory_mb: peak memory of the device so far.
        weight_version: version of the weights that generated the sample; None from servers that do not report it.
    """

    request_id: str
    prompt: str
    seed: int | None
    generated_output: Tensor
    rollout_log_probs: Tensor | None = None
    rollout_debug_tensors: Mapping[str, Tensor] | None = None
    denoising_env: Mapping[str, Any] | bytes | None = None
    dit_trajectory: DitTrajectory | None = None
    inference_time_s: float | None = None
    peak_memory_mb: float | None = None
    weight_version: int | None = None


def write_response(samples: Sequence[RolloutSample]) -> bytes:
    """Encode samples as the msgpack body of a response."""
    return pack([replace(sample, dit_trajectory=_store_indices(sample.dit_trajectory)) for sample in samples])


def read_response(data: bytes, *, most_bytes: int = 4_000_000_000, media_type: str = MSGPACK) -> list[RolloutSample]:
    """Decode the samples of a response.

    Args:
        media_type: media type of the body; servers sent JSON before July 2026.

    Raises:
        WireError: the body breaks the schema, or is too large.
    """
    if len(data) > most_bytes:
        raise WireError(f"the response has {len(data)} bytes, expected at most {most_bytes}")
    kind = media_type.partition(";")[0].strip().lower()
    if kind not in (MSGPACK, JSON):
        raise WireError(f"the response is of type {kind[:60]!r}, expected {MSGPACK}")
    return [sample.read() for sample in unpack(data, _Samples, json=kind == JSON, name="response")]


class _Trajectory(Struct, frozen=True):
    """Encoded trajectory."""

    latents: Envelope
    sigmas: Envelope
    timesteps: Envelope | None = None
    latent_step_indices: Envelope | Annotated[tuple[int, ...], Meta(max_length=4097)] | None = None

    def __post_init__(self) -> None:
        boundaries = _count_numbers("sigmas", self.sigmas)
        if len(self.latents.shape) < 2 or self.latents.dtype not in FLOATING:
            raise _build_shape_error("latents", self.latents, "floating-point numbers [K, ...]")
        if self.timesteps is not None and len(self.timesteps.shape) != 1:
            raise _build_shape_error("timesteps", self.timesteps, "numbers [T]")
        count, indices = self.latents.shape[0], self.indices
        if indices is None:
            if count > boundaries:
                raise WireError(f"there are {count} latents, expected at most {boundaries}, one per boundary of a step")
            return
        if len(indices) != count:
            raise WireError(f"there are {count} latents and {len(indices)} latent_step_indices")
        if any(after <= before for before, after in pairwise((-1, *indices, boundaries))):
            raise WireError(f"latent_step_indices do not rise within 0 to {boundaries - 1}")

    @property
    def indices(self) -> tuple[int, ...] | None:
        """Boundary of each latent."""
        indices = self.latent_step_indices
        if not isinstance(indices, Envelope):
            return indices
        if len(indices.shape) != 1 or indices.shape[0] > 4097 or indices.dtype not in ("torch.int64", "torch.int32"):
            raise _build_shape_error("latent_step_indices", indices, "integers [K]")
        return tuple(indices.tensor.tolist())

    def read(self) -> DitTrajectory:
        timesteps = None if self.timesteps is None else self.timesteps.tensor
        return DitTrajectory(self.latents.tensor, timesteps, self.sigmas.tensor, self.indices)


class _Sample(Struct, frozen=True):
    """Encoded sample."""

    generated_output: Envelope
    request_id: str | None = None
    prompt: str | None = None
    seed: Count | None = None
    rollout_log_probs: Envelope | None = None
    rollout_debug_tensors: dict[str, Envelope | None] | None = None
    denoising_env: Raw = Raw(b"\xc0")
    dit_trajectory: _Trajectory | None = None
    inference_time_s: Quantity | None = None
    peak_memory_mb: Quantity | None = None
    weight_version: Count | None = None

    def __post_init__(self) -> None:
        output, log_probs, trajectory = self.generated_output, self.rollout_log_probs, self.dit_trajectory
        if len(output.shape) < 3 or output.dtype not in (*FLOATING, "torch.uint8"):
            raise _build_shape_error("generated_output", output, "an image [C, H, W] or a video")
        steps = None if log_probs is None else _count_numbers("rollout_log_probs", log_probs)
        if steps is not None and trajectory is not None and trajectory.sigmas.shape[0] != steps + 1:
            raise WireError(
                f"there are {steps} log-probabilities and {trajectory.sigmas.shape[0]} sigmas, expected one sigma more"
            )

    def read(self) -> RolloutSample:
        debug, env = self.rollout_debug_tensors or {}, bytes(self.denoising_env)
        values: dict[str, Any] = {
            "request_id": self.request_id or "",
            "prompt": self.prompt or "",
            "rollout_debug_tensors": {name: each.tensor for name, each in debug.items() if each is not None} or None,
            "denoising_env": None if env in (b"\xc0", b"null") else env,
            "dit_trajectory": None if self.dit_trajectory is None else self.dit_trajectory.read(),
        }
        for name in {*self.__struct_fields__} - {*values}:
            value = getattr(self, name)
            values[name] = value.tensor if isinstance(value, Envelope) else value
        return RolloutSample(**values)


_Samples = Annotated[list[_Sample], Meta(max_length=MOST_SAMPLES)]


def _count_numbers(name: str, value: Envelope) -> int:
    """Return the length of a floating-point vector; raise WireError for any other tensor."""
    if len(value.shape) != 1 or value.dtype not in FLOATING:
        raise _build_shape_error(name, value, "floating-point numbers in one dimension")
    return value.shape[0]


def _build_shape_error(name: str, value: Envelope, expected: str) -> WireError:
    return WireError(f"{name} is {value.dtype} {list(value.shape)}, expected {expected}")


def _store_indices(trajectory: DitTrajectory | None) -> Any:
    """Turn the indices of a trajectory into a tensor, as in the schema."""
    if trajectory is None or trajectory.latent_step_indices is None:
        return trajectory
    indices: Any = torch.tensor(trajectory.latent_step_indices, dtype=torch.int64)
    return replace(trajectory, latent_step_indices=indices)
