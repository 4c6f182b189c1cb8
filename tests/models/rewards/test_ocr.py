"""OCR reward with RapidOCR's own models, on drawn words, offline."""

import sys
import types
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from helpers.marks import Patch
from helpers.refusals import refuses
from PIL import Image, ImageDraw, ImageFont

from fluvial.models.rewards.ocr import Ocr

FONT = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans-Bold.ttf")


def drawn(text: str, width: int = 192, height: int = 64) -> torch.Tensor:
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).text((10, 8), text, fill="black", font=ImageFont.truetype(str(FONT), 40))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def line() -> Ocr:
    return Ocr(detect=False)


@pytest.fixture(autouse=True)
def offline(monkeypatch: Patch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)


def test_drawn_words_are_read_and_scored(line: Ocr) -> None:
    """A right word has 1, one wrong letter of four 3/4, an empty image 0; also in grey, and as a video."""
    images = torch.stack([drawn("OPEN"), drawn("OPFN"), drawn("")])
    prompts = ['a sign "open"'] * 3
    assert line(images, prompts).tolist() == [1.0, 0.75, 0.0]
    assert line(images[:, :1], prompts).tolist() == [1.0, 0.75, 0.0]
    assert line(images.transpose(0, 1)[None], prompts[:1]).tolist() == pytest.approx([1.75 / 3])
    single = torch.cat([line(image[None], prompts[:1]) for image in images])
    assert single.tolist() == [1.0, 0.75, 0.0]


def test_text_is_found_in_an_image() -> None:
    image = torch.ones(3, 160, 256)
    image[:, :64, :192], image[:, 80:144, 40:232] = drawn("Happy"), drawn("Day")
    reward = Ocr(side=160)
    assert reward(image[None], ['a cake that says "Happy Day"']).tolist() == [1.0]
    assert reward.read((image[None] * 255).byte().permute(0, 2, 3, 1)) == ["Happy\nDay"]


def test_colours_are_given_in_the_order_that_the_engine_expects(line: Ocr, monkeypatch: Patch) -> None:
    seen: list[np.ndarray] = []
    engine = line.engine

    class Spy:
        def __call__(self, image: np.ndarray, **options: bool) -> object:
            seen.append(image)
            return engine(image, **options)

    monkeypatch.setattr(line, "engine", Spy())
    red = torch.zeros(1, 3, 32, 64)
    red[:, 0] = 1
    line(red, ['"x"'])
    assert seen[0][0, 0].tolist() == [0, 0, 255]


def broken(**options: object) -> None:
    raise OSError("no model\nsecond line")


def test_what_is_wrong_is_one_line(monkeypatch: Patch) -> None:
    refuses("ocr: target is 'word', expected one of quoted, prompt", Ocr, target="word")
    refuses("ocr: confidence is 2, expected a number from 0 to 1", Ocr, confidence=2)
    monkeypatch.setitem(sys.modules, "rapidocr", types.SimpleNamespace(RapidOCR=broken, __spec__="there"))
    refuses("ocr: RapidOCR cannot be started: OSError: no model", Ocr)
    monkeypatch.setattr("fluvial.models.rewards.table.find_spec", lambda name: None)
    refuses(r"ocr: rapidocr, onnxruntime is not installed: pip install 'fluvial\[rewards\]'", Ocr)
