"""Names that a command accepts, found without importing torch, so that `--help` answers at once."""

import ast
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from fluvial.engines.named_models import MODELS

RECIPES = Path(__file__).parents[1] / "train" / "recipes.py"


JSON = "--json"  # prints a list for programs


def without(args: Sequence[str], flag: str) -> tuple[list[str], bool]:
    """Return the words other than a flag without a value, and whether it was among them."""
    return [word for word in args if word != flag], flag in args


class Defaults(NamedTuple):
    """Settings of drawing with a model where nothing is typed; by default those of a large pipeline."""

    prompts: tuple[str, ...] = ("a red fox in the snow", "a shop sign that reads OPEN")
    samples: int | None = None  # of an evaluation; None takes every prompt once
    steps: int = 20
    micro_batch: int = 4


def defaults(model: str) -> Defaults:
    """Return the settings of drawing with a model."""
    return Defaults(MODELS[model].prompts, samples=400, steps=10, micro_batch=64) if model in MODELS else Defaults()


def may_be_model(name: str) -> bool:
    """Return whether a name is that of a folder, or may be an id on the Hub or `module:name`."""
    return "/" in name or ":" in name or Path(name).is_dir()


def recipes() -> dict[str, str]:
    """Return the first line of each built-in recipe's docstring, by name, read from the source."""
    tree = ast.parse(RECIPES.read_text(encoding="utf-8"))
    table = next(node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "RECIPES")
    named = {node.id for node in ast.walk(table) if isinstance(node, ast.Name)}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in named]
    return {node.name: (ast.get_docstring(node) or "").partition("\n")[0] for node in functions}


def installed(group: str) -> dict[str, str]:
    """Return where each entry point of `fluvial.<group>` comes from, by name, without importing it."""
    return {
        point.name: f"from {point.dist.name} ({point.value})" if point.dist is not None else point.value
        for point in entry_points(group=f"fluvial.{group}")
    }
