"""The session's run-time type checks are really there."""

import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

import fluvial.core
from fluvial.core.flow_matching import velocity_error
from fluvial.core.transitions import ode

MODULES = sorted(path.stem for path in Path(fluvial.core.__path__[0]).glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_instrumented(name: str) -> None:
    # The hook finds modules through PathFinder only; an editable install that answers first would bypass it silently.
    module = sys.modules[f"fluvial.core.{name}"]
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "_JaxtypingLoader"


def test_the_hook_catches_shapes_and_types() -> None:
    with pytest.raises(TypeCheckError, match="velocity_error"):
        velocity_error(torch.zeros(3, 2), torch.zeros(4, 2))
    with pytest.raises(TypeCheckError, match="sigma"):
        ode(torch.tensor([1, 2]), 0.5)
    assert ode(1, 0).b == -1
