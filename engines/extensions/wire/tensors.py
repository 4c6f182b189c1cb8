"""Tensors in messages: safetensors files with one tensor each. Sizes are checked before anything is allocated.

    {"__tensor__": True, "data": <file>, "shape": [4, 2], "dtype": "torch.bfloat16"}

`data` is bytes in msgpack, and base64 text of the same bytes in JSON. Nothing is ever unpickled.
"""

import json
import math
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta, Struct
from safetensors.torch import save
from torch import Tensor

from fluvial.engines.extensions.wire.decode import WireError, convert, unpack

NAMES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
SHORT = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]  # in files of safetensors
DTYPES: dict[str, tuple[str, torch.dtype]] = {
    f"torch.{name}": (short, getattr(torch, name)) for name, short in zip(NAMES, SHORT, strict=True)
}
MOST_HEADER = 4096  # bytes of the header of a file with one tensor
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...], Meta(max_length=16)]


class Envelope(Struct, frozen=True):
    """Tensor in a message.

    Args:
        data: safetensors file with one tensor, named t.
        marked: field that identifies an envelope.

    Raises:
        WireError: file, shape and dtype do not agree.
    """

    data: bytes
    shape: Shape
    dtype: str
    marked: Literal[True] = msgspec.field(name="__tensor__")

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise WireError(f"dtype is {self.dtype[:40]!r}, expected one of {', '.join(DTYPES)}")
        short, dtype = DTYPES[self.dtype]
        size, length = math.prod(self.shape) * dtype.itemsize, int.from_bytes(self.data[:8], "little")
        if len(self.data) < 8 or length > MOST_HEADER or len(self.data) != 8 + length + size:
            raise WireError(
                f"data has {len(self.data)} bytes with a header of {length}, expected a safetensors file with one tensor of "
                f"{size} bytes"
            )
        try:
            header = json.loads(self.data[8 : 8 + length])
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or set(header) - {"__metadata__"} != {"t"}:
            raise WireError("data is not a safetensors file with one tensor named t")
        if header["t"] != {"dtype": short, "shape": list(self.shape), "data_offsets": [0, size]}:
            raise WireError(f"data does not hold a tensor {short} {list(self.shape)}, as the envelope says")

    @property
    def tensor(self) -> Tensor:
        """Copy of the tensor."""
        dtype = DTYPES[self.dtype][1]
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=dtype)
        start = 8 + int.from_bytes(self.data[:8], "little")
        return torch.frombuffer(bytearray(memoryview(self.data)[start:]), dtype=dtype).reshape(self.shape)


def pack(value: Any) -> bytes:
    """Encode a tree of maps, lists, numbers, texts and tensors as msgpack; tensors become envelopes."""
    return msgspec.msgpack.encode(value, enc_hook=_wrap_tensor)


def unpack_tree(data: bytes) -> Any:
    """Decode msgpack to a tree of maps and lists, with envelopes as tensors.

    The sender decides how much memory the tree takes, so the sender must be trusted.

    Raises:
        WireError: the data is not msgpack, or an envelope in it is wrong.
    """

    def open_value(value: Any, name: str) -> Any:
        if isinstance(value, dict) and "__tensor__" in value:
            return convert(value, Envelope, name=name).tensor
        if isinstance(value, dict):
            return {key: open_value(item, f"{name}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [open_value(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return value

    return open_value(unpack(data, Any), "")


def _wrap_tensor(value: Any) -> Envelope:
    if not isinstance(value, Tensor):
        raise WireError(f"a {type(value).__name__} cannot be part of a message")
    if str(value.dtype) not in DTYPES:
        raise WireError(f"a tensor has dtype {value.dtype}, expected one of {', '.join(DTYPES)}")
    return Envelope(save({"t": value.detach().cpu().contiguous()}), tuple(value.shape), str(value.dtype), True)
