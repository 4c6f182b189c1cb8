"""Sizes of images: how they are written, and which of several an image is nearest to."""

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from fluvial.engines.errors import UsageError

LEAST_KEPT = Fraction(2, 3)  # part of an image that must be left when it is cut to a size


class Size(NamedTuple):
    """Height and width in pixels, written `WIDTHxHEIGHT`."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def parse_size(word: str) -> Size:
    """Return the size that is written `WIDTHxHEIGHT`.

    Raises:
        ValueError: it is written otherwise.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", word.strip())
    if match is None:
        raise ValueError(f"{word!r} is not a size, expected WIDTHxHEIGHT in pixels, e.g. 832x1216")
    return Size(height=int(match[2]), width=int(match[1]))


def nearest_size(size: Size, sizes: Sequence[Size]) -> Size:
    """Return the size whose aspect ratio is nearest; among equal ratios, the one whose area is nearest.

    Raises:
        ValueError: more than a third of the image would be cut off.
    """

    def distance(other: Size) -> tuple[float, float]:
        ratio = math.log(size.width * other.height / (size.height * other.width))
        return round(abs(ratio), 9), abs(math.log(size.height * size.width / (other.height * other.width)))

    nearest = min(sizes, key=distance)
    if not fits(size, nearest):
        raise ValueError(
            f"{size} pixels fit none of the sizes {' '.join(map(str, sizes))}: more than a third would be cut off to get "
            f"{nearest}; set a size that is nearer, or leave it out"
        )
    return nearest


def fits(size: Size, other: Size) -> bool:
    """Return whether an image of a size, scaled to cover another and cut to it, keeps two thirds of its area or more."""
    across, down = size.width * other.height, size.height * other.width
    return min(across, down) >= LEAST_KEPT * max(across, down)


def parse_shapes(words: Sequence[str], shape: Callable[[int, int], tuple[int, ...]]) -> dict[Size, tuple[int, ...]]:
    """Return the shape of a sample of each size that is written.

    Args:
        words: sizes as `WIDTHxHEIGHT`.
        shape: function from height and width to the shape of a sample.

    Raises:
        ValueError: a word is no size, the model has no such size, or two sizes have samples of one shape.
    """
    shapes: dict[Size, tuple[int, ...]] = {}
    for size in map(parse_size, words):
        made = tuple(shape(size.height, size.width))
        if known := [other for other, its in shapes.items() if its == made]:
            raise UsageError(f"`pipeline.sizes` has {known[0]} and {size}, whose samples have one shape: leave one out")
        shapes[size] = made
    return shapes
