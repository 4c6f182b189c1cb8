"""Order of prompts: shuffled epochs per source, sources mixed by weight, in batches of one size.

The order is a function of the key. It has no state for checkpoints, so it is the same on every rank and after every resume.
Any prompt of the order is found in O(1); only prompts of unequal weights are counted once per epoch.
"""

import math
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Generic, Literal, TypeVar

import torch

from fluvial.core.random import Key, fold_in, key, permute, uniform
from fluvial.engines.data.prompt_table import PromptKind, list_kinds, select
from fluvial.engines.data.records import Prompt
from fluvial.engines.data.sizes import Size
from fluvial.engines.errors import UsageError
from fluvial.engines.streams import Stream

# Folded into a run's key: larger than any number of an update, which other streams fold in.
ORDER = 2**62
Party = TypeVar("Party")


def _to_fraction(weight: float | Fraction) -> Fraction:
    """Return a weight as the decimal number that was typed."""
    return Fraction(str(weight))


def _group(codes: "array[int]", parties: Mapping[int, Party]) -> dict[Party, Sequence[int]]:
    """Return the indices of each party in ascending order, from the code of each index and the party of each code."""
    if len({*parties.values()}) == 1:
        return dict.fromkeys(parties.values(), range(len(codes)))
    indices = {party: array("i") for party in parties.values()}
    for index, code in enumerate(codes):
        indices[parties[code]].append(index)
    return dict(indices)


def derive_order_key(seed: int) -> Key:
    """Return the key of the order of prompts."""
    return fold_in(key(seed), ORDER)


# Up to this size a shuffle sorts random numbers (4 ms, 0.5 MB); larger ones are permuted index by index.
SORTED = 2**16


class Shuffle:
    """Random permutation of range(size)."""

    def __init__(self, key: Key, size: int) -> None:
        self.key, self.size = key, size
        self._sorted = uniform(key, (size,)).argsort(stable=True) if size <= SORTED else None

    def __getitem__(self, index: int) -> int:
        """Return the permuted index."""
        return permute(self.key, index, self.size) if self._sorted is None else int(self._sorted[index])


class Turns(Generic[Party]):
    """Endless order of turns: the next turn goes to the party that is furthest behind its share.

    The order has a period: the sum of the weights, as integers without a common divisor.

    Args:
        weights: exact weight of each party, above 0.
    """

    def __init__(self, weights: Mapping[Party, Fraction]) -> None:
        least = math.lcm(*(weight.denominator for weight in weights.values()))
        counts = {party: int(weight * least) for party, weight in weights.items()}
        divisor = math.gcd(*counts.values())
        self.shares = {party: count // divisor for party, count in counts.items()}  # turns of each party in a period
        self.period = sum(self.shares.values())
        self._taken, self._done = dict.fromkeys(self.shares, 0), 0

    def take(self, first: int, count: int) -> list[tuple[Party, int]]:
        """Return the party of each of `count` turns from number `first` on, and the number of its earlier turns."""
        periods, first = divmod(first, self.period)
        if first < self._done:  # start the period again
            self._taken, self._done = dict.fromkeys(self.shares, 0), 0
        turns = []
        while self._done < first + count:
            behind = {
                party: share * (self._done + 1) - self._taken[party] * self.period for party, share in self.shares.items()
            }
            party = max(behind, key=behind.__getitem__)
            if self._done >= first:
                turns.append((party, self._taken[party] + periods * self.shares[party]))
            self._taken[party] += 1
            self._done += 1
        return turns


class PromptOrder:
    """Endless order of prompts.

    An epoch of a source holds each of its prompts once, shuffled. A prompt of weight w comes w times per epoch on average:
    with weight 0.5 in every second epoch, beginning with the first. The next prompt comes from the source that is furthest
    behind its share, so each source is always within one prompt of its share.

    Args:
        prompts: all prompts, each with its source and its weight.
        key: key of the order.
        weights: weight of each source by name; 1 for sources without one.
    """

    def __init__(
        self, prompts: Sequence[Prompt], key: Key, weights: Mapping[str, float] | Mapping[str, Fraction] | None = None
    ) -> None:
        kinds, codes = list_kinds(prompts)
        members = _group(codes, {code: kinds[code].source for code in dict.fromkeys(codes)})
        self.turns = Turns({source: _to_fraction((weights or {}).get(source, 1.0)) for source in members})
        self.epochs = {
            source: _Epochs(indices, kinds, codes, fold_in(key, number))
            for number, (source, indices) in enumerate(members.items())
        }

    def take(self, first: int, count: int) -> list[int]:
        """Return the indices of `count` prompts, from number `first` of the order on."""
        return [self.epochs[source].look_up(position) for source, position in self.turns.take(first, count)]


class _Epochs:
    """Shuffled epochs of one source, whose prompts are `members`."""

    def __init__(self, members: Sequence[int], kinds: Sequence[PromptKind], codes: "array[int]", key: Key) -> None:
        self.members, self.kinds, self.codes, self.key = members, kinds, codes, fold_in(key, Stream.EPOCHS)
        self.counts: Counter[float] = Counter()  # of prompts of each weight
        for code, count in Counter(map(codes.__getitem__, members)).items():
            self.counts[kinds[code].weight] += count
        self._epoch, self._first, self._end = -1, 0, 0
        self._shuffle, self._sums = Shuffle(self.key, 0), torch.zeros(0)

    def look_up(self, position: int) -> int:
        """Return the prompt at a position of the endless order."""
        if not self._first <= position < self._end:
            self._seek(position)
        index = self._shuffle[position - self._first]
        if len(self.counts) > 1:
            return self.members[int(torch.searchsorted(self._sums, index, right=True))]
        return self.members[index // ((self._end - self._first) // len(self.members))]

    def _count_before(self, epoch: int) -> int:
        """Return the number of prompts in all epochs before one; a prompt of weight w came ceil(epoch w) times."""
        return sum(count * math.ceil(epoch * weight) for weight, count in self.counts.items())

    def _seek(self, position: int) -> None:
        """Set up the epoch of a position."""
        mean = sum(count * weight for weight, count in self.counts.items())
        epoch = bisect_right(range(int(position / mean) + 2), position, key=self._count_before) - 1
        self._epoch, self._first, self._end = epoch, self._count_before(epoch), self._count_before(epoch + 1)
        self._shuffle = Shuffle(fold_in(self.key, epoch), self._end - self._first)
        if len(self.counts) > 1:
            times = [math.ceil((epoch + 1) * kind.weight) - math.ceil(epoch * kind.weight) for kind in self.kinds]
            codes = torch.frombuffer(self.codes, dtype=torch.int32)
            if isinstance(self.members, array):
                codes = codes[torch.frombuffer(self.members, dtype=torch.int32)]
            self._sums = torch.tensor(times, dtype=torch.int32)[codes].cumsum(0, dtype=torch.int32)


class BatchOrder:
    """Endless order of batches of prompts; all prompts of a batch have the same size, or none has a size.

    The frequency of a size is that of its prompts, which are shuffled in epochs, see `PromptOrder`. If all prompts have the
    same size, or none, the order is that of `PromptOrder`.

    Args:
        prompts, key, weights: arguments of `PromptOrder`.
    """

    def __init__(self, prompts: Sequence[Prompt], key: Key, weights: Mapping[str, float] | None = None) -> None:
        kinds, codes = list_kinds(prompts)
        counts = Counter(codes)
        totals: defaultdict[str, Fraction] = defaultdict(Fraction)  # total weight of the prompts by source
        for code, count in counts.items():
            totals[kinds[code].source] += count * _to_fraction(kinds[code].weight)
        self.members = _group(codes, {code: kinds[code].size for code in counts})
        mass: dict[Size | None, defaultdict[str, Fraction]] = {size: defaultdict(Fraction) for size in self.members}
        for code, count in counts.items():
            kind, share = kinds[code], _to_fraction((weights or {}).get(kinds[code].source, 1.0))
            mass[kind.size][kind.source] += share * count * _to_fraction(kind.weight) / totals[kind.source]
        self.turns = Turns({size: sum(parts.values(), Fraction()) for size, parts in mass.items()})
        if len(self.members) == 1:
            self.orders = {size: PromptOrder(prompts, key, weights) for size in self.members}
        else:
            self.orders = {
                size: PromptOrder(select(prompts, indices), fold_in(fold_in(key, Stream.SIZES), number), mass[size])
                for number, (size, indices) in enumerate(self.members.items())
            }

    def take_batch(self, number: int, count: int) -> list[int]:
        """Return the indices of the `count` prompts of batch `number`, counted from 0."""
        [(size, before)] = self.turns.take(number, 1)
        return self.take_size(size, before * count, count)

    def take_size(self, size: Size | None, first: int, count: int) -> list[int]:
        """Return the indices of `count` prompts of a size, from number `first` of their order on."""
        return [self.members[size][index] for index in self.orders[size].take(first, count)]


class PromptPool:
    """Prompts to draw from at random; all prompts of a draw have one size.

    Args:
        prompts: all prompts; their weights have no effect.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.kinds, self.codes = list_kinds(prompts)
        self.members = _group(self.codes, {code: self.kinds[code].size for code in dict.fromkeys(self.codes)})

    def draw(self, key: Key, count: int, size: Size | Literal["any"] | None = "any") -> list[int]:
        """Draw the indices of `count` prompts of a size, with replacement; "any" takes the size of the first one."""
        draws, first = uniform(key, (count,)), list[int]()
        if size == "any" and len(self.members) > 1:
            first, draws = [int(draws[0] * len(self.codes))], draws[1:]
        members = self._choose_members(first, size)
        return [*first, *(members[index] for index in (draws * len(members)).long().tolist())]

    def draw_distinct(self, key: Key, count: int, size: Size | Literal["any"] | None = "any") -> list[int]:
        """Draw the indices of `count` prompts of a size, all of them before one repeats; "any" draws the size."""
        members = self._choose_members([int(uniform(key, (1,)) * len(self.codes))], size)
        rounds = [Shuffle(fold_in(key, number), len(members)) for number in range(-(-count // len(members)))]
        return [members[rounds[number // len(members)][number % len(members)]] for number in range(count)]

    def _choose_members(self, first: Sequence[int], size: Size | Literal["any"] | None) -> Sequence[int]:
        """Return the indices of the prompts of a size; "any" takes that of the first prompt, or the only one."""
        if size != "any":
            return self.members[size]
        return self.members[self.kinds[self.codes[first[0]]].size] if first else next(iter(self.members.values()))


def draw_size(prompts: Sequence[Prompt], key: Key, sizes: Sequence[Size]) -> Size:
    """Return the size of a batch: that of its prompts, else one drawn uniformly."""
    size = prompts[0].size
    return sizes[int(uniform(key, (1,)) * len(sizes))] if size is None else size


class Captions:
    """Images of each caption, to compare with each other. With several sizes, only images of one size are compared.

    A caption with a single image is left out. A prompt without an image, whose sample is generated by a job, is compared
    with other samples of the prompt.

    Args:
        prompts: captions with their images.

    Raises:
        UsageError: no caption has two images of one size.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        groups: dict[tuple[str, object], list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault((prompt.text, prompt.size), []).append(index)
        self.members = [indices for indices in groups.values() if len(indices) > 1 or prompts[indices[0]].image is None]
        if not self.members:
            raise UsageError(
                "`compare` is caption, and no caption of data has two images: add images, or set it "
                "to data, which compares images of different captions"
            )
        self.firsts = [prompts[indices[0]] for indices in self.members]

    def draw(self, caption: int, key: Key, count: int) -> list[int]:
        """Draw the indices of `count` images of a caption of `firsts`, all of them before one repeats."""
        indices = self.members[caption]
        order: list[int] = uniform(key, (len(indices),)).argsort(stable=True).tolist()
        return [indices[order[number % len(indices)]] for number in range(count)]
