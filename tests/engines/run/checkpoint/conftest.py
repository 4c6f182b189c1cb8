"""Fixtures of the tests of checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fluvial.engines.engine.world import World


@pytest.fixture(scope="module")
def behind(one: World) -> World:
    """The world of this process for the thread that writes."""
    return one.background()


@pytest.fixture(params=["disk", "url"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """A folder for checkpoints: on a disk, and behind a URL."""
    if request.param == "disk":
        yield tmp_path / "checkpoints"
        return
    yield f"memory://{tmp_path.name}/checkpoints"
    MemoryFileSystem().rm("/", recursive=True)
