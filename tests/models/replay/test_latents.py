"""The way from samples to a VAE's latents, found by probing, and ways that cannot be inverted."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from helpers.refusals import refuses
from torch import Tensor

from fluvial.models.replay.checks import ReplayError
from fluvial.models.replay.latents import capture_vae_input, find_latent_layout, to_samples

SHAPE = (4, 5, 5)  # 100 elements: places of two digits


def packed(x: Tensor) -> Tensor:
    return (3 * x - torch.arange(4.0)[:, None, None]).flatten(2).transpose(1, 2)


def test_a_scaled_rearrangement_is_found_and_inverted() -> None:
    draws = torch.Generator().manual_seed(0)
    place, scale, offset = torch.randperm(600, generator=draws), torch.rand(600, generator=draws) - 1.5, torch.randn(600)
    found = find_latent_layout(lambda x: (x.flatten(1)[:, place] * scale + offset).view(1, 6, 10, 10), (60, 10), "P")
    assert torch.equal(found.element, place)
    torch.testing.assert_close(found.scale, scale)
    layout = find_latent_layout(packed, SHAPE, "P")
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert layout.shape == (25, 4)
    torch.testing.assert_close(to_samples(packed(x), layout, SHAPE), x)
    refuses(r"^the images give latents of \[24, 4\], expected \[25, 4\]$", to_samples, packed(x)[:, 1:], layout, SHAPE)


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "cut": (lambda x: x[:, :3], "its VAE is given 75 latents, 75 of them depend on the sample, expected 100"),
    "constant": (lambda x: 0 * x, "its VAE is given 100 latents, 0 of them depend on the sample, expected 100"),
    "summed": (lambda x: packed(x).flatten(1).cumsum(1), "not a scaled rearrangement"),
    "bent": (torch.tanh, "its VAE is given latents that are not a scaled rearrangement of samples"),
    "doubled": (lambda x: x[:, [0, 0, 1, 2]], "not a scaled rearrangement"),
}


@pytest.mark.parametrize("name", WAYS)
def test_other_ways_are_refused(name: str) -> None:
    way, says = WAYS[name]
    with pytest.raises(ReplayError, match=f"^P cannot be trained without an adapter: .*{says}"):
        find_latent_layout(way, SHAPE, "P")


@pytest.mark.parametrize("calls", [0, 2])
def test_a_vae_that_is_not_called_once_is_refused(calls: int) -> None:
    vae = SimpleNamespace(decode=lambda z: z)
    own = vae.decode
    with pytest.raises(ReplayError, match=f"it calls its VAE {calls} times to decode samples, expected once"):
        capture_vae_input(vae, lambda: [vae.decode(torch.zeros(1)) for _ in range(calls)], "P")
    assert vae.decode is own
