"""Tiny random pipelines of diffusers that make sounds, and a reward of sounds."""

import json
from functools import partial
from pathlib import Path

from helpers import stored
from torch import Tensor

from fluvial.models.tiny.pipelines import build, build_random

RATE = 400


def save(folder: Path) -> Path:
    if not folder.exists():
        stored.copy_of("sounds-ace-step", folder, _make)
    return folder


def _make(folder: Path) -> None:
    build_random(partial(build, "AceStepPipeline"), 0.2).save_pretrained(folder)


def loud(audios: Tensor, prompts: list[str], audio_rate: int) -> Tensor:
    """Return `even` of sounds of tiny ACE-Step's rate."""
    assert audio_rate == RATE, audio_rate
    return even(audios, prompts)


def even(audios: Tensor, prompts: list[str]) -> Tensor:
    assert audios.ndim == 3
    first, second = audios.square().flatten(1).chunk(2, dim=1)
    return first.sum(1) / (first.sum(1) + second.sum(1))


def texts(file: Path) -> Path:
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("rain", "a drum", "two birds at dawn")))
    return file
