"""Initial samples that are noise and an image."""

import pytest
import torch
from helpers.refusals import refuses
from hypothesis import given
from hypothesis import strategies as st

from fluvial.models.replay.checks import ReplayError
from fluvial.models.replay.start import Mixture, ZeroNoise, add_offset, find_start, find_step_counts, remove_offset


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_and_image_are_told_apart(dtype: torch.dtype) -> None:
    eps, image, sigma = noise(3, 4, 2, 2).to(dtype), noise(1, 4, 2, 2, seed=1).to(dtype), 0.6
    mixed = (sigma * eps + (1 - sigma) * image).to(dtype)
    other = Mixture(image, noise(2, 4, 2, 2), noise(2, 4, 2, 2))
    found = find_start("P", packed(mixed), [Mixture(image, eps, mixed), other], sigma, fail)
    assert found is not None
    assert torch.equal(found.noise, packed(eps).float())
    torch.testing.assert_close(found.offset, 0.4 * packed(image).expand(3, -1, -1).float())
    eps, image = noise(3, 4, 2, 2).to(dtype), noise(1, 4, 2, 2, seed=1).to(dtype).expand(3, -1, -1, -1)
    found = find_start("P", 0.6 * eps + 0.4 * image, [], 0.6, lambda: 0.4 * image)
    assert found is not None
    torch.testing.assert_close(found.noise, eps.float(), rtol=0, atol=1e-6 if dtype == torch.float32 else 0.03)
    assert torch.equal(found.offset, (0.4 * image).float())
    assert find_start("P", eps, [], 0.6, lambda: torch.zeros_like(eps)) is None


def fail() -> torch.Tensor:
    raise AssertionError("no run without noise is needed")


def test_no_noise_is_drawn_on_request() -> None:
    with ZeroNoise():
        drawn = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
        assert not drawn.any()
        assert torch.rand(2, 3).any()
    assert torch.randn(2, 3).any()


def test_other_samples_are_refused() -> None:
    eps, image = noise(3, 4, 2, 2), noise(1, 4, 2, 2, seed=1)
    mixed = 0.6 * eps + 0.4 * image
    for initial, sigma in ((mixed + 1, 0.6), (mixed, 0.3)):
        with pytest.raises(
            ReplayError, match=f"it starts at noise level {sigma}, from samples that are not a mixture of noise and"
        ):
            find_start("P", initial, [Mixture(image, eps, mixed)], sigma, fail)


@given(steps=st.integers(1, 60), strength=st.floats(0.05, 1))
def test_the_steps_that_are_left_are_those_asked_for(steps: int, strength: float) -> None:
    counts = find_step_counts(steps, strength)
    up, down = counts[0], counts[-1]
    assert up - int(max(up - min(up * strength, up), 0)) == steps
    assert down - max(down - min(int(down * strength), down), 0) == steps
    refuses("strength is 0, with which no schedule takes 3 steps", find_step_counts, 3, 0.0)


def test_the_coordinates_are_each_others_inverse() -> None:
    x, offset = noise(2, 5, 4), noise(2, 4, seed=1)
    for step in range(5):
        torch.testing.assert_close(add_offset(remove_offset(x, 0.7, offset)[:, step], 0.7, offset), x[:, step])
