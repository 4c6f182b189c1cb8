"""Pickles are read without running what they name."""

import itertools
import os
import pickle
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fluvial.engines.extensions.judges import formats
from fluvial.engines.extensions.judges.formats import ForbiddenPickleError, unpickle


class Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    data = pickle.dumps({"scores": [1.0], "more": Evil(tmp_path / "here")})
    with pytest.raises(ForbiddenPickleError, match=r"names pathlib.*, which is not plain data"):
        unpickle(data)
    assert not (tmp_path / "here").exists()
    pickle.loads(data)
    assert (tmp_path / "here").exists()  # the pickle was able to


def test_objects_are_no_plain_data() -> None:
    things: tuple[Any, ...] = os.system, subprocess.Popen, {1}, OrderedDict(), torch.zeros(1), np.zeros(2), object(), 1j
    for thing, protocol in itertools.product(things, (2, 3, 4, 5)):
        with pytest.raises(ForbiddenPickleError):
            unpickle(pickle.dumps([thing], protocol=protocol))


def test_numbers_of_numpy_are_numbers() -> None:
    made: tuple[Any, ...] = (np.float64(0.5), np.float32(2), np.float16(1), np.int64(-3), np.int32(7), np.bool_(True))
    for number, protocol in itertools.product(made, (3, 4, 5)):
        first, second = unpickle(pickle.dumps([number, number + number], protocol=protocol))
        assert (first, second) == (number, number + number)
        assert type(first) in (float, int, bool)


def test_damaged_pickles_are_one_error() -> None:
    for data in (
        *(b"", b".", b"\x80\x04.", b"\x80\x04(((((t.", b"cos\nsystem\n(S'id'\ntR."),
        b"\x80\x04]\x94(K\x01e",  # no end
        b"\x80\x04r\xff\xff\xff\xff.",  # a place in memory that would take gigabytes
        b"\x80\x04B\xff\xff\xff\x7f.",  # two gigabytes of bytes, which do not come
        b"\x80\x04K\x01K\x02.",  # two values
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x04P1\n.",  # a persistent id
    ):
        with pytest.raises(ForbiddenPickleError):
            unpickle(data)


@pytest.mark.parametrize("one", [b"(K\x01|t", b"]|a", b"(|t"])
def test_the_cost_of_a_pickle_is_linear_in_its_depth(one: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested tuples and lists: four times the depth is about four times the text that the check of the stack prints."""
    printed: list[int] = []
    monkeypatch.setattr(formats.NullFile, "write", lambda self, text: printed.append(len(text)))
    start, end = one.split(b"|")

    def cost(depth: int) -> int:
        printed.clear()
        unpickle(b"\x80\x04" + start * depth + (end * (depth - 1) if start == b"]" else end * depth) + b".")
        return sum(printed)

    assert 3.5 < cost(4000) / cost(1000) < 4.5


def test_references_are_kept() -> None:
    """A list that stands twice is one list, and one that holds itself ends."""
    inner = [1]
    found = unpickle(pickle.dumps([inner, inner]))
    assert found[0] is found[1]
    inner.append(inner)  # type: ignore[arg-type]
    assert unpickle(pickle.dumps(inner))[0] == 1
