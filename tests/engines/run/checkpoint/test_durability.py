"""Checkpoints after a power cut: one gets its name only after all its bytes and file names are on the disk."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fluvial.engines.engine.world import init_world
from fluvial.engines.run.checkpoint import checkpoint


def test_every_byte_is_synced_before_the_checkpoint_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is synced after its last write, then their folder, then it is renamed, then the folder above is synced."""
    synced: list[tuple[int, int]] = []  # inode, and its size then
    renamed: list[tuple[list[tuple[int, int]], dict[str, tuple[int, int]], int]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))

    def noted_rename(source: Any, target: Any) -> None:
        files = {path.name: (path.stat().st_ino, path.stat().st_size) for path in Path(source).iterdir()}
        renamed.append(([*synced], files, Path(source).stat().st_ino))
        synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    with init_world() as world:
        state = {"a": torch.arange(1000.0), "b": torch.ones(3)}
        checkpoint.save(tmp_path, state, {}, update=1, fingerprint={}, keep=1, world=world)
    ((before, files, folder),) = renamed
    assert len(files) >= 2  # tensors and the manifest
    assert {*files.values()} <= {*before}
    last_file = max(before.index(file) for file in files.values())
    assert folder in [inode for inode, _ in before[last_file + 1 :]]
    assert tmp_path.stat().st_ino in [inode for inode, _ in synced]
