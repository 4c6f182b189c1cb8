"""A process that has imported everything already, and forks: a program starts in the time of a fork, not of an import.

`launch` starts one for each pytest process. It reads requests from a socket, one JSON object a line: what to call, with
which arguments, environment, folder and files for the output. It answers with the process's id, and later with its status.
Every program gets a fork of its own, so one that is killed or that hangs harms no other.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# What the programs import, now or when a function is first called; a module that is missing here only costs time.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "accelerate",
    "diffusers",
    "diffusers.models.transformers.transformer_sd3",
    "diffusers.models.transformers.transformer_flux",
    "diffusers.models.transformers.transformer_qwenimage",
    "fsspec.implementations.dirfs",
    "fsspec.implementations.local",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "optree",
    "peft",
    "PIL.PngImagePlugin",
    "rich.console",
    "rich.table",
    "safetensors.torch",
    "torch.utils.tensorboard",
    "tyro",
    "fluvial.bench.counting",
    "fluvial.engines.cli.main",
    "fluvial.engines.run.recipes",
    "fluvial.engines.run.trainer",
    "fluvial.models.handwriting",
    "fluvial.models.lora",
)
# Cached results that nearly every run asks for.
WARMED = (
    "fluvial.models.handwriting.recognisers:load_reward_recogniser",
    "fluvial.models.handwriting.recognisers:load_heldout_recogniser",
)


def main(descriptor: int) -> None:
    """Serve requests until the other end of the socket closes; end every program then."""
    for name in PRELOADED:
        with suppress(ModuleNotFoundError):  # an optional package, or a module that has moved
            importlib.import_module(name)
    for name in WARMED:
        module, _, function = name.partition(":")
        with suppress(ModuleNotFoundError):
            getattr(importlib.import_module(module), function)()
    importlib.import_module("helpers.short_runs").shorten_runs()
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    assert threads == 1, f"{threads} threads are running: a fork would lose them with the locks that they hold"
    server = socket.socket(fileno=descriptor)
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # or every collection in a fork would copy pages
    serve(server, woken)


def serve(server: socket.socket, woken: socket.socket) -> None:
    import select

    running: dict[int, int] = {}  # number of the request by process id
    send(server, {"ready": True})
    text = b""
    while True:
        readable, _, _ = select.select([server, woken], [], [])
        if woken in readable:
            with suppress(BlockingIOError):
                woken.recv(4096)
            for pid, status, seconds in ended():
                if pid in running:
                    send(server, {"number": running.pop(pid), "status": status, "seconds": seconds})
        if server in readable:
            part = server.recv(65536)
            if not part:
                break
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    server.close()
                    become(request)
                running[pid] = request["number"]
                send(server, {"number": request["number"], "pid": pid})
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def send(server: socket.socket, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        server.sendall(json.dumps(message).encode() + b"\n")


def ended() -> Iterator[tuple[int, int, float]]:
    """Collect the processes that have ended: id, status and CPU seconds with those of their children."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status, usage.ru_utime + usage.ru_stime


def become(request: dict[str, Any]) -> None:
    """Turn this fork into the program that was asked for, and exit with its code."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for path, target, flags in (
            (os.devnull, 0, os.O_RDONLY),
            (request["stdout"], 1, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            (request["stderr"], 2, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            opened = os.open(path, flags, 0o644)
            os.dup2(opened, target)
            os.close(opened)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        code = called(request)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def called(request: dict[str, Any]) -> int:
    """Run `python -m module` where a request names a module, else call its function, in a world if it asks for one."""
    sys.argv = [request["target"], *map(str, request["arguments"])]
    module, _, function = request["target"].partition(":")
    if not function:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    call = getattr(importlib.import_module(module), function)
    if request["world"]:
        from fluvial.engines.engine.world import init_world

        with init_world(timeout=request["timeout"]) as world:
            value = call(world, *request["arguments"])
    else:
        value = call(*request["arguments"])
    Path(request["result"]).write_text(json.dumps(value))
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
