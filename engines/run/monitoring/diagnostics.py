"""Diagnostics against reward hacking: how far the model has drifted."""

from pathlib import Path
from typing import NamedTuple

import optree
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fluvial.core.flow_matching import velocity_error
from fluvial.core.random import fold_in, key, normal
from fluvial.engines.data.records import Prompt, model_inputs
from fluvial.engines.errors import RunError
from fluvial.engines.files import save_tensors
from fluvial.engines.run.job import Job
from fluvial.engines.sampling.generate import Requests, Sampling, generate
from fluvial.engines.sampling.noising import add_noise
from fluvial.engines.streams import Stream
from fluvial.models import Schedule

SEED, SAMPLES = 7_1972, 16  # of a probe


class Probe(NamedTuple):
    """Noised samples of the model that training began with, and its prediction there, to measure drift from it."""

    x: Tensor  # [P, *event]
    level: Tensor  # [P]
    timestep: Tensor  # [P]
    v: Tensor  # [P, *event]

    @staticmethod
    def take(job: Job, module: nn.Module, schedule: Schedule, *, micro_batch: int) -> "Probe":
        """Return the probe of a model as it is now, whole on every rank; every rank must take part.

        Samples of held-out prompts are generated without noise in their steps, and then noised to levels that are spread
        over the schedule.

        Args:
            schedule: schedule with its timesteps on the device.
        """
        root = key(SEED)
        requests = Requests(_prompts(job), range(SAMPLES), fold_in(root, Stream.PROBE_SAMPLES))
        chunks = generate(job.model, module, requests, Sampling(job.shape, schedule), micro_batch=micro_batch)
        x0 = torch.cat([chunk.trajectory.final for chunk in chunks])
        step = torch.arange(SAMPLES, device=x0.device) * len(schedule.timesteps) // SAMPLES
        level, timestep = schedule.levels.to(x0.device)[step], schedule.timesteps[step]
        keys = fold_in(fold_in(root, Stream.PROBE_NOISE), torch.arange(SAMPLES, device=x0.device))
        x = add_noise(x0, normal(keys, tuple(x0.shape)), level, prediction=job.model.prediction)[0]
        bare = Probe(x, level, timestep, x)
        return bare._replace(v=bare._predictions(job, module, micro_batch))

    def velocity_drift(self, job: Job, module: nn.Module, *, micro_batch: int) -> float:
        """Return mean |v - v0|^2 / mean |v0|^2, v the prediction of a model, v0 that of the model at the start."""
        v = self._predictions(job, module, micro_batch)
        return float(velocity_error(v, self.v).mean() / velocity_error(self.v, torch.zeros_like(self.v)).mean())

    def save(self, path: Path) -> None:
        """Write the probe to a file, for the resumption of the run."""
        save_tensors({name: tensor.cpu().contiguous() for name, tensor in self._asdict().items()}, path)

    @staticmethod
    def load(path: Path, device: torch.device) -> "Probe":
        """Return the probe of a file.

        Raises:
            RunError: the file is missing or damaged.
        """
        try:
            return Probe(**{name: tensor.to(device) for name, tensor in load_file(path).items()})
        except (OSError, SafetensorError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise RunError(f"{path}, the probe that drift is measured with, cannot be read: {reason}") from error

    def _predictions(self, job: Job, module: nn.Module, micro_batch: int) -> Tensor:
        """Return the prediction of a network at each noised sample, `[P, *event]`."""
        cond = optree.tree_map(lambda tensor: tensor.to(self.x.device), job.model.encode(model_inputs(_prompts(job))))
        parts = []
        for start in range(0, len(self.x), micro_batch):
            rows = slice(start, start + micro_batch)
            part = optree.tree_map(lambda tensor, rows=rows: tensor[rows], cond)
            parts.append(
                job.model.predict(module, self.x[rows], self.level[rows], part, timestep=self.timestep[rows]).float()
            )
        return torch.cat(parts)


def _prompts(job: Job) -> list[Prompt]:
    """Return the prompts of a probe, spread over the held-out ones."""
    return [job.heldout[i * len(job.heldout) // SAMPLES] for i in range(SAMPLES)]
