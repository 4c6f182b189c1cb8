"""Settings of `fluvial eval`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fluvial.engines.cli.parse import at_least_one
from fluvial.engines.errors import UsageError
from fluvial.engines.rollout.solvers import SolverChoice
from fluvial.engines.train.config import PipelineConfig


@dataclass(frozen=True)
class EvalConfig:
    """Score samples of prompts, drawn without noise on the way, and compare them with those of a base model.

    MODEL is a built-in model, a pipeline of diffusers (folder or id), the folder of a run, whose exported weights are
    evaluated, or one of a run's checkpoints. A run and a checkpoint bring their prompts, evaluators and settings.

    Args:
        prompts: Files of prompts, as for training. By default those that the run or the built-in model holds out.
        rewards: Evaluators: names such as jpeg, or functions (images, prompts) -> [B] as module:name. By default those of
            the run or of the built-in model.
        base: Base model that is sampled from the same noise: start (what the weights, the adapter or the run started from),
            the folder of a run, one of its checkpoints, or a folder of weights. None compares with nothing.
        weights: Folder of weights in place of the model's own, such as the `weights` of a run folder.
        lora: File or folder of an adapter, such as the `lora` of a run folder.
        out: Folder for images, scores.csv, table.csv, table.json and sheet.png. None prints the table and writes nothing.
        seeds: Number of samples per prompt. None draws prompts at random.
        samples: Number of samples; with seeds the largest number, for which evenly spaced prompts are left out. None takes
            every prompt.
        steps: Number of steps of the sampling schedule.
        guidance: Scale of classifier-free guidance; 1 is no guidance.
        negative: Negative prompt, which guided samples are guided away from.
        solver: Solver of the ODE: euler, dpmpp_2m, unipc, sa_solver or auto (that the model is served with).
        average: Take the moving average of a checkpoint's weights, if it has one.
        micro_batch: Number of samples per forward pass.
        compute: Dtype of the network's computation: float32, bfloat16, or auto (bfloat16 on CUDA).
        pipeline: Size of the images, and how a pipeline is opened.
    """

    prompts: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    base: str | None = None
    weights: Path | None = None
    lora: Path | None = None
    out: Path | None = None
    seeds: int | None = None
    samples: int | None = 400
    steps: int = 10
    guidance: float = 1.0
    negative: str = ""
    solver: SolverChoice = "auto"
    average: bool = True
    micro_batch: int = 64
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "micro_batch", "seeds", "samples")
        if not 0 <= self.guidance < 1e6:
            raise UsageError("guidance", self.guidance, "a number in [0, 1e6]")
        if self.seeds is None and self.samples is None:
            raise UsageError("`samples` is None, and `seeds` is None: set one of them to a number")
