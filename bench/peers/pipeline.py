"""Diffusers' SD3 pipeline over the transformer of the work, with LoRA as the projects add it: peft's `get_peft_model`."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.bench.peers.work import Work

PREFIX, SUFFIX = "base_model.model.", ".default"
VAE_SCALE = 8


class FreeVae(nn.Module):
    """A VAE that costs nothing: decoding is not part of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            block_out_channels=(1,) * 4, scaling_factor=1.0, shift_factor=0.0, latent_channels=1, in_channels=1
        )
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def decode(self, latents: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        """Return the latents."""
        return (latents,)


def build_pipeline(work: Work) -> Any:
    """Return a StableDiffusion3Pipeline without encoders whose transformer has adapters with the values of the work."""
    import peft
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline(
        transformer=work.model.build(),
        scheduler=work.scheduler(),
        vae=FreeVae(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.requires_grad_(False)
    config = peft.LoraConfig(r=work.lora.rank, lora_alpha=work.lora.alpha, target_modules=list(work.lora.targets or ()))
    pipeline.transformer = peft.get_peft_model(pipeline.transformer, config)
    adapters = adapter_of(pipeline.transformer)
    values = work.adapter({name: p.shape for name, p in adapters.items()})
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(values[name])
    return pipeline


def adapter_of(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters of a PeftModel by the short names that fluvial has for them."""
    return {
        name.removeprefix(PREFIX).replace(SUFFIX, ""): p for name, p in transformer.named_parameters() if p.requires_grad
    }


def first_moments(transformer: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return AdamW's first moment of each trained parameter, which after one update is the gradient times 1 - beta."""
    return {name: optimizer.state[p]["exp_avg"].clone() for name, p in adapter_of(transformer).items()}
