"""Schedules of a run by the shape of a sample: some models shift their noise levels by the size of the image."""

import torch

from fluvial.core.transitions import Sampler
from fluvial.engines.rollout.config import RolloutConfig
from fluvial.engines.rollout.generate import on_device
from fluvial.models import DiffusionModel, Schedule


class Schedules:
    """Schedule and sampler of the rollouts, for each shape of a sample.

    Args:
        model: the model.
        rollout: number of steps, and the sampler.
        device: device of the timesteps.
    """

    def __init__(self, model: DiffusionModel, rollout: RolloutConfig, device: torch.device) -> None:
        self.model, self.rollout, self.device = model, rollout, device
        self._known: dict[tuple[int, ...], tuple[Schedule, Sampler]] = {}

    def of(self, shape: tuple[int, ...]) -> tuple[Schedule, Sampler]:
        """Return the schedule of samples of a shape, its timesteps on the device, and the sampler bound to its levels."""
        if shape not in self._known:
            schedule = on_device(self.model.schedule(self.rollout.steps, shape), self.device)
            self._known[shape] = schedule, self.rollout.bound_sampler(schedule.levels, self.model.prediction)
        return self._known[shape]
