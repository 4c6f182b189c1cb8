"""Built-in prompt sets, named as `@ocr`: generated from templates, with a training and a held-out part.

They are not the published files, which `--prompts FILE` takes. Your own set is a function from the part to its records,
named as `@module:name` or declared as an entry point of `fluvial.prompts`.
"""

import hashlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any, Literal, TypeVar

from fluvial.engines import plugins
from fluvial.engines.data.tables import FileRecord, drop_nulls
from fluvial.engines.errors import UsageError

MARK = "@"  # before the name of a set
Part = Literal["train", "heldout"]
Record = Mapping[str, Any]  # a column `prompt`, and any others, as in a line of a .jsonl file
PromptSet = Callable[[Part], Iterable[Record]]
T = TypeVar("T")

LISTS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}


def ocr(part: Part) -> Iterator[Record]:
    """Text in double quotes for the reward ocr; no training prompt has a held-out text."""
    texts = [
        *(("name", f"{kind} {place}") for kind, place in product(LISTS["sign_kinds"], LISTS["sign_places"])),
        *(("notice", text) for text in LISTS["notices"]),
        *(("number", f"{word} {number}") for word, numbers in LISTS["numbered"].items() for number in numbers),
    ]
    chosen = _take_part(part, texts, heldout=20)
    for (tag, text), sign in _shuffle(product(chosen, LISTS["signs"])):
        yield {"prompt": sign.format(text), "tag": tag}


def geneval(part: Part) -> Iterator[Record]:
    """Objects, counts, colours and positions in GenEval's six tags, with its metadata."""
    classes = LISTS["classes"]
    coloured, pairs = [name for name in classes if name != "person"], list(permutations(classes, 2))
    for name in _take_part(part, classes, heldout=16):
        yield _make_record("single_object", f"a photo of {_name(name)}", _quantify(name))
    for one, other in _take_part(part, list(combinations(classes, 2)), heldout=50, most=400):
        yield _make_record(
            "two_object",
            f"a photo of {_name(one)} and {_name(other)}",
            _quantify(one),
            _quantify(other),
        )
    for name, number in _take_part(part, list(product(_list_countable(), (2, 3, 4))), heldout=40):
        yield _count_objects(f"a photo of {NUMBERS[number]} {_pluralise(name)}", name, number)
    for name, colour in _take_part(part, list(product(coloured, LISTS["colours"])), heldout=50, most=400):
        yield _make_record("colors", f"a photo of {_name(colour)} {name}", {**_quantify(name), "color": colour})
    for (one, other), where in _take_part(part, list(product(pairs, LISTS["positions"])), heldout=50, most=800):
        placed = {**_quantify(one), "position": [where, 0]}
        yield _make_record("position", f"a photo of {_name(one)} {where} {_name(other)}", _quantify(other), placed)
    for one, other in _take_part(part, [pair for pair in pairs if "person" not in pair], heldout=50, most=600):
        first, second = _choose_two_colours(one, other)
        text = f"a photo of {_name(first)} {one} and {_name(second)} {other}"
        yield _make_record("color_attr", text, {**_quantify(one), "color": first}, {**_quantify(other), "color": second})


def animals(part: Part) -> Iterator[Record]:
    """Animals, alone and in human activities; no training prompt has a held-out animal."""
    chosen = _take_part(part, LISTS["animals"], heldout=10)
    yield from ({"prompt": _name(animal), "tag": "alone"} for animal in chosen)
    for animal, activity in _shuffle(product(chosen, LISTS["activities"])):
        yield {"prompt": f"{_name(animal)} {activity}", "tag": "activity"}


def counting(part: Part) -> Iterator[Record]:
    """Two to six objects in several settings, with GenEval's metadata."""
    chosen = _take_part(part, list(product(_list_countable(), NUMBERS)), heldout=40)
    places = ("on a white background", "in a bright studio", "seen from above", "in an oil painting", "in a pencil drawing")
    for (name, number), place in _shuffle(product(chosen, places)):
        yield _count_objects(f"{NUMBERS[number]} {_pluralise(name)} {place}", name, number)


def drawbench_like(part: Part) -> Iterator[Record]:
    """General prompts in eight categories, for rewards that predict preferences."""
    bare, places, animals = LISTS["things"], LISTS["settings"], LISTS["animals"]
    things = [_name(thing) for thing in bare]
    kinds: dict[str, Iterable[str]] = {
        "colour": (f"{_name(colour)} {thing} {place}" for colour, thing, place in product(LISTS["colours"], bare, places)),
        "count": (f"{NUMBERS[n]} {_pluralise(thing)} {place}" for n, thing, place in product((2, 3, 4), bare, places)),
        "material": (f"{_name(thing)} made of {material}" for thing, material in product(bare, LISTS["materials"])),
        "relation": (f"{one} {how} {other}" for (one, other), how in product(permutations(things, 2), LISTS["sizes"])),
        "setting": (f"{thing} {place}" for thing, place in product(things, places)),
        "style": (f"{thing} {place}, {style}" for thing, place, style in product(things, places, LISTS["styles"])),
        "text": (f'{thing} beside a sign that says "{text}"' for thing, text in product(things, LISTS["notices"])),
        "animal": (f"{_name(one)} {doing} {place}" for one, doing, place in product(animals, LISTS["activities"], places)),
    }
    for tag, texts in kinds.items():
        yield from ({"prompt": text, "tag": tag} for text in _take_part(part, list(texts), heldout=25, most=250))


def handwriting(part: Part, first: str) -> Iterator[Record]:
    """Codes of the built-in handwriting model whose first digit is one of `first`."""
    from fluvial.models.handwriting import list_codes  # imports torch

    yield from ({"prompt": code} for code in list_codes(part) if code[0] in first)


PROMPT_SETS: dict[str, PromptSet] = {
    "ocr": ocr,
    "geneval": geneval,
    "animals": animals,
    "counting": counting,
    "drawbench-like": drawbench_like,
    "codes-low": partial(handwriting, first="01234"),
    "codes-high": partial(handwriting, first="56789"),
}


def is_set(word: object) -> bool:
    """Return whether a word names a prompt set rather than a file."""
    return str(word).startswith(MARK)


def read_set(word: str, part: Part) -> Iterator[FileRecord]:
    """Yield the records of a part of a prompt set, each with its number for messages.

    Args:
        word: `@name` or `@module:name`.
        part: train or heldout.

    Raises:
        UsageError: there is no such set, or it is not a function that returns records of a part.
    """
    check = plugins.make_call_check("part")
    prompt_set: PromptSet = plugins.load(word.removeprefix(MARK), "prompts", check, table=PROMPT_SETS, field="prompts")
    try:
        for number, record in enumerate(prompt_set(part), start=1):
            where = f"prompt set {word}, {part} record {number}"
            if not isinstance(record, Mapping):
                raise UsageError(f"{where} is a {type(record).__name__}, expected a mapping with a column prompt")
            yield drop_nulls(FileRecord(where, dict(record)))
    except UsageError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"prompt set {word} raised {type(error).__name__} for the part {part}: {reason}") from error


def _digest(item: object) -> bytes:
    return hashlib.sha256(repr(item).encode()).digest()


def _shuffle(items: Iterable[T]) -> list[T]:
    """Sort items by their SHA-256: a pseudo-random order that is the same on every machine."""
    return sorted(items, key=_digest)


def _take_part(part: Part, items: Sequence[T], *, heldout: int, most: int | None = None) -> list[T]:
    """Return a part of items: the first `heldout` in the order of their SHA-256, or up to `most` of the others."""
    ordered = _shuffle(dict.fromkeys(items))
    return ordered[:heldout] if part == "heldout" else ordered[heldout:][:most]


def _name(noun: str) -> str:
    """Name a thing with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}" if noun not in LISTS["uncounted"] else noun


def _pluralise(noun: str) -> str:
    if noun in LISTS["plurals"]:
        return LISTS["plurals"][noun]
    return noun + ("es" if noun.endswith(("s", "ch", "sh", "x")) else "s")


def _list_countable() -> list[str]:
    return [name for name in LISTS["classes"] if name not in LISTS["uncounted"]]


def _quantify(name: str, number: int = 1) -> dict[str, Any]:
    return {"class": name, "count": number}


def _make_record(tag: str, prompt: str, *include: Mapping[str, Any]) -> Record:
    return {"prompt": prompt, "tag": tag, "include": list(include), "exclude": []}


def _count_objects(prompt: str, name: str, number: int) -> Record:
    """Return the record of exactly `number` objects, as in GenEval: at least `number`, not `number` + 1."""
    record = _make_record("counting", prompt, _quantify(name, number))
    return {**record, "exclude": [_quantify(name, number + 1)]}


def _choose_two_colours(one: str, other: str) -> tuple[str, str]:
    """Return two different colours for a pair of objects."""
    colours, (first, step, *_) = LISTS["colours"], _digest((one, other))
    index = first % len(colours)
    return colours[index], colours[(index + 1 + step % (len(colours) - 1)) % len(colours)]
