"""Sharpness: against scipy's Laplacian, lower after a blur, and 0 without detail."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from fluvial.models.rewards.sharpness import sharpness


@given(seed=st.integers(0, 2**31), channels=st.sampled_from([1, 3]), height=st.integers(3, 9), width=st.integers(3, 9))
def test_it_is_the_variance_of_the_laplacian_inside(seed: int, channels: int, height: int, width: int) -> None:
    """Of the mean of the channels; a video's is the mean of its frames'."""
    video = torch.rand(2, channels, 3, height, width, generator=torch.Generator().manual_seed(seed))
    expected = [
        [ndimage.laplace(frame.double().mean(0).numpy())[1:-1, 1:-1].var() for frame in sample.unbind(1)] for sample in video
    ]
    torch.testing.assert_close(sharpness(video, ["", ""]).double(), torch.tensor(expected).mean(1), rtol=1e-4, atol=1e-6)
    first = sharpness(video[:, :, 0], ["", ""])
    torch.testing.assert_close(first.double(), torch.tensor(expected)[:, 0], rtol=1e-4, atol=1e-6)


def test_a_blur_lowers_it_and_gradients_flow() -> None:
    """An image of one colour has 0."""
    image = torch.rand(1, 3, 16, 16, requires_grad=True)
    blurred = torch.nn.functional.avg_pool2d(image, 3, 1, 1)
    assert sharpness(blurred, [""]) < 0.5 * sharpness(image, [""])
    (slope,) = torch.autograd.grad(sharpness(image, [""]).sum(), image)
    assert slope.abs().sum() > 0
    assert sharpness(torch.full((1, 3, 8, 8), 0.3), [""]).item() == pytest.approx(0, abs=1e-12)
