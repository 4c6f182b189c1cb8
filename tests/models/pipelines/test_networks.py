"""Networks and frozen parts of each adapter: built, filled from a folder, pure per sample, decoded in chunks."""

import shutil
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from helpers.marks import Folders
from helpers.refusals import refuses
from helpers.tiny_pipelines import (
    ROWS,
    STEPS,
    conditions,
    each_row,
    each_text_row,
    images_of,
    opened,
    sampled,
    save,
    start,
    theirs,
    wan,
)
from safetensors.torch import load_file

from fluvial.core.sigmas import shifted
from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.world import World
from fluvial.models.pipelines.flux import Flux
from fluvial.models.pipelines.wan import EXPERTS


@each_row
def test_an_empty_network_is_filled_from_the_folder(name: str, one: World, folders: Folders) -> None:
    model = opened(name, folders(name))
    whole, empty = model.build(), model.build(empty=True)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not any(parameter.is_meta for parameter in whole.parameters())
    filled = ShardedModule(empty, model.blocks(empty), one, EngineConfig(), weights=model.weights)
    x, cond = start(model, 2, ROWS[name].sizes[0]), model.encode(ROWS[name].prompts[:2])
    sigma = torch.tensor([0.3, 0.9])
    with filled.inference() as module:
        assert torch.equal(model.predict(module, x, sigma, cond), model.predict(whole, x, sigma, cond))


@pytest.mark.parametrize("name", ["sd3", "sd1"])
def test_weights_in_a_bin_file_are_never_loaded(name: str, folders: Folders, tmp_path: Path) -> None:
    """A .bin file is a pickle and may run code: it is refused when the model is opened, and if it appears later."""
    folder = tmp_path / "copy"
    shutil.copytree(folders(name), folder)
    model = opened(name, folder)
    parts = {model.part: "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}
    for part, file in parts.items():
        torch.save(load_file(folder / part / f"{file}.safetensors"), folder / part / f"{file}.bin")
        (folder / part / f"{file}.safetensors").unlink()
    refuses(r"is incomplete: there is no diffusion_pytorch_model\.safetensors", opened, name, folder)
    for other in (model, model.with_weights(folder / model.part)):
        with pytest.raises(OSError, match="safetensors"):
            other.build()
    with pytest.raises(OSError, match="safetensors"):
        _ = model.vae
    with pytest.raises(OSError, match="safetensors"):
        model.encode(ROWS[name].prompts[:1])


@each_row
def test_a_velocity_is_pure_and_per_sample(name: str, folders: Folders) -> None:
    """It is the same twice and independent of other samples; the timestep follows from the level; conditioning is cast."""
    row, model = ROWS[name], opened(name, folders(name))
    module, x, cond = model.build(), start(model, 3, row.sizes[1]), model.encode(row.prompts)
    schedule = model.schedule(STEPS, tuple(x.shape[1:]))
    sigma = schedule.levels[:STEPS]
    assert type(model) is row.adapter
    v = model.predict(module, x, sigma, cond)
    assert torch.equal(v, model.predict(module, x, sigma, cond))
    torch.testing.assert_close(v, model.predict(module, x, sigma, cond, timestep=schedule.timesteps), rtol=1e-5, atol=1e-5)
    alone = model.predict(module, x[1:2], sigma[1:2], optree.tree_map(lambda tensor: tensor[1:2], cond))
    torch.testing.assert_close(v[1:2], alone, rtol=1e-4, atol=1e-5)
    half, low = torch.bfloat16, model.build().bfloat16()
    cast = optree.tree_map(lambda tensor: tensor.to(half) if tensor.ndim > 1 else tensor, cond)
    assert torch.equal(model.predict(low, x.to(half), sigma, cond), model.predict(low, x.to(half), sigma, cast))


@each_text_row
def test_frozen_parts_are_loaded_when_they_are_used_and_decode_in_chunks(name: str, folders: Folders) -> None:
    """In evaluation mode and in the chosen dtype; text encoders can be released and are loaded again."""
    row, model = ROWS[name], opened(name, folders(name), dtype=torch.bfloat16)
    model.check_prompt(row.prompts[0])
    assert (model._text, model._vae) == (None, None)
    first = model.encode(row.prompts)
    text: Any = model._text
    encoders = [part for each, part in text.components.items() if part is not None and "encoder" in each]
    assert encoders
    assert text.vae is None
    assert model.decode(start(model, 1, row.sizes[0])).dtype == torch.float32
    for part in (*encoders, model.vae):
        assert part.dtype == torch.bfloat16
        assert not part.training
        assert not any(parameter.requires_grad for parameter in part.parameters())
    model.release()
    assert model._text is None
    assert all(map(torch.equal, optree.tree_leaves(first), optree.tree_leaves(model.encode(row.prompts))))
    row, model = ROWS[name], opened(name, folders(name), decode_chunk=2)
    latents = (3 * start(model, 3, row.sizes[0])).requires_grad_()
    sizes: list[int] = []
    handle = model.vae.decoder.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    found = model.decode(latents)
    handle.remove()
    assert list(dict.fromkeys(sizes)) == [2, 1]  # several times for a video
    assert found.shape == (3, 3, *row.sizes[0][2:], *row.sizes[0][:2])
    assert 0 <= found.min() < found.max() <= 1
    torch.testing.assert_close(found, torch.cat([model.decode(one) for one in latents.split(1)]), rtol=0, atol=1e-5)
    found.sum().backward()
    assert latents.grad is not None
    assert latents.grad.any()


def test_options_of_flux(folders: Folders) -> None:
    """Only a distilled FLUX depends on its guidance input; a shift of one's own moves the linear levels once."""
    for name, matters in (("flux", True), ("flux-schnell", False)):
        model = opened(name, folders(name), **({"embedded_guidance": 1.5} if matters else {}))
        module, x, cond = model.build(), start(model, 2, (16, 16)), model.encode(ROWS[name].prompts[:2])
        assert cond.guidance.tolist() == [1.5 if matters else 3.5] * 2
        other = cond._replace(guidance=torch.tensor([cond.guidance[0], 4.0]))
        a, b = (model.predict(module, x, torch.tensor([0.5, 0.5]), each) for each in (cond, other))
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1]) != matters
    for wrong, name in ((-1.0, "flux"), (True, "flux"), (2.0, "flux-schnell")):
        refuses(f"embedded_guidance is {wrong}, ", Flux, folders(name), embedded_guidance=wrong)
    folder = folders("flux")
    shifted_model, plain = opened("flux", folder, shift=3.0), opened("flux", folder)
    shape = plain.latent_shape(*ROWS["flux"].sizes[0])
    found = shifted_model.schedule(10, shape)
    torch.testing.assert_close(found.levels, shifted(10, 3.0), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(plain.schedule(10, shape).levels, found.levels)
    refuses("shift is 3.0", opened, "sd1", folders("sd1"), shift=3.0)


def test_wan_with_one_timestep_per_token_makes_the_images_of_the_pipeline(tmp_path: Path) -> None:
    """Wan 2.2's small model gets one timestep per token, which are all equal for text to video."""
    row = ROWS["wan"]._replace(make=lambda: wan(timestep_per_token=True))
    folder = save(row, tmp_path / "wan")
    model, pipeline = opened("wan", folder), theirs(row, folder)
    x = start(model, 2, row.sizes[0])
    schedule = model.schedule(STEPS, tuple(x.shape[1:]))
    expected = images_of(row, pipeline, model, x, row.prompts[:2], 3.5)
    found = model.decode(sampled(model, model.build(), x, conditions(model, row.prompts[:2], 3.5), schedule).final)
    assert pipeline.config.expand_timesteps
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_each_expert_computes_its_side(folders: Folders) -> None:
    model = opened("wan-experts", folders("wan-experts"))
    experts: Any = model.build()
    x, cond = start(model, 3, (16, 16)), model.encode(ROWS["wan-experts"].prompts)
    one = opened("wan", folders("wan"))
    first, second = (one.predict(experts[part], x, torch.tensor([0.9, 0.8, 0.3]), cond) for part in EXPERTS)
    ran: list[str] = []
    for part in EXPERTS:
        experts[part].register_forward_hook(lambda module, args, out, part=part: ran.append(part))
    mixed = model.predict(experts, x, torch.tensor([0.9, 0.8, 0.3]), cond)
    assert ran == list(EXPERTS)
    assert torch.equal(mixed, torch.cat([first[:2], second[2:]]))
    for level, part in ((0.8, EXPERTS[0]), (0.7, EXPERTS[1])):
        ran.clear()
        experts.zero_grad()
        model.predict(experts, x, torch.full((3,), level), cond).sum().backward()
        assert ran == [part]
        for each in EXPERTS:
            assert (experts[each].proj_out.weight.grad is None) == (each != part)
