"""Wan 2.1 and 2.2: videos from text or images, with one transformer, or with one each for high and low noise levels."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.checks import per_sample
from fluvial.core.random import Key
from fluvial.models.host_values import read, to_device
from fluvial.models.pipelines.base import Pipeline
from fluvial.models.pipelines.conditioned import Conditioned, open_images
from fluvial.models.pipelines.folder import read_index, read_settings
from fluvial.models.replay.media import TextPrompt
from fluvial.models.routing import Routed

EXPERTS = ("transformer", "transformer_2")  # for high and for low noise levels


class Experts(nn.ModuleDict, Routed):
    """Two networks: `transformer` for samples at timesteps of at least `boundary`, `transformer_2` for those below.

    A batch with all timesteps on one side runs one network, any other batch both. Ranks that share the parameters run the
    same networks, so that they gather the same parameters. Timesteps unknown to the host are read from the device.
    """

    def __init__(self, networks: Mapping[str, nn.Module], *, boundary: float) -> None:
        super().__init__(networks)
        self.boundary = boundary

    def forward(self, hidden_states: Tensor, timestep: Tensor, **arguments: Any) -> tuple[Tensor]:
        """Return `(v,)`, `[B, C, F, H, W]`, like a single transformer."""
        low, on_host = timestep < self.boundary, read(timestep) < self.boundary
        unused = self.find_unused(torch.stack([on_host.all(), (~on_host).all()]))
        names = [name for name, rests in zip(EXPERTS, unused.tolist(), strict=True) if not rests]
        outputs = [self[name](hidden_states=hidden_states, timestep=timestep, **arguments)[0] for name in names]
        return (outputs[0] if len(outputs) == 1 else torch.where(per_sample(low, outputs[0]), outputs[1], outputs[0]),)


class WithExperts(Pipeline):
    """A pipeline that may have two networks, one for high noise levels and one for low ones.

    Args:
        folder, options: see `Pipeline`.
        guidance_scale_2: guidance scale of the network for low noise levels; by default both have the same.

    Raises:
        ValueError: see `Pipeline`; or the folder has only one of a second network and a boundary; or guidance_scale_2 is
            given without a second network, or is not a number of at least 0.
    """

    calls: ClassVar[tuple[str, ...]] = ("guidance_scale_2",)  # arguments of the pipeline's call that are options here

    def __init__(self, folder: str | Path, *, guidance_scale_2: float | None = None, **options: Any) -> None:
        super().__init__(folder, **options)
        self.guidance_scale_2 = guidance_scale_2
        self.boundary_ratio: float | None = read_index(self.folder).get("boundary_ratio")
        if (self.boundary_ratio is None) != ("transformer_2" not in self.parts):
            raise ValueError(f"{self.folder} has only one of transformer_2 and boundary_ratio, expected both or neither")
        if self.boundary_ratio is not None:
            self.weights = {part: self.folder / part for part in EXPERTS}
        if guidance_scale_2 is None:
            return
        if self.boundary_ratio is None:
            raise ValueError(f"guidance_scale_2 is {guidance_scale_2}, but {self.folder} has one network only: remove it")
        if type(guidance_scale_2) not in (int, float) or not 0 <= guidance_scale_2 < math.inf:
            raise ValueError(f"guidance_scale_2 is {guidance_scale_2!r}, expected a number of at least 0")

    def scale_at(self, scale: Tensor, level: Tensor, timestep: Tensor | None) -> Tensor:
        """Return the guidance scale of each sample, `[B]`: that of the network that its timestep selects."""
        if self.guidance_scale_2 is None or self.boundary_ratio is None:
            return scale
        at = level * 1000 if timestep is None else timestep
        return torch.where(at < 1000 * self.boundary_ratio, self.guidance_scale_2, scale)

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the transformer, or both transformers as `Experts`; see `DiffusionModel.build`."""
        if self.boundary_ratio is None:
            return super().build(empty=empty)
        networks = {part: self.build_part(part, empty=empty) for part in EXPERTS}
        return Experts(networks, boundary=1000 * self.boundary_ratio)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks in the order they run."""
        networks = module.values() if isinstance(module, Experts) else [module]
        return [*chain.from_iterable(map(self.list_blocks, networks))]

    def list_blocks(self, network: nn.Module) -> Sequence[nn.Module]:
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
    prompt_layers: ClassVar[tuple[str, ...]] = (
        "*condition_embedder.text_embedder",
        "*.attn2.to_k",
        "*.attn2.to_v",
        "*.attn2.norm_k",
    )
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")
    serving_solver = "unipc"  # the solver of the folder's scheduler

    @property
    def patch(self) -> int:
        """Latents per token of the network along each side."""
        return int(self.config["patch_size"][-1])

    @property
    def vae_scale(self) -> int:
        """Pixels per latent along each side."""
        return int(self.vae_config.get("scale_factor_spatial", 8))

    @property
    def rate(self) -> int:
        """Frames per latent along time, after the first frame."""
        return int(self.vae_config.get("scale_factor_temporal", 4))  # absent in older folders

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return (C, 1 + (frames - 1) / r, height / s, width / s) for a VAE that scales by r in time and s in space.

        Raises:
            ValueError: height or width is not a multiple of s times the patch, or frames - 1 not of r.
        """
        rate = self.rate
        if frames < 1 or (frames - 1) % rate:
            raise ValueError(f"frames is {frames}, expected 1 plus a multiple of {rate}")
        channels, *sides = super().latent_shape(height, width)
        return (channels, 1 + (frames - 1) // rate, *sides)

    def build_scheduler(self) -> Any:
        """Return diffusers' flow-matching scheduler with the folder's shift; ValueError if the folder's is not a flow's."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        if self.parts["scheduler"] != "UniPCMultistepScheduler":
            return super().build_scheduler()
        settings = read_settings(self.folder / "scheduler" / "scheduler_config.json")
        if not settings.get("use_flow_sigmas"):
            raise ValueError(f"{self.folder} has a UniPCMultistepScheduler without use_flow_sigmas, expected with")
        return FlowMatchEulerDiscreteScheduler(shift=settings.get("flow_shift", 1.0) if self.shift is None else self.shift)

    def decode(self, latents: Tensor) -> Tensor:
        """Return videos `[B, 3, frames, height, width]`, float in [0, 1]."""
        mean, std = self._get_moments(latents)
        return self.decode_with_vae(latents / (1 / std) + mean)  # the operations of diffusers' pipeline, for the same bits

    def encode_images(self, images: Tensor, *, key: Key | None = None) -> Tensor:
        """Return clean samples `[B, C, f, h, w]` of videos `[B, 3, F, H, W]`, or of images as videos of one frame."""
        videos = images if images.ndim == 5 else images.unsqueeze(2)
        mean, std = self._get_moments(images)
        return (self.encode_with_vae(videos, key) - mean) / std

    def _get_moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the VAE's latents per channel, on a tensor's device."""
        moments = (torch.tensor(self.vae_config[f"latents_{name}"]) for name in ("mean", "std"))
        mean, std = (to_device(values, like.device) for values in moments)
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


class ImageVideoCond(NamedTuple):
    """Conditioning of Wan by a prompt and an image."""

    tokens: Tensor  # [B, L, D]
    image: Tensor  # [B, c, f, h, w] further channels: mask and latents of the given frames; or latents of the first frame
    embeds: Tensor | None = None  # [B, n, N, P] CLIP embeddings of the n given frames, for networks that take them


class WanImageToVideo(Conditioned, Wan):
    """The model protocol over a WanImageToVideoPipeline (arXiv 2503.20314): Wan 2.1, Wan 2.2 A14B and Wan 2.2 TI2V.

    The network takes the latents of the first frame and a mask beside the sample; that of Wan 2.1 also takes the CLIP
    embedding of the image. In TI2V (`expand_timesteps`) the first frame replaces the sample's, at timestep 0.

    Args:
        folder, height, width, options: see `Conditioned`; images are scaled to the size of the samples.
        frames: number of frames of the samples.
        last_image: whether prompts give the last frame, too; by default for networks that were trained with both.

    Raises:
        ValueError: see `Wan`; or the network does not take the channels of images, or too few frames are left to generate.
    """

    pipeline = "WanImageToVideoPipeline"
    conditioning = ImageVideoCond
    encoders = ("tokenizer", "text_encoder", "image_encoder", "image_processor")
    calls: ClassVar[tuple[str, ...]] = (*Wan.calls, "last_image")
    sized = ("height", "width", "frames")
    # Only in the blocks: the embedding of images has layers named net.0.proj and net.2, too.
    lora_targets: tuple[str, ...] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "ffn.net.0.proj",
        "ffn.net.2",
    )
    prompt_layers: ClassVar[tuple[str, ...]] = (
        *Wan.prompt_layers,
        *("*condition_embedder.image_embedder", "*.attn2.add_k_proj", "*.attn2.add_v_proj", "*.attn2.norm_added_k"),
    )

    def __init__(self, folder: str | Path, *, frames: int = 81, last_image: bool | None = None, **options: Any) -> None:
        super().__init__(folder, **options)
        self.frames, self.holds_frame = frames, bool(read_index(self.folder).get("expand_timesteps"))
        both = self.config.get("pos_embed_seq_len") is not None  # a network that was trained with embeddings of two frames
        last = both if last_image is None else last_image
        self.takes: tuple[str, ...] = ("image", "last_image") if last else ("image",)
        self.left_out: tuple[str, ...] = () if last else ("last_image",)  # images that prompts do not need
        if last and (self.holds_frame or frames < 1 + self.rate):
            why = "its network takes the first frame alone" if self.holds_frame else f"there are {frames} frames"
            raise ValueError(f"last_image is true, but {why}: set it to false, or make longer videos")
        if self.config.get("image_dim") is not None:  # has keys and values of images, which diffusers' loader expects
            if last != both:
                frame = "embeddings of two frames" if both else "the embedding of one frame"
                raise ValueError(f"last_image is {str(last).lower()}, but its network takes {frame}: leave it out")
            if self.text_tokens != self.text_lengths[1]:
                raise ValueError(
                    f"text_tokens is {self.text_tokens}, expected {self.text_lengths[1]}: by this number the network tells "
                    "the text from the embedding of the image"
                )
            self.lora_targets = (*self.lora_targets, "add_k_proj", "add_v_proj")
        channels, latents = self.config["in_channels"], self.config["out_channels"]
        expected = latents + (0 if self.holds_frame else self.rate + latents)
        if channels != expected:
            raise ValueError(f"{self.folder / self.part} has {channels} input channels, expected {expected}")

    @property
    def decodes_prompts(self) -> bool:
        """Whether `decode` needs the prompts, whose images are the first frames of TI2V."""
        return self.holds_frame

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of a sample, see `Wan`; ValueError if the size differs from that of the conditioning."""
        if (height, width, frames) != (*self.size, self.frames):
            raise ValueError(f"the size is {height}x{width}x{frames}, expected {self.size[0]}x{self.size[1]}x{self.frames}")
        return (self.config["out_channels"], *super().latent_shape(height, width, frames)[1:])

    def describe_image_options(self) -> str:
        """See `Conditioned.describe_image_options`."""
        return f"{super().describe_image_options()} {self.frames} {self.takes}"

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return tokens, channels of the images and their embeddings, see `ImageVideoCond`."""
        from diffusers.video_processor import VideoProcessor

        images = open_images(prompt, self.takes)
        cond = super().encode_text(encoders, prompt)
        if self.config.get("image_dim") is not None:
            embeds = encoders.encode_image(images if len(images) > 1 else images[0], self.device)
            cond["embeds"] = embeds.unsqueeze(0)
        processor = VideoProcessor(vae_scale_factor=self.vae_scale, do_normalize=False)
        return {**cond, "image": self._encode_frames([processor.preprocess(image, *self.size) for image in images])}

    def _encode_frames(self, images: Sequence[Tensor]) -> Tensor:
        """Return the latents of the given frames, each `[1, 3, H, W]` in [0, 1], with their mask."""
        first, *last = (frame.unsqueeze(2) for frame in images)
        if self.holds_frame:
            return self.encode_images(first)
        rest = torch.full((1, 3, self.frames - len(images), *self.size), 0.5)  # 0 in the VAE's range
        mean, std = self._get_moments(rest)
        video = torch.cat([first, rest, *last], dim=2)
        latents = (self.encode_with_vae(video) - mean) * (1 / std)  # the operations of diffusers' pipeline
        known = torch.zeros(self.frames)
        known[[0, *(-1 for _ in last)]] = 1
        # The first latent covers one frame, which is repeated to the number of frames of later latents.
        known = torch.cat([known[:1].expand(self.rate), known[1:]]).view(-1, self.rate).T
        return torch.cat([known[None, :, :, None, None].expand(-1, -1, -1, *latents.shape[-2:]), latents], dim=1)

    def build_network_input(self, x: Tensor, cond: ImageVideoCond) -> Tensor:
        """Return the samples with the further channels, or with the first frame in place of their own."""
        image = cond.image.to(x.dtype)
        return torch.cat([image, x[:, :, 1:]], dim=2) if self.holds_frame else torch.cat([x, image], dim=1)

    def build_inputs(self, x: Tensor, timestep: Tensor, cond: ImageVideoCond) -> dict[str, Any]:
        """See `Pipeline.build_inputs`; in TI2V each token has its own timestep."""
        if self.holds_frame:
            tokens = (x.shape[-2] // self.patch) * (x.shape[-1] // self.patch)
            later = (torch.arange(x.shape[2], device=x.device) > 0).repeat_interleave(tokens)
            return {"timestep": timestep[:, None] * later}
        embeds = None if cond.embeds is None else cond.embeds.flatten(0, 1).to(x.dtype)
        return {"timestep": timestep, "encoder_hidden_states_image": embeds}

    def decode(self, latents: Tensor, prompts: Sequence[TextPrompt] = ()) -> Tensor:
        """Return videos `[B, 3, frames, height, width]`, float in [0, 1]; TI2V's begin with the prompts' images."""
        if self.holds_frame:
            first = to_device(self.encode(prompts).image, latents.device)
            latents = torch.cat([first.to(latents.dtype), latents[:, :, 1:]], dim=2)
        return super().decode(latents)
