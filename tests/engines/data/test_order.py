"""The order of prompts: each once per epoch, sources by their weights, the same whatever was asked for before."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluvial.engines.data.order import PromptOrder, order_key
from fluvial.engines.data.records import Prompt


def order(prompts: Sequence[Prompt], seed: int = 0, **weights: Any) -> PromptOrder:
    return PromptOrder(prompts, order_key(seed), weights)


def test_an_epoch_sees_every_prompt_once() -> None:
    """In an order of its own in each epoch, and for each seed."""
    prompts = [Prompt(f"prompt {i}") for i in range(23)]
    places = order(prompts).places(0, 69)
    epochs = [places[i : i + 23] for i in (0, 23, 46)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(23)), order(prompts, 1).places(0, 23)]}) == 5


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 9))
def test_any_part_is_the_same_however_it_is_reached(starts: list[int], count: int) -> None:
    """As a resumed run asks for it: without the parts before, or again."""
    prompts = [Prompt(str(i), source="ab"[i % 2], weight=(1.0, 0.5, 2.0)[i % 3]) for i in range(7)]
    whole, asked = order(prompts, a=2.0).places(0, 70), order(prompts, a=2.0)
    for start in starts:
        assert asked.places(start, count) == whole[start : start + count]


@pytest.mark.parametrize("weights", [{"a": 3.0, "b": 1.0}, {"a": 0.1, "b": 0.7, "c": 0.3}])
def test_sources_share_by_weight_from_the_first_prompt_on(weights: dict[str, Any]) -> None:
    """Within one prompt of their share at any time; each source goes through its own epochs."""
    prompts = [Prompt(f"{source} {i}", source=source) for source in weights for i in range(5)]
    places = order(prompts, **weights).places(0, 200)
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
    places = order(list(prompts)).places(0, 70)
    assert Counter(places) == {0: 40, 1: 20, 2: 10}
    assert Counter(places[:4]) == {0: 2, 1: 1, 2: 1}
    assert Counter(order([Prompt("a", weight=0.1), Prompt("b", weight=0.2)]).places(0, 30)) == {0: 10, 1: 20}
