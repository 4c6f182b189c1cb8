"""The real torchao of one version, outside of the environment, where PEFT would import it in every process."""

import sys
from functools import cache
from typing import Any

import wheels

VERSION = "0.18.0"  # as in constraints.txt


@cache
def load(module: str) -> Any:
    """Return a module of torchao; skip the test if the package index has no such wheel."""
    folder = str(wheels.install("torchao", VERSION))
    if folder not in sys.path:
        sys.path.append(folder)
    return wheels.module(module)
