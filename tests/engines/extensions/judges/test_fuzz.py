"""Whatever a server answers, a client ends with scores, with NaN, or with one line, and it ends."""

import contextlib
import json
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import httpx2
import torch
from helpers.fake_servers import chat_reply, client
from hypothesis import given
from hypothesis import strategies as st

from fluvial.engines.errors import RunError
from fluvial.engines.extensions.judges.formats import FlowFactory, FlowGrpo, ForbiddenPickleError, UniRL, unpickle
from fluvial.engines.extensions.judges.vlm import Questions, Rating, UnifiedReward, YesNo
from fluvial.engines.extensions.wire.client import Reply
from fluvial.engines.scoring.scores import LARGEST

B = 2
IMAGES, PROMPTS = torch.rand(B, 3, 2, 2), ["a cat", "a dog"]
RECORDS = [{"vqa_list": [["How many?", "two"], ["Any?", "Yes"]]}, {"vqa_list": [["Any?", "Yes"]]}]
CHAT = chat_reply('{"score": 3}\nFinal Score: 3', {"Yes": -0.1, "no": -3.0})

# Each client, as a function of the body of a reply, with a reply that it can read.
CLIENTS: dict[str, tuple[Callable[..., Any], Any]] = {
    "flow_factory": (lambda *replies: FlowFactory(client(*replies, in_flight=1))(IMAGES, PROMPTS), {"rewards": [1.0, 2.0]}),
    "unirl": (
        lambda *replies: UniRL(client(*replies), rewards=("a", "b"))(IMAGES, PROMPTS, RECORDS),
        {"results": [{"a": {"x": 1}, "b": {"y": 2}}] * B, "errors": [{}, {"a": "late"}]},
    ),
    "flow_grpo": (
        lambda *replies: FlowGrpo(client(*replies), trust_pickle=True)(IMAGES, PROMPTS, RECORDS),
        {"scores": [1.0, 2.0]},
    ),
    "yes_no": (lambda *replies: YesNo(client(*replies, in_flight=1), model="m")(IMAGES, PROMPTS), CHAT),
    "model": (lambda *replies: YesNo(client(*replies, in_flight=1))(IMAGES, PROMPTS), {"data": [{"id": "m"}], **CHAT}),
    "rating": (lambda *replies: Rating(client(*replies, in_flight=1), model="m")(IMAGES, PROMPTS), CHAT),
    "unified": (lambda *replies: UnifiedReward(client(*replies, in_flight=1), model="m", size=0)(IMAGES, PROMPTS), CHAT),
    "questions": (lambda *replies: Questions(client(*replies, in_flight=1), model="m")(IMAGES, PROMPTS, RECORDS), CHAT),
}
LEAVES = (
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.sampled_from([1e30, -1e300, 10**400, math.nan, "7", "yes", "", "\x1b[2J\n", "Final Score: 9", {}, [], [[]]])
    | st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8
)


def holds(score: Callable[..., Any], *replies: Any) -> bool:
    """Return whether a client gave scores; it may also have ended with a RunError of one short line.

    Anything else fails the test.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # some of the requests failed
            found = score(*replies)
    except RunError as error:
        message = str(error)
        assert "\n" not in message
        assert message.isprintable()
        assert len(message) < 600
        return False
    for values in found.values() if isinstance(found, dict) else [found]:
        assert values.shape == (B,)
        assert bool((values.isnan() | (values.abs() <= 2 * LARGEST)).all())
    return True


def places(value: Any) -> list[list[Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [[], *([key, *path] for key, part in inner for path in places(part))]


def replaced(value: Any, path: list[Any], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_replies_that_are_right_are_read() -> None:
    for name, (score, right) in CLIENTS.items():
        assert holds(score, pickle.dumps(right) if name == "flow_grpo" else right), name


@given(st.data())
def test_a_reply_with_one_wrong_value(data: st.DataObject) -> None:
    """Anything may stand where a number, a text, a list or an object should."""
    name = data.draw(st.sampled_from(list(CLIENTS)))
    score, right = CLIENTS[name]
    wrong = replaced(right, data.draw(st.sampled_from(places(right))), data.draw(VALUES))
    holds(score, pickle.dumps(wrong) if name == "flow_grpo" else json.dumps(wrong).encode())


@given(st.data())
def test_a_reply_that_is_cut_off_or_damaged(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(CLIENTS)))
    score, right = CLIENTS[name]
    body = pickle.dumps(right) if name == "flow_grpo" else json.dumps(right).encode()
    start = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(start, len(body)))
    holds(score, body[:start] + data.draw(st.binary(max_size=8)) + body[end:])


@given(st.data())
def test_replies_of_any_kind(data: st.DataObject) -> None:
    """HTML, prose, nothing, redirects, faults, and connections that break, one after the other."""
    bodies = st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()) | VALUES.map(pickle.dumps)
    bodies |= st.sampled_from(
        [b"<html>502</html>", b"[" * 50_000, b"{}", b"null", b"I would give it a 7.", b"\x80\x04." * 9]
    )
    headers = st.dictionaries(st.sampled_from(["retry-after", "location"]), st.text(max_size=9), max_size=2)
    replies = st.builds(Reply, st.integers(100, 599), headers, bodies)
    faults = [httpx2.ReadTimeout(""), httpx2.RemoteProtocolError("incomplete"), httpx2.ConnectError("x\n")]
    broken = st.sampled_from([*faults, Reply(200, {"content-length": "10000000000"}, b""), httpx2.WriteError("\n")])
    drawn = data.draw(st.lists(bodies | replies | broken, min_size=1, max_size=3))
    holds(CLIENTS[data.draw(st.sampled_from(list(CLIENTS)))][0], *drawn)


@given(VALUES)
def test_a_pickle_of_plain_data_is_read(value: Any) -> None:
    """To the value that pickle.loads gives; repr tells NaN from numbers and True from 1."""
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(value, protocol=protocol)
        try:
            assert repr(unpickle(data)) == repr(value)
        except ForbiddenPickleError:
            assert any(abs(number) > 2**2000 for number in numbers(value))


def numbers(value: Any) -> list[int]:
    """Return the whole numbers of a value; enormous ones have an opcode of their own."""
    if isinstance(value, dict | list):
        return [number for inner in (value.values() if isinstance(value, dict) else value) for number in numbers(inner)]
    return [value] if isinstance(value, int) else []


@given(st.binary(max_size=80))
def test_bytes_that_are_no_pickle(data: bytes) -> None:
    """They are a value or the one error, never a crash or gigabytes."""
    for made in (data, b"\x80\x04" + data + b"."):
        with contextlib.suppress(ForbiddenPickleError):
            unpickle(made)
