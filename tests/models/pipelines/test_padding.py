"""Padding that a network masks is cut off: the same prediction and gradients, for fewer operations."""

from typing import Any

import pytest
import torch
from helpers.marks import Folders
from helpers.tiny_pipelines import ROWS, each_row, opened, start
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fluvial.models.flops import FlopCounter
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.padding import pad_length, trim, trims_padding
from fluvial.models.pipelines.base import Pipeline

MASKED = [name for name, row in ROWS.items() if row.masks]
PROMPTS = ("", "a red fox", "two cats", "b " * 12 + "owls")


@each_row
def test_padding_is_trimmed_where_the_network_masks_it(name: str, folders: Folders) -> None:
    """And nowhere else: elsewhere padding tokens take part in attention."""
    assert trims_padding(opened(name, folders(name))) == ROWS[name].masks


def answered(model: Pipeline, module: nn.Module, x: Tensor, cond: Any) -> tuple[Tensor, list[Tensor]]:
    v = guided_velocity(model, module, x, torch.linspace(0.2, 0.9, len(x)), cond)
    found = torch.autograd.grad(v.square().mean(), list(module.parameters()), allow_unused=True)
    return v.detach(), [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("name", MASKED)
def test_trimming_changes_neither_prediction_nor_gradient(name: str, folders: Folders) -> None:
    """Of batches of any prompts, with guidance, cut to any length that holds the longest."""
    model = opened(name, folders(name), text_tokens=80)
    module, shape = model.build(), model.latent_shape(*ROWS[name].sizes[0][:2])
    noise = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))

    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=3), more=st.integers(0, 9))
    def holds(prompts: list[str], more: int) -> None:
        uncond, scale = model.encode([PROMPTS[1]] * len(prompts)), torch.full((len(prompts),), 2.0)
        whole: Any = Guided(model.encode(prompts), uncond, scale)
        longest = max(int(model.count_prompt_tokens(half).max()) for half in (whole.cond, whole.uncond))  # type: ignore[attr-defined]
        short = trim(model, whole, longest + more)
        assert short.cond.tokens.shape[1] == short.uncond.tokens.shape[1] == longest + more < 80
        (v, grads), (expected, expected_grads) = (
            answered(model, module, noise[: len(prompts)], cond) for cond in (short, whole)
        )
        torch.testing.assert_close(v, expected, rtol=1e-4, atol=1e-5)
        for gradient, known in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(gradient, known, rtol=1e-3, atol=1e-5)

    holds()


def test_a_short_prompt_of_qwen_image_costs_less(folders: Folders) -> None:
    """Cut from 512 tokens to 32, a forward pass of 16 image tokens takes less than a fifth of the operations."""
    model = opened("qwen-image", folders("qwen-image"), text_tokens=512)
    module, x = model.build(), start(model, 2, (16, 16))
    cond = model.encode(["a fox", "two cats"])
    tokens = pad_length(int(model.count_prompt_tokens(cond).max()), limit=512)  # type: ignore[attr-defined]
    counted = []
    for each in (cond, trim(model, cond, tokens)):
        with FlopCounter() as counter, torch.no_grad():
            model.predict(module, x, torch.tensor([0.3, 0.8]), each)
        counted.append(counter.model)
    assert tokens == 32
    assert 0 < counted[1] < counted[0] / 5


@pytest.mark.parametrize(
    ("longest", "limit", "length"), [(1, 512, 32), (32, 512, 32), (33, 512, 64), (500, 512, 512), (35, 40, 40)]
)
def test_lengths_repeat(longest: int, limit: int, length: int) -> None:
    assert pad_length(longest, limit=limit) == length
