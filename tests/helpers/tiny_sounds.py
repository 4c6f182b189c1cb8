"""Tiny random pipelines of diffusers that make sounds, and a reward of sounds."""

import json
from pathlib import Path
from typing import Any

import stored
import torch
from torch import Tensor

from fluvial.models.tiny.encoders import qwen3_encoder, qwen_tokenizer

LATENT = 4
RATE = 400


def ace_step() -> Any:
    """Build ACE-Step: a flow of tokens of sound, whose noise levels are its timesteps."""
    from diffusers import (
        AceStepPipeline,
        AceStepTransformer1DModel,
        AutoencoderOobleck,
        FlowMatchEulerDiscreteScheduler,
    )
    from diffusers.pipelines.ace_step.modeling_ace_step import AceStepConditionEncoder

    width = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    encoder = AceStepConditionEncoder(
        **width,
        text_hidden_dim=16,
        timbre_hidden_dim=LATENT,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
    )
    return AceStepPipeline(
        vae=AutoencoderOobleck(
            encoder_hidden_size=2 * LATENT,
            downsampling_ratios=[2, 4],
            channel_multiples=[1, 2],
            decoder_channels=4,
            decoder_input_channels=LATENT,
            audio_channels=2,
            sampling_rate=RATE,
        ),
        text_encoder=qwen3_encoder(),
        tokenizer=qwen_tokenizer(),
        transformer=AceStepTransformer1DModel(
            **width, num_hidden_layers=1, in_channels=3 * LATENT, audio_acoustic_hidden_dim=LATENT
        ),
        condition_encoder=encoder,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1),
    )


def save(folder: Path) -> Path:
    """Save ACE-Step to a folder with random weights, unless it is there, and return the folder."""
    if not folder.exists():
        stored.copy_of("sounds-ace-step", folder, _make)
    return folder


def _make(folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = ace_step()
        for part in ("transformer", "vae"):
            for parameter in getattr(pipeline, part).parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)
    pipeline.save_pretrained(folder)


def loud(audios: Tensor, prompts: list[str], audio_rate: int) -> Tensor:
    """Return `even` of sounds of tiny ACE-Step's rate."""
    assert audio_rate == RATE, audio_rate
    return even(audios, prompts)


def even(audios: Tensor, prompts: list[str]) -> Tensor:
    """Return how much of a sound is in its first half."""
    assert audios.ndim == 3
    first, second = audios.square().flatten(1).chunk(2, dim=1)
    return first.sum(1) / (first.sum(1) + second.sum(1))


def texts(file: Path) -> Path:
    """Write a file of three prompts."""
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("rain", "a drum", "two birds at dawn")))
    return file
