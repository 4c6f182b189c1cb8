"""The order of prompts: shuffled epochs per source, the sources mixed by weight, in batches of one size.

The order is a function of the key alone. It is drawn by position and holds no state that a checkpoint would have to store,
so it is the same on every rank and after every resume.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch

from fluvial.core.random import Key, fold_in, key, uniform
from fluvial.engines.data.records import Prompt
from fluvial.engines.data.sizes import Size
from fluvial.engines.errors import UsageError
from fluvial.engines.streams import Stream

# Folded into a run's key: no run has as many updates, whose numbers are folded in elsewhere.
ORDER = 2**62
Party = TypeVar("Party")


def order_key(seed: int) -> Key:
    """Return the key of the order of prompts."""
    return fold_in(key(seed), ORDER)


class Turns(Generic[Party]):
    """Endless order of turns: the next one is that of the party which is furthest behind its share.

    Args:
        shares: share of the turns of each party; they add up to 1.
    """

    def __init__(self, shares: Mapping[Party, float]) -> None:
        self.shares = shares
        self._taken, self._done = dict.fromkeys(shares, 0), 0

    def after(self, first: int, count: int) -> list[tuple[Party, int]]:
        """Return the party of each of `count` turns from number `first` on, and the number of its own turns before."""
        if first < self._done:  # the order is walked from its beginning
            self._taken, self._done = dict.fromkeys(self.shares, 0), 0
        found = []
        while self._done < first + count:
            behind = {party: share * (self._done + 1) - self._taken[party] for party, share in self.shares.items()}
            party = max(behind, key=behind.__getitem__)
            if self._done >= first:
                found.append((party, self._taken[party]))
            self._taken[party] += 1
            self._done += 1
        return found


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
        members: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            members.setdefault(prompt.source, []).append(place)
        wanted = {source: (weights or {}).get(source, 1.0) for source in members}
        total = sum(wanted.values())
        self.turns = Turns({source: weight / total for source, weight in wanted.items()})
        self.epochs = {
            source: _Epochs(places, [prompts[place].weight for place in places], fold_in(key, number))
            for number, (source, places) in enumerate(members.items())
        }

    def places(self, first: int, count: int) -> list[int]:
        """Return the indices of `count` prompts, from number `first` of the order on."""
        return [self.epochs[source].at(position) for source, position in self.turns.after(first, count)]


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
            self._order = self._shuffle(self._epoch)
        return self._order[position - self._start]

    def _shuffle(self, epoch: int) -> list[int]:
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


class BatchOrder:
    """Endless order of batches of prompts; the prompts of a batch have one size, or none of them has one.

    Batches of a size come as often as its prompts do, and the prompts of a size are shuffled in epochs, see `PromptOrder`.
    Where all prompts have the same size, or none, the order is that of `PromptOrder`.

    Args:
        prompts, key, weights: arguments of `PromptOrder`.
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
        self.turns = Turns({size: sum(mass[size].values()) / total for size in self.members})
        if len(self.members) == 1:
            self.orders = {size: PromptOrder(prompts, key, weights) for size in self.members}
        else:
            self.orders = {
                size: PromptOrder(
                    [prompts[place] for place in places], fold_in(fold_in(key, Stream.SIZES), number), mass[size]
                )
                for number, (size, places) in enumerate(self.members.items())
            }

    def batch(self, number: int, count: int) -> list[int]:
        """Return the indices of the `count` prompts of a batch, whose number is from 0 on."""
        [(size, before)] = self.turns.after(number, 1)
        return self.of_size(size, before * count, count)

    def of_size(self, size: Size | None, first: int, count: int) -> list[int]:
        """Return the indices of `count` prompts of a size, from number `first` of their order on."""
        return [self.members[size][place] for place in self.orders[size].places(first, count)]


def draw_batch(prompts: Sequence[Prompt], key: Key, count: int) -> list[int]:
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


class Captions:
    """The images of each caption. Images of several sizes are compared with those of their size.

    A caption with a single image is left out, because there is nothing to compare it with. A prompt without an image, whose
    sample a job makes itself, is compared with other samples of the prompt.

    Args:
        prompts: captions with their images.

    Raises:
        UsageError: no caption has two images of one size.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        found: dict[tuple[str, object], list[int]] = {}
        for place, prompt in enumerate(prompts):
            found.setdefault((prompt.text, prompt.size), []).append(place)
        self.members = [places for places in found.values() if len(places) > 1 or prompts[places[0]].image is None]
        if not self.members:
            raise UsageError(
                "`compare` is caption, and no caption of data has two images: add images, or set it "
                "to data, which compares images of different captions"
            )
        self.firsts = [prompts[places[0]] for places in self.members]

    def draw(self, caption: int, key: Key, count: int) -> list[int]:
        """Return the indices of `count` images of a caption of `firsts`, each as often as the others, or once more."""
        places = self.members[caption]
        order: list[int] = uniform(key, (len(places),)).argsort(stable=True).tolist()
        return [places[order[number % len(places)]] for number in range(count)]
