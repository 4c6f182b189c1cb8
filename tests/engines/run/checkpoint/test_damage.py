"""A damaged or foreign checkpoint is refused by name, and never unpickled."""

import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec import AbstractFileSystem
from helpers.refusals import fails, refuses
from helpers.saved_checkpoints import FINGERPRINT, files, holds, load, save, state
from hypothesis import given, settings
from hypothesis import strategies as st

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.run.checkpoint import checkpoint


def test_no_file_of_a_checkpoint_is_a_pickle(folder: Path | str, one: World) -> None:
    """Safetensors and JSON alone."""
    _, paths = files(save(folder, one, update=1))
    assert {Path(file).suffix for file in paths} == {".safetensors", ".json"}


def damages() -> dict[str, Callable[[AbstractFileSystem, str, str], Any]]:
    """Return the ways to damage a checkpoint, given its tensors' file and its manifest, with the message of each."""

    def flip(fs: AbstractFileSystem, tensors: str, manifest: str) -> None:
        data = bytearray(fs.cat_file(tensors))
        data[-3] ^= 1
        fs.pipe_file(tensors, bytes(data))

    def edit(fs: AbstractFileSystem, tensors: str, manifest: str) -> None:
        changed = json.loads(fs.cat_file(manifest))
        changed["meta"]["update"] = 99
        fs.pipe_file(manifest, json.dumps(changed, indent=1).encode())

    def spell(fs: AbstractFileSystem, tensors: str, manifest: str) -> None:
        text = fs.cat_file(manifest)
        assert b"1e-05" in text
        fs.pipe_file(manifest, text.replace(b"1e-05", b"1E-05"))

    def put(text: bytes) -> Callable[[AbstractFileSystem, str, str], None]:
        return lambda fs, tensors, manifest: fs.pipe_file(manifest, text)

    return {
        "has 100 bytes": lambda fs, tensors, manifest: fs.pipe_file(tensors, fs.cat_file(tensors)[:100]),
        "its SHA-256 differs": flip,
        "safetensors is missing": lambda fs, tensors, manifest: fs.rm_file(tensors),
        "manifest.json is missing": lambda fs, tensors, manifest: fs.rm_file(manifest),
        "manifest.json cannot be read": put(b'{"format": 1'),
        "manifest.json cannot be read ": put(b"[" * 100_000),
        "manifest.json cannot be read  ": put(b"[1]"),
        "manifest.json cannot be read   ": put(sealed(b'{"format": 1, "files": 3}')),
        "manifest.json was changed": edit,
        "manifest.json was changed ": spell,
        "has format 99": put(b'{"format": 99}'),
        "is of another program": put(sealed(b'{"format": 1, "files": {}, "fingerprint": 3, "meta": {}}')),
        "manifest.json is of update 77": put(
            sealed(b'{"format": 1, "update": 77, "files": {}, "fingerprint": {}, "meta": {}}')
        ),
    }


def sealed(text: bytes) -> bytes:
    """Return another checkpoint's manifest, with the seal that belongs to it."""
    manifest = json.loads(text)
    return checkpoint._serialize({**manifest, "seal": checkpoint._digest(manifest)})


@pytest.mark.parametrize("says", damages())
def test_a_damaged_checkpoint_is_refused_by_name(folder: Path | str, one: World, says: str) -> None:
    """The message names it, says what is wrong, and offers the newest whole one."""
    save(folder, one, update=1)
    older, other, newest = (save(folder, one, update=update) for update in (2, 3, 4))
    fs, paths = files(newest)
    tensors = next(file for file in paths.values() if file.endswith(".safetensors"))
    damages()[says](fs, tensors, paths["manifest.json"])
    fs, paths = files(other)
    fs.pipe_file(paths["manifest.json"], b"no longer whole either")
    with pytest.raises(RunError) as error:
        load(newest, one)
    message = str(error.value)
    assert f"checkpoint {newest} is damaged" in message
    assert says.strip() in message
    assert f"set checkpoint.resume_from to {older}" in message
    assert "\n" not in message
    assert holds(older, one, 2.0)


def test_a_file_that_does_not_belong_to_a_checkpoint_is_refused(tmp_path: Path, one: World) -> None:
    """On a disk; the tensors of another would be taken for its own."""
    path = save(tmp_path, one, update=1)
    (path / "zz.safetensors").write_bytes(next(path.glob("*.safetensors")).read_bytes())
    fails(r"zz\.safetensors does not belong to it\); there is no other whole one", load, path, one)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, one: World) -> tuple[Path, Path]:
    """Two whole checkpoints."""
    folder = tmp_path_factory.mktemp("pair")
    return save(folder, one, update=1), save(folder, one, update=2)


@contextmanager
def refused(pair: tuple[Path, Path], one: World) -> Iterator[None]:
    """Damage the second checkpoint, see that it is refused by name with the first as an offer, and mend it."""
    older, newest = pair
    before = {file: file.read_bytes() for file in newest.iterdir()}
    try:
        yield
        with pytest.raises(RunError) as error:
            load(newest, one)
        assert f"checkpoint {newest} is damaged" in str(error.value)
        assert f"set checkpoint.resume_from to {older}" in str(error.value)
    finally:
        for file, data in before.items():
            file.write_bytes(data)
    assert holds(newest, one, 2.0)


@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), manifest=st.booleans())
def test_a_flipped_bit_is_noticed(pair: tuple[Path, Path], one: World, place: float, bit: int, manifest: bool) -> None:
    """Any bit of any file."""
    file = next(pair[1].glob("*.json" if manifest else "*.safetensors"))
    with refused(pair, one):
        data = bytearray(file.read_bytes())
        data[int(place * len(data))] ^= 1 << bit
        file.write_bytes(data)


@settings(max_examples=50)
@given(place=st.floats(0, 1, exclude_max=True), manifest=st.booleans())
def test_a_file_cut_short_is_noticed(pair: tuple[Path, Path], one: World, place: float, manifest: bool) -> None:
    """At any byte of any file."""
    file = next(pair[1].glob("*.json" if manifest else "*.safetensors"))
    with refused(pair, one):
        file.write_bytes(file.read_bytes()[: int(place * file.stat().st_size)])


@pytest.mark.parametrize("kind", ["*.json", "*.safetensors", "*"])
def test_files_of_another_checkpoint_are_noticed(pair: tuple[Path, Path], one: World, kind: str) -> None:
    """One of them, and all: a checkpoint under the number of another."""
    with refused(pair, one):
        for file in pair[0].glob(kind):
            assert len(file.read_bytes()) == (pair[1] / file.name).stat().st_size or kind != "*.safetensors"
            (pair[1] / file.name).write_bytes(file.read_bytes())


def test_a_malicious_pickle_is_never_opened(tmp_path: Path, one: World) -> None:
    """In the place of a file, of the folder, or in a checkpoint made for it: refused, and what it holds does not run."""
    target = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (target,)

    evil = pickle.dumps(Evil())
    save(tmp_path, one, update=1)

    path = save(tmp_path, one, update=2)
    for name in (next(path.glob("*.safetensors")).name, ".metadata"):
        (path / name).write_bytes(evil)
    fails(f"is damaged.*set checkpoint.resume_from to {tmp_path / '000001'}", load, path, one)

    whole = tmp_path / "000003"
    whole.write_bytes(evil)
    fails(rf"is damaged \(it is a file\); .*set checkpoint.resume_from to {tmp_path / '000001'}", load, whole, one)
    assert checkpoint.list_checkpoints(tmp_path) == [tmp_path / "000001", path]

    path = save(tmp_path, one, update=4)  # with a manifest that vouches for the pickle
    manifest = json.loads((path / "manifest.json").read_text())
    name = next(iter(manifest["files"]))
    manifest["files"][name] = {"bytes": len(evil), "sha256": checkpoint.hashlib.sha256(evil).hexdigest()}
    del manifest["seal"]
    (path / "manifest.json").write_bytes(sealed(json.dumps(manifest).encode()))
    (path / name).write_bytes(evil)
    checkpoint.verify(path)
    fails(f"checkpoint {path} could not be read", load, path, one)
    assert not target.exists()


def test_a_foreign_checkpoint_is_refused(folder: Path | str, one: World) -> None:
    """It says which settings differ, or which tensors."""
    path = save(folder, one, update=1)
    refuses("of another run: seed 0 there, 1 here", load, path, one, seed=1)
    others: dict[str, dict[str, Any]] = {
        r"it holds 5 tensors, 4 of the 5 expected": {"weight.a": None, "weight.c": torch.empty(2)},
        r"weight.a has shape \[3, 4\] there, \[9, 4\] here": {"weight.a": torch.empty(9, 4)},
        r"half is torch.bfloat16 there, torch.float32 here": {"half": torch.empty(5)},
    }
    for says, changes in others.items():
        other = {name: tensor for name, tensor in {**state(), **changes}.items() if tensor is not None}
        fails(f"of another model: {says}", checkpoint.load, path, other, fingerprint=FINGERPRINT, world=one)
    refuses("000099 is not a checkpoint: there is no such folder", load, re.sub("000001", "000099", str(path)), one)
