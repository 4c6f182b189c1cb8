"""Preprocessing of images on their device: the values of the published processors, with gradients.

The processors resize with PIL, whose filters work on integers: 8 bits per value, 22 bits per coefficient. The same products
in float64 are exact, so that the result has PIL's bits on any device. In the backward pass every rounding is the identity.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
PRECISION = 22  # fractional bits of PIL's coefficients
FILTERS = {2: "bilinear", 3: "bicubic"}  # numbers of PIL's filters in a preprocessor_config.json


@dataclass(frozen=True)
class Preprocess:
    """Resizing, centre crop and normalisation of images, as a `preprocessor_config.json` describes them.

    Args:
        size: length of the shorter edge, or height and width, that images are resized to.
        crop: height and width of the centre crop, or None.
        mean, std: mean and standard deviation of each channel, of values in [0, 1].
        resample: name of PIL's filter, see `FILTERS`, or "tensor" for torchvision's bilinear filter on tensors, which does
            not round as PIL does, with torchvision's centre of the crop.
    """

    size: int | tuple[int, int]
    crop: tuple[int, int] | None = None
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    resample: str = "bicubic"

    def __call__(self, images: Tensor) -> Tensor:
        """Return images `[N, 3, H, W]` in [0, 1] as the input of a vision model, `[N, 3, height, width]` in float32."""
        height, width = images.shape[-2:]
        if isinstance(self.size, int):
            short, long = min(height, width), max(height, width)
            longer = int(self.size * long / short)
            size = (self.size, longer) if height <= width else (longer, self.size)
        else:
            size = self.size
        as_tensor = self.resample == "tensor"
        if as_tensor:
            pixels = 255 * functional.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)
        else:
            pixels = resize(to_bytes(images), size, self.resample)
        if self.crop is not None:
            spare = [have - want for have, want in zip(size, self.crop, strict=True)]
            top, left = (round(rest / 2) if as_tensor else rest // 2 for rest in spare)
            pixels = pixels[..., top : top + self.crop[0], left : left + self.crop[1]]
        return normalise(pixels / 255, self.mean, self.std)


def read_preprocess(settings: Mapping[str, Any]) -> Preprocess:
    """Return the preprocessing that the settings of an image processor describe.

    Raises:
        ValueError: a setting is missing or not supported; in one line.
    """
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not settings.get(name, True):
            raise ValueError(f"its image processor has {name}=false, expected true")
    if settings.get("resample") not in FILTERS:
        raise ValueError(f"its image processor has resample={settings.get('resample')}, expected one of {list(FILTERS)}")
    size = _parse_size(settings.get("size"), "size")
    crop = _parse_size(settings.get("crop_size"), "crop_size") if settings.get("do_center_crop") else None
    if isinstance(crop, int):
        crop = (crop, crop)
    edges = (size, size) if isinstance(size, int) else size
    if crop is not None and any(have < want for have, want in zip(edges, crop, strict=True)):
        raise ValueError(f"its image processor resizes to {size} and then crops to {list(crop)}, expected a smaller crop")
    try:
        mean, std = (tuple(float(value) for value in settings[name]) for name in ("image_mean", "image_std"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("its image processor has no image_mean and image_std of three numbers each") from error
    return Preprocess(size, crop, mean, std, FILTERS[settings["resample"]])


def _parse_size(value: Any, name: str) -> int | tuple[int, int]:
    """Return a size as the length of the shorter edge, or as height and width."""
    if isinstance(value, int):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("shortest_edge"), int) and not value.get("longest_edge"):
        return int(value["shortest_edge"])
    if isinstance(value, Mapping) and isinstance(value.get("height"), int) and isinstance(value.get("width"), int):
        return int(value["height"]), int(value["width"])
    raise ValueError(f"its image processor has {name}={value}, expected shortest_edge, or height and width")


def extract_frames(images: Tensor, count: int) -> Tensor:
    """Return images `[B, C, H, W]` or evenly spaced frames of videos `[B, C, F, H, W]` as `[B, n, 3, H, W]`.

    Args:
        images: values in [0, 1] of 1 or 3 channels.
        count: largest number of frames per video; the first and the last are among them.

    Raises:
        ValueError: the tensor has another shape.
    """
    if images.ndim not in (4, 5) or images.shape[1] not in (1, 3):
        raise ValueError(
            f"images have the shape {list(images.shape)}, expected [B, C, H, W] or, of videos, [B, C, F, H, W] with 1 or 3 "
            "channels"
        )
    videos = images.unsqueeze(2) if images.ndim == 4 else images
    total = videos.shape[2]
    chosen = torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).round().long()
    frames = videos.index_select(2, chosen.to(videos.device)).transpose(1, 2)
    return frames.expand(-1, -1, 3, -1, -1)


def check_pairs(images: Tensor, prompts: Sequence[str]) -> None:
    """Raise ValueError unless there are as many prompts as images."""
    if len(images) != len(prompts):
        raise ValueError(f"there are {len(images)} images and {len(prompts)} prompts, expected one prompt per image")


def to_bytes(images: Tensor) -> Tensor:
    """Return images in [0, 1] as integers from 0 to 255 in float64, as in an image file."""
    scaled = images.to(torch.float64).clamp(0, 1) * 255
    return _replace_value(scaled, torch.round(scaled.detach()))


def resize(images: Tensor, size: tuple[int, int], resample: str = "bicubic") -> Tensor:
    """Return images `[..., H, W]` of integers from 0 to 255 in float64, resized as PIL does, to the bit.

    Along the width and then along the height, with c the coefficients of the filter,

        y_i = clip(floor(sum_j round(2^22 c_ij) x_j / 2^22 + 1/2), 0, 255)

    PIL 13 may resize the height first if that is cheaper and the aspect ratio changes; values then differ by a few of 255.

    Args:
        images: integers from 0 to 255 in float64.
        size: height and width.
        resample: name of the filter, "bicubic" or "bilinear"; it is widened if the image shrinks.
    """
    for axis, new in ((-1, size[1]), (-2, size[0])):
        old = images.shape[axis]
        if old == new:  # PIL skips the axis
            continue
        matrix = _compute_coefficients(old, new, resample).to(images.device)
        sums = images @ matrix.T if axis == -1 else matrix @ images
        scaled = sums / 2**PRECISION
        images = _replace_value(scaled, torch.floor(scaled.detach() + 0.5)).clamp(0, 255)
    return images


def resize_as_tensor(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images `[N, C, H, W]` of integers from 0 to 255 as torchvision resizes byte tensors, with a bicubic filter."""
    scaled = functional.interpolate(images, size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 255)
    return _replace_value(scaled, torch.round(scaled.detach()))


def pad_to_square(images: Tensor, side: int) -> Tensor:
    """Resize the longer edge of images `[N, C, H, W]` to `side`, and centre them on a black square, in float64.

    This is open_clip's `ResizeMaxSize` on tensors: bicubic with antialiasing, without rounding or clipping.
    """
    height, width = images.shape[-2:]
    scale = side / max(height, width)
    if scale == 1:
        new = (height, width)
    else:
        new = round(height * scale), round(width * scale)
        images = functional.interpolate(images, new, mode="bicubic", antialias=True, align_corners=False)
    rows, columns = side - new[0], side - new[1]
    return functional.pad(images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return (x - mean) / std per channel in float32."""
    shift, scale = (torch.tensor(values, dtype=images.dtype, device=images.device)[:, None, None] for values in (mean, std))
    return ((images - shift) / scale).to(torch.float32)


@lru_cache(maxsize=64)
def _compute_coefficients(old: int, new: int, resample: str) -> Tensor:
    """Return PIL's coefficients `[new, old]` along one axis, times 2^22 and rounded, in float64."""
    function, reach = _KERNELS[resample]
    scale = old / new
    stretch = max(scale, 1.0)
    centre = (torch.arange(new, dtype=torch.float64) + 0.5)[:, None] * scale
    first = (centre - reach * stretch + 0.5).trunc().clamp(min=0)
    last = (centre + reach * stretch + 0.5).trunc().clamp(max=old)
    index = torch.arange(old, dtype=torch.float64)
    weights = function(((index - centre + 0.5) / stretch).abs())
    weights = torch.where((index >= first) & (index < last), weights, 0.0)
    scaled = weights / weights.sum(1, keepdim=True) * 2**PRECISION
    return torch.trunc(scaled + torch.where(scaled < 0, -0.5, 0.5))


def _bicubic(x: Tensor) -> Tensor:
    """Return Keys' cubic with a = -1/2 at distances x >= 0."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _bilinear(x: Tensor) -> Tensor:
    """Return the triangular filter at distances x >= 0."""
    return (1 - x).clamp(min=0)


# Function of the distance, and its support.
_KERNELS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {"bicubic": (_bicubic, 2.0), "bilinear": (_bilinear, 1.0)}


class _ReplacedValue(torch.autograd.Function):
    """Another value with the gradient of a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _replace_value(tensor: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradient of `tensor`."""
    return _ReplacedValue.apply(tensor, value) if tensor.requires_grad else value


def map_batches(function: Callable[[Tensor], Tensor], images: Tensor, batch: int) -> Tensor:
    """Return the results of a function on batches of at most `batch` images, concatenated."""
    return torch.cat([function(part) for part in images.split(max(batch, 1))]) if len(images) else function(images)
