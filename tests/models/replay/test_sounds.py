"""Pipelines that make sounds, replayed: their own sounds, and what a wave looks like."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from helpers import stored, tiny_sounds
from helpers.marks import Patch
from helpers.refusals import refuses

from fluvial.core.random import key
from fluvial.core.table import Record
from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.checks import ReplayError
from fluvial.models.replay.scheduler import RecordingScheduler
from fluvial.models.replay.sounds import Output, draw_waves, split_output
from fluvial.models.replay.stand_in import split_pieces
from fluvial.models.tiny import pipelines as tiny
from fluvial.models.tiny.settings import LATENT

# The VAE of sounds is built by a function that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
STEPS = 3
CALL = {"audio_duration": 0.32}


def opened(folder: Path, **options: object) -> AnyPipeline:
    size = {"height": 16, "width": 16, "steps": STEPS, "call": CALL, "example": "a drum"}
    return AnyPipeline(tiny_sounds.save(folder / "ace"), **{**size, **options})  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("lyrics", ["", "la la"])
def test_sounds_are_the_pipelines_own(tmp_path: Path, lyrics: str) -> None:
    asked = ["rain", "two birds at dawn"]
    model = opened(tmp_path, call={**CALL, "lyrics": lyrics}).adapt_to(asked)
    module = model.build().eval()
    assert model.check(module, asked) < 1e-5
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "ace", local_files_only=True)
    noise = torch.randn(1, 16, LATENT, generator=torch.Generator().manual_seed(1))
    theirs = [
        pipe(text, lyrics=lyrics, num_inference_steps=STEPS, guidance_scale=1.0, latents=noise, **CALL).audios
        for text in asked
    ]
    cond, levels = model.encode(asked), model.schedule(STEPS, model.known.shape).levels
    x = torch.cat([noise, noise])
    with torch.no_grad():
        for step in range(STEPS):
            x = x + (levels[step + 1] - levels[step]) * model.predict(module, x, levels[step].expand(2), cond)
    sounds = model.decode_sounds(x)
    assert sounds.rate == tiny_sounds.RATE
    torch.testing.assert_close(sounds.waves, torch.cat(theirs).float(), rtol=0, atol=1e-5)
    assert (sounds.waves[0] - sounds.waves[1]).abs().max() > 1e-3
    assert model.decode(x).shape == (2, 1, 16, 16)


def test_other_sounds_than_the_pipelines_own_are_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    """The check compares sounds as it does images; guidance that depends on the steps before is no function of a sample."""
    model = opened(tmp_path)
    module, own = model.build().eval(), model.decode_sounds
    monkeypatch.setattr(model, "decode_sounds", lambda latents, prompts: own(latents + 0.1, prompts))
    with pytest.raises(ReplayError, match="its last samples, decoded, differ from its own sounds by"):
        model.check(module, ["rain"])
    with pytest.raises(ReplayError, match="velocity is no known combination of 2 outputs"):
        _ = opened(tmp_path, scale=3.0).known


def test_drawings_and_kinds_of_output() -> None:
    """Silence is a line in the middle; a video has a sound, or a sound is alone; transparent pixels are white."""
    wave = torch.zeros(1, 1, 512)
    wave[..., 256:] = torch.tensor([1.0, -1.0]).repeat(128)
    (drawing,) = draw_waves(wave, 64, 256)
    assert drawing.shape == (1, 64, 256)
    assert drawing[0, :, :120].eq(0).sum(0).max() <= 2
    assert drawing[0, :, 136:].eq(0).all()
    video, sound = torch.rand(1, 5, 3, 8, 8), torch.rand(1, 2, 100)
    both = split_output((video, sound))
    assert both.images is not None
    assert both.images.shape == (1, 3, 5, 8, 8)
    assert both.waves is not None
    assert torch.equal(both.waves, sound)
    alone = split_output((sound[:, 0],))
    assert alone == Output(None, alone.waves)
    assert alone.draw((64, 256)).shape == (1, 1, 64, 256)
    image = torch.full((1, 4, 2, 2), 0.25)
    image[..., 0, 0] = torch.tensor([0.5, 0.0, 1.0, 0.0])
    shown = split_output((image,)).images
    assert shown is not None
    assert shown.shape == (1, 3, 2, 2)
    assert torch.equal(shown[0, :, 0, 0], torch.ones(3))
    torch.testing.assert_close(shown[0, :, 1, 1], torch.full((3,), 0.25 * 0.25 + 0.75))
    with pytest.raises(ValueError, match="the output is ndarray, expected tensors"):
        split_output((image.numpy(),))


PLAIN = {"guidance_rescale": 0.0, "audio_guidance_rescale": 0.0}


def ltx2(folder: Path, **options: Any) -> AnyPipeline:
    if not (folder / "ltx2").exists():
        stored.copy_of("sounds-ltx2", folder / "ltx2", partial(tiny.save, "LTX2Pipeline"))
    call = {"max_sequence_length": 32, **options.pop("call", {})}
    size = {"height": 32, "width": 32, "frames": 5, "steps": STEPS, "scale": 3.0, "negative": "bad", "call": call}
    return AnyPipeline(folder / "ltx2", **{**size, "example": "rain", **options})


@pytest.mark.long
@pytest.mark.parametrize("call", [{}, PLAIN, {"guidance_rescale": 0.4, "audio_guidance_rescale": 0.9}])
def test_a_video_with_sound_is_one_flat_sample(tmp_path: Path, call: dict[str, float]) -> None:
    asked = ["rain", "a drum"]
    model = ltx2(tmp_path, call=call).adapt_to(asked)
    module = model.build().eval()
    assert model.check(module, asked) < 1e-5
    video, sound = model.known.pieces
    assert model.known.shape == (video.numel() + sound.numel(),)
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "ltx2", local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    x = torch.randn(1, *model.known.shape, generator=torch.Generator().manual_seed(1))
    latents, audio = split_pieces(x, model.known.pieces)
    size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": STEPS, "max_sequence_length": 32}
    theirs = pipe(
        "rain",
        negative_prompt="bad",
        guidance_scale=3.0,
        latents=latents,
        audio_latents=audio,
        output_type="pt",
        return_dict=False,
        **size,
        **call,
    )
    cond, levels = model.encode(asked[:1]), model.schedule(STEPS, model.known.shape).levels
    with torch.no_grad():
        for step in range(STEPS):
            x = x + (levels[step + 1] - levels[step]) * model.predict(module, x, levels[step].expand(1), cond)
    expected = split_output(tuple(part.detach() for part in theirs))
    assert expected.images is not None
    assert expected.waves is not None
    assert expected.waves.std() > 1e-3
    torch.testing.assert_close(model.decode(x), expected.images, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.decode_sounds(x).waves, expected.waves, rtol=0, atol=1e-5)


def test_pieces_of_a_recording_step_together() -> None:
    """A copy of the scheduler steps through the second piece; both are one step of flat samples, and of the ODE only."""
    x, v = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    sound, change = torch.randn(2, 5), torch.randn(2, 5)
    scheduler = RecordingScheduler(shift=3.0)
    with scheduler.recording(key=key(0), record=Record(form="unscaled")) as recorder:
        other = copy.deepcopy(scheduler)
        for one in (scheduler, other):
            one.set_timesteps(STEPS)
        for timestep in scheduler.timesteps:
            x = scheduler.step(v, timestep, x, return_dict=False)[0]
            sound = other.step(change, timestep, sound, return_dict=False)[0]
    trajectory = recorder.trajectory()
    assert trajectory.x.shape == (2, STEPS, 17)
    assert torch.equal(trajectory.final, torch.cat([x.flatten(1), sound], dim=1))
    assert recorder.shapes == ((3, 4), (5,))
    scheduler = RecordingScheduler.from_config(scheduler.config, sampler="flow_sde", eta=0.5)
    with scheduler.recording(key=key(0)):
        other = copy.deepcopy(scheduler)
        scheduler.set_timesteps(STEPS)
        other.set_timesteps(STEPS + 1)
        refuses("several pieces are recorded with falling sigmas and the ODE", scheduler.step, v, scheduler.timesteps[0], x)
    scheduler = RecordingScheduler(shift=3.0)
    with scheduler.recording(key=key(0)):
        other = copy.deepcopy(scheduler)
        scheduler.set_timesteps(STEPS)
        other.set_timesteps(STEPS + 1)
        scheduler.step(v, scheduler.timesteps[0], x)
        refuses("different steps or noise levels", other.step, change, other.timesteps[0], sound)
