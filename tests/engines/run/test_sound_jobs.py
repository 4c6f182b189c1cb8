"""Pipelines that make sounds, trained from the command line by a reward of sounds."""

import json
import re
import wave
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from helpers import launch, tiny_sounds
from PIL import Image
from safetensors.torch import load_file

from fluvial.engines.cli import main as cli
from fluvial.models.tiny import pipelines as tiny

# The VAE of sounds is built by a function that torch deprecates.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")]
SHORT = (
    "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --micro-batch 2 --update-micro-batch rollout "
    "--updates 2 --passes.minibatches 1 "
    "--final-samples 2 --evaluation.every 0 --checkpoint.every 2 --sampling.guidance.scale 1"
)
VIDEO = (
    "--sampling.guidance.negative bad --pipeline.height 32 --pipeline.width 32 --pipeline.frames 5 "
    "--rewards helpers.tiny_sounds:even jpeg --pipeline.call max_sequence_length=32"
)

PLAIN = ("guidance_rescale=0.0", "audio_guidance_rescale=0.0")


def train(folder: Path, out: Path, *more: str) -> int:
    """Train tiny ACE-Step, and return the exit code."""
    model, prompts = tiny_sounds.save(folder / "ace"), tiny_sounds.texts(folder / "prompts.jsonl")
    length = ["--pipeline.call", "audio_duration=0.32"]
    return cli.run(
        [
            "train",
            "grpo",
            "--model",
            str(model),
            "--prompts",
            str(prompts),
            *SHORT.split(),
            *length,
            *launch.rewarded(*more),
            "--out",
            str(out),
        ]
    )


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_two_updates_by_a_reward_of_sounds(tmp_path: Path, compute: str, capfd: pytest.CaptureFixture[str]) -> None:
    """On policy to the bit; the sounds of the evaluations are beside their drawings; an adapter comes out."""
    low = ["--engine.compute", compute, "--pipeline.frozen", compute]
    code = train(tmp_path, tmp_path / "run", "--rewards", "helpers.tiny_sounds:loud", *low)
    assert code == 0, capfd.readouterr().err
    updates = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert [record["first_pass_max_abs_log_ratio"] for record in updates] == [0.0, 0.0]
    assert updates[0]["grad_norm"] > 0
    for name in ("before-00.wav", "before-01.wav", "after-00.wav"):
        with wave.open(str(tmp_path / "run" / "samples" / name)) as sound:
            assert (sound.getframerate(), sound.getnchannels(), sound.getnframes()) == (tiny_sounds.RATE, 2, 128)
    (adapter,) = (tmp_path / "run" / "lora").glob("*.safetensors")
    assert any(tensor.any() for key, tensor in load_file(adapter).items() if "lora_B" in key)


def test_a_reward_of_images_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Images of sounds are drawings, which nothing should be trained on without being asked."""
    assert train(tmp_path, tmp_path / "run") == 2
    assert "reward 'jpeg' takes images, and the model makes sounds" in launch.one_line(capfd.readouterr().err)


def test_a_reward_of_sounds_of_a_model_of_images_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The built-in model makes none."""
    code = cli.run(["train", "grpo", "--rewards", "helpers.tiny_sounds:loud", "--out", str(tmp_path / "run")])
    assert code == 2
    assert "reward 'helpers.tiny_sounds:loud' takes audios, and the model makes no sounds" in launch.one_line(
        capfd.readouterr().err
    )


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("rescaled", [True, False])
def test_two_updates_of_a_video_with_sound(
    tmp_path: Path, compute: str, rescaled: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """LTX-2, by a reward of its sounds, with its own rescaled guidance and with sums: on policy to the bit."""
    model, prompts = tiny.save("LTX2Pipeline", tmp_path / "model"), tiny_sounds.texts(tmp_path / "prompts.jsonl")
    words = ["--model", str(model), "--prompts", str(prompts), *SHORT.split()[:-1], "3", *VIDEO.split()]
    words += [] if rescaled else PLAIN
    low = ["--engine.compute", compute, "--pipeline.frozen", compute]
    code = cli.run(["train", "grpo", *launch.rewarded(*words), *low, "--out", str(tmp_path / "run")])
    assert code == 0, capfd.readouterr().err
    updates = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert [record["first_pass_max_abs_log_ratio"] for record in updates] == [0.0, 0.0]
    assert updates[0]["grad_norm"] > 0
    with wave.open(str(tmp_path / "run" / "samples" / "after-00.wav")) as sound:
        assert (sound.getframerate(), sound.getnchannels()) == (16000, 2)
    assert (tmp_path / "run" / "samples" / "after.png").is_file()
    pipe = DiffusionPipeline.from_pretrained(model, local_files_only=True)
    pipe.load_lora_weights(tmp_path / "run" / "lora")
    assert pipe.get_active_adapters()


@pytest.mark.parametrize(("compute", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_a_video_with_sound_starts_from_an_image(
    tmp_path: Path, compute: str, tolerance: float, capfd: pytest.CaptureFixture[str]
) -> None:
    """LTX-2 from an image that it compresses: the held frame counts in the deviation that guidance is rescaled by."""
    name = "LTX2ImageToVideoPipeline"
    model = tiny.save(name, tmp_path / "model")
    for number, colour in enumerate(("red", "navy", "white")):
        noise = torch.rand(32, 32, 3, generator=torch.Generator().manual_seed(number))
        image = (noise * 255).to(torch.uint8).numpy()
        Image.blend(Image.fromarray(image), Image.new("RGB", (32, 32), colour), 0.5).save(tmp_path / f"{number}.png")
    records = [{"prompt": text, "image": f"{number}.png"} for number, text in enumerate(("rain", "a drum", "an owl"))]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--model", str(model), "--prompts", str(tmp_path / "prompts.jsonl"), *SHORT.split()[:-1], "3", *VIDEO.split()]
    words += ["--engine.compute", compute, "--pipeline.frozen", compute]
    assert cli.run(["train", "grpo", *launch.rewarded(*words), "--out", str(tmp_path / "run")]) == 0, capfd.readouterr().err
    within = re.search(r"velocities and images within ([\d.e+-]+)", capfd.readouterr().out)
    assert within is not None
    assert float(within[1]) < tolerance
    updates = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert [record["first_pass_max_abs_log_ratio"] for record in updates] == [0.0, 0.0]
    assert updates[0]["grad_norm"] > 0
