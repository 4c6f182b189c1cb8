"""CLAP on a tiny model: spectrograms of the published extractor, and the score of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_rewards
from helpers.refusals import refuses
from scipy.signal import resample as scipy_resample

from fluvial.core.random import key, uniform
from fluvial.engines.scoring.signature import signature_of
from fluvial.models.rewards.clap import Clap, LogMel, resample

PROMPTS = ["rain", "a dog and rain", "a dog"]
WORDS = ["<s>", "<pad>", "</s>", "<unk>", "a", "dog", "and", "rain"]
RATE = 8000


def extractor() -> Any:
    from transformers import ClapFeatureExtractor

    sizes = {"feature_size": 16, "sampling_rate": RATE, "hop_length": 160, "max_length_s": 1, "fft_window_size": 256}
    return ClapFeatureExtractor(**sizes, frequency_min=50, frequency_max=3500, truncation="rand_trunc", padding="repeatpad")


def config(**audio: Any) -> Any:
    from transformers import ClapConfig

    text = {"vocab_size": len(WORDS), "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    seen = {"num_mel_bins": 16, "spec_size": 32, "window_size": 4, "patch_size": 4, "patch_stride": [4, 4]}
    layers = {"depths": [1, 1], "num_attention_heads": [1, 2], "patch_embeds_hidden_size": 8, "num_hidden_layers": 2}
    return ClapConfig(
        projection_dim=12,
        text_config={**text, "hidden_size": 16, "max_position_embeddings": 32},
        audio_config={**seen, **layers, "hidden_size": 16, **audio},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ClapModel

    place = tmp_path_factory.mktemp("clap")
    tiny_rewards.randomise(ClapModel(config())).save_pretrained(place)
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tiny_rewards.word_tokenizer(WORDS, "<s>", "</s>", **names).save_pretrained(place)
    extractor().save_pretrained(place)
    return place


def sounds(samples: int = 6000) -> torch.Tensor:
    time = torch.arange(samples) / RATE
    tone = torch.sin(2 * torch.pi * 440 * time)
    return (uniform(key(0), (3, samples)) - 0.5) * torch.tensor([0.1, 0.4, 0.8])[:, None] + 0.3 * tone


@pytest.mark.parametrize("samples", [8000, 6000, 2500])
def test_spectrograms_are_those_of_the_published_extractor(samples: int) -> None:
    """Of sounds that are as long as the model hears, shorter, and so short that they are repeated."""
    expected = extractor()(list(sounds(samples).numpy()), sampling_rate=RATE, return_tensors="pt")["input_features"]
    features = LogMel(extractor().to_dict())
    found = features(features.split_windows(sounds(samples).double())[:, 0])
    torch.testing.assert_close(found, expected[:, 0], rtol=0, atol=1e-3)


def test_a_long_sound_is_cut_into_windows_that_cover_it() -> None:
    features = LogMel(extractor().to_dict())
    audio = torch.arange(20000.0).expand(2, -1)
    windows = features.split_windows(audio)
    assert windows.shape == (2, 3, 8000)
    assert windows[0, :, 0].tolist() == [0, 6000, 12000]


def test_scores_are_the_cosines_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer, ClapModel

    tokens = AutoTokenizer.from_pretrained(folder)(PROMPTS, padding=True, return_tensors="pt")
    features = extractor()(list(sounds().numpy()), sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        output = ClapModel.from_pretrained(folder)(**tokens, **features)
    found = Clap(folder)(sounds(), PROMPTS, audio_rate=RATE)
    assert torch.equal(found, Clap(folder, sampling_rate=RATE)(sounds(), PROMPTS))
    assert all(map(signature_of(Clap(folder)).takes, ("audios", "audio_rate")))  # as a run names them
    wanted = (output.audio_embeds * output.text_embeds).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert found.std() > 1e-3


def test_gradients_batches_channels_and_windows(folder: Path) -> None:
    reward = Clap(folder, sampling_rate=RATE, batch=2)
    audio = sounds().requires_grad_()
    scores = reward(audio, PROMPTS)
    (grad,) = torch.autograd.grad(scores.sum(), audio)
    assert grad.norm(dim=1).min() > 0
    single = torch.cat([reward(audio[i : i + 1].detach(), [prompt]) for i, prompt in enumerate(PROMPTS)])
    torch.testing.assert_close(single, scores.detach(), rtol=1e-4, atol=1e-5)
    mono = audio.detach()
    stereo = torch.stack([mono * 1.5, mono * 0.5], 1)
    torch.testing.assert_close(reward(stereo, PROMPTS), scores.detach(), rtol=1e-3, atol=1e-4)
    long = sounds(16000)
    halves = (reward(long[:, :8000], PROMPTS) + reward(long[:, 8000:], PROMPTS)) / 2
    torch.testing.assert_close(reward(long, PROMPTS), halves, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rate", "wanted"), [(6000, 8000), (16000, 8000), (44100, 48000)])
def test_resampling_is_that_of_scipy(rate: int, wanted: int) -> None:
    time = torch.arange(601, dtype=torch.float64) / 601
    audio = sum(torch.sin(2 * torch.pi * n * time + n) / n for n in (1, 7, 40, 90, 300))
    assert isinstance(audio, torch.Tensor)
    found = resample(audio[None], rate, wanted)[0]
    np.testing.assert_allclose(found.numpy(), scipy_resample(audio.numpy(), round(601 * wanted / rate)), atol=1e-9)
    assert resample(audio, rate, rate) is audio


def test_what_is_wrong_is_one_line(folder: Path, tmp_path: Path) -> None:
    from transformers import ClapModel

    refuses(r"audios have the shape \[3, 6000\] for 1 prompts", Clap(folder), sounds(), ["rain"])
    ClapModel(config(enable_fusion=True, fusion_type="channel_map", patch_embed_input_channels=4)).save_pretrained(tmp_path)
    refuses("are a model with fusion, expected one without", Clap, tmp_path)
    refuses("its feature extractor has no hop_length", LogMel, {**extractor().to_dict(), "hop_length": None})
