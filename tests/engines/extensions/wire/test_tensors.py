"""Envelopes hold tensors to the bit, and nothing is allocated for one that lies about its size."""

import base64
import itertools
import json
import pickle
import struct
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor

from fluvial.engines.extensions.wire.decode import WireError, convert, unpack
from fluvial.engines.extensions.wire.tensors import DTYPES, MOST_HEADER, Envelope, pack, unpack_tree


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, (_, dtype) in DTYPES.items()])
def test_a_tensor_keeps_its_bits(name: str, dtype: torch.dtype) -> None:
    """Of any shape, and of a view what is seen; what is read can be written to."""
    view = (torch.arange(12.0).reshape(3, 4).t()[1:]).to(dtype)
    for tensor in (view, *((torch.randn(shape, dtype=torch.float64) * 3).to(dtype) for shape in ((), (1,), (2, 0, 4)))):
        data = pack(tensor)
        made = msgpack.unpackb(data)
        assert (made["__tensor__"], made["shape"], made["dtype"]) == (True, list(tensor.shape), name)
        assert same_bits(unpack(data, Envelope).tensor, tensor.contiguous())
        text = json.dumps({**made, "data": base64.b64encode(made["data"]).decode()}).encode()
        assert same_bits(unpack(text, Envelope, json=True).tensor, tensor.contiguous())
    read = unpack(pack(torch.zeros(3)), Envelope)
    found = read.tensor
    found += 1
    assert (found.tolist(), read.tensor.tolist()) == ([1, 1, 1], [0, 0, 0])


def test_trees_keep_their_form() -> None:
    tree = {"a": [1, None, "x", {"b": 2.5}], "t": [torch.ones(2)], "n": True}
    found = unpack_tree(pack(tree))
    assert torch.equal(found["t"].pop(), torch.ones(2))
    assert found == {**tree, "t": []}
    wrong = {"a": [{"__tensor__": True, "data": b"", "shape": [1], "dtype": "torch.int8"}]}
    with pytest.raises(WireError, match=r"^a\[0\]: data has 0 bytes"):
        unpack_tree(pack(wrong))
    with pytest.raises(WireError, match=r"torch\.complex64, expected one of torch\.float64"):
        pack(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(WireError, match="a object cannot be part"):
        pack(object())


def file(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": [2**30, 2**30]}, "of 4611686018427387904 bytes"),
        ({"shape": [2_500_000_000]}, r"shape\[0\]: Expected `int` <= 2147483647"),
        ({"shape": [-1]}, r"shape\[0\]: Expected `int` >= 0"),
        ({"shape": [1] * 17}, "shape: Expected `array` of length <= 16"),
        ({"shape": [1, 2]}, "does not hold a tensor F32"),
        ({"dtype": "torch.int32"}, "does not hold a tensor I32"),
        ({"dtype": "torch.float8_e4m3fn"}, "expected one of torch.float64"),
        ({"data": None}, "data: Expected `bytes`, got `(None|null)`"),
        ({"data": b""}, "expected a safetensors file with one tensor of 8 bytes"),
        ({"data": pickle.dumps(list(range(40)))}, "expected a safetensors file with one tensor"),
        ({"data": file(GOOD, b"1234567")}, "expected a safetensors file with one tensor"),
        ({"data": file({"u": GOOD["t"]}, b"12345678")}, "one tensor named t"),
        ({"data": file({**GOOD, "u": GOOD["t"]}, b"12345678")}, "one tensor named t"),
        ({"data": file({"t": {**GOOD["t"], "data_offsets": [8, 16]}}, b"12345678")}, "does not hold a tensor"),
        ({"data": file(b"[" * 500, b"12345678")}, "one tensor named t"),
        ({"data": file(b"\xff\xfe", b"12345678")}, "one tensor named t"),
        ({"data": struct.pack("<Q", 2**63) + b"12345678"}, "a header of 9223372036854775808"),
        ({"data": file(json.dumps(GOOD).encode() + b" " * MOST_HEADER, b"12345678")}, "bytes"),
        ({"__tensor__": 1}, "__tensor__: Expected `bool`, got `int`"),
        ({"__tensor__": False}, "__tensor__: Invalid enum value"),
    ],
)
def test_a_wrong_envelope_is_one_line(change: dict[str, Any], says: str) -> None:
    value = {**msgpack.unpackb(pack(torch.zeros(2))), **change}
    for read in (
        lambda: unpack(msgpack.packb(value), Envelope, name="latents"),
        lambda: convert(value, Envelope, name="latents"),
    ):
        with pytest.raises(WireError, match=says) as error:
            read()
        assert str(error.value).startswith("latents")
    assert "\n" not in str(error.value)


def test_what_a_file_may_hold_besides_and_what_no_text_is() -> None:
    good = msgpack.unpackb(pack(torch.zeros(2)))
    described = {**good, "data": file({"__metadata__": {"format": "pt"}, **GOOD}, b"\0" * 8)}
    assert convert(described, Envelope).tensor.tolist() == [0, 0]
    for text in ("é" * 100, "?", "abc"):
        with pytest.raises(WireError, match=r"^data: Invalid base64 encoded string$"):
            unpack(json.dumps({**good, "data": text}).encode(), Envelope, json=True)


BINARY = (
    *(b"", b"\xc1", b"\x91", b"\xc0\xc0", b"\xa1\xff", b"\xc7\xff\xff\xff\xff", pickle.dumps({"a": 1})),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"),  # announce 2^32 items
    b"\xc6\xff\xff\xff\xff12",  # announces 4 GB
    b"\x91" * 10_000 + b"\xc0",  # deeper than torch.compile lets Python nest: it raises the limit from 1000 to 2000
    b"\x91" * 100_000 + b"\xc0",
)
TEXTS = (b"", b"{", b"[" * 100_000, b"[" * 7 + b"]" * 6, b"[01]", b"NaN", b"\xff", b'"\\ud800"')


def test_a_wrong_message_is_one_line() -> None:
    kinds: tuple[Any, Any] = (Any, list[Envelope])
    for data, kind, is_json in (*itertools.product(BINARY, kinds, [False]), *itertools.product(TEXTS, [Any], [True])):
        with pytest.raises(WireError) as error:
            unpack(data, kind, json=is_json)
        assert "\n" not in str(error.value)


def test_nothing_is_made_of_what_has_no_field() -> None:
    """A million lists take 70 times the bytes of their message, so parts that the schema does not know are skipped."""
    import tracemalloc

    value = msgpack.unpackb(pack(torch.zeros(2)))
    data = msgpack.packb([{**value, "unknown": [[]] * 1_000_000}])
    tracemalloc.start()
    (found,) = unpack(data, list[Envelope])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tensor.tolist() == [0, 0]
    assert peak < len(data)
