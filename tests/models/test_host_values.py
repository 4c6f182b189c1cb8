"""Values that the host knows of a device's tensors: kept through moves, forgotten after a write.

In these tests tensors of 32-bit integers stand for those of a device.
"""

import gc

import pytest
import torch
from helpers.marks import Patch
from torch import Tensor

from fluvial.models import host_values
from fluvial.models.host_values import compute_known, join, read, recall, remember, select_rows


@pytest.fixture(autouse=True)
def device(monkeypatch: Patch) -> None:
    monkeypatch.setattr(host_values, "_on_host", lambda tensor: tensor.dtype != torch.int32)


def on_device(*values: int) -> Tensor:
    return remember(torch.tensor(values, dtype=torch.int32), torch.tensor(values))


def test_what_is_known_of_the_host_and_read_once() -> None:
    tensor = torch.arange(3)
    assert recall(tensor) is tensor
    assert read(tensor) is tensor
    unknown = torch.arange(4, dtype=torch.int32)
    assert recall(unknown) is None
    assert recall(select_rows(unknown, slice(2))) is None
    assert recall(join(on_device(1), unknown)) is None
    tensor = torch.arange(4, dtype=torch.int32)
    first = read(tensor)
    assert read(tensor) is first
    assert recall(select_rows(tensor, slice(2))) is not None


def test_rows_joined_and_repeated_tensors_are_known() -> None:
    table, index = on_device(5, 6, 7, 8), on_device(2, 0)
    for out in (
        select_rows(table, slice(1, 3)),
        select_rows(table, index.long()),
        join(table, index),
        compute_known(lambda values: values.repeat(2), table),
    ):
        host = recall(out)
        assert out.dtype == torch.int32
        assert host is not None
        assert host.dtype == torch.int64
        assert host.tolist() == out.tolist()


@pytest.mark.parametrize("which", ["device", "host"])
def test_a_write_forgets_the_values(which: str) -> None:
    host = torch.arange(4)
    tensor = remember(torch.arange(4, dtype=torch.int32), host)
    assert recall(tensor) is not None
    (tensor if which == "device" else host).add_(1)
    assert recall(tensor) is None


def test_large_and_freed_tensors_are_not_kept() -> None:
    large = torch.zeros(host_values.MOST + 1, dtype=torch.int32)
    assert recall(remember(large, large.long())) is None
    before = len(host_values._kept)
    tensor = on_device(1)
    assert len(host_values._kept) == before + 1
    del tensor
    gc.collect()
    assert len(host_values._kept) == before
