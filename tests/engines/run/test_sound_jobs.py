"""Pipelines that make sounds, trained from the command line by a reward of sounds."""

import json
import re
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from helpers import tiny_sounds
from helpers.pipeline_runs import TWO_UPDATES, expect_on_policy
from PIL import Image
from safetensors.torch import load_file

from fluvial.models.tiny import pipelines as tiny

# The VAE of sounds is built by a function that torch deprecates.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")]
SHORT = ["--sampling.prompts", "2", "--sampling.group", "2", "--sampling.steps", "3", *TWO_UPDATES]
VIDEO = (
    "--sampling.guidance.scale 3 --sampling.guidance.negative bad --pipeline.height 32 --pipeline.width 32 "
    "--pipeline.frames 5 --rewards helpers.tiny_sounds:even jpeg --pipeline.call max_sequence_length=32"
)

PLAIN = ("guidance_rescale=0.0", "audio_guidance_rescale=0.0")


SAVED = "before-00.wav", "before-01.wav", "after-00.wav"


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_two_updates_by_a_reward_of_sounds(tmp_path: Path, compute: str, fluvial: Any) -> None:
    """On policy to the bit; the sounds of the evaluations are beside their drawings; an adapter comes out.

    Images of sounds are drawings, which nothing should be trained on without being asked; the built-in model makes none.
    """
    model, prompts = tiny_sounds.save(tmp_path / "ace"), tiny_sounds.texts(tmp_path / "prompts.jsonl")
    low = ["--engine.compute", compute, "--pipeline.frozen", compute, "--pipeline.call", "audio_duration=0.32"]
    low += ["--sampling.guidance.scale", "1", "--out", str(tmp_path / "run")]
    words = ["train", "grpo", "--model", model, "--prompts", prompts, *SHORT, *low]
    sounds, out = ["--rewards", "helpers.tiny_sounds:loud"], tmp_path / "none"
    assert "reward 'jpeg' takes images, and the model makes sounds" in fluvial(*words, "--rewards", "jpeg", code=2)
    none = fluvial("train", "grpo", *sounds, "--out", out, code=2)
    assert "reward 'helpers.tiny_sounds:loud' takes audios, and the model makes no sounds" in none
    fluvial(*words, *sounds)
    expect_on_policy(tmp_path / "run")
    for name in SAVED:
        with wave.open(str(tmp_path / "run" / "samples" / name)) as sound:
            assert (sound.getframerate(), sound.getnchannels(), sound.getnframes()) == (tiny_sounds.RATE, 2, 128)
    (adapter,) = (tmp_path / "run" / "lora").glob("*.safetensors")
    assert any(tensor.any() for key, tensor in load_file(adapter).items() if "lora_B" in key)


@pytest.mark.parametrize(("compute", "rescaled"), [("float32", False), ("bfloat16", True), ("bfloat16", False)])
def test_two_updates_of_a_video_with_sound(tmp_path: Path, compute: str, rescaled: bool, fluvial: Any) -> None:
    """LTX-2, by a reward of its sounds, with its own rescaled guidance and with sums: on policy to the bit."""
    model, prompts = tiny.save("LTX2Pipeline", tmp_path / "model"), tiny_sounds.texts(tmp_path / "prompts.jsonl")
    words = [*SHORT, *VIDEO.split(), *([] if rescaled else PLAIN)]
    low = ["--engine.compute", compute, "--pipeline.frozen", compute, "--out", tmp_path / "run"]
    fluvial("train", "grpo", "--model", model, "--prompts", prompts, *words, *low)
    expect_on_policy(tmp_path / "run")
    with wave.open(str(tmp_path / "run" / "samples" / "after-00.wav")) as sound:
        assert (sound.getframerate(), sound.getnchannels()) == (16000, 2)
    assert (tmp_path / "run" / "samples" / "after.png").is_file()
    pipe = DiffusionPipeline.from_pretrained(model, local_files_only=True)
    pipe.load_lora_weights(tmp_path / "run" / "lora")
    assert pipe.get_active_adapters()


@pytest.mark.parametrize(("compute", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_a_video_with_sound_starts_from_an_image(tmp_path: Path, compute: str, tolerance: float, fluvial: Any) -> None:
    """LTX-2 from an image that it compresses: the held frame counts in the deviation that guidance is rescaled by."""
    model, records = tiny.save("LTX2ImageToVideoPipeline", tmp_path / "model"), []
    for number, (text, colour) in enumerate({"rain": "red", "a drum": "navy", "an owl": "white"}.items()):
        noise = torch.rand(32, 32, 3, generator=torch.Generator().manual_seed(number))
        image = Image.fromarray((noise * 255).to(torch.uint8).numpy())
        Image.blend(image, Image.new("RGB", (32, 32), colour), 0.5).save(tmp_path / f"{number}.png")
        records.append({"prompt": text, "image": f"{number}.png"})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--model", model, "--prompts", tmp_path / "prompts.jsonl", *SHORT, *VIDEO.split()]
    low = ["--engine.compute", compute, "--pipeline.frozen", compute, "--out", tmp_path / "run"]
    within = re.search(r"velocities and images within ([\d.e+-]+)", fluvial("train", "grpo", *words, *low))
    assert within is not None
    assert float(within[1]) < tolerance
    expect_on_policy(tmp_path / "run")
