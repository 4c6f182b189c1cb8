"""What the engine's tests share."""

from collections.abc import Iterator

import pytest

from fluvial.engines.engine.world import World, init_world


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """The world of this process."""
    with init_world() as world:
        yield world
