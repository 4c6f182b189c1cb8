"""Prompts of large files in a few buffers: about 12 bytes per prompt beside its text."""

import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, eq, index
from typing import Any, NamedTuple, overload

from fluvial.engines.data.records import Prompt
from fluvial.engines.data.sizes import Size

FURTHER = ("negative", "image", "video", "audio", "metadata", "media")
PLAIN: tuple[Any, ...] = (None, None, None, None, {}, {})  # further fields of a prompt that is a text alone


class PromptKind(NamedTuple):
    """Fields that are equal in many prompts."""

    source: str
    weight: float
    tag: str | None
    size: Size | None


class PromptTable(Sequence[Prompt]):
    """Immutable sequence of prompts, built from any iterable and made again from its buffers when one is asked for.

    Texts lie in one buffer of UTF-8, and fields that few prompts have in another, pickled: the pickles are made here, and
    none is read from a file or a socket. Source, weight, tag and size are one number per prompt, an index into the kinds of
    prompts. One million prompts of 70 characters take 85 MB.
    """

    def __init__(self, prompts: Iterable[Prompt] = ()) -> None:
        self._texts, self._ends = bytearray(), array("Q", [0])
        self._codes, self._rest = array("i"), bytearray()
        self._rest_ends = array("Q")  # empty until a prompt has further fields
        self._places: array[int] | None = None  # rows of the buffers, in order; all of them if None
        known: dict[tuple[Any, ...], int] = {}
        kind_of, further_of = attrgetter(*PromptKind._fields), attrgetter(*FURTHER)
        for prompt in prompts:
            self._codes.append(known.setdefault(kind_of(prompt), len(known)))
            further = further_of(prompt)
            if further != PLAIN:
                self._rest_ends.extend([0] * (len(self._codes) - len(self._rest_ends)))
                self._rest += pickle.dumps((*further[:4], *map(dict, further[4:])))
            self._texts += prompt.text.encode()
            self._ends.append(len(self._texts))
            if self._rest_ends:
                self._rest_ends.append(len(self._rest))
        self.kinds = [PromptKind(*kind) for kind in known]

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._codes) if self._places is None else len(self._places)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, place: int | slice) -> Prompt | tuple[Prompt, ...]:
        """Return a prompt, or those of a slice."""
        if isinstance(place, slice):
            return tuple(map(self._at, range(len(self))[place]))
        return self._at(range(len(self))[index(place)])

    def __iter__(self) -> Iterator[Prompt]:
        """Yield every prompt."""
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether another sequence, a tuple or a table, holds equal prompts."""
        if not isinstance(other, PromptTable | tuple):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def select(self, places: Iterable[int]) -> "PromptTable":
        """Return the prompts at some places, which share the buffers."""
        selected = object.__new__(PromptTable)
        selected.__dict__.update(self.__dict__)
        selected._places = array("i", places if self._places is None else map(self._places.__getitem__, places))
        return selected

    def codes(self) -> "array[int]":
        """Return the index into `kinds` of each prompt, as 32-bit integers."""
        return self._codes if self._places is None else array("i", map(self._codes.__getitem__, self._places))

    def examples(self) -> Iterator[Prompt]:
        """Yield the first prompt of each kind without further fields, and every prompt with them."""
        codes, seen = self.codes(), set[int]()
        if not self._rest:
            yield from map(self._at, map(codes.index, dict.fromkeys(codes)))
            return
        for place, code in enumerate(codes):
            if self._further(self._row(place)):
                yield self._at(place)
            elif code not in seen:
                seen.add(code)
                yield self._at(place)

    def _row(self, place: int) -> int:
        return place if self._places is None else self._places[place]

    def _further(self, row: int) -> memoryview | bytes:
        """Return the pickled further fields of a row, empty if it has none."""
        if row + 1 >= len(self._rest_ends):
            return b""
        return memoryview(self._rest)[self._rest_ends[row] : self._rest_ends[row + 1]]

    def _at(self, place: int) -> Prompt:
        row = self._row(place)
        text = self._texts[self._ends[row] : self._ends[row + 1]].decode()
        kind, further = self.kinds[self._codes[row]], self._further(row)
        rest = pickle.loads(further) if further else (*PLAIN[:4], {}, {})
        prompt = object.__new__(Prompt)  # its values were checked when it was first made
        prompt.__dict__.update(zip(("text", *PromptKind._fields, *FURTHER), (text, *kind, *rest), strict=True))
        return prompt


def list_kinds(prompts: Sequence[Prompt]) -> "tuple[list[PromptKind], array[int]]":
    """Return the kinds of prompts, and the index of each prompt's kind, as 32-bit integers."""
    if isinstance(prompts, PromptTable):
        return prompts.kinds, prompts.codes()
    known: dict[tuple[Any, ...], int] = {}
    codes = array("i", [known.setdefault(attrgetter(*PromptKind._fields)(prompt), len(known)) for prompt in prompts])
    return [PromptKind(*kind) for kind in known], codes


def select(prompts: Sequence[Prompt], places: Iterable[int]) -> Sequence[Prompt]:
    """Return the prompts at some places; those of a table share its buffers."""
    return prompts.select(places) if isinstance(prompts, PromptTable) else tuple(prompts[place] for place in places)


def list_examples(*parts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Yield prompts so that none left out has anything but its text that one before it lacks, for checks of fields."""
    for part in parts:
        yield from part.examples() if isinstance(part, PromptTable) else part
