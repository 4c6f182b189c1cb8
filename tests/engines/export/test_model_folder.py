"""Files of an export: written one by one, all there or as they were before; what formats write and copy."""

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_pipelines
from helpers.exported import INDEX, SINGLE, contents, moved, opened
from helpers.lora_model import MODEL, adapted, run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fluvial.engines.export.model_folder as exporting
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.export import formats
from fluvial.engines.export.formats import COMFY_WEIGHTS
from fluvial.engines.export.model_folder import export, write_lora, write_model
from fluvial.engines.files import save_tensors


def test_a_file_of_weights_is_as_readable_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save_tensors({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_the_same_tensors_are_the_same_bytes(tmp_path: Path) -> None:
    """Whatever order safetensors writes the metadata in, which is another one for each file."""
    metadata = {"format": "pt", "settings": '{\n  "größe": 1\n}', "a": "1", "b": "2", "c": "3"}
    tensors, path, found = {"weight": torch.arange(3.0)}, tmp_path / "a.safetensors", set[bytes]()
    for _ in range(8):
        save_tensors(tensors, path, metadata=metadata)
        found.add(path.read_bytes())
    assert len(found) == 1
    assert torch.equal(load_file(path)["weight"], tensors["weight"])
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == metadata


def test_a_shard_is_written_as_soon_as_it_is_whole(tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no more than one file's tensors wait in memory, and what is larger than a file alone."""
    tensors = {"a": 40, "large": 400, "b": 40, "c": 40, "d": 60}  # bytes; files of at most 100
    like = {name: torch.empty(count // 4, device="meta") for name, count in tensors.items()}
    events: list[str] = []

    def saving(shard: dict[str, Tensor], path: Path, **kwargs: Any) -> None:
        events.append("+".join(shard))
        save_file(shard, path, **kwargs)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in like.items():
            events.append(name)
            yield name, torch.ones(tensor.shape)

    monkeypatch.setattr(exporting, "save_tensors", saving)
    write_model(stream(), tmp_path, like=like, config=None, max_shard_size=100, world=one)
    assert events == ["a", "large", "large", "b", "a+b", "c", "d", "c+d"]
    index = json.loads((tmp_path / INDEX).read_text())
    assert set(index["weight_map"]) == set(tensors)


def test_an_export_replaces_the_one_before(tmp_path: Path, one: World) -> None:
    """Nothing of another split is left to be opened in its place; what belongs to others stays."""
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"")
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "left-by-a-crash.safetensors").write_bytes(b"1")
    others = {"README.md", "diffusion_pytorch_model.fp16.safetensors", "config.json"}
    other = MODEL.build()
    nn.init.ones_(other.get_parameter("proj_out.weight"))
    for module, size in ((MODEL.build(), "5GB"), (other, "1MB"), (MODEL.build(), "2MB"), (other, "5GB")):
        export(module, tmp_path, max_shard_size=size, world=one)
        files = set(contents(tmp_path)) - others
        assert (files == {SINGLE}) == (size == "5GB")
        if size != "5GB":
            index = json.loads((tmp_path / INDEX).read_text())
            assert files == {INDEX, *index["weight_map"].values()}
        assert torch.equal(run(opened(tmp_path)), run(module))
        assert others <= set(contents(tmp_path))


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")]
)
def test_a_write_that_fails_leaves_the_older_export(
    tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    export(MODEL.build(), tmp_path, max_shard_size="1MB", world=one)
    write_lora(adapted(), tmp_path, world=one)
    before = contents(tmp_path)
    written: list[str] = []

    def failing(shard: dict[str, Tensor], path: Path, **kwargs: Any) -> None:
        if written or "lora" in path.name:
            path.write_bytes(b"half")
            raise error
        save_file(shard, path, **kwargs)
        written.append(path.name)

    monkeypatch.setattr(exporting, "save_tensors", failing)
    reason = "the disk is full" if error.errno == errno.ENOSPC else r"\[Errno 5\] Input/output error"
    with pytest.raises(RunError, match=rf"^weights cannot be written to {tmp_path}: {reason}$"):
        export(moved(), tmp_path, merge=True, max_shard_size="1MB", world=one)
    assert written
    assert contents(tmp_path) == before
    with pytest.raises(RunError, match=rf"^weights cannot be written to {tmp_path}: {reason}$"):
        write_lora(moved(), tmp_path, world=one)
    assert contents(tmp_path) == before


def test_what_stops_between_two_files_leaves_no_mixture(tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of some new and some old files does not open, whatever their names; the next export mends it."""
    export(MODEL.build(), tmp_path, max_shard_size="1MB", world=one)
    replace = os.replace
    moved_files: list[str] = []

    def failing(source: Path, target: Path) -> None:
        if moved_files:
            raise OSError(errno.EIO, "Input/output error")
        moved_files.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(RunError, match="weights cannot be written"):
        export(moved(), tmp_path, merge=True, max_shard_size="1MB", world=one)
    assert re.fullmatch(r"diffusion_pytorch_model-00001-of-0000\d.safetensors", moved_files[0])
    with pytest.raises(OSError, match="no file named"):
        opened(tmp_path)
    monkeypatch.undo()
    export(MODEL.build(), tmp_path, max_shard_size="1MB", world=one)
    assert torch.equal(run(opened(tmp_path)), run(MODEL.build()))


def test_a_file_in_the_way_is_an_error(tmp_path: Path, one: World) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(RunError, match=r"weights cannot be written to .*out"):
        export(MODEL.build(), tmp_path / "out", world=one)


def test_an_export_gets_its_name_after_its_bytes_are_on_the_disk(
    tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = exporting.sync, os.rename

    def noted(event: str, call: Any, *args: Any) -> None:
        events.append(event)
        call(*args)

    monkeypatch.setattr(exporting, "sync", lambda path: noted(Path(path).name, sync, path))
    monkeypatch.setattr(os, "rename", lambda old, new: noted("rename", rename, old, new))
    with exporting.open_draft(tmp_path / "out", {"format": "lora"}, one) as draft:
        (draft / "part").mkdir()
        for name in ("a.safetensors", "part/b.safetensors"):
            (draft / name).write_bytes(b"weights")
    named = events.index("rename")
    assert {"a.safetensors", "b.safetensors", exporting.RECORD, draft.name} <= set(events[:named])
    assert events[named + 1 :] == [tmp_path.name]
    assert exporting.is_exported(tmp_path / "out", {"format": "lora"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "sd3"
    tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], folder)
    return folder


def test_the_original_layout_holds_the_average_that_is_given(folder: Path, tmp_path: Path, one: World) -> None:
    """As an export during training passes it; tensors without an average are the module's own."""
    model = tiny_pipelines.opened("sd3", folder)
    module = model.build()
    name, parameter = next(iter(module.named_parameters()))
    average = {name: parameter.detach() + 1}
    formats.write("comfyui", module, model, tmp_path / "average", average=average, world=one)
    formats.write("comfyui", module, model, tmp_path / "before", world=one)
    with torch.no_grad():
        parameter.add_(1)
    formats.write("comfyui", module, model, tmp_path / "in place", world=one)
    given, before, expected = (load_file(tmp_path / out / COMFY_WEIGHTS) for out in ("average", "before", "in place"))
    assert all(torch.equal(given[key], expected[key]) for key in expected)
    assert any(not torch.equal(before[key], expected[key]) for key in expected)


def test_a_whole_pipeline_has_no_file_of_the_network_before_training(folder: Path, tmp_path: Path, one: World) -> None:
    """Variants of the base network, such as fp16, are left out; the other parts are copied whole."""
    stale = "diffusion_pytorch_model.fp16.safetensors"
    for part in ("transformer", "vae"):
        (folder / part / stale).write_bytes(b"base")
    model = tiny_pipelines.opened("sd3", folder)
    formats.write("full", model.build(), model, tmp_path / "full", world=one)
    assert not (tmp_path / "full" / "transformer" / stale).exists()
    assert (tmp_path / "full" / "vae" / stale).exists()
