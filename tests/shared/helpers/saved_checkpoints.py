"""A small state, and saving and loading it: what the tests of checkpoints share."""

from pathlib import Path
from typing import Any

import torch
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from fluvial.engines.engine.world import World
from fluvial.engines.run.checkpoint import checkpoint

FINGERPRINT = {"seed": 0, "train": "full"}


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "weight.a": torch.full((3, 4), value),
        "weight.b": torch.arange(6, dtype=torch.float32).reshape(2, 3).T * value,
        "count": torch.tensor(value, dtype=torch.float64),
        "half": torch.arange(5, dtype=torch.bfloat16) * value,
        "none": torch.empty(0, 3),
    }


def options(one: World, update: int, keep: int = 5) -> dict[str, Any]:
    meta = {"update": update, "numbers": [1, 2.5, None, 1e-5], "text": "é"}
    return {"meta": meta, "update": update, "fingerprint": FINGERPRINT, "world": one, "keep": keep}


def save(
    folder: checkpoint.Folder, one: World, *, update: int, keep: int = 5, spare: int | None = None
) -> checkpoint.Folder:
    return checkpoint.save(folder, state(float(update)), **options(one, update, keep), spare=spare)


def load(path: Path | str, one: World, **changed: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    return loaded, checkpoint.load(path, loaded, fingerprint={**FINGERPRINT, **changed}, world=one)


def holds(path: Path | str, one: World, value: float) -> bool:
    loaded, _ = load(path, one)
    return all(torch.equal(loaded[name], tensor) for name, tensor in state(value).items())


def found(folder: Path | str) -> list[str]:
    fs, path = url_to_fs(str(folder))
    return sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False))


def last(path: Path | str) -> str:
    return str(path).rpartition("/")[2]


def files(path: Path | str) -> tuple[AbstractFileSystem, dict[str, str]]:
    fs, root = url_to_fs(str(path))
    return fs, {file.rpartition("/")[2]: file for file in fs.find(root)}
