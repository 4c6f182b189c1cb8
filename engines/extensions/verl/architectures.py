"""Fields of verl-omni's batches for each model: its conditioning, and its samples as the model takes them."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.models import Cond, Schedule
from fluvial.models.pipelines.base import PATCH, TextCond, pack, unpack
from fluvial.models.pipelines.qwen_image import QwenCond

Shape = tuple[int, ...]
WAN_SHIFT = 5.0  # of the noise levels: verl-omni's own, whatever the folder's scheduler has


class Architecture(NamedTuple):
    """How the fields of a batch become the inputs of a model."""

    fields: tuple[str, ...]  # fields of the conditioning; those of the negative prompt are `negative_...`
    cond: Callable[[Mapping[str, Tensor]], Cond]  # conditioning, from these fields
    scale: Literal["guidance_scale", "true_cfg_scale"]  # field of the pipeline config that holds the guidance scale
    packed: bool = False  # whether samples come as tokens `[..., H W / 4, 4 C]`, and not as the model takes them
    masked: bool = False  # whether the network masks padding tokens
    schedule: Callable[[int], Schedule] | None = None  # schedule of a number of steps, where it is not the pipeline's

    def layout(self, shape: Shape) -> Shape:
        """Return the shape that a sample of shape (C, H, W), or (C, F, H, W) for a video, has in a batch."""
        if not self.packed:
            return shape
        channels, height, width = shape
        return ((height // PATCH) * (width // PATCH), channels * PATCH**2)

    def unpack(self, samples: Tensor, shape: Shape) -> Tensor:
        """Return samples as the model takes them, `[..., C, H, W]` or `[..., C, F, H, W]`, of a batch's samples."""
        return unpack(samples, shape[-2]) if self.packed else samples

    def pack(self, samples: Tensor) -> Tensor:
        """Return samples of the model as a batch holds them."""
        return pack(samples) if self.packed else samples


def _sd3(fields: Mapping[str, Tensor]) -> TextCond:
    return TextCond(fields["prompt_embeds"].float(), fields["pooled_prompt_embeds"].float())


def _qwen_image(fields: Mapping[str, Tensor]) -> QwenCond:
    tokens, mask = fields["prompt_embeds"].float(), fields["prompt_embeds_mask"].bool()
    # What lies at padding tokens is masked, but verl may have left it as it was.
    return QwenCond(torch.where(mask[..., None], tokens, 0.0), mask)


def _wan(fields: Mapping[str, Tensor]) -> TextCond:
    return TextCond(fields["prompt_embeds"].float() * fields["prompt_embeds_mask"][..., None].float())


def _wan_schedule(steps: int) -> Schedule:
    """Return the shifted levels s t / (1 + (s - 1) t) of t = 1, 1 - 1/T, ..., 0."""
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64).float()
    levels = WAN_SHIFT * t / (1 + (WAN_SHIFT - 1) * t)
    return Schedule(levels, 1000 * levels[:-1])


ARCHITECTURES: dict[str, Architecture] = {
    "StableDiffusion3Pipeline": Architecture(("prompt_embeds", "pooled_prompt_embeds"), _sd3, "guidance_scale"),
    "QwenImagePipeline": Architecture(
        ("prompt_embeds", "prompt_embeds_mask"), _qwen_image, "true_cfg_scale", packed=True, masked=True
    ),
    "WanPipeline": Architecture(("prompt_embeds", "prompt_embeds_mask"), _wan, "true_cfg_scale", schedule=_wan_schedule),
}
