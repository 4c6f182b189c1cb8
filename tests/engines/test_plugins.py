"""Names of user-defined objects: each is found, and each fault is one line that says what to mend. Extensions are found."""

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from helpers import tiny_jobs as tiny

from fluvial.engines import plugins
from fluvial.engines.errors import UsageError
from fluvial.engines.run import train
from fluvial.engines.run.log.records import read_records

ROOT = Path(__file__).parents[2]

SOURCE = """
import dataclasses

class Holder:
    inner = 7

def reward(images, prompts):
    return images

def three(images, prompts, more):
    return images

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """User-defined modules, in a folder that Python searches."""
    (tmp_path / "own_plugin.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("raise RuntimeError('no\\nlicence')")
    (tmp_path / "own_exits.py").write_text("import sys\nsys.exit('goodbye')")
    (tmp_path / "own_needs.py").write_text("import not_installed_package")
    (tmp_path / "own_syntax.py").write_text("def f(:")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def test_a_name_of_the_table_comes_first() -> None:
    """The table's object is returned as it is."""
    assert plugins.load("one", "things", table={"one": 1}) == 1


def test_an_attribute_of_a_module() -> None:
    """Also one inside of a class."""
    assert plugins.load("own_plugin:number", "things") == 3
    assert plugins.load("own_plugin:Holder.inner", "things", table={"one": 1}) == 7


def test_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's name is listed after the built-in ones and loaded; a broken one names its target."""
    points = {
        "fluvial.things": [
            EntryPoint("mine", "own_plugin:number", "fluvial.things"),
            EntryPoint("bad", "own_broken:number", "fluvial.things"),
        ]
    }
    monkeypatch.setattr(plugins, "entry_points", lambda group: points.get(group, []))
    assert plugins.load("mine", "things", table={"one": 1}) == 3
    assert plugins.load("mine", "things", table={"mine": 1}) == 1
    assert plugins.list_names("things", {"one": 1}) == ["one", "mine", "bad"]
    with pytest.raises(UsageError, match=r"thing 'bad' \(entry point own_broken:number\): importing own_broken raised"):
        plugins.load("bad", "things")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("clippd", r"objective is 'clippd', expected one of clipped, nft, or module:name; did you mean 'clipped'\?"),
        ("xyz", "objective is 'xyz', expected one of clipped, nft, or module:name$"),
        ("own_missing:f", "'own_missing:f': there is no module 'own_missing', expected a file in the working folder"),
        ("own_plugin.deep:f", "there is no module 'own_plugin.deep'"),
        ("own_needs:f", "importing own_needs raised ModuleNotFoundError: No module named 'not_installed_package'"),
        ("own_broken:f", "importing own_broken raised RuntimeError: no licence"),
        ("own_exits:f", "importing own_exits raised SystemExit: goodbye"),
        ("own_syntax:f", "importing own_syntax raised SyntaxError"),
        ("own_plugin:rewrd", r"own_plugin has no 'rewrd'; did you mean 'reward'\?"),
        ("own_plugin:", "expected module:name"),
        (":f", "expected module:name"),
    ],
)
def test_what_is_not_there(spec: str, words: str) -> None:
    """One line that says what was expected."""
    with pytest.raises(UsageError, match=words) as refused:
        plugins.load(spec, "objectives", table={"clipped": 1, "nft": 2})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", r"reward 'own_plugin:number' is of type int, expected a function of \(images, prompts\)"),
        ("Holder", "is a class, expected a function"),
        ("three", r"has the signature \(images, prompts, more\), expected .*: missing a required argument: 'more'"),
    ],
)
def test_a_check_of_what_is_found(name: str, words: str) -> None:
    """A wrong kind or signature is said before anything is called."""
    check = plugins.make_call_check("images", "prompts")
    assert plugins.load("own_plugin:reward", "rewards", check)
    with pytest.raises(UsageError, match=words):
        plugins.load(f"own_plugin:{name}", "rewards", check)


def test_where_an_object_comes_from() -> None:
    """What is at the top of a module can be loaded again by its name; what is not, is refused."""
    holder = plugins.load("own_plugin:Holder", "things")
    assert plugins.spec_of(holder) == "own_plugin:Holder"
    assert plugins.load(plugins.spec_of(holder), "things") is holder

    def local() -> None: ...

    main = type("Main", (), {"__module__": "__main__"})
    for thing in (local, main, lambda: None):
        with pytest.raises(UsageError, match=r"thing '.*' is defined in.*: move it to the top of a module"):
            plugins.load(plugins.spec_of(thing), "things")


def asked() -> set[tuple[str, str]]:
    """Return the groups that are looked up without a table of built-in objects, each with the name, empty if it varies."""
    found = set()
    paths = [path for path in (ROOT / "engines").rglob("*.py") if "extensions" not in path.parts]
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if not isinstance(node, ast.Call) or any(keyword.arg == "table" for keyword in node.keywords):
            continue
        if ast.unparse(node.func) in ("plugins.load", "plugins.load_all"):
            words = [str(each.value) if isinstance(each, ast.Constant) else "" for each in node.args[:2]]
            found.add((words[-1], words[0] if len(words) == 2 else ""))
    return found


def test_every_extension_is_there_and_asked_for() -> None:
    """Each entry of the table can be imported; the spine asks for no group and no name that is not in it, and for all."""
    found, known = asked(), plugins.EXTENSIONS
    assert {group for group, _ in found if group} | {"trackers"} == {*known}
    assert {name for group, name in found if group == "extensions"} == {*known["extensions"]}
    assert all(plugins.load(name, group) for group, names in known.items() for name in names)


def test_a_run_needs_no_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains to its end and writes its metrics, without a report, curves or a tracker."""
    monkeypatch.setattr(plugins, "EXTENSIONS", {})
    config = tiny.config(tmp_path / "run", updates=2, tracker="none")
    assert train(config, tiny.job())["updates"] == 2
    assert {record["update"] for record in read_records(config.out / "metrics.jsonl")} == {0, 1, 2}
    assert not {"report.html", "curves.png", "tensorboard"} & {path.name for path in config.out.iterdir()}
