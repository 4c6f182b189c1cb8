"""Padded length of a rollout's prompts, the same for rollout and update, and on all ranks.

With one length per rollout the first ratio is exactly 1: micro-batches of rollout and update may have different samples, and
a prediction has the same bits only if its prompt is padded to the same length.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fluvial.engines.engine.world import World, collective
from fluvial.models import DiffusionModel
from fluvial.models.padding import pad_length, trims_padding


class Padding(NamedTuple):
    """Padding of the prompts of a rollout, over all ranks."""

    tokens: int  # padded length of every prompt
    waste: float  # fraction of these tokens that is padding
    saved: float  # fraction of the tokens, with the model's own padding, that is not computed


class TextLengths:
    """Computes the padded length of prompts: the model's own, unless `models.padding.trims_padding` is true.

    Without a world, this process generates all samples.
    """

    def __init__(self, model: DiffusionModel, world: World | None = None) -> None:
        self.model, self.world = model, world
        self._known: dict[Any, int] = {}

    @collective
    def padding(self, prompts: Sequence[Any]) -> Padding | None:
        """Return the padding of all ranks' prompts, given this rank's, negative ones included; None for the model's own."""
        model: Any = self.model
        if not trims_padding(model):
            return None
        counts = [self._tokens(prompt) for prompt in prompts]
        sums = torch.tensor([[max(counts, default=0), sum(counts), len(counts)]])
        everyone = sums if self.world is None else self.world.gather(sums)  # on the host
        longest, real, count = int(everyone[:, 0].max()), int(everyone[:, 1].sum()), int(everyone[:, 2].sum())
        tokens = pad_length(longest, limit=model.text_tokens)
        return Padding(tokens, 1 - real / (count * tokens), 1 - tokens / model.text_tokens)

    @collective
    def of(self, prompts: Sequence[Any]) -> int | None:
        """Return the padded length of these prompts; None for the model's own."""
        padding = self.padding(prompts)
        return None if padding is None else padding.tokens

    def _tokens(self, prompt: Any) -> int:
        """Return a prompt's number of tokens, cached from its first encoding."""
        model: Any = self.model
        if prompt not in self._known:
            self._known[prompt] = int(model.count_prompt_tokens(model.encode([prompt]))[0])
        return self._known[prompt]
