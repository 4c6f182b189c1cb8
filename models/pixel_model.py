"""Base classes of the built-in models, whose samples are pixels: a diffusers network with fixed settings and weights."""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fluvial.core.guidance import classifier_free
from fluvial.core.sigmas import from_scheduler
from fluvial.models.lora import JOINT_ATTENTION
from fluvial.models.pipelines.folder import load_network, read_settings
from fluvial.models.protocol import Prediction, Schedule

FILE = "diffusion_pytorch_model.safetensors"
SHIFT = 3.0


@dataclass(eq=False)
class PixelModel(ABC):
    """A small network with fixed settings whose samples are pixels; a subclass adds its prompts and its schedule.

    Args:
        weights: folder of the network as diffusers saves it; None for random weights.
        seed: seed of random weights.
    """

    weights: Path | None
    _: KW_ONLY
    seed: int = 0

    name: ClassVar[str]  # of the model, for messages
    event: ClassVar[tuple[int, int, int]]  # shape of a sample
    network: ClassVar[str]  # class of diffusers
    settings: ClassVar[Mapping[str, Any]]  # keyword arguments of the class
    prediction: ClassVar[Prediction] = "velocity"
    guide = staticmethod(classifier_free)

    def latent_shape(self, height: int | None = None, width: int | None = None, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of a sample, `[1, height, width]`; ValueError if the size is not the only supported one."""
        _, rows, columns = self.event
        size = (rows if height is None else height, columns if width is None else width, frames)
        if size != (rows, columns, 1):
            raise ValueError(
                f"the size is {size[0]}x{size[1]} of {frames} frames, expected {rows}x{columns} of 1: "
                f"{self.name} has one size"
            )
        return self.event

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the network with its weights, in float32, or `empty`, with parameters on the meta device.

        Raises:
            ValueError: the folder of weights lacks a file or contains another model, or `empty` is set for random weights.
        """
        import diffusers

        kind, weights = getattr(diffusers, self.network), self.weights
        if weights is None:
            if empty:
                raise ValueError("a model with random weights cannot be built empty: it has no folder to load them from")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                return kind(**self.settings)
        config = weights / "config.json"
        if not config.is_file():
            raise ValueError(f"{weights} holds no model: config.json is missing")
        if not (weights / FILE).is_file():
            raise ValueError(
                f"{weights} is incomplete: there is no {FILE}; only weights in the safetensors format are loaded"
            )
        settings = read_settings(config)
        if different := [setting for setting, value in self.settings.items() if settings.get(setting) != value]:
            raise ValueError(f"{config} is not of the {self.name} model: {', '.join(different)} differ")
        if empty:
            from accelerate import init_empty_weights

            with init_empty_weights(include_buffers=False):
                return kind(**self.settings)
        return load_network(kind, weights)

    def decode(self, latents: Tensor) -> Tensor:
        """Return images in [0, 1]; the samples are pixels in [-1, 1]."""
        return ((latents.float() + 1) / 2).clamp(0, 1)


class PixelTransformer(PixelModel):
    """A pixel model over SD3's transformer, whose schedule is that of a flow; its conditioning has `tokens` and `pooled`."""

    network = "SD3Transformer2DModel"
    prompt_layers = ("context_embedder", "time_text_embed.text_embedder")
    lora_targets: tuple[str, ...] = (*JOINT_ATTENTION, "net.0.proj", "net.2", "linear")

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the joint transformer blocks."""
        return list(module.get_submodule("transformer_blocks").children())

    def build_scheduler(self, steps: int) -> Any:
        """Return diffusers' flow-matching scheduler with shift 3, set to `steps` steps."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
        scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist())
        return scheduler

    def schedule(self, steps: int, shape: tuple[int, ...] = ()) -> Schedule:
        """Return the schedule of the scheduler."""
        scheduler = self.build_scheduler(steps)
        return Schedule(from_scheduler(scheduler), scheduler.timesteps)

    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Any, *, timestep: Tensor | None = None) -> Tensor:
        """Return the network's output, of the samples' shape: v, unless a subclass converts it."""
        return module(
            hidden_states=self.build_network_input(x, cond),
            encoder_hidden_states=cond.tokens,
            pooled_projections=cond.pooled,
            timestep=sigma * 1000 if timestep is None else timestep,
            return_dict=False,
        )[0]

    def build_network_input(self, x: Tensor, cond: Any) -> Tensor:
        """Return the noisy samples as the network's input; a subclass adds channels of the conditioning."""
        return x
