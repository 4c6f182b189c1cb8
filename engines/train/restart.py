"""Restarts: a run that torchrun starts again (--max-restarts) goes on by itself, and takes no other run for its own."""

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fluvial.engines.checkpoint import checkpoint
from fluvial.engines.fsdp.world import World
from fluvial.engines.train.config import TrainConfig

# Holds the name of the torchrun that began, or resumed, the run of a folder.
MARK = ".launch"


def mark(out: Path) -> None:
    """Note in a run folder which torchrun runs it, if one does.

    Raises:
        OSError: the note cannot be written.
    """
    name = _launch()
    if name is not None:
        (out / MARK).write_text(name)


def unmark(out: Path) -> None:
    """Forget an earlier torchrun of this one's name: this one was refused the run, and so is its next attempt."""
    if _marked(out):
        (out / MARK).unlink()


def continued(config: TrainConfig, world: World, *, console: Console | None = None) -> TrainConfig:
    """Return how a run goes on that torchrun has started before; as it is told to if it has not. Every rank must take part.

    A run that an earlier attempt began, or resumed, goes on from the newest whole checkpoint of its folder; without one
    from that which it was to resume from, or it begins again.

    Args:
        config: of the run, as this attempt is told.
        world: of the world.
        console: where checkpoints that are passed over, being damaged, are named.

    Raises:
        RunError: the run folder cannot be read.
    """
    # Torchrun counts on each machine for itself, and one whose processes were well does not count.
    if not any(world.gather_items(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))):
        return config
    with world.agreed():
        mine = world.is_main and _marked(config.out) and (config.out / "config.json").exists()
        newest_first = [str(path) for path in reversed(checkpoint.listed(config.checkpoint_folder))] if mine else []
    mine, newest_first = world.gather_items((mine, newest_first))[0]
    if not mine:
        return config
    for path in newest_first:
        with world.agreed():
            damage = checkpoint.damage(path, share=slice(world.rank, None, world.size))
        found = [problem for problem in world.gather_items(damage) if problem is not None]
        if not found:
            return replace(config, resume=True, resume_from=path)
        if console and world.is_main:
            console.print(f"passed over: checkpoint {path} is damaged ({found[0]})", highlight=False, soft_wrap=True)
    return replace(config, resume=True)


def _launch() -> str | None:
    """Return the name of the torchrun that started this process, the same on all ranks and in all attempts."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def _marked(out: Path) -> bool:
    note = out / MARK
    return note.is_file() and note.read_text() == _launch()
