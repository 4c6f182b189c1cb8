"""Stable Diffusion 1, 2 and XL: UNets that attend to CLIP tokens and predict epsilon or v, which is converted to epsilon."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fluvial.core.checks import per_sample
from fluvial.models.host_values import to_device
from fluvial.models.pipelines.base import Pipeline
from fluvial.models.pipelines.folder import read_settings, silence
from fluvial.models.protocol import Prediction, Schedule
from fluvial.models.replay.media import TextPrompt, get_text


class StableDiffusion(Pipeline):
    """The model protocol over a StableDiffusionPipeline (1 and 2, arXiv 2112.10752), an epsilon-prediction model.

    Its levels are those of diffusers' DDIMScheduler with the settings of the folder's scheduler, of any class.

    Raises:
        ValueError: the folder's scheduler has no betas, or its prediction is neither epsilon nor v.
    """

    pipeline = "StableDiffusionPipeline"
    network = "UNet2DConditionModel"
    part = "unet"
    text_lengths = (77, 77)
    prompt_layers: ClassVar[tuple[str, ...]] = ("*.attn2.to_k", "*.attn2.to_v")
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "time_emb_proj")
    prediction: Prediction = "epsilon"

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.settings = read_settings(self.folder / "scheduler" / "scheduler_config.json")
        predicts = self.settings.get("prediction_type", "epsilon")
        if "beta_schedule" not in self.settings or predicts not in ("epsilon", "v_prediction"):
            kind = f"{self.parts['scheduler']} of {predicts}"
            raise ValueError(f"{self.folder} has a {kind}, expected a scheduler with betas, of epsilon or v_prediction")
        self.predicts_v = predicts == "v_prediction"
        self._powers: Tensor = self.build_scheduler().alphas_cumprod  # alpha_bar of each timestep

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the down blocks, the middle block and the up blocks."""
        down, mid, up = (module.get_submodule(name) for name in ("down_blocks", "mid_block", "up_blocks"))
        return [*down.children(), mid, *up.children()]

    @property
    def patch(self) -> int:
        """Latents per token: 1, because a UNet has no patches."""
        return 1

    def build_scheduler(self) -> Any:
        """Return diffusers' DDIMScheduler with the noise levels and the spacing of the folder's scheduler."""
        from diffusers import DDIMScheduler

        with silence():  # it warns of settings that DDIMScheduler lacks
            return DDIMScheduler.from_config(self.settings, clip_sample=False, thresholding=False)

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return alpha_bar of each timestep of the scheduler, and its final_alpha_cumprod.

        With "trailing" spacing and steps that do not divide 1000, DDIMScheduler steps to a level other than that of its next
        timestep; here a sample is always at the level of its timestep.

        Raises:
            ValueError: there are more steps than timesteps, or the levels do not rise from above 0.
        """
        scheduler = self.build_scheduler()
        if 1 <= steps <= len(self._powers):
            scheduler.set_timesteps(steps)
            if scheduler.timesteps.max() < len(self._powers):  # with some spacings the first timestep is out of range
                levels = torch.cat([self._powers.cpu()[scheduler.timesteps], scheduler.final_alpha_cumprod[None]])
                if levels[0] > 0 and (levels.diff() > 0).all():
                    return Schedule(levels, scheduler.timesteps.to(torch.float32))
        raise ValueError(
            f"{self.folder}'s scheduler has no {steps} steps whose alpha_bar rises from above 0: use another number of steps"
        )

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return tokens `[1, L, D]`."""
        encoders.tokenizer.model_max_length = self.text_tokens  # the pipeline pads to it
        return {"tokens": encoders.encode_prompt(get_text(prompt), self.device, 1, do_classifier_free_guidance=False)[0]}

    def build_network_input(self, x: Tensor, cond: Any) -> Tensor:
        """Return the samples as the network's input; a subclass adds channels of the conditioning."""
        return x

    def predict(self, module: nn.Module, x: Tensor, level: Tensor, cond: Any, *, timestep: Tensor | None = None) -> Tensor:
        """Return epsilon `[B, C, H, W]` at cumulative signal powers level `[B]`.

        A prediction of v is converted: epsilon = sqrt(alpha_bar) v + sqrt(1 - alpha_bar) x. The default timestep of a sample
        is the one whose alpha_bar is nearest to its level.
        """
        if timestep is None:
            self._powers = to_device(self._powers, level.device)
            timestep = (level[:, None] - self._powers.to(level.dtype)).abs().argmin(1).to(torch.float32)
        output = self.call_network(module, x, timestep, cond)
        power = per_sample(level, x)
        return torch.sqrt(power) * output + torch.sqrt(1 - power) * x if self.predicts_v else output

    def call_network(self, module: nn.Module, x: Tensor, timestep: Tensor, cond: Any) -> Tensor:
        """Return the network's output `[B, C, H, W]`."""
        arguments = {"timestep": timestep, "encoder_hidden_states": cond.tokens.to(x.dtype), "return_dict": False}
        if cond.pooled is not None:  # size of an uncropped image, as integers, which no dtype rounds
            size = [self.vae_scale * side for side in x.shape[-2:]]
            sizes = to_device(torch.tensor([*size, 0, 0, *size]), x.device).expand(len(x), -1)
            arguments["added_cond_kwargs"] = {"text_embeds": cond.pooled.to(x.dtype), "time_ids": sizes}
        return module(self.build_network_input(x, cond), **arguments)[0]


class StableDiffusionXL(StableDiffusion):
    """The model protocol over a StableDiffusionXLPipeline (arXiv 2307.01952), an epsilon-prediction model.

    With `force_zeros_for_empty_prompt` in the folder, the empty prompt is encoded to zeros, as in the pipeline without a
    negative prompt.
    """

    pipeline = "StableDiffusionXLPipeline"
    encoded = ("tokens", "pooled")
    prompt_layers: ClassVar[tuple[str, ...]] = (*StableDiffusion.prompt_layers, "add_embedding")
    lora_targets: tuple[str, ...] = (*StableDiffusion.lora_targets, "proj_in", "proj_out")

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return tokens `[1, L, D]` and pooled `[1, P]`."""
        encoders.tokenizer.model_max_length = encoders.tokenizer_2.model_max_length = self.text_tokens
        tokens, _, pooled, _ = encoders.encode_prompt(
            get_text(prompt), device=self.device, do_classifier_free_guidance=False
        )
        if not prompt and encoders.config.force_zeros_for_empty_prompt:
            tokens, pooled = torch.zeros_like(tokens), torch.zeros_like(pooled)
        return {"tokens": tokens, "pooled": pooled}
