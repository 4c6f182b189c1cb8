"""What the rest of fluvial asks of a model: one small adapter an architecture, none an algorithm."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from fluvial.core.types import PerSample, Samples

Cond = Any  # what a model is conditioned on: a pytree of tensors whose first dimension is the batch


# A folder of weights as diffusers saves a model, or of a network made of several, the folder of each by its name in it.
Weights = Path | Mapping[str, Path]

Prediction = Literal["velocity", "epsilon"]


class Schedule(NamedTuple):
    """A model's own schedule of T steps."""

    # [T+1] float32 on the host: noise levels sigma that fall to exactly 0, or for a model of epsilon cumulative signal
    # powers alpha_bar that rise.
    levels: Tensor
    timesteps: Tensor  # [T] what the model is given for the first T of them


def is_recorded(model: "DiffusionModel") -> bool:
    """Return whether a model is a pipeline without an adapter, whose velocity is replayed (`models.any_pipeline`).

    Such a model's conditioning holds its guidance, and it knows no noise levels but those of its schedule.
    """
    return bool(getattr(model, "recorded", False))


class DiffusionModel(Protocol):
    """A model of a flow's velocity v = eps - x0, or of eps, and the way from prompts to images around it.

    Everything is pure in the module and the inputs: the engine may shard the module, wrap it in adapters or average
    it, and pass it back in.
    """

    @property
    def prediction(self) -> Prediction:
        """What the network predicts: the velocity of (1 - sigma) x0 + sigma eps, or eps of a variance-preserving path."""
        ...

    @property
    def lora_targets(self) -> Sequence[str]:
        """Names of the linear layers that LoRA adapts, as PEFT spells them (suffixes of module names)."""
        ...

    @property
    def weights(self) -> Weights | None:
        """The folder of the base weights; None where the network builds them itself."""
        ...

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the network that is trained, with its base weights, or `empty`, with parameters on the meta device."""
        ...

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks of the network, in the order they run: the units that are sharded."""
        ...

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one sample, without the batch, for images (videos) of a size in pixels.

        Raises:
            ValueError: the model makes none of that size; it says which it does.
        """
        ...

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the schedule of the model's own scheduler for samples of a shape, which moves those of some models."""
        ...

    def check_prompt(self, prompt: str) -> None:
        """Raise ValueError, in one line, if the model cannot be asked for `prompt`."""
        ...

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Return the conditioning of a batch of prompts; the empty prompt is none, for guidance away from it."""
        ...

    def predict(
        self, module: nn.Module, x: Samples, sigma: PerSample, cond: Cond, *, timestep: PerSample | None = None
    ) -> Samples:
        """Return the prediction `[B, *event]` for samples x at levels sigma `[B]` (alpha_bar for a model of eps).

        `timestep` is what the model's scheduler gives for that level; without it (levels that are on no schedule, as in
        supervised training) it is derived from sigma.
        """
        ...

    def decode(self, latents: Samples) -> Tensor:
        """Return images `[B, C, H, W]`, float in [0, 1]."""
        ...

    def guide(self, v: Samples, v_uncond: Samples, scale: PerSample) -> Samples:
        """Return the prediction that a step is taken with: for most models v_uncond + g (v - v_uncond), g the scale."""
        ...
