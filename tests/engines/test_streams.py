"""Streams of randomness: each is drawn from a key of its own, and its number never changes."""

import itertools
import re
from enum import IntEnum
from pathlib import Path

import pytest

from fluvial.core.random import bits, fold_in, key
from fluvial.engines.streams import Stream

ENGINES = Path(__file__).parents[2] / "engines"


def test_no_two_streams_of_one_key_coincide() -> None:
    """Streams of the same parent draw different numbers from the same key."""
    for one, two in itertools.combinations(Stream, 2):
        if one.parent == two.parent:
            assert int(one) != int(two), f"{one.name} and {two.name} are the same stream of {one.parent}"
            drawn = [bits(fold_in(key(3), stream), (8,)).tolist() for stream in (one, two)]
            assert drawn[0] != drawn[1]


def test_streams_of_different_parents_are_different_members() -> None:
    """Members that share a number are not aliases of each other."""
    assert len({id(Stream.WINDOW), id(Stream.INITIAL)}) == 2
    assert int(Stream.WINDOW) == int(Stream.INITIAL) == 0
    assert len({(stream.parent, int(stream)) for stream in Stream}) == len(Stream) == len(Stream.__members__)


def test_a_stream_is_folded_in_as_its_number() -> None:
    """`fold_in(key, Stream.FRACTION)` is `fold_in(key, 12)`."""
    assert isinstance(Stream.FRACTION, IntEnum)
    assert fold_in(key(0), Stream.FRACTION) == fold_in(key(0), 12)


def test_a_number_that_is_taken_is_refused_on_import() -> None:
    """A second stream of the same parent with the same number raises when its class is made."""
    source = (ENGINES / "streams.py").read_text()
    doubled = source + '    AGAIN = "rollout", 11\n'
    with pytest.raises(ValueError, match="AGAIN -> MINIBATCH"):
        exec(compile(doubled, "streams.py", "exec"), {"__name__": "streams"})


def test_the_numbers_are_those_of_published_runs() -> None:
    """A result is reproducible only while these stay."""
    numbers = {
        "rollout": {"WINDOW": 0, "PROMPTS": 1, "SAMPLES": 2, "NOISING": 10, "MINIBATCH": 11, "FRACTION": 12},
        "sample": {"INITIAL": 0, "STEPS": 1},
        "noising": {"LEVELS": 0, "NOISE": 1},
        "evaluation": {"EVALUATION_PROMPTS": 0, "EVALUATION_SAMPLES": 1},
        "probe": {"PROBE_SAMPLES": 0, "PROBE_NOISE": 1},
        "preferences": {"PREFERENCE_PROMPTS": 0, "PREFERENCE_SAMPLES": 1},
        "pretraining": {
            "PRETRAIN_PROMPTS": 0,
            "PRETRAIN_IMAGES": 1,
            "PRETRAIN_NOISE": 2,
            "PRETRAIN_LEVELS": 3,
            "PRETRAIN_ERRORS": 4,
        },
    }
    for parent, streams in numbers.items():
        for name, number in streams.items():
            assert (Stream[name].parent, int(Stream[name])) == (parent, number)


def test_no_stream_is_a_bare_number() -> None:
    """No file of the engine folds a literal number into a key."""
    bare = re.compile(r"fold_in\([^()]*(\([^()]*\)[^()]*)*, *\d+\)")
    found = [
        f"{path.name}: {line.strip()}"
        for path in ENGINES.rglob("*.py")
        for line in path.read_text().splitlines()
        if bare.search(line)
    ]
    assert not found
