"""The update loop of published trainers, rewritten as a baseline for the engine.

Its design:

    loop over micro-batches of samples and, within it, over recorded steps: one forward and one backward pass for each
        (Flow-GRPO's train_*.py, DanceGRPO's train_grpo_*.py, verl-omni's diffusers FSDP engine)
    FSDP with its defaults: parameters are freed after each block's forward pass and gathered again for the backward pass,
        and gradients are reduced in every backward pass (the same, where they shard: Flow-GRPO's
        train_qwenimage_edit_plus.py, DanceGRPO's train_grpo_flux.py, verl-omni)
    guidance in two calls of the model, with gradients through both (Flow-GRPO's train_wan2_1.py, verl-omni's SD3 and
        Qwen-Image adapters; Flow-GRPO's train_sd3.py puts both through one call)
    lookup of each sample's timestep in the schedule, by value (Flow-GRPO's and verl-omni's SDE steps)
    the step's log-probability per element, in float32, averaged (all three)
    recomputation of the old log-probability before the update (verl-omni unless `bypass_mode` is on; the others use the
        rollout's)
    copies of seven numbers to the host for each backward pass (verl-omni: six of the policy, and the loss; DanceGRPO one,
        all-reduced; Flow-GRPO none until the optimizer's step)

The mathematics and the gradient are those of `fluvial.kernels.policy_loss` under `fluvial.engines`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fluvial.engines.engine.engine import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.models import Cond, DiffusionModel


class StoredSamples(NamedTuple):
    """Stored samples of this rank: B samples with S recorded steps, which are all steps of the schedule."""

    x: Tensor  # [B, S, *event] before each step
    x_next: Tensor  # [B, S, *event] after it
    timesteps: Tensor  # [B, S], the model's input
    log_prob: Tensor  # [B, S] under the policy that made the rollout
    advantage: Tensor  # [B]
    cond: Cond  # a pytree of tensors [B, ...]
    uncond: Cond | None  # the same for guidance; None without
    scale: float  # guidance scale


class PublishedLoop:
    """Update loop of published trainers, for a sharded module.

    Args:
        model, module: the adapter and its network, not yet sharded.
        config: settings of AdamW.
        world: process group; every rank must have the same number of samples.
        scheduler: diffusers' scheduler, which the rollout followed.
        eta: scale of Flow-SDE's noise.
        clip: half-width of the ratio's range, [1 - clip, 1 + clip].
        compute: dtype of the forward and backward pass.
    """

    def __init__(
        self,
        model: DiffusionModel,
        module: nn.Module,
        config: OptimizerConfig,
        world: World,
        *,
        scheduler: Any,
        eta: float,
        clip: float,
        compute: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.module, self.config, self.world = model, module.to(world.device), config, world
        self.scheduler, self.eta, self.clip = scheduler, eta, clip
        self.sigmas, self.timesteps = scheduler.sigmas.to(world.device), scheduler.timesteps.to(world.device)
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for unit in [*model.blocks(module), module]:
            fully_shard(unit, mesh=world.mesh, mp_policy=precision)
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def update(self, stored: StoredSamples, *, micro_batch: int, recompute: bool = True) -> dict[str, float]:
        """Take one optimizer step on all samples and steps, and return the means of the logged values.

        Args:
            stored: this rank's samples, a multiple of the micro-batch.
            micro_batch: samples per forward pass, all at one step.
            recompute: recompute the old log-probabilities instead of using the rollout's.
        """
        batches = _split(stored, micro_batch)
        if recompute:
            batches = [batch._replace(log_prob=self._compute_old_log_prob(batch)) for batch in batches]
        steps = stored.log_prob.shape[1]
        numbers: dict[str, list[float]] = {}
        for batch in batches:
            for step in range(steps):
                loss, metrics = self._compute_loss(batch, step)
                loss = loss / (len(batches) * steps)
                loss.backward()
                for name, value in {**metrics, "loss": loss}.items():
                    numbers.setdefault(name, []).append(value.detach().item())
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.config.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm.item(), **{name: sum(values) / len(values) for name, values in numbers.items()}}

    def _compute_loss(self, batch: StoredSamples, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean clipped surrogate of a micro-batch at one step, and its logged values."""
        log_prob, old = self._compute_log_prob(batch, step), batch.log_prob[:, step]
        ratio = torch.exp(log_prob - old)
        unclipped = -batch.advantage * ratio
        clipped = -batch.advantage * torch.clamp(ratio, 1 - self.clip, 1 + self.clip)
        loss = torch.maximum(unclipped, clipped).mean()
        with torch.no_grad():
            above, below = (ratio - 1 > self.clip).float(), (1 - ratio > self.clip).float()
            metrics = {
                "kl": (old - log_prob).mean(),
                "clipped": (above + below).mean(),
                "clipped above": above.mean(),
                "clipped below": below.mean(),
                "ratio": ratio.mean(),
                "ratio's spread": ratio.std(correction=0),
            }
        return loss, metrics

    def _compute_old_log_prob(self, batch: StoredSamples) -> Tensor:
        with torch.no_grad():
            return torch.stack([self._compute_log_prob(batch, step) for step in range(batch.log_prob.shape[1])], dim=1)

    def _compute_log_prob(self, batch: StoredSamples, step: int) -> Tensor:
        """Return the log-probability of a stored step under Flow-SDE (arXiv 2505.05470), `[b]`, in nats per dimension."""
        x, timestep = batch.x[:, step].float(), batch.timesteps[:, step]
        index = [self._find_index(t) for t in timestep]
        sigma, sigma_next = (self.sigmas[[i + k for i in index]] for k in (0, 1))
        v = self._predict(batch, x, sigma, timestep).float()
        level, level_next = (s.view(-1, *[1] * (x.ndim - 1)) for s in (sigma, sigma_next))
        dt = level_next - level
        rate = self.eta * torch.sqrt(level / (1 - torch.where(level == 1, self.sigmas[1], level)))
        mean = x * (1 + rate**2 / (2 * level) * dt) + v * (1 + rate**2 * (1 - level) / (2 * level)) * dt
        std = rate * torch.sqrt(-dt)
        log_prob = -((batch.x_next[:, step].float() - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(2 * math.pi) / 2
        return log_prob.flatten(1).mean(1)

    def _predict(self, batch: StoredSamples, x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        v = self.model.predict(self.module, x, sigma, batch.cond, timestep=timestep)
        if batch.uncond is None:
            return v
        v_uncond = self.model.predict(self.module, x, sigma, batch.uncond, timestep=timestep)
        return v_uncond + batch.scale * (v - v_uncond)

    def _find_index(self, timestep: Tensor) -> int:
        """Find a timestep's index in the schedule by diffusers' scheduler."""
        return self.scheduler.index_for_timestep(timestep, self.timesteps)


def _split(stored: StoredSamples, size: int) -> Sequence[StoredSamples]:
    """Split stored samples into micro-batches."""
    samples = stored.log_prob.shape[0]
    if samples % size:
        raise ValueError(f"micro_batch is {size}, expected a divisor of the {samples} samples")
    return [
        optree.tree_map(
            lambda leaf, first=first: leaf[first : first + size] if isinstance(leaf, Tensor) else leaf,
            stored,
            none_is_leaf=True,
        )
        for first in range(0, samples, size)
    ]
