"""Envelopes hold tensors to the bit, and nothing is allocated for one that lies about its size."""

import base64
import json
import pickle
import struct
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fluvial.engines.wire.errors import WireError
from fluvial.engines.wire.tensors import (
    DTYPES,
    MOST_HEADER,
    MessageLimits,
    envelope,
    packed,
    tensor_of,
    tree_of,
    unpacked,
    unpacked_json,
)

SMALL = MessageLimits(bytes=10_000, length=64, items=200, depth=6)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, (_, dtype) in DTYPES.items()])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 4)])
def test_a_tensor_keeps_its_bits(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """As bytes in msgpack, and as base64 in JSON."""
    tensor = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
    made = envelope(tensor)
    assert (made["__tensor__"], made["shape"], made["dtype"]) == (True, list(shape), name)
    found = tensor_of(unpacked(packed(made), SMALL), "t")
    assert same_bits(found, tensor)
    text = json.dumps({**made, "data": base64.b64encode(made["data"]).decode()}).encode()
    assert same_bits(tensor_of(unpacked_json(text, SMALL), "t"), tensor)


def test_a_tensor_that_is_read_can_be_written_to() -> None:
    """A view into the message would be read-only."""
    found = tensor_of(envelope(torch.zeros(3)), "t")
    found += 1
    assert found.tolist() == [1, 1, 1]


def test_a_view_is_written_as_it_is_seen() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()[1:]
    assert same_bits(tensor_of(envelope(tensor), "t"), tensor.contiguous())


def test_trees_keep_their_form() -> None:
    tree = {"a": [1, None, "x", {"b": 2.5}], "t": [torch.ones(2)], "n": True}
    found = tree_of(unpacked(packed(tree), SMALL), "tree")
    assert torch.equal(found["t"].pop(), torch.ones(2))
    assert found == {**tree, "t": []}


def test_a_dtype_without_a_name_is_an_error() -> None:
    with pytest.raises(WireError, match=r"torch\.complex64, expected one of torch\.float64"):
        envelope(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(WireError, match="a set has no place"):
        packed({1, 2})


def file(header: Any, data: bytes) -> bytes:
    """Return a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": [2**30, 2**30]}, "bytes, and shape and dtype say"),
        ({"shape": [2_500_000_000]}, r"expected sizes in \[0, 2\^31\)"),
        ({"shape": [-1]}, "expected sizes"),
        ({"shape": [2.0]}, "expected sizes"),
        ({"shape": [True]}, "expected sizes"),
        ({"shape": [1] * 17}, "at most 16 sizes"),
        ({"shape": "2"}, "expected a list"),
        ({"shape": None}, "expected a list"),
        ({"shape": [1, 2]}, "holds another tensor than F32"),
        ({"dtype": "torch.int32"}, "holds another tensor than I32"),
        ({"dtype": "torch.float8_e4m3fn"}, "expected one of torch.float64"),
        ({"dtype": None}, "expected one of torch.float64"),
        ({"dtype": ["x"]}, "expected one of torch.float64"),
        ({"data": None}, "expected the bytes of a safetensors file"),
        ({"data": 5}, "expected the bytes of a safetensors file"),
        ({"data": "é" * 100}, "no base64"),
        ({"data": b""}, "and shape and dtype say 8"),
        ({"data": pickle.dumps(list(range(40)))}, "expected a safetensors file of one tensor"),
        ({"data": file(GOOD, b"1234567")}, "expected a safetensors file of one tensor"),
        ({"data": file({"u": GOOD["t"]}, b"12345678")}, "one tensor named t"),
        ({"data": file({**GOOD, "u": GOOD["t"]}, b"12345678")}, "one tensor named t"),
        ({"data": file({"t": {**GOOD["t"], "data_offsets": [8, 16]}}, b"12345678")}, "holds another tensor"),
        ({"data": file(b"[" * 500, b"12345678")}, "one tensor named t"),
        ({"data": file(b"\xff\xfe", b"12345678")}, "one tensor named t"),
        ({"data": struct.pack("<Q", 2**63) + b"12345678"}, "a header of 9223372036854775808"),
        ({"data": file(json.dumps(GOOD).encode() + b" " * MOST_HEADER, b"12345678")}, "bytes"),
        ({"__tensor__": 1}, "is no tensor"),
        ({"__tensor__": False}, "is no tensor"),
    ],
)
def test_a_wrong_envelope_is_one_line(change: dict[str, Any], says: str) -> None:
    value = {**envelope(torch.zeros(2)), **change}
    with pytest.raises(WireError, match=says) as error:
        tensor_of(value, "sample 0.latents")
    assert str(error.value).startswith("sample 0.latents")
    assert "\n" not in str(error.value)


def test_metadata_of_a_file_is_allowed() -> None:
    value = {**envelope(torch.zeros(2)), "data": file({"__metadata__": {"format": "pt"}, **GOOD}, b"\0" * 8)}
    assert tensor_of(value, "t").tolist() == [0, 0]


def deep(levels: int) -> bytes:
    """Return msgpack of lists within lists."""
    return b"\x91" * levels + b"\xc0"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x91", b"\xc0\xc0", b"\xa1\xff",
        b"\xdd\xff\xff\xff\xff",  # announces a list of 2^32 items
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff12",  # announces 4 GB
        b"\xdc\x00\x41" + b"\xc0" * 65,  # more items than a list may have
        b"\xdc\x00\x40" + (b"\xdc\x00\x40" + b"\xc0" * 64) * 64,  # each small enough, all of them too many
        deep(7), deep(1000), deep(100_000),
        b"\x81\xc0\xc0",  # a key that is no text
        b"\xc7\x01\x05\x00", b"\xd6\xff\x00\x00\x00\x00",  # an extension type, a time
        b"\xc5\x40\x00" + b"\0" * 0x4000,  # more bytes than a message may have
        pickle.dumps({"a": 1}),
    ],
)  # fmt: skip
def test_a_wrong_message_is_one_line(data: bytes) -> None:
    with pytest.raises(WireError) as error:
        unpacked(data, SMALL)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b"[" * 7 + b"]" * 7, b"1" * 9999, b"[" + b"0," * 64 + b"0]", b"\xff"]
)
def test_a_wrong_json_message_is_one_line(data: bytes) -> None:
    with pytest.raises(WireError) as error:
        unpacked_json(data, SMALL)
    assert "\n" not in str(error.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_tree_or_an_error(data: bytes) -> None:
    try:
        tree = unpacked(data, SMALL)
    except WireError as error:
        problem = str(error)
    else:
        assert msgpack.packb(tree) is not None
        return
    assert "\n" not in problem
