"""Stable Diffusion from images: the images of diffusers' pipelines, ratios of 1, prompts without an image, and a run."""

import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import launch
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_pipelines import TEXT
from tiny_unet_edits import ROWS, SIZE, make, save
from torch import Tensor

from fluvial.bench.trial import pipelines
from fluvial.bench.trial.forked import Forked, wait
from fluvial.core.random import fold_in, key, normal
from fluvial.core.transitions import ddim
from fluvial.engines.cli import main as cli
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import init_world
from fluvial.engines.run import job as jobs
from fluvial.engines.run.jobs.evaluated import list_texts
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance
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
        (lambda prompt: "a red fox", "prompt 'a red fox' has no image: give its record a column image with an image$"),
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


def test_what_image_to_image_cannot_do_is_refused(tmp_path: Path) -> None:
    """A schedule that the strength has not, images as data to train on, and the refiner of SDXL."""
    folder = save(ROWS["sd-image"], tmp_path)
    model = open_model(folder, height=16, width=24, strength=0.003)
    with pytest.raises(ValueError, match=r"strength is 0\.003, with which no schedule takes 4 steps"):
        model.schedule(4, (4, 8, 12))
    with pytest.raises(ValueError, match="StableDiffusionImg2ImgPipeline is not trained on images: its samples depend"):
        model.encode_images(torch.zeros(1, 3, 16, 24))
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "requires_aesthetics_score": True}))
    with pytest.raises(ValueError, match="is a refiner, whose network is given an aesthetic score: use a base model"):
        open_model(folder)


@pytest.mark.long
def test_inpainting_that_overwrites_between_steps_is_refused(tmp_path: Path) -> None:
    folder = save(ROWS["sd-inpaint"]._replace(channels=4), tmp_path)
    with pytest.raises(ValueError, match="4 input channels, expected 9: without the mask's, inpainting overwrites samples"):
        open_model(folder)


def records(name: str, folder: Path) -> Path:
    """Write a file of prompts with images."""
    lines = []
    for seed, text in enumerate((*PROMPTS, "an owl", "9 owls")):
        files = {argument: f"{argument}-{seed}.png" for argument in ROWS[name].media}
        for argument, image in media(name, seed).items():
            image.save(folder / files[argument])
        lines.append(json.dumps({"prompt": text, **files}))
    (written := folder / "edits.jsonl").write_text("\n".join(lines))
    return written


def size_and_call(name: str) -> list[str]:
    """Return the flags of the samples' size, and of the pipeline's call."""
    size = ["--pipeline.height", str(SIZE[0]), "--pipeline.width", str(SIZE[1])]
    return [*size, *(f"--pipeline.call={argument}={value}" for argument, value in ROWS[name].call.items())]


def typed_for(name: str, folder: Path) -> list[str]:
    """Save the pipeline of a row and its prompts, and return the command line that trains it, without a folder."""
    typed = (
        f"train ddpo --model {save(ROWS[name], folder / 'model')} --prompts {records(name, folder)} --rewards jpeg "
        "--updates 1 --passes.minibatches 1 --sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --sampling.window all "
        "--sampling.guidance.scale 3 --micro-batch 2 --update-micro-batch rollout "
        "--final-samples 2 --eval-every 0 --tracker none --train lora "
        f"--pipeline.text-cache {folder / 'texts'}"
    )
    return [*typed.split(), *size_and_call(name)]


edits = pytest.mark.parametrize("name", ["sd-image", "xl-image", "sd-inpaint", "xl-inpaint"])


@pytest.mark.long
@edits
@pytest.mark.parametrize(
    "more",
    [
        ("--engine.compute", "bfloat16", "--pipeline.frozen", "bfloat16"),
        ("--kl.coef", "0.1", "--kl.guidance", "2"),
    ],
    ids=["bfloat16", "reference"],
)
def test_runs_in_low_precision_and_with_a_reference_are_on_policy(
    name: str, more: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first ratio is exactly 1; a reference with another scale of guidance has a KL."""
    out = tmp_path / "run"
    assert cli.run([*typed_for(name, tmp_path), *more, "--out", str(out)]) == 0, capfd.readouterr().err
    (update,) = [record for record in launch.records(out) if "grad_norm" in record]
    assert update["first_pass_max_abs_log_ratio"] == 0
    assert update["grad_norm"] > 0
    assert "--kl.coef" not in more or update["objective"]["kl_ref"] > 0


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list of the images that the VAE of a model encodes from now on."""
    found, encode = list[Tensor](), model.vae.encode

    def kept(images: Tensor) -> Any:
        found.append(images)
        return encode(images)

    monkeypatch.setattr(model.vae, "encode", kept)
    return found


@pytest.mark.long
@edits
def test_images_are_encoded_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the text, for all runs that share the cache: to the bits of those that have none, samples of images as well."""
    size: dict[str, Any] = {"height": SIZE[0], "width": SIZE[1], "text_tokens": TEXT, **ROWS[name].call}
    folder, prompts = save(ROWS[name], tmp_path), [prompt_of(name, text, seed) for seed, text in enumerate(PROMPTS)]
    alone = open_model(folder, **size)
    encoded, latents = counted(alone, monkeypatch), normal(fold_in(key(0), torch.arange(2)), (2, *alone.latent_shape(*SIZE)))
    expected = alone.encode(prompts), decoded(alone, latents, prompts)
    assert len(encoded) == (4 if "-image" in name else 2)
    for times in (2, 0):
        model = open_model(folder, **size, cache=tmp_path / "texts")
        encoded = counted(model, monkeypatch)
        for _ in range(2):
            found = model.encode([*prompts, prompts[0]]), decoded(model, latents, prompts)
            assert torch.equal(found[1], expected[1])
            for field, tensor in expected[0]._asdict().items():
                assert tensor is None or torch.equal(getattr(found[0], field)[:2], tensor)
        assert len(encoded) == times


@pytest.mark.long
def test_a_negative_prompt_is_cached_with_each_image(tmp_path: Path) -> None:
    """So that neither rollouts nor evaluations of other prompts load the text encoder again."""
    file, folder = records("sd-image", tmp_path), save(ROWS["sd-image"], tmp_path / "model")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1]["negative_prompt"] = "dogs"
    file.write_text("\n".join(map(json.dumps, lines)))
    settings = PipelineConfig(*SIZE, call=("strength=0.6",), text_cache=tmp_path / "texts")
    job = jobs.to_train(str(folder), settings, steps=STEPS, guidance=Guidance(2.0, "blurred"), prompts=(str(file),))
    assert job.prepare is not None
    guidance, model = Guidance(2.0, "blurred"), cast(Any, job.model)
    asked = replace(job, heldout=(replace(job.prompts[0], text="an owl"),))
    with init_world() as one:
        job.prepare(one, list_texts(job, asked, guidance))
    guidance.encode(model, [*job.prompts, *job.heldout, *asked.heldout])
    assert model._text is None


@pytest.mark.long
@edits
def test_a_run_from_a_server_trains_the_same_adapter(name: str, tmp_path: Path) -> None:
    """To the bit: the server is sent the prompts' images."""
    words = typed_for(name, tmp_path)[1:]
    ended = wait([Forked(lambda: cli.run(["train", *words, "--out", str(tmp_path / "run")]), tmp_path / "run.txt")])
    assert ended.code == 0, ended.output
    assert pipelines._train_served(words, tmp_path, cli.run, recorded=False) == "yes"


@pytest.mark.long
@edits
def test_an_image_of_another_size_is_refused_before_the_run(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line, which names the prompt and both sizes."""
    typed = [*typed_for(name, tmp_path), "--pipeline.height", "24", "--out", str(tmp_path / "run")]
    capfd.readouterr()
    assert cli.run(typed) == 2
    said = launch.one_line(capfd.readouterr().err)
    assert re.search(r"the image of prompt '.*' has 24x16 pixels, expected 24x24, the size of the samples$", said)


@pytest.mark.long
@edits
def test_samples_are_drawn_of_a_file_of_prompts_with_images(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other images make other samples; a prompt without one is refused."""
    start = ["sample", str(save(ROWS[name], tmp_path / "model")), "--steps", "3", "--each", "1", *size_and_call(name)]
    out = tmp_path / "sheet.png"
    lines = records(name, tmp_path).read_text().splitlines()
    other = lines[0].replace("-0.png", "-1.png")
    drawn = []
    for number, line in enumerate((lines[0], other)):
        (file := tmp_path / f"{number}.jsonl").write_text(line)
        assert cli.run([*start, "--prompts", str(file), "--out", str(out)]) == 0, capfd.readouterr().err
        drawn.append(np.asarray(Image.open(out)))
    assert (drawn[0] != drawn[1]).any()
    capfd.readouterr()
    assert cli.run([*start, "--prompts", "a red fox", "--out", str(out)]) == 2
    assert "prompt 'a red fox' has no column image" in launch.one_line(capfd.readouterr().err)


@pytest.mark.long
@edits
def test_a_run_trains_an_adapter_that_the_pipeline_opens(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the command line, from a file of prompts with images, with guidance; the first ratio is exactly 1."""
    out = tmp_path / "run"
    typed = [*typed_for(name, tmp_path), "--out", str(out)]
    assert cli.run(typed) == 0, capfd.readouterr().err
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
    levels = unet_edits._rescale(powers.double(), 1 / unet_edits.UNIT).float()
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
