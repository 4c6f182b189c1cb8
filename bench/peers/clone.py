"""Runs code of a clone: imports a module from it, or compiles a function or a loop of one of its scripts as it stands."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fluvial.engines.errors import RunError


class _StandIn(ModuleType):
    """A module that is imported at the top of a file and not used by what runs here."""

    def __getattr__(self, name: str) -> Any:
        """Return an empty class, which may be a base class or an annotation."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    """Finds stand-ins for packages that are not installed.

    Args:
        packages: names of the packages.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the module's specification if it is in one of the packages."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in is empty."""


@contextmanager
def importable(folder: Path, *, stand_ins: Sequence[str] = ()) -> Iterator[None]:
    """Make the modules of a folder importable inside the context.

    Args:
        folder: folder of a clone that its packages lie in.
        stand_ins: packages that its files import and the work does not use; those that are not installed are replaced.
    """
    finder = _StandIns(stand_ins)
    sys.path.insert(0, str(folder))
    sys.meta_path.append(finder)  # the last one is asked only for what is not installed
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]


def function(path: Path, name: str, scope: dict[str, Any]) -> Any:
    """Return a function of a script, compiled as it stands, without running the rest of the script.

    Args:
        path: the script.
        name: name of a function at its top level.
        scope: names that the function finds outside itself.

    Raises:
        RunError: the script has no such function.
    """
    _run(path, [_top(path, name)], scope)
    return scope[name]


def loop(path: Path, name: str, target: str, scope: dict[str, Any], *, arguments: Sequence[str]) -> Callable[..., None]:
    """Return a `for` loop of a function, compiled as it stands as the body of a function of its own.

    Args:
        path: the script.
        name: name of the function that holds the loop.
        target: name of the loop's variable.
        scope: names that the loop finds outside itself.
        arguments: names that the loop assigns, and finds with a value: arguments of the returned function.

    Raises:
        RunError: the script has no such function, or this no such loop.
    """
    loops = [
        node
        for node in ast.walk(_top(path, name))
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and node.target.id == target
    ]
    if len(loops) != 1:
        raise RunError(f"{path}: {name} has {len(loops)} loops over {target}, expected 1: use the commit of the results")
    shell = ast.parse(f"def looped({', '.join(arguments)}):\n    pass").body[0]
    assert isinstance(shell, ast.FunctionDef)
    shell.body = [loops[0]]
    _run(path, [shell], scope)
    found: Callable[..., None] = scope["looped"]
    return found


def commit(folder: Path) -> str:
    """Return the commit that is checked out in a folder, short; "unknown" if the folder is not the top of a checkout."""
    if not (folder / ".git").exists():
        return "unknown"
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _top(path: Path, name: str) -> ast.FunctionDef:
    try:
        tree = ast.parse(path.read_text(), str(path))
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}: expected a clone of the project") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise RunError(f"{path} has no function {name}: use the commit of the results")


def _run(path: Path, body: list[ast.stmt], scope: dict[str, Any]) -> None:
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), str(path), "exec"), scope)
