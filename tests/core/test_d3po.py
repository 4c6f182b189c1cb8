"""D3PO: the clipped log-ratio, and the two halves of a pair's loss, by loops in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fluvial.core.dpo import clip_log_ratio, d3po_loss

log_probs = st.floats(-1, 1, allow_subnormal=False)


@settings(max_examples=30)
@given(log_probs, log_probs, st.floats(0.05, 0.5))
def test_the_log_ratio_is_clipped(now: float, reference: float, eps: float) -> None:
    log_prob = torch.tensor([now], dtype=torch.float64, requires_grad=True)
    got = clip_log_ratio(log_prob, torch.tensor([reference], dtype=torch.float64), eps=eps)
    got.sum().backward()
    ratio = math.exp(now - reference)
    assert float(got.detach()) == pytest.approx(math.log(min(max(ratio, 1 - eps), 1 + eps)), rel=1e-12, abs=1e-15)
    assert log_prob.grad is not None
    if abs(ratio - (1 - eps)) > 1e-9 and abs(ratio - (1 + eps)) > 1e-9:
        assert float(log_prob.grad) == pytest.approx(1.0 if 1 - eps < ratio < 1 + eps else 0.0, abs=1e-12)


@settings(max_examples=30)
@given(log_probs, log_probs, st.floats(0.1, 5))
def test_two_halves_are_the_loss_of_their_pair(win: float, lose: float, beta: float) -> None:
    """In value and in gradient, though neither half has a gradient in the other's log-ratio."""
    own = torch.tensor([win, lose], dtype=torch.float64, requires_grad=True)
    halves = d3po_loss(own, own.flip(0), torch.tensor([1.0, -1.0], dtype=torch.float64), beta=beta)
    halves.sum().backward()
    margin = beta * (win - lose)
    slope = beta / (1 + math.exp(margin))
    assert float(halves.detach().sum()) == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-9)
    assert own.grad is not None
    assert own.grad.tolist() == pytest.approx([-slope, slope], rel=1e-9)


def test_items_without_a_pair_add_nothing() -> None:
    own = torch.tensor([0.3, -0.1], requires_grad=True)
    loss = d3po_loss(own, torch.zeros(2), torch.zeros(2), beta=1.0)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0]
    assert own.grad is not None
    assert own.grad.tolist() == [0.0, 0.0]
