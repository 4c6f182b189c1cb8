"""Data of the handwriting models: the 1,797 handwritten 8x8 digits of scikit-learn, and images of 4-digit codes.

A fixed shuffle divides the digits into two halves. The base model and the reward's recogniser are trained on the first half,
the recogniser of the evaluation on the second.
"""

import zlib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fluvial.core.random import Key, fold_in, uniform

DIGITS = 4  # digits per code
SIZE = 8  # pixels per digit along each side
Half = Literal["training", "evaluation"]


class Digits(NamedTuple):
    """Digits of one half, sorted by label."""

    pixels: Tensor  # [N, 8, 8] in [-1, 1]
    labels: Tensor  # [N]
    starts: Tensor  # [11] index of the first digit of each label, and N


@cache
def load_digits(half: Half) -> Digits:
    """Return one half of the digits; the two halves have no image in common."""
    # As sklearn.datasets.load_digits reads them, without importing scikit-learn, which takes more than a second.
    spec = find_spec("sklearn")
    assert spec is not None, "scikit-learn is a requirement of fluvial"
    assert spec.origin is not None
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    pixels, labels = table[:, :-1].astype(np.float64), table[:, -1]
    order = np.random.default_rng(0).permutation(len(labels))
    middle = len(order) // 2
    chosen = order[:middle] if half == "training" else order[middle:]
    chosen = chosen[np.argsort(labels[chosen], kind="stable")]
    sorted_labels = torch.from_numpy(labels[chosen])
    return Digits(
        pixels=torch.from_numpy(pixels[chosen]).to(torch.float32).reshape(-1, SIZE, SIZE) / 8 - 1,
        labels=sorted_labels,
        starts=torch.searchsorted(sorted_labels, torch.arange(11)),
    )


@cache
def list_codes(split: Literal["train", "heldout"]) -> tuple[str, ...]:
    """Return the codes of a split. One fifth of all 10,000 codes, chosen by hash, is held out and never trained on."""
    held_out = split == "heldout"
    every = (f"{number:0{DIGITS}d}" for number in range(10**DIGITS))
    return tuple(code for code in every if (zlib.crc32(code.encode()) % 5 == 0) == held_out)


def check_code(prompt: str) -> None:
    """Raise ValueError unless the prompt is a code of four digits."""
    if len(prompt) != DIGITS or not (prompt.isascii() and prompt.isdigit()):
        raise ValueError(f"prompt {prompt!r} is not a code of {DIGITS} digits, expected for example '0427'")


def to_digits(prompts: Sequence[str]) -> Tensor:
    """Return the digits of a batch of codes, int64 `[B, 4]`."""
    for prompt in prompts:
        check_code(prompt)
    return torch.tensor([[int(character) for character in prompt] for prompt in prompts]).reshape(-1, DIGITS)


def draw_codes(key: Key, prompts: Sequence[str]) -> Tensor:
    """Return one image per prompt, `[B, 1, 8, 32]` in [-1, 1]: four random training digits side by side."""
    pixels, _, starts = load_digits("training")
    labels = to_digits(prompts)
    keys = fold_in(key, torch.arange(len(prompts)))
    low, high = starts[labels], starts[labels + 1]
    chosen = low + (uniform(keys, (len(prompts), DIGITS)) * (high - low)).long()
    return pixels[chosen].permute(0, 2, 1, 3).reshape(len(prompts), 1, SIZE, DIGITS * SIZE)
