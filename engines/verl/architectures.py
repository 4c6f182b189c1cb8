"""Fields of verl-omni's batches for each model: its conditioning, and its samples as the model takes them."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.models import Cond
from fluvial.models.pipelines.base import PATCH, TextCond, pack, unpack
from fluvial.models.pipelines.qwen_image import QwenCond

Shape = tuple[int, ...]


class Architecture(NamedTuple):
    """How the fields of a batch become the inputs of a model."""

    fields: tuple[str, ...]  # fields of the conditioning; those of the negative prompt are `negative_...`
    cond: Callable[[Mapping[str, Tensor]], Cond]  # conditioning, from these fields
    scale: Literal["guidance_scale", "true_cfg_scale"]  # field of the pipeline config that holds the guidance scale
    packed: bool  # whether samples come as tokens `[..., H W / 4, 4 C]`, and not as `[..., C, H, W]`
    masked: bool  # whether the network masks padding tokens

    def layout(self, shape: Shape) -> Shape:
        """Return the shape that a sample of shape (C, H, W) has in a batch."""
        channels, height, width = shape
        return ((height // PATCH) * (width // PATCH), channels * PATCH**2) if self.packed else shape

    def unpack(self, samples: Tensor, shape: Shape) -> Tensor:
        """Return samples `[..., C, H, W]` of a batch's samples."""
        return unpack(samples, shape[-2]) if self.packed else samples

    def pack(self, samples: Tensor) -> Tensor:
        """Return samples `[..., C, H, W]` as a batch holds them."""
        return pack(samples) if self.packed else samples


def _sd3(fields: Mapping[str, Tensor]) -> TextCond:
    return TextCond(fields["prompt_embeds"].float(), fields["pooled_prompt_embeds"].float())


def _qwen_image(fields: Mapping[str, Tensor]) -> QwenCond:
    tokens, mask = fields["prompt_embeds"].float(), fields["prompt_embeds_mask"].bool()
    # What lies at padding tokens is masked, but verl may have left it as it was.
    return QwenCond(torch.where(mask[..., None], tokens, 0.0), mask)


ARCHITECTURES: dict[str, Architecture] = {
    "StableDiffusion3Pipeline": Architecture(
        ("prompt_embeds", "pooled_prompt_embeds"), _sd3, "guidance_scale", packed=False, masked=False
    ),
    "QwenImagePipeline": Architecture(
        ("prompt_embeds", "prompt_embeds_mask"), _qwen_image, "true_cfg_scale", packed=True, masked=True
    ),
}
