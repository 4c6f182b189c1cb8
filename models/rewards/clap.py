"""CLAP score: cosine similarity of a sound and its prompt.

Source: arXiv 2211.06687.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.models.pipelines.folder import silence
from fluvial.models.rewards.clip import Towers
from fluvial.models.rewards.shared import loading
from fluvial.models.rewards.shared.loading import LoadingError
from fluvial.models.rewards.shared.pixels import map_batches
from fluvial.models.rewards.table import REWARD_MODELS

FLOOR = 1e-10  # smallest power before the logarithm


@dataclass(eq=False)
class Clap(Towers):
    """Score cos(f(a), g(p)) of a sound a and a prompt p, with a CLAP model.

    A sound longer than the model's input (10 s) is scored in evenly spaced windows with the least overlap; the score is
    their mean. The published feature extractor takes one random window instead.

    Args:
        weights: folder of a ClapModel of transformers without fusion, or id on the Hub.
        sampling_rate: sampling rate of sounds that come without one, in Hz; all are resampled to the model's rate.
    """

    facts = REWARD_MODELS["clap"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    sampling_rate: int = 48000

    def load(self, commit: str | None) -> Any:
        """Return the model; see `ModelReward.load`."""
        from transformers import ClapFeatureExtractor, ClapModel

        model = loading.load_model(ClapModel, self.weights, commit)
        if model.config.audio_config.enable_fusion:
            raise LoadingError(
                f"the weights {self.weights} are a model with fusion, expected one without, e.g. {self.facts.weights}"
            )
        source = loading.resolve_weights(self.weights)
        self.tokenizer = loading.load_tokenizer(source, commit)
        get_settings = ClapFeatureExtractor.get_feature_extractor_dict
        with silence():
            settings, _ = loading.fetch(f"the feature extractor of {source}", get_settings, source, revision=commit)
        self.features = LogMel(settings)
        return model

    def __call__(self, audios: Tensor, prompts: Sequence[str], audio_rate: int | None = None) -> Tensor:
        """Return the score of each sound, `[B]` in float32, differentiable in the sounds.

        Args:
            audios: sounds `[B, samples]`, or `[B, channels, samples]`, whose channels are averaged; in [-1, 1].
            prompts: prompt of each sound.
            audio_rate: sampling rate of the sounds, by default `sampling_rate`.

        Raises:
            ValueError: the shape is not supported, or the number of prompts differs.
        """
        if audios.ndim not in (2, 3) or len(audios) != len(prompts) or not audios.shape[-1]:
            raise ValueError(
                f"audios have the shape {list(audios.shape)} for {len(prompts)} prompts, expected [B, samples] or "
                "[B, channels, samples] and one prompt per sound"
            )
        mono = (audios if audios.ndim == 2 else audios.mean(1)).to(self.place_model(audios), torch.float64)
        windows = self.features.split_windows(resample(mono, audio_rate or self.sampling_rate, self.features.rate))
        with torch.set_grad_enabled(torch.is_grad_enabled() and audios.requires_grad):
            sounds = map_batches(self._embed_windows, windows.flatten(0, 1), self.batch).unflatten(0, windows.shape[:2])
        return (sounds * self.embed_texts(prompts)[:, None]).sum(-1).mean(1)

    def _embed_windows(self, windows: Tensor) -> Tensor:
        features = self.features(windows)[:, None].to(self.precision)
        longer = torch.zeros(len(windows), 1, dtype=torch.bool, device=windows.device)
        return self.project(self.model.audio_model(input_features=features, is_longer=longer), "audio_projection")

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return the input of the text tower, padded to the longest prompt."""
        most = self.model.config.text_config.max_position_embeddings - 2  # RoBERTa's positions start after the padding's
        inputs = self.tokenizer(prompts, padding=True, truncation=True, max_length=most, return_tensors="pt")
        return {name: inputs[name] for name in ("input_ids", "attention_mask")}


class LogMel:
    """Log-mel spectrograms in decibels, as transformers' ClapFeatureExtractor computes them without fusion.

    Args:
        settings: settings of the feature extractor.

    Raises:
        LoadingError: a setting is missing or not supported.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from transformers.audio_utils import mel_filter_bank

        names = (
            "sampling_rate",
            "feature_size",
            "fft_window_size",
            "hop_length",
            "max_length_s",
            "frequency_min",
            "frequency_max",
        )
        missing = [name for name in names if not isinstance(settings.get(name), int | float)]
        if missing or settings.get("padding", "repeatpad") != "repeatpad":
            raise LoadingError(f"its feature extractor has no {', '.join(missing) or 'padding=repeatpad'}")
        self.rate, self.window, self.hop = (
            int(settings[name]) for name in ("sampling_rate", "fft_window_size", "hop_length")
        )
        self.length = int(settings["max_length_s"] * self.rate)
        filters = mel_filter_bank(
            num_frequency_bins=self.window // 2 + 1,
            num_mel_filters=int(settings["feature_size"]),
            min_frequency=settings["frequency_min"],
            max_frequency=settings["frequency_max"],
            sampling_rate=self.rate,
            norm="slaney",
            mel_scale="slaney",
        )
        self.filters = torch.from_numpy(filters).to(torch.float64)

    def split_windows(self, audio: Tensor) -> Tensor:
        """Split sounds `[B, samples]` into windows `[B, n, length]` of the model's input length.

        A shorter sound is repeated as often as it fits, and the rest is silence.
        """
        samples = audio.shape[-1]
        if samples <= self.length:
            repeated = audio.repeat(1, self.length // samples)
            return functional.pad(repeated, (0, self.length - repeated.shape[-1]))[:, None]
        count = -(-samples // self.length)
        starts = torch.linspace(0, samples - self.length, count, dtype=torch.float64).round().long().tolist()
        return torch.stack([audio[:, start : start + self.length] for start in starts], dim=1)

    def __call__(self, audio: Tensor) -> Tensor:
        """Return `[N, frames, bins]` in float32 of sounds `[N, samples]` in float64: 10 log10 max(1e-10, M |STFT(a)|^2)."""
        window = torch.hann_window(self.window, dtype=audio.dtype, device=audio.device)
        spectrum = torch.stft(
            audio, self.window, self.hop, window=window, center=True, pad_mode="reflect", return_complex=True
        )  # [N, frequencies, frames]
        power = spectrum.real.square() + spectrum.imag.square()
        mel = power.transpose(1, 2) @ self.filters.to(audio.device)
        return (10 * mel.clamp(min=FLOOR).log10()).to(torch.float32)


def resample(audio: Tensor, rate: int, new_rate: int) -> Tensor:
    """Resample sounds `[B, samples]` by their Fourier series; frequencies that either rate cannot represent are cut."""
    if rate == new_rate:
        return audio
    samples = audio.shape[-1]
    count = max(round(samples * new_rate / rate), 1)
    spectrum = torch.fft.rfft(audio)
    kept = min(samples, count) // 2 + 1
    cut = functional.pad(spectrum[..., :kept], (0, count // 2 + 1 - kept))
    return torch.fft.irfft(cut, n=count) * (count / samples)
