"""Aspect-ratio buckets: prompts with the size of their samples, in batches of one size."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fluvial.core.random import Key, fold_in, uniform
from fluvial.engines.data.order import PromptOrder
from fluvial.engines.data.records import Prompt
from fluvial.engines.data.sizes import Size, nearest_size, parse_size
from fluvial.engines.errors import UsageError
from fluvial.engines.streams import Stream


def with_recorded_sizes(prompts: Sequence[Prompt], sizes: Sequence[Size]) -> tuple[Prompt, ...]:
    """Return prompts with the size that the columns `size`, or `width` and `height`, of their records are nearest to.

    A prompt without these columns keeps none; the size of its samples is drawn.

    Raises:
        UsageError: a column holds no size, or none of `sizes` is near it; the message names the prompt.
    """
    found = []
    for prompt in prompts:
        columns = prompt.metadata
        try:
            if "size" in columns:
                asked = parse_size(str(columns["size"]))
            elif "width" in columns and "height" in columns:
                asked = parse_size(f"{columns['width']}x{columns['height']}")
            else:
                found.append(prompt)
                continue
            found.append(replace(prompt, size=nearest_size(asked, sizes)))
        except ValueError as error:
            raise UsageError(f"prompt {prompt.text[:40]!r}: {error}") from error
    return tuple(found)


class BatchOrder:
    """Endless order of batches of prompts; the prompts of a batch have one size, or none of them has one.

    Batches of a size come as often as its prompts do: the next batch is that of the size which is furthest behind its share.
    The prompts of a size are shuffled in epochs, see `PromptOrder`. Where all prompts have the same size, or none, the order
    is that of `PromptOrder`.

    Args:
        prompts: all prompts.
        key: key of the order.
        weights: weight of each source by name; 1 where there is none.
    """

    def __init__(self, prompts: Sequence[Prompt], key: Key, weights: Mapping[str, float] | None = None) -> None:
        weights = weights or {}
        totals: defaultdict[str, float] = defaultdict(float)  # weight of the prompts of each source
        for prompt in prompts:
            totals[prompt.source] += prompt.weight
        self.members: dict[Size | None, list[int]] = {}
        mass: defaultdict[Size | None, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for place, prompt in enumerate(prompts):
            self.members.setdefault(prompt.size, []).append(place)
            mass[prompt.size][prompt.source] += weights.get(prompt.source, 1.0) * prompt.weight / totals[prompt.source]
        total = sum(sum(parts.values()) for parts in mass.values())
        self.shares = {size: sum(mass[size].values()) / total for size in self.members}
        if len(self.members) == 1:
            self.orders = {size: PromptOrder(prompts, key, weights) for size in self.members}
        else:
            self.orders = {
                size: PromptOrder(
                    [prompts[place] for place in places], fold_in(fold_in(key, Stream.SIZES), number), mass[size]
                )
                for number, (size, places) in enumerate(self.members.items())
            }
        self._taken, self._done = dict.fromkeys(self.members, 0), 0

    def batch(self, number: int, count: int) -> list[int]:
        """Return the indices of the `count` prompts of a batch, whose number is from 0 on."""
        if number < self._done:  # the order is walked from its beginning
            self._taken, self._done = dict.fromkeys(self.members, 0), 0
        size, before = self._step()
        while self._done <= number:
            size, before = self._step()
        return [self.members[size][place] for place in self.orders[size].places(before * count, count)]

    def _step(self) -> tuple[Size | None, int]:
        """Take the next batch, and return its size and the number of batches of this size before it."""
        behind = {size: share * (self._done + 1) - self._taken[size] for size, share in self.shares.items()}
        size = max(behind, key=behind.__getitem__)
        self._taken[size] += 1
        self._done += 1
        return size, self._taken[size] - 1


def drawn_batch(prompts: Sequence[Prompt], key: Key, count: int) -> list[int]:
    """Return the indices of prompts that are drawn with replacement; all have the size of the first."""
    draws = uniform(key, (count,))
    places: list[int] = (draws * len(prompts)).long().tolist()
    sizes = [prompt.size for prompt in prompts]
    if len(set(sizes)) > 1:
        same = [place for place, size in enumerate(sizes) if size == sizes[places[0]]]
        places = [places[0], *(same[place] for place in (draws[1:] * len(same)).long().tolist())]
    return places


def distinct_batch(prompts: Sequence[Prompt], key: Key, count: int) -> list[int]:
    """Return the indices of prompts that are drawn without replacement, all of them before one comes again.

    All have the size of one that is drawn.
    """
    sizes = [prompt.size for prompt in prompts]
    size = sizes[int(uniform(key, (1,)) * len(sizes))]
    members = [place for place, other in enumerate(sizes) if other == size]
    rounds = -(-count // len(members))
    orders = uniform(fold_in(key, torch.arange(rounds)), (rounds, len(members))).argsort(dim=1, stable=True)
    return [members[i] for i in orders.flatten()[:count].tolist()]


def size_of_batch(prompts: Sequence[Prompt], key: Key, sizes: Sequence[Size]) -> Size:
    """Return the size of a batch: that of its prompts, else one that is drawn, each as likely."""
    given = prompts[0].size
    return sizes[int(uniform(key, (1,)) * len(sizes))] if given is None else given
