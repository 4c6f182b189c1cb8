"""Flag --processes of commands that run on several ranks: processes of this machine, without torchrun."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fluvial.engines.cli.parse import find_values, split_flags
from fluvial.engines.errors import UsageError
from fluvial.engines.run.process.launch import count_cores, launch

FLAG = "--processes"
PER_CORE = 32  # largest number of processes per core; more would only fill the memory
COMMANDS = ("train", "eval", "serve")


def split(args: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of processes in a command line, and the command line without the flag.

    Args:
        args: command and its arguments.

    Raises:
        UsageError: the value is not a number, the flag is given twice, or this process already is one of several.
    """
    matched, others = split_flags(args, (FLAG,))
    if not matched or args[0] not in COMMANDS:
        return 1, list(args)
    values = find_values(matched, FLAG)
    if len(values) != 1:
        raise UsageError(f"{FLAG} is given {'twice' if values else 'no value'}, expected one number, or auto")
    if "RANK" in os.environ:
        raise UsageError(f"{FLAG} is {values[0]}, but this process already is one of several, e.g. torchrun's: remove it")
    count = _count_auto() if values[0] == "auto" else int(values[0]) if values[0].isdecimal() else 0
    most = PER_CORE * count_cores()
    if not 1 <= count <= most:
        raise UsageError(f"{FLAG} is {values[0]!r}, expected a number from 1 to {most} ({PER_CORE} per core), or auto")
    return count, others


def run(args: Sequence[str], processes: int) -> int:
    """Run a command line on a number of ranks, and return its exit code."""
    return launch([sys.executable, "-P", "-m", "fluvial.engines", *args], processes)


def _count_auto() -> int:
    """Return the number of GPUs; without any, two, or one on a single core."""
    if _has_gpus():
        import torch  # imported here because it takes seconds

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return min(count_cores(), 2)


def _has_gpus() -> bool:
    """Return whether this machine has a driver of a GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()
