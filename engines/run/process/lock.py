"""Lock of a run folder: one living run writes it at a time, on a disk and on a network file system.

Kernel locks do not reach other hosts on every network file system, so the lock is a file that is created exclusively and
names its holder. A dead holder on this machine is recognised by its process id and start time. One on another machine is
watched: a living one touches the file every `BEAT` seconds, and one that has not for `STALE` seconds is dead. No clocks are
compared. A file without a living holder is replaced, by one process alone: the one that locks the replacement.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from fluvial.engines.errors import RunError, UsageError

NAME = ".lock"
GONE = (None, -1)  # what is read of a lock that is not there
BEAT, STALE = 10.0, 120.0  # seconds; network file systems show the attributes of a file up to 60 s late


class FolderLock:
    """Hold of a run folder by this process; another `FolderLock` of the same process is the same hold.

    Args:
        folder: folder that exists.
        say: where the line of a wait for the holder's next sign of life goes.

    Raises:
        UsageError: a living process holds it.
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self.path, self.me, self._ended = folder / NAME, _this_process(), Event()
        _take(self.path, self.me, say)
        Thread(target=self._beat, name="lock", daemon=True).start()

    def check(self) -> None:
        """Raise RunError if another process has taken the folder, e.g. because this one was suspended for minutes."""
        with suppress(OSError):
            holder = _read(self.path)[0]
            if holder not in (None, self.me):
                raise RunError(f"{_tell(self.path, holder)}, while this process was suspended: it stops, nothing is written")

    def release(self) -> None:
        """Leave the folder to others."""
        self._ended.set()
        with suppress(OSError):
            if _read(self.path)[0] == self.me:
                self.path.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with suppress(OSError):
                if _read(self.path)[0] == self.me:
                    os.utime(self.path)


def _take(path: Path, me: dict[str, Any], say: Callable[[str], None]) -> None:
    """Make `me` the holder that the file names; UsageError if it names a living process."""
    while True:
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(me, file)
            return
        except FileExistsError:
            known = _read(path)
        if known == GONE:
            continue
        if known[0] == me:
            return
        if _is_alive(path, known, say):
            raise UsageError(f"{_tell(path, known[0])}: wait for its end, or set `out` to another folder")
        successor = path.with_name(f"{path.name}-successor")
        _take(successor, me, say)
        try:
            if _read(path) == known:
                draft = path.with_name(f"{path.name}-{me['pid']}")
                draft.write_text(json.dumps(me), encoding="utf-8")
                draft.replace(path)
        finally:
            successor.unlink()


def _is_alive(path: Path, known: tuple[Any, int], say: Callable[[str], None]) -> bool:
    """Return whether the holder of a lock lives; False too if the file is gone."""
    holder, me = known[0], _this_process()
    if holder is not None and all(holder[name] == me[name] for name in ("host", "machine")):
        return bool(holder["started"] == _find_start(holder["pid"]))
    say(f"{_tell(path, holder)}: waiting up to {STALE:g} s for a sign of life")
    for _ in range(round(STALE / BEAT)):
        time.sleep(BEAT)
        if (now := _read(path)) != known:
            return now != GONE
    return False


def _read(path: Path) -> tuple[Any, int]:
    """Return the holder that a lock names, None if it is not written yet, and the time of its last change."""
    try:
        with path.open(encoding="utf-8") as file:  # opening it makes a network file system ask its server
            text, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return GONE
    return (json.loads(text) if text.endswith("}") else None), changed


def _tell(path: Path, holder: Any) -> str:
    who = "another process" if holder is None else f"process {holder['pid']} on {holder['host']}"
    return f"run folder {path.parent} is held by {who}"


def _this_process() -> dict[str, Any]:
    """Return this process as a lock names it; in a container, process ids are those of its namespace."""
    machine = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return {"host": socket.gethostname(), "machine": machine, "pid": os.getpid(), "started": _find_start(os.getpid())}


def _find_start(pid: int) -> str | None:
    """Return when a process of this machine started, in ticks since the boot, or None if it does not run."""
    with suppress(OSError):
        state, *others = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if state in "ZX" else others[18]  # field 22 of proc(5)
    if not Path("/proc/self/stat").exists():
        with suppress(ProcessLookupError):  # a system without /proc
            os.kill(pid, 0)
            return ""
    return None
