"""Prompts from files, and their split into prompts to train on and prompts to evaluate on."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fluvial.engines.errors import UsageError

# Endings of files whose lines are records or tables, never plain prompts.
RECORDS = frozenset({".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow"})


def read_prompts(path: Path, *, check: Callable[[str], None], heldout: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the prompts of a text file with one prompt per line; blank lines are skipped.

    Args:
        path: text file in UTF-8.
        check: function that raises ValueError for a string that is not a prompt of the model.
        heldout: prompts of the evaluation, which must not be in the file.

    Raises:
        UsageError: the file holds records instead of text, cannot be read or is empty, or a line is not a prompt or is held
            out; the message names file and line.
    """
    apart = frozenset(heldout)
    if path.suffix.lower() in RECORDS:
        raise UsageError(
            f"prompts file {path} holds records ({path.suffix}), which cannot be trained on yet, expected a text file with "
            "one prompt per line: write the prompts alone to a .txt file"
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"prompts file {path} cannot be read: {reason}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if prompt := line.strip():
            try:
                check(prompt)
            except ValueError as error:
                raise UsageError(f"prompts file {path}, line {number}: {error}") from error
            if prompt in apart:
                raise UsageError(
                    f"prompts file {path}, line {number}: {prompt!r} is held out for evaluation, never trained on"
                )
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"prompts file {path} is empty, expected one prompt per line")
    return tuple(prompts)


def split_off(prompts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (prompts to train on, held-out prompts): every tenth is held out.

    With so few prompts that none would be left to train on, the held-out ones are trained on too.
    """
    heldout = tuple(prompts[::10])
    apart = frozenset(heldout)
    return tuple(prompt for prompt in prompts if prompt not in apart) or tuple(prompts), heldout
