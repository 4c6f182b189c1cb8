"""The line of the program that an operation comes from."""

import sys
import sysconfig
from functools import cache
from pathlib import Path

ROOT = str(Path(__file__).parents[3])
PACKAGES = sysconfig.get_paths()["purelib"]
HERE = str(Path(__file__).parent)
PASSING = ("models/flops.py", "core/checks.py", "models/pipelines/unfilled.py")  # act for their caller
# Parts of PyTorch that hold memory or wait of their own accord; the others do what their caller asks for.
SPEAKING = ("torch/distributed/fsdp/", "torch/optim/", "torch/utils/checkpoint.py")


@cache
def _name_file(file: str) -> tuple[str, bool] | None:
    """Return how a file is named, and whether it is fluvial's own; None for one that only passes calls on."""
    if file.startswith((HERE, "<")) or file.endswith(PASSING):
        return None
    if file.startswith(ROOT + "/"):
        inside = file.removeprefix(ROOT + "/")
        own = inside.split("/")[0] in ("core", "kernels", "models", "engines", "bench", "tests")
        if own:
            return inside, True
    name = file.rpartition("site-packages/")[2] if "site-packages/" in file else file
    if name.startswith("torch/"):
        speaks = next((part for part in SPEAKING if name.startswith(part)), None)
        return (f"torch: {Path(name).name}", False) if speaks else None
    if "/lib/python" in name or name.startswith(("optree/", "einops/", "jaxtyping/", "beartype/", "accelerate/")):
        return None
    return "/".join(Path(name).parts[-2:]), False


def place(depth: int = 2) -> str:
    """Return the innermost line that is not PyTorch's, and the innermost one of fluvial with its function.

    For example "attention.py:31 < models/pipelines/sd3.py:90 predict".
    """
    frame, inner = sys._getframe(depth), ""
    while frame is not None:
        named = _name_file(frame.f_code.co_filename)
        if named is not None:
            name, own = named
            line = f"{name}:{frame.f_lineno}"
            if own:
                line += f" {frame.f_code.co_qualname.replace('.<locals>', '')}"
                return f"{inner} < {line}" if inner else line
            inner = inner or line
        frame = frame.f_back  # type: ignore[assignment]
    return inner
