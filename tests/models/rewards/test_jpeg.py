"""JPEG rewards: file sizes in kilobytes, both ways."""

import io

import torch
from PIL import Image

from fluvial.core.random import key, uniform
from fluvial.models.rewards.jpeg import jpeg_compressibility, jpeg_incompressibility

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
