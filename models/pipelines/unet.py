"""Stable Diffusion 1 and 2: UNets that predict noise, or v, a rotation of noise and image, and attend to CLIP's tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.checks import per_sample
from fluvial.models.pipelines.base import Pipeline, check_size, check_still
from fluvial.models.pipelines.folder import quietly, read_settings
from fluvial.models.protocol import Prediction, Schedule


class UNetCond(NamedTuple):
    """A batch of prompts as a UNet takes them."""

    tokens: Tensor  # [B, L, D] of CLIP, or of both CLIPs side by side
    pooled: Tensor | None = None  # [B, P] of the larger one, for Stable Diffusion XL


class StableDiffusion(Pipeline):
    """The velocity-model protocol over a StableDiffusionPipeline (1 and 2, arXiv 2112.10752), a model of epsilon.

    It walks the levels of diffusers' DDIMScheduler with the settings of whichever scheduler the folder names.

    Raises:
        ValueError: that scheduler has no betas, or is of another prediction than epsilon and v.
    """

    pipeline = "StableDiffusionPipeline"
    network = "UNet2DConditionModel"
    part = "unet"
    text_lengths = (77, 77)
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "time_emb_proj")
    prediction: Prediction = "epsilon"

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.settings = read_settings(self.folder / "scheduler" / "scheduler_config.json")
        predicts = self.settings.get("prediction_type", "epsilon")
        if "beta_schedule" not in self.settings or predicts not in ("epsilon", "v_prediction"):
            kind = f"{self.parts['scheduler']} of {predicts}"
            raise ValueError(f"{self.folder} is scheduled by {kind}, expected one with betas, of epsilon or v_prediction")
        self.predicts_v = predicts == "v_prediction"
        self._powers: Tensor = self.scheduler().alphas_cumprod  # alpha_bar of each timestep

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks on the way down, the middle one, and those on the way up."""
        down, mid, up = (module.get_submodule(name) for name in ("down_blocks", "mid_block", "up_blocks"))
        return [*down.children(), mid, *up.children()]

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return (C, height / s, width / s), or raise ValueError if s, what the VAE scales by, does not divide the size."""
        check_still(frames)
        check_size(height, width, multiple=self.vae_scale)
        return (self.config["in_channels"], height // self.vae_scale, width // self.vae_scale)

    def scheduler(self) -> Any:
        """Return diffusers' DDIMScheduler with the noise levels and the spacing that the folder's scheduler has."""
        from diffusers import DDIMScheduler

        with quietly():  # what only the folder's own scheduler knows is left out
            return DDIMScheduler.from_config(self.settings, clip_sample=False, thresholding=False)

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return alpha_bar of each timestep of the scheduler, and at last the one that it calls final.

        Where "trailing" steps do not divide 1000, DDIMScheduler steps to a level that its next timestep is not of; here a
        sample is always at the level of its timestep.

        Raises:
            ValueError: there are more steps than timesteps, or a level is 0 or does not rise.
        """
        scheduler = self.scheduler()
        if 1 <= steps <= len(self._powers):
            scheduler.set_timesteps(steps)
            if scheduler.timesteps.max() < len(self._powers):  # its spacing may begin above
                levels = torch.cat([self._powers.cpu()[scheduler.timesteps], scheduler.final_alpha_cumprod[None]])
                if levels[0] > 0 and (levels.diff() > 0).all():
                    return Schedule(levels, scheduler.timesteps.to(torch.float32))
        raise ValueError(f"{self.folder}'s scheduler has no {steps} steps whose alpha_bar rises from above 0: take others")

    def longest(self, tokenizers: Any) -> tuple[Any, int]:
        """Return CLIP's tokenizer; both of Stable Diffusion XL read the same."""
        return tokenizers.tokenizer, self.text_tokens

    def text(self, encoders: Any, prompt: str) -> dict[str, Tensor]:
        """Return tokens `[1, L, D]`."""
        encoders.tokenizer.model_max_length = self.text_tokens  # what the pipeline pads to
        return {"tokens": encoders.encode_prompt(prompt, self.device, 1, do_classifier_free_guidance=False)[0]}

    def cond(self, texts: Mapping[str, Tensor]) -> UNetCond:
        """Return them together."""
        return UNetCond(**texts)

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: UNetCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return epsilon `[B, C, H, W]` at alpha_bars sigma; of a network of v it is sqrt(ab) v + sqrt(1 - ab) x.

        A level without a timestep is given the one whose alpha_bar is nearest.
        """
        if timestep is None:
            self._powers = self._powers.to(sigma.device)
            timestep = (sigma[:, None] - self._powers.to(sigma.dtype)).abs().argmin(1).to(torch.float32)
        given = {"timestep": timestep, "encoder_hidden_states": cond.tokens.to(x.dtype), "return_dict": False}
        if cond.pooled is not None:  # sizes of an original that was not cropped, as whole numbers that no dtype rounds
            size = [self.vae_scale * side for side in x.shape[-2:]]
            sizes = torch.tensor([*size, 0, 0, *size], device=x.device).expand(len(x), -1)
            given["added_cond_kwargs"] = {"text_embeds": cond.pooled.to(x.dtype), "time_ids": sizes}
        output: Tensor = module(x, **given)[0]
        power = per_sample(sigma, x)
        return torch.sqrt(power) * output + torch.sqrt(1 - power) * x if self.predicts_v else output

    def decode(self, latents: Tensor) -> Tensor:
        """Return images `[B, 3, height, width]`, float in [0, 1]."""
        return self.decode_with_vae(latents / self.vae.config.scaling_factor)
