"""The layout of the packages: floors whose imports never point up, no circles, small files in small folders."""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "kernels", "models", "engines", "bench", "tests/properties")
MOST_FILES, MOST_LINES = 20, 600
RUNS = ("run", "Popen", "check_output")  # functions of subprocess with an argument text
MORE_FILES = {"core": 24, "engines/methods": 33, "engines/cli": 21}  # one file per formula, per method, and per command
EXTENSIONS = sorted(path.name for path in (ROOT / "engines" / "extensions").iterdir() if (path / "__init__.py").is_file())
SPINE_OF_ENGINES = ("engine", "sampling", "methods", "scoring", "data", "run", "export")
SPINE = ("core", "kernels", "models", *(f"engines.{name}" for name in SPINE_OF_ENGINES))
# Lowest first; a package imports from floors below its own. Any other module is on the last floor.
FLOORS = (
    ("core",),
    ("kernels", "models"),
    (
        "engines.errors",
        "engines.attention",
        "engines.heads",
        "engines.offload",
        "engines.files",
        "engines.rendezvous",
        "engines.plugins",
        "engines.choices",
        "engines.streams",
        "engines.waits",
        "engines.named_models",
        "engines.run.log",
    ),
    *(("engines.engine.world",), ("engines.gathered",), ("engines.engine",)),
    (
        "engines.run.checkpoint",
        "engines.data",
        "engines.run.passes.micro_batch",
        "engines.run.passes.storages",
    ),
    ("engines.scoring", "engines.export"),
    ("engines.sampling",),
    # What a method sees.
    *((f"engines.run.{name}",) for name in ("declared", "method", "jobs.settings", "evaluation.config", "config")),
    *((f"engines.run.{name}",) for name in ("networks", "jobs.base", "sampler", "rollouts", "run")),
    ("engines.methods", "engines.run.evaluation"),
    ("engines.run.process",),
    ("engines.run",),
    tuple(f"engines.extensions{name}" for name in ("", *(f".{name}" for name in EXTENSIONS))),
    ("bench.trial",),
    ("engines.cli", "engines"),
    ("bench", "testing"),
)


@cache
def modules() -> dict[str, Path]:
    """Return every module of the packages by its name without `fluvial.`."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        place = path.relative_to(ROOT).as_posix().replace("tests/properties/", "testing/").removesuffix(".py")
        found[place.replace("/", ".").removesuffix(".__init__")] = path
    return found


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the imports, calls and classes of a file, wherever in it they are."""
    wanted = ast.Import | ast.ImportFrom | ast.Call | ast.ClassDef
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, wanted)]


@cache
def package(name: str) -> tuple[str, int]:
    """Return the package of the table that a module is, or lies in, and the number of its floor."""
    found = [
        (package, number)
        for number, packages in enumerate(FLOORS)
        for package in packages
        if name == package or name.startswith(f"{package}.")
    ]
    return max(found, key=lambda pair: len(pair[0])) if found else ("", len(FLOORS))


def imports(path: Path, name: str) -> Iterator[str]:
    """Yield the modules of fluvial that a file imports, those inside functions and for types included."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for imported in names:
            if imported.startswith("fluvial."):
                target = imported.removeprefix("fluvial.")
                while target not in modules():  # a name in a module
                    target = target.rpartition(".")[0]
                if target != name:
                    yield target


@cache
def graph() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {name: {*imports(path, name)} for name, path in modules().items()}


def upward() -> list[str]:
    """Return the imports that point up, lazy ones included."""
    return [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in targets
        if package(target)[1] > package(name)[1]
    ]


def test_no_import_points_up() -> None:
    """Not even inside a function."""
    assert upward() == []


def test_the_spine_imports_no_extension() -> None:
    """Neither inside a function nor for a type: `engines/plugins.py` looks extensions up."""
    spine = [name for name in modules() if f"{name}.".startswith(tuple(f"{each}." for each in SPINE))]
    assert len(spine) > 200
    assert [(name, target) for name in spine for target in graph()[name] if target.startswith("engines.extensions")] == []


def test_kernels_and_models_do_not_import_each_other() -> None:
    """They are of one layer, and know nothing of each other."""
    pairs = [(name, target) for name, targets in graph().items() for target in targets]
    assert [pair for pair in pairs if {name.split(".")[0] for name in pair} == {"kernels", "models"}] == []


def circle(links: dict[str, set[str]]) -> list[str]:
    """Return names that lead to each other in a circle, the first of them last again; empty if there are none."""
    try:
        TopologicalSorter(links).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Whether directly or through others, inside a function or for a type."""
    assert circle(graph()) == []


def test_packages_of_a_floor_do_not_import_each_other_in_a_circle() -> None:
    """One may use another; then that one does not know it."""
    links: dict[str, set[str]] = {}
    for name, targets in graph().items():
        known = {package(target)[0] for target in targets}
        links.setdefault(package(name)[0], set()).update(known - {package(name)[0]})
    assert circle(links) == []


def test_folders_are_small() -> None:
    """At most 20 modules in a folder, `__init__.py` and `__main__.py` not counted."""
    folders = {path.parent for path in modules().values()}
    counts = {str(folder.relative_to(ROOT)): len([*folder.glob("[!_]*.py")]) for folder in folders}
    assert {name: count for name, count in counts.items() if count > MORE_FILES.get(name, MOST_FILES)} == {}


def test_every_folder_is_packaged() -> None:
    """The wheel holds the folders that pyproject.toml lists."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in modules().values()}
    names = {folder.replace("tests/properties", "testing").replace("/", ".") for folder in folders}
    assert sorted(listed) == sorted(f"fluvial.{name}" for name in names)


def too_long() -> dict[str, int]:
    """Return the files of code with too many lines, the kernels aside."""
    paths = [path for path in modules().values() if not path.is_relative_to(ROOT / "kernels")]
    counts = {path: len(path.read_text().splitlines()) for path in paths}
    return {str(path.relative_to(ROOT)): count for path, count in counts.items() if count > MOST_LINES}


def test_files_are_short() -> None:
    """At most 600 lines, the kernels aside."""
    assert too_long() == {}


def without_encoding(path: Path) -> list[ast.Call]:
    """Return the calls of a file that open a text in the locale's encoding."""
    found = []
    for node in nodes(path):
        if not isinstance(node, ast.Call) or any(each.arg in ("encoding", None) for each in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_method = isinstance(node.func, ast.Attribute)
        modes = [
            each.value for each in (*node.args, *(key.value for key in node.keywords)) if isinstance(each, ast.Constant)
        ]
        is_text = any(isinstance(mode, str) and mode and {*mode} <= {*"rwxat+"} for mode in modes)
        if (
            (name in ("read_text", "write_text") and is_method)
            or (name == "open" and (is_text or not (node.args or modes[1:])))
            or (name == "open" and not is_method and len(node.args) == 1)
            or (name in ("fdopen", "NamedTemporaryFile", "TextIOWrapper") and is_text)
            or any(each.arg in ("text", "universal_newlines") and each.value for each in node.keywords if name in RUNS)
        ):
            found.append(node)
    return found


def test_texts_are_opened_in_utf_8() -> None:
    """Whatever the locale of the machine: what one writes, the other reads."""
    found = {f"{path}:{node.lineno}" for path in modules().values() for node in without_encoding(path)}
    assert found == set()


def objectives() -> set[str]:
    """Return the names of the classes that engines.methods defines."""
    return {
        node.name
        for name, path in modules().items()
        if name.startswith("engines.methods")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    }


def kinds() -> list[str]:
    """Return the places outside engines.methods that ask with isinstance which objective it is."""
    known, found = objectives(), []
    for name, path in modules().items():
        if name.startswith("engines.methods"):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                named = {
                    part.id if isinstance(part, ast.Name) else getattr(part, "attr", "") for part in ast.walk(node.args[1])
                }
                found += [f"{name}:{node.lineno}: {ast.unparse(node)}"] * bool(named & known)
    return found


def test_nobody_asks_which_objective_it_is() -> None:
    """What depends on the objective, an objective says of itself."""
    assert {"Nft", "Dpo"} <= objectives()
    assert kinds() == []


if __name__ == "__main__":  # the offenders, one per line
    print(*upward(), *(f"{path}: {count} lines" for path, count in too_long().items()), *kinds(), sep="\n")
