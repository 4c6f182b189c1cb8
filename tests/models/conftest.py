"""Tiny pipelines for the tests of models: each is built and saved once per session; no test may write to its folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_replayed
from tiny_pipelines import ROWS, save

from fluvial.engines.engine.world import World, init_world


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """Return the world of this process."""
    with init_world() as world:
        yield world


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of the pipelines with an adapter, by row of `tiny_pipelines`."""
    root = tmp_path_factory.mktemp("adapted")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save(ROWS[name], root / name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of the pipelines without an adapter, by row of `tiny_replayed`."""
    root = tmp_path_factory.mktemp("replayed")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            tiny_replayed.load(name, root / name)
        return root / name

    return folder
