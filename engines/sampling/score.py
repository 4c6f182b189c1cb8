"""Log-probabilities of externally generated trajectories, e.g. of a serving engine or an earlier policy."""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import optree
import torch
from torch import Tensor, nn

from fluvial.core.gaussian import Form, Reduction
from fluvial.core.rollout import Trajectory
from fluvial.core.table import step_coefficients
from fluvial.core.transitions import Sampler
from fluvial.engines.sampling.items import make_recorded_steps
from fluvial.kernels import Implementation, step_log_prob
from fluvial.models import Cond, DiffusionModel, Schedule
from fluvial.models.guidance import guided_velocity
from fluvial.models.host_values import fresh_copy


@torch.no_grad()
def score(
    trajectory: Trajectory,
    module: nn.Module,
    *,
    model: DiffusionModel,
    cond: Cond,
    schedule: Schedule,
    sampler: Sampler,
    micro_batch: int | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
    forwards: Literal["one", "two"] = "one",
    implementation: Implementation = "auto",
) -> Tensor:
    """Return the log-probability of each recorded step of a trajectory under a module, in nats per dimension, `[B, S]`.

    For the module that generated the trajectory these equal its own log-probabilities, bit for bit if `micro_batch` is the
    rollout's. A sharded module is scored within `with engine.inference() as module:`, by all ranks with the same number of
    samples.

    Args:
        trajectory: B samples with S recorded steps. Its log-probabilities are not read.
        module: network of the model.
        model: model of the trajectory.
        cond: conditioning of each sample, `[B, ...]`; `Guided` for a guided policy.
        schedule: schedule of the trajectory.
        sampler: sampler of the recorded steps, with its hyper-parameters bound (`core.transitions.bind`).
        micro_batch: number of (sample, step) pairs per forward pass; by default B.
        form, reduction: as in `core.gaussian.log_prob`.
        forwards: number of forward passes for the two halves of guidance.
        implementation: implementation of the log-probability, see `fluvial.kernels.dispatch`.

    Raises:
        ValueError: the conditioning or the steps do not fit the trajectory, or a step has no density (std = 0).
    """
    batch, count = trajectory.x.shape[:2]
    _check(trajectory, cond, schedule)
    device = trajectory.x.device
    levels, unweighted = schedule.levels.to(device), torch.ones(batch, device=device)
    items = make_recorded_steps(trajectory, schedule, step_coefficients(sampler, levels), unweighted, unweighted)

    log_prob = partial(step_log_prob, form=form, reduction=reduction, implementation=implementation)

    def score_parts() -> Iterator[Tensor]:
        for start in range(0, batch * count, micro_batch or batch):
            rows = slice(start, start + (micro_batch or batch))
            part = fresh_copy(optree.tree_map(lambda tensor, rows=rows: tensor[rows], items), device)
            row_cond = optree.tree_map(lambda table, sample=part.sample: table[sample.to(table.device)].to(device), cond)
            v = guided_velocity(model, module, part.x, part.level, row_cond, timestep=part.timestep, forwards=forwards)
            yield log_prob(part.transition, part.x, v, part.x_next)[0]

    return torch.cat([*score_parts()]).unflatten(0, (count, batch)).T


def _check(trajectory: Trajectory, cond: Cond, schedule: Schedule) -> None:
    """Raise ValueError unless the shapes of trajectory, conditioning and schedule agree."""
    batch, count = trajectory.x.shape[:2]
    if trajectory.x_next.shape != trajectory.x.shape:
        raise ValueError(
            f"score: x has shape {list(trajectory.x.shape)} and x_next {list(trajectory.x_next.shape)}, expected the same"
        )
    if trajectory.steps.shape != (batch, count):
        raise ValueError(f"score: steps has shape {list(trajectory.steps.shape)}, expected [{batch}, {count}]")
    if not trajectory.steps.numel():
        raise ValueError("score: the trajectory has no recorded steps: sample it with stochastic steps that are recorded")
    last = len(schedule.timesteps) - 1
    if int(trajectory.steps.min()) < 0 or int(trajectory.steps.max()) > last:
        raise ValueError(f"score: steps go up to {int(trajectory.steps.max())}, and the schedule has steps 0 to {last}")
    rows = {len(table) for table in optree.tree_leaves(cond)}
    if rows != {batch}:
        raise ValueError(f"score: the conditioning has {sorted(rows)} rows, expected {batch}, one per sample")
