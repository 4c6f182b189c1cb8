"""Tiny pipelines for the tests of models: each is built and saved once per session; no test may write to its folder."""

from pathlib import Path

import pytest
from helpers import short_runs, tiny_replayed
from helpers.marks import Folders
from helpers.tiny_pipelines import ROWS, save


@pytest.fixture(autouse=True, scope="session")
def short() -> None:
    """Leave out the charts and most of the probe of runs."""
    short_runs.shorten_runs()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("adapted")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save(ROWS[name], root / name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("replayed")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            tiny_replayed.load(name, root / name)
        return root / name

    return folder
