"""Recognisers of drawn words: one for the reward, and one of another maker for the evaluation.

`load_reward_recogniser` returns RapidOCR (PP-OCRv6 of PaddlePaddle), which scores rollouts. `load_heldout_recogniser`
returns ddddocr, a network for captchas, used for evaluation only. The two share neither weights nor training data, so that
reward hacking shows in the evaluation. Both are CTC models that come in their packages and run on the CPU, offline.
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
CTC_HEIGHT = 64  # pixels of ddddocr's input


def list_missing_packages() -> list[str]:
    """Return the packages of the recognisers that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


class WordRecogniser:
    """Recogniser of words in images `[B, 1, 24, 96]` in [0, 1].

    Args:
        read: function that returns the text in each of the images `[B, 24, 96]` in uint8.
    """

    def __init__(self, read: Callable[[np.ndarray], list[str]]) -> None:
        self.read_pixels = read

    def read(self, images: Tensor) -> list[str]:
        """Return the text in each image, without blanks, in lower case."""
        return [clean_text(text) for text in self.read_pixels(to_pixels(images))]

    def letters(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return 1 - min(levenshtein(t, w), |w|) / |w| of each word w and recognised text t, float32 `[B]`.

        This is the OCR score of the text-rendering papers (arXiv 2505.05470), except that additional letters cost as much as
        wrong ones. It is 1 if and only if the word is recognised exactly.
        """
        texts = self.read(images)
        scores = [compute_agreement(text, word) for text, word in zip(texts, prompts, strict=True)]
        return torch.tensor(scores, dtype=torch.float32, device=images.device)


def to_pixels(images: Tensor) -> np.ndarray:
    """Return images `[B, 1, 24, 96]` in [0, 1] as uint8 `[B, 24, 96]`, rounded."""
    return (images.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()[:, 0]


def clean_text(text: str) -> str:
    """Return a text without blanks, in lower case."""
    return "".join(text.split()).lower()


def compute_agreement(text: str, word: str) -> float:
    """Return 1 - min(levenshtein(text, word), |word|) / |word|."""
    return 1 - min(levenshtein(text, word), len(word)) / len(word)


def legibility(images: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
    """Return the share of right letters `letters`, `sure`, and `score` = letters + sure, each float32 `[B]`.

    sure is -log10(1 - c + 0.001) / 3, in [0, 1], if RapidOCR reads the word exactly, else 0. c is its confidence, the mean
    probability of the letters that it reads. Most words are read right early in training; sure still ranks them.
    """
    letters, sure = [], []
    for (text, confidence), word in zip(map_threads(make_line_reader(), to_pixels(images)), prompts, strict=True):
        letters.append(compute_agreement(clean_text(text), word))
        sure.append(-math.log10(1 - confidence + 1e-3) / 3 if clean_text(text) == word else 0.0)
    first, second = (torch.tensor(values, dtype=torch.float32, device=images.device) for values in (letters, sure))
    return {"score": first + second, "letters": first, "sure": second}


def load_reward_recogniser() -> WordRecogniser:
    """Return the recogniser of the reward: RapidOCR, which reads each image as one line; its models load on first use."""
    return WordRecogniser(lambda pixels: [text for text, _ in map_threads(make_line_reader(), pixels)])


def load_heldout_recogniser() -> WordRecogniser:
    """Return the recogniser of the evaluation: ddddocr's default model, which loads on first use."""
    return WordRecogniser(lambda pixels: map_threads(load_ddddocr(), pixels))


def map_threads(read: Callable[[np.ndarray], T], pixels: np.ndarray) -> list[T]:
    """Map a function over images `[B, 24, 96]` on torch's number of threads.

    Each image is read alone, so results do not depend on the number of threads.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(read, pixels))


def make_line_reader() -> Callable[[np.ndarray], tuple[str, float]]:
    """Return a function that reads an image `[24, 96]` as one line: its text, and RapidOCR's confidence in [0, 1]."""
    engine = load_rapidocr().engine

    def read(image: np.ndarray) -> tuple[str, float]:
        result = engine(image[..., None].repeat(3, -1), use_det=False, use_cls=False, use_rec=True)
        return (result.txts or [""])[0], float((result.scores or [0.0])[0])

    return read


@cache
def load_rapidocr() -> Ocr:
    """Return RapidOCR for one line, 192 pixels wide instead of its default of 320, which saves a third of the time."""
    # Uncertain readings count, so that the score rises letter by letter.
    return Ocr(target="prompt", detect=False, confidence=0.0, width=192)


@cache
def load_ddddocr() -> Callable[[np.ndarray], str]:
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
    """Return the text of a CTC network: the best character of each step, without repeats; index 0 is the blank.

    Args:
        scores: `[steps, characters]`.
        characters: text of each index; that of 0 is empty.
    """
    best = scores.argmax(-1)
    return "".join(characters[index] for index in best[np.flatnonzero(np.diff(best, prepend=0))])
