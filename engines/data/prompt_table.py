"""Table of prompts in a few buffers: about 12 bytes per prompt beside its text, for large files."""

import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, eq, index
from typing import Any, NamedTuple, overload

from fluvial.engines.data.records import Prompt
from fluvial.engines.data.sizes import Size

FURTHER = ("negative", "image", "video", "audio", "metadata", "media")
PLAIN: tuple[Any, ...] = (None, None, None, None, {}, {})  # further fields of a prompt that is only a text


class PromptKind(NamedTuple):
    """Fields with few different values among many prompts."""

    source: str
    weight: float
    tag: str | None
    size: Size | None


class PromptTable(Sequence[Prompt]):
    """Immutable sequence of prompts in buffers; a prompt is built when it is accessed.

    Texts are in one buffer of UTF-8. Fields that few prompts have are in another, pickled; these pickles never come from a
    file or a socket. Source, weight, tag and size are one number per prompt, an index into the kinds of prompts. One million
    prompts of 70 characters take 85 MB.
    """

    def __init__(self, prompts: Iterable[Prompt] = ()) -> None:
        self._texts, self._ends = bytearray(), array("Q", [0])
        self._codes, self._rest = array("i"), bytearray()
        self._rest_ends = array("Q")  # empty until a prompt has further fields
        self._rows: array[int] | None = None  # rows of the buffers, in order; None for all
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
        return len(self._codes) if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, number: int) -> Prompt: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, number: int | slice) -> Prompt | tuple[Prompt, ...]:
        """Return a prompt, or those of a slice."""
        if isinstance(number, slice):
            return tuple(map(self._build, range(len(self))[number]))
        return self._build(range(len(self))[index(number)])

    def __iter__(self) -> Iterator[Prompt]:
        """Yield every prompt."""
        return map(self._build, range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether another sequence, a tuple or a table, holds equal prompts."""
        if not isinstance(other, PromptTable | tuple):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def select(self, numbers: Iterable[int]) -> "PromptTable":
        """Return a table of the prompts with the given numbers, which shares the buffers."""
        selected = object.__new__(PromptTable)
        selected.__dict__.update(self.__dict__)
        selected._rows = array("i", numbers if self._rows is None else map(self._rows.__getitem__, numbers))
        return selected

    @property
    def codes(self) -> "array[int]":
        """Index into `kinds` of each prompt, as 32-bit integers."""
        return self._codes if self._rows is None else array("i", map(self._codes.__getitem__, self._rows))

    def list_examples(self) -> Iterator[Prompt]:
        """Yield the first prompt of each kind without further fields, and every prompt with further fields."""
        codes, seen = self.codes, set[int]()
        if not self._rest:
            yield from map(self._build, map(codes.index, dict.fromkeys(codes)))
            return
        for number, code in enumerate(codes):
            if self._read_further(self._find_row(number)):
                yield self._build(number)
            elif code not in seen:
                seen.add(code)
                yield self._build(number)

    def _find_row(self, number: int) -> int:
        return number if self._rows is None else self._rows[number]

    def _read_further(self, row: int) -> memoryview | bytes:
        """Return the pickled further fields of a row, empty if it has none."""
        if row + 1 >= len(self._rest_ends):
            return b""
        return memoryview(self._rest)[self._rest_ends[row] : self._rest_ends[row + 1]]

    def _build(self, number: int) -> Prompt:
        row = self._find_row(number)
        text = self._texts[self._ends[row] : self._ends[row + 1]].decode()
        kind, further = self.kinds[self._codes[row]], self._read_further(row)
        rest = pickle.loads(further) if further else (*PLAIN[:4], {}, {})
        prompt = object.__new__(Prompt)  # its values were checked when it was first built
        prompt.__dict__.update(zip(("text", *PromptKind._fields, *FURTHER), (text, *kind, *rest), strict=True))
        return prompt


def list_kinds(prompts: Sequence[Prompt]) -> "tuple[list[PromptKind], array[int]]":
    """Return the kinds of prompts, and the index of each prompt's kind, as 32-bit integers."""
    if isinstance(prompts, PromptTable):
        return prompts.kinds, prompts.codes
    known: dict[tuple[Any, ...], int] = {}
    codes = array("i", [known.setdefault(attrgetter(*PromptKind._fields)(prompt), len(known)) for prompt in prompts])
    return [PromptKind(*kind) for kind in known], codes


def select(prompts: Sequence[Prompt], numbers: Iterable[int]) -> Sequence[Prompt]:
    """Return the prompts with the given numbers; those of a table share its buffers."""
    return prompts.select(numbers) if isinstance(prompts, PromptTable) else tuple(prompts[number] for number in numbers)


def list_examples(*parts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Yield enough prompts for checks of fields: others differ from one of them only in the text."""
    for part in parts:
        yield from part.list_examples() if isinstance(part, PromptTable) else part
