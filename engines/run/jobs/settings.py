"""Settings of a run beside its method: data, pipeline, engine, checkpoints and exports."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fluvial.core.checks import BATCH, COUNT, FRAMES, INDEX, PIXELS, check_fields
from fluvial.engines.choices import refuse_unused
from fluvial.engines.data.sizes import Size, parse_size
from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.kernels import Implementation

UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str, field: str) -> int:
    """Parse a number of bytes such as 24GiB; UsageError, with the field, if the text is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT]i?B)", text)
    if match is None or float(match[1]) == 0:
        raise UsageError(field, text, "a number and a unit, e.g. 24GiB")
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class DataConfig:
    """Order of the prompts, and images with captions to learn from without a rollout.

    Args:
        images: Images with captions to learn from without a rollout (sft, and raft on data), each with or without a weight:
            folders of images, or files of records with a column image.
        order: Order of the prompts: epochs (each prompt once per epoch, shuffled), draws (at random, with replacement) or
            distinct (at random for each rollout, without repeats in it, as in Flow-GRPO).
        seed: Seed of the order of the prompts; None is `seed`.
        cache: Folder of encoded images and captions; by default `encoded` in `out`. Runs on the same model, size and images
            may share one.
        errors: Treatment of images that cannot be read: refuse (raises an error) or skip (leaves them out).
    """

    images: tuple[str, ...] = ()
    order: Literal["epochs", "draws", "distinct"] = "epochs"
    seed: int | None = None
    cache: Path | None = None
    errors: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        check_fields(self, seed=(0, 2**63 - 1))


@dataclass(frozen=True)
class MachineConfig(EngineConfig):
    """Sharding, precision, checkpointing and offload, and the sizes of micro-batches.

    Args:
        micro_batch: Number of samples per forward pass, in rollout and update; it determines the memory, and changes results
            only by rounding. auto tries 1, 2, 4, ... before training, within the memory and until the time per sample falls
            by less than 5 %. The run's config.json and checkpoints have the number; a resumption uses it.
        update_micro_batch: Number of (sample, step) pairs per forward and backward pass of an update. auto tries multiples
            of `micro_batch` before training, within the memory, and chooses the fastest of those that give each row the same
            bits as in the rollout, so that first ratios are exactly 1. Remaining pairs take smaller sizes that were tried
            too. A checkpoint has the number; a resumption on another processor, or with another number of ranks or threads,
            chooses again. rollout uses `micro_batch`, as auto does with compiled blocks. A number changes results by
            rounding, first ratios too.
        init: How base weights are loaded: sharded (each rank reads its own shards, so that no rank has the whole model) or
            whole (every rank loads the model and then shards it, for models that are not read from a folder).
        implementation: Implementation of log-probabilities and losses: auto (Triton on an accelerator, else the reference),
            triton, compiled or reference.
        timeout: Seconds that processes wait for each other in a collective before they raise an error.
        fit: Memory of a GPU, e.g. 24GiB. A training run changes settings of this group until it fits, as estimated by
            `fluvial plan`, and prints the bytes that each saves.
    """

    micro_batch: int | Literal["auto"] = 64
    update_micro_batch: int | Literal["auto", "rollout"] = "auto"
    init: Literal["sharded", "whole"] = "sharded"
    implementation: Implementation = "auto"
    timeout: float = 600.0
    fit: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit is not None:
            parse_bytes(self.fit, "engine.fit")
        check_fields(self, "engine", micro_batch=BATCH, update_micro_batch=BATCH, timeout=(1, 1e6))


@dataclass(frozen=True)
class CheckpointConfig:
    """Interval and storage of checkpoints, and the one that a run continues from.

    Args:
        every: Number of updates between checkpoints.
        background: Write checkpoints in the background, from a copy on the host.
        folder: Folder of the checkpoints, or a URL of fsspec (s3://bucket/run); by default in `out`, which is also the
            fallback when a save fails.
        keep: Number of checkpoints to keep.
        resume_from: Continue from this checkpoint, a folder or a URL.
    """

    every: int = 20
    background: bool = False
    folder: str | None = None
    keep: int = 2
    resume_from: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, every=COUNT, keep=COUNT)
        for name in ("folder", "resume_from"):
            if getattr(self, name) == "":
                raise UsageError(f"checkpoint.{name}", "", "a folder or a URL", "the current folder is .")


@dataclass(frozen=True)
class ExportConfig:
    """Interval, dtype and format of exports.

    Args:
        every: Number of updates between exports to `exports` in `out`; 0 exports only at the end.
        dtype: Dtype of the exported weights.
        format: Format of the exports during training: lora, merged, full or comfyui (see `fluvial export`); auto is lora
            if an adapter is trained, else merged.
    """

    every: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    format: Literal["auto", "lora", "merged", "full", "comfyui"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self, every=INDEX)
        refuse_unused(self, "export.")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        if not self.every:
            yield "format", "with `export.every` 0, where nothing is exported during training"


@dataclass(frozen=True)
class PipelineConfig:
    """Base weights, and settings of a pipeline of diffusers, from a folder or the Hub.

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
        latents: Clean sample of an image: mean (of the VAE's distribution) or sample (one draw per image).
        frozen: Dtype of text encoders and VAE; auto is bfloat16 on CUDA, and without an adapter where the network computes
            in it, else float32.
        text_base: Format of the text encoders' linear layers, as `engine.base` of the network's; auto is `frozen`.
        vae_dtype: Dtype of the VAE; auto is `frozen`.
        vae_tile: Side in pixels of the tiles that the VAE decodes and encodes, one image at a time; by default whole images.
            Tiles overlap by a quarter and are blended, so images differ slightly.
        vae_offload: Keep the VAE on the host, and move it to the device only while it works.
        trust_remote_code: Run code that comes with the model's folder.
        weights: Base weights to start from: a folder of a network saved by diffusers or exported by a run, or a safetensors
            file of a network or of a whole checkpoint; by default those of the model.
        settings: Folder or id of the pipeline with the settings, tokenizers and missing parts for a `model` of one
            safetensors file; by default the published one of its architecture.
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
    weights: Path | None = None
    settings: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, height=PIXELS, width=PIXELS, frames=FRAMES)
        check_fields(self, text_tokens=BATCH, shift=(1e-6, 1e6), vae_tile=(64, PIXELS[1]))
        if self.vae_tile is not None and self.vae_tile % 64:
            raise UsageError("pipeline.vae_tile", self.vae_tile, "a multiple of 64")
        if self.sizes and (self.height, self.width) != (PipelineConfig.height, PipelineConfig.width):
            raise UsageError("`pipeline.height` and `pipeline.width` have no effect with `pipeline.sizes`; remove them")
        with convert_errors(UsageError, ValueError, says="`pipeline.sizes` has a wrong value"):
            if len(set(map(parse_size, self.sizes))) < len(self.sizes):
                raise ValueError(f"{' '.join(self.sizes)} names a size twice: name each once")
        if wrong := [word for word in self.call if not word.partition("=")[0].isidentifier() or "=" not in word]:
            raise UsageError(f"`pipeline.call` holds {wrong[0]!r}, expected name=value")
        if wrong := [word for word in self.media if not word.partition("=")[0].isidentifier() or not word.partition("=")[2]]:
            raise UsageError(f"`pipeline.media` holds {wrong[0]!r}, expected argument=column")

    @property
    def size(self) -> Size:
        """Size of evaluations, and of all samples of a run with one size."""
        return parse_size(self.sizes[0]) if self.sizes else Size(self.height, self.width)
