"""Tensors in messages: safetensors files of one tensor, whose sizes are checked before anything is allocated.

    {"__tensor__": True, "data": <file>, "shape": [4, 2], "dtype": "torch.bfloat16"}

`data` is bytes in msgpack, and base64 text of the same bytes in JSON. Nothing is ever unpickled.
"""

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluvial.engines.errors import UsageError
from fluvial.engines.wire.errors import WireError

DTYPES: dict[str, tuple[str, torch.dtype]] = {
    f"torch.{name}": (short, dtype)
    for name, short, dtype in (
        ("float64", "F64", torch.float64),
        ("float32", "F32", torch.float32),
        ("float16", "F16", torch.float16),
        ("bfloat16", "BF16", torch.bfloat16),
        ("int64", "I64", torch.int64),
        ("int32", "I32", torch.int32),
        ("int16", "I16", torch.int16),
        ("int8", "I8", torch.int8),
        ("uint8", "U8", torch.uint8),
        ("bool", "BOOL", torch.bool),
    )
}
MOST_HEADER = 4096  # bytes of the header of a file of one tensor
MOST_DIMENSIONS, LARGEST_DIMENSION = 16, 2**31
PLAIN = (str, bytes, bool, int, float, type(None))


@dataclass(frozen=True)
class MessageLimits:
    """Largest message that is read.

    Args:
        bytes: bytes of the whole message.
        length: items of one list or map.
        items: items of all lists and maps.
        depth: nesting of lists and maps.
    """

    bytes: int = 4_000_000_000
    length: int = 4096
    items: int = 200_000
    depth: int = 16


def packed(value: Any) -> bytes:
    """Return a tree of maps, lists, numbers, texts and tensors as msgpack; tensors become envelopes."""
    return _msgpack().packb(value, default=_of_object, use_bin_type=True)


def unpacked(data: bytes, limits: MessageLimits) -> Any:
    """Return the tree of a msgpack message, its tensors as envelopes.

    Raises:
        WireError: it is too large, nested too deeply, or no msgpack of plain values.
    """
    _check_bytes(data, limits)
    count = 0

    def counted(container: Any) -> Any:
        nonlocal count
        count += 1 + len(container)
        if count > limits.items:
            raise WireError(f"the message has more than {limits.items} items")
        return container

    try:
        tree = _msgpack().unpackb(
            data, raw=False, strict_map_key=True, max_array_len=limits.length, max_map_len=limits.length, max_ext_len=0,
            max_str_len=limits.bytes, max_bin_len=limits.bytes, list_hook=counted, object_hook=counted,
        )  # fmt: skip
    except WireError:
        raise
    except Exception as error:  # msgpack raises ValueErrors, and what its stack of 1,024 levels raises
        raise WireError(f"the message is no msgpack, or one beyond the limits: {error or type(error).__name__}") from None
    _check_tree(tree, limits)
    return tree


def unpacked_json(data: bytes, limits: MessageLimits) -> Any:
    """Return the tree of a JSON message, its tensors as envelopes.

    Raises:
        WireError: it is too large, nested too deeply, or no JSON.
    """
    _check_bytes(data, limits)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        raise WireError("the message is no JSON, or is nested too deeply") from None
    _check_tree(tree, limits)
    return tree


def envelope(tensor: Tensor) -> dict[str, Any]:
    """Return the envelope of a tensor.

    Raises:
        WireError: its dtype has no place in the schema.
    """
    from safetensors.torch import save

    if str(tensor.dtype) not in DTYPES:
        raise WireError(f"a tensor is of {tensor.dtype}, expected one of {', '.join(DTYPES)}")
    data = save({"t": tensor.detach().cpu().contiguous()})
    return {"__tensor__": True, "data": data, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def is_envelope(value: Any) -> bool:
    """Return whether a value claims to be a tensor."""
    return isinstance(value, Mapping) and "__tensor__" in value


def tensor_of(value: Any, where: str) -> Tensor:
    """Return the tensor of an envelope.

    Args:
        value: the envelope.
        where: its place in the message.

    Raises:
        WireError: it is none, or its file, shape and dtype do not agree.
    """
    if not isinstance(value, Mapping) or value.get("__tensor__") is not True:
        raise WireError(f"{where} is no tensor, expected an envelope with __tensor__")
    shape = shape_of(value.get("shape"), where)
    name = value.get("dtype")
    if not isinstance(name, str) or name not in DTYPES:
        raise WireError(f"{where}.dtype is {_shown(name)}, expected one of {', '.join(DTYPES)}")
    short, dtype = DTYPES[name]
    expected = math.prod(shape) * dtype.itemsize
    data = _file(value.get("data"), where, expected)
    start = _header_end(data, where, short=short, shape=shape, expected=expected)
    if expected == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(memoryview(data)[start:]), dtype=dtype).reshape(shape)


def shape_of(value: Any, where: str) -> list[int]:
    """Return a shape that a tensor can have.

    Raises:
        WireError: it is none.
    """
    if not isinstance(value, list | tuple) or len(value) > MOST_DIMENSIONS:
        raise WireError(f"{where}.shape is {_shown(value)}, expected a list of at most {MOST_DIMENSIONS} sizes")
    for size in value:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < LARGEST_DIMENSION:
            raise WireError(f"{where}.shape holds {_shown(size)}, expected sizes in [0, 2^31)")
    return list(value)


def tree_of(value: Any, where: str) -> Any:
    """Return a part of a message with its envelopes as tensors.

    Raises:
        WireError: an envelope in it is wrong.
    """
    if is_envelope(value):
        return tensor_of(value, where)
    if isinstance(value, dict):
        return {name: tree_of(item, f"{where}.{_shown(name)}") for name, item in value.items()}
    if isinstance(value, list):
        return [tree_of(item, f"{where}[{number}]") for number, item in enumerate(value)]
    return value


def _file(data: Any, where: str, expected: int) -> bytes:
    """Return the bytes of a file, whose length is known to fit the tensor before base64 is decoded."""
    length = len(data) if isinstance(data, bytes) else len(data) * 3 // 4 if isinstance(data, str) else None
    if length is None:
        raise WireError(f"{where}.data is of type {type(data).__name__}, expected the bytes of a safetensors file")
    if not expected <= length <= expected + MOST_HEADER + 16:
        raise WireError(f"{where}.data has about {length} bytes, and shape and dtype say {expected}")
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise WireError(f"{where}.data is no base64") from None


def _header_end(data: bytes, where: str, *, short: str, shape: list[int], expected: int) -> int:
    """Return where the numbers of a safetensors file begin, whose header says what the envelope says."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > MOST_HEADER or len(data) != 8 + length + expected:
        raise WireError(
            f"{where}.data has {len(data)} bytes with a header of {length}, expected a safetensors file of one tensor of "
            f"{expected} bytes"
        )
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or set(header) - {"__metadata__"} != {"t"}:
        raise WireError(f"{where}.data is no safetensors file with one tensor named t")
    if header["t"] != {"dtype": short, "shape": shape, "data_offsets": [0, expected]}:
        raise WireError(f"{where}.data holds another tensor than {short} {shape}, which the envelope says")
    return 8 + length


def _check_bytes(data: bytes, limits: MessageLimits) -> None:
    if len(data) > limits.bytes:
        raise WireError(f"the message has {len(data)} bytes, expected at most {limits.bytes}")


def _check_tree(tree: Any, limits: MessageLimits) -> None:
    """Raise WireError for a tree of more items or levels than the limits, or of other values than plain ones."""
    left, items = [(tree, 0)], 0
    while left:
        value, depth = left.pop()
        if not isinstance(value, list | dict):
            if not isinstance(value, PLAIN):
                raise WireError(
                    f"the message holds a {type(value).__name__}, expected maps, lists, numbers, texts and bytes"
                )
            continue
        items += 1 + len(value)
        if depth >= limits.depth or len(value) > limits.length or items > limits.items:
            raise WireError(
                f"the message has more than {limits.depth} levels, {limits.length} items in one list or map, or "
                f"{limits.items} items"
            )
        left.extend((item, depth + 1) for item in (value.values() if isinstance(value, dict) else value))


def _of_object(value: Any) -> Any:
    if isinstance(value, Tensor):
        return envelope(value)
    raise WireError(f"a {type(value).__name__} has no place in the schema")


def _shown(value: Any) -> str:
    """Return a value of the other side for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _msgpack() -> Any:
    try:
        import msgpack
    except ModuleNotFoundError as error:
        raise UsageError("rollouts over HTTP need msgpack: pip install 'fluvial[serve]'") from error
    return msgpack
