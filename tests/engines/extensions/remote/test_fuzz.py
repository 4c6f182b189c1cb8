"""Whatever a server answers, its reply is samples that fit the request, or one line."""

import contextlib
import copy
from typing import Any, cast

import msgpack
from helpers import fake_rollouts
from helpers import tiny_jobs as tiny
from hypothesis import given
from hypothesis import strategies as st

from fluvial.core.random import Key
from fluvial.core.transitions import bind
from fluvial.engines.extensions.remote.replies import Expected, ServedSample, read_samples
from fluvial.engines.extensions.remote.requests import RequestBuilder, RequestOrder
from fluvial.engines.extensions.wire.client import Reply
from fluvial.engines.extensions.wire.decode import WireError
from fluvial.engines.extensions.wire.response import write_response
from fluvial.engines.sampling.generate import Sampling, StochasticSteps

ORDER = RequestOrder("1", None, (0, 1), None, ((1, 2),) * 2, ((1, 2),) * 2)


def sampling() -> Sampling:
    """Return how the samples are made: with two stochastic steps, whose predictions are kept."""
    schedule = tiny.Tiny().schedule(tiny.STEPS, tiny.SHAPE)
    return Sampling(
        tiny.SHAPE, schedule, stochastic=StochasticSteps(bind("flow_sde", 0.5, schedule.levels), (1, 2), keep_velocity=True)
    )


EXPECTED = Expected("fluvial", tiny.Tiny(), sampling(), 0, 1)


def body() -> bytes:
    builder = RequestBuilder("fluvial", "flow_sde", 0.5, "velocity", {})
    request = builder.build_request(ORDER, Key(1, 2), EXPECTED.sampling, version=0)
    return write_response(fake_rollouts.FakeRollouts(tiny.Tiny().build()).samples(request))


BODY = body()  # which reading is tested in test_remote.py
LEAVES = (
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from(["torch.float32", "torch.int64", "torch.float8", 2**40, [4, 0], [2**31], b"", b"\x80\x04N."])
    | st.text(max_size=5)
    | st.binary(max_size=64)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6
)


def read(data: bytes) -> list[ServedSample]:
    return read_samples(Reply(200, {"content-type": "application/msgpack"}, data), ORDER, EXPECTED)


def checked(data: bytes) -> None:
    """Read a reply that something was done to: what is not refused fits the request."""
    samples, problem = list[ServedSample](), ""
    try:
        samples = read(data)
    except WireError as error:
        problem = str(error)
    assert "\n" not in problem
    assert len(problem) < 600
    if problem:
        return
    assert len(samples) == 2
    for sample in samples:
        assert sample.x.shape == sample.x_next.shape == cast(Any, sample.velocity).shape == (2, *tiny.SHAPE)
        assert sample.final.shape == tiny.SHAPE
        assert sample.log_prob.shape == (2,)
        tensors = [sample.x, sample.x_next, sample.log_prob, sample.velocity, sample.final, sample.image]
        assert all(bool(cast(Any, tensor).isfinite().all()) for tensor in tensors)
        assert sample.version == 0


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for name, value in inner for place in places(value, (*path, name)))]


@given(st.data())
def test_a_reply_with_another_value_somewhere(data: st.DataObject) -> None:
    tree = msgpack.unpackb(BODY)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(tree)))
        value = copy.deepcopy(data.draw(VALUES))  # sampled lists are shared between examples
        if not path:
            tree = value
            continue
        with contextlib.suppress(KeyError, IndexError, TypeError):
            at = tree
            for name in path[:-1]:
                at = at[name]
            action = data.draw(st.sampled_from(["replace", "leave out", "cut", "another's"]))
            if action == "leave out":
                del at[path[-1]]
            elif action == "cut" and isinstance(at[path[-1]], bytes | list | str):
                at[path[-1]] = at[path[-1]][: data.draw(st.integers(0, 80))]
            elif action == "another's":
                other = tree
                for name in data.draw(st.sampled_from(places(tree))):
                    other = other[name]
                at[path[-1]] = msgpack.unpackb(msgpack.packb(other))
            else:
                at[path[-1]] = value
    checked(msgpack.packb(tree))


@given(st.data())
def test_a_reply_with_other_bytes(data: st.DataObject) -> None:
    """Bytes are flipped, cut off or put in; also in the headers of tensors."""
    changed = bytearray(BODY)
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(changed)))
        more = data.draw(st.binary(max_size=8))
        changed[place : place + data.draw(st.integers(0, 8))] = more
    checked(bytes(changed))


@given(st.binary(max_size=200))
def test_a_reply_of_any_bytes(data: bytes) -> None:
    checked(data)
