"""Saves and loads sharded checkpoints on two and four ranks, for test_checkpoint.py."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DTensor imports when it is first used: once here, not in each forked process
import torch.distributed as dist
from helpers import forks
from helpers.saved_checkpoints import FINGERPRINT
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.run.checkpoint import checkpoint, storage


def whole(value: float) -> dict[str, Tensor]:
    """Return tensors whose rows are no multiple of the ranks."""
    return {
        "matrix": torch.arange(21, dtype=torch.float32).reshape(7, 3) * value,
        "columns": torch.arange(10, dtype=torch.bfloat16).reshape(2, 5) * value,
        "short": torch.full((1, 2), value, dtype=torch.float64),
        "everywhere": torch.tensor([value, 2 * value]),
    }


def sharded(value: float, world: World) -> dict[str, DTensor]:
    """Return them sharded by rows, by columns, into fewer rows than ranks, or copied."""
    placements = {"matrix": Shard(0), "columns": Shard(1), "short": Shard(0), "everywhere": Replicate()}
    return {name: distribute_tensor(tensor, world.mesh, [placements[name]]) for name, tensor in whole(value).items()}


def told(update: int, world: World) -> dict[str, Any]:
    return {"meta": {}, "update": update, "fingerprint": FINGERPRINT, "world": world, "keep": 9}


def wrong(folder: Path, world: World) -> list[str]:
    names = []
    for update in (1, 2):
        expected = sharded(float(update), world)
        loaded = sharded(0.0, world)
        checkpoint.load(folder / f"00000{update}", {**loaded}, fingerprint=FINGERPRINT, world=world)
        names += [name for name in expected if not torch.equal(loaded[name].to_local(), expected[name].to_local())]
    return names


def message(call: Any) -> str:
    try:
        call()
    except RunError as error:
        return f"{type(error).__name__}: {error}"
    return "did not fail"


def saves(folder: Path, world: World) -> dict[str, Any]:
    behind = world.background()
    checkpoint.save(folder, plain(sharded(1.0, world)), **told(1, world))
    state = sharded(2.0, world)
    pending = checkpoint.save_async(folder, plain(state), **told(2, behind))
    for tensor in state.values():
        tensor.zero_()
    for i in range(100):  # training's own collectives, meanwhile
        total = torch.full((8,), float(world.rank + i))
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((8,), 2.0 * i + 1))
    pending.result(60)

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if world.rank == 1:
        storage.os.fsync = full
    state = sharded(3.0, world)
    foreground = message(lambda: checkpoint.save(folder, plain(state), **told(3, world)))
    background = message(lambda: checkpoint.save_async(folder, plain(state), **told(3, behind)).result(60))
    return {"foreground": foreground, "background": background, "found": sorted(os.listdir(folder))}


def plain(state: dict[str, DTensor]) -> dict[str, Tensor]:
    return {**state}


def dies(folder: Path, world: World) -> None:
    """Start a save in the background, in which rank 1 is killed after half of its file."""
    create = storage.LocalStore.create

    def half(self: storage.LocalStore, draft: storage.Draft, file: str) -> Any:
        if world.rank == 1:
            Path(self.path, draft.folder, file).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return create(self, draft, file)

    storage.LocalStore.create = half  # type: ignore[method-assign]
    checkpoint.save_async(folder, plain(sharded(4.0, world)), **told(4, world.background())).result(60)


def killed(folder: Path) -> dict[str, Any]:
    first, second = forks.on_ranks(2, lambda world: dies(folder, world), catch=True)
    assert second.signal == signal.SIGKILL
    listed = [path.name for path in checkpoint.list_checkpoints(folder)]
    bad = forks.alone(lambda world: wrong(folder, world)).value

    def again(world: World) -> None:
        checkpoint.save(folder, plain(sharded(4.0, world)), **told(4, world))

    forks.on_ranks(2, again)
    left = sorted(os.listdir(folder))
    checkpoint.open_store(folder).remove("000004")
    return {"survivor": first.value, "listed": listed, "wrong": bad, "found after the next": left}


def damaged(folder: Path, world: World) -> str:
    loaded = sharded(0.0, world)
    return message(lambda: checkpoint.load(folder / "000001", plain(loaded), fingerprint=FINGERPRINT, world=world))


def save(to: str) -> dict[str, Any]:
    """Save checkpoints on two ranks to a folder, load them on two and on four, and return what each says."""
    folder = Path(to)
    saved = [ended.value for ended in forks.on_ranks(2, lambda world: saves(folder, world))]
    result: dict[str, Any] = {
        "failed in the foreground": [value["foreground"] for value in saved],
        "failed in the background": [value["background"] for value in saved],
        "found": saved[0]["found"],
        "wrong on two": [ended.value for ended in forks.on_ranks(2, lambda world: wrong(folder, world))],
        "wrong on four": [ended.value for ended in forks.on_ranks(4, lambda world: wrong(folder, world))],
    }
    file = max((folder / "000001").glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    result["damaged"] = [ended.value for ended in forks.on_ranks(4, lambda world: damaged(folder, world))]
    file.write_bytes(whole)
    result["killed"] = killed(folder)
    return result
