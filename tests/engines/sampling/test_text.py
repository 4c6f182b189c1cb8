"""The length that the prompts of a rollout are padded to: the same on all ranks, and no longer than it must be."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fluvial.engines.data.records import Prompt, as_prompts
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.text import Padding, TextLengths
from fluvial.models.guidance import Guided


class Texts(NamedTuple):
    """Tokens and the number that are not padding."""

    tokens: Tensor
    lengths: Tensor


class Model:
    """Encodes a prompt to as many tokens as it has letters, padded to 100, and remembers what it was asked for."""

    text_tokens = 100

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, prompts: Sequence[str]) -> Texts:
        """Return tokens of zeros."""
        self.asked += prompts
        return Texts(torch.zeros(len(prompts), 100, 2), torch.tensor([len(prompt) for prompt in prompts]))

    def count_prompt_tokens(self, cond: Texts) -> Tensor:
        """Return the lengths."""
        return cond.lengths

    def trim_cond(self, cond: Texts, tokens: int) -> Texts:
        """Return the first tokens."""
        return cond._replace(tokens=cond.tokens[:, :tokens])


def beside(*others: list[int]) -> Any:
    """Return a world whose other ranks send these numbers."""
    return SimpleNamespace(device=torch.device("cpu"), gather=lambda own: torch.cat([own, torch.tensor(others)]))


def test_the_longest_prompt_of_all_ranks_counts() -> None:
    """Rounded up; what is padding of it, and what it saves, is counted over all ranks."""
    model: Any = Model()
    lengths = TextLengths(model, beside([40, 50, 2]))
    assert lengths.padding(["x" * 10, "x" * 4]) == Padding(64, 1 - 64 / (4 * 64), 1 - 0.64)
    assert lengths.of(["x" * 99]) == 100
    assert TextLengths(model).of(["x" * 32]) == 32


def test_a_prompt_is_measured_once() -> None:
    model: Any = Model()
    lengths = TextLengths(model)
    for _ in range(2):
        lengths.of(["a", "bb", "a"])
    assert model.asked == ["a", "bb"]


@pytest.mark.parametrize(("guidance", "tokens"), [(Guidance(), 32), (Guidance(2.0, negative="x" * 40), 64)])
def test_negative_prompts_count_where_there_is_guidance(guidance: Guidance, tokens: int) -> None:
    """Both halves are padded to one length, which holds a record's own negative prompt too."""
    model: Any = Model()
    prompts = as_prompts(["a", "b"])
    cond: Any = guidance.encode(model, prompts, TextLengths(model).of(guidance.list_texts(model, prompts)))
    halves = [cond.cond, cond.uncond] if isinstance(cond, Guided) else [cond]
    assert [half.tokens.shape[1] for half in halves] == [tokens] * len(halves)
    own = [Prompt("a", negative="y" * 70)]
    assert TextLengths(model).of(guidance.list_texts(model, own)) == (96 if guidance.scale != 1 else 32)


def test_a_model_that_does_not_mask_padding_keeps_it() -> None:
    """No prompt is encoded to find that out, and nothing is recorded."""
    model: Any = SimpleNamespace(encode=None)
    lengths = TextLengths(model, beside())
    assert lengths.of(["a"]) is None
    assert lengths.padding(["a"]) is None
