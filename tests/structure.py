"""Prints how the code is built, in numbers: what one update of GRPO runs through, who takes the configuration, and sizes.

    python -P tests/structure.py

Functions are those that the second update calls, on the built-in model. test_structure.py holds the tree to `BOUNDS`, which
may only fall; lines may rise for what an issue asks for.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PRODUCT = ("core", "kernels", "models", "engines", "bench")
CONTROL = ("engines/run", "engines/methods")  # what is between the samples and the update of the engine
CONFIG = "TrainConfig"  # class of the configuration of a run

# What the tree has today at most.
BOUNDS = {
    "files of the control layer of an update": 11,
    "functions of the control layer of an update": 56,
    "files of an update": 60,
    "functions of an update": 335,
    "flags of train grpo": 110,
    "functions that take the configuration": 92,
    "names of several classes": 0,
    "files of engines/engine": 9,
    "lines of engines/engine": 2384,
    "lines of the product": 74929,
}

Calls = Counter[tuple[str, str]]  # of a function, by its file and its name


def trace(calls: Calls) -> None:
    """Count calls of the product's functions from now on, in this thread and in new ones."""

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        path = code.co_filename.removeprefix(f"{ROOT}/")
        if event == "call" and path.startswith(tuple(f"{folder}/" for folder in PRODUCT)):
            calls[path, code.co_qualname] += 1

    threading.setprofile(note)  # for threads of rewards, which live as long as their trainer
    sys.setprofile(note)


def count(calls: Calls, *folders: str) -> tuple[int, int]:
    """Return the numbers of files and of functions, without lambdas and comprehensions, of some folders."""
    inside = [call for call in +calls if not folders or call[0].startswith(tuple(f"{folder}/" for folder in folders))]
    names = [name for _, name in inside if not name.split(".")[-1].startswith("<")]
    return len({path for path, _ in inside}), len(names)


def takes(node: ast.AST) -> bool:
    """Return whether a node is a function with a configuration as an argument."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return any(CONFIG in ast.unparse(each.annotation) for each in every if each.annotation is not None)


def shared_names(parsed: dict[str, ast.Module]) -> list[str]:
    """Return the names that several classes have, but for private ones."""
    names = Counter(node.name for tree in parsed.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return [name for name, count in names.items() if count > 1 and not name.startswith("_")]


def settings(command: str) -> int:
    """Return the number of flags in the help of a command, the whole one where there are two."""
    line = [sys.executable, "-P", "-m", "fluvial.engines", *command.split()]
    said = [subprocess.run([*line, flag], capture_output=True, encoding="utf-8").stdout for flag in ("--help", "--help-all")]
    return max(len(re.findall(r"^\W*--[a-z]", text, re.MULTILINE)) for text in said)


def trace_update() -> Calls:
    """Return what the second update of a run calls."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    sys.path[:0] = [str(ROOT / "tests" / "shared")]
    import torch
    from helpers.digest_cases import cases, job

    from fluvial.engines import Trainer, init_world

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out, init_world() as world:
        config, calls = replace(cases(Path(out))["grpo"].config, out=Path(out)), Calls()
        trace(calls)
        with Trainer(config, job(), world) as trainer:
            trainer.update()
            calls.clear()
            trainer.update()
            sys.setprofile(None)
    return calls


def bound_update() -> dict[str, int]:
    """Return the numbers of an update, and of its flags, that have bounds."""
    calls = trace_update()
    (files, functions), (all_files, all_functions) = count(calls, *CONTROL), count(calls)
    numbers = {"files": all_files, "functions": all_functions}
    control = {"files of the control layer": files, "functions of the control layer": functions}
    update = {f"{name} of an update": number for name, number in {**control, **numbers}.items()}
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
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(bound_update() | bound_tree()))
