"""What is watched so that a reward is not merely gamed: how far samples lie apart, and how far the model has gone."""

from pathlib import Path
from typing import NamedTuple

import optree
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fluvial.core.flow_matching import velocity_error
from fluvial.core.random import fold_in, key, normal
from fluvial.engines.errors import RunError
from fluvial.engines.rollout.generate import generate
from fluvial.engines.rollout.noising import noised_at
from fluvial.engines.rollout.streams import Stream
from fluvial.engines.train.job import Job
from fluvial.models import Schedule

SIDE = 32  # pixels: samples are compared when pooled to at most this, whatever their size
SEED, SAMPLES = 7_1972, 16  # of a probe


def pooled(images: Tensor) -> Tensor:
    """Return images `[B, C, H, W]` averaged to at most 32 pixels a side, and flattened, `[B, D]`."""
    height, width = (min(side, SIDE) for side in images.shape[-2:])
    return torch.nn.functional.adaptive_avg_pool2d(images.flatten(1, -3).float(), (height, width)).flatten(1)


def diversity(images: Tensor, group: int) -> float:
    """Return the mean root-mean-square distance between two samples of a group, over all groups.

    It falls where a policy draws the same image again and again; it is a number to compare within one run, where the
    sampler is the same.

    Args:
        images: `[B, D]`, group by group.
        group: samples a group, at least 2.
    """
    by_group = images.double().unflatten(0, (-1, group))
    distance = torch.cdist(by_group, by_group) / images.shape[1] ** 0.5
    return float(distance.sum((1, 2)).mean() / (group * (group - 1)))


class Probe(NamedTuple):
    """Noised samples of the model that training began with, and its velocity there, to measure how far a model has gone."""

    x: Tensor  # [P, *event]
    level: Tensor  # [P]
    timestep: Tensor  # [P]
    v: Tensor  # [P, *event] of the model that training began with

    @staticmethod
    def take(job: Job, module: nn.Module, schedule: Schedule, *, micro_batch: int) -> "Probe":
        """Return the probe of a model as it is now; every rank must take part, and has all of it.

        Samples of held-out prompts are drawn without noise in their steps, and put at noise levels spread over the schedule.

        Args:
            job: of the run.
            module: its network.
            schedule: its timesteps on the device.
            micro_batch: samples a forward pass.
        """
        root, prompts = key(SEED), _prompts(job)
        chunks = generate(
            job.model, module, prompts, range(SAMPLES), shape=job.shape, schedule=schedule,
            key=fold_in(root, Stream.PROBE_SAMPLES), micro_batch=micro_batch,
        )  # fmt: skip
        x0 = torch.cat([chunk.trajectory.final for chunk in chunks])
        step = torch.arange(SAMPLES, device=x0.device) * len(schedule.timesteps) // SAMPLES
        level, timestep = schedule.levels.to(x0.device)[step], schedule.timesteps[step]
        noise = normal(fold_in(fold_in(root, Stream.PROBE_NOISE), torch.arange(SAMPLES, device=x0.device)), tuple(x0.shape))
        x = noised_at(x0, noise, level, prediction=job.model.prediction)[0]
        bare = Probe(x, level, timestep, x)
        return bare._replace(v=bare._velocity(job, module, micro_batch))

    def drift(self, job: Job, module: nn.Module, *, micro_batch: int) -> float:
        """Return mean |v - v0|^2 / mean |v0|^2, v a model's velocity, v0 that of the one that training began with."""
        v = self._velocity(job, module, micro_batch)
        return float(velocity_error(v, self.v).mean() / velocity_error(self.v, torch.zeros_like(self.v)).mean())

    def save(self, path: Path) -> None:
        """Write the probe to a file, for a run that is resumed."""
        save_file({name: tensor.cpu().contiguous() for name, tensor in self._asdict().items()}, path)

    @staticmethod
    def load(path: Path, device: torch.device) -> "Probe":
        """Return the probe of a file.

        Raises:
            RunError: it is missing or damaged.
        """
        try:
            return Probe(**{name: tensor.to(device) for name, tensor in load_file(path).items()})
        except (OSError, SafetensorError, TypeError) as error:
            raise RunError(f"{path}, which tells how far the model has gone, cannot be read: {error}") from error

    def _velocity(self, job: Job, module: nn.Module, micro_batch: int) -> Tensor:
        cond = optree.tree_map(lambda tensor: tensor.to(self.x.device), job.model.encode(_prompts(job)))
        parts = []
        for start in range(0, len(self.x), micro_batch):
            rows = slice(start, start + micro_batch)
            part = optree.tree_map(lambda tensor, rows=rows: tensor[rows], cond)
            parts.append(
                job.model.predict(module, self.x[rows], self.level[rows], part, timestep=self.timestep[rows]).float()
            )
        return torch.cat(parts)


def _prompts(job: Job) -> list[str]:
    return [job.heldout_prompts[i * len(job.heldout_prompts) // SAMPLES] for i in range(SAMPLES)]
