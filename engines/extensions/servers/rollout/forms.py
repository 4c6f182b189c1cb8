"""Forms of a reply: fluvial's own, or sglang's with its layouts of latents and images and the arguments of its networks.

                   fluvial                               sglang
    latents        [K, *event]                           as its pipeline denoises them, e.g. tokens [K, H W / 4, 4 C]
    timesteps      of the schedule, [T]                  of the returned boundaries, [K], 0 at the last one
    debug tensors  [T, *event]                           in the layout of the latents; the standard deviations are [T, 1]
    image          [C, H, W], or [C, F, H, W]            [C, 1, H, W] of pipelines whose VAE is one of videos
    conditioning   fields of the model's own, [1, ...]   arguments of sglang's network, without the batch dimension

A request without `extra_sampling_params["fluvial"]` is answered in sglang's form.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fluvial.engines.extensions.wire.request import RolloutRequest
from fluvial.engines.extensions.wire.response import DitTrajectory
from fluvial.models import Cond, DiffusionModel, Schedule
from fluvial.models.guidance import Guided
from fluvial.models.pipelines.layouts import PLAIN, embed_guidance, find_layout

NOT_LAID_OUT = "rollout_noise_std_devs"  # debug tensor of a number per step


class ReplyForm:
    """The form of the replies to a request."""

    def __init__(self, request: RolloutRequest, model: DiffusionModel, event: tuple[int, ...]) -> None:
        self.sglang, self.event, self.video_dtype = request.wants_sglang_form, event, request.rollout_video_dtype
        self.layout = find_layout(model) if self.sglang else PLAIN

    def image(self, image: Tensor) -> Tensor:
        """Return an image or a video; videos are quantised where that is asked for."""
        if image.ndim == 4 and self.video_dtype == "uint8":
            return (image * 255).round().to(torch.uint8)
        return image.unsqueeze(1) if image.ndim == 3 and self.layout.framed else image.clone()

    def trajectory(self, latents: Tensor, boundaries: Sequence[int], schedule: Schedule) -> DitTrajectory:
        """Return latents `[K, *event]` at K boundaries of steps as a trajectory."""
        timesteps = schedule.timesteps.float().cpu()
        if self.sglang:
            timesteps = torch.cat([timesteps, timesteps.new_zeros(1)])[list(boundaries)]
        return DitTrajectory(self.layout.of_event(latents), timesteps, schedule.levels.clone(), tuple(boundaries))

    def debug(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return debug tensors `[T, ...]` by name."""
        lay = self.layout.of_event
        return {name: tensor.clone() if name == NOT_LAID_OUT else lay(tensor).clone() for name, tensor in tensors.items()}

    def conditioning(self, cond: Cond, row: int) -> dict[str, Any]:
        """Return the conditioning of one sample of a batch."""
        taken = slice(row, row + 1) if not self.sglang else row
        own = optree.tree_map(lambda tensor: tensor[taken].cpu(), cond)
        positive, negative = (own.cond, own.uncond) if isinstance(own, Guided) else (own, None)
        guidance: Any = embed_guidance(positive)
        if not self.sglang:
            guidance = float(own.scale) if isinstance(own, Guided) else None
        return {
            "image_kwargs": None if self.sglang else {},
            "pos_cond_kwargs": self._arguments(positive),
            "neg_cond_kwargs": None if negative is None else self._arguments(negative),
            "guidance": guidance,
        }

    def _arguments(self, cond: Cond) -> Any:
        """Return the conditioning of one sample as maps."""
        return _maps(self.layout.arguments(cond, self.event) if self.sglang else _fields(cond))


def _fields(cond: Cond) -> Any:
    """Return the fields of a conditioning, or itself as the only one."""
    return cond if isinstance(cond, Mapping) or hasattr(cond, "_asdict") else {"cond": cond}


def _maps(value: Any) -> Any:
    """Return a tree of maps and lists; fields of a named tuple that are None are left out."""
    if hasattr(value, "_asdict"):
        value = {name: each for name, each in value._asdict().items() if each is not None}
    if isinstance(value, Mapping):
        return {str(name): _maps(each) for name, each in value.items()}
    return [_maps(each) for each in value] if isinstance(value, list | tuple) else value
