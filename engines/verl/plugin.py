"""The entry point of the group `verl.plugins`: registers backend "fluvial" in verl's `EngineRegistry`.

verl imports this module when it is imported itself, and logs what that raises at the level debug alone. So nothing is
refused here: an engine says what is wrong when it is made.
"""

import importlib.util
from importlib.metadata import version
from typing import Any

from fluvial.engines.errors import UsageError
from fluvial.engines.verl.algorithms import ALGORITHMS
from fluvial.engines.verl.engine import VerlEngine

BACKEND = "fluvial"
VERSIONS = ("0.9",)  # of verl that are supported; tests run against 0.9.1


def register() -> dict[str, Any]:
    """Register an engine for each model type of diffusion models, and return the classes by model type."""
    from verl.utils.py_functional import append_to_dict
    from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

    classes: dict[str, Any] = {}
    for algorithm in ALGORITHMS:

        class FluvialEngine(VerlEngine, BaseEngine):
            """fluvial's engine as one of verl's."""

            context = BaseEngineCtx
            append = append_to_dict

            def __init__(self, *args: Any, **configs: Any) -> None:
                found = version("verl")
                if ".".join(found.split(".")[:2]) not in VERSIONS:
                    raise UsageError(f"verl is {found}, and this plug-in supports {', '.join(f'{v}.*' for v in VERSIONS)}")
                super().__init__(*args, **configs)

        FluvialEngine.algorithm = algorithm
        FluvialEngine.__qualname__ = FluvialEngine.__name__ = f"FluvialEngine_{algorithm.name}"
        classes[algorithm.name] = EngineRegistry.register(algorithm.name, BACKEND, device=["cuda", "cpu"])(FluvialEngine)
    return classes


if importlib.util.find_spec("verl") is not None:
    ENGINES = register()
