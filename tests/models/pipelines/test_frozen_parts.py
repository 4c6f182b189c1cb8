"""Frozen parts with less memory: quantised text encoders, and a VAE in tiles, in a dtype of its own, and off the device."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import Folders, Patch
from helpers.refusals import refuses
from helpers.tiny_pipelines import ROWS, opened
from torch import Tensor

from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.models.pipelines import base, unfilled
from fluvial.models.pipelines.base import VaeOptions
from fluvial.models.quantised import find_quantised


@pytest.mark.long
@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_quantised_text_encoders_encode_nearly_the_same(name: str, folders: Folders, tmp_path: Path) -> None:
    plain, quantised = (opened(name, folders(name), cache=tmp_path, text_base=base) for base in (None, "int8"))
    prompts = ROWS[name].prompts[:2]
    expected, found = plain.encode(prompts), quantised.encode(prompts)
    assert not torch.equal(found.tokens, expected.tokens)
    assert torch.cosine_similarity(found.tokens.flatten(), expected.tokens.flatten(), dim=0) > 0.98
    assert plain._fingerprint_encoders() != quantised._fingerprint_encoders()
    for part in (part for part in quantised.parts if part.startswith("text_encoder")):
        held = getattr(quantised._text, part)
        assert find_quantised(held)
        import transformers

        options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
        empty = unfilled.build_network(transformers, quantised.parts[part], quantised.folder / part, base="int8", **options)
        assert sum(t.nbytes for t in empty.buffers()) == pytest.approx(sum(t.nbytes for t in held.buffers()), rel=0.01)
    again = opened(name, folders(name), cache=tmp_path, text_base="int8").encode(prompts)
    assert torch.equal(again.tokens, found.tokens)


@pytest.mark.parametrize("name", ["sd3", pytest.param("wan", marks=pytest.mark.long)])
def test_tiles_decode_as_the_pipelines_own_do(name: str, folders: Folders) -> None:
    whole, tiled = opened(name, folders(name)), opened(name, folders(name), vae=VaeOptions(tile=64))
    frames = 1 if name == "sd3" else 5
    *channels, height, width = whole.latent_shape(32, 32, frames)
    latents = torch.randn(2, *channels, 8 * height, 8 * width, generator=torch.Generator().manual_seed(0))
    peaks, images = [], list[Tensor]()
    for model in (whole, tiled):
        with torch.no_grad(), LiveStorages([*model.vae.parameters(), *model.vae.buffers()]) as live:
            images.append(model.decode(latents))
        peaks.append(live.peak)
    assert images[0].shape == images[1].shape
    assert peaks[1] < 0.6 * peaks[0]
    tiled.vae.disable_tiling()
    one_by_one = torch.cat([tiled.decode(latents[i : i + 1]) for i in range(2)])
    tiled.vae.use_tiling = True
    assert not torch.equal(images[1], one_by_one)
    assert name == "sd3" or tiled.vae.tile_sample_stride_width == 48  # tiles overlap by a quarter
    assert torch.equal(torch.cat([tiled.decode(latents[i : i + 1]) for i in range(2)]), images[1])


def test_a_vae_has_a_dtype_of_its_own_and_tiles_if_it_can(folders: Folders, monkeypatch: Patch) -> None:
    model = opened("sd3", folders("sd3"), dtype=torch.bfloat16, vae=VaeOptions(dtype=torch.float32))
    assert {p.dtype for p in model.vae.parameters()} == {torch.float32}
    expected = opened("sd3", folders("sd3"))
    latents = torch.randn(1, *model.latent_shape(32, 32))
    assert torch.equal(model.decode(latents), expected.decode(latents))
    other = opened("sd3", folders("sd3"), dtype=torch.bfloat16)
    assert other.decode(latents).dtype == torch.float32
    assert model.fingerprint_image_encoder() != other.fingerprint_image_encoder()
    model = opened("sd3", folders("sd3"), vae=VaeOptions(tile=64))
    monkeypatch.setattr(model, "_vae", torch.nn.Linear(1, 1))
    refuses("has a Linear, which does not work in tiles", model._set_tiles)


def test_a_vae_is_on_the_device_only_while_it_works(folders: Folders, monkeypatch: Patch) -> None:
    model = opened("sd3", folders("sd3"), vae=VaeOptions(on_host=True))
    moves: list[str] = []
    latents = torch.randn(1, *model.latent_shape(32, 32))
    real = model.vae.to

    def moved(device: Any) -> Any:
        with ThreadPoolExecutor(1) as other:  # another thread cannot move it meanwhile
            assert not other.submit(base.VAE_LOCK.acquire, blocking=False).result()
        moves.append(str(device))
        return real(device)

    monkeypatch.setattr(model.vae, "to", moved)
    model.device = torch.device("cpu", 0)
    with torch.no_grad():
        model.decode(latents)
        model.encode_images(torch.rand(1, 3, 32, 32))
    assert moves == ["cpu:0", "cpu"] * 2
    model.decode(latents.requires_grad_()).sum().backward()
    assert moves[4:] == ["cpu:0"]
    assert latents.grad is not None
