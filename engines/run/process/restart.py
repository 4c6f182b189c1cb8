"""Restarts: a run that torchrun starts again (--max-restarts) continues by itself, and never takes another run for its own.

A note in the run folder holds the name of the torchrun that began, or resumed, the run.
"""

import os
from pathlib import Path

from fluvial.engines.engine.world import World

MARK = ".launch"
LAUNCH = "TORCHELASTIC_RUN_ID"  # name of the torchrun that started this process, the same on all ranks and in all attempts


def mark(out: Path) -> None:
    """Write the name of this process's torchrun to a run folder, if there is one.

    Raises:
        OSError: it cannot be written.
    """
    if (name := os.environ.get(LAUNCH)) is not None:
        (out / MARK).write_text(name, encoding="utf-8")


def unmark(out: Path) -> None:
    """Remove the note of an earlier torchrun with the same name: this one may not have the run, nor may its next attempt."""
    if _is_marked(out):
        (out / MARK).unlink()


def check_restart(out: Path, world: World) -> bool:
    """Return whether an earlier attempt of the same torchrun began or resumed this run; every rank must take part.

    Raises:
        RunError: the run folder cannot be read.
    """
    # Torchrun counts per machine, and a machine whose processes were well does not count.
    if not any(world.gather_items(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))):
        return False
    with world.agreed():
        mine = world.is_main and _is_marked(out) and (out / "config.json").exists()
    return world.gather_items(mine)[0]


def _is_marked(out: Path) -> bool:
    note = out / MARK
    return note.is_file() and note.read_text(encoding="utf-8") == os.environ.get(LAUNCH)
