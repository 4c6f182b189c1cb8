"""Rewards without a model: file sizes in kilobytes, both ways; sharpness against scipy's Laplacian, lower after a blur."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from fluvial.core.random import key, uniform
from fluvial.models.rewards.plain import jpeg_compressibility, jpeg_incompressibility, sharpness

PROMPTS = ["", "", ""]


def images() -> torch.Tensor:
    ramp = torch.linspace(0, 1, 32).expand(3, 32, 32)
    return torch.stack([torch.full((3, 32, 32), 0.5), ramp, uniform(key(0), (3, 32, 32))])


def test_incompressibility_is_the_size_of_the_jpeg_file() -> None:
    for image, found in zip(images(), jpeg_incompressibility(images(), PROMPTS), strict=True):
        file = io.BytesIO()
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(file, format="JPEG", quality=95)
        assert float(found) == torch.tensor(file.tell() / 1000).item()


def test_one_reward_is_minus_the_other_and_frames_are_averaged() -> None:
    smaller = jpeg_compressibility(images(), PROMPTS)
    assert torch.equal(smaller, -jpeg_incompressibility(images(), PROMPTS))
    assert smaller.shape == (3,)
    assert smaller[0] > smaller[1] > smaller[2]
    video = images().transpose(0, 1)[None]  # [1, 3, F, H, W]
    expected = jpeg_incompressibility(images(), PROMPTS).double().mean()
    torch.testing.assert_close(jpeg_incompressibility(video, [""])[0].double(), expected, rtol=1e-6, atol=0)


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
