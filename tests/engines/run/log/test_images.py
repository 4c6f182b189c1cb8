"""Captioned grids: where images, captions and colours stand."""

from pathlib import Path

import pytest
import torch
from helpers.refusals import refuses
from PIL import Image

from fluvial.engines.run.log.images import BAD, GOOD, INK, PAPER, caption_images, draw_sheet, join, stack_images

GAP, LINE = 14, 26  # pixels between cells, and of a caption


def colours(sheet: Image.Image, box: tuple[int, int, int, int]) -> set[tuple[int, ...]]:
    """Return the colours inside a box (left, top, right, bottom)."""
    found = sheet.crop(box).getcolors(maxcolors=1 << 20)
    assert found is not None
    return {colour for _, colour in found if isinstance(colour, tuple)}


def test_a_grid_shows_every_image_enlarged_at_its_place() -> None:
    """Five images in two columns make three rows; the last cell stays empty."""
    levels = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    sheet = draw_sheet(levels.reshape(5, 1, 1, 1).expand(5, 1, 4, 8), list("abcde"), columns=2, width=16)
    cell_w, cell_h = 16 + GAP, 8 + LINE + GAP
    assert sheet.size == (2 * cell_w + GAP, 3 * cell_h + GAP)
    for i, level in enumerate(levels.tolist()):
        left, top = GAP + i % 2 * cell_w, GAP + i // 2 * cell_h + LINE
        assert colours(sheet, (left, top, left + 16, top + 8)) == {(round(level * 255),) * 3}
    assert colours(sheet, (GAP + cell_w, GAP + 2 * cell_h, 2 * cell_w + GAP, 3 * cell_h + GAP)) == {PAPER}


@pytest.mark.parametrize(
    ("base", "ink"), [(0.5, GOOD), (1.0, BAD), (0.75, INK), (None, INK)], ids=["better", "worse", "as good", "alone"]
)
def test_a_caption_is_coloured_by_improvement(base: float | None, ink: tuple[int, int, int]) -> None:
    """Whatever the range of the reward."""
    image = Image.new("RGB", (256, 32))
    sheet = caption_images([image], ["0427"], [0.75], base=None if base is None else [base]).image
    caption = colours(sheet, (GAP, GAP, GAP + 256, GAP + LINE))
    assert ink in caption
    assert not caption & ({GOOD, BAD, INK} - {ink})


def test_a_caption_holds_the_prompt_and_the_score() -> None:
    """Other words are other pixels."""
    image, one = torch.zeros(1, 1, 8, 64), torch.tensor([0.5])
    sheets = [
        draw_sheet(image, ["0427"], one),
        draw_sheet(image, ["0428"], one),
        draw_sheet(image, ["0427"], one + 0.25),
        draw_sheet(image, ["0427"], one, title="before"),
    ]
    assert len({sheet.tobytes() for sheet in sheets}) == 4
    assert sheets[3].height - sheets[0].height == LINE


def test_a_grid_of_prompts_that_do_not_match_its_images_raises() -> None:
    refuses("zip", draw_sheet, torch.zeros(2, 1, 8, 8), ["only one"])


def test_joined_files_stand_one_above_the_other(tmp_path: Path) -> None:
    """A file that is missing is left out; the narrower one is padded."""
    red, blue = Image.new("RGB", (20, 10), (255, 0, 0)), Image.new("RGB", (30, 5), (0, 0, 255))
    red.save(tmp_path / "red.png")
    blue.save(tmp_path / "blue.png")
    join(tmp_path / "both.png", [tmp_path / "red.png", tmp_path / "missing.png", tmp_path / "blue.png"])
    with Image.open(tmp_path / "both.png") as both:
        assert (both.format, both.size) == ("PNG", (30, 15))
        assert both.tobytes() == stack_images([red, blue]).tobytes()
        assert [both.getpixel(at) for at in ((0, 0), (25, 5), (0, 10))] == [(255, 0, 0), PAPER, (0, 0, 255)]
