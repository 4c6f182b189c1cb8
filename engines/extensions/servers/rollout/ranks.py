"""Processes that hold a part of the weights each and share every sample: the first one serves, the others repeat its calls.

What they must do together is marked `together`, and the first process does it in one order. Arguments travel as pickles
between these processes alone, weights as raw bytes.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from threading import RLock
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import LostProcessError, convert_errors

Function = TypeVar("Function", bound=Callable[..., Any])
IDLE = 1e7  # seconds that a request may be away; a process that dies closes its connections
LOST = "a process that shares the samples is gone, or failed alone; its own message says why"


def together(function: Function) -> Function:
    """Mark a function that all processes call when the first does; its first argument has `ranks`, None for one process."""

    @wraps(function)
    def call(served: Any, *args: Any) -> Any:
        return function(served, *args) if served.ranks is None else served.ranks.call(call, function, served, args)

    return call  # type: ignore[return-value]


class Ranks:
    """The processes of a server.

    Args:
        world: their process group. Every rank must make this at the same time.
    """

    def __init__(self, world: World) -> None:
        self._calls, self._weights = replace(world, timeout=IDLE).background(), world.background()
        self._turn, self._depth = RLock(), 0
        self._lost = False

    def call(self, marked: Function, function: Function, served: Any, args: tuple[Any, ...]) -> Any:
        """Call a function on all processes, and return what it returns here, or raise what it raises on all of them.

        Raises:
            LostProcessError: another process is gone, or one failed alone. The server ends.
        """
        with self._turn:
            if self._depth:  # a call within one
                return function(served, *args)
            try:
                self._share((marked, type(served), args))
                return self._act(function, served, args)
            except LostProcessError:
                self._lost = True
                os.kill(os.getpid(), signal.SIGTERM)
                raise

    def send(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Return on every process, on the host, the tensor that the first one gives; `like` has its shape and dtype."""
        whole = torch.empty_like(like, device="cpu") if tensor is None else tensor.cpu().contiguous()
        with convert_errors(LostProcessError, RuntimeError, says=LOST):
            dist.broadcast(whole.reshape(-1).view(torch.uint8), 0, group=self._weights.group)
        return whole

    @collective
    def follow(self, *served: Any) -> None:
        """Repeat the calls of the first process with the objects of its kinds, until it ends.

        Raises:
            LostProcessError: another process is gone, or one failed alone.
        """
        kinds = {type(each): each for each in served}
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        while (asked := self._share(None)) is not None:
            marked, kind, args = asked
            try:
                self._act(marked.__wrapped__, kinds[kind], args)
            except LostProcessError:
                raise
            except Exception:  # of all processes, which the first one answers with
                continue
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(self) -> None:
        """End the other processes, after the call at work; LostProcessError if one of them is gone."""
        with self._turn:
            if self._lost:
                raise LostProcessError(LOST)
            self._share(None)

    def _act(self, function: Function, served: Any, args: tuple[Any, ...]) -> Any:
        result, problem = None, None
        self._depth += 1
        try:
            result = function(served, *args)
        except Exception as error:
            problem = error
        finally:
            self._depth -= 1
        with convert_errors(LostProcessError, RuntimeError, says=LOST):
            failed = self._calls.gather(torch.tensor([float(problem is not None)]))
        if failed.min() != failed.max():
            raise LostProcessError(LOST) from problem
        if problem is not None:
            raise problem
        return result

    def _share(self, item: Any) -> Any:
        items = [item]
        with convert_errors(LostProcessError, RuntimeError, says=LOST):
            dist.broadcast_object_list(items, 0, group=self._calls.group, device=torch.device("cpu"))
        return items[0]
