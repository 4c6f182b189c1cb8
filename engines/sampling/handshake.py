"""First contact with servers: are their numbers the trainer's own?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core.checks import first_row
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import RunError
from fluvial.engines.sampling.generate import Chunk, Sampling, prediction_of
from fluvial.kernels import step_log_prob
from fluvial.models import DiffusionModel
from fluvial.models.guidance import guided_velocity
from fluvial.models.protocol import Cond


@dataclass(frozen=True)
class Handshake:
    """Comparison of the servers' and the trainer's numbers for the same samples.

    Args:
        levels: noise levels of the schedule; the servers' are the same, else their samples are not taken.
        differences: largest |log-prob by a server - log-prob by the trainer| of each recorded step.
        kind: what the servers are.
        binding: how many modules of the adapter each server computes with, in words, by its address.
    """

    levels: tuple[float, ...]
    timesteps: tuple[float, ...]
    shape: tuple[int, ...]
    image: tuple[int, ...]
    differences: dict[int, float]
    kind: str
    servers: tuple[str, ...]
    binding: Mapping[str, str] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        """Largest difference, 0 where no step is recorded."""
        return max(self.differences.values(), default=0.0)

    @property
    def record(self) -> dict[str, Any]:
        """The numbers, for `metrics.jsonl`."""
        return {
            "servers": list(self.servers),
            "kind": self.kind,
            "sigmas": list(self.levels),
            "timesteps": list(self.timesteps),
            "shape": list(self.shape),
            "image": list(self.image),
            "log_prob_difference": {str(step): value for step, value in self.differences.items()},
            **({"binding": dict(self.binding)} if self.binding else {}),
        }

    def __str__(self) -> str:
        levels = " ".join(f"{level:.4g}" for level in self.levels)
        timesteps = " ".join(f"{timestep:.4g}" for timestep in self.timesteps)
        listed = " ".join(f"{step}: {value:.2g}" for step, value in self.differences.items())
        return (
            f"samples by {self.kind}: {', '.join(self.servers)}; latents {list(self.shape)}, images {list(self.image)}\n"
            f"  sigmas     {levels}\n  timesteps  {timesteps}\n"
            f"  |log-prob by server - by trainer| per step  {listed or 'no step is recorded'}"
            + "".join(f"\n  {address}: {bound}" for address, bound in self.binding.items())
        )


def compare(
    model: DiffusionModel, module: nn.Module, chunk: Chunk, sampling: Sampling, *, kind: str, servers: Sequence[str]
) -> Handshake:
    """Return how far the log-probs of a chunk are from those that this network gives the same steps.

    Args:
        chunk: samples of servers, with the same steps for all.
    """
    levels, timesteps, trajectory = sampling.schedule.levels, sampling.schedule.timesteps, chunk.trajectory
    differences: dict[int, float] = {}
    stochastic = sampling.stochastic
    if stochastic is not None and trajectory.log_prob.shape[1]:
        velocity, levels = prediction_of(model, module, chunk.cond, sampling), levels.to(timesteps.device)
        for place, steps in enumerate(trajectory.steps.unbind(1)):
            x, x_next = trajectory.x[:, place], trajectory.x_next[:, place]
            for step in steps.unique().tolist():
                shape = len(x), *levels.shape[1:]
                level, after = (levels[number].expand(shape).contiguous() for number in (step, step + 1))
                with torch.no_grad():
                    log_prob_here, _ = step_log_prob(
                        stochastic.transition(level, after),
                        x,
                        velocity(x, level, step),
                        x_next,
                        form=stochastic.form,
                        reduction=stochastic.reduction,
                        implementation=stochastic.implementation,
                    )
                far = (log_prob_here - trajectory.log_prob[:, place]).abs()[steps == step]
                differences[step] = max(differences.get(step, 0.0), float(far.max()))
    return Handshake(
        tuple(first_row(levels).tolist()),
        tuple(timesteps.float().tolist()),
        sampling.shape,
        tuple(chunk.images.shape[1:]),
        dict(sorted(differences.items())),
        kind,
        tuple(servers),
    )


@collective
def check(largest: float, *, tolerance: float, world: World) -> None:
    """Raise RunError if numbers of servers are too far from the trainer's on any rank."""
    with world.agreed():
        if not largest <= tolerance:  # NaN too
            raise RunError(
                f"the servers' log-probabilities are up to {largest:.2g} from the trainer's own, above "
                f"`rollout.servers.tolerance` {tolerance:g}: serve with the trainer's weights and precision; where only the "
                "precision differs, set a larger tolerance, and `correction` to truncate"
            )


class ServedStep(NamedTuple):
    """A recorded step of one sample of a server, each tensor `[1, ...]`."""

    cond: Cond
    x: Tensor
    x_next: Tensor
    step: Tensor
    log_prob: Tensor


def pick_served_steps(chunk: Chunk) -> dict[str, ServedStep]:
    """Return the first recorded step of one sample of each server, by the server's address, on the host."""
    steps, made = dict[str, ServedStep](), chunk.trajectory
    for row, server in enumerate(chunk.servers if made.log_prob.shape[1] else ()):
        if server not in steps:
            values = ServedStep(chunk.cond, made.x[:, 0], made.x_next[:, 0], made.steps[:, 0], made.log_prob[:, 0])
            steps[server] = optree.tree_map(lambda tensor, row=row: tensor[row : row + 1].cpu(), values)
    return steps


def differences(
    model: DiffusionModel, module: nn.Module, served: Mapping[str, ServedStep], sampling: Sampling
) -> dict[str, float]:
    """Return |log-prob by server - log-prob by this network| of a step of each server, by address, in one forward pass."""
    assert sampling.stochastic is not None
    timesteps, levels, stochastic = sampling.schedule.timesteps, sampling.schedule.levels, sampling.stochastic
    device = timesteps.device
    steps: ServedStep = optree.tree_map(lambda *rows: torch.cat(rows).to(device), *served.values())
    level, after = (levels.to(device)[steps.step + more] for more in (0, 1))
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=sampling.autocast):
        forwards = sampling.guidance.forwards
        v = guided_velocity(model, module, steps.x, level, steps.cond, timestep=timesteps[steps.step], forwards=forwards)
    log_prob_here, _ = step_log_prob(
        stochastic.transition(level, after),
        steps.x,
        v.float() if sampling.autocast else v,
        steps.x_next,
        form=stochastic.form,
        reduction=stochastic.reduction,
        implementation=stochastic.implementation,
    )
    return dict(zip(served, (log_prob_here - steps.log_prob).abs().tolist(), strict=True))
