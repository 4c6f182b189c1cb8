"""Memory that a server frees is used again: page faults are counted."""

import os

import launch
import pytest

from fluvial.engines.serve import heap


def test_later_batches_take_their_memory_without_page_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default there are thousands of them per batch."""
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    assert launch.call("heaps:faults", True) < 1000
    assert launch.call("heaps:faults", False) > 10_000


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_settings_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: pytest.fail("asked"))
    heap.keep_freed_memory()
