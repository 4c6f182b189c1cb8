"""Modules of packages that have no CPU wheel: whatever is asked of them is an empty class, and nothing of them is called."""

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

VERSION = "0.27.0"  # of vllm and vllm-omni, which verl-omni a1139ba names


class Absent(type):
    """The type of empty classes: attributes of theirs are empty classes, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, empty(name))
        return cls.__dict__[name]


def empty(name: str) -> Any:
    """Return an empty class: an object of it keeps the arguments that have names, and decorates nothing."""

    def keep(self: Any, *_: Any, **named: Any) -> None:
        vars(self).update(named)

    return Absent(name, (), {"__init__": keep, "__call__": lambda self, decorated=None, *_, **__: decorated})


class Modules:
    """Finds the modules of one absent package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        ours = name.split(".")[0] == self.package
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        give(module)


def give(module: types.ModuleType) -> None:
    """Let a module have any attribute."""

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = empty(name)
        setattr(module, name, made)
        return made

    module.__dict__.update(__getattr__=attribute, __version__=VERSION)


def stand_in(package: str) -> None:
    """Let a package that is being imported have any module and any attribute."""
    sys.meta_path.append(Modules(package))
    give(sys.modules[package])
