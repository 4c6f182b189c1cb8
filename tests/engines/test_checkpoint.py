"""Checkpoints are whole or not there, and refused by name when they are not what they should be."""

import errno
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fluvial.engines import checkpoint
from fluvial.engines.distributed import World, world
from fluvial.engines.errors import RunError

FINGERPRINT = {"seed": 0, "train": "full"}


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """The world of this process."""
    with world() as processes:
        yield processes


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    """A state of two tensors."""
    return {"weight.a": torch.full((3, 4), value), "weight.b": torch.arange(5, dtype=torch.float32) * value}


def save(folder: Path, one: World, *, update: int, keep: int = 5) -> Path:
    """Save the state of an update, whose values are its number."""
    meta = {"update": update, "numbers": [1, 2.5, None]}
    return checkpoint.save(folder, state(float(update)), meta, update=update, fingerprint=FINGERPRINT, world=one, keep=keep)


def load(path: Path, one: World, **changed: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Load a checkpoint into an empty state."""
    loaded = {name: torch.empty_like(tensor) for name, tensor in state().items()}
    return loaded, checkpoint.load(path, loaded, fingerprint={**FINGERPRINT, **changed}, world=one)


def test_what_is_saved_is_loaded(tmp_path: Path, one: World) -> None:
    """Tensors to the bit, and the meta."""
    loaded, meta = load(save(tmp_path, one, update=7), one)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state(7.0).items())
    assert meta == {"update": 7, "numbers": [1, 2.5, None]}


def test_the_newest_are_kept(tmp_path: Path, one: World) -> None:
    """Older ones go only after the newer is there; nothing else is left behind."""
    for update in (2, 4, 10, 12):
        save(tmp_path, one, update=update, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000010", "000012"]
    assert checkpoint.listed(tmp_path)[-1].name == "000012"


def test_saving_an_update_again_replaces_it(tmp_path: Path, one: World) -> None:
    """As after a resumption from an earlier one."""
    save(tmp_path, one, update=3)
    path = save(tmp_path, one, update=3)
    assert [p.name for p in tmp_path.iterdir()] == ["000003"]
    load(path, one)


def test_a_left_branch_is_removed(tmp_path: Path, one: World) -> None:
    """After resuming from an earlier one, later ones are of another run: what was just saved is the newest and stays."""
    for update in (6, 8):
        save(tmp_path, one, update=update)
    save(tmp_path, one, update=7, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["000007"]


def test_folders_of_a_person_are_left_alone(tmp_path: Path, one: World) -> None:
    """A copy under another name is neither the newest nor removed."""
    save(tmp_path, one, update=1)
    (tmp_path / "000009-mine").mkdir()
    save(tmp_path, one, update=2, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "000009-mine"]
    assert checkpoint.listed(tmp_path)[-1].name == "000002"


@pytest.mark.parametrize("killed", [False, True])
def test_a_replacement_that_fails_puts_the_old_one_back(
    tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Whether the second rename fails or the process is killed before it."""
    path = save(tmp_path, one, update=3)
    rename, calls = checkpoint.os.rename, 0

    def second_fails(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt if killed else OSError(errno.ENOSPC, "No space left on device")
        rename(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "rename", second_fails)
        with pytest.raises(KeyboardInterrupt if killed else RunError):
            save(tmp_path, one, update=3)
    assert checkpoint.listed(tmp_path) == [path]
    loaded, _ = load(path, one)
    assert torch.equal(loaded["weight.b"], state(3.0)["weight.b"])


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path, one: World) -> None:
    """Safetensors and JSON alone."""
    path = save(tmp_path, one, update=1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}


def damages() -> dict[str, Callable[[Path], Any]]:
    """Ways to damage a checkpoint, and what the message says of each."""

    def tensors(path: Path) -> Path:
        return next(path.glob("*.safetensors"))

    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)

    def edit(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["meta"]["update"] = 99
        (path / "manifest.json").write_text(json.dumps(manifest))

    return {
        "has 100 bytes": lambda path: tensors(path).write_bytes(tensors(path).read_bytes()[:100]),
        "zz.safetensors does not belong to it": lambda path: (path / "zz.safetensors").write_bytes(
            tensors(path).read_bytes()
        ),
        "its SHA-256 differs": lambda path: flip(tensors(path)),
        "safetensors is missing": lambda path: tensors(path).unlink(),
        "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
        "manifest.json cannot be read": lambda path: (path / "manifest.json").write_text('{"format": 1'),
        "manifest.json was changed": edit,
        "has format 99": lambda path: (path / "manifest.json").write_text('{"format": 99}'),
    }


@pytest.mark.parametrize("says", damages())
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, one: World, says: str) -> None:
    """The message names it, says what is wrong, and offers the newest whole one."""
    older, newest = save(tmp_path, one, update=1), save(tmp_path, one, update=2)
    damages()[says](newest)
    with pytest.raises(RunError) as error:
        load(newest, one)
    message = str(error.value)
    assert f"checkpoint {newest} is damaged" in message
    assert says in message
    assert f"--resume-from {older}" in message
    load(older, one)


def test_a_malicious_pickle_is_never_opened(tmp_path: Path, one: World) -> None:
    """In the place of a file of a checkpoint it is refused, and what it holds does not run."""
    path = save(tmp_path, one, update=1)
    target = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (target,)

    for name in (next(path.glob("*.safetensors")).name, ".metadata"):
        (path / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(RunError, match="is damaged"):
        load(path, one)
    assert not target.exists()


def test_a_foreign_checkpoint_is_refused(tmp_path: Path, one: World) -> None:
    """It says which settings differ."""
    path = save(tmp_path, one, update=1)
    with pytest.raises(RunError, match="of another run: seed 0 there, 1 here"):
        load(path, one, seed=1)
    other = {"weight.a": torch.empty(3, 4), "weight.c": torch.empty(2)}
    with pytest.raises(RunError, match="of another model: it holds 2 tensors, 1 of the 2 expected"):
        checkpoint.load(path, other, fingerprint=FINGERPRINT, world=one)
    with pytest.raises(RunError, match=r"of another model: weight.a has shape \[3, 4\] there, \[9, 4\] here"):
        checkpoint.load(path, {**state(), "weight.a": torch.empty(9, 4)}, fingerprint=FINGERPRINT, world=one)


@pytest.mark.parametrize("moment", ["tensors", "manifest", "sync", "rename"])
def test_a_full_disk_loses_nothing(tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """At whatever moment of a save: one line, and the earlier checkpoint is still the newest and whole."""
    older = save(tmp_path, one, update=1, keep=1)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise full

    places: dict[str, tuple[Any, str]] = {
        "tensors": (checkpoint.HuggingFaceStorageWriter, "write_data"),
        "manifest": (checkpoint, "_seal"),
        "sync": (checkpoint.os, "fsync"),
        "rename": (checkpoint.os, "rename"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[moment], fail)
        with pytest.raises(RunError) as error:
            save(tmp_path, one, update=2, keep=1)
    assert "the disk is full; earlier checkpoints are as they were" in str(error.value)
    assert "\n" not in str(error.value)
    assert checkpoint.listed(tmp_path)[-1] == older
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]
    loaded, _ = load(older, one)
    assert torch.equal(loaded["weight.b"], state(1.0)["weight.b"])
