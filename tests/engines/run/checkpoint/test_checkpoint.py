"""Checkpoints are whole or not there, and refused by name when they are not what they should be."""

import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.core import url_to_fs
from helpers.refusals import fails, refuses
from helpers.saved_checkpoints import files, found, holds, last, load, options, save, state

from fluvial.engines.engine.world import World
from fluvial.engines.run.checkpoint import checkpoint, storage


def test_what_is_saved_is_loaded(folder: Path | str, one: World) -> None:
    """Tensors to the bit, and the meta; what comes back is a path for a path and a URL for a URL."""
    path = save(folder, one, update=7)
    assert path == (folder / "000007" if isinstance(folder, Path) else f"{folder}/000007")
    assert checkpoint.list_checkpoints(folder) == [path]
    assert holds(path, one, 7.0)
    assert load(path, one)[1] == options(one, 7)["meta"]


def test_meta_may_be_anything_that_json_holds(tmp_path: Path, one: World) -> None:
    """Numbers as keys too, whose order is another than that of their texts, and tuples; they come back as JSON has them."""
    told = {**options(one, 1), "meta": {10: (1, 2), 9: float("inf")}}
    path = checkpoint.save(tmp_path, state(), **told)
    assert load(path, one)[1] == {"10": [1, 2], "9": float("inf")}


@pytest.mark.parametrize(
    ("there", "here"), [({"a": 1, "b": 2}, {"a": 1}), ({"a": 1}, {"a": 1, "b": 2}), ({"a": 1, "b": 2}, {"a": 1, "b": 3})]
)
def test_a_setting_that_differs_is_named(tmp_path: Path, one: World, there: dict[str, int], here: dict[str, int]) -> None:
    """One that only the checkpoint has, or only the run, is a difference, too."""
    path = checkpoint.save(tmp_path, state(), **{**options(one, 1), "fingerprint": there})
    refuses(
        f"b {there.get('b')!r} there, {here.get('b')!r} here; resume with",
        checkpoint.load,
        path,
        state(),
        fingerprint=here,
        world=one,
    )


@pytest.mark.parametrize(
    ("updates", "keep", "left"),
    [
        ([2, 4, 10, 12], 2, ["000010", "000012"]),
        ([999999, 1000000], 1, ["1000000"]),  # names are numbers, not text
        ([6, 8, 7], 1, ["000007"]),  # what was saved after resuming from an earlier one is another run, and the newest
    ],
)
def test_the_newest_are_kept(folder: Path | str, one: World, updates: list[int], keep: int, left: list[str]) -> None:
    """Older ones go only after the newer is there, except a spare one; nothing else is left behind."""
    for update in updates:
        save(folder, one, update=update, keep=keep)
    assert found(folder) == left
    assert last(checkpoint.list_checkpoints(folder)[-1]) == left[-1]
    save(folder, one, update=updates[-1] + 9, keep=1, spare=int(left[0]))
    assert {*found(folder)} == {left[0], f"{updates[-1] + 9:06d}"}


def test_saving_an_update_again_replaces_it(folder: Path | str, one: World) -> None:
    """As after a resumption from an earlier one; the earlier files are gone."""
    path = save(folder, one, update=3)
    count = len(files(path)[0].find(url_to_fs(str(path))[1]))
    again = checkpoint.save(folder, state(30.0), **options(one, 3))
    assert again == path
    assert found(folder) == ["000003"]
    assert len(files(path)[0].find(url_to_fs(str(path))[1])) == count
    assert holds(path, one, 30.0)


def test_folders_of_a_person_are_left_alone(tmp_path: Path, one: World) -> None:
    """A copy under another name is neither the newest nor removed, and can be loaded."""
    path = save(tmp_path, one, update=1)
    path.rename(tmp_path / "000009-mine")
    save(tmp_path, one, update=2)
    save(tmp_path, one, update=3, keep=1)
    assert found(tmp_path) == ["000003", "000009-mine"]
    assert last(checkpoint.list_checkpoints(tmp_path)[-1]) == "000003"
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
    assert checkpoint.list_checkpoints("here") == ["here/000001"]
    url = f"file://{tmp_path}/here"
    assert checkpoint.list_checkpoints(url) == [f"{url}/000001"]
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
    assert checkpoint.list_checkpoints(folder) == [older]
    fails(r"manifest\.json is missing.*set checkpoint.resume_from to memory://killed/checkpoints/000001", load, newer, one)
    save(folder, one, update=3)
    assert found(folder) == ["000001", "000003"]
    fs.rm("/", recursive=True)


def test_a_file_in_a_checkpoints_place_gives_way(tmp_path: Path, one: World) -> None:
    """To the checkpoint of that update."""
    (tmp_path / "000003").write_text("?")
    assert holds(save(tmp_path, one, update=3), one, 3.0)
    assert found(tmp_path) == ["000003"]


def test_a_save_in_the_background_writes_what_was(
    folder: Path | str, one: World, behind: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call returns before anything is written, and what changes afterwards is not saved."""
    saved, told, go = state(5.0), options(behind, 5), threading.Event()
    kind = storage.LocalStore if isinstance(folder, Path) else storage.RemoteStore
    draft = kind.create_draft

    def waits(self: Any, name: str) -> Any:
        assert go.wait(60)
        return draft(self, name)

    monkeypatch.setattr(kind, "create_draft", waits)
    pending = checkpoint.save_async(folder, saved, **told)
    assert not pending.done()
    assert checkpoint.list_checkpoints(folder) == []
    for tensor in saved.values():
        tensor.zero_()
    told["meta"]["numbers"].clear()
    go.set()
    path = pending.result(60)
    assert checkpoint.list_checkpoints(folder) == [path]
    assert holds(path, one, 5.0)
    assert load(path, one)[1] == options(behind, 5)["meta"]


def test_saves_in_the_background_follow_each_other(folder: Path | str, one: World, behind: World) -> None:
    """With the result asked for in between, they leave what the others do, and no threads."""
    before = threading.active_count()
    for update in (1, 2, 3):
        checkpoint.save_async(folder, state(float(update)), **options(behind, update, keep=2)).result(60)
    assert found(folder) == ["000002", "000003"]
    assert threading.active_count() <= before + 1  # the one that writes
