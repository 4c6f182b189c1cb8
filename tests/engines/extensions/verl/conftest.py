"""verl's real modules, an open process group, and tiny pipelines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import real_verl
import tiny_pipelines
import verl_runs

from fluvial.engines.engine.world import World, init_world


@pytest.fixture(autouse=True, scope="module")
def base() -> Any:
    """Return verl's own module of engines, or skip."""
    return real_verl.load()


@pytest.fixture
def world() -> Iterator[World]:
    """Open a process group, as a worker of verl has."""
    with init_world() as world:
        yield world


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save the tiny pipelines."""
    root = tmp_path_factory.mktemp("pipelines")
    return {name: tiny_pipelines.save(tiny_pipelines.ROWS[name], root / name) for name in verl_runs.CLASSES}
