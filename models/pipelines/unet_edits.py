"""Stable Diffusion and XL from an image: image to image, and inpainting by networks that take mask and masked image.

Image to image starts from x = sqrt(A) z + sqrt(1 - A) e, with the image's latents z and the first level A of the schedule's
tail. In u = x / sqrt(alpha_bar) a DDIM step is u' = u + (k' - k) epsilon, with k^2 = (1 - alpha_bar) / alpha_bar. Its noise,
too, depends on k alone and has k's scale. So y = sqrt(l) (u - z) / UNIT is the same model at levels l of k / UNIT. The first
level is so noisy that sqrt(1 - l) is 1 in float32, so y starts as the noise e: rollouts and samplers need no change.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fluvial.core.checks import per_sample
from fluvial.core.random import Key
from fluvial.models.host_values import to_device
from fluvial.models.pipelines.conditioned import Conditioned, open_images
from fluvial.models.pipelines.folder import read_index
from fluvial.models.pipelines.unet import StableDiffusion, StableDiffusionXL
from fluvial.models.protocol import Schedule
from fluvial.models.replay.media import TextPrompt, get_text

UNIT = 2.0**-16  # noise k of one unit in y
MOST_STEPS = 1000  # timesteps of the schedulers
MASK_THRESHOLD = 0.5  # least value of a mask that paints a pixel


class UNetEditCond(NamedTuple):
    """Conditioning by a prompt and images."""

    tokens: Tensor  # [B, L, D]
    image: Tensor  # [B, C, h, w] latents of an image, or a mask and the latents of the masked image
    pooled: Tensor | None = None


class ImageConditioned(Conditioned):
    """A pipeline whose prompts have images of the samples' size; a subclass encodes their conditioning."""

    conditioning = UNetEditCond

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder, **options)
        if read_index(self.folder).get("requires_aesthetics_score"):
            raise ValueError(f"{self.folder} is a refiner, whose network takes an aesthetic score: use a base model")
        channels, latents = self.config["in_channels"], self.config["out_channels"]
        if channels != latents + self.extra_channels:
            raise ValueError(
                f"{self.folder / self.part} has {channels} input channels, expected {latents + self.extra_channels}"
                + (": without the mask's, inpainting overwrites samples between steps" if self.extra_channels else "")
            )

    @property
    def extra_channels(self) -> int:
        """Number of the network's input channels beyond the sample's."""
        return 0

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of a sample, see `Pipeline.latent_shape`; ValueError if the size differs from the images'."""
        if (height, width) != self.size:
            raise ValueError(f"the size is {height}x{width}, expected that of the images, {self.size[0]}x{self.size[1]}")
        return (self.config["out_channels"], *super().latent_shape(height, width, frames)[1:])

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return the encoding of the text and the conditioning of the images, see `UNetEditCond`."""
        image = self.encode_condition(*self.read_images(prompt))
        return {**super().encode_text(encoders, get_text(prompt)), "image": image}

    def encode_conditions(self, prompts: Sequence[TextPrompt]) -> Tensor:
        """Return the conditioning of the images of prompts, `[B, C, h, w]` float32: cached with the text, or computed."""
        known = {
            prompt: self.encode_condition(*self.read_images(prompt))
            if self.cache is None
            else self._read_cache(prompt)["image"]
            for prompt in dict.fromkeys(prompts)
        }
        return torch.cat([known[prompt] for prompt in prompts])

    def read_images(self, prompt: TextPrompt) -> list[Image.Image]:
        """Return the images of a prompt; ValueError if one is missing or has another size than the samples."""
        images, (height, width) = open_images(prompt, self.takes), self.size
        for name, image in zip(self.takes, images, strict=True):
            if image.size != (width, height):
                raise ValueError(
                    f"the {name} of prompt {get_text(prompt)[:40]!r} has {image.width}x{image.height} pixels, expected "
                    f"{width}x{height}, the size of the samples"
                )
        return images

    @abstractmethod
    def encode_condition(self, *images: Image.Image) -> Tensor:
        """Return the conditioning of a prompt's images, `[1, C, h, w]` float32."""

    def encode_latents(self, pixels: Tensor) -> Tensor:
        """Return the latents of images `[B, 3, H, W]` in [0, 1], the mode of the VAE's distribution."""
        return super().encode_images(pixels)


class ImageToImage(ImageConditioned):
    """Image to image by the tail of the schedule.

    Args:
        strength: share of the schedule's steps that are taken, in (0, 1); by default that of diffusers' pipeline.
    """

    takes = ("image",)
    calls = ("strength",)
    decodes_prompts: ClassVar[bool] = True
    default_strength: ClassVar[float] = 0.8  # that of diffusers' pipeline

    def __init__(self, folder: str | Path, *, strength: float | None = None, **options: Any) -> None:
        super().__init__(folder, **options)
        strength = self.default_strength if strength is None else strength
        if not 0 < strength < 1:
            raise ValueError(
                f"strength is {strength}, expected a number above 0 and below 1; with 1 the image has no effect"
            )
        self.strength = strength

    def encode_condition(self, *images: Image.Image) -> Tensor:
        """Return the latents of the image."""
        return self.encode_latents(_to_pixels(images[0]))

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the last `steps` of the schedule that leaves as many at `strength`, in the coordinates of y.

        Raises:
            ValueError: no schedule takes `steps` steps at this strength.
        """
        requested = next((count for count in range(steps, MOST_STEPS + 1) if int(count * self.strength) == steps), None)
        if requested is None:
            raise ValueError(f"strength is {self.strength:g}, with which no schedule takes {steps} steps")
        whole = super().schedule(requested, shape)
        powers = whole.levels[-steps - 1 :].double()
        return Schedule(_rescale(powers, 1 / UNIT).float(), whole.timesteps[-steps:])

    def predict(
        self, module: nn.Module, x: Tensor, level: Tensor, cond: UNetEditCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return epsilon `[B, C, H, W]` of samples y at their levels, see `StableDiffusion.predict`."""
        power = _rescale(level, UNIT)
        return super().predict(module, _to_pipeline_samples(x, level, cond.image), power, cond, timestep=timestep)

    def decode(self, latents: Tensor, prompts: Sequence[TextPrompt] = ()) -> Tensor:
        """Return images `[B, 3, height, width]`, float in [0, 1], of samples y of prompts."""
        last = _rescale(self.build_scheduler().final_alpha_cumprod, 1 / UNIT).to(latents.dtype).expand(len(latents))
        last, images = (to_device(each, latents.device) for each in (last, self.encode_conditions(prompts)))
        return super().decode(_to_pipeline_samples(latents, last, images))

    def encode_images(self, images: Tensor, *, key: Key | None = None) -> Tensor:
        """Raise ValueError, because samples depend on the image that they start from."""
        raise ValueError(f"{self.pipeline} is not trained on images: its samples depend on the image they start from")


class Inpaint(ImageConditioned):
    """Inpainting by a network whose input has the mask and the latents of the masked image beside the sample.

    The samples start as noise, as with a strength of 1.
    """

    takes = ("image", "mask_image")

    @property
    def extra_channels(self) -> int:
        """Number of channels of the mask and the latents."""
        return 1 + int(self.config["out_channels"])

    def encode_condition(self, *images: Image.Image) -> Tensor:
        """Return the mask, scaled to the nearest pixel, and the latents of the image without the painted area."""
        pixels, mask = _to_pixels(images[0]), (_to_pixels(images[1].convert("L")) >= MASK_THRESHOLD).float()
        # Black in [0, 1] is -1 for the VAE; the pipeline's masked pixels are 0, grey.
        rest = self.encode_latents(pixels * (1 - mask) + 0.5 * mask)
        return torch.cat([nn.functional.interpolate(mask, size=rest.shape[-2:]), rest], dim=1)

    def build_network_input(self, x: Tensor, cond: UNetEditCond) -> Tensor:
        """Return the samples, the mask and the masked image as channels."""
        return torch.cat([x, cond.image.to(x.dtype)], dim=1)


class StableDiffusionImageToImage(ImageToImage, StableDiffusion):
    """The model protocol over a StableDiffusionImg2ImgPipeline with DDIM, see `ImageToImage`."""

    pipeline = "StableDiffusionImg2ImgPipeline"


class StableDiffusionInpaint(Inpaint, StableDiffusion):
    """The model protocol over a StableDiffusionInpaintPipeline with DDIM, see `Inpaint`."""

    pipeline = "StableDiffusionInpaintPipeline"


class StableDiffusionXLImageToImage(ImageToImage, StableDiffusionXL):
    """The model protocol over a StableDiffusionXLImg2ImgPipeline with DDIM, see `ImageToImage`."""

    pipeline = "StableDiffusionXLImg2ImgPipeline"
    default_strength = 0.3


class StableDiffusionXLInpaint(Inpaint, StableDiffusionXL):
    """The model protocol over a StableDiffusionXLInpaintPipeline with DDIM, see `Inpaint`."""

    pipeline = "StableDiffusionXLInpaintPipeline"


def _rescale(power: Tensor, scale: float) -> Tensor:
    """Return the signal power whose noise k = sqrt((1 - power) / power) is `scale` times as large."""
    return power / (power + scale**2 * (1 - power))


def _to_pipeline_samples(y: Tensor, level: Tensor, image: Tensor) -> Tensor:
    """Return the pipeline's samples x = sqrt(power) (z + UNIT y / sqrt(level)) of samples y at levels `[B]`."""
    power, level = (per_sample(each, y) for each in (_rescale(level, UNIT), level))
    return torch.sqrt(power) * image.to(y) + UNIT * torch.sqrt(power / level) * y


def _to_pixels(image: Image.Image) -> Tensor:
    """Return an image as a tensor `[1, C, H, W]` in [0, 1]."""
    array = np.asarray(image, np.float32) / 255
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)[None]
