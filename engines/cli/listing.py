"""Names that commands accept, and lists that fit the terminal; torch is not imported, so they appear at once."""

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

WIDEST = 124  # largest number of columns of running text
PIPED = 10_000  # columns of an output that is not a terminal, so that each row stays on one line
JSON = "--json"  # flag that prints a list for programs


def drop_flag(args: Sequence[str], flag: str) -> tuple[list[str], bool]:
    """Return the words without a flag that takes no value, and whether it was among them."""
    return [word for word in args if word != flag], flag in args


class SampleDefaults(NamedTuple):
    """Default settings of sampling with a model; the values here are those of a large pipeline."""

    prompts: tuple[str, ...] = ("a red fox in the snow", "a shop sign that reads OPEN")
    samples: int | None = None  # of an evaluation; None takes every prompt once
    steps: int = 20
    micro_batch: int = 4


def choose_defaults(model: str) -> SampleDefaults:
    """Return the default settings of sampling with a model."""
    if model not in MODELS:
        return SampleDefaults()
    return SampleDefaults(MODELS[model].prompts, samples=400, steps=10, micro_batch=64)


def may_be_model(name: str) -> bool:
    """Return whether a name may be a folder, a file, an id on the Hub or `module:name`."""
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
    return {name: docs[function].partition("\n")[0] for name, function in named.items() if function in docs}  # no partials


def find_installed(group: str) -> dict[str, str]:
    """Return the origin of each entry point of `fluvial.<group>`, by name, without importing it."""
    return {
        point.name: f"from {point.dist.name} ({point.value})" if point.dist is not None else point.value
        for point in entry_points(group=f"fluvial.{group}")
    }


def find_width() -> int:
    """Return the number of columns of the terminal, or of COLUMNS; `PIPED` without either."""
    return shutil.get_terminal_size((PIPED, 24)).columns


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table that fits the terminal.

    If the rows are too wide, each becomes an entry: the first cell on a line, the others below it with their headings.
    """
    columns = find_width()
    widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
    ]
    if max(map(len, lines)) <= columns:
        return lines
    entries = list[str]()
    for first, *others in rows:
        cells = [f"{name}: {cell}" for name, cell in zip(header[1:], others, strict=True) if cell and cell != "-"]
        entries += [*wrap(first, columns), *wrap("; ".join(cells), columns, indent=4)]
    return entries


def wrap(text: str, columns: int | None = None, *, indent: int = 0, later: int | None = None) -> list[str]:
    """Return the lines of a text, each of at most `columns` columns.

    Args:
        indent: spaces before the first line.
        later: spaces before the other lines; by default `indent`.
    """
    columns = columns or find_width()
    first, others = " " * indent, " " * (indent if later is None else later)
    return textwrap.wrap(text, columns, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def format_paragraphs(text: str) -> str:
    """Return a text with its paragraphs wrapped to the terminal, at most `WIDEST` columns."""
    columns = min(find_width(), WIDEST)
    return "\n\n".join("\n".join(wrap(" ".join(each.split()), columns)) for each in text.split("\n\n")) + "\n"
