"""Header images of pages: words that the base model misspells, and some that it spells, before and after training.

FOLDER was written by `fluvial eval RUN --base start --seeds 1 --out FOLDER` for a run of words or edit-words; for the latter
the images before the edit come first:

    python -P -m fluvial.bench.header FOLDER PNG
    python -P -m fluvial.bench.header FOLDER PNG edit-words
"""

import csv
import random
import sys
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from fluvial.engines.run.job import build_job
from fluvial.engines.run.log.images import BAD, GOOD, INK, PAPER
from fluvial.models.images import read_image

WRONG, RIGHT, COLUMNS, SCALE, SEED = 8, 4, 4, 2, 0
EVALUATOR = "heldout"


class Cell(NamedTuple):
    """A word, the files and scores of its samples before and after training, and the image to edit."""

    word: str
    images: tuple[Path, Path]
    scores: tuple[float, float]
    edited: Path | bytes | None


def read_cells(folder: Path, model: str) -> list[Cell]:
    """Read the samples of an evaluation with a base, in the order of their files."""
    edited = {prompt.text: prompt.image for prompt in build_job(model).heldout}
    with (folder / "scores.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cells_of = []
    for row in rows:
        images = folder / "base" / f"{row['sample']}.png", folder / "images" / f"{row['sample']}.png"
        scores = float(row[f"base {EVALUATOR}"]), float(row[EVALUATOR])
        cells_of.append(Cell(row["prompt"], images, scores, edited[row["prompt"]]))
    return cells_of


def choose_words(cells: list[Cell]) -> list[Cell]:
    """Choose WRONG words that the base misspells and RIGHT words that it spells, with a fixed seed."""
    draw = random.Random(SEED)
    wrong, right = ([cell for cell in cells if (cell.scores[0] == 1) is is_right] for is_right in (False, True))
    picked = draw.sample(wrong, WRONG) + draw.sample(right, RIGHT)
    draw.shuffle(picked)
    return picked


def draw_sheet(picked: list[Cell]) -> Image.Image:
    """Draw the words in a grid: the prompt, the image to edit, the base's image, and the trained model's."""
    font, gap, line = ImageFont.load_default(size=20), 12, 28
    first = read_image(picked[0].images[0])
    width, height = first.width * SCALE, first.height * SCALE
    rows = 2 + (picked[0].edited is not None)
    cell_w, cell_h = width + gap, line + rows * (height + 4) + gap
    page = Image.new("RGB", (COLUMNS * cell_w + gap, -(-len(picked) // COLUMNS) * cell_h + gap), PAPER)
    draw = ImageDraw.Draw(page)
    for i, cell in enumerate(picked):
        x, y = gap + i % COLUMNS * cell_w, gap + i // COLUMNS * cell_h
        draw.text((x, y), cell.word, INK, font=font)
        shown = [
            (read_image(path), GOOD if score == 1 else BAD) for path, score in zip(cell.images, cell.scores, strict=True)
        ]
        if cell.edited is not None:
            shown.insert(0, (read_image(cell.edited), INK))
        for k, (image, colour) in enumerate(shown):
            top = y + line + k * (height + 4)
            page.paste(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC), (x, top))
            draw.rectangle((x, top, x + width - 1, top + height - 1), outline=colour, width=2)
    return page


def main(folder: str, out: str, model: str = "words") -> None:
    """Write the image, and print the shares of correct samples."""
    cells_of = read_cells(Path(folder), model)
    draw_sheet(choose_words(cells_of)).save(out, optimize=True)
    shares = [sum(cell.scores[k] == 1 for cell in cells_of) / len(cells_of) for k in range(2)]
    print(f"{len(cells_of)} held-out words, exactly right by {EVALUATOR}: before {shares[0]:.3f}, after {shares[1]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
