"""How often each sample wins against the others of its group, by a VLM judge behind a chat server.

Source: Pref-GRPO, arXiv 2508.20751, and its repository's `fastvideo/rewards`; the VLM judge there is UnifiedReward-Think.
"""

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from fluvial.engines.errors import RunError
from fluvial.engines.extensions.judges import images as wire
from fluvial.engines.extensions.judges.batches import check_positive, in_batches
from fluvial.engines.extensions.judges.vlm import FRAMES, PLACE, Chat, question_of
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.scoring.pairwise import win_rates

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
# Kind of sample by the name of its built-in question, as the VLM judge names it.
KINDS = {"pairwise": "Image", "pairwise_video": "Video", "pairwise_edit": "Edited image"}


class WinRate:
    """Wins of a sample over the number of its comparisons, in [0, 1]; a tie, or a reply without a verdict, is half a win.

    Each two samples of a group are compared once, so that a group of G takes G (G - 1) / 2 requests. Videos are shown as
    frames. Where every prompt has an image, edits of it are compared, and the VLM judge sees it first.

    Args:
        server, model: as of `YesNo`.
        template: file of the question, in which {prompt} stands for the prompt; by default that of images, of videos or of
            edits. The reply must hold "Image 1 is better" or "Image 2 is better" (Video, Edited image) in <answer> tags.
        size: width and height that images are resized to; 0 leaves them as they are.
    """

    def __init__(
        self, server: HttpClient, *, model: str = "", template: Path | None = None, size: int = 0, max_tokens: int = 4096
    ) -> None:
        self.chat, self.size, self.max_tokens = Chat(server, model=model), size, max_tokens
        check_positive("max_tokens", max_tokens)
        self.questions = {name: question_of(template, name) for name in KINDS}

    def __call__(
        self, images: Tensor, prompts: Sequence[str], group: int, condition_images: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return the win rate of each sample, `[B]`; NaN for one none of whose comparisons succeeded.

        Args:
            images: all samples of one group.
            prompts: their prompt.
            group: number of the group.
            condition_images: image before the edit, if they are edits of one.

        Raises:
            RunError: the group has one sample, or no request succeeded.
        """
        if len(images) < 2:
            raise RunError(
                "win_rate compares the samples of a group, and a group has one: set `sampling.group` to 2 or more"
            )
        samples, pairs = images.detach().cpu().float(), list(combinations(range(len(images)), 2))
        files = [[wire.png(frame, size=self.size) for frame in wire.spread(sample, FRAMES)] for sample in samples]
        name = "pairwise_video" if images.ndim == 5 else "pairwise" if condition_images is None else "pairwise_edit"
        before = [wire.png(condition_images[0], size=self.size)] if name == "pairwise_edit" and condition_images else []
        question = self.questions[name].replace(PLACE, str(prompts[0]))

        def compare(_: Tensor, part: slice) -> list[float]:
            first, second = pairs[part.start]
            shown = [*before, *files[first], *files[second]]
            return [verdict(self.chat.ask(shown, question, max_tokens=self.max_tokens).text, KINDS[name])]

        won = in_batches(torch.arange(len(pairs)), [question] * len(pairs), compare, server=self.chat.server, batch=1)
        return win_rates(won, len(images))


def verdict(text: str, kind: str) -> float:
    """Return 1 if a reply says that the first sample is better, 0 for the second, and 0.5 if it says neither.

    Args:
        kind: how the samples are named, see `KINDS`. Edits may be judged without <answer> tags.
    """
    found, is_edit = ANSWER.search(text), kind == KINDS["pairwise_edit"]
    for said in ([found[1]] if found else []) + ([text] if is_edit else []):
        for place, value in (("1", 1.0), ("2", 0.0)):
            if f"{kind} {place} is better".lower() in said.lower():
                return value
    return 0.5
