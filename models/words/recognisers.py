"""Recognisers of drawn words: one for the reward, another one, of another maker, for the evaluation.

`reward_recogniser` is RapidOCR (PP-OCRv6 of PaddlePaddle) and scores rollouts. `heldout_recogniser` is ddddocr, a network
that its author trained for captchas, and is used for evaluation only. The two share neither weights nor training data, so
that gaming the reward shows in the evaluation. Both are CTC models that come in their packages and run on the CPU, offline.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fluvial.models.rewards.ocr import Ocr
from fluvial.models.rewards.shared.text import levenshtein

T = TypeVar("T")

INSTALL = "pip install 'fluvial[words]'"
PACKAGES = ("rapidocr", "onnxruntime", "ddddocr")
CTC_HEIGHT = 64  # pixels, of the input of ddddocr


def missing() -> list[str]:
    """Return the packages of the recognisers that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


class WordRecogniser:
    """Recognise words in images `[B, 1, 24, 96]` in [0, 1].

    Args:
        read: function that returns the text in each of the images `[B, 24, 96]` in uint8.
    """

    def __init__(self, read: Callable[[np.ndarray], list[str]]) -> None:
        self.read_pixels = read

    def read(self, images: Tensor) -> list[str]:
        """Return the text in each image, without blanks, in small letters."""
        return [clean_text(text) for text in self.read_pixels(as_pixels(images))]

    def letters(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return 1 - min(levenshtein(t, w), |w|) / |w| of each word w that is read as t, float32 `[B]`.

        This is the OCR score of the text-rendering papers (arXiv 2505.05470), except that more letters than asked for cost
        as much as others. It is 1 if and only if the word is read exactly.
        """
        texts = self.read(images)
        scores = [agreement(text, word) for text, word in zip(texts, prompts, strict=True)]
        return torch.tensor(scores, dtype=torch.float32, device=images.device)


def as_pixels(images: Tensor) -> np.ndarray:
    """Return images `[B, 1, 24, 96]` in [0, 1] as uint8 `[B, 24, 96]`, rounded."""
    return (images.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()[:, 0]


def clean_text(text: str) -> str:
    """Return a text without blanks, in small letters."""
    return "".join(text.split()).lower()


def agreement(text: str, word: str) -> float:
    """Return 1 - min(levenshtein(text, word), |word|) / |word|."""
    return 1 - min(levenshtein(text, word), len(word)) / len(word)


def legibility(images: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
    """Return `letters`, as RapidOCR reads them, `sure`, and the score letters + sure, each float32 `[B]`.

    sure is -log10(1 - c + 0.001) / 3, in [0, 1], if the word is read exactly, and else 0. c is RapidOCR's confidence, the
    mean probability of the letters that it reads. Most words are read right early in training; this still tells them apart.
    """
    letters, sure = [], []
    for (text, confidence), word in zip(map_threads(line(), as_pixels(images)), prompts, strict=True):
        letters.append(agreement(clean_text(text), word))
        sure.append(-math.log10(1 - confidence + 1e-3) / 3 if clean_text(text) == word else 0.0)
    first, second = (torch.tensor(values, dtype=torch.float32, device=images.device) for values in (letters, sure))
    return {"score": first + second, "letters": first, "sure": second}


def reward_recogniser() -> WordRecogniser:
    """Return the recogniser of the reward: RapidOCR, which reads each image as one line. Its models are loaded when used."""
    return WordRecogniser(lambda pixels: [text for text, _ in map_threads(line(), pixels)])


def heldout_recogniser() -> WordRecogniser:
    """Return the recogniser of the evaluation: ddddocr's default model, which is loaded when used."""
    return WordRecogniser(lambda pixels: map_threads(ddddocr(), pixels))


def map_threads(read: Callable[[np.ndarray], T], pixels: np.ndarray) -> list[T]:
    """Return a function's result for each of the images `[B, 24, 96]`, on as many threads as torch computes with.

    Each image is read alone, so results do not depend on the number of threads.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(read, pixels))


def line() -> Callable[[np.ndarray], tuple[str, float]]:
    """Return the function that reads an image `[24, 96]` as one line: its text, and RapidOCR's confidence in [0, 1]."""
    engine = rapidocr().engine

    def read(image: np.ndarray) -> tuple[str, float]:
        result = engine(image[..., None].repeat(3, -1), use_det=False, use_cls=False, use_rec=True)
        return (result.txts or [""])[0], float((result.scores or [0.0])[0])

    return read


@cache
def rapidocr() -> Ocr:
    """Return RapidOCR for one line, 192 pixels wide where its own width is 320: words take a third less time."""
    # A word that it is not sure of counts as it is read, so that the score rises letter by letter.
    return Ocr(target="prompt", detect=False, confidence=0.0, width=192)


@cache
def ddddocr() -> Callable[[np.ndarray], str]:
    """Return ddddocr's default model as a function of an image `[24, 96]` in uint8, with its own preprocessing.

    The package's class gives the same texts, but takes all cores.
    """
    runtime: Any = import_module("onnxruntime")
    package: Any = import_module("ddddocr.charsets")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    folder = Path(package.__file__).parent
    session = runtime.InferenceSession(folder / "common_old.onnx", options, providers=["CPUExecutionProvider"])
    name, characters = session.get_inputs()[0].name, package.CHARSET_OLD

    def read(image: np.ndarray) -> str:
        height, width = image.shape
        sized = Image.fromarray(image).resize((width * CTC_HEIGHT // height, CTC_HEIGHT), Image.Resampling.LANCZOS)
        (scores,) = session.run(None, {name: np.asarray(sized, np.float32)[None, None] / 255})  # [steps, 1, characters]
        return decode_ctc(scores[:, 0], characters)

    return read


def decode_ctc(scores: np.ndarray, characters: Sequence[str]) -> str:
    """Return the text of a CTC network: the best character of each step; repeats are one, and 0 is a blank.

    Args:
        scores: `[steps, characters]`.
        characters: text of each; that of 0 is empty.
    """
    best = scores.argmax(-1)
    return "".join(characters[index] for index in best[np.flatnonzero(np.diff(best, prepend=0))])
