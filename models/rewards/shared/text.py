"""Score of all OCR rewards: agreement of the text in an image with the text requested by its prompt.

Source: flow_grpo, arXiv 2505.05470, section 5.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluvial.models.rewards.shared.pixels import check_pairs, extract_frames, to_bytes

TYPOGRAPHIC = re.compile("(?<=“)[^”]+(?=”)|(?<=„)[^“]+(?=“)|(?<=«)[^»]+(?=»)")


def extract_quoted(prompt: str) -> str:
    """Return the text after the first `"` of a prompt, up to the next one or to the end, as in flow_grpo's `ocr.py`.

    A prompt without `"` may have typographic quotes.

    Raises:
        ValueError: the prompt has no quoted text.
    """
    quoted = prompt.split('"')[1:2] or TYPOGRAPHIC.findall(prompt)
    if quoted and quoted[0].strip():
        return quoted[0]
    raise ValueError(f'the prompt {prompt!r} has no text in double quotes, expected the text to draw, as in: a sign "OPEN"')


def levenshtein(a: str, b: str) -> int:
    """Return the smallest number of insertions, deletions and substitutions of characters that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, first in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, second in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (first != second))
    return row[-1]


def score_text(recognised: str, target: str) -> float:
    """Return 1 - min(levenshtein(recognised, target), |target|) / |target|; 1 if `recognised` contains the target.

    Blanks are dropped and case is ignored.

    Raises:
        ValueError: the target is empty or blank.
    """
    recognised, target = ("".join(text.split()).lower() for text in (recognised, target))
    if not target:
        raise ValueError("the text to draw is empty, expected at least one character")
    if target in recognised:
        return 1.0
    return 1 - min(levenshtein(recognised, target), len(target)) / len(target)


def score_texts(
    read: Callable[[Tensor], list[str]], target: Callable[[str], str], images: Tensor, prompts: Sequence[str], frames: int
) -> Tensor:
    """Return the score of each image, `[B]` in float32; for videos the mean over frames.

    Args:
        read: function that returns the text in each of the images `[N, H, W, 3]` in uint8.
        target: function that returns the text requested by a prompt.
        images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
        prompts: prompt of each image.
        frames: largest number of evenly spaced frames per video.
    """
    targets = [target(prompt) for prompt in prompts]
    check_pairs(images, prompts)
    chosen = extract_frames(images.detach(), frames)
    texts = read(to_bytes(chosen.flatten(0, 1)).to(torch.uint8).permute(0, 2, 3, 1).contiguous())
    count = chosen.shape[1]
    scores = [score_text(text, targets[i // count]) for i, text in enumerate(texts)]
    return torch.tensor(scores, dtype=torch.float32, device=images.device).view(len(targets), count).mean(1)


TARGETS: dict[str, Callable[[str], str]] = {"quoted": extract_quoted, "prompt": str}  # functions from a prompt to its text


@dataclass(eq=False, kw_only=True)
class TextReward(ABC):
    """Score 1 - min(levenshtein(t, w), |w|) / |w|, with t the recognised text and w the text requested by the prompt.

    Blanks and case are ignored, and the score is 1 if t contains w. The score of a video is the mean over frames.

    Args:
        target: "quoted", the text in the prompt's first double quotes (see `extract_quoted`), or "prompt", the whole prompt.
        frames: largest number of evenly spaced frames per video.
    """

    target: str = "quoted"
    frames: int = 4

    @abstractmethod
    def read(self, images: Tensor) -> list[str]:
        """Return the text in each of the images `[N, H, W, 3]` in uint8."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each image, `[B]` in float32, without gradient.

        Args:
            images: images `[B, C, H, W]` or videos `[B, C, F, H, W]` in [0, 1].
            prompts: prompt of each image.

        Raises:
            ValueError: a prompt requests no text.
        """
        return score_texts(self.read, TARGETS[self.target], images, prompts, self.frames)
