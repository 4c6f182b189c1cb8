"""The folder of an export: it appears once everything in it is on the disk."""

import os
from pathlib import Path
from typing import Any

import pytest

from fluvial.engines.engine.world import init_world
from fluvial.engines.export import model_folder


def test_an_export_gets_its_name_after_its_bytes_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = model_folder.sync, os.rename

    def noted(event: str, call: Any, *args: Any) -> None:
        events.append(event)
        call(*args)

    monkeypatch.setattr(model_folder, "sync", lambda path: noted(Path(path).name, sync, path))
    monkeypatch.setattr(os, "rename", lambda old, new: noted("rename", rename, old, new))
    with init_world() as world, model_folder.open_draft(tmp_path / "out", {"format": "lora"}, world) as draft:
        (draft / "part").mkdir()
        for name in ("a.safetensors", "part/b.safetensors"):
            (draft / name).write_bytes(b"weights")
    named = events.index("rename")
    assert {"a.safetensors", "b.safetensors", model_folder.RECORD, draft.name} <= set(events[:named])
    assert events[named + 1 :] == [tmp_path.name]
    assert model_folder.is_exported(tmp_path / "out", {"format": "lora"})
