"""Tiny random Stable Diffusion pipelines that start from an image, with the parts of those of text alone."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tiny_pipelines import ddim, stable_diffusion

from fluvial.models.pipelines.folder import quietly
from fluvial.models.tiny.pipelines import random_weights

SIZE = (16, 24)  # height and width


class Row(NamedTuple):
    """A pipeline, and how it is called."""

    pipeline: str
    large: bool
    channels: int  # of the network's input
    media: tuple[str, ...]
    call: dict[str, Any]
    predicts: str = "epsilon"


BOTH = ("image", "mask_image")
ROWS = {
    "sd-image": Row("StableDiffusionImg2ImgPipeline", False, 4, ("image",), {"strength": 0.6}),
    "sd-v-image": Row("StableDiffusionImg2ImgPipeline", False, 4, ("image",), {"strength": 0.35}, "v_prediction"),
    "sd-inpaint": Row("StableDiffusionInpaintPipeline", False, 9, BOTH, {}),
    "xl-image": Row("StableDiffusionXLImg2ImgPipeline", True, 4, ("image",), {"strength": 0.6}),
    "xl-inpaint": Row("StableDiffusionXLInpaintPipeline", True, 9, BOTH, {}),
}


def make(row: Row) -> Any:
    """Return diffusers' pipeline of a row with random weights, the same at every call, and DDIM."""
    with quietly():
        return random_weights(partial(_make, row), 0.1)


def _make(row: Row) -> Any:
    import diffusers

    plain = stable_diffusion(large=row.large, predicts=row.predicts)
    settings = {name: value for name, value in plain.unet.config.items() if not name.startswith("_")}
    unet = diffusers.UNet2DConditionModel(**{**settings, "in_channels": row.channels, "sample_size": 64})
    options = {"add_watermarker": False} if row.large else {"requires_safety_checker": False}
    parts = {**plain.components, "unet": unet, "scheduler": ddim(plain.scheduler.config)}
    return getattr(diffusers, row.pipeline)(**parts, **options)


def save(row: Row, folder: Path) -> Path:
    """Save the pipeline of a row, and return its folder."""
    with quietly():
        make(row).save_pretrained(folder)
    return folder
