"""Each adapter makes the images of its pipeline, on policy and trainable, and its exports open there."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lora_model import perturb
from helpers.marks import Folders
from helpers.tiny_pipelines import ROWS, STEPS, conditions, each_row, images_of, noisy, opened, sampled, start, theirs
from helpers.tolerances import rounding_tolerance
from torch import Tensor, nn

from fluvial.core import gaussian
from fluvial.engines.engine.world import World
from fluvial.engines.export.model_folder import export, write_lora
from fluvial.models.guidance import guided_velocity
from fluvial.models.lora import LoraConfig, add_lora


@pytest.mark.bits
@each_row
@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_the_ode_makes_the_images_of_the_pipeline(name: str, scale: float, folders: Folders) -> None:
    """From the same noise, prompts and guidance; to the bit where both compute batches of the same size."""
    row, folder = ROWS[name], folders(name)
    model, pipeline = opened(name, folder), theirs(row, folder)
    module = model.build()
    for size in row.sizes[:1] if row.variant else row.sizes:
        for count in (3, 1):
            x, prompts = start(model, count, size), row.prompts[:count]
            schedule = model.schedule(STEPS, tuple(x.shape[1:]))
            compute = partial(images_of, row, pipeline, model, x, prompts, scale)
            expected = compute()
            if count == 3:
                tolerance = rounding_tolerance(compute, networks(pipeline), expected)
            assert torch.equal(schedule.levels, levels_of(pipeline.scheduler))
            assert torch.equal(schedule.timesteps, pipeline.scheduler.timesteps)
            assert expected.std() > 0.05
            assert len(torch.unique(expected.flatten(1)[:, 0])) == count
            if count == 3 and size == row.sizes[0]:  # prompt and guidance count
                for others, other in ((prompts, 4.5 - scale), ((*prompts[1:], prompts[0]), scale)):
                    changed = images_of(row, pipeline, model, x, others, other)
                    assert (changed - expected).abs().flatten(1).amax(1).min() > 1e-4
            for forwards in ("one",) if scale == 1 else ("one", "two"):
                latents = sampled(model, module, x, conditions(model, prompts, scale), schedule, forwards=forwards).final
                found = model.decode(latents)
                torch.testing.assert_close(found, expected, **tolerance)
                assert (count, scale, row.exact) != (1, 1.0, True) or torch.equal(found, expected)


def networks(pipeline: Any) -> list[nn.Module]:
    return [part for part in pipeline.components.values() if isinstance(part, nn.Module)]


def levels_of(scheduler: Any) -> Tensor:
    if type(scheduler).__name__ != "DDIMScheduler":
        return scheduler.sigmas
    before = scheduler.timesteps - 1000 // STEPS
    assert torch.equal(before[:-1], scheduler.timesteps[1:])
    assert before[-1] < 0
    return torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], scheduler.final_alpha_cumprod[None]])


@each_row
def test_every_block_is_adapted(name: str, folders: Folders) -> None:
    row, model = ROWS[name], opened(name, folders(name))
    module = model.build()
    kinds = {type(block) for block in model.blocks(module)}
    assert sum(type(each) in kinds for each in module.modules()) == len(model.blocks(module)) + row.apart > 1
    add_lora(module, LoraConfig(rank=2), model.lora_targets)
    for block in model.blocks(module):
        assert any(".lora_A." in each for each, _ in block.named_parameters())


@pytest.mark.bits
@each_row
@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_on_policy_the_ratio_is_exactly_one(name: str, scale: float, folders: Folders) -> None:
    """Log-probabilities computed from the stored trajectory are those of the rollout, to the bit."""
    row, model = ROWS[name], opened(name, folders(name))
    module, x = model.build(), start(model, 3, row.sizes[1])
    schedule, cond = model.schedule(STEPS, tuple(x.shape[1:])), conditions(model, row.prompts[:3], scale)
    eta = 0.7 if model.prediction == "velocity" else 1.0
    trajectory = sampled(model, module, x, cond, schedule, eta=eta)
    levels = schedule.levels
    for place, step in enumerate(trajectory.steps[0].tolist()):
        sigma, sigma_next = (levels[at].expand(3).contiguous() for at in (step, step + 1))
        before, after = trajectory.x[:, place], trajectory.x_next[:, place]
        timestep = schedule.timesteps[step].expand(3)
        v = guided_velocity(model, module, before, sigma, cond, timestep=timestep)
        coefficients = noisy(model, schedule, eta)(sigma, sigma_next)
        again = gaussian.log_prob(coefficients, before, v, after)
        assert torch.equal(again, trajectory.log_prob[:, place])
        assert again.requires_grad
    assert trajectory.log_prob.isfinite().all()


@each_row
@pytest.mark.parametrize("lora", [False, True])
def test_every_trained_parameter_gets_a_gradient(name: str, lora: bool, folders: Folders) -> None:
    row, model = ROWS[name], opened(name, folders(name))
    module = model.build()
    if lora:
        add_lora(module, LoraConfig(rank=2), model.lora_targets)
        perturb(module)
    x, cond = start(model, 3, row.sizes[1]), model.encode(row.prompts)
    v = model.predict(module, x, torch.tensor([0.9, 0.5, 0.2]), cond)
    assert v.shape == x.shape
    (v * torch.randn(v.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    trained = {each: parameter for each, parameter in module.named_parameters() if parameter.requires_grad}
    assert len(trained) > (5 if lora else 20)
    for each, parameter in trained.items():
        gradient = parameter.grad
        if each.startswith(row.idle):
            assert gradient is None or not gradient.any(), each
        else:
            assert gradient is not None, each
            assert gradient.isfinite().all(), each
            assert gradient.any(), each


@each_row
def test_a_trained_adapter_makes_the_same_images_in_the_pipeline(
    name: str, tmp_path: Path, one: World, folders: Folders
) -> None:
    row, folder = ROWS[name], folders(name)
    model, pipeline = opened(name, folder), theirs(row, folder)
    module, x = model.build(), start(model, 2, row.sizes[0])
    prompts, schedule = row.prompts[:2], model.schedule(STEPS, tuple(x.shape[1:]))
    cond = model.encode(prompts)
    before = images_of(row, pipeline, model, x, prompts, 1.0)
    add_lora(module, LoraConfig(rank=2, alpha=3.0), model.lora_targets)
    perturb(module)
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=0.05)
    model.predict(module, x, torch.tensor([0.9, 0.4]), cond).square().sum().backward()
    optimizer.step()
    write_lora(module, tmp_path, world=one)
    row.load_lora(pipeline, tmp_path)
    expected = images_of(row, pipeline, model, x, prompts, 1.0)
    found = model.decode(sampled(model, module, x, cond, schedule).final)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (expected - before).abs().max() > 1e-2


@each_row
def test_a_full_export_opens_in_the_pipeline(name: str, tmp_path: Path, one: World, folders: Folders) -> None:
    row, folder = ROWS[name], folders(name)
    model = opened(name, folder)
    module = model.build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)
    shutil.copytree(folder, tmp_path / "trained")
    export(module, tmp_path / "trained" / ("" if isinstance(module, nn.ModuleDict) else model.part), world=one)
    trained, x = opened(name, tmp_path / "trained"), start(model, 1, row.sizes[0])
    again = trained.build().state_dict()
    assert all(torch.equal(tensor, again[each]) for each, tensor in module.state_dict().items())
    schedule = model.schedule(STEPS, tuple(x.shape[1:]))
    expected = images_of(row, theirs(row, tmp_path / "trained"), model, x, row.prompts[:1], 1.0)
    found = model.decode(sampled(model, module, x, model.encode(row.prompts[:1]), schedule).final)
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if row.exact else 1e-5)
