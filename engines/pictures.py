"""Pictures for people: captioned grids of samples, and curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

GOOD, BAD, INK, PAPER = (20, 120, 60), (180, 40, 30), (30, 30, 30), (250, 250, 248)


def as_image(picture: Tensor, *, width: int, colour: bool = True) -> Image.Image:
    """Return a picture `[C, H, W]` in [0, 1] as an image enlarged to about `width` pixels, its pixels kept square.

    Args:
        picture: of 1 or 3 channels; of a film `[C, F, H, W]` its first, middle and last frame, side by side.
        width: in pixels.
        colour: make it an RGB image, which one of a single channel need not be.
    """
    if picture.ndim == 4:
        last = picture.shape[1] - 1
        picture = torch.cat([picture[:, frame] for frame in sorted({0, last // 2, last})], dim=-1)
    array = (picture.clamp(0, 1) * 255).round().byte().cpu().numpy()
    image = Image.fromarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, -1))
    image = image.convert("RGB") if colour else image
    factor = max(width // image.width, 1)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def sheet_of(
    pictures: Tensor,
    prompts: Sequence[str],
    scores: Tensor | None = None,
    *,
    title: str = "",
    columns: int = 4,
    width: int = 256,
) -> Image.Image:
    """Return samples side by side, each enlarged and captioned with its prompt and, if given, its score (green for 1).

    Args:
        pictures: `[n, C, H, W]` in [0, 1].
        prompts: n captions.
        scores: `[n]`.
        title: written above.
        columns: pictures a row.
        width: of a picture, about, in pixels.
    """
    images = [as_image(picture, width=width) for picture in pictures]
    font = ImageFont.load_default(size=18)
    gap, line = 14, 26
    cell_w, cell_h = images[0].width + gap, images[0].height + line + gap
    rows, columns = -(-len(images) // columns), min(columns, len(images))
    top = line + gap if title else gap
    sheet = Image.new("RGB", (columns * cell_w + gap, rows * cell_h + top), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((gap, gap // 2), title, INK, font=font)
    for i, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
        x, y = gap + i % columns * cell_w, top + i // columns * cell_h
        caption, colour = prompt, INK
        if scores is not None:
            score = float(scores[i])
            caption, colour = f"{prompt}   {score:.2f}", GOOD if score == 1 else BAD
        draw.text((x, y), caption, colour, font=font)
        sheet.paste(image, (x, y + line))
    return sheet


def join(path: Path, parts: Sequence[Path]) -> None:
    """Write a PNG of other PNGs, one above the other; one that is gone is left out."""
    stacked([Image.open(part) for part in parts if part.exists()]).save(path)


def stacked(images: Sequence[Image.Image]) -> Image.Image:
    """Return images one above the other."""
    sheet = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), PAPER)
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    return sheet


def curves(path: Path, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], *, xlabel: str) -> None:
    """Write a PNG of line charts side by side: panel title -> line label -> points (x, y)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    for axes, (title, lines) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
        for label, points in lines.items():
            marker = "o" if len(points) < 30 else None
            axes.plot([x for x, _ in points], [y for _, y in points], label=label, marker=marker, markersize=4)
        axes.set(title=title, xlabel=xlabel)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if any(lines):
            axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
