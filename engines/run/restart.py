"""Restarts: a run that torchrun starts again (--max-restarts) continues by itself, and never takes another run for its own.

A note in the run folder holds the name of the torchrun that began, or resumed, the run.
"""

import os
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from fluvial.engines.checkpoint import checkpoint
from fluvial.engines.fsdp.world import World

MARK = ".launch"
LAUNCH = "TORCHELASTIC_RUN_ID"  # name of the torchrun that started this process, the same on all ranks and in all attempts


class Restart(NamedTuple):
    """A run that an earlier attempt of the same torchrun began or resumed."""

    checkpoint: str | None  # its newest whole checkpoint, if there is one


def mark(out: Path) -> None:
    """Write the name of this process's torchrun to a run folder, if there is one.

    Raises:
        OSError: it cannot be written.
    """
    if (name := os.environ.get(LAUNCH)) is not None:
        (out / MARK).write_text(name, encoding="utf-8")


def unmark(out: Path) -> None:
    """Remove the note of an earlier torchrun with the same name: this one may not have the run, nor may its next attempt."""
    if _marked(out):
        (out / MARK).unlink()


def restarted(out: Path, checkpoints: Path | str, world: World, *, console: Console | None = None) -> Restart | None:
    """Return the restart of a run, or None if torchrun has not started it before; every rank must take part.

    Args:
        checkpoints: folder or URL of its checkpoints.
        console: where damaged checkpoints, which are skipped, are reported.

    Raises:
        RunError: the run folder cannot be read.
    """
    # Torchrun counts per machine, and a machine whose processes were well does not count.
    if not any(world.gather_items(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))):
        return None
    with world.agreed():
        mine = world.is_main and _marked(out) and (out / "config.json").exists()
        newest_first = [str(path) for path in reversed(checkpoint.listed(checkpoints))] if mine else []
    mine, newest_first = world.gather_items((mine, newest_first))[0]
    if not mine:
        return None
    for path in newest_first:
        with world.agreed():
            damage = checkpoint.damage(path, share=slice(world.rank, None, world.size))
        found = [problem for problem in world.gather_items(damage) if problem is not None]
        if not found:
            return Restart(path)
        if console and world.is_main:
            console.print(f"skipped: checkpoint {path} is damaged ({found[0]})", highlight=False, soft_wrap=True)
    return Restart(None)


def _marked(out: Path) -> bool:
    note = out / MARK
    return note.is_file() and note.read_text(encoding="utf-8") == os.environ.get(LAUNCH)
