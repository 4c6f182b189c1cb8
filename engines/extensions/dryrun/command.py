"""`fluvial train RECIPE --dry-run`: what a training run would do on its GPUs, without one."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from fluvial.core.checks import check_fields
from fluvial.engines.errors import RunError
from fluvial.engines.extensions.dryrun.report import draw
from fluvial.engines.extensions.dryrun.run import dry_run
from fluvial.engines.extensions.plan.fit import fit_config
from fluvial.engines.extensions.simulate.device import GIB, Accelerator, register
from fluvial.engines.run.config import TrainConfig


@dataclass(frozen=True)
class DryRunConfig:
    """Run every phase of a training run on a simulated GPU, and report memory, traffic, FLOPs and host reads.

    Args:
        as_gpus: Number of GPUs.
        gpu: Name of the GPU as its driver has it, for its peak FLOP/s.
        gpu_memory_gib: Memory of a GPU, in GiB.
        reserve_gib: Memory kept free for what is not simulated, in GiB.
        report: Folder where the report is written, as dry-run.json and memory.svg; None only prints it.
    """

    as_gpus: int = 1
    gpu: str = "NVIDIA H100 80GB HBM3"
    gpu_memory_gib: float = 80.0
    reserve_gib: float = 6.0
    report: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, "", as_gpus=(1, 2**20), gpu_memory_gib=(0, 1e6), reserve_gib=(0, 1e6))


def run(asked: DryRunConfig, config: TrainConfig, *, console: Console) -> None:
    """Print the report of a dry run, and write it where a folder is named.

    Raises:
        RunError: the run does not fit, or an error ended it.
    """
    register()  # before the backward passes of the closed form
    config, saved = fit_config(config, ranks=asked.as_gpus, device=torch.device("cuda"))
    if saved is not None:
        console.print(saved, highlight=False)
    gpu = Accelerator(asked.gpu, int(asked.gpu_memory_gib * GIB))
    report = dry_run(config, ranks=asked.as_gpus, accelerator=gpu, reserve=int(asked.reserve_gib * GIB))
    report.show(console)
    if asked.report is not None:
        asked.report.mkdir(parents=True, exist_ok=True)
        (asked.report / "dry-run.json").write_text(json.dumps(report.record(), indent=1) + "\n", encoding="utf-8")
        draw(report, asked.report / "memory.svg")
    if report.error is not None:
        raise RunError(f"the dry run ended in the phase {report.error}")
    if not report.fits:
        raise RunError(f"the run does not fit: {report.peak / GIB:.2f} of {asked.gpu_memory_gib - asked.reserve_gib:g} GiB")
