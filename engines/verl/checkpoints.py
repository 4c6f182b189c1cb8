"""Checkpoints of an engine of verl: fluvial's own in the folder that verl names, and weights as diffusers reads them."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fluvial.engines.checkpoint import checkpoint
from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.config import DTYPES
from fluvial.engines.fsdp.engine import Engine
from fluvial.engines.fsdp.export import export, write_lora
from fluvial.engines.fsdp.world import World
from fluvial.engines.verl.settings import Settings


class Checkpoints:
    """The checkpoints of one engine, see `VerlEngine.save_checkpoint` and `load_checkpoint`."""

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings, self.world = settings, world
        self.saved: list[Path] = []

    def save(self, engine: Engine, path: Path, *, step: int, rounds: int, keep: int | None) -> None:
        """Write a checkpoint of an engine on its device, then remove those that this object wrote but the newest `keep`."""
        settings, world = self.settings, self.world
        meta = {**engine.counters(), "rounds": rounds}
        checkpoint.save(path, engine.state(), meta, update=step, fingerprint=self._fingerprint(), world=world, keep=1)
        if settings.export and settings.lora is not None:
            write_lora(engine.module, path / "lora_adapter", world=world)
        elif settings.export:
            export(engine.module, path / "huggingface", dtype=DTYPES[settings.sent], world=world)
        self.saved = [*(old for old in self.saved if old != path), path]
        while keep and len(self.saved) > keep:
            self._remove(self.saved.pop(0))

    def load(self, engine: Engine, path: Path, *, remove: bool) -> int:
        """Restore a checkpoint of an engine on its device, and return the number of calls of `lr_scheduler_step` before."""
        with self.world.agreed():
            found = checkpoint.listed(path, recover=False)
            if not found:
                raise UsageError(f"{path} holds no checkpoint of fluvial")
        state = engine.state()
        meta = checkpoint.load(found[-1], state, fingerprint=self._fingerprint(), world=self.world)
        engine.restore(state, meta)
        self.world.gather_items(None)  # every rank has read it
        if remove:
            self._remove(path)
        return int(meta["rounds"])

    def _remove(self, path: Path) -> None:
        if self.world.is_main:
            shutil.rmtree(path, ignore_errors=True)

    def _fingerprint(self) -> dict[str, Any]:
        """Return what a checkpoint and the engine that loads it must share."""
        lora, optimizer = self.settings.lora, self.settings.optimizer
        shared = None
        if lora is not None:  # as JSON holds it, which has no tuples
            shared = {
                **asdict(lora),
                "targets": lora.targets and [*lora.targets],
                "weights": lora.weights and str(lora.weights),
            }
        return {
            "architecture": self.settings.architecture,
            "lora": shared,
            "adapters": list(self.settings.adapters),
            "optimizer": None if optimizer is None else optimizer.name,
        }


def check_remote(path: str | None) -> None:
    """Raise UsageError if verl asks for a copy on HDFS."""
    if path is not None:
        raise UsageError(f"hdfs_path is {path}, expected None: checkpoints are written to and read from local_path")
