"""The order of prompts: shuffled epochs per source, the sources mixed by weight.

The order is a function of the key alone. It is drawn by position and holds no state that a checkpoint would have to store,
so it is the same on every rank and after every resume.
"""

import math
from collections.abc import Mapping, Sequence

from fluvial.core.random import Key, fold_in, key, uniform
from fluvial.engines.data.records import Prompt
from fluvial.engines.streams import Stream

# Folded into a run's key: no run has as many updates, whose numbers are folded in elsewhere.
ORDER = 2**62


def order_key(seed: int) -> Key:
    """Return the key of the order of prompts."""
    return fold_in(key(seed), ORDER)


class PromptOrder:
    """Endless order of prompts.

    An epoch of a source holds each of its prompts once, shuffled. A prompt of weight w is there w times per epoch in the
    mean: with weight 0.5 in every second epoch, from the first on. The next prompt comes from the source that is furthest
    behind its share, so that after any number of prompts each source is within one prompt of it.

    Args:
        prompts: all prompts, each with its source and its weight.
        key: key of the order.
        weights: weight of each source by name; 1 where there is none.
    """

    def __init__(self, prompts: Sequence[Prompt], key: Key, weights: Mapping[str, float] | None = None) -> None:
        names = list(dict.fromkeys(prompt.source for prompt in prompts))
        total = sum((weights or {}).get(name, 1.0) for name in names)
        self.shares = [(weights or {}).get(name, 1.0) / total for name in names]
        self.epochs = [
            _Epochs(
                [i for i, prompt in enumerate(prompts) if prompt.source == name],
                [prompt.weight for prompt in prompts if prompt.source == name],
                fold_in(key, number),
            )
            for number, name in enumerate(names)
        ]
        self._done, self._taken = 0, [0] * len(names)

    def places(self, first: int, count: int) -> list[int]:
        """Return the indices of `count` prompts, from number `first` of the order on."""
        if first < self._done:  # the order is walked from its beginning
            self._done, self._taken = 0, [0] * len(self.epochs)
        found = []
        while self._done < first + count:
            source = self._next()
            if self._done >= first:
                found.append(self.epochs[source].at(self._taken[source]))
            self._taken[source] += 1
            self._done += 1
        return found

    def _next(self) -> int:
        """Return the source that is furthest behind its share."""
        behind = [share * (self._done + 1) - taken for share, taken in zip(self.shares, self._taken, strict=True)]
        return max(range(len(behind)), key=behind.__getitem__)


class _Epochs:
    """Shuffled epochs of one source."""

    def __init__(self, members: Sequence[int], weights: Sequence[float], key: Key) -> None:
        self.members, self.weights, self.key = members, weights, fold_in(key, Stream.EPOCHS)
        self._epoch, self._start, self._order = -1, 0, list[int]()

    def at(self, position: int) -> int:
        """Return the prompt at a position of the endless order."""
        if position < self._start:
            self._epoch, self._start, self._order = -1, 0, []
        while position >= self._start + len(self._order):
            self._start += len(self._order)
            self._epoch += 1
            self._order = self._shuffled(self._epoch)
        return self._order[position - self._start]

    def _shuffled(self, epoch: int) -> list[int]:
        """Return the prompts of an epoch in their order."""
        members = [
            member
            for member, weight in zip(self.members, self.weights, strict=True)
            for _ in range(math.ceil((epoch + 1) * weight) - math.ceil(epoch * weight))
        ]
        if not members:
            return []
        places: list[int] = uniform(fold_in(self.key, epoch), (len(members),)).argsort(stable=True).tolist()
        return [members[place] for place in places]
