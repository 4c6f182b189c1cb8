"""Tiny random modular pipelines: which train and why the others do not, and diffusers' own call of them."""

import io
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers import stored
from PIL import Image

from fluvial.models.modular.any_modular import AnyModular
from fluvial.models.modular.blocks import PROMPT
from fluvial.models.replay.kinds import VIDEO
from fluvial.models.replay.media import MediaPrompt, TextPrompt
from fluvial.models.replay.processors import read_processors
from fluvial.models.tiny.modular import find_call, save

TEXTS = ("a red fox", "two cats in the rain, at night, under a lamp", "owl")
STEPS = 3


class TinyRow(NamedTuple):
    """What is known of a class."""

    any_level: bool = True  # whether its velocity is known between the levels of its schedule
    error: float = 0.0  # largest difference of its images from those of diffusers' own call, relative


TRAIN: dict[str, TinyRow] = {
    "Flux3": TinyRow(),
    "QwenImage": TinyRow(),
    "Wan": TinyRow(),
    "Anima": TinyRow(),
    "Cosmos3Distilled": TinyRow(),
    "Cosmos3Omni": TinyRow(),
    "Echo": TinyRow(error=1e-5),  # a velocity of its clean estimate, of which the steps are made again
    "ErnieImage": TinyRow(),
    "Flux": TinyRow(),
    "Flux2": TinyRow(),
    "Flux2Klein": TinyRow(),
    "Flux2KleinBase": TinyRow(),
    "FluxKontext": TinyRow(),
    "Helios": TinyRow(error=1e-5),  # its levels are of float64
    "HunyuanVideo15": TinyRow(),
    "Ideogram4": TinyRow(any_level=False),  # a scale of guidance per step
    "Krea2": TinyRow(),
    "Krea2Turbo": TinyRow(),
    "LTX": TinyRow(),
    "LTX2": TinyRow(any_level=False),
    "LTX25": TinyRow(any_level=False, error=1e-5),
    "MiniMaxH3": TinyRow(
        any_level=False, error=5e-6
    ),  # a level for the video and one for the sound; its steps round otherwise
    "QwenImage21": TinyRow(error=1e-5),  # diffusers keeps keys and values of the first step, and rounds otherwise
    "QwenImage21Turbo": TinyRow(error=1e-5),
    "QwenImageEdit": TinyRow(),
    "QwenImageEditPlus": TinyRow(),
    "QwenImageLayered": TinyRow(),
    "StableDiffusion3": TinyRow(),
    "StableDiffusionXL": TinyRow(any_level=False, error=1e-5),  # of epsilon
    "Wan22": TinyRow(),
    "Wan22Image2Video": TinyRow(),
    "Wan22Vace": TinyRow(),
    "WanImage2Video": TinyRow(),
    "ZImage": TinyRow(),
}
REFUSED = {
    "Flux3Distilled": "its network is given the time of the next step, so it is a flow map, not a velocity",
    "HeliosPyramid": "a chunk of its loop has several schedules, as of stages of other sizes",
    "WanAnimate2": "it calls its network before the loop, so its outputs would not follow the weights",
}


def folder_of(name: str, folder: Path) -> Path:
    """Return the folder of the tiny pipeline of a class without its ending."""
    if not folder.exists():
        stored.copy_of(f"modular-{name}", folder, partial(save, f"{name}ModularPipeline"))
    return folder


def prompts(name: str, count: int = 2) -> list[TextPrompt]:
    """Return prompts of unlike lengths, with images of their own if the pipeline takes them."""
    asked = find_call(f"{name}ModularPipeline")
    if not asked.media:
        return [*TEXTS[:count]]
    given = {kind: draw_video if kind in VIDEO.arguments else draw for kind in asked.media}
    return [
        MediaPrompt(text, {name: make(seed, asked.size) for name, make in given.items()})
        for seed, text in enumerate(TEXTS[:count])
    ]


def draw(seed: int, size: int) -> bytes:
    """Return a random image as the bytes of a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()


def draw_video(seed: int, size: int) -> bytes:
    """Return a random video of five frames as the bytes of a file."""
    with io.BytesIO() as file:
        np.save(file, np.random.default_rng(seed).integers(0, 256, (5, size, size, 3), dtype=np.uint8))
        return file.getvalue()


def opened(name: str, folder: Path, **options: Any) -> AnyModular:
    """Return the model of a tiny pipeline for its prompts."""
    asked = find_call(f"{name}ModularPipeline")
    size = {"height": asked.size, "width": asked.size, "frames": asked.frames, "steps": STEPS, "scale": asked.scale}
    given = {**size, "negative": asked.negative, "call": asked.call, "example": prompts(name)[0], **options}
    return AnyModular(folder, **given).adapt_to(prompts(name, 3))


def loaded(name: str, folder: Path) -> Any:
    """Return diffusers' own pipeline with Euler's steps and the scale of guidance that the model is opened with."""
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, ModularPipeline

    pipe = ModularPipeline.from_pretrained(str(folder), local_files_only=True)
    processors = read_processors(folder)
    pipe.load_components([part for part in pipe.null_component_names if part not in processors and (folder / part).is_dir()])
    pipe.update_components(**processors)
    blocks = pipe._blocks.sub_blocks
    for each in [*blocks]:  # blocks that rewrite the prompt by a language model
        if each != "text_encoder" and PROMPT in {output.name for output in blocks[each].intermediate_outputs}:
            blocks.pop(each)
    kind = type(getattr(pipe, "scheduler", None)).__name__
    if kind == "EulerDiscreteScheduler":
        pipe.update_components(scheduler=DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False))
    if kind == "HeliosScheduler":
        pipe.scheduler.register_to_config(scheduler_type="euler")
    if kind == "UniPCMultistepScheduler":
        pipe.update_components(scheduler=FlowMatchEulerDiscreteScheduler(shift=pipe.scheduler.config.flow_shift))
    for part in pipe.components.values():
        if hasattr(part, "guidance_scale"):
            part.guidance_scale = find_call(f"{name}ModularPipeline").scale
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()
    return pipe
