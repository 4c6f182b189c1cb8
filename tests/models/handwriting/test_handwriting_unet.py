"""The built-in UNet, an epsilon-prediction model: the model protocol, its base weights, and pre-training."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from helpers.marks import Patch
from helpers.refusals import refuses
from safetensors.torch import load_file
from torch import Tensor, nn

from fluvial.bench.pretrain import Noised, compute_levels, handwriting_pretraining, handwriting_unet_pretraining, pretrain
from fluvial.core.random import fold_in, key, normal, uniform
from fluvial.core.rollout import rollout
from fluvial.core.transitions import ddim
from fluvial.engines.run.evaluation.evaluate import Evaluation, evaluate
from fluvial.engines.run.job import Job
from fluvial.engines.sampling.noising import add_noise
from fluvial.models import LoraConfig, add_lora
from fluvial.models.handwriting import (
    BASE,
    BASE_UNET,
    Handwriting,
    HandwritingUNet,
    draw_codes,
    list_codes,
    load_heldout_recogniser,
    load_reward_recogniser,
)
from fluvial.models.handwriting.model import compute_alphas_cumprod, find_timestep
from fluvial.models.words import Words

MODEL = HandwritingUNet()
DDIM = partial(ddim, eta=0.0)
CODES = ["0427", "1999", "3141"]


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    return MODEL.build().eval()


def noise(count: int) -> Tensor:
    return normal(fold_in(key(0), torch.arange(count)), (count, *MODEL.latent_shape()))


def sample(unet: nn.Module, prompts: list[str], *, steps: int = 10) -> Tensor:
    schedule, cond = MODEL.schedule(steps), MODEL.encode(prompts)

    def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
        return MODEL.predict(unet, x, level, cond, timestep=schedule.timesteps[step].expand(len(x)))

    with torch.no_grad():
        still: dict[str, Any] = {"transition": DDIM, "deterministic": DDIM, "window": (), "record": ()}
        return rollout(velocity, noise(len(prompts)), schedule.levels, key=key(1), **still).final


def test_the_unet_is_small_and_of_one_size(unet: nn.Module) -> None:
    """It has about 0.7 million parameters in less than 4 MB, and its linear layers take LoRA."""
    assert 0.5e6 < sum(p.numel() for p in unet.parameters()) < 1e6
    assert sum(path.stat().st_size for path in BASE_UNET.iterdir()) < 4e6
    adapted = MODEL.build()
    add_lora(adapted, LoraConfig(rank=2), MODEL.lora_targets)
    x, level, cond = noise(3), torch.tensor([0.1, 0.5, 0.9]), MODEL.encode(CODES)
    with torch.no_grad():
        assert torch.equal(MODEL.predict(adapted, x, level, cond), MODEL.predict(unet, x, level, cond))
    assert MODEL.latent_shape() == Handwriting(None).latent_shape() == (1, 8, 32)
    refuses("the size is 16x32", MODEL.latent_shape, 16, 32)
    refuses("is not a code of 4 digits", MODEL.check_prompt, "042")


def test_the_blocks_are_in_the_order_they_run(unet: nn.Module) -> None:
    blocks, ran = MODEL.blocks(unet), []
    handles = [
        block.register_forward_pre_hook(lambda module, args, place=place: ran.append(place))
        for place, block in enumerate(blocks)
    ]
    with torch.no_grad():
        MODEL.predict(unet, noise(1), torch.tensor([0.5]), MODEL.encode(["0427"]))
    for handle in handles:
        handle.remove()
    assert ran == list(range(7))
    inside = sum(p.numel() for block in blocks for p in block.parameters())
    assert inside > 0.9 * sum(p.numel() for p in unet.parameters())


@pytest.mark.parametrize("steps", [1, 2, 5, 8, 10, 20, 50, 100, 500])
def test_the_schedule_is_that_of_diffusers(steps: int) -> None:
    """Each step starts and ends at exactly the levels of DDIMScheduler.step; the first is the noisiest level."""
    schedule, scheduler = MODEL.schedule(steps), MODEL.build_scheduler(steps)
    assert schedule.levels.dtype == schedule.timesteps.dtype == torch.float32
    assert torch.equal(schedule.timesteps, scheduler.timesteps.float())
    assert len(schedule.levels) == steps + 1
    for step, timestep in enumerate(scheduler.timesteps.tolist()):
        before = timestep - 1000 // steps
        final = scheduler.final_alpha_cumprod
        assert schedule.levels[step] == scheduler.alphas_cumprod[timestep]
        assert schedule.levels[step + 1] == (scheduler.alphas_cumprod[before] if before >= 0 else final)
    assert schedule.timesteps[0] == 999
    assert schedule.levels[-1] == scheduler.alphas_cumprod[0]


def test_any_schedule_rises() -> None:
    """Also if the steps do not divide 1000; with too many of them the last would not change the level."""
    for steps in (3, 7, 30, 666):
        schedule = MODEL.schedule(steps)
        assert (schedule.levels.diff() > 0).all()
        assert 0.004 < schedule.levels[0] < schedule.levels[-1] < 1
        assert torch.equal(find_timestep(schedule.levels[:-1]), schedule.timesteps)
    for steps in (0, 667, 1000):
        refuses(f"steps is {steps}, expected 1 to 666", MODEL.schedule, steps)


def test_the_timestep_follows_from_the_level() -> None:
    """Each timestep has its own level; between two levels the nearer counts, beyond the ends the last."""
    powers = compute_alphas_cumprod(torch.device("cpu"))
    assert torch.equal(find_timestep(powers), torch.arange(1000.0))
    assert torch.equal(find_timestep(powers.double()), torch.arange(1000.0))
    assert torch.equal(find_timestep(torch.lerp(powers[:-1], powers[1:], 0.4)), torch.arange(999.0))
    assert torch.equal(find_timestep(torch.lerp(powers[:-1], powers[1:], 0.6)), torch.arange(1, 1000.0))
    assert find_timestep(torch.tensor([0.0, 1.0])).tolist() == [999, 0]


@pytest.mark.parametrize(
    ("model", "prompts"),
    [(MODEL, [*CODES, "0428"]), (Handwriting(), [*CODES, "0428"]), (Words(None), ["river", "act", "acts", "rover"])],
    ids=["unet", "transformer", "words"],
)
@torch.no_grad()
def test_predictions_are_pure_and_per_sample(model: Any, prompts: list[str]) -> None:
    """The same again, and alone; those of one prompt follow it and nothing else; the level tells the timestep."""
    module, schedule, (first, second, third, other) = model.build(), model.schedule(10, ()), prompts
    x = normal(fold_in(key(0), torch.arange(3)), (3, *model.latent_shape()))
    level, timestep = schedule.levels[[0, 4, 8]], schedule.timesteps[[0, 4, 8]]
    v = model.predict(module, x, level, model.encode([first, second, third]))
    assert v.shape == x.shape
    assert torch.equal(v, model.predict(module, x, level, model.encode([first, second, third])))
    told = [
        model.predict(module, x, level, model.encode(prompts[:3]), timestep=each) for each in (timestep, timestep.flip(0))
    ]
    assert torch.equal(v, told[0])
    assert not torch.allclose(v, told[1], atol=1e-5)
    alone = model.predict(module, x[1:2], level[1:2], model.encode([second]))
    torch.testing.assert_close(v[1:2], alone, rtol=1e-4, atol=1e-5)
    changed = model.predict(module, x, level, model.encode([other, second, third]))
    assert not torch.allclose(v[0], changed[0], atol=1e-5)
    torch.testing.assert_close(v[1:], changed[1:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_deterministic_rollout_is_that_of_diffusers(unet: nn.Module) -> None:
    scheduler, cond = MODEL.build_scheduler(10), MODEL.encode(CODES)
    x = noise(3)
    for timestep in scheduler.timesteps:
        epsilon = unet(x, timestep, encoder_hidden_states=cond.tokens).sample
        x = scheduler.step(epsilon, timestep, x, eta=0.0).prev_sample
    torch.testing.assert_close(sample(unet, CODES), x, rtol=1e-5, atol=1e-5)


def test_training_noises_as_the_scheduler_does() -> None:
    """Levels are those of uniform timesteps; noised images and targets are DDIMScheduler's."""
    u = uniform(key(2), (20_000,))
    level = compute_levels(u, "epsilon")
    assert torch.equal(compute_levels(u, "velocity"), 3.0 * u / (1 + 2.0 * u))  # the transformer's, shifted
    timestep = find_timestep(level)
    assert torch.equal(timestep, (u * 1000).floor())
    assert torch.equal(
        compute_levels(torch.tensor([0.0, 1 - 2**-24]), "epsilon"), compute_alphas_cumprod(u.device)[[0, 999]]
    )
    x0, drawn = draw_codes(key(3), CODES), noise(3)
    batch = Noised(x0, drawn, level[:3], MODEL.encode(CODES))
    x, target = add_noise(*batch[:3], prediction="epsilon")
    expected = MODEL.build_scheduler(10).add_noise(x0, drawn, timestep[:3].long())
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(target, drawn)


@pytest.mark.parametrize("kind", ["handwriting", "handwriting-unet"])
def test_either_model_can_be_pre_trained(kind: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """The result is a folder with a record, which the model's class opens and the other class refuses."""
    made, other = (HandwritingUNet, Handwriting) if kind == "handwriting-unet" else (Handwriting, HandwritingUNet)
    recipe = (handwriting_unet_pretraining if made is HandwritingUNet else handwriting_pretraining)(tmp_path / "made")
    evaluated = []

    def few(job: Job, module: nn.Module, **options: Any) -> Evaluation:
        evaluated.append(type(job.model))
        return evaluate(job, module, **{**options, "samples": 4})

    monkeypatch.setattr("fluvial.bench.pretrain.evaluate", few)
    record = pretrain(replace(recipe, updates=2, batch=4, micro_batch=2))
    assert record == json.loads((tmp_path / "made" / "made-by.json").read_text())
    assert record["command"] == f"python -P -m fluvial.bench pretrain-{kind}"
    assert evaluated == [made]
    weights, fresh = (made(folder).build().state_dict() for folder in (tmp_path / "made", None))
    assert {name: tensor.shape for name, tensor in weights.items()} == {name: t.shape for name, t in fresh.items()}
    assert not all(torch.equal(weights[name], fresh[name]) for name in fresh)
    refuses("is not of the handwriting", other(tmp_path / "made").build)


def test_weights_are_read_as_diffusers_wrote_them(unet: nn.Module, tmp_path: Path) -> None:
    """diffusers' class loads the same tensors; another model's weights, missing ones and a .bin file are refused."""
    theirs, info = UNet2DConditionModel.from_pretrained(BASE_UNET, local_files_only=True, output_loading_info=True)
    assert not any(info.values())
    for name, tensor in load_file(BASE_UNET / "diffusion_pytorch_model.safetensors").items():
        assert torch.equal(tensor, unet.state_dict()[name])
        assert torch.equal(tensor, theirs.state_dict()[name])
    assert all(p.is_meta for p in MODEL.build(empty=True).parameters())
    random, again, another = (HandwritingUNet(None, seed=seed).build().get_parameter("conv_in.weight") for seed in (1, 1, 2))
    assert torch.equal(random, again)
    assert not torch.equal(random, another)
    (tmp_path / "pickled").mkdir()
    shutil.copy(BASE_UNET / "config.json", tmp_path / "pickled")
    torch.save(unet.state_dict(), tmp_path / "pickled" / "diffusion_pytorch_model.bin")
    for folder, message in (
        (BASE, "is not of the handwriting-unet model"),
        (tmp_path, "config.json is missing"),
        (tmp_path / "pickled", "there is no diffusion_pytorch_model.safetensors; only weights in the safetensors"),
    ):
        refuses(message, HandwritingUNet(folder).build)
    refuses("random weights cannot be built empty", HandwritingUNet(None).build, empty=True)


def test_the_record_of_the_base_model_is_true(unet: nn.Module) -> None:
    """The record of the weights, and the weights themselves: some held-out codes are correct, and many are not."""
    record = json.loads((BASE_UNET / "made-by.json").read_text())
    prompts = list(list_codes("heldout")[::32])
    images = MODEL.decode(sample(unet, prompts))
    assert images.shape == (len(prompts), 1, 8, 32)
    for name, recogniser in (("reward", load_reward_recogniser()), ("heldout", load_heldout_recogniser())):
        # Guessing gives a tenth of the digits; five standard errors of a mean over some 60 samples are 0.15.
        score = float(recogniser.characters(images, prompts).mean())
        assert score == pytest.approx(record["heldout_score"][name], abs=0.15)
