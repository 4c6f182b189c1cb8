"""What the rest of fluvial asks of a model: one small adapter an architecture, none an algorithm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from fluvial.core.types import PerSample, Samples

Cond = Any  # what a model is conditioned on: a pytree of tensors whose first dimension is the batch


class Schedule(Protocol):
    """The part of diffusers' FlowMatchEulerDiscreteScheduler that is read: T+1 sigmas, and T timesteps for the model."""

    sigmas: Tensor
    timesteps: Tensor


class VelocityModel(Protocol):
    """A model of the velocity v = eps - x0 of a flow, and the way from prompts to pictures around it.

    Everything is pure in the module and the inputs: the engine may shard the module, wrap it in adapters or average
    it, and pass it back in.
    """

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of one sample, without the batch."""
        ...

    @property
    def lora_targets(self) -> Sequence[str]:
        """Names of the linear layers that LoRA adapts, as PEFT spells them (suffixes of module names)."""
        ...

    @property
    def weights(self) -> Path | None:
        """The folder of the base weights, as diffusers saves a model; None where the network builds them itself."""
        ...

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the network that is trained, with its base weights, or `empty`, with parameters on the meta device."""
        ...

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks of the network, in the order they run: the units that are sharded."""
        ...

    def schedule(self, steps: int) -> Schedule:
        """Return the model's own scheduler, set to a number of steps."""
        ...

    def check_prompt(self, prompt: str) -> None:
        """Raise ValueError, in one line, if the model cannot be asked for `prompt`."""
        ...

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Return the conditioning of a batch of prompts; the empty prompt is none, for guidance away from it."""
        ...

    def velocity(
        self, module: nn.Module, x: Samples, sigma: PerSample, cond: Cond, *, timestep: PerSample | None = None
    ) -> Samples:
        """Return v `[B, *event]` for samples x at noise levels sigma `[B]`.

        `timestep` is what the model's scheduler gives for that level; without it (levels that are on no schedule, as in
        supervised training) it is derived from sigma.
        """
        ...

    def decode(self, latents: Samples) -> Tensor:
        """Return pictures `[B, C, H, W]`, float in [0, 1]."""
        ...
