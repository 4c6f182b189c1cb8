"""Captioned grids of samples."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fluvial.models.images import as_image

GOOD, BAD, INK, PAPER = (20, 120, 60), (180, 40, 30), (30, 30, 30), (250, 250, 248)


def sheet_of(
    images: Tensor,
    prompts: Sequence[str],
    scores: Tensor | None = None,
    *,
    title: str = "",
    columns: int = 4,
    width: int = 256,
) -> Image.Image:
    """Return samples side by side, each enlarged and captioned with its prompt and, if given, its score (green for 1).

    Args:
        images: `[n, C, H, W]` in [0, 1].
        prompts: n captions.
        scores: `[n]`.
        title: text above the grid.
        columns: images per row.
        width: approximate width of an image, in pixels.
    """
    drawn = [as_image(image, width=width) for image in images]
    font = ImageFont.load_default(size=18)
    gap, line = 14, 26
    cell_w, cell_h = drawn[0].width + gap, drawn[0].height + line + gap
    rows, columns = -(-len(drawn) // columns), min(columns, len(drawn))
    top = line + gap if title else gap
    sheet = Image.new("RGB", (columns * cell_w + gap, rows * cell_h + top), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((gap, gap // 2), title, INK, font=font)
    for i, (image, prompt) in enumerate(zip(drawn, prompts, strict=True)):
        x, y = gap + i % columns * cell_w, top + i // columns * cell_h
        caption, colour = prompt, INK
        if scores is not None:
            score = float(scores[i])
            caption, colour = f"{prompt}   {score:.2f}", GOOD if score == 1 else BAD
        draw.text((x, y), caption, colour, font=font)
        sheet.paste(image, (x, y + line))
    return sheet


def join(path: Path, parts: Sequence[Path]) -> None:
    """Write a PNG of other PNGs, one above the other. Missing files are left out."""
    stacked([Image.open(part) for part in parts if part.exists()]).save(path)


def stacked(images: Sequence[Image.Image]) -> Image.Image:
    """Return images one above the other."""
    sheet = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), PAPER)
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    return sheet
