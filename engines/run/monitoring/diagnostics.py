"""Diagnostics of a run: drift of the model, reward hacking, best and worst samples, and out-of-memory errors."""

import io
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import optree
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fluvial.core.flow_matching import velocity_error
from fluvial.core.random import fold_in, key, normal
from fluvial.engines.data.records import Prompt, model_inputs
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.shards import local
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import RunError, describe_out_of_memory
from fluvial.engines.files import save_tensors
from fluvial.engines.run.evaluation.evaluate import Scores
from fluvial.engines.run.job import Job
from fluvial.engines.sampling.generate import Requests, Sampling, generate
from fluvial.engines.sampling.noising import add_noise
from fluvial.engines.streams import Stream
from fluvial.models import Schedule
from fluvial.models.images import to_image

SEED, SAMPLES = 7_1972, 16  # of a probe


class Probe(NamedTuple):
    """Noised samples of the model at the start of training, with its predictions, to measure the drift from it."""

    x: Tensor  # [P, *event]
    level: Tensor  # [P]
    timestep: Tensor  # [P]
    v: Tensor  # [P, *event]

    @collective
    @staticmethod
    def take(job: Job, module: nn.Module, schedule: Schedule, *, micro_batch: int) -> "Probe":
        """Take the probe of the current model; every rank gets all of it.

        Samples of held-out prompts are generated deterministically, and then noised to levels spread over the schedule.

        Args:
            schedule: schedule with its timesteps on the device.
        """
        root = key(SEED)
        requests = Requests(_select_prompts(job), range(SAMPLES), fold_in(root, Stream.PROBE_SAMPLES))
        chunks = generate(job.model, module, requests, Sampling(job.shape, schedule), micro_batch=micro_batch)
        x0 = torch.cat([chunk.trajectory.final for chunk in chunks])
        step = torch.arange(SAMPLES, device=x0.device) * len(schedule.timesteps) // SAMPLES
        level, timestep = schedule.levels.to(x0.device)[step], schedule.timesteps[step]
        keys = fold_in(fold_in(root, Stream.PROBE_NOISE), torch.arange(SAMPLES, device=x0.device))
        x = add_noise(x0, normal(keys, tuple(x0.shape)), level, prediction=job.model.prediction)[0]
        probe = Probe(x, level, timestep, x)
        return probe._replace(v=probe._predict(job, module, micro_batch))

    def measure_drift(self, job: Job, module: nn.Module, *, micro_batch: int) -> float:
        """Return mean |v - v0|^2 / mean |v0|^2, with the predictions v of a model and v0 of the model at the start."""
        v = self._predict(job, module, micro_batch)
        return float(velocity_error(v, self.v).mean() / velocity_error(self.v, torch.zeros_like(self.v)).mean())

    def save(self, path: Path) -> None:
        """Write the probe to a file, for a resumption of the run."""
        save_tensors({name: tensor.cpu().contiguous() for name, tensor in self._asdict().items()}, path)

    @staticmethod
    def load(path: Path, device: torch.device) -> "Probe":
        """Read a probe from a file; RunError if the file is missing or damaged."""
        try:
            return Probe(**{name: tensor.to(device) for name, tensor in load_file(path).items()})
        except (OSError, SafetensorError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise RunError(f"{path}, the probe that drift is measured with, cannot be read: {reason}") from error

    def _predict(self, job: Job, module: nn.Module, micro_batch: int) -> Tensor:
        """Return the prediction of a network at each noised sample, `[P, *event]`."""
        cond = optree.tree_map(lambda tensor: tensor.to(self.x.device), job.model.encode(model_inputs(_select_prompts(job))))
        parts = []
        for start in range(0, len(self.x), micro_batch):
            rows = slice(start, start + micro_batch)
            part = optree.tree_map(lambda tensor, rows=rows: tensor[rows], cond)
            parts.append(
                job.model.predict(module, self.x[rows], self.level[rows], part, timestep=self.timestep[rows]).float()
            )
        return torch.cat(parts)


def _select_prompts(job: Job) -> list[Prompt]:
    """Select the prompts of a probe, evenly spaced among the held-out ones."""
    return [job.heldout[i * len(job.heldout) // SAMPLES] for i in range(SAMPLES)]


LARGEST, LOSSLESS, WIDTH = 512, 128, 256  # pixels per side


class ExtremeSamples(NamedTuple):
    """Images of samples with their prompts and scores."""

    images: list[Image.Image]
    prompts: list[str]
    scores: list[float]


class KeptImages:
    """Compressed images of this rank's samples, kept until all scores are known; passed to `evaluate` as `keep`."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}  # by name of the sample

    def __call__(self, names: Sequence[str], images: Tensor) -> None:
        for name, image in zip(names, images, strict=True):
            shown, buffer = to_image(image, width=1), io.BytesIO()
            if max(shown.size) <= LOSSLESS:
                shown.save(buffer, "png", compress_level=1)
            else:
                shown.thumbnail((LARGEST, LARGEST))
                shown.save(buffer, "jpeg", quality=90)
            self.files[name] = buffer.getvalue()

    @collective
    def select_extremes(self, scores: Scores, world: World, *, count: int) -> tuple[ExtremeSamples, ExtremeSamples]:
        """Return the samples with the highest and the lowest scores by the last evaluator.

        No sample is in both. Among equal scores the earlier sample comes first.

        Args:
            scores: scores of the samples of all ranks; there must be an evaluator.
        """
        values: list[float] = scores.values[:, -1].tolist()
        count = min(count, len(values) // 2)
        ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
        best, worst = ranked[:count], sorted(ranked[len(ranked) - count :], key=lambda i: (values[i], i))
        files_here = {i: self.files[scores.names[i]] for i in (*best, *worst) if scores.names[i] in self.files}
        file_of = {i: file for part in world.gather_items(files_here) for i, file in part.items()}

        def show(chosen: Sequence[int]) -> ExtremeSamples:
            images = [_enlarge(file_of[i]) for i in chosen]
            return ExtremeSamples(images, [scores.prompts[i].text for i in chosen], [values[i] for i in chosen])

        return show(best), show(worst)


def _enlarge(file: bytes) -> Image.Image:
    """Decode an image, and enlarge it by an integer factor to at most 256 pixels of width, as `to_image` does."""
    with Image.open(io.BytesIO(file)) as image:
        factor = max(WIDTH // image.width, 1)
        return image.convert("RGB").resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


ACTIVATIONS = "activations"
OF_PHASE = {
    "rollout": "`engine.micro_batch`, `pipeline.vae_tile` or `pipeline.vae_offload`",
    "reward": "the rewards' option device=cpu, `engine.micro_batch` or `engine.offload` phases",
    "update": "`engine.update_micro_batch`, `engine.micro_batch` or `engine.checkpointing` block",
    "evaluation": "`evaluation.micro_batch`, `engine.micro_batch` or `pipeline.vae_tile`",
}
OF_PART = {
    "weights": "`engine.base` int8 or nf4 with `train` lora, `engine.offload` blocks, or more ranks",
    "gradients": "`train` lora, `engine.offload` always, or more ranks",
    "optimizer state": "`optimizer.name` adamw8bit, `train` lora, `engine.offload` phases, or more ranks",
    "moving average": "`optimizer.ema_decay` 0, `train` lora, `engine.offload` phases, or more ranks",
}


def explain_out_of_memory(error: BaseException, phase: str, engine: Engine) -> RunError:
    """Return the error of a run that is out of memory in a phase, with the largest consumer and settings that reduce it."""
    peak = engine.world.peak_memory()[0]
    held = measure_held_bytes(engine)
    held[ACTIVATIONS] = max(peak - sum(held.values()), 0.0)  # and all other tensors
    largest = max(held, key=lambda name: held[name])
    lower = OF_PHASE.get(phase, OF_PHASE["rollout"]) if largest == ACTIVATIONS else OF_PART[largest]
    share = f"{held[largest] / 2**30:.2f} of {peak / 2**30:.2f} GiB"
    return RunError(
        f"{describe_out_of_memory(error)} in the phase {phase}: {largest} hold the most ({share}); lower it by {lower}"
    )


def measure_held_bytes(engine: Engine) -> dict[str, float]:
    """Return this rank's bytes of each part of the engine."""
    parameters = [*engine.module.parameters()]
    states = engine.optimizer.state.values()
    return {
        "weights": _sum_bytes(p for p in parameters if local(p).device.type == engine.world.device.type),
        "gradients": _sum_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer state": _sum_bytes(value for state in states for value in state.values() if isinstance(value, Tensor)),
        "moving average": _sum_bytes(engine.average.values()),
    }


def _sum_bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(local(tensor).nbytes for tensor in tensors))


UNSEEN = "heldout"  # name of the evaluator that training never sees


class EvaluationPoint(NamedTuple):
    """An evaluation during a run; the one before training does not count, because it has other samples."""

    update: int
    score: float  # mean score by the evaluator
    reward: float  # mean reward of the rollouts since the evaluation before


def find_best(points: Sequence[EvaluationPoint]) -> EvaluationPoint | None:
    """Return the first evaluation with the highest score; None before the first evaluation."""
    return max(points, key=lambda point: point.score, default=None)


def find_gaming(points: Sequence[EvaluationPoint], count: int) -> Sequence[EvaluationPoint]:
    """Return the last evaluations if the score fell `count` times in a row while the reward rose; otherwise none.

    The reward rose if it is higher before the last of them than before the first.
    """
    last = points[-count - 1 :]
    fell = len(last) > count and all(after.score < before.score for before, after in pairwise(last))
    return last if count > 0 and fell and last[-1].reward > last[0].reward else ()


def choose_watched(names: Sequence[str]) -> str:
    """Choose the evaluator to watch: the one that training never sees, or else the last."""
    return UNSEEN if UNSEEN in names else names[-1]


def describe_gaming(points: Sequence[EvaluationPoint], evaluator: str) -> str:
    """Describe the evaluations that `find_gaming` returned."""
    scores = " > ".join(f"{point.score:.3f}" for point in points)
    return (
        f"the score of the {evaluator} evaluator fell at {len(points) - 1} evaluations in a row ({scores}) while the reward "
        f"rose from {points[0].reward:.3f} to {points[-1].reward:.3f}"
    )
