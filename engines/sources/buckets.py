"""Buckets of tensors for servers on the trainer's own machine.

fluvial's own server reads them from files in shared memory, described in JSON. An sglang that shares the trainer's GPUs
opens them by CUDA IPC, and wants a pickle with a class of its own.

The part for CUDA has not been run on a GPU. The tests run it on the CPU with a stand-in for sglang's class.
"""

import base64
import io
import json
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors are handed to another process
from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.wire.weights import SHARED_FILES, Place, SharedBucket


def file_request(bucket: SharedBucket, flat: Tensor, *, version: int) -> dict[str, Any]:
    """Write a bucket's file, and return the request that names it.

    Args:
        bucket: where each tensor lies, and the file.
        flat: the tensors, uint8 `[bytes]`.
        version: version of the weights.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        Path(bucket.file).write_bytes(flat.cpu().numpy().data)
    except OSError as error:
        raise RunError(f"weights cannot be written to {bucket.file}: {error.strerror}") from error
    return {
        "load_format": SHARED_FILES,
        "serialized_named_tensors": [json.dumps(bucket.as_json())],
        "target_modules": [bucket.module],
        "weight_version": str(version),
    }


def ipc_request(module: str, payloads: Sequence[tuple[str, str]], *, version: int) -> dict[str, Any]:
    """Return sglang's request for a bucket, from the (UUID of the GPU, payload) of each rank."""
    return {
        "load_format": "flattened_bucket",
        "serialized_named_tensors": [payload for _, payload in payloads],
        "payload_gpu_uuids": [gpu for gpu, _ in payloads],
        "target_modules": [module],
        "weight_version": str(version),
    }


def ipc_payload(module: str, places: Sequence[Place], flat: Tensor) -> str:
    """Return this rank's payload of a bucket: base64 of a pickle with the handle of its memory.

    The memory must stay until the server has answered. Not run on a GPU.

    Args:
        module: name of the network.
        places: where each tensor lies.
        flat: the tensors, uint8 `[bytes]`, on the GPU.

    Raises:
        UsageError: sglang is not installed, whose class the server's pickles must hold.
    """
    metadata, patch = _sglang()
    patch()  # a handle then names its GPU by UUID, because processes may count GPUs differently
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
    places = [metadata(**{**place._asdict(), "shape": torch.Size(place.shape)}) for place in places]
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump({module: {"flattened_tensor": flat, "metadata": places}})
    return base64.b64encode(buffer.getvalue()).decode()


def check_gpu(device: torch.device) -> None:
    """Raise UsageError unless tensors of a device can be sent by CUDA IPC."""
    if device.type != "cuda":
        raise UsageError("rollout.servers.weights is cuda_ipc, and the trainer has no GPU: use shared_memory, disk or auto")


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _sglang() -> tuple[Any, Any]:
    """Return sglang's class of a tensor's place in a bucket, and its patch of torch's reductions."""
    try:
        patch = import_module("sglang.srt.utils.patch_torch").monkey_patch_torch_reductions
        metadata = import_module("sglang.srt.weight_sync.tensor_bucket").FlattenedTensorMetadata
    except (ImportError, AttributeError) as error:
        raise UsageError(
            "tensors go to a server on the trainer's GPUs in sglang's own class, and sglang is not installed: "
            f"install it, or use another weight sync than tensors ({error})"
        ) from None
    return metadata, patch
