"""The real verl of one version, without its dependencies: its engine modules import with empty parent packages.

`load` installs the wheel in a folder of its own, `build/verl-VERSION`, once per clone. verl's own `__init__` wants Ray and
more, so the packages above the modules that are tested are stand-ins, which only know where their modules lie.
"""

import importlib.util
import sys
import types
from functools import cache
from typing import Any

import pytest
from helpers import wheels

VERSION = "0.9.1"
OTHER = "0.9.0"  # its FSDPEngineConfig lacks a field, as that of 0.10.0.dev
FOLDER = wheels.BUILD / f"verl-{VERSION}"
# Modules that configs name types of, and that want packages which are not here: the name of the type in each.
NAMED = {"verl.utils.profiler": "ProfilerConfig", "verl.workers.config.model": "HFModelConfig"}
PARENTS = ("verl", "verl.trainer", "verl.utils", "verl.workers", "verl.workers.config", "verl.workers.engine")


@cache
def load() -> Any:
    """Return verl's module `verl.workers.engine.base`; skip the test if the package index has no such wheel."""
    pytest.importorskip("tensordict")
    folder = wheels.install("verl", VERSION)
    sys.path.append(str(folder))  # for its metadata
    wheels.empty_packages(folder, PARENTS)
    for name, kind in NAMED.items():
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], kind, Any)
    sys.modules["verl.trainer.config"].__dict__["CheckpointConfig"] = part("verl.trainer.config.config").CheckpointConfig
    return part("verl.workers.engine.base")


def part(name: str) -> Any:
    return wheels.module(name)


def other_engine_config() -> Any:
    file = wheels.install("verl", OTHER) / "verl" / "workers" / "config" / "engine.py"
    spec: Any = importlib.util.spec_from_file_location("verl.workers.config.engine_of_another_version", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FSDPEngineConfig
