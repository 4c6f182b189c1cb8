"""Code of a clone: import of its modules, and compilation of a function or a loop of one of its scripts, unchanged."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fluvial.engines.errors import RunError


class _StandIn(ModuleType):
    """Stand-in for a module that files of a clone import and the work does not use."""

    def __getattr__(self, name: str) -> Any:
        """Return an empty class, which may be a base class or an annotation."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(MetaPathFinder, Loader):
    """Finder of stand-ins for modules, and of packages of a clone without running their `__init__`, which imports too much.

    Args:
        folder: folder with the packages of the clone.
        stand_ins: modules and packages to replace; a package with all its modules.
        contents: attributes of stand-ins, by the module's name; every other attribute is an empty class.
        bare: names of the packages whose `__init__` is not run.
    """

    def __init__(
        self, folder: Path, stand_ins: Sequence[str], contents: Mapping[str, Mapping[str, Any]], bare: Sequence[str] = ()
    ) -> None:
        self.folder, self.stand_ins, self.contents, self.bare = folder, stand_ins, contents, bare

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the specification of a stand-in or a bare package; None for other modules."""
        spec = ModuleSpec(name, self, is_package=True)
        if any(name == one or name.startswith(f"{one}.") for one in self.stand_ins):
            return spec
        spec.submodule_search_locations = [str(self.folder.joinpath(*name.split(".")))]
        return spec if name in self.bare else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create a stand-in; None, for a bare package, is Python's default module."""
        return None if spec.name in self.bare else _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set the contents of a stand-in; no code of a bare package runs."""
        vars(module).update(self.contents.get(module.__name__, {}))


@contextmanager
def make_importable(
    folder: Path,
    *,
    stand_ins: Sequence[str] = (),
    contents: Mapping[str, Mapping[str, Any]] | None = None,
    replaced: Sequence[str] = (),
    bare: Sequence[str] = (),
) -> Iterator[None]:
    """Make the modules of a folder importable inside the context.

    Args:
        folder: folder of a clone with its packages.
        stand_ins: packages that its files import and the work does not use; those that are not installed are replaced.
        contents: attributes of stand-ins, by the module's name; every other attribute is an empty class.
        replaced: modules of the clone itself to replace.
        bare: packages of the clone whose `__init__` is not run.
    """
    modules = contents or {}
    first = _Finder(folder, replaced, modules, bare)
    last = _Finder(folder, stand_ins, modules)  # only for modules that are not installed
    sys.path.insert(0, str(folder))
    sys.meta_path[:] = [first, *sys.meta_path, last]
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in (first, last)]
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]


def fill_object(kind: Any, **attributes: Any) -> Any:
    """Create an object of a class with these attributes, without calling its constructor."""
    instance = kind.__new__(kind)
    for name, value in attributes.items():
        setattr(instance, name, value)
    return instance


class CloneSettings(dict[str, Any]):
    """Settings that can be read as attributes and as a dictionary, like the projects' classes of arguments."""

    def __getattr__(self, name: str) -> Any:
        """Return a setting; AttributeError if it is missing."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def compile_function(path: Path, name: str, scope: dict[str, Any]) -> Any:
    """Compile a function of a script, unchanged, without running the rest of the script.

    Args:
        path: the script.
        name: name of a function at its top level.
        scope: global names of the function.

    Raises:
        RunError: the script has no such function.
    """
    _execute(path, [_find_function(path, name)], scope)
    return scope[name]


def compile_loop(
    path: Path, name: str, target: str, scope: dict[str, Any], *, arguments: Sequence[str]
) -> Callable[..., None]:
    """Compile a `for` loop of a function, unchanged, as the body of a new function.

    Args:
        path: the script.
        name: name of the function with the loop.
        target: name of the loop's variable.
        scope: global names of the loop.
        arguments: names that the loop reads and assigns: arguments of the returned function.

    Raises:
        RunError: the script has no such function, or the function no such loop.
    """
    loops = [
        node
        for node in ast.walk(_find_function(path, name))
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and node.target.id == target
    ]
    if len(loops) != 1:
        raise RunError(f"{path}: {name} has {len(loops)} loops over {target}, expected 1: use the commit of the results")
    shell = ast.parse(f"def looped({', '.join(arguments)}):\n    pass").body[0]
    assert isinstance(shell, ast.FunctionDef)
    shell.body = [loops[0]]
    _execute(path, [shell], scope)
    looped: Callable[..., None] = scope["looped"]
    return looped


def read_commit(folder: Path) -> str:
    """Read the short commit that is checked out in a folder; "unknown" if the folder is not the top of a checkout."""
    if not (folder / ".git").exists():
        return "unknown"
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, encoding="utf-8"
    )
    return done.stdout.strip() or "unknown"


def _find_function(path: Path, name: str) -> ast.FunctionDef:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}: expected a clone of the project") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise RunError(f"{path} has no function {name}: use the commit of the results")


def _execute(path: Path, body: list[ast.stmt], scope: dict[str, Any]) -> None:
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), str(path), "exec"), scope)
