"""Rollouts of a tiny pipeline as verl-omni's server returns them, by fluvial's own sampling, and their reward."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.core.random import fold_in, key, normal
from fluvial.core.rollout import rollout
from fluvial.core.transitions import bind
from fluvial.engines.export.model_folder import list_base_tensors
from fluvial.models import LoraConfig, Schedule, add_lora
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.pipelines.base import pack
from fluvial.models.pipelines.open import open_model

TOKENS = 40  # per prompt, padding included
SCALE = 20.0  # of the reward


class Sampled(NamedTuple):
    """One sample: tensors `[1, ...]`, the image in bytes."""

    prompt: str
    image: Tensor  # [3, H, W]
    latents: Tensor  # [1, T + 1, ...], before the first step and after each
    timesteps: Tensor  # [1, T]
    levels: Tensor  # [T + 1]
    log_probs: Tensor  # [1, T]
    conditioning: dict[str, Tensor]


class Policy:
    """A model whose weights a trainer sends.

    Args:
        folder: pipeline of diffusers.
        schedule: noise levels.
        rank, alpha, targets: adapter; rank 0 has none.
    """

    part = "transformer"  # folder of the network

    def __init__(self, folder: Path, schedule: Schedule, rank: int = 0, alpha: float = 0, targets: Any = ()) -> None:
        self.model = open_model(folder, text_tokens=TOKENS, device="cpu")
        self.module, self.schedule = self.model.build(), schedule
        if rank:
            add_lora(self.module, LoraConfig(rank=rank, alpha=alpha, targets=tuple(targets)), ())

    def parameter(self, name: str) -> Tensor:
        return list_base_tensors(self.module)[name.removeprefix(f"{self.part}.")]

    @torch.no_grad()
    def sample(self, prompt: str, negative: str | None, params: Any) -> Sampled:
        """Return a sample whose noise depends on the seed alone, all steps stochastic."""
        model, scale = self.model, max(params.guidance_scale or 1.0, params.true_cfg_scale)
        shape = tuple(model.latent_shape(params.height, params.width))
        schedule = self.schedule
        cond = condition(model, [prompt], [negative or ""], scale)

        def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
            timestep = schedule.timesteps[step].expand(len(x))
            return guided_velocity(model, self.module, x, level, cond, timestep=timestep, forwards="two")

        keys = fold_in(key(params.seed), torch.arange(1))
        sampler = bind("flow_sde", params.noise_level, schedule.levels)
        made = rollout(velocity, normal(keys, (1, *shape)), schedule.levels, transition=sampler, key=keys)
        latents = torch.cat([made.x, made.x_next[:, -1:]], dim=1)
        image = (255 * model.decode(made.final)[0].clamp(0, 1)).round().to(torch.uint8)
        return Sampled(
            prompt,
            image,
            pack(latents) if getattr(model, "packed", False) else latents,
            schedule.timesteps[made.steps],
            schedule.levels,
            made.log_prob,
            conditioning(cond),
        )


def condition(model: Any, prompts: list[str], negatives: list[str], scale: float) -> Any:
    """Return the conditioning of prompts, guided if the scale is above 1."""
    cond = model.encode(prompts)
    return Guided(cond, model.encode(negatives), torch.full((len(prompts),), scale)) if scale > 1 else cond


def conditioning(cond: Any) -> dict[str, Tensor]:
    """Return conditioning by verl-omni's names."""
    if isinstance(cond, Guided):
        negative = conditioning(cond.uncond)
        return {**conditioning(cond.cond), **{f"negative_{name}": tensor for name, tensor in negative.items()}}
    mask = getattr(cond, "mask", None)
    fields = {
        "prompt_embeds": cond.tokens,
        "prompt_embeds_mask": (torch.ones(cond.tokens.shape[:2]) if mask is None else mask).long(),
        "pooled_prompt_embeds": getattr(cond, "pooled", None),
        "condition_image_latents": getattr(cond, "image", None),
    }
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def red(data_source: str, solution_image: Tensor, ground_truth: Any, extra_info: Any, **_: Any) -> float:
    """Return how red an image of bytes is, as verl's reward manager asks it."""
    image = solution_image.float() / 255
    return SCALE * float(image[0].mean() - image[1:].mean())
