"""Stable Diffusion from images: its levels and mixtures, refusals, and negative prompts. For the rest see the adapters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.refusals import refuses
from helpers.tiny_conditioned import EDITS, SIZE, draw_image, save, write_random
from helpers.tiny_pipelines import STEPS
from torch import Tensor

from fluvial.core.random import fold_in, key, normal
from fluvial.core.transitions import ddim
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import init_world
from fluvial.engines.run import job as jobs
from fluvial.engines.run.jobs.evaluated import list_texts
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.pipelines import unet_edits
from fluvial.models.pipelines.open import open_model
from fluvial.models.replay.media import MediaPrompt


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("name", ["sd-image", "xl-inpaint"])
def test_the_noise_of_a_step_is_the_pipelines(name: str, tmp_path: Path) -> None:
    model = open_model(save(name, tmp_path / "model"), height=SIZE[0], width=SIZE[1], **EDITS[name].call)
    ours = model.schedule(STEPS, model.latent_shape(*SIZE))
    from_image = model.takes == ("image",)
    assert float(torch.sqrt(1 - ours.levels[0])) == pytest.approx(1, abs=1e-7 if from_image else 1)
    powers = model.build_scheduler().alphas_cumprod[ours.timesteps.long()]
    for step in range(STEPS - 1):
        own = ddim(ours.levels[step], ours.levels[step + 1], eta=1.0).std
        unit = torch.sqrt(powers[step + 1] / ours.levels[step + 1]) * (2.0**-16 if from_image else 1.0)
        torch.testing.assert_close(own * unit, ddim(powers[step], powers[step + 1], eta=1.0).std, rtol=1e-5, atol=0)


def test_what_image_to_image_cannot_do_is_refused(tmp_path: Path) -> None:
    """A strength without an effect or a schedule, images to train on, the refiner of SDXL, and blended inpainting."""
    folder = save("sd-image", tmp_path / "image")
    for strength in (0.0, 1.0, 1.5):
        refuses(rf"strength is {strength}, expected a number above 0 and below 1", open_model, folder, strength=strength)
    model = open_model(folder, height=16, width=24, strength=0.003)
    refuses(r"strength is 0\.003, with which no schedule takes 4 steps", model.schedule, 4, (4, 8, 12))
    refuses("StableDiffusionImg2ImgPipeline is not trained on images", model.encode_images, torch.zeros(1, 3, 16, 24))
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "requires_aesthetics_score": True}))
    refuses("is a refiner, whose network takes an aesthetic score: use a base model", open_model, folder)
    write_random(EDITS["sd-inpaint"]._replace(channels=4).make, tmp_path / "inpaint")
    refuses("4 input channels", open_model, tmp_path / "inpaint")


@pytest.mark.long
def test_a_negative_prompt_is_cached_with_each_image(tmp_path: Path) -> None:
    folder, file = save("sd-image", tmp_path / "model"), tmp_path / "edits.jsonl"
    lines = [{"prompt": text, "image": f"{text}.png"} for text in ("foxes", "cats", "owls", "bats")]
    for number, line in enumerate(lines):
        draw_image(tmp_path / line["image"], number, SIZE)
    lines[1]["negative_prompt"] = "dogs"
    file.write_text("\n".join(map(json.dumps, lines)))
    settings = PipelineConfig(*SIZE, call=("strength=0.6",), text_cache=tmp_path / "texts")
    job = jobs.open_to_train(str(folder), settings, steps=STEPS, guidance=Guidance(2.0, "blurred"), prompts=(str(file),))
    assert job.prepare is not None
    guidance, model = Guidance(2.0, "blurred"), cast(Any, job.model)
    asked = replace(job, heldout=(replace(job.prompts[0], text="an owl"),))
    with init_world() as one:
        job.prepare(one, list_texts(job, asked, guidance))
    guidance.encode(model, [*job.prompts, *job.heldout, *asked.heldout])
    assert model._text is None


def test_samples_that_start_as_noise_are_noise_mixed_with_the_image() -> None:
    """x = sqrt(A) z + sqrt(1 - A) e at the first level A, and z with what is left of y at the last."""
    noise, image = normal(fold_in(key(0), torch.arange(2)), (2, 4, 3, 2, 2)).unbind()
    powers = torch.tensor([0.005, 0.3, 0.9, 0.9991])
    levels = unet_edits._rescale(powers.double(), 1 / unet_edits.UNIT).float()
    mixed = unet_edits._to_pipeline_samples(noise, levels, image)
    power = powers.reshape(-1, 1, 1, 1)
    torch.testing.assert_close(mixed, torch.sqrt(power) * image + torch.sqrt(1 - power) * noise, rtol=1e-5, atol=1e-5)
    whole = unet_edits._to_pipeline_samples(noise, torch.ones(4), image)
    torch.testing.assert_close(whole, image + unet_edits.UNIT * noise)


class Listening:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def encode(self, prompts: list[Any]) -> Tensor:
        self.asked.append(prompts)
        return torch.zeros(len(prompts), 1)


def test_a_negative_prompt_has_the_images_of_the_prompt() -> None:
    model: Any = Listening()
    Guidance(2.0, "blurred").encode(model, [Prompt("a red fox", media={"image": b"1"}), Prompt("two cats", negative="dogs")])
    assert model.asked[1] == [MediaPrompt("blurred", {"image": b"1"}), "dogs"]
