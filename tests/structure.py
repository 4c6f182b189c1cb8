"""Prints how the code is built, in numbers: what one update of GRPO runs through, who takes the configuration, and sizes.

    python -P tests/structure.py            every number
    python -P tests/structure.py --bounds   those of an update that are bounded, as JSON

Functions are those that the second update calls, on the built-in model. Folders that do not exist count nothing, so that the
numbers of two trees can be set side by side. test_structure.py holds the tree to `BOUNDS`, which may only fall; lines
may rise for what an issue asks for.
"""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PRODUCT = ("core", "kernels", "models", "engines", "bench")
# What is between the samples and the update of the engine, by its name before and after.
CONTROL = ("engines/train", "engines/run", "engines/objectives", "engines/methods")
COMMANDS = ("train grpo", "train nft", "sample", "eval", "serve")
CONFIG, TRAITS = "TrainConfig", "ObjectiveTraits"  # classes of the configuration of a run, and of an objective's flags
EXEMPTIONS = ("NAMES_RUN", "MORE_FILES")  # of test_layout.py
MACHINE = ("pipeline", "optimizer", "engine", "evaluation", "rollout.servers")  # beside the plain settings of a run
CONTAINERS = ("Step", "Trajectory", "Chunk", "SampleBatch", "Batch", "Items", "RecordedSteps")

# What the tree has today at most.
BOUNDS = {
    "files of the control layer of an update": 11,
    "functions of the control layer of an update": 56,
    "files of an update": 60,
    "functions of an update": 335,
    "flags of train grpo": 110,
    "fields of a run's configuration at the top": 19,
    "settings of the machine": 87,
    "containers between a sampled step and its loss": 7,
    "functions that take the configuration": 92,
    "names of several classes": 0,
    "files of engines/engine": 9,
    "lines of engines/engine": 2384,
    "lines of the product": 75296,
    "lines of the tests": 64672,
}

Calls = Counter[tuple[str, str]]  # of a function, by its file and its name


class Tracer:
    """Counts calls of the product's functions, in `calls`, and those that are given a configuration, in `given`."""

    def __init__(self) -> None:
        self.calls, self.given = Calls(), Calls()
        threading.setprofile(self.note)  # for threads of rewards, which live as long as their trainer
        sys.setprofile(self.note)

    def note(self, frame: Any, event: str, _: Any) -> None:
        """Count a call."""
        code = frame.f_code
        path = code.co_filename.removeprefix(f"{ROOT}/")
        if event == "call" and path.startswith(tuple(f"{folder}/" for folder in PRODUCT)):
            self.calls[path, code.co_qualname] += 1
            arguments, values = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], frame.f_locals
            self.given[path, code.co_qualname] += any(type(values.get(name)).__name__ == CONFIG for name in arguments)


def count(calls: Calls, *folders: str) -> tuple[int, int, int]:
    """Return the numbers of files, of functions, and of functions with lambdas and comprehensions, of some folders."""
    inside = [call for call in +calls if not folders or call[0].startswith(tuple(f"{folder}/" for folder in folders))]
    names = [name for _, name in inside if not name.split(".")[-1].startswith("<")]
    return len({path for path, _ in inside}), len(names), len(inside)


def spans(calls: Calls, *folders: str) -> str:
    """Return `count` in words."""
    return "{} files, {} functions ({} with lambdas)".format(*count(calls, *folders))


def takes(node: ast.AST) -> bool:
    """Return whether a node is a function with a configuration as an argument."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return any(CONFIG in ast.unparse(each.annotation) for each in every if each.annotation is not None)


def flags(parsed: dict[str, ast.Module]) -> tuple[int, int, int]:
    """Return the number of an objective's flags, of the places that read one, and of the files that these are in."""
    classes = [n for tree in parsed.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == TRAITS]
    known = {each.target.id for node in classes for each in node.body if isinstance(each, ast.AnnAssign)}  # type: ignore[union-attr]
    found: Counter[str] = Counter()
    for path, tree in parsed.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in known:
                found[path] += re.search(r"(^|\.)(traits|\w+\.traits)$", ast.unparse(node.value)) is not None
    return len(known), found.total(), len(+found)


def circles(parsed: dict[str, ast.Module]) -> list[int]:
    """Return the number of files of each circle of imports, those inside functions and for types included."""
    of = {"fluvial." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in parsed}
    reached: dict[str, set[str]] = {}
    for path, tree in parsed.items():
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        targets = [f"{n.module}.{a.name}" if f"{n.module}.{a.name}" in of else n.module for n in nodes for a in n.names]
        reached[path] = {of[target] for target in targets if target in of} - {path}
    for middle in parsed:
        for path in parsed:
            if middle in reached[path]:
                reached[path] |= reached[middle]
    found = {frozenset(other for other in reached[path] if path in reached[other]) for path in parsed}
    return sorted((len(circle) for circle in found if circle), reverse=True)


def shared_names(parsed: dict[str, ast.Module]) -> list[str]:
    """Return the names that several classes have, but for private ones."""
    names = Counter(node.name for tree in parsed.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return [name for name, count in names.items() if count > 1 and not name.startswith("_")]


def settings(command: str) -> int:
    """Return the number of flags in the help of a command, the whole one where there are two."""
    line = [sys.executable, "-P", "-m", "fluvial.engines", *command.split()]
    said = [subprocess.run([*line, flag], capture_output=True, encoding="utf-8").stdout for flag in ("--help", "--help-all")]
    return max(len(re.findall(r"^\W*--[a-z]", text, re.MULTILINE)) for text in said)


def trace_update() -> tuple[Tracer, Any]:
    """Return what the second update of a run called, and the run's configuration."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    sys.path[:0] = [str(ROOT / "tests" / "shared")]
    import torch
    from helpers.digest_cases import cases, job

    from fluvial.engines import Trainer, init_world

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out, init_world() as world:
        config, tracer = replace(cases(Path(out))["grpo"].config, out=Path(out)), Tracer()
        with Trainer(config, job(), world) as trainer:
            trainer.update()
            tracer.calls.clear()
            trainer.update()
            sys.setprofile(None)
    return tracer, config


def settings_of_machine(config: Any) -> int:
    """Return the number of settings of a run that are its machine's: plain ones at the top, and those of `MACHINE`."""
    plain = [each.name for each in fields(config) if not is_dataclass(getattr(config, each.name))]
    return len(plain) + sum(len(fields(attrgetter(name)(config))) for name in MACHINE)


def bound_update() -> dict[str, int]:
    """Return the numbers of an update, and of its flags, that have bounds."""
    tracer, config = trace_update()
    calls = tracer.calls
    (files, functions, _), (all_files, all_functions, _) = count(calls, *CONTROL), count(calls)
    numbers = {"files": all_files, "functions": all_functions}
    control = {"files of the control layer": files, "functions of the control layer": functions}
    update = {f"{name} of an update": number for name, number in {**control, **numbers}.items()}
    update["fields of a run's configuration at the top"] = len(fields(config))
    update["settings of the machine"] = settings_of_machine(config)
    return update | {"flags of train grpo": settings("train grpo")}


def read_texts() -> dict[str, str]:
    """Return the text of every Python file, by its path."""
    files = [path for folder in (*PRODUCT, "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def count_lines(texts: dict[str, str]) -> Counter[str]:
    """Return the lines of each folder, and of each folder in it."""
    lines: Counter[str] = Counter()
    for path, text in texts.items():
        for folder in {path.split("/")[0], "/".join(path.split("/")[: path.count("/")][:2])}:
            lines[folder] += len(text.splitlines())
    return lines


def parse_product(texts: dict[str, str]) -> dict[str, ast.Module]:
    """Return the syntax tree of each file of the product."""
    return {path: ast.parse(text) for path, text in texts.items() if not path.startswith("tests/")}


def bound_tree() -> dict[str, int]:
    """Return the numbers of the files that have bounds."""
    texts = read_texts()
    lines, parsed = count_lines(texts), parse_product(texts)
    those = [tree for path, tree in parsed.items() if CONFIG in texts[path]]
    return {
        "functions that take the configuration": sum(takes(node) for tree in those for node in ast.walk(tree)),
        "names of several classes": len(shared_names(parsed)),
        "files of engines/engine": sum(path.startswith("engines/engine/") for path in texts),
        "lines of engines/engine": lines["engines/engine"],
        "lines of the product": sum(lines[top] for top in PRODUCT),
        "lines of the tests": lines["tests"],
        "containers between a sampled step and its loss": sum(
            isinstance(node, ast.ClassDef) and node.name in CONTAINERS for tree in parsed.values() for node in ast.walk(tree)
        ),
    }


def report() -> Iterator[tuple[str, object]]:
    """Yield names and numbers."""
    tracer, config = trace_update()
    update, given = tracer.calls, +tracer.given
    yield f"control layer of an update ({', '.join(f for f in CONTROL if (ROOT / f).exists())})", spans(update, *CONTROL)
    yield "whole update", spans(update)
    for folder in sorted({"/".join(path.split("/")[: path.count("/")][:2]) for path, _ in update}):
        yield f"  {folder}", spans(update, folder)
    yield "calls that are given the configuration, from the start on", f"{given.total()}: {spans(given)}"
    texts = read_texts()
    parsed, lines = parse_product(texts), count_lines(texts)
    takers = Counter(path for path, tree in parsed.items() for node in ast.walk(tree) if takes(node))
    yield "functions that take the configuration", f"{takers.total()} in {len(takers)} files"
    yield "flags of objectives, places that read them, files of these", flags(parsed)
    yield "circles of imports, by their files", circles(parsed)
    yield "names of several classes", shared_names(parsed)
    yield "fields of a run's configuration at the top", len(fields(config))
    yield "settings of the machine", settings_of_machine(config)
    for command in COMMANDS:
        yield f"flags of {command}", settings(command)
    layout = runpy.run_path(str(ROOT / "tests" / "test_layout.py"), run_name="layout")
    yield "exemptions of the layout", {name: len(layout.get(name, ())) for name in EXEMPTIONS}
    yield "lines of the product", sum(lines[top] for top in PRODUCT)
    for name in sorted(lines):
        yield f"{'  ' * (1 + name.count('/'))}{name}", lines[name]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--bounds" in sys.argv:
        print(json.dumps(bound_update()))
    for name, number in () if "--bounds" in sys.argv else report():
        print(f"{name}: {number}", flush=True)
