"""The order of prompts: each once per epoch, sources by their weights, the same whatever was asked for before."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluvial.core.random import key
from fluvial.engines.data import order as module
from fluvial.engines.data.order import BatchOrder, PromptOrder, PromptPool, derive_order_key
from fluvial.engines.data.records import Prompt


@pytest.fixture(scope="module", autouse=True, params=[module.SORTED, 0])
def shuffle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make every test hold for both shuffles: sorted numbers, and the permutation of large sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SORTED", request.param)
        yield


def order(prompts: Sequence[Prompt], seed: int = 0, **weights: Any) -> PromptOrder:
    return PromptOrder(prompts, derive_order_key(seed), weights)


def test_an_epoch_sees_every_prompt_once() -> None:
    """In an order of its own in each epoch, and for each seed."""
    prompts = [Prompt(f"prompt {i}") for i in range(23)]
    places = order(prompts).take(0, 69)
    epochs = [places[i : i + 23] for i in (0, 23, 46)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(23)), order(prompts, 1).take(0, 23)]}) == 5


@settings(max_examples=20)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 9))
def test_any_part_is_the_same_however_it_is_reached(starts: list[int], count: int) -> None:
    """As a resumed run asks for it: without the parts before, or again."""
    prompts = [Prompt(str(i), source="ab"[i % 2], weight=(1.0, 0.5, 2.0)[i % 3]) for i in range(7)]
    whole, asked = order(prompts, a=2.0).take(0, 70), order(prompts, a=2.0)
    for start in starts:
        assert asked.take(start, count) == whole[start : start + count]


@pytest.mark.parametrize("weights", [{"a": 3.0, "b": 1.0}, {"a": 0.1, "b": 0.7, "c": 0.3}])
def test_sources_share_by_weight_from_the_first_prompt_on(weights: dict[str, Any]) -> None:
    """Within one prompt of their share at any time; each source goes through its own epochs."""
    prompts = [Prompt(f"{source} {i}", source=source) for source in weights for i in range(5)]
    places = order(prompts, **weights).take(0, 200)
    for done in range(1, 200):
        counts = Counter(prompts[place].source for place in places[:done])
        for source, weight in weights.items():
            assert abs(counts[source] - done * weight / sum(weights.values())) < 1
    of_a = [place for place in places if prompts[place].source == "a"]
    assert sorted(of_a[:5]) == list(range(5))
    assert sorted(of_a[5:10]) == list(range(5))


def test_a_weight_is_how_often_a_prompt_is_there() -> None:
    """Twice per epoch, or in every second one; all are there in the first."""
    prompts = [Prompt("twice", weight=2.0), Prompt("once"), Prompt("half", weight=0.5)]
    places = order(list(prompts)).take(0, 70)
    assert Counter(places) == {0: 40, 1: 20, 2: 10}
    assert Counter(places[:4]) == {0: 2, 1: 1, 2: 1}
    assert Counter(order([Prompt("a", weight=0.1), Prompt("b", weight=0.2)]).take(0, 30)) == {0: 10, 1: 20}


@pytest.mark.parametrize("weights", [(1, 1, 1), (2, 1, 1)])
def test_a_late_part_is_reached_at_once(weights: tuple[int, ...]) -> None:
    """Nothing before it is walked: a trillion batches in, the sources have their shares, in whole epochs of each."""
    prompts = [Prompt(str(i), source="abc"[i % 3], weight=weights[i // 3]) for i in range(9)]
    late, size = BatchOrder(prompts, key(1), {"a": 0.1, "b": 0.7, "c": 0.3}), 11 * sum(weights)
    counts = Counter(late.take_batch(10**12, size))
    for first, share in enumerate((1, 7, 3)):
        assert [counts[place] for place in range(first, 9, 3)] == [share * weight for weight in weights]


@settings(max_examples=20)
@given(st.integers(0, 2**63 - 1), st.integers(1, 40), st.integers(1, 90))
def test_a_distinct_draw_takes_all_before_one_comes_again(seed: int, size: int, count: int) -> None:
    drawn = PromptPool([Prompt(str(i)) for i in range(size)]).draw_distinct(key(seed), count)
    for start in range(0, count, size):
        assert len({*drawn[start : start + size]}) == min(size, count - start)
    again = PromptPool([Prompt(str(i)) for i in range(30)]).draw_distinct(key(seed), 60)
    assert again[:30] != again[30:]  # each time in another order


def test_draws_are_uniform() -> None:
    """Each prompt comes as often as every other, with replacement and without: 6 standard deviations are allowed."""
    pool, times, size = PromptPool([Prompt(str(i)) for i in range(10)]), 150, 10
    for draw in (pool.draw, pool.draw_distinct):
        counts = Counter(place for number in range(times) for place in draw(key(number), 3))
        spread = 6 * (3 * times / size * (1 - 1 / size)) ** 0.5
        assert all(abs(counts[place] - 3 * times / size) < spread for place in range(size))
