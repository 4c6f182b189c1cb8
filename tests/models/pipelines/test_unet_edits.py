"""Stable Diffusion from images: the images of diffusers' pipelines, ratios of 1, prompts without an image, and a run."""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_pipelines import TEXT
from tiny_unet_edits import ROWS, SIZE, make, save
from torch import Tensor

from fluvial.core.random import fold_in, key, normal
from fluvial.core.transitions import ddim
from fluvial.engines.cli import main as cli
from fluvial.engines.data.records import Prompt
from fluvial.engines.rollout.generate import Guidance
from fluvial.models import decoded
from fluvial.models.pipelines import unet_edits
from fluvial.models.pipelines.open import open_model
from fluvial.models.replay.media import MediaPrompt, use_modes

STEPS = 3
PROMPTS = "a red fox", "two cats"


def drawn(seed: int, *, mask: bool = False) -> Image.Image:
    """Return a random image of the size of the samples; a mask paints a part of it."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*SIZE, 3), np.uint8)
    if not mask:
        return Image.fromarray(pixels)
    painted = np.zeros(SIZE, np.uint8)
    painted[2 : 9 + seed, 3:15] = 255
    return Image.fromarray(painted)


def media(name: str, seed: int) -> dict[str, Image.Image]:
    """Return the images of a prompt."""
    return {argument: drawn(seed, mask=argument == "mask_image") for argument in ROWS[name].media}


def file_of(image: Image.Image) -> bytes:
    """Return an image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def prompt_of(name: str, text: str, seed: int) -> MediaPrompt:
    """Return a prompt with its images."""
    return MediaPrompt(text, {argument: file_of(image) for argument, image in media(name, seed).items()})


def opened(name: str, folder: Path) -> Any:
    """Return the adapter of a row's pipeline."""
    size: dict[str, Any] = {"height": SIZE[0], "width": SIZE[1]}
    return open_model(save(ROWS[name], folder), **size, text_tokens=TEXT, **ROWS[name].call)


def theirs(name: str, noise: Tensor, scale: float, model: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the images of diffusers' pipeline, from the same noise, one prompt at a time."""
    pipeline, row = make(ROWS[name]), ROWS[name]
    pipeline.set_progress_bar_config(disable=True)
    use_modes(pipeline.vae)
    asked = next(count for count in range(STEPS, 99) if int(count * row.call.get("strength", 1)) == STEPS)
    found = []
    for seed, (text, start) in enumerate(zip(PROMPTS, noise.split(1), strict=True)):
        for module in ("stable_diffusion", "stable_diffusion_xl"):
            kind = "img2img" if "Img2Img" in row.pipeline else "inpaint"
            place = f"diffusers.pipelines.{module}.pipeline_{module}_{kind}.randn_tensor"
            monkeypatch.setattr(place, lambda *_, start=start, **__: start)
        call = {"strength": 1.0, **row.call} | ({} if kind == "img2img" else {"height": SIZE[0], "width": SIZE[1]})
        made = pipeline(text, **media(name, seed), **call, num_inference_steps=asked, guidance_scale=scale, output_type="pt")
        found.append(made.images)
    return torch.cat(found)


@pytest.mark.long
@pytest.mark.parametrize("scale", [1.0, 3.5])
@pytest.mark.parametrize("name", ROWS)
def test_images_are_the_pipelines_own(name: str, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 within 1e-5; another image gives another sample."""
    model = opened(name, tmp_path)
    module, shape = model.build().eval(), model.latent_shape(*SIZE)
    noise = normal(fold_in(key(0), torch.arange(2)), (2, *shape))
    prompts = [prompt_of(name, text, seed) for seed, text in enumerate(PROMPTS)]
    expected = theirs(name, noise, scale, model, monkeypatch)
    found = sampled(model, module, noise, prompts, scale)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    other = sampled(model, module, noise, [prompt_of(name, text, 7) for text in PROMPTS], scale)
    assert (other - found).abs().amax((1, 2, 3)).min() > 0.01


@torch.no_grad()
def sampled(model: Any, module: Any, noise: Tensor, prompts: list[MediaPrompt], scale: float) -> Tensor:
    """Return images by DDIM's deterministic steps, with the adapter."""
    schedule, cond = model.schedule(STEPS, tuple(noise.shape[1:])), model.encode(prompts)
    assert len(schedule.timesteps) == STEPS
    assert float(torch.sqrt(1 - schedule.levels[0])) == pytest.approx(1, abs=1e-7 if model.takes == ("image",) else 1)
    blank = model.encode([MediaPrompt("", prompt.media) for prompt in prompts])
    x, scales = noise, torch.full((len(noise),), scale)
    for step, (level, following) in enumerate(pairwise(schedule.levels)):
        levels, timestep = level.expand(len(x)), schedule.timesteps[step].expand(len(x))
        v = model.predict(module, x, levels, cond, timestep=timestep)
        if scale != 1:
            v = model.guide(v, model.predict(module, x, levels, blank, timestep=timestep), scales)
        coefficients = ddim(level, following, eta=0.0)
        x = coefficients.a * x + coefficients.b * v
    return decoded(model, x, prompts)


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("name", ["sd-image", "xl-inpaint"])
def test_the_noise_of_a_step_is_the_pipelines(name: str, tmp_path: Path) -> None:
    """The standard deviation of a step, in the pipeline's own coordinates, is that of DDIM at the pipeline's levels."""
    model = opened(name, tmp_path)
    ours = model.schedule(STEPS, model.latent_shape(*SIZE))
    powers = model.scheduler().alphas_cumprod[ours.timesteps.long()]
    for step in range(STEPS - 1):
        own = ddim(ours.levels[step], ours.levels[step + 1], eta=1.0).std
        unit = torch.sqrt(powers[step + 1] / ours.levels[step + 1]) * (2.0**-16 if model.takes == ("image",) else 1.0)
        torch.testing.assert_close(own * unit, ddim(powers[step], powers[step + 1], eta=1.0).std, rtol=1e-5, atol=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda prompt: "a red fox", "prompt 'a red fox' has no image: give its record a column image"),
        (
            lambda prompt: MediaPrompt("a red fox", {**prompt.media, "image": file_of(Image.new("RGB", (16, 16)))}),
            "the image of prompt 'a red fox' has 16x16 pixels, expected 24x16, the size of the samples",
        ),
    ],
)
def test_prompts_without_an_image_are_refused(change: Any, says: str, tmp_path: Path) -> None:
    model = opened("sd-inpaint", tmp_path)
    with pytest.raises(ValueError, match=says):
        model.encode([change(prompt_of("sd-inpaint", "a red fox", 0))])
    with pytest.raises(ValueError, match="the size is 8x8, expected that of the images, 16x24"):
        model.latent_shape(8, 8)


@pytest.mark.long
@pytest.mark.parametrize("strength", [0.0, 1.0, 1.5])
def test_a_strength_without_an_effect_is_refused(strength: float, tmp_path: Path) -> None:
    folder = save(ROWS["sd-image"], tmp_path)
    with pytest.raises(ValueError, match=rf"strength is {strength}, expected a number above 0 and below 1"):
        open_model(folder, strength=strength)


@pytest.mark.long
def test_inpainting_that_overwrites_between_steps_is_refused(tmp_path: Path) -> None:
    folder = save(ROWS["sd-inpaint"]._replace(channels=4), tmp_path)
    with pytest.raises(ValueError, match="4 input channels, expected 9: without the mask's, inpainting overwrites samples"):
        open_model(folder)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sd-image", "xl-image", "sd-inpaint", "xl-inpaint"])
def test_a_run_trains_an_adapter_that_the_pipeline_opens(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the command line, from a file of prompts with images, with guidance; the first ratio is exactly 1."""
    folder, lines = save(ROWS[name], tmp_path / "model"), []
    for seed, text in enumerate((*PROMPTS, "an owl", "9 owls")):
        files = {argument: f"{argument}-{seed}.png" for argument in ROWS[name].media}
        for argument, image in media(name, seed).items():
            image.save(tmp_path / files[argument])
        lines.append(json.dumps({"prompt": text, **files}))
    (tmp_path / "edits.jsonl").write_text("\n".join(lines))
    call = [f"--pipeline.call={argument}={value}" for argument, value in ROWS[name].call.items()]
    out = tmp_path / "run"
    typed = (
        f"train ddpo --model {folder} --prompts {tmp_path / 'edits.jsonl'} --rewards jpeg --out {out} --updates 1 "
        f"--minibatches 1 --pipeline.height {SIZE[0]} --pipeline.width {SIZE[1]} --rollout.prompts 2 --rollout.group 2 "
        "--rollout.steps 3 --rollout.window all --rollout.guidance.scale 3 --micro-batch 2 --final-samples 2 --eval-every 0 "
        f"--tracker none --train lora --pipeline.text-cache {tmp_path / 'texts'}"
    )
    assert cli.run([*typed.split(), *call]) == 0, capfd.readouterr().err
    assert json.loads((out / "summary.json").read_text())["first_pass_max_abs_log_ratio"] == 0
    assert cli.run(["eval", str(out), "--out", str(tmp_path / "table")]) == 0, capfd.readouterr().err
    rows = json.loads((tmp_path / "table" / "table.json").read_text())["rows"]
    expected = json.loads((out / "summary.json").read_text())["jpeg_score_after"]
    assert next(row["mean"] for row in rows if row["evaluator"] == "jpeg") == pytest.approx(expected, rel=1e-5)
    file = next((out / "lora").glob("*.safetensors"))
    trained = {part: tensor + 0.1 for part, tensor in load_file(file).items()}
    save_file(trained, file)
    pipeline = make(ROWS[name])
    pipeline.load_lora_weights(out / "lora")
    assert sum("lora" in part for part, _ in pipeline.unet.named_parameters()) == len(trained)


def test_samples_that_start_as_noise_are_noise_mixed_with_the_image() -> None:
    """x = sqrt(A) z + sqrt(1 - A) e at the first level A, and z with what is left of y at the last."""
    noise, image = normal(fold_in(key(0), torch.arange(2)), (2, 4, 3, 2, 2)).unbind()
    powers = torch.tensor([0.005, 0.3, 0.9, 0.9991])
    levels = unet_edits._rescaled(powers.double(), 1 / unet_edits.UNIT).float()
    mixed = unet_edits._with_image(noise, levels, image)
    power = powers.reshape(-1, 1, 1, 1)
    torch.testing.assert_close(mixed, torch.sqrt(power) * image + torch.sqrt(1 - power) * noise, rtol=1e-5, atol=1e-5)
    whole = unet_edits._with_image(noise, torch.ones(4), image)
    torch.testing.assert_close(whole, image + unet_edits.UNIT * noise)


class Listening:
    """A model that keeps what it is asked to encode."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def encode(self, prompts: list[Any]) -> Tensor:
        """Return a number per prompt."""
        self.asked.append(prompts)
        return torch.zeros(len(prompts), 1)


def test_a_negative_prompt_has_the_images_of_the_prompt() -> None:
    """So that both halves of guidance see the same image; a prompt of text alone has a text."""
    model: Any = Listening()
    Guidance(2.0, "blurred").encode(model, [Prompt("a red fox", media={"image": b"1"}), Prompt("two cats", negative="dogs")])
    assert model.asked[1] == [MediaPrompt("blurred", {"image": b"1"}), "dogs"]
