"""Entry point of the group `verl.plugins`, which registers backend "fluvial" in verl's `EngineRegistry`.

`import verl` imports this module, and logs its exceptions only at level debug. So problems are raised when an engine is
constructed, not here.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.verl.algorithms import ALGORITHMS
from fluvial.engines.extensions.verl.engine import VerlEngine

BACKEND = "fluvial"
VENDOR = "fluvial"  # with VERL_ENGINE_VENDOR=fluvial, verl uses these engines for its own strategies too
STRATEGIES = ["fsdp", "fsdp2"]
DEVICES = ("cuda", "cpu")


def register() -> dict[str, Any]:
    """Register an engine for each model type of diffusion models, and return the classes by model type."""
    from verl.utils.device import get_device_name
    from verl.utils.py_functional import append_to_dict
    from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

    classes: dict[str, Any] = {}
    for algorithm in ALGORITHMS:

        class FluvialEngine(VerlEngine, BaseEngine):
            """fluvial's engine as one of verl's."""

            context = BaseEngineCtx
            append = append_to_dict
            hooks = find_adapter_class

            def __init__(self, *args: Any, **configs: Any) -> None:
                if (device := get_device_name()) not in DEVICES:
                    raise UsageError(f"verl found the device {device!r}, and fluvial supports only {' and '.join(DEVICES)}")
                if differences := find_differences(BaseEngine):
                    raise UsageError(
                        f"verl {version('verl')} is not supported, its engines differ: {'; '.join(differences)}"
                    )
                super().__init__(*args, **configs)

        FluvialEngine.algorithm = algorithm
        FluvialEngine.__qualname__ = FluvialEngine.__name__ = f"FluvialEngine_{algorithm.name}"
        devices = [*DEVICES, "npu"]
        EngineRegistry.register(algorithm.name, STRATEGIES, device=devices, vendor=VENDOR)(FluvialEngine)
        classes[algorithm.name] = EngineRegistry.register(algorithm.name, BACKEND, device=devices)(FluvialEngine)
    return classes


def find_differences(base: type) -> list[str]:
    """List the differences of verl's `BaseEngine` that `VerlEngine` cannot handle, one phrase each.

    `VerlEngine` must accept the arguments of each method of the same name, and implement every abstract method.
    """
    differences = []
    for name, method in vars(base).items():
        ours = getattr(VerlEngine, name, None)
        if ours is None and getattr(method, "__isabstractmethod__", False):
            differences.append(f"{name} is new")
        if name.startswith("_") or ours is None or not callable(method):
            continue
        arguments = [p.name for p in _list_parameters(method) if p.kind is not p.VAR_KEYWORD]
        parameters = _list_parameters(ours)
        required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        differences += [f"{name} has no {each}" for each in required if each not in arguments]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            known = {p.name for p in parameters}
            differences += [f"{name} has {each}" for each in arguments if each not in known]
    return differences


def _list_parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the parameters of a method without self."""
    return [*inspect.signature(method).parameters.values()][1:]


def find_adapter_class(model: Any) -> Any:
    """Return verl-omni's adapter class for a model config; None if there is none, or verl-omni is not installed."""
    if importlib.util.find_spec("verl_omni") is None:
        return None
    base = importlib.import_module("verl_omni.pipelines.model_base").DiffusionModelBase
    return base.peek_class(model.architecture, model.algorithm)


if importlib.util.find_spec("verl") is not None:
    ENGINES = register()
