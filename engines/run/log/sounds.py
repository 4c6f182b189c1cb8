"""Sounds as WAV files."""

import wave
from pathlib import Path

from torch import Tensor

SCALE = 2**15 - 1  # of 16 bits


def write_wave(path: Path, sound: Tensor, rate: int) -> None:
    """Write a sound `[channels, n]` in [-1, 1] as a WAV file of 16 bits.

    Args:
        rate: numbers per second and channel.
    """
    numbers = (sound.detach().float().cpu().clamp(-1, 1) * SCALE).round().short()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(numbers))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(numbers.T.contiguous().numpy().tobytes())
