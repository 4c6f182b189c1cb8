"""verl's real modules, and an open process group."""

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import real_verl

from fluvial.engines.engine.world import World, init_world


@pytest.fixture(autouse=True, scope="module")
def base() -> Any:
    return real_verl.load()


@pytest.fixture(autouse=True)
def world() -> Iterator[World]:
    with init_world() as world:
        yield world
