"""Captioned grids of samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fluvial.models.images import to_image

GOOD, BAD, INK, PAPER = (20, 120, 60), (180, 40, 30), (30, 30, 30), (250, 250, 248)


def draw_sheet(
    images: Tensor,
    prompts: Sequence[str],
    scores: Tensor | None = None,
    *,
    base: Sequence[float] | None = None,
    title: str = "",
    columns: int = 4,
    width: int = 256,
) -> Image.Image:
    """Draw samples `[n, C, H, W]` in [0, 1] side by side, enlarged to about `width` pixels, see `caption_images`."""
    drawn = [to_image(image, width=width) for image in images]
    return caption_images(drawn, prompts, scores, base=base, title=title, columns=columns).image


class Sheet(NamedTuple):
    """Captioned images side by side, and their boxes."""

    image: Image.Image
    captions: list[str]
    boxes: list[tuple[int, int, int, int]]  # left, top, right, bottom


def caption_images(
    images: Sequence[Image.Image],
    prompts: Sequence[str],
    scores: Sequence[float] | Tensor | None = None,
    *,
    base: Sequence[float] | None = None,
    title: str = "",
    columns: int = 4,
) -> Sheet:
    """Draw images of one size side by side, `columns` per row, with a title above.

    Captions are the prompt and, if given, the score: green if above that of `base` for the same image, red if below.
    """
    font = ImageFont.load_default(size=18)
    gap, line = 14, 26
    cell_w, cell_h = images[0].width + gap, images[0].height + line + gap
    rows, columns = -(-len(images) // columns), min(columns, len(images))
    top = line + gap if title else gap
    sheet = Image.new("RGB", (columns * cell_w + gap, rows * cell_h + top), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((gap, gap // 2), title, INK, font=font)
    captions, boxes = [], []
    for i, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
        x, y = gap + i % columns * cell_w, top + i // columns * cell_h
        caption, colour = prompt, INK
        if scores is not None:
            score = float(scores[i])
            caption = f"{prompt}   {score:.2f}"
            if base is not None and score != base[i]:
                colour = GOOD if score > base[i] else BAD
        draw.text((x, y), caption, colour, font=font)
        sheet.paste(image, (x, y + line))
        captions.append(caption)
        boxes.append((x, y + line, x + image.width, y + line + image.height))
    return Sheet(sheet, captions, boxes)


def join(path: Path, parts: Sequence[Path]) -> None:
    """Write a PNG of other PNGs, stacked vertically. Missing files are left out."""
    stack_images([Image.open(part) for part in parts if part.exists()]).save(path)


def stack_images(images: Sequence[Image.Image]) -> Image.Image:
    """Stack images vertically."""
    sheet = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), PAPER)
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    return sheet
