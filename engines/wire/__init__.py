"""The rollout schema of sglang-diffusion: requests and responses, their tensors and their names. Nothing here does I/O."""

from fluvial.engines.wire.errors import WireError
from fluvial.engines.wire.request import FluvialOptions, RequestLimits, RolloutRequest, read_request, written
from fluvial.engines.wire.response import DitTrajectory, ResponseLimits, RolloutSample, read_response, write_response
from fluvial.engines.wire.tensors import MessageLimits

__all__ = [
    "DitTrajectory",
    "FluvialOptions",
    "MessageLimits",
    "RequestLimits",
    "ResponseLimits",
    "RolloutRequest",
    "RolloutSample",
    "WireError",
    "read_request",
    "read_response",
    "write_response",
    "written",
]
