"""Processes that hold a part of the weights each and share every sample: the first one serves, the others repeat its calls.

What they must do together is marked `together`, and the first process does it in one order. Arguments travel as msgpack,
weights as raw bytes: nothing is unpickled.
"""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from threading import RLock
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import LostProcessError, convert_errors
from fluvial.engines.extensions.wire.tensors import pack, unpack_tree

Function = TypeVar("Function", bound=Callable[..., Any])
IDLE = 1e7  # seconds that a request may be away; a process that dies closes its connections
LOST = "a process that shares the samples is gone, or failed alone; its own message says why"


PLAIN = (str, bytes, int, float, Tensor, type(None))
_marked: dict[str, tuple[Callable[..., Any], Mapping[str, type]]] = {}  # functions, and classes of their arguments


def together(*classes: type) -> Callable[[Function], Function]:
    """Mark a function that all processes call when the first does; its first argument has `ranks`, None for one process.

    Args:
        classes: what its other arguments may hold beside texts, numbers, tensors, lists, tuples and maps: dataclasses,
            named tuples and structs, which are made of their fields.
    """

    def mark(function: Function) -> Function:
        name = function.__qualname__
        _marked[name] = function, {each.__name__: each for each in classes}

        @wraps(function)
        def call(served: Any, *args: Any) -> Any:
            return function(served, *args) if served.ranks is None else served.ranks.call(name, served, args)

        return call  # type: ignore[return-value]

    return mark


class Ranks:
    """The processes of a server.

    Args:
        world: their process group. Every rank must make this at the same time.
    """

    def __init__(self, world: World) -> None:
        self._calls, self._weights = replace(world, timeout=IDLE).background(), world.background()
        self._turn, self._depth, self._is_main = RLock(), 0, world.is_main
        self._lost = False

    def call(self, name: str, served: Any, args: tuple[Any, ...]) -> Any:
        """Call a marked function on all processes, and return what it returns here, or raise what it raises on all of them.

        Raises:
            LostProcessError: another process is gone, or one failed alone. The server ends.
        """
        function, classes = _marked[name]
        with self._turn:
            if self._depth:  # a call within one
                return function(served, *args)
            asked = pack([name, type(served).__name__, take_apart(args, classes)])
            try:
                self._share(asked)
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
        kinds = {type(each).__name__: each for each in served}
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        while asked := self._share(b""):
            name, kind, args = unpack_tree(asked)
            function, classes = _marked[name]
            given = put_together(args, classes)
            try:
                self._act(function, kinds[kind], given)
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
            self._share(b"")

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

    def _share(self, sent: bytes) -> bytes:
        """Return on every process the bytes of the first one."""
        with convert_errors(LostProcessError, RuntimeError, says=LOST):
            size = torch.tensor([len(sent)])
            dist.broadcast(size, 0, group=self._calls.group)
            held = torch.empty(int(size), dtype=torch.uint8)
            if self._is_main and sent:
                held = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            dist.broadcast(held, 0, group=self._calls.group)
        return held.numpy().tobytes()


def take_apart(value: Any, classes: Mapping[str, type]) -> Any:
    """Return a value as plain data, in which each container is a pair of its class's name and what it holds.

    Raises:
        TypeError: it holds an object of another class than `classes`.
    """
    kind = type(value).__name__
    if isinstance(value, Tensor) and value.is_meta:
        return "meta", [str(value.dtype).removeprefix("torch."), *value.shape]
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return "dict", {key: take_apart(each, classes) for key, each in value.items()}
    if classes.get(kind) is type(value):
        return kind, [take_apart(getattr(value, name), classes) for name in _field_names(type(value))]
    if type(value) not in (list, tuple):
        raise TypeError(f"a {kind} is no argument of a call of all processes: name its class at `together`")
    return kind, [take_apart(each, classes) for each in value]


def put_together(value: Any, classes: Mapping[str, type]) -> Any:
    """Return the value that `take_apart` took apart, after msgpack carried it; only objects of `classes` are made."""
    if not isinstance(value, list):
        return value
    kind, held = value
    if kind == "dict":
        return {key: put_together(each, classes) for key, each in held.items()}
    if kind == "meta":
        return torch.empty(held[1:], dtype=getattr(torch, held[0]), device="meta")
    parts = [put_together(each, classes) for each in held]
    if kind in classes:
        return classes[kind](**dict(zip(_field_names(classes[kind]), parts, strict=True)))
    return tuple(parts) if kind == "tuple" else parts


def _field_names(kind: Any) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return tuple(getattr(kind, "__struct_fields__", ()) or kind._fields)
