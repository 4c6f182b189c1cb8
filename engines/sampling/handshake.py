"""Comparison of the servers' log-probabilities with the trainer's, at first contact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core.checks import first_block
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import RunError
from fluvial.engines.sampling.generate import Chunk, Sampling, build_velocity
from fluvial.kernels import step_log_prob
from fluvial.models import DiffusionModel
from fluvial.models.guidance import guided_velocity
from fluvial.models.protocol import Cond


@dataclass(frozen=True)
class Handshake:
    """Comparison of the servers' and the trainer's numbers for the same samples.

    Args:
        levels: noise levels of the schedule, equal to the servers' (other samples are rejected).
        differences: largest |log-prob by a server - log-prob by the trainer| per recorded step.
        kind: kind of the servers.
        binding: description of the adapter modules that a server applies, by its address.
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
        """Largest difference, 0 if no step is recorded."""
        return max(self.differences.values(), default=0.0)

    @property
    def record(self) -> dict[str, Any]:
        """The comparison as a record of `metrics.jsonl`."""
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
    """Compare the log-probs of a chunk with this network's log-probs of the same steps.

    Args:
        chunk: samples of servers.
    """
    levels, timesteps, trajectory = sampling.schedule.levels, sampling.schedule.timesteps, chunk.trajectory
    differences: dict[int, float] = {}
    stochastic = sampling.stochastic
    if stochastic is not None and trajectory.log_prob.shape[1]:
        velocity, levels = build_velocity(model, module, chunk.cond, sampling), levels.to(timesteps.device)
        for place, steps in enumerate(trajectory.steps.unbind(1)):
            x, x_next = trajectory.x[:, place], trajectory.x_next[:, place]
            for step in steps.unique().tolist():
                shape = len(x), *levels.shape[1:]
                level, level_next = (levels[index].expand(shape).contiguous() for index in (step, step + 1))
                with torch.no_grad():
                    log_prob, _ = step_log_prob(
                        stochastic.transition(level, level_next),
                        x,
                        velocity(x, level, step),
                        x_next,
                        form=stochastic.form,
                        reduction=stochastic.reduction,
                        implementation=stochastic.implementation,
                    )
                difference = (log_prob - trajectory.log_prob[:, place]).abs()[steps == step]
                differences[step] = max(differences.get(step, 0.0), float(difference.max()))
    return Handshake(
        tuple(first_block(levels).tolist()),
        tuple(timesteps.float().tolist()),
        sampling.shape,
        tuple(chunk.images.shape[1:]),
        dict(sorted(differences.items())),
        kind,
        tuple(servers),
    )


@collective
def check(largest: float, *, tolerance: float, world: World) -> None:
    """Raise RunError if the largest difference on any rank is above the tolerance."""
    with world.agreed():
        if not largest <= tolerance:  # NaN too
            raise RunError(
                f"the servers' log-probabilities are up to {largest:.2g} from the trainer's own, above "
                f"`rollout.servers.tolerance` {tolerance:g}: serve with the trainer's weights and precision; if only the "
                "precision differs, set a larger tolerance, and `correction` to truncate"
            )


class ServedStep(NamedTuple):
    """A recorded step of a server's sample, each tensor `[1, ...]`."""

    cond: Cond
    x: Tensor
    x_next: Tensor
    step: Tensor
    log_prob: Tensor


def pick_served_steps(chunk: Chunk) -> dict[str, ServedStep]:
    """Return the first recorded step of one sample per server, by the server's address, on the host."""
    steps, made = dict[str, ServedStep](), chunk.trajectory
    for row, server in enumerate(chunk.servers if made.log_prob.shape[1] else ()):
        if server not in steps:
            values = ServedStep(chunk.cond, made.x[:, 0], made.x_next[:, 0], made.steps[:, 0], made.log_prob[:, 0])
            steps[server] = optree.tree_map(lambda tensor, row=row: tensor[row : row + 1].cpu(), values)
    return steps


def differences(
    model: DiffusionModel, module: nn.Module, served: Mapping[str, ServedStep], sampling: Sampling
) -> dict[str, float]:
    """Return |log-prob by server - log-prob by this network| of one step per server, by address, in one forward pass."""
    assert sampling.stochastic is not None
    timesteps, levels, stochastic = sampling.schedule.timesteps, sampling.schedule.levels, sampling.stochastic
    device = timesteps.device
    steps: ServedStep = optree.tree_map(lambda *rows: torch.cat(rows).to(device), *served.values())
    level, level_next = (levels.to(device)[steps.step + offset] for offset in (0, 1))
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=sampling.autocast):
        forwards = sampling.guidance.forwards
        v = guided_velocity(model, module, steps.x, level, steps.cond, timestep=timesteps[steps.step], forwards=forwards)
    log_prob, _ = step_log_prob(
        stochastic.transition(level, level_next),
        steps.x,
        v.float() if sampling.autocast else v,
        steps.x_next,
        form=stochastic.form,
        reduction=stochastic.reduction,
        implementation=stochastic.implementation,
    )
    return dict(zip(served, (log_prob - steps.log_prob).abs().tolist(), strict=True))
