"""What a pipeline of diffusers is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fluvial.core.checks import check_fields
from fluvial.engines.data.sizes import Size, parse_size
from fluvial.engines.errors import UsageError


@dataclass(frozen=True)
class PipelineConfig:
    """Settings of a pipeline of diffusers, from a folder or the Hub.

    Args:
        height: Height of the images, in pixels.
        width: Width of the images, in pixels.
        sizes: Sizes of training samples as WIDTHxHEIGHT, e.g. 1024x1024 832x1216, in place of height and width. An image is
            scaled and cut to the one with the nearest aspect ratio; a rollout has the size that the records of its prompts
            name (columns `size`, or `width` and `height`), or one that is drawn. Evaluations have the first.
        frames: Number of frames of a video; 1 for images.
        call: Further arguments of a pipeline without an adapter, as name=value, e.g. max_sequence_length=128; a value is
            JSON, or else text.
        media: Columns of the prompts' records that are images, videos or sounds for a pipeline without an adapter, as
            argument=column, e.g. image=source mask_image=hole video=clip. A column with the name of an argument maps itself.
        heldout: Files of prompts to evaluate on, one for all or one for each of `prompts`; by default every tenth training
            prompt of each file is held out.
        text_cache: Folder for prompt embeddings. All prompts are encoded before training and the text encoders dropped;
            without a folder the encoders stay, and encode each batch.
        text_tokens: Number of tokens that a prompt is padded to, and cut at; by default that of diffusers' pipeline.
        shift: Shift s of the noise levels, sigma -> s sigma / (1 + (s - 1) sigma); by default the scheduler's own.
        latents: Sample of an image that is learnt from: mean (of the VAE's distribution) or sample (one draw per image).
        frozen: Dtype of text encoders and VAE; auto is bfloat16 on CUDA, and without an adapter where the network computes
            in it, else float32.
        text_base: Format of the text encoders' linear layers, as `engine.base` of the network's; auto is `frozen`.
        vae_dtype: Dtype of the VAE; auto is `frozen`.
        vae_tile: Side in pixels of the tiles that the VAE decodes and encodes, one image at a time; by default whole images.
            Tiles overlap by a quarter and are blended, so images differ slightly.
        vae_offload: Keep the VAE on the host, and move it to the device only while it works.
        trust_remote_code: Run code that comes with the model's folder.
    """

    height: int = 512
    width: int = 512
    sizes: tuple[str, ...] = ()
    frames: int = 1
    call: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ()
    text_cache: Path | None = None
    text_tokens: int | None = None
    shift: float | None = None
    latents: Literal["mean", "sample"] = "mean"
    frozen: Literal["auto", "float32", "bfloat16"] = "auto"
    text_base: Literal["auto", "int8", "int4", "nf4", "fp8"] = "auto"
    vae_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    vae_tile: int | None = None
    vae_offload: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        size = (1, 2**20)
        check_fields(self, height=size, width=size, frames=size, text_tokens=size, shift=(1e-6, 1e6), vae_tile=(64, 2**20))
        if self.vae_tile is not None and self.vae_tile % 64:
            raise UsageError("pipeline.vae_tile", self.vae_tile, "a multiple of 64")
        if self.sizes and (self.height, self.width) != (PipelineConfig.height, PipelineConfig.width):
            raise UsageError("`pipeline.height` and `pipeline.width` have no effect with `pipeline.sizes`; remove them")
        try:
            if len(set(map(parse_size, self.sizes))) < len(self.sizes):
                raise ValueError(f"{' '.join(self.sizes)} names a size twice: name each once")
        except ValueError as error:
            raise UsageError(f"`pipeline.sizes` has a wrong value: {error}") from error
        if wrong := [word for word in self.call if not word.partition("=")[0].isidentifier() or "=" not in word]:
            raise UsageError(f"`pipeline.call` holds {wrong[0]!r}, expected name=value")
        if wrong := [word for word in self.media if not word.partition("=")[0].isidentifier() or not word.partition("=")[2]]:
            raise UsageError(f"`pipeline.media` holds {wrong[0]!r}, expected argument=column")

    @property
    def size(self) -> Size:
        """Size of evaluations, and of all samples unless there are several sizes."""
        return parse_size(self.sizes[0]) if self.sizes else Size(self.height, self.width)
