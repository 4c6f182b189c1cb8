"""Sizes of images: parsing, and the nearest of several sizes."""

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from fluvial.engines.errors import UsageError

LEAST_KEPT = Fraction(2, 3)  # smallest fraction of an image that may remain when it is cut to a size


class Size(NamedTuple):
    """Height and width in pixels, written `WIDTHxHEIGHT`."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def parse_size(word: str) -> Size:
    """Parse a size `WIDTHxHEIGHT`.

    Raises:
        ValueError: the word has another form.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", word.strip())
    if match is None:
        raise ValueError(f"{word!r} is not a size, expected WIDTHxHEIGHT in pixels, e.g. 832x1216")
    return Size(height=int(match[2]), width=int(match[1]))


def find_nearest_size(size: Size, sizes: Sequence[Size]) -> Size:
    """Return the size with the nearest aspect ratio; among equal ratios, the one with the nearest area.

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
    """Return whether an image of a size keeps at least two thirds of its area when it is scaled to cover another and cut."""
    across, down = size.width * other.height, size.height * other.width
    return min(across, down) >= LEAST_KEPT * max(across, down)


def parse_shapes(words: Sequence[str], shape: Callable[[int, int], tuple[int, ...]]) -> dict[Size, tuple[int, ...]]:
    """Return the shape of a sample by size.

    Args:
        words: sizes as `WIDTHxHEIGHT`.
        shape: function from height and width to the shape of a sample.

    Raises:
        ValueError: a word is not a size, the model cannot generate the size, or two sizes have samples of the same shape.
    """
    shapes: dict[Size, tuple[int, ...]] = {}
    for size in map(parse_size, words):
        of_size = tuple(shape(size.height, size.width))
        if equal := [other for other, known in shapes.items() if known == of_size]:
            raise UsageError(
                f"`pipeline.sizes` has {equal[0]} and {size}, whose samples have the same shape: remove one of them"
            )
        shapes[size] = of_size
    return shapes
