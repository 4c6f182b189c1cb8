"""Names that a command accepts, and lists that fit the terminal, without importing torch, so that they come at once."""

import ast
import shutil
import textwrap
import tomllib
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.engines.named_models import MODELS

RECIPES_FILE = Path(__file__).parents[1] / "run" / "recipes" / "recipes.toml"
PROMPT_SETS = Path(__file__).parents[1] / "data" / "prompt_sets.py"

WIDEST = 124  # columns of running text
PIPED = 10_000  # columns where the output is no terminal, so that each row stays on one line
JSON = "--json"  # prints a list for programs


def drop_flag(args: Sequence[str], flag: str) -> tuple[list[str], bool]:
    """Return the words other than a flag without a value, and whether it was among them."""
    return [word for word in args if word != flag], flag in args


class DrawingDefaults(NamedTuple):
    """Settings of drawing with a model where nothing is typed; by default those of a large pipeline."""

    prompts: tuple[str, ...] = ("a red fox in the snow", "a shop sign that reads OPEN")
    samples: int | None = None  # of an evaluation; None takes every prompt once
    steps: int = 20
    micro_batch: int = 4


def choose_defaults(model: str) -> DrawingDefaults:
    """Return the settings of drawing with a model."""
    return (
        DrawingDefaults(MODELS[model].prompts, samples=400, steps=10, micro_batch=64)
        if model in MODELS
        else DrawingDefaults()
    )


def may_be_model(name: str) -> bool:
    """Return whether a name is that of a folder or a file, or may be an id on the Hub or `module:name`."""
    return "/" in name or ":" in name or Path(name).exists()


def list_recipes() -> dict[str, str]:
    """Return the first line of each built-in recipe's help, by name."""
    table = tomllib.loads(RECIPES_FILE.read_text(encoding="utf-8"))
    return {name: each["help"].partition("\n")[0] for name, each in table.items() if name != "shared"}


def list_prompt_sets() -> dict[str, str]:
    """Return the first line of each built-in prompt set's docstring, by name."""
    body = ast.parse(PROMPT_SETS.read_text(encoding="utf-8")).body
    docs = {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, ast.FunctionDef)}
    table: Any = next(node.value for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict))
    named = {ast.literal_eval(key): ast.unparse(function) for key, function in zip(table.keys, table.values, strict=True)}
    return {name: docs[function].partition("\n")[0] for name, function in named.items() if function in docs}  # not parts


def find_installed(group: str) -> dict[str, str]:
    """Return where each entry point of `fluvial.<group>` comes from, by name, without importing it."""
    return {
        point.name: f"from {point.dist.name} ({point.value})" if point.dist is not None else point.value
        for point in entry_points(group=f"fluvial.{group}")
    }


def find_width() -> int:
    """Return the number of columns of the terminal, or of COLUMNS; without either there is no limit to speak of."""
    return shutil.get_terminal_size((PIPED, 24)).columns


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table that fits the terminal.

    Rows that do not fit become entries: the first cell on a line, the others below it with their headings.
    """
    columns = find_width()
    widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
    ]
    if max(map(len, lines)) <= columns:
        return lines
    rows_of_text = list[str]()
    for first, *others in rows:
        cells = [f"{name}: {cell}" for name, cell in zip(header[1:], others, strict=True) if cell and cell != "-"]
        rows_of_text += [*wrap(first, columns), *wrap("; ".join(cells), columns, indent=4)]
    return rows_of_text


def wrap(text: str, columns: int | None = None, *, indent: int = 0, later: int | None = None) -> list[str]:
    """Return the lines of a text, each of at most `columns` columns.

    Args:
        indent: spaces before the first line.
        later: spaces before the other lines; by default as many.
    """
    columns = columns or find_width()
    first, others = " " * indent, " " * (indent if later is None else later)
    return textwrap.wrap(text, columns, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def format_paragraphs(text: str) -> str:
    """Return a text with its paragraphs wrapped to the terminal, and to WIDEST columns at most."""
    columns = min(find_width(), WIDEST)
    return "\n\n".join("\n".join(wrap(" ".join(each.split()), columns)) for each in text.split("\n\n")) + "\n"
