"""Processes of a server that share weights and samples: the first one serves, and the others repeat its calls.

Functions marked `on_all_ranks` run on all processes, in the order of the first one. Arguments travel as msgpack, weights as
raw bytes: nothing is unpickled.
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
IDLE = 1e7  # timeout between two requests, in seconds: a dead process is detected by its closed connections
LOST = "a process that shares the samples is gone, or failed alone; its own message says why"
PLAIN = (str, bytes, int, float, Tensor, type(None))
_marked: dict[str, tuple[Callable[..., Any], Mapping[str, type]]] = {}  # functions, and classes of their arguments


def on_all_ranks(*classes: type) -> Callable[[Function], Function]:
    """Decorate a function that all processes call with the first one; its first argument has `ranks`, None for one process.

    Args:
        classes: dataclasses, named tuples and structs that other arguments may hold, beside texts, numbers, tensors, lists,
            tuples and maps. They are rebuilt from their fields.
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
    """Processes of a server.

    Args:
        world: their process group. Every rank must construct this at the same time.
    """

    def __init__(self, world: World) -> None:
        self._calls, self._weights = replace(world, timeout=IDLE).background(), world.background()
        self._turn, self._depth, self._is_main = RLock(), 0, world.is_main
        self._lost = False

    def call(self, name: str, served: Any, args: tuple[Any, ...]) -> Any:
        """Call a marked function on all processes. Return this process's result, or raise if all processes raise.

        Raises:
            LostProcessError: another process is gone, or only some failed. The server ends.
        """
        function, classes = _marked[name]
        with self._turn:
            if self._depth:  # a nested call
                return function(served, *args)
            call = pack([name, type(served).__name__, encode_arguments(args, classes)])
            try:
                self._share(call)
                return self._run(function, served, args)
            except LostProcessError:
                self._lost = True
                os.kill(os.getpid(), signal.SIGTERM)
                raise

    def send(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Send a tensor of the first process to all, on the host; `like` has its shape and dtype."""
        received = torch.empty_like(like, device="cpu") if tensor is None else tensor.cpu().contiguous()
        with convert_errors(LostProcessError, RuntimeError, says=LOST):
            dist.broadcast(received.reshape(-1).view(torch.uint8), 0, group=self._weights.group)
        return received

    @collective
    def follow(self, *served: Any) -> None:
        """Repeat the calls of the first process on these objects, one per class, until it ends.

        Raises:
            LostProcessError: another process is gone, or only some failed.
        """
        objects = {type(each).__name__: each for each in served}
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        while call := self._share(b""):
            name, kind, args = unpack_tree(call)
            function, classes = _marked[name]
            arguments = decode_arguments(args, classes)
            try:
                self._run(function, objects[kind], arguments)
            except LostProcessError:
                raise
            except Exception:  # raised by all processes; the first one reports it
                continue
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(self) -> None:
        """End the other processes, after the current call; LostProcessError if one of them is gone."""
        with self._turn:
            if self._lost:
                raise LostProcessError(LOST)
            self._share(b"")

    def _run(self, function: Function, served: Any, args: tuple[Any, ...]) -> Any:
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
        """Send bytes of the first process to all, and return them."""
        with convert_errors(LostProcessError, RuntimeError, says=LOST):
            size = torch.tensor([len(sent)])
            dist.broadcast(size, 0, group=self._calls.group)
            buffer = torch.empty(int(size), dtype=torch.uint8)
            if self._is_main and sent:
                buffer = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            dist.broadcast(buffer, 0, group=self._calls.group)
        return buffer.numpy().tobytes()


def encode_arguments(value: Any, classes: Mapping[str, type]) -> Any:
    """Encode a value as plain data: each container becomes a pair of its class's name and its content.

    Raises:
        TypeError: the value holds an object of a class that is not in `classes`.
    """
    kind = type(value).__name__
    if isinstance(value, Tensor) and value.is_meta:
        return "meta", [str(value.dtype).removeprefix("torch."), *value.shape]
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return "dict", {key: encode_arguments(each, classes) for key, each in value.items()}
    if classes.get(kind) is type(value):
        return kind, [encode_arguments(getattr(value, name), classes) for name in _list_field_names(type(value))]
    if type(value) not in (list, tuple):
        raise TypeError(f"a {kind} cannot be an argument of a call on all processes: name its class in `on_all_ranks`")
    return kind, [encode_arguments(each, classes) for each in value]


def decode_arguments(value: Any, classes: Mapping[str, type]) -> Any:
    """Decode a value of `encode_arguments` after msgpack; only objects of `classes` are constructed."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "dict":
        return {key: decode_arguments(each, classes) for key, each in content.items()}
    if kind == "meta":
        return torch.empty(content[1:], dtype=getattr(torch, content[0]), device="meta")
    parts = [decode_arguments(each, classes) for each in content]
    if kind in classes:
        return classes[kind](**dict(zip(_list_field_names(classes[kind]), parts, strict=True)))
    return tuple(parts) if kind == "tuple" else parts


def _list_field_names(kind: Any) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return tuple(getattr(kind, "__struct_fields__", ()) or kind._fields)
