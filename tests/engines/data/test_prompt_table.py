"""Tables of prompts: they hold what they are given, in little memory, and stand for it in checks."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluvial.engines.data.prompt_table import PromptTable, list_examples, list_kinds, select
from fluvial.engines.data.records import Prompt
from fluvial.engines.data.sizes import Size

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
PROMPTS = st.builds(
    Prompt,
    text=TEXTS,
    negative=st.none() | TEXTS,
    image=st.none() | st.just(Path("fox.png")) | st.binary(max_size=3),
    weight=st.sampled_from((1.0, 0.5)),
    tag=st.none() | st.just("tag"),
    source=st.sampled_from(("a", "b")),
    metadata=st.dictionaries(TEXTS, st.integers() | st.lists(TEXTS, max_size=2), max_size=2),
    size=st.none() | st.just(Size(8, 16)),
    media=st.just({}) | st.just({"mask": (Path("a.png"), b"b")}),
)
PLAIN = st.builds(Prompt, text=TEXTS, source=st.sampled_from(("a", "b")))


@settings(max_examples=40)
@given(st.lists(PROMPTS, max_size=8) | st.lists(PLAIN | PROMPTS, max_size=8), st.data())
def test_a_table_holds_what_it_was_given(prompts: list[Prompt], data: Any) -> None:
    """By place, from the end, in slices, and in a selection of a selection; a prompt is the caller's to change."""
    table = PromptTable(iter(prompts))
    assert [*table] == prompts
    assert table == PromptTable(prompts) == tuple(prompts)
    assert table != tuple(prompts) + tuple(prompts[:1] or [Prompt("a")])
    assert [table[-1 - i] for i in range(len(table))] == prompts[::-1]
    assert table[1:7:2] == tuple(prompts[1:7:2])
    places = data.draw(st.lists(st.sampled_from(range(len(prompts))), max_size=9) if prompts else st.just([]))
    some, mine = select(table, places), [prompts[place] for place in places]
    assert [*some] == mine
    assert [*select(some, range(0, len(mine), 2))] == mine[::2]
    kinds, codes = list_kinds(some)
    assert [kinds[code].source for code in codes] == [prompt.source for prompt in mine]
    for prompt in table:
        prompt.metadata["new"] = 1  # type: ignore[index]
    assert [*table] == prompts
    with pytest.raises(IndexError):
        table[len(prompts)]


@given(st.lists(PLAIN, max_size=6) | st.lists(PROMPTS, max_size=6))
def test_examples_stand_for_all_in_checks_of_fields(prompts: list[Prompt]) -> None:
    """Every prompt has an example with all its fields but the text, which comes no later."""
    found = [*list_examples(PromptTable(prompts), prompts[:1])]
    assert {repr(replace(prompt, text="")) for prompt in found} == {repr(replace(prompt, text="")) for prompt in prompts}
    assert found[:1] == prompts[:1]


def test_a_plain_prompt_takes_twelve_bytes_beside_its_text() -> None:
    """At its peak at most 20, because buffers grow; a large file is never held as objects."""
    count = 50_000
    tracemalloc.start()
    table = PromptTable(Prompt(f"{i:06d}") for i in range(count))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == count
    assert peak < (6 + 20) * count + 20_000
