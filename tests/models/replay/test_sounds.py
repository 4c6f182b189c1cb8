"""Pipelines that make sounds, replayed: their own sounds, and what a wave looks like."""

from pathlib import Path

import pytest
import tiny_sounds
import torch

from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.checks import ReplayError
from fluvial.models.replay.sounds import Output, drawings, output_of

# The VAE of sounds is built by a function that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
STEPS = 3
CALL = {"audio_duration": 0.32}


def opened(folder: Path, **options: object) -> AnyPipeline:
    """Return the model of tiny ACE-Step."""
    size = {"height": 16, "width": 16, "steps": STEPS, "call": CALL, "example": "a drum"}
    return AnyPipeline(tiny_sounds.save(folder / "ace"), **{**size, **options})  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("lyrics", ["", "la la"])
def test_sounds_are_the_pipelines_own(tmp_path: Path, lyrics: str) -> None:
    """From the same noise, without guidance; lyrics are those of every prompt."""
    from diffusers import DiffusionPipeline

    asked = ["rain", "two birds at dawn"]
    model = opened(tmp_path, call={**CALL, "lyrics": lyrics}).given(asked)
    module = model.build().eval()
    assert model.check(module, asked) < 1e-5
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "ace", local_files_only=True)
    noise = torch.randn(1, 16, tiny_sounds.LATENT, generator=torch.Generator().manual_seed(1))
    theirs = [
        pipe(text, lyrics=lyrics, num_inference_steps=STEPS, guidance_scale=1.0, latents=noise, **CALL).audios
        for text in asked
    ]
    cond, levels = model.encode(asked), model.schedule(STEPS, model.known.shape).levels
    x = torch.cat([noise, noise])
    with torch.no_grad():
        for step in range(STEPS):
            x = x + (levels[step + 1] - levels[step]) * model.predict(module, x, levels[step].expand(2), cond)
    sounds = model.sounds(x)
    assert sounds.rate == tiny_sounds.RATE
    torch.testing.assert_close(sounds.waves, torch.cat(theirs).float(), rtol=0, atol=1e-5)
    assert (sounds.waves[0] - sounds.waves[1]).abs().max() > 1e-3
    assert model.decode(x).shape == (2, 1, 64, 256)


@pytest.mark.long
def test_guidance_with_a_memory_is_refused(tmp_path: Path) -> None:
    """ACE-Step's guidance depends on the steps before, so a step is no function of its sample."""
    with pytest.raises(ReplayError, match="velocity is no known combination of 2 outputs"):
        _ = opened(tmp_path, scale=3.0).known


def test_a_drawing_shows_the_wave() -> None:
    """Silence is a line in the middle; a loud half fills its columns."""
    wave = torch.zeros(1, 1, 512)
    wave[..., 256:] = torch.tensor([1.0, -1.0]).repeat(128)
    (drawing,) = drawings(wave)
    assert drawing.shape == (1, 64, 256)
    assert drawing[0, :, :120].eq(0).sum(0).max() <= 2
    assert drawing[0, :, 136:].eq(0).all()


def test_outputs_are_told_apart() -> None:
    """A video with a sound, and a sound alone."""
    video, sound = torch.rand(1, 5, 3, 8, 8), torch.rand(1, 2, 100)
    both = output_of((video, sound))
    assert both.images is not None
    assert both.images.shape == (1, 3, 5, 8, 8)
    assert both.waves is not None
    assert torch.equal(both.waves, sound)
    alone = output_of((sound[:, 0],))
    assert alone == Output(None, alone.waves)
    assert alone.shown.shape == (1, 1, 64, 256)
