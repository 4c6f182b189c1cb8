"""Saves that fail, or lose power, leave the earlier checkpoints whole."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers.refusals import fails
from helpers.saved_checkpoints import found, options, save, state

from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.run.checkpoint import checkpoint


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("tape://deck/run", "tape://deck/run cannot be used: Protocol not known: tape"),
        ("s3://bucket/run", "s3://bucket/run cannot be used: Install s3fs"),
        ("ftp://127.0.0.1:9/run", "ftp://127.0.0.1:9/run cannot be used: Connection refused"),
    ],
)
def test_a_url_that_cannot_be_used_is_a_usage_error(
    one: World, behind: World, monkeypatch: pytest.MonkeyPatch, url: str, says: str
) -> None:
    """An unknown protocol, one whose package is not installed, and a host that does not answer; in one line."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    calls: list[Callable[[], Any]] = [
        lambda: save(url, one, update=1),
        lambda: checkpoint.save_async(url, state(), **options(behind, 1)),
        lambda: checkpoint.list_checkpoints(url),
        lambda: checkpoint.verify(f"{url}/000001"),
    ]
    for call in calls:
        with pytest.raises(UsageError) as error:
            call()
        assert str(error.value).startswith(says)
        assert "\n" not in str(error.value)


def test_a_service_that_refuses_is_a_run_error(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kind of exception it has for that."""

    class NoCredentialsError(Exception):
        pass

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(MemoryFileSystem, "ls", refuse)
    fails(
        "could not be saved: memory://refused/: Unable to locate credentials; earlier",
        save,
        "memory://refused",
        one,
        update=1,
    )


def test_ranks_on_different_disks_are_noticed(tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a rank wrote and rank 0 does not see: better now than when it is needed."""
    elsewhere = [{"shard-00002-model-00001-of-00001.safetensors": {"bytes": 8, "sha256": "0"}}]
    monkeypatch.setattr(World, "gather_items", lambda self, item: [item, *elsewhere] if isinstance(item, dict) else [item])
    fails(r"shard-00002.* is not there: all ranks must write to the same disk", save, tmp_path, one, update=1)
    assert found(tmp_path) == []


def test_every_byte_is_synced_before_the_checkpoint_gets_its_name(
    tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    save(tmp_path, one, update=1)
    ((before, files, folder),) = renamed
    assert len(files) >= 2  # tensors and the manifest
    assert {*files.values()} <= {*before}
    last_file = max(before.index(file) for file in files.values())
    assert folder in [inode for inode, _ in before[last_file + 1 :]]
    assert tmp_path.stat().st_ino in [inode for inode, _ in synced]
