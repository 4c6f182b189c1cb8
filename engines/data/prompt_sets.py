"""Prompt sets that come with fluvial, named as `@ocr`: generated from templates, with a training and a held-out part.

They are not the published files, which `--prompts FILE` takes. A set of your own is a function from the part to its records,
named as `@module:name` or declared as an entry point of `fluvial.prompts`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, permutations, product
from typing import Any, Literal, TypeVar

from fluvial.engines import plugins
from fluvial.engines.data.tables import FileRecord, plain_row
from fluvial.engines.errors import UsageError

MARK = "@"  # before the name of a set
Part = Literal["train", "heldout"]
Record = Mapping[str, Any]  # a column `prompt`, and any others, as in a line of a .jsonl file
PromptSet = Callable[[Part], Iterable[Record]]
T = TypeVar("T")

# Classes of COCO by the names that GenEval's detector gives them (arXiv 2310.11513).
CLASSES = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light"),
    *("fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant"),
    *("bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard"),
    *("sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle"),
    *("wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli"),
    *("carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet"),
    *("tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster"),
    *("sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush"),
)
PLURALS = {"person": "people", "knife": "knives", "computer mouse": "computer mice", "sheep": "sheep"}
UNCOUNTED = ("skis", "scissors", "broccoli")  # which have no plural that counts them
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
POSITIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}

SIGN_KINDS = ("Fresh", "Daily", "Grand", "Little", "Golden", "Quiet", "Midnight", "Royal", "Silver", "Happy", "Old", "Wild")
SIGN_PLACES = (
    *("Coffee", "Bakery", "Books", "Garden", "Market", "Harbor", "Cinema", "Garage", "Museum", "Library", "Pizza"),
    "Tailor",
)
NOTICES = (
    *("Mind the Step", "Open Late", "Keep Left", "No Entry", "Wet Paint", "Push to Open", "Back in Ten", "Sold Out"),
    *("Last Chance", "Free Parking", "Do Not Feed", "Ring the Bell", "Staff Only", "Slow Down", "Quiet Please", "Lost Dog"),
    *("Welcome Home", "Good Morning", "Happy Birthday", "Thank You", "Made by Hand", "Handle with Care", "This Side Up"),
    *("Danger", "Exit", "Closed", "Taxi", "Fragile", "Tomorrow", "Adventure", "Together", "Imagine", "Respect the Ocean"),
)
NUMBERED = {"Room": (101, 214, 307, 512), "Gate": (3, 7, 12, 28), "Route": (9, 40, 66, 81), "Est.": (1890, 1924, 1968, 2003)}
SIGNS = (
    'A neon sign at night that reads "{}"',
    'A wooden board above a door with the words "{}" painted on it',
    'A chalkboard in a cafe that says "{}"',
    'A street sign on a rainy corner that reads "{}"',
    'A paper bag with "{}" printed in bold letters',
    'A white mug on a desk with the text "{}"',
    'A t-shirt on a hanger that says "{}"',
    'A book on a table, its cover titled "{}"',
    'A billboard beside a highway that reads "{}"',
    'A cake with "{}" written in icing',
    'A postage stamp with the word "{}" under a ship',
    'A robot that holds up a card with "{}"',
    'A train station display that shows "{}"',
    'A poster on a brick wall with "{}" in large type',
    'A brass plate on a gate engraved with "{}"',
    'A sailboat with "{}" on its sail',
    'A phone screen with the message "{}"',
    'A shop window with "{}" in gold letters',
    'A banner over a market that reads "{}"',
    'A cardboard box stamped with "{}"',
)

ANIMALS = (
    *("ant", "bat", "bear", "bee", "beetle", "bird", "butterfly", "camel", "cat", "chicken", "cow", "crab", "deer", "dog"),
    *("dolphin", "duck", "elephant", "fish", "fly", "fox", "frog", "goat", "goose", "gorilla", "hedgehog", "horse"),
    *("kangaroo", "lion", "lizard", "llama", "monkey", "mouse", "otter", "owl", "panda", "parrot", "penguin", "pig"),
    *("rabbit", "raccoon", "rat", "seal", "shark", "sheep", "snail", "snake", "spider", "squirrel", "swan", "tiger"),
    *("turkey", "turtle", "whale", "wolf", "zebra"),
)
ACTIVITIES = (
    *("reading a newspaper", "baking bread", "playing the drums", "rowing a boat", "riding a scooter", "painting a fence"),
    *("flying a kite", "watering flowers", "carrying an umbrella", "mending a shoe", "eating noodles", "driving a tractor"),
)

THINGS = (
    *("teapot", "armchair", "lighthouse", "violin", "bicycle", "pine tree", "castle", "lantern", "sailing boat", "piano"),
    *("pocket watch", "mountain hut", "steam train", "umbrella", "desk lamp", "suitcase", "windmill", "cactus", "robot"),
    *("market stall", "greenhouse", "telescope", "snail shell", "hot air balloon"),
)
MATERIALS = (
    "glass",
    "folded paper",
    "knitted wool",
    "polished bronze",
    "ice",
    "wicker",
    "moss",
    "stained wood",
    "porcelain",
)
STYLES = (
    *("as a watercolour", "as a woodcut", "as a charcoal sketch", "as a low-poly render", "in the style of a travel poster"),
    *("as an oil painting", "as a pixel-art sprite", "as a blueprint", "as a mosaic", "as a long-exposure photograph"),
)
SETTINGS = (
    *("on a beach at sunrise", "in a foggy forest", "on the surface of the moon", "in an old library", "under water"),
    *("in a crowded night market", "on a snowy mountain pass", "in a desert after rain", "on a rooftop in the evening"),
)
SIZES = ("smaller than", "twice as tall as", "leaning against", "standing on top of", "hidden behind", "floating above")


def ocr(part: Part) -> Iterator[Record]:
    """Text in double quotes, which the reward ocr reads; no training prompt has a held-out text."""
    texts = [
        *(("name", f"{kind} {place}") for kind, place in product(SIGN_KINDS, SIGN_PLACES)),
        *(("notice", text) for text in NOTICES),
        *(("number", f"{word} {number}") for word, numbers in NUMBERED.items() for number in numbers),
    ]
    chosen = _part(part, texts, heldout=20)
    for (tag, text), sign in _shuffle(product(chosen, SIGNS)):
        yield {"prompt": sign.format(text), "tag": tag}


def geneval(part: Part) -> Iterator[Record]:
    """Objects, counts, colours and positions in GenEval's six tags, with its metadata."""
    coloured = [name for name in CLASSES if name != "person"]
    pairs = list(permutations(CLASSES, 2))
    yield from (
        _make_row("single_object", f"a photo of {_a(name)}", _one(name)) for name in _part(part, CLASSES, heldout=16)
    )
    for one, other in _part(part, list(combinations(CLASSES, 2)), heldout=50, most=400):
        yield _make_row("two_object", f"a photo of {_a(one)} and {_a(other)}", _one(one), _one(other))
    for name, number in _part(part, list(product(_countable(), (2, 3, 4))), heldout=40):
        yield _count_objects(f"a photo of {NUMBERS[number]} {_plural(name)}", name, number)
    for name, colour in _part(part, list(product(coloured, COLOURS)), heldout=50, most=400):
        yield _make_row("colors", f"a photo of {_a(colour)} {name}", {**_one(name), "color": colour})
    for (one, other), where in _part(part, list(product(pairs, POSITIONS)), heldout=50, most=800):
        placed = {**_one(one), "position": [where, 0]}
        yield _make_row("position", f"a photo of {_a(one)} {where} {_a(other)}", _one(other), placed)
    for one, other in _part(part, [pair for pair in pairs if "person" not in pair], heldout=50, most=600):
        first, second = _two_colours(one, other)
        text = f"a photo of {_a(first)} {one} and {_a(second)} {other}"
        yield _make_row("color_attr", text, {**_one(one), "color": first}, {**_one(other), "color": second})


def animals(part: Part) -> Iterator[Record]:
    """Animals, alone and doing what animals do not; no training prompt has a held-out animal."""
    chosen = _part(part, ANIMALS, heldout=10)
    yield from ({"prompt": _a(animal), "tag": "alone"} for animal in chosen)
    for animal, activity in _shuffle(product(chosen, ACTIVITIES)):
        yield {"prompt": f"{_a(animal)} {activity}", "tag": "activity"}


def counting(part: Part) -> Iterator[Record]:
    """Objects in numbers from two to six and in several settings, with GenEval's metadata."""
    chosen = _part(part, list(product(_countable(), NUMBERS)), heldout=40)
    places = ("on a white background", "in a bright studio", "seen from above", "in an oil painting", "in a pencil drawing")
    for (name, number), place in _shuffle(product(chosen, places)):
        yield _count_objects(f"{NUMBERS[number]} {_plural(name)} {place}", name, number)


def drawbench_like(part: Part) -> Iterator[Record]:
    """General prompts in eight categories, for rewards that predict preferences."""
    things = [_a(thing) for thing in THINGS]
    kinds: dict[str, Iterable[str]] = {
        "colour": (f"{_a(colour)} {thing} {place}" for colour, thing, place in product(COLOURS, THINGS, SETTINGS)),
        "count": (f"{NUMBERS[n]} {_plural(thing)} {place}" for n, thing, place in product((2, 3, 4), THINGS, SETTINGS)),
        "material": (f"{_a(thing)} made of {material}" for thing, material in product(THINGS, MATERIALS)),
        "relation": (f"{one} {how} {other}" for (one, other), how in product(permutations(things, 2), SIZES)),
        "setting": (f"{thing} {place}" for thing, place in product(things, SETTINGS)),
        "style": (f"{thing} {place}, {style}" for thing, place, style in product(things, SETTINGS, STYLES)),
        "text": (f'{thing} beside a sign that says "{text}"' for thing, text in product(things, NOTICES)),
        "animal": (f"{_a(animal)} {doing} {place}" for animal, doing, place in product(ANIMALS, ACTIVITIES, SETTINGS)),
    }
    for tag, texts in kinds.items():
        yield from ({"prompt": text, "tag": tag} for text in _part(part, list(texts), heldout=25, most=250))


def handwriting(part: Part, first: str) -> Iterator[Record]:
    """Codes of the built-in model of handwriting whose first digit is one of `first`."""
    from fluvial.models.handwriting import codes  # imports torch

    yield from ({"prompt": code} for code in codes(part) if code[0] in first)


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


def records(word: str, part: Part, field: str = "prompts") -> Iterator[FileRecord]:
    """Yield the records of a part of a prompt set, each with its place for messages.

    Args:
        word: `@name` or `@module:name`.
        part: train or heldout.
        field: setting that names the set, for messages.

    Raises:
        UsageError: there is no such set, or it is not a function of the part that gives records.
    """
    check = plugins.callable_with("part")
    prompt_set: PromptSet = plugins.load(word.removeprefix(MARK), "prompts", check, table=PROMPT_SETS, field=field)
    try:
        for number, record in enumerate(prompt_set(part), start=1):
            where = f"prompt set {word}, {part} record {number}"
            if not isinstance(record, Mapping):
                raise UsageError(f"{where} is a {type(record).__name__}, expected a mapping with a column prompt")
            yield plain_row(FileRecord(where, dict(record)))
    except UsageError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"prompt set {word} raised {type(error).__name__} for the part {part}: {reason}") from error


def _digest(item: object) -> bytes:
    return hashlib.sha256(repr(item).encode()).digest()


def _shuffle(items: Iterable[T]) -> list[T]:
    """Return items in the order of their SHA-256, which is the same on every machine and looks random."""
    return sorted(items, key=_digest)


def _part(part: Part, items: Sequence[T], *, heldout: int, most: int | None = None) -> list[T]:
    """Return a part of items: in the order of their SHA-256 the first are held out, and up to `most` others train."""
    ordered = _shuffle(dict.fromkeys(items))
    return ordered[:heldout] if part == "heldout" else ordered[heldout:][:most]


def _a(noun: str) -> str:
    """Return a noun phrase with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}" if noun not in UNCOUNTED else noun


def _plural(noun: str) -> str:
    if noun in PLURALS:
        return PLURALS[noun]
    return noun + ("es" if noun.endswith(("s", "ch", "sh", "x")) else "s")


def _countable() -> list[str]:
    return [name for name in CLASSES if name not in UNCOUNTED]


def _one(name: str) -> dict[str, Any]:
    return {"class": name, "count": 1}


def _make_row(tag: str, prompt: str, *include: Mapping[str, Any]) -> Record:
    return {"prompt": prompt, "tag": tag, "include": list(include), "exclude": []}


def _count_objects(prompt: str, name: str, number: int) -> Record:
    """Return the record of exactly `number` objects, as GenEval writes it: at least as many, and not one more."""
    include, exclude = {"class": name, "count": number}, {"class": name, "count": number + 1}
    return {"prompt": prompt, "tag": "counting", "include": [include], "exclude": [exclude]}


def _two_colours(one: str, other: str) -> tuple[str, str]:
    """Return two different colours for a pair of objects."""
    first, step, *_ = _digest((one, other))
    place = first % len(COLOURS)
    return COLOURS[place], COLOURS[(place + 1 + step % (len(COLOURS) - 1)) % len(COLOURS)]
