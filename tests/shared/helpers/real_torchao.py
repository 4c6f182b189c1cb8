"""The real torchao of one version, outside of the environment, where PEFT would import it in every process."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from helpers import wheels

VERSION = "0.18.0"  # as in constraints.txt


@cache
def load(module: str) -> Any:
    """Return a module of torchao; skip the test if the package index has no such wheel."""
    folder = str(wheels.install("torchao", VERSION))
    if folder not in sys.path:
        sys.path.append(folder)
    return wheels.module(module)


@contextmanager
def available(name: str) -> Iterator[None]:
    """Make torchao known for the quantised optimizers, and run its step without compiling it."""
    if name not in ("adamw8bit", "adamw4bit"):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load("torchao.optim")
        with torch.compiler.set_stance("force_eager"):
            yield
