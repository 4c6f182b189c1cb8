"""Parts of a visit to a GPU: time limits, settings and rows."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from fluvial.bench import harness
from fluvial.bench.update.cases import SIZES, NetworkSize
from fluvial.core.checks import check_number

Part = Literal["smoke", "train", "tests", "kernels", "networks", "update", "published", "compile", "invariance", "nccl"]
# Seconds of each part on a GPU: 330 for the parts of the first visit, 460 for those of the second.
LIMITS: dict[Part, float] = {
    "smoke": 70,
    "train": 130,
    "tests": 110,
    "nccl": 20,
    "kernels": 80,
    "networks": 110,
    "compile": 80,
    "published": 70,
    "update": 70,
    "invariance": 50,
}


@dataclass(frozen=True)
class GpuRow:
    """One measured number."""

    part: str
    what: str
    setting: str
    value: float
    unit: str
    note: str
    device: str
    torch: str
    date: str


@dataclass(frozen=True)
class GpuConfig:
    """Run the measurements that need a GPU, part by part.

    Args:
        parts: parts to run, in this order.
        device: cuda or cpu; cpu only checks that the parts run.
        size: real (models of billions of parameters) or tiny.
        limit: factor of the time limit of every part.
        out: folder of gpu.jsonl and kernels.csv; rows are appended.
    """

    parts: tuple[Part, ...] = tuple(LIMITS)
    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    size: Literal["real", "tiny"] = "real" if torch.cuda.is_available() else "tiny"
    limit: float = 1.0
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        check_number("gpu", "limit", self.limit, low=0)
        here = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device != here:
            raise ValueError(f"gpu: device is {self.device}, and this machine has {here}: use {here}")

    @property
    def model(self) -> NetworkSize:
        """Transformer of the parts that use one."""
        return SIZES["sd3.5-medium 512^2" if self.size == "real" else "tiny"]

    @property
    def samples(self) -> int:
        """Samples per rollout."""
        return 8 if self.size == "real" else 4

    def find_limit(self, part: Part) -> float:
        """Return the time limit of a part."""
        return LIMITS[part] * self.limit


class Rows:
    """Writer of a part's numbers, as they are measured."""

    def __init__(self, config: GpuConfig, part: Part) -> None:
        self.config, self.part, self.written = config, part, list[GpuRow]()

    def add(self, what: str, setting: str, value: float, unit: str, note: str = "") -> None:
        """Append a row to gpu.jsonl and print it."""
        row = GpuRow(self.part, what, setting, value, unit, note, **harness.collect_facts(GpuRow))
        self.config.out.mkdir(parents=True, exist_ok=True)
        with (self.config.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        self.written.append(row)
        print(f"{self.part}: {what}, {setting}: {value:.6g} {unit} {note}".rstrip(), flush=True)
