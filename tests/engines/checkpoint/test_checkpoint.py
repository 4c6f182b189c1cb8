"""Checkpoints are whole or not there, and refused by name when they are not what they should be."""

import errno
import json
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard, distribute_tensor

from fluvial.engines.checkpoint import checkpoint, storage
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.fsdp.world import World, init_world

FINGERPRINT = {"seed": 0, "train": "full"}


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """The world of this process."""
    with init_world() as world:
        yield world


@pytest.fixture(scope="module")
def behind(one: World) -> World:
    """The world of this process for the thread that writes."""
    return one.background()


@pytest.fixture(params=["disk", "url"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """A folder for checkpoints: on a disk, and behind a URL."""
    if request.param == "disk":
        yield tmp_path / "checkpoints"
        return
    yield f"memory://{tmp_path.name}/checkpoints"
    MemoryFileSystem().rm("/", recursive=True)


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    """A state of some tensors: a matrix, one that is stored by columns, a number, and one of other bits."""
    return {
        "weight.a": torch.full((3, 4), value),
        "weight.b": torch.arange(6, dtype=torch.float32).reshape(2, 3).T * value,
        "count": torch.tensor(value, dtype=torch.float64),
        "half": torch.arange(5, dtype=torch.bfloat16) * value,
        "none": torch.empty(0, 3),
    }


def options(one: World, update: int, keep: int = 5) -> dict[str, Any]:
    """What a save is told beside the state."""
    meta = {"update": update, "numbers": [1, 2.5, None, 1e-5], "text": "é"}
    return {"meta": meta, "update": update, "fingerprint": FINGERPRINT, "world": one, "keep": keep}


def save(folder: checkpoint.Folder, one: World, *, update: int, keep: int = 5) -> checkpoint.Folder:
    """Save the state of an update, whose values are its number."""
    return checkpoint.save(folder, state(float(update)), **options(one, update, keep))


def load(path: Path | str, one: World, **changed: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Load a checkpoint into a state of other values."""
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    return loaded, checkpoint.load(path, loaded, fingerprint={**FINGERPRINT, **changed}, world=one)


def holds(path: Path | str, one: World, value: float) -> bool:
    """Whether a checkpoint is whole and of these values, to the bit."""
    loaded, _ = load(path, one)
    return all(torch.equal(loaded[name], tensor) for name, tensor in state(value).items())


def found(folder: Path | str) -> list[str]:
    """Everything there is in a folder."""
    fs, path = url_to_fs(str(folder))
    return sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False))


def last(path: Path | str) -> str:
    """The last part of a path or URL."""
    return str(path).rpartition("/")[2]


def files(path: Path | str) -> tuple[AbstractFileSystem, dict[str, str]]:
    """The filesystem of a checkpoint, and its files: paths by name."""
    fs, root = url_to_fs(str(path))
    return fs, {file.rpartition("/")[2]: file for file in fs.find(root)}


def test_what_is_saved_is_loaded(folder: Path | str, one: World) -> None:
    """Tensors to the bit, and the meta; what comes back is a path for a path and a URL for a URL."""
    path = save(folder, one, update=7)
    assert path == (folder / "000007" if isinstance(folder, Path) else f"{folder}/000007")
    assert checkpoint.listed(folder) == [path]
    assert holds(path, one, 7.0)
    assert load(path, one)[1] == options(one, 7)["meta"]


def test_meta_may_be_anything_that_json_holds(tmp_path: Path, one: World) -> None:
    """Numbers as keys too, whose order is another than that of their texts, and tuples; they come back as JSON has them."""
    told = {**options(one, 1), "meta": {10: (1, 2), 9: float("inf")}}
    path = checkpoint.save(tmp_path, state(), **told)
    assert load(path, one)[1] == {"10": [1, 2], "9": float("inf")}


def test_the_newest_are_kept(folder: Path | str, one: World) -> None:
    """Older ones go only after the newer is there; nothing else is left behind."""
    for update in (2, 4, 10, 12):
        save(folder, one, update=update, keep=2)
    assert found(folder) == ["000010", "000012"]
    assert last(checkpoint.listed(folder)[-1]) == "000012"


def test_a_millionth_update_is_newer_than_the_last_before(folder: Path | str, one: World) -> None:
    """Names are numbers, not text."""
    for update in (999999, 1000000):
        save(folder, one, update=update, keep=1)
    assert found(folder) == ["1000000"]


def test_saving_an_update_again_replaces_it(folder: Path | str, one: World) -> None:
    """As after a resumption from an earlier one; the earlier files are gone."""
    path = save(folder, one, update=3)
    count = len(files(path)[0].find(url_to_fs(str(path))[1]))
    again = checkpoint.save(folder, state(30.0), **options(one, 3))
    assert again == path
    assert found(folder) == ["000003"]
    assert len(files(path)[0].find(url_to_fs(str(path))[1])) == count
    assert holds(path, one, 30.0)


def test_a_left_branch_is_removed(folder: Path | str, one: World) -> None:
    """After resuming from an earlier one, later ones are of another run: what was just saved is the newest and stays."""
    for update in (6, 8):
        save(folder, one, update=update)
    save(folder, one, update=7, keep=1)
    assert found(folder) == ["000007"]


def test_folders_of_a_person_are_left_alone(tmp_path: Path, one: World) -> None:
    """A copy under another name is neither the newest nor removed, and can be loaded."""
    path = save(tmp_path, one, update=1)
    path.rename(tmp_path / "000009-mine")
    save(tmp_path, one, update=2)
    save(tmp_path, one, update=3, keep=1)
    assert found(tmp_path) == ["000003", "000009-mine"]
    assert last(checkpoint.listed(tmp_path)[-1]) == "000003"
    assert holds(tmp_path / "000009-mine", one, 1.0)


def test_a_checkpoint_of_a_url_is_one_on_a_disk_too(tmp_path: Path, one: World) -> None:
    """Whoever copies it down has a checkpoint."""
    url = save("memory://copied/checkpoints", one, update=4)
    fs, root = url_to_fs(url)
    fs.get(root, str(tmp_path / "000004"), recursive=True)
    fs.rm("/", recursive=True)
    assert holds(tmp_path / "000004", one, 4.0)


def test_a_file_url_and_a_plain_text_are_paths(tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They mean the same disk, and are written alike; a relative path stays one."""
    monkeypatch.chdir(tmp_path)
    path = save(Path("here"), one, update=1)
    assert path == Path("here/000001")
    assert checkpoint.listed("here") == ["here/000001"]
    url = f"file://{tmp_path}/here"
    assert checkpoint.listed(url) == [f"{url}/000001"]
    save(url, one, update=2, keep=1)
    assert sorted(file.name for file in (tmp_path / "here" / "000002").iterdir()) == [
        "manifest.json",
        "shard-00001-model-00001-of-00001.safetensors",
    ]


def test_a_folder_behind_a_url_without_a_manifest_is_no_checkpoint(one: World) -> None:
    """A save that was killed left it: it is not listed, and the next save removes it."""
    folder = "memory://killed/checkpoints"
    older, newer = save(folder, one, update=1), save(folder, one, update=2)
    fs, paths = files(newer)
    fs.rm_file(paths["manifest.json"])
    assert checkpoint.listed(folder) == [older]
    with pytest.raises(RunError, match=r"manifest\.json is missing.*set resume_from to memory://killed/checkpoints/000001"):
        load(newer, one)
    save(folder, one, update=3)
    assert found(folder) == ["000001", "000003"]
    fs.rm("/", recursive=True)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("tape://deck/run", "tape://deck/run cannot be used: Protocol not known: tape"),
        ("s3://bucket/run", "s3://bucket/run cannot be used: Install s3fs"),
    ],
)
def test_a_url_that_cannot_be_used_is_a_usage_error(
    one: World, behind: World, monkeypatch: pytest.MonkeyPatch, url: str, says: str
) -> None:
    """An unknown protocol, and one whose package is not installed; in one line."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    calls: list[Callable[[], Any]] = [
        lambda: save(url, one, update=1),
        lambda: checkpoint.save_async(url, state(), **options(behind, 1)),
        lambda: checkpoint.listed(url),
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
    with pytest.raises(RunError, match="could not be saved: memory://refused/: Unable to locate credentials; earlier"):
        save("memory://refused", one, update=1)


def test_ranks_on_different_disks_are_noticed(tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a rank wrote and rank 0 does not see: better now than when it is needed."""
    elsewhere = [{"shard-00002-model-00001-of-00001.safetensors": {"bytes": 8, "sha256": "0"}}]
    monkeypatch.setattr(World, "gather_items", lambda self, item: [item, *elsewhere] if isinstance(item, dict) else [item])
    with pytest.raises(RunError, match=r"shard-00002.* is not there: all ranks must write to the same disk"):
        save(tmp_path, one, update=1)
    assert found(tmp_path) == []


@pytest.mark.parametrize("killed", [False, True])
def test_a_replacement_that_fails_puts_the_old_one_back(
    tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Whether the second rename fails or the process is killed before it."""
    path = save(tmp_path, one, update=3)
    rename, calls = storage.os.rename, 0

    def second_fails(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt if killed else OSError(errno.ENOSPC, "No space left on device")
        rename(*args)

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "rename", second_fails)
        with pytest.raises(KeyboardInterrupt if killed else RunError):
            save(tmp_path, one, update=3)
    assert checkpoint.listed(tmp_path) == [path]
    assert holds(path, one, 3.0)


def test_no_file_of_a_checkpoint_is_a_pickle(folder: Path | str, one: World) -> None:
    """Safetensors and JSON alone."""
    _, paths = files(save(folder, one, update=1))
    assert {Path(file).suffix for file in paths} == {".safetensors", ".json"}


def damages() -> dict[str, Callable[[AbstractFileSystem, str, str], Any]]:
    """Ways to damage a checkpoint, given its tensors' file and its manifest, and what the message says of each."""

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
    """Someone else's manifest, with the seal that belongs to it."""
    manifest = json.loads(text)
    return checkpoint._text({**manifest, "seal": checkpoint._digest(manifest)})


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
    assert f"set resume_from to {older}" in message
    assert "\n" not in message
    assert holds(older, one, 2.0)


def test_a_file_that_does_not_belong_to_a_checkpoint_is_refused(tmp_path: Path, one: World) -> None:
    """On a disk; the tensors of another would be taken for its own."""
    path = save(tmp_path, one, update=1)
    (path / "zz.safetensors").write_bytes(next(path.glob("*.safetensors")).read_bytes())
    with pytest.raises(RunError, match=r"zz\.safetensors does not belong to it\); there is no other whole one"):
        load(path, one)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, one: World) -> tuple[Path, Path]:
    """Two whole checkpoints."""
    folder = tmp_path_factory.mktemp("pair")
    return save(folder, one, update=1), save(folder, one, update=2)


@contextmanager
def refused(pair: tuple[Path, Path], one: World) -> Iterator[None]:
    """Let the second checkpoint be damaged, see that it is refused by name with the first as an offer, and mend it."""
    older, newest = pair
    before = {file: file.read_bytes() for file in newest.iterdir()}
    try:
        yield
        with pytest.raises(RunError) as error:
            load(newest, one)
        assert f"checkpoint {newest} is damaged" in str(error.value)
        assert f"set resume_from to {older}" in str(error.value)
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
    with pytest.raises(RunError, match=f"is damaged.*set resume_from to {tmp_path / '000001'}"):
        load(path, one)

    whole = tmp_path / "000003"
    whole.write_bytes(evil)
    with pytest.raises(RunError, match=rf"is damaged \(it is a file\); .*set resume_from to {tmp_path / '000001'}"):
        load(whole, one)
    assert checkpoint.listed(tmp_path) == [tmp_path / "000001", path]

    path = save(tmp_path, one, update=4)  # with a manifest that vouches for the pickle
    manifest = json.loads((path / "manifest.json").read_text())
    name = next(iter(manifest["files"]))
    manifest["files"][name] = {"bytes": len(evil), "sha256": checkpoint.hashlib.sha256(evil).hexdigest()}
    del manifest["seal"]
    (path / "manifest.json").write_bytes(sealed(json.dumps(manifest).encode()))
    (path / name).write_bytes(evil)
    checkpoint.verify(path)
    with pytest.raises(RunError, match=f"checkpoint {path} could not be read"):
        load(path, one)
    assert not target.exists()


def test_a_file_in_a_checkpoints_place_gives_way(tmp_path: Path, one: World) -> None:
    """To the checkpoint of that update."""
    (tmp_path / "000003").write_text("?")
    assert holds(save(tmp_path, one, update=3), one, 3.0)
    assert found(tmp_path) == ["000003"]


def test_a_foreign_checkpoint_is_refused(folder: Path | str, one: World) -> None:
    """It says which settings differ, or which tensors."""
    path = save(folder, one, update=1)
    with pytest.raises(RunError, match="of another run: seed 0 there, 1 here"):
        load(path, one, seed=1)
    others: dict[str, dict[str, Any]] = {
        r"it holds 5 tensors, 4 of the 5 expected": {"weight.a": None, "weight.c": torch.empty(2)},
        r"weight.a has shape \[3, 4\] there, \[9, 4\] here": {"weight.a": torch.empty(9, 4)},
        r"half is torch.bfloat16 there, torch.float32 here": {"half": torch.empty(5)},
    }
    for says, changes in others.items():
        other = {name: tensor for name, tensor in {**state(), **changes}.items() if tensor is not None}
        with pytest.raises(RunError, match=f"of another model: {says}"):
            checkpoint.load(path, other, fingerprint=FINGERPRINT, world=one)
    with pytest.raises(UsageError, match="000099 is not a checkpoint: there is no such folder"):
        load(re.sub("000001", "000099", str(path)), one)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("moment", ["draft", "tensors", "manifest", "sync", "rename"])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, one: World, behind: World, monkeypatch: pytest.MonkeyPatch, moment: str, background: bool
) -> None:
    """At whatever moment of a save: one line, and the earlier checkpoint is still the newest and whole."""
    older = save(tmp_path, one, update=1, keep=1)

    def saving() -> Path:
        if background:
            return checkpoint.save_async(tmp_path, state(2.0), **options(behind, 2, keep=1)).result()
        return save(tmp_path, one, update=2, keep=1)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    moments: dict[str, tuple[Any, str]] = {
        "draft": (storage.Path, "mkdir"),
        "tensors": (checkpoint.HuggingFaceStorageWriter, "write_data"),
        "manifest": (storage.LocalStore, "publish"),
        "sync": (storage.os, "fsync"),
        "rename": (storage.os, "rename"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*moments[moment], fail)
        with pytest.raises(RunError) as error:
            saving()
    assert str(error.value) == (
        f"checkpoint {tmp_path / '000002'} could not be saved: the disk is full; earlier checkpoints are as they were"
    )
    assert checkpoint.listed(tmp_path) == [older]
    assert found(tmp_path) == ["000001"]
    assert holds(older, one, 1.0)


@pytest.mark.parametrize("moment", ["makedirs", "open", "pipe_file", "cp_file"])
def test_a_full_bucket_loses_nothing(one: World, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Behind a URL too, for a new update and for one that is saved again."""
    folder = "memory://full/checkpoints"
    older = save(folder, one, update=1, keep=1)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    for update in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, moment, fail)
            with pytest.raises(RunError, match=f"00000{update} could not be saved: the disk is full"):
                checkpoint.save(folder, state(3.0), **options(one, update, keep=1))
        assert checkpoint.listed(folder) == [older]
        assert found(folder) == ["000001"]
        assert holds(older, one, 1.0)
    MemoryFileSystem().rm("/", recursive=True)


def test_a_save_in_the_background_writes_what_was(
    folder: Path | str, one: World, behind: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call returns before anything is written, and what changes afterwards is not saved."""
    saved, told, go = state(5.0), options(behind, 5), threading.Event()
    kind = storage.LocalStore if isinstance(folder, Path) else storage.RemoteStore
    draft = kind.draft

    def waits(self: Any, name: str) -> Any:
        assert go.wait(60)
        return draft(self, name)

    monkeypatch.setattr(kind, "draft", waits)
    pending = checkpoint.save_async(folder, saved, **told)
    assert not pending.done()
    assert checkpoint.listed(folder) == []
    for tensor in saved.values():
        tensor.zero_()
    told["meta"]["numbers"].clear()
    go.set()
    path = pending.result(60)
    assert checkpoint.listed(folder) == [path]
    assert holds(path, one, 5.0)
    assert load(path, one)[1] == options(behind, 5)["meta"]


def test_saves_in_the_background_follow_each_other(folder: Path | str, one: World, behind: World) -> None:
    """With the result asked for in between, they leave what the others do."""
    for update in (1, 2, 3):
        checkpoint.save_async(folder, state(float(update)), **options(behind, update, keep=2)).result(60)
    assert found(folder) == ["000002", "000003"]
    assert threading.active_count() < 50


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder that two ranks saved checkpoints to, and what these and the four that loaded them say."""
    folder = tmp_path_factory.mktemp("ranks") / "checkpoints"
    return folder, launch.call("saving:save", folder)


def whole(value: float) -> dict[str, torch.Tensor]:
    """The tensors that saving.py shards; their rows are no multiple of the ranks."""
    return {
        "matrix": torch.arange(21, dtype=torch.float32).reshape(7, 3) * value,
        "columns": torch.arange(10, dtype=torch.bfloat16).reshape(2, 5) * value,
        "short": torch.full((1, 2), value, dtype=torch.float64),
        "everywhere": torch.tensor([value, 2 * value]),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("000001", 1.0), ("000002", 2.0)])
def test_two_ranks_save_and_one_process_loads(
    ranks: tuple[Path, dict[str, Any]], one: World, name: str, value: float
) -> None:
    """The same bits, sharded and not, of a save that was waited for and of one in the background."""
    path = ranks[0] / name
    assert len([*path.glob("*.safetensors")]) == 2
    plain = {key: torch.zeros_like(tensor) for key, tensor in whole(value).items()}
    checkpoint.load(path, plain, fingerprint=FINGERPRINT, world=one)
    sharded = {key: distribute_tensor(torch.zeros_like(t), one.mesh, [Shard(0)]) for key, t in whole(value).items()}
    checkpoint.load(path, {**sharded}, fingerprint=FINGERPRINT, world=one)
    for key, tensor in whole(value).items():
        assert torch.equal(plain[key], tensor)
        assert torch.equal(sharded[key].full_tensor(), tensor)


@pytest.mark.slow
def test_two_ranks_save_and_four_load(ranks: tuple[Path, dict[str, Any]]) -> None:
    """Each fills its own shards, some of them empty."""
    assert ranks[1]["wrong on four"] == [[]] * 4
    assert ranks[1]["wrong on two"] == [[]] * 2


@pytest.mark.slow
def test_damage_is_refused_on_all_ranks(ranks: tuple[Path, dict[str, Any]]) -> None:
    """By the rank that saw it, with the newest whole one."""
    messages = ranks[1]["damaged"]
    named = [message for message in messages if "is damaged" in message]
    assert len(named) == 1
    assert f"set resume_from to {ranks[0] / '000002'}" in named[0]
    assert sum(message.startswith("ElsewhereError") for message in messages) == 3


@pytest.mark.slow
@pytest.mark.parametrize("where", ["foreground", "background"])
def test_a_failure_of_one_rank_is_reported_on_both(ranks: tuple[Path, dict[str, Any]], where: str) -> None:
    """As a RunError on each, and without a trace in the folder."""
    messages = ranks[1][f"failed in the {where}"]
    reason = f"checkpoint {ranks[0] / '000003'} could not be saved: the disk is full; earlier checkpoints are as they were"
    assert sum(reason in message for message in messages) >= 1
    assert all(reason in message or "gave up; its own message says why" in message for message in messages)
    assert len(messages) == 2
    assert ranks[1]["found"] == ["000001", "000002"]


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_background_leaves_the_earlier_ones(ranks: tuple[Path, dict[str, Any]]) -> None:
    """The other rank is told that it is alone, and the next save clears up."""
    killed = ranks[1]["killed"]
    assert killed["survivor"].startswith("LostProcessError")
    assert killed["listed"] == ["000001", "000002"]
    assert killed["wrong"] == []
    assert killed["found after the next"] == ["000001", "000002", "000004"]
