"""Tiny random pipelines of diffusers that are replayed without an adapter: one row per architecture."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from helpers import stored
from helpers.tiny_pipelines import flux, sd3
from torch import Tensor

from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.tiny.pipelines import build, build_random

PROMPTS = ["a red fox", "two cats", "an owl"]


class ReplayedCase(NamedTuple):
    """One architecture: how to build and call its pipeline, and the layers that LoRA adapts."""

    make: Callable[[], Any]
    options: dict[str, Any]
    targets: tuple[str, ...]
    latents: Callable[[Tensor], Tensor] = torch.clone  # initial noise in the pipeline's layout, given that of its scheduler
    returns_samples: bool = True  # whether the pipeline returns latents in its scheduler's layout


def built(name: str, **levels: Any) -> Any:
    """Build a pipeline of diffusers with Euler's steps on noise levels of given settings."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipeline = build(name)
    pipeline.register_modules(scheduler=FlowMatchEulerDiscreteScheduler(**levels))
    return pipeline


def flux2() -> Any:
    """Build FLUX.2 klein: packed latents with positions, several layers of the text encoder, and a VAE with a batch norm."""
    return built("Flux2KleinPipeline", use_dynamic_shifting=True)


def unpacked(x: Tensor) -> Tensor:
    """Return samples `[B, H W, C]` of square images as `[B, C, H, W]`."""
    return rearrange(x, "b (h w) c -> b c h w", h=round(x.shape[1] ** 0.5))


SIZE = {"height": 16, "width": 16}
LARGE = {"height": 32, "width": 32}  # the smallest size that some take
WITHOUT_ADAPTER = ("sana", "lumina2", "aura-flow", "flux2")
ATTENTION = ("to_q", "to_k", "to_v")

ROWS: dict[str, ReplayedCase] = {
    # One call for both halves of guidance, a mask of text tokens, and samples in float32.
    "sana": ReplayedCase(
        partial(built, "SanaPipeline", shift=3.0),
        {
            **LARGE,
            "guidance_scale": 4.5,
            "use_resolution_binning": False,
            "complex_human_instruction": None,
            "max_sequence_length": 24,
        },
        ATTENTION,
    ),
    # Two calls, norm-preserving guidance, a velocity of the other sign, and time 1 - sigma.
    "lumina2": ReplayedCase(
        partial(built, "Lumina2Pipeline"),
        {**LARGE, "guidance_scale": 4.0, "system_prompt": "", "max_sequence_length": 24},
        ATTENTION,
    ),
    # One call for both halves of guidance, and time between 0 and 1.
    "aura-flow": ReplayedCase(
        partial(built, "AuraFlowPipeline", shift=1.73), {**SIZE, "guidance_scale": 3.5, "max_sequence_length": 24}, ATTENTION
    ),
    "flux2": ReplayedCase(
        flux2,
        {**SIZE, "guidance_scale": 4.0, "max_sequence_length": 32, "text_encoder_out_layers": [0, 1, 2]},
        ATTENTION,
        latents=unpacked,
        returns_samples=False,
    ),
    "sd3": ReplayedCase(sd3, {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 12}, ATTENTION),
    "flux": ReplayedCase(flux, {**SIZE, "guidance_scale": 2.5, "max_sequence_length": 12}, ATTENTION),
    "flux-guided": ReplayedCase(
        flux,
        {**SIZE, "guidance_scale": 2.5, "true_cfg_scale": 3.0, "negative_prompt": "bad", "max_sequence_length": 12},
        ATTENTION,
    ),
}


def opened(name: str, folder: Path, **options: Any) -> AnyPipeline:
    call = dict(ROWS[name].options)
    size = {"height": call.pop("height"), "width": call.pop("width"), "steps": 4, "scale": call.pop("guidance_scale")}
    return AnyPipeline(folder, **{**size, "call": call, **options})


def load(name: str, folder: Path) -> Any:
    """Return a row's pipeline, loaded from a folder; if there is none, save it there first, with random weights."""
    from diffusers import DiffusionPipeline

    if not folder.exists():
        stored.copy_of(f"replayed-{name}", folder, partial(_make, ROWS[name]))
    loaded = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def _make(row: ReplayedCase, folder: Path) -> None:
    build_random(row.make, 0.2).save_pretrained(folder)
