"""Wan 2.1 and 2.2: videos from text, with one transformer, or with one each for high and low noise levels."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fluvial.core.checks import per_sample
from fluvial.core.host_values import read
from fluvial.core.random import Key
from fluvial.core.types import to_device
from fluvial.models.pipelines.base import Pipeline
from fluvial.models.pipelines.folder import read_index, read_settings
from fluvial.models.routing import Routed

EXPERTS = ("transformer", "transformer_2")  # for high noise levels, and for low ones


class Experts(nn.ModuleDict, Routed):
    """Two networks: `transformer` for samples at timesteps of at least `boundary`, `transformer_2` for those below.

    A batch with timesteps on one side runs one network, any other batch both. Ranks that share the parameters run the same
    networks, so that they gather the same parameters. Timesteps that the host does not know are read from the device.
    """

    def __init__(self, networks: Mapping[str, nn.Module], *, boundary: float) -> None:
        super().__init__(networks)
        self.boundary = boundary

    def forward(self, hidden_states: Tensor, timestep: Tensor, **given: Any) -> tuple[Tensor]:
        """Return `(v,)`, `[B, C, F, H, W]`, like a single transformer."""
        low, on_host = timestep < self.boundary, read(timestep) < self.boundary
        unused = self.unused_by_all(torch.stack([on_host.all(), (~on_host).all()]))
        names = [name for name, rests in zip(EXPERTS, unused.tolist(), strict=True) if not rests]
        outputs = [self[name](hidden_states=hidden_states, timestep=timestep, **given)[0] for name in names]
        return (outputs[0] if len(outputs) == 1 else torch.where(per_sample(low, outputs[0]), outputs[1], outputs[0]),)


class WithExperts(Pipeline):
    """A pipeline that may have two networks, one for high noise levels and one for low ones.

    Args:
        folder, options: see `Pipeline`.

    Raises:
        ValueError: see `Pipeline`; or it has a second network without a boundary between them, or the other way round.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.boundary_ratio: float | None = read_index(self.folder).get("boundary_ratio")
        if (self.boundary_ratio is None) != ("transformer_2" not in self.parts):
            raise ValueError(f"{self.folder} has only one of transformer_2 and boundary_ratio, expected both or neither")
        if self.boundary_ratio is not None:
            self.weights = {part: self.folder / part for part in EXPERTS}

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the transformer, or both transformers as `Experts`; see `DiffusionModel.build`."""
        if self.boundary_ratio is None:
            return super().build(empty=empty)
        networks = {part: self.build_part(part, empty=empty) for part in EXPERTS}
        return Experts(networks, boundary=1000 * self.boundary_ratio)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks in the order they run."""
        networks = module.values() if isinstance(module, Experts) else [module]
        return [*chain.from_iterable(map(self.blocks_of, networks))]

    def blocks_of(self, network: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks of one network."""
        return super().blocks(network)


class Wan(WithExperts):
    """The model protocol over a WanPipeline (arXiv 2503.20314), whose samples are videos.

    The folder's scheduler is UniPC on the levels of a flow; the rollout uses the levels of FlowMatchEulerDiscreteScheduler
    with the same shift. UMT5 masks padding tokens, and the transformer is given zeros in their place.

    Args:
        folder, options: see `Pipeline`.
    """

    pipeline = "WanPipeline"
    network = "WanTransformer3DModel"
    block_lists = ("blocks",)
    text_lengths = (512, 512)
    encoding: ClassVar[dict[str, Any]] = {"do_classifier_free_guidance": False}
    encoded = ("tokens", "")
    prompt_layers = ("*condition_embedder.text_embedder", "*.attn2.to_k", "*.attn2.to_v", "*.attn2.norm_k")
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")
    serving_solver = "unipc"  # that of the folder's scheduler

    @property
    def patch(self) -> int:
        """Latents per token of the network along each side."""
        return int(self.config["patch_size"][-1])

    @property
    def vae_scale(self) -> int:
        """Pixels per latent along each side."""
        return int(self.vae_config.get("scale_factor_spatial", 8))

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return (C, 1 + (frames - 1) / r, height / s, width / s) for a VAE that scales by r in time and s in space.

        Raises:
            ValueError: height or width is not a multiple of s times the patch, or frames - 1 not of r.
        """
        rate = self.vae_config.get("scale_factor_temporal", 4)  # absent in older folders
        if frames < 1 or (frames - 1) % rate:
            raise ValueError(f"frames is {frames}, expected 1 plus a multiple of {rate}")
        channels, *sides = super().latent_shape(height, width)
        return (channels, 1 + (frames - 1) // rate, *sides)

    def scheduler(self) -> Any:
        """Return diffusers' flow-matching scheduler with the folder's shift; ValueError if the folder's is not of a flow."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        if self.parts["scheduler"] != "UniPCMultistepScheduler":
            return super().scheduler()
        settings = read_settings(self.folder / "scheduler" / "scheduler_config.json")
        if not settings.get("use_flow_sigmas"):
            raise ValueError(f"{self.folder} has a UniPCMultistepScheduler without use_flow_sigmas, expected with")
        return FlowMatchEulerDiscreteScheduler(shift=settings.get("flow_shift", 1.0) if self.shift is None else self.shift)

    def decode(self, latents: Tensor) -> Tensor:
        """Return videos `[B, 3, frames, height, width]`, float in [0, 1]."""
        mean, std = self._moments(latents)
        return self.decode_with_vae(latents / (1 / std) + mean)  # the operations of diffusers' pipeline, for the same bits

    def encode_images(self, images: Tensor, *, key: Key | None = None) -> Tensor:
        """Return clean samples `[B, C, f, h, w]` of videos `[B, 3, F, H, W]`, or of images as videos of one frame."""
        videos = images if images.ndim == 5 else images.unsqueeze(2)
        mean, std = self._moments(images)
        return (self.encode_with_vae(videos, key) - mean) / std

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the VAE's latents per channel, on a tensor's device."""
        moments = (torch.tensor(self.vae_config[f"latents_{name}"]) for name in ("mean", "std"))
        mean, std = (to_device(values, like.device) for values in moments)
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)
