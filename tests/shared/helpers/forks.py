"""Runs functions in forked processes: many of them in the time that one import of torch takes.

For scripts of their own, not for the test process: what is forked must have no threads yet.
"""

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from fluvial.engines.engine.world import World, init_world
from fluvial.engines.errors import RunError


class Ended(NamedTuple):
    value: Any
    signal: int


class Forked:
    """A process that runs a function; what that returns, which JSON must hold, comes back by `end`."""

    def __init__(self, function: Callable[[], Any], **environment: str) -> None:
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        code = 1
        try:
            os.close(self.pipe)
            os.environ.update(environment)
            with os.fdopen(write, "w") as stream:
                json.dump(function(), stream)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def end(self, timeout: float = 60.0) -> Ended:
        """Wait for the process.

        Raises:
            AssertionError: the function raised, or took too long.
        """
        text, until = b"", time.monotonic() + timeout
        while True:
            if not select.select([self.pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"no end within {timeout:g} s")
            part = os.read(self.pipe, 65536)
            if not part:
                break
            text += part
        os.close(self.pipe)
        status = os.waitpid(self.pid, 0)[1]
        assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the function raised"
        return Ended(json.loads(text) if text else None, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def on_ranks(count: int, function: Callable[[World], Any], *, catch: bool = False) -> list[Ended]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def run() -> Any:
        try:
            with init_world(timeout=60) as world:
                return function(world)
        except RunError as error:
            if not catch:
                raise
            return f"{type(error).__name__}: {error}"

    forked = [Forked(run, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(count)]
    return [process.end() for process in forked]


def alone(function: Callable[[World], Any]) -> Ended:
    return Forked(lambda: as_world(function)).end()


def as_world(function: Callable[[World], Any]) -> Any:
    with init_world() as world:
        return function(world)
