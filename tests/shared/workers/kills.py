"""Saves checkpoints in world that die while they do, and looks at what is left, for test_kills.py."""

import errno
import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from helpers import forks
from helpers.saved_checkpoints import FINGERPRINT, state

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.run.checkpoint import checkpoint, storage

# Audit events of operations that change a disk; opening counts if it is for writing.
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
REMOVES = {"os.remove", "os.rmdir", "shutil.rmtree"}


class Bucket(DirFileSystem):
    """Behind the URL `bucket://` a folder that outlives a process, used as a service is: without renaming folders."""

    protocol = "bucket"

    def __init__(self, **options: Any) -> None:
        super().__init__(path=os.environ["BUCKET"], fs=LocalFileSystem(), **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path.removeprefix("bucket://")

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        beside = Path(os.environ["BUCKET"], f"copy-{os.getpid()}")
        beside.write_bytes(Path(self._join(path1)).read_bytes())
        os.replace(beside, self._join(path2))


class Fault:
    """Fault at a process's k-th operation on a disk: it is killed, or the disk is full from then on."""

    def __init__(self, k: int, *, full: bool) -> None:
        self.left, self.full = k, full

    def __call__(self, *, removes: bool = False) -> None:
        self.left -= 1
        if self.left >= 0:
            return
        if not self.full:
            os.kill(os.getpid(), signal.SIGKILL)
        if not removes:
            raise OSError(errno.ENOSPC, "No space left on device")

    def strike(self) -> None:
        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event in CHANGES and not (event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)):
                self(removes=event in REMOVES)

        def fsync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
            self()
            real(descriptor)

        def pipe_file(fs: LocalFileSystem, path: str, data: bytes, **options: Any) -> None:
            with fs.open(path, "wb") as stream:
                Torn(stream, self).write(data)

        os.fsync = fsync  # type: ignore[assignment]
        LocalFileSystem.pipe_file = pipe_file
        for kind in (storage.LocalStore, storage.RemoteStore):
            setattr(kind, "create", torn(kind.create, self))  # noqa: B010
        sys.addaudithook(audit)


class Torn:
    """A file that is written in two halves, so that a fault can come between them."""

    def __init__(self, stream: IO[bytes], fault: Fault) -> None:
        self.stream, self.fault = stream, fault

    def write(self, data: bytes) -> int:
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.fault()
            self.stream.write(part)
            self.stream.flush()
        return len(data)


def torn(create: Any, fault: Fault) -> Any:
    @contextmanager
    def created(self: storage.CheckpointStore, draft: storage.Draft, file: str) -> Iterator[Torn]:
        with create(self, draft, file) as stream:
            yield Torn(stream, fault)

    return created


def save(folder: Any, world: World, update: int, value: float, *, keep: int = 1) -> None:
    told: dict[str, Any] = {"update": update, "fingerprint": FINGERPRINT, "keep": keep, "world": world}
    if world.group is None:
        checkpoint.save(folder, state(value), {"value": value}, **told)
    else:
        checkpoint.save_async(folder, state(value), {"value": value}, **told).result()


def newest(folder: Any, world: World) -> tuple[int, float]:
    """Load the newest checkpoint: (its update, its value). Every one that is listed must be whole."""
    paths = checkpoint.list_checkpoints(folder)
    for path in paths:
        loaded = state(-1.0)
        meta = checkpoint.load(path, loaded, fingerprint=FINGERPRINT, world=world)
        value = meta["value"]
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state(value).items()), f"{path} is mixed"
    return int(str(paths[-1]).rpartition("/")[2]), value


# What is there before, (update, value) by (update, value); the save; and what the newest may be afterwards.
SCENES: dict[str, tuple[list[tuple[int, float]], tuple[int, float], list[tuple[int, float]]]] = {
    "a new update": ([(1, 1.0)], (2, 2.0), [(1, 1.0), (2, 2.0)]),
    "an update again": ([(2, 2.0)], (2, 20.0), [(2, 2.0), (2, 20.0)]),
    "a branch": ([(6, 6.0), (8, 8.0)], (7, 7.0), [(8, 8.0), (7, 7.0)]),
}


def every_moment(root: Path, *, scene: str, url: bool, full: bool, background: bool) -> dict[str, Any]:
    """Make the save of a scene meet its fault at each operation in turn, until it gets through; look at what is left.

    Returns:
        {operations: how many there are, outcomes: {newest afterwards: how often}}.
    """
    before, after, allowed = SCENES[scene]
    run, pristine = root / "run", root / "pristine"
    folder: Any = "bucket://run/checkpoints" if url else run / "checkpoints"
    os.environ["BUCKET"] = str(root)

    def prepare(world: World) -> None:
        for update, value in before:
            save(folder, world, update, value, keep=9)

    def meet(world: World) -> dict[str, bool]:
        fault, saved, among = Fault(k, full=full), True, world.background() if background else world
        fault.strike()
        try:
            save(folder, among, *after)
        except RunError as error:
            if "the disk is full; earlier checkpoints are unchanged" not in str(error):
                raise
            saved = False
        return {"struck": fault.left < 0, "saved": saved}

    def look(world: World) -> tuple[int, float]:
        found = newest(folder, world)
        assert found in allowed, f"after {k} operations the newest is {found}"
        # And another save leaves what it always leaves.
        save(folder, world, *after)
        assert newest(folder, world) == after
        left = sorted(os.listdir(run / "checkpoints"))
        assert left == [f"{after[0]:06d}"], f"after {k} operations and a save there is {left}"
        return found

    forks.alone(prepare)
    shutil.copytree(run, pristine)
    outcomes: Counter[str] = Counter()
    for k in itertools.count():
        ended = forks.alone(meet)
        through = ended.value is not None and not ended.value["struck"]
        assert ended.signal == (0 if full or through else signal.SIGKILL)
        outcomes[str(tuple(forks.alone(look).value))] += 1
        if through:
            assert ended.value["saved"]
            return {"operations": k, "outcomes": outcomes}
        shutil.rmtree(run)
        shutil.copytree(pristine, run)
    raise AssertionError


def any_moment(root: Path, *, rounds: int, url: bool, background: bool) -> dict[str, Any]:
    """Kill a process that saves without end at random times; look at what is left, and continue from there."""
    folder: Any = "bucket://run/checkpoints" if url else root / "run" / "checkpoints"
    os.environ["BUCKET"] = str(root)
    rng, ready = random.Random(0), root / "ready"

    def saves(world: World) -> None:
        update, _ = newest(folder, world)
        among = world.background() if background else world
        ready.touch()
        while True:
            update += rng.random() < 0.7  # else the same one again
            save(folder, among, update, update + rng.randrange(1024) / 1024, keep=2)

    updates = [0]
    forks.alone(lambda world: save(folder, world, 1, 1.0))
    for _ in range(rounds):
        process = forks.Forked(lambda: forks.as_world(saves))
        while not ready.exists():
            time.sleep(0.005)
        ready.unlink()
        time.sleep(rng.uniform(0.0, 0.25))
        os.kill(process.pid, signal.SIGKILL)
        assert process.end().signal == signal.SIGKILL
        update, value = forks.alone(lambda world: newest(folder, world)).value
        assert update <= value < update + 1
        assert update >= updates[-1], "an earlier checkpoint than was there before"
        updates.append(update)
    return {"updates": updates}


def explore(folder: str, work: str, options: dict[str, Any]) -> dict[str, Any]:
    works: dict[str, Callable[..., dict[str, Any]]] = {"every": every_moment, "any": any_moment}
    return works[work](Path(folder), **options)


fsspec.register_implementation("bucket", Bucket)
