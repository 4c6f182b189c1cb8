"""Starts `fluvial serve` in a process of its own, over transformers with random weights, and reads its CPU time."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fluvial.bench.peers.work import PeerModel
from fluvial.bench.update.cases import SIZES, Size
from fluvial.engines.errors import RunError
from fluvial.models.handwriting.model import CONFIG

PIXELS = 8  # pixels per latent, along a side


class Transformer(PeerModel):
    """SD3's transformer with random weights, and a VAE that costs next to nothing."""

    def decode(self, latents: Tensor) -> Tensor:
        """Return the first channel as images `[B, 3, H, W]` in [0, 1]."""
        enlarged = latents[:, :1].float().repeat_interleave(PIXELS, 2).repeat_interleave(PIXELS, 3)
        return ((enlarged + 1) / 2).clamp(0, 1).expand(-1, 3, -1, -1)


# The server finds the models by these names. SMALL has 55 million parameters, and 256 tokens for 256 x 256 pixels.
SETTINGS = {
    **CONFIG,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 6,
    "num_attention_heads": 8,
    "attention_head_dim": 64,
    "caption_projection_dim": 512,
    "joint_attention_dim": 1024,
    "pooled_projection_dim": 768,
}
SMALL, TINY = Transformer(Size(SETTINGS, (16, 32, 32), 77)), Transformer(SIZES["tiny"])


@contextmanager
def serving(name: str, samples: int) -> Iterator[tuple[str, Path]]:
    """Yield the address of a server of a model of this file, and the folder of its process in /proc."""
    line = [sys.executable, "-P", "-m", "fluvial.engines", "serve", f"{__name__}:{name}", "--port", "0", "--micro-batch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process: Any = subprocess.Popen([*line, str(samples)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise RunError("serving: the server has not started, and has said why on standard error")
        yield found[0], Path("/proc", str(process.pid))
    finally:
        process.kill()
        process.wait(30)


def cpu_seconds(folder: Path) -> float:
    """Return user and system time of a process or thread, in steps of 10 ms on most machines."""
    numbers = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
