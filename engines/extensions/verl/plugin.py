"""The entry point of the group `verl.plugins`: registers backend "fluvial" in verl's `EngineRegistry`.

verl imports this module when it is imported itself, and logs what that raises at the level debug alone. So nothing is
refused here: an engine says what is wrong when it is made.
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
VENDOR = "fluvial"  # with VERL_ENGINE_VENDOR=fluvial verl takes these engines for its own strategies too
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
            hooks = adapter

            def __init__(self, *args: Any, **configs: Any) -> None:
                if (device := get_device_name()) not in DEVICES:
                    raise UsageError(
                        f"verl found the device {device!r}, and fluvial computes on {' and '.join(DEVICES)} alone"
                    )
                if wrong := differences(BaseEngine):
                    raise UsageError(f"verl {version('verl')} is not supported, its engines differ: {'; '.join(wrong)}")
                super().__init__(*args, **configs)

        FluvialEngine.algorithm = algorithm
        FluvialEngine.__qualname__ = FluvialEngine.__name__ = f"FluvialEngine_{algorithm.name}"
        devices = [*DEVICES, "npu"]
        EngineRegistry.register(algorithm.name, STRATEGIES, device=devices, vendor=VENDOR)(FluvialEngine)
        classes[algorithm.name] = EngineRegistry.register(algorithm.name, BACKEND, device=devices)(FluvialEngine)
    return classes


def differences(base: type) -> list[str]:
    """Return in what verl's `BaseEngine` differs from the one that `VerlEngine` implements, one phrase per method.

    A method of `VerlEngine` accepts the arguments of verl's of the same name, and no abstract one is missing.
    """
    differences = []
    for name, method in vars(base).items():
        ours = getattr(VerlEngine, name, None)
        if ours is None and getattr(method, "__isabstractmethod__", False):
            differences.append(f"{name} is new")
        if name.startswith("_") or ours is None or not callable(method):
            continue
        arguments = [p.name for p in _parameters(method) if p.kind is not p.VAR_KEYWORD]
        if rest := [p.name for p in _parameters(ours) if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]:
            differences += [f"{name} has no {each}" for each in rest if each not in arguments]
        known = {p.name for p in _parameters(ours)}
        accepts_any = any(p.kind is p.VAR_KEYWORD for p in _parameters(ours))
        differences += [f"{name} has {each}" for each in arguments if each not in known and not accepts_any]
    return differences


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    return [*inspect.signature(method).parameters.values()][1:]


def adapter(model: Any) -> Any:
    """Return verl-omni's adapter class for a model config; None without verl-omni, or if it has none."""
    if importlib.util.find_spec("verl_omni") is None:
        return None
    base = importlib.import_module("verl_omni.pipelines.model_base").DiffusionModelBase
    return base.peek_class(model.architecture, model.algorithm)


if importlib.util.find_spec("verl") is not None:
    ENGINES = register()
