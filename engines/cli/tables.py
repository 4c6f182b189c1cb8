"""Text tables that fit the terminal."""

import shutil
import textwrap
from collections.abc import Sequence

WIDEST = 124  # columns of running text
PIPED = 10_000  # columns where the output is no terminal, so that each row stays on one line


def width() -> int:
    """Return the number of columns of the terminal, or of COLUMNS; without either there is no limit to speak of."""
    return shutil.get_terminal_size((PIPED, 24)).columns


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, columns: int | None = None) -> list[str]:
    """Return the lines of a table of at most `columns` columns, by default those of the terminal.

    Rows that do not fit become entries: the first cell on a line, the others below it with their headings.
    """
    columns = columns or width()
    widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
    ]
    if max(map(len, lines)) <= columns:
        return lines
    found = list[str]()
    for first, *others in rows:
        cells = [f"{name}: {cell}" for name, cell in zip(header[1:], others, strict=True) if cell and cell != "-"]
        found += [*wrapped(first, columns), *wrapped("; ".join(cells), columns, indent=4)]
    return found


def wrapped(text: str, columns: int | None = None, *, indent: int = 0, later: int | None = None) -> list[str]:
    """Return the lines of a text, each of at most `columns` columns.

    Args:
        indent: spaces before the first line.
        later: spaces before the other lines; by default as many.
    """
    columns = columns or width()
    first, others = " " * indent, " " * (indent if later is None else later)
    return textwrap.wrap(text, columns, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def paragraphs(text: str) -> str:
    """Return a text with its paragraphs wrapped to the terminal, and to WIDEST columns at most."""
    columns = min(width(), WIDEST)
    return "\n\n".join("\n".join(wrapped(" ".join(each.split()), columns)) for each in text.split("\n\n")) + "\n"
