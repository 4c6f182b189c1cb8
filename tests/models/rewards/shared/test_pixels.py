"""Preprocessing on the device: PIL's bits, the processors of transformers, and the gradients of the plain resize."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_rewards
from helpers.refusals import refuses
from PIL import Image
from torch.nn import functional

from fluvial.core.random import key, uniform
from fluvial.models.rewards.shared import pixels
from fluvial.models.rewards.shared.pixels import Preprocess

SIZES = [(41, 53, 30, 38), (53, 41, 60, 47), (20, 20, 30, 30), (64, 64, 64, 21), (7, 200, 30, 3), (30, 30, 30, 30)]


def as_pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


@pytest.mark.parametrize(
    ("resample", "filter_"), [("bicubic", Image.Resampling.BICUBIC), ("bilinear", Image.Resampling.BILINEAR)]
)
@pytest.mark.parametrize(("height", "width", "to_height", "to_width"), SIZES)
def test_resize_has_the_bits_of_pil(
    height: int, width: int, to_height: int, to_width: int, resample: str, filter_: Image.Resampling
) -> None:
    noise = (uniform(key(1), (2, 3, height, width)) * 2).clamp(0, 1)
    found = pixels.resize(pixels.to_bytes(noise), (to_height, to_width), resample)
    for image, resized in zip(noise, found, strict=True):
        expected = np.array(as_pil(image).resize((to_width, to_height), filter_)).astype(np.float64)
        assert np.array_equal(resized.permute(1, 2, 0).numpy(), expected)


def processors() -> list[tuple[str, Any]]:
    import transformers.models.clip.image_processing_pil_clip as clip
    import transformers.models.got_ocr2.image_processing_pil_got_ocr2 as got
    import transformers.models.siglip.image_processing_pil_siglip as siglip

    return [
        ("clip", clip.CLIPImageProcessorPil(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30})),
        ("crop", clip.CLIPImageProcessorPil(size={"shortest_edge": 33}, crop_size={"height": 20, "width": 28})),
        ("siglip", siglip.SiglipImageProcessorPil(size={"height": 24, "width": 32})),
        ("got_ocr", got.GotOcr2ImageProcessorPil(size={"height": 64, "width": 64})),
    ]


@pytest.mark.parametrize("number", range(4), ids=["clip", "crop", "siglip", "got_ocr"])
@pytest.mark.parametrize(("height", "width"), [(41, 53), (53, 41), (30, 30), (19, 90)])
def test_preprocessing_is_that_of_the_published_processor(number: int, height: int, width: int) -> None:
    _, processor = processors()[number]
    images = tiny_rewards.images(2, height, width)
    given = [as_pil(image) for image in images]
    if (
        number == 2
    ):  # squeezed: the width first, as all versions of PIL before 13 do, which takes the axis that is cheaper first
        given = [image.resize((32, height), Image.Resampling.BICUBIC) for image in given]
    expected = processor(given, return_tensors="pt")["pixel_values"]
    found = pixels.read_preprocess(processor.to_dict())(images)
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-5)


def test_gradients_are_those_of_the_resize_without_rounding() -> None:
    images = (uniform(key(2), (2, 3, 41, 53), dtype=torch.float64) * 0.4 + 0.3).requires_grad_()
    weights = uniform(key(3), (2, 3, 30, 38), dtype=torch.float64)
    (pixels.resize(pixels.to_bytes(images), (30, 38)) / 255 * weights).sum().backward()
    found, images.grad = images.grad, None
    plain = functional.interpolate(images, (30, 38), mode="bicubic", antialias=True, align_corners=False)
    (plain * weights).sum().backward()
    assert found is not None
    assert images.grad is not None
    torch.testing.assert_close(found, images.grad, rtol=1e-5, atol=1e-6)
    images = tiny_rewards.images()
    preprocess = Preprocess(30, (30, 30))
    assert torch.equal(preprocess(images.clone().requires_grad_()).detach(), preprocess(images))


def test_shapes_of_squares_and_frames() -> None:
    image = torch.ones(1, 3, 20, 60, dtype=torch.float64)
    padded = pixels.pad_to_square(image, 30)
    assert padded.shape == (1, 3, 30, 30)
    torch.testing.assert_close(padded[:, :, 10:20], torch.ones(1, 3, 10, 30, dtype=torch.float64))
    assert padded[:, :, :10].abs().sum() + padded[:, :, 20:].abs().sum() == 0
    square = uniform(key(4), (1, 3, 30, 30), dtype=torch.float64)
    assert torch.equal(pixels.pad_to_square(square, 30), square)
    video = torch.arange(9.0).view(1, 1, 9, 1, 1).expand(2, 1, 9, 4, 5)
    assert pixels.extract_frames(video, 3)[0, :, 0, 0, 0].tolist() == [0, 4, 8]
    assert pixels.extract_frames(video, 3).shape == (2, 3, 3, 4, 5)
    assert pixels.extract_frames(video, 20).shape == (2, 9, 3, 4, 5)
    assert pixels.extract_frames(video[:, :, 0], 8).shape == (2, 1, 3, 4, 5)
    refuses(r"images have the shape \[3, 4, 5\], expected \[B, C, H, W\]", pixels.extract_frames, torch.zeros(3, 4, 5), 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"resample": 1}, "resample=1"),
        ({"do_resize": False}, "do_resize=false"),
        ({"size": {"longest_edge": 30}}, "size="),
        ({"crop_size": 40}, "expected a smaller crop"),
        ({"image_mean": None}, "image_mean"),
    ],
)
def test_settings_that_are_not_supported_are_named(changed: dict[str, Any], message: str) -> None:
    refuses(message, pixels.read_preprocess, {**tiny_rewards.clip_settings(), **changed})


def test_settings_old_and_unsupported(tmp_path: Path) -> None:
    """OpenAI's and LAION's files give sizes as one number."""
    old = {**tiny_rewards.clip_settings(), "size": 30, "crop_size": 30}
    assert pixels.read_preprocess(old) == pixels.read_preprocess(tiny_rewards.clip_settings())
    from fluvial.models.rewards.shared.loading import load_preprocess

    refuses(f"the image processor of {tmp_path} cannot be loaded", load_preprocess, str(tmp_path), None)
