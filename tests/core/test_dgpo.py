"""DGPO: the weight of a group, and the loss, by loops in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from fluvial.core.dgpo import dgpo_loss, group_weight, preference_margin

numbers = st.floats(-2, 2, allow_subnormal=False)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 7), st.integers(1, 3))
def test_the_weight_is_the_sigmoid_of_the_groups_mean(seed: int, samples: int, levels: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    margin = torch.randn(samples, levels, generator=drawn, dtype=torch.float64)
    group = torch.randint(0, 3, (samples,), generator=drawn)
    counts = torch.rand(samples, levels, generator=drawn) < 0.7
    got = group_weight(margin, group, counts=counts)
    for i in range(samples):
        for m in range(levels):
            kept = [float(margin[j, m]) for j in range(samples) if group[j] == group[i] and counts[j, m]]
            want = 1 / (1 + math.exp(-sum(kept) / max(len(kept), 1)))
            assert float(got[i, m]) == pytest.approx(want, rel=1e-12)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3), numbers, st.floats(0, 1)), min_size=1, max_size=5))
def test_the_loss_and_where_it_has_a_gradient(rows: list[tuple[float, float, float, float]]) -> None:
    error, old, advantage, weight = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    error.requires_grad_()
    loss, info = dgpo_loss(error, old, advantage, weight, clip_low=0.1, clip_high=0.2)
    loss.sum().backward()
    assert error.grad is not None
    for i, (now, before, a, w) in enumerate(rows):
        ratio = math.exp(before - now)
        held = ratio > 1.2 if a > 0 else ratio < 0.9
        assert float(loss[i].detach()) == pytest.approx(w * a * now, rel=1e-12, abs=1e-300)
        assert float(error.grad[i]) == pytest.approx(0.0 if held else w * a, rel=1e-12)
        assert bool(info.clipped[i]) is held


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.85, 0.89, 0.91, 0.99, 1.0, 1.01, 1.11, 1.19, 1.21, 1.25])
def test_where_the_clip_begins(ratio: float, advantage: float) -> None:
    """Just within and just beyond 1 - clip_low = 0.9 and 1 + clip_high = 1.2, each on the side that A pushes to."""
    error = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    old = error.detach() + math.log(ratio)
    numbers = (torch.tensor([number], dtype=torch.float64) for number in (advantage, 0.4))
    loss, info = dgpo_loss(error, old, *numbers, clip_low=0.1, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), error)
    held = ratio > 1.2 if advantage > 0 else ratio < 0.9
    assert bool(info.clipped) is held
    assert float(gradient) == pytest.approx(0.0 if held else 0.4 * advantage)


def test_no_gradient_flows_to_the_groups_weight() -> None:
    """The weight depends on the errors of all levels, and is a constant in the loss; so are advantage and old error."""
    error, old, advantage, weight = torch.rand(4, 3, dtype=torch.float64).requires_grad_().unbind(0)
    loss, _ = dgpo_loss(error, old.detach(), advantage.detach(), weight, clip_low=0.1, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), weight, allow_unused=True)
    assert gradient is None


def test_a_preferred_group_counts_less() -> None:
    """Where the good sample is fitted better than by the reference and the bad one worse, the weight is below one half."""
    advantage, reference = torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0])
    for errors, below in (([0.5, 1.5], True), ([1.5, 0.5], False)):
        margin = preference_margin(torch.tensor(errors), reference, advantage, beta=10.0)
        weight = group_weight(margin[:, None], torch.zeros(2, dtype=torch.long))
        assert bool((weight < 0.5).all()) is below
    at_reference = preference_margin(reference, reference, advantage, beta=10.0)
    assert_close(group_weight(at_reference[:, None], torch.zeros(2, dtype=torch.long)), torch.full((2, 1), 0.5))
