"""Qwen-Image-Edit: Qwen-Image with an input image for the text encoder, whose latents follow the sample's tokens."""

import importlib
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import optree
import torch
from PIL import Image
from torch import Tensor, nn

from fluvial.models.device import has_values
from fluvial.models.host_values import read
from fluvial.models.pipelines.base import PATCH, pack
from fluvial.models.pipelines.conditioned import Conditioned, open_images
from fluvial.models.pipelines.qwen_image import QwenImage
from fluvial.models.replay.media import TextPrompt, get_text

AREA = 1024 * 1024  # pixels that images are scaled to, with sides that are multiples of 32
ENCODER_AREA = 384 * 384  # pixels of the image for the text encoder of Qwen-Image-Edit-Plus
MOST_RATIO = 4  # largest ratio of sides with mixed_images, which bounds the number of tokens


class QwenEditCond(NamedTuple):
    """Conditioning by a prompt and an image."""

    tokens: Tensor  # [B, L, D] Qwen2.5-VL embeddings of prompt and image, zero at padding tokens
    mask: Tensor  # [B, L] bool, true at the tokens of the prompt and its image
    image: Tensor  # [B, N, C] tokens of the latents of the image, or of several images in order
    grid: Tensor | None = None  # [B, 2] height and width of the image in tokens, with mixed_images


class QwenImageEdit(Conditioned, QwenImage):
    """The model protocol over a QwenImageEditPipeline (arXiv 2508.02324).

    An image is scaled to about a megapixel, whatever its size and that of the samples; its sides keep their ratio.

    Args:
        folder, height, width, options: see `Conditioned`. Images must have about this ratio of sides.
        mixed_images: whether images may have any ratio of sides up to 4. Each sample then has its own forward pass.
    """

    pipeline = "QwenImageEditPipeline"
    conditioning = QwenEditCond
    encoders = ("tokenizer", "text_encoder", "processor")
    takes = ("image",)
    calls = ("mixed_images",)
    text_lengths = (2048, 4096)  # with the tokens of an image, about 1400 for a megapixel
    module: ClassVar[str] = "pipeline_qwenimage_edit"  # of diffusers' pipeline

    def __init__(self, folder: str | Path, *, mixed_images: bool = False, **options: Any) -> None:
        super().__init__(folder, **options)
        self.mixed = mixed_images

    def describe_image_options(self) -> str:
        """See `Conditioned.describe_image_options`."""
        return "mixed" if self.mixed else f"{self.scale_size(*self.size)}"

    def scale_size(self, height: int, width: int, area: int = AREA) -> tuple[int, int]:
        """Return height and width of an image as the pipeline scales it."""
        module = importlib.import_module(f"diffusers.pipelines.qwenimage.{self.module}")
        to_width, to_height = module.calculate_dimensions(area, width / height)[:2]
        return to_height, to_width

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return tokens, mask, and tokens of the image with their grid, see `QwenEditCond`.

        Raises:
            ValueError: the image has another ratio of sides than the samples, or there are too many tokens.
        """
        from diffusers.image_processor import VaeImageProcessor

        images = open_images(prompt, self.takes, self.lists)
        if self.mixed and len(images) > 1:
            raise ValueError(f"the prompt {get_text(prompt)[:40]!r} has several images, expected one with mixed_images=true")
        sizes = [self.scale_size(image.height, image.width) for image in images]
        for image, size in zip(images, sizes, strict=True):
            self._check_shape(prompt, image, size)
        processor = VaeImageProcessor(vae_scale_factor=self.vae_scale * PATCH, do_normalize=False)
        views = [self.build_views(processor, image, *size) for image, size in zip(images, sizes, strict=True)]
        encoder_views = [view for view, _ in views]
        encoder_images = encoder_views if self.lists else encoder_views[0]
        tokens, _ = encoders.encode_prompt(prompt=get_text(prompt), image=encoder_images, device=self.device)
        if not has_values(self.device):  # a placeholder tokenizer gives the most tokens
            tokens = tokens[:, : self.text_tokens]
        if tokens.shape[1] > self.text_tokens:
            raise ValueError(
                f"the prompt {get_text(prompt)[:40]!r} has {tokens.shape[1]} tokens with its image, expected at most "
                f"{self.text_tokens}: set text_tokens to more"
            )
        pairs = zip(views, sizes, strict=True)
        latents = [self.encode_images(processor.preprocess(view, *size)) for (_, view), size in pairs]
        cond = {**self.pad_tokens(tokens), "image": torch.cat([pack(one) for one in latents], dim=1)}
        if self.mixed:
            pad = self._most_tokens() - cond["image"].shape[1]
            cond["image"] = nn.functional.pad(cond["image"], (0, 0, 0, pad))
            cond["grid"] = torch.tensor([[side // PATCH for side in latents[0].shape[-2:]]])
        return cond

    def build_views(self, processor: Any, image: Image.Image, height: int, width: int) -> tuple[Image.Image, Image.Image]:
        """Return the image for the text encoder, and for the VAE before it is scaled to height and width."""
        scaled = processor.resize(image, height, width)
        return scaled, scaled

    def _check_shape(self, prompt: TextPrompt, image: Image.Image, scaled: tuple[int, int]) -> None:
        problem = f"the image of prompt {get_text(prompt)[:40]!r} has {image.width}x{image.height} pixels"
        if self.mixed:
            if max(image.size) > MOST_RATIO * min(image.size):
                raise ValueError(f"{problem}, expected sides of a ratio of at most {MOST_RATIO}: crop it")
        elif scaled != (expected := self.scale_size(*self.size)):
            raise ValueError(
                f"{problem}, which are scaled to {scaled[1]}x{scaled[0]}, expected {expected[1]}x{expected[0]}, those of "
                f"{self.size[1]}x{self.size[0]}: crop it, or set `pipeline.call` to mixed_images=true"
            )

    def _most_tokens(self) -> int:
        """Return a bound on the number of tokens of an image, whose sides are rounded to multiples of 32 pixels."""
        rounding = 16 * (MOST_RATIO**0.5 + MOST_RATIO**-0.5) * AREA**0.5 + 16**2
        return int(AREA + rounding) // (self.vae_scale * PATCH) ** 2

    def predict(
        self, module: nn.Module, x: Tensor, level: Tensor, cond: QwenEditCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return v `[B, *event]`, see `DiffusionModel.predict`; with mixed_images, each sample has its own forward pass."""
        if cond.grid is None:
            return super().predict(module, x, level, cond, timestep=timestep)
        predictions = []
        for row, (height, width) in enumerate(read(cond.grid).tolist()):
            batch = (x, level, timestep, cond)
            x_row, level_row, time, cond_row = optree.tree_map(lambda tensor, row=row: tensor[row : row + 1], batch)
            cond_row = cond_row._replace(image=cond_row.image[:, : height * width])
            predictions.append(super().predict(module, x_row, level_row, cond_row, timestep=time))
        return torch.cat(predictions)

    def build_network_input(self, x: Tensor, cond: QwenEditCond) -> Tensor:
        """Return the tokens of the samples followed by those of the images."""
        return torch.cat([pack(x), cond.image.to(x.dtype)], dim=1)

    def list_image_grids(self, cond: QwenEditCond) -> list[tuple[int, int, int]]:
        """Return frames, height and width of the images in tokens."""
        if cond.grid is not None:  # of one sample
            height, width = read(cond.grid).tolist()[0]
        else:
            height, width = (side // (self.vae_scale * PATCH) for side in self.scale_size(*self.size))
        return [(1, height, width)] * (1 if cond.grid is not None else cond.image.shape[1] // (height * width))


class QwenImageEditPlus(QwenImageEdit):
    """The model protocol over a QwenImageEditPlusPipeline, whose text encoder takes smaller images and another template.

    A prompt may have several images with about the samples' ratio of sides; all prompts of a run must have as many.
    """

    pipeline = "QwenImageEditPlusPipeline"
    lists = ("image",)
    module = "pipeline_qwenimage_edit_plus"
    text_lengths = (1024, 4096)

    def build_views(self, processor: Any, image: Image.Image, height: int, width: int) -> tuple[Image.Image, Image.Image]:
        """See `QwenImageEdit.build_views`."""
        size = self.scale_size(image.height, image.width, ENCODER_AREA)
        return processor.resize(image, *size), image
