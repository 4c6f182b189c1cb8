"""The number of tokens that the prompts of a rollout are padded to, the same for rollout and update, and on all ranks.

One length per rollout keeps the promise of the first ratio: a micro-batch of the update may hold other samples than one of
the rollout, and a prediction has the same bits only if its prompt is padded to the same length.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fluvial.engines.engine.world import World, collective
from fluvial.models import DiffusionModel
from fluvial.models.padding import pad_length, trims_padding


class Padding(NamedTuple):
    """Padding of the prompts of a rollout, over all ranks."""

    tokens: int  # length that every prompt is padded to
    waste: float  # fraction of these tokens that are padding
    saved: float  # fraction of the tokens of the model's own padding that are not computed


class TextLengths:
    """Finds the length that prompts are padded to, the model's own unless `models.padding.trims_padding` holds for it.

    Without a world, this process makes all samples.
    """

    def __init__(self, model: DiffusionModel, world: World | None = None) -> None:
        self.model, self.world = model, world
        self._known: dict[Any, int] = {}

    @collective
    def padding(self, prompts: Sequence[Any]) -> Padding | None:
        """Return the padding of this rank's prompts, negative ones included, None for the model's own."""
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
        """Return the length that these prompts are padded to, None for the model's own."""
        padding = self.padding(prompts)
        return None if padding is None else padding.tokens

    def _tokens(self, prompt: Any) -> int:
        """Return the number of tokens of a prompt, which is encoded when it is first asked for."""
        model: Any = self.model
        if prompt not in self._known:
            self._known[prompt] = int(model.prompt_tokens(model.encode([prompt]))[0])
        return self._known[prompt]
