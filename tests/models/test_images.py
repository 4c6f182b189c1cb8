"""Images to samples and back, for every pipeline: with a VAE that loses nothing, nothing is lost."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_replayed
from helpers.marks import Folders, Patch
from helpers.refusals import refuses
from helpers.tiny_pipelines import ROWS, opened
from torch import Tensor

from fluvial.core.random import fold_in, key

STD = 0.5  # of the VAE's distribution
KINDS = {name: row for name, row in ROWS.items() if not row.variant}
WITHOUT = tiny_replayed.WITHOUT_ADAPTER


class Lossless:
    """Stands in for a VAE: the mean of each block of pixels is the first three latents; the rest are zeros."""

    def __init__(self, vae: Any, scale: int, rate: int, distribution: bool) -> None:
        self.vae, self.scale, self.rate, self.distribution = vae, scale, rate, distribution
        self.channels = 0

    def encode(self, x: Tensor) -> Any:
        videos = x if x.ndim == 5 else x.unsqueeze(2)
        latents = videos[:, :, :: self.rate, :: self.scale, :: self.scale]
        extra = latents.new_zeros(len(x), self.channels - 3, *latents.shape[2:])
        latents = torch.cat([latents, extra], dim=1)
        latents = latents if x.ndim == 5 else latents.squeeze(2)
        if not self.distribution:
            return SimpleNamespace(latent=latents)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents, std=torch.full_like(latents, STD)))

    def decode(self, z: Tensor, *args: Any, **options: Any) -> tuple[Tensor]:
        self.channels = z.shape[1]
        latents = (z if z.ndim == 5 else z.unsqueeze(2))[:, :3]
        first, later = latents[:, :, :1], latents[:, :, 1:].repeat_interleave(self.rate, 2)
        videos = torch.cat([first, later], dim=2).repeat_interleave(self.scale, 3).repeat_interleave(self.scale, 4)
        return (videos if z.ndim == 5 else videos.squeeze(2),)


def blocks(count: int, height: int, width: int, scale: int, frames: tuple[int, ...] = (), rate: int = 1) -> Tensor:
    groups = [1 + (number - 1) // rate for number in frames]
    drawn = torch.rand(count, 3, *groups, height // scale, width // scale, generator=torch.Generator().manual_seed(0))
    large = drawn.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    return torch.cat([large[:, :, :1], large[:, :, 1:].repeat_interleave(rate, 2)], dim=2) if frames else large


def made_lossless(model: Any, scale: int, rate: int, monkeypatch: Patch, *, distribution: bool = True) -> Lossless:
    stand_in = Lossless(model.vae, scale, rate, distribution)
    for name in ("encode", "decode"):
        monkeypatch.setattr(model.vae, name, getattr(stand_in, name), raising=False)
    return stand_in


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_decodes_what_it_encodes(folders: Folders, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale, shift and packing are undone, for each size; samples have the shape that the network takes."""
    model: Any = opened(name, folders(name))
    rate = model.vae_config.get("scale_factor_temporal", 1)
    for size in KINDS[name].sizes[:2]:
        made_lossless(model, model.vae_scale, rate, monkeypatch).channels = model.latent_shape(*size)[0]
        images = blocks(3, size[0], size[1], model.vae_scale, size[2:], rate)
        samples = model.encode_images(images)
        assert samples.shape == (3, *model.latent_shape(*size))
        decoded = model.decode(samples)
        expected = images if decoded.ndim == images.ndim else images.unsqueeze(2)  # a video of one frame
        torch.testing.assert_close(decoded, expected, rtol=0, atol=1e-5)
        keys = fold_in(key(0), torch.arange(3))
        drawn = model.encode_images(images, key=keys)
        assert not torch.equal(drawn, samples)
        # A sample depends on its own key alone.
        torch.testing.assert_close(model.encode_images(images[1:2], key=fold_in(key(0), torch.tensor([1])))[0], drawn[1])


@pytest.mark.parametrize("name", KINDS)
def test_samples_are_the_vaes_own_mean(folders: Folders, name: str) -> None:
    """With the real VAE: what its decoder would be given is what its encoder returned; grey images count as colour."""
    model: Any = opened(name, folders(name))
    size, seen = KINDS[name].sizes[0], []
    images = torch.rand(2, 1, *size[2:], *size[:2], generator=torch.Generator().manual_seed(0))
    model.decode_with_vae = lambda z: seen.append(z) or z  # type: ignore[func-returns-value]
    model.decode(model.encode_images(images))
    coloured = images.expand(-1, 3, *images.shape[2:]) * 2 - 1
    dims = seen[0].ndim - coloured.ndim
    expected = model.vae.encode(coloured.unsqueeze(2) if dims else coloured).latent_dist.mean
    torch.testing.assert_close(seen[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_pipeline_without_an_adapter_decodes_what_it_encodes(
    replayed: Folders, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own way from samples to the VAE, packing and normalisation included, is walked backwards."""
    model = tiny_replayed.opened(name, replayed(name), device="cpu")
    height, width = model.call_arguments["height"], model.call_arguments["width"]
    scale = height // model._capture_vae_input(torch.zeros(1, *model.known.shape)).shape[-2]
    has_distribution = hasattr(model.vae.encode(torch.zeros(1, 3, height, width)), "latent_dist")
    stand_in = made_lossless(model, scale, 1, monkeypatch, distribution=has_distribution)
    stand_in.channels = model._capture_vae_input(torch.zeros(1, *model.known.shape)).shape[1]
    images = blocks(2, height, width, scale)
    samples = model.encode_images(images)
    assert samples.shape == (2, *model.known.shape)
    torch.testing.assert_close(model.decode(samples), images, rtol=0, atol=1e-4)
    if not has_distribution:
        refuses("has no distribution to sample from", model.encode_images, images, key=fold_in(key(0), torch.arange(2)))
