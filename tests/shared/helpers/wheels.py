"""Packages of the index without their dependencies: modules of a real wheel whose parent packages are empty."""

import ast
import importlib
import importlib.abc
import importlib.machinery
import os
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

BUILD = Path(__file__).parents[3] / "build"


@cache
def install(name: str, version: str, package: str | None = None) -> Path:
    """Return the folder `build/NAME-VERSION` with a wheel, installed once per clone; skip the test if the index has none.

    `package` is the wheel's package where it does not begin with the wheel's name.
    """
    folder = BUILD / f"{name}-{version}"
    if folder.exists():
        return folder
    draft = folder.with_name(f"{folder.name}-{os.getpid()}")
    _install_into(draft, folder.name, f"{name}=={version}")
    for other in draft.iterdir():  # a wheel may also hold packages named tests and scripts
        if not other.name.startswith((name, package or name)):
            shutil.rmtree(other)
    try:
        draft.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(draft)
    return folder


def install_all(name: str, requirements: Sequence[str]) -> Path:
    """Return the folder `build/NAME` with several wheels, without their dependencies; skip the test if one is missing."""
    folder = BUILD / name
    if not folder.exists():
        draft = folder.with_name(f"{name}-{os.getpid()}")
        _install_into(draft, name, "--no-build-isolation", *requirements)
        draft.rename(folder)
    return folder


def _install_into(folder: Path, name: str, *requirements: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-compile"]
    command = [*pip, "--target", str(folder), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"{name} cannot be installed: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not installed, with all their modules, as mock objects.

    Args:
        names: top-level packages.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = name.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return mock.MagicMock(name=spec.name, __spec__=spec, __path__=[])

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def empty_packages(folder: Path, names: Iterable[str]) -> None:
    """Put packages in `sys.modules` that know where their modules lie, and run nothing."""
    for name in names:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder / name.replace(".", "/"))]
        package = types.ModuleType(name)
        package.__spec__, package.__path__ = spec, spec.submodule_search_locations
        sys.modules[name] = package


def module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def definitions(file: Path, *names: str, **given: Any) -> dict[str, Any]:
    """Return functions, classes and constants of a Python file by name, without running the rest of the file.

    Args:
        file: file of a wheel.
        names: what is taken out of it, in the file's order.
        given: names that they use.
    """
    parsed = ast.parse(file.read_text(encoding="utf-8"))

    def is_named(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
        return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names

    found = ast.Module([node for node in parsed.body if is_named(node)], type_ignores=[])
    exec(compile(found, str(file), "exec"), given)
    return {name: given[name] for name in names}
