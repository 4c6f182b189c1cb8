"""Bradley-Terry strengths: the maximum of the written likelihood, for any comparisons."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fluvial.engines.scoring.pairwise import bradley_terry


@st.composite
def comparisons(draw: Any) -> Tensor:
    """Draw how often each of up to 6 items was preferred to each other, halves for ties; many pairs are not compared."""
    size = draw(st.integers(1, 6))
    counts = draw(st.lists(st.sampled_from([0, 0, 0.5, 1, 2, 7]), min_size=size * size, max_size=size * size))
    return torch.tensor(counts, dtype=torch.float64).view(size, size).fill_diagonal_(0)


def log_posterior(wins: Tensor, theta: Tensor, prior: float) -> Tensor:
    """Return sum_ij w_ij log P(i beats j) and the prior, as they are written."""
    beats = torch.nn.functional.logsigmoid(theta[:, None] - theta[None, :])
    against = torch.nn.functional.logsigmoid(theta) + torch.nn.functional.logsigmoid(-theta)
    return (wins * beats).sum() + prior * against.sum()


@given(comparisons(), st.sampled_from([0.1, 0.5, 3.0]))
def test_the_strengths_are_the_maximum(wins: Tensor, prior: float) -> None:
    """The gradient of the log-posterior, which is strictly concave, is 0 there."""
    theta = bradley_terry(wins, prior=prior).requires_grad_()
    (gradient,) = torch.autograd.grad(log_posterior(wins, theta, prior), theta)
    assert torch.isfinite(theta).all()
    assert gradient.abs().max() < 1e-6 * (1 + wins.sum())


@given(comparisons())
def test_who_wins_for_who_loses_turns_the_signs(wins: Tensor) -> None:
    assert torch.allclose(bradley_terry(wins.T), -bradley_terry(wins), atol=1e-6)


@given(comparisons(), st.randoms(use_true_random=False))
def test_the_order_of_the_items_does_not_matter(wins: Tensor, random: Any) -> None:
    order = list(range(len(wins)))
    random.shuffle(order)
    assert torch.allclose(bradley_terry(wins[order][:, order]), bradley_terry(wins)[order], atol=1e-6)


def test_known_answers() -> None:
    """No comparisons and ties are 0; a winner is above its loser, however unlikely; many votes give about the log odds."""
    assert bradley_terry(torch.zeros(3, 3)).tolist() == [0, 0, 0]
    assert bradley_terry(torch.tensor([[0, 0.5], [0.5, 0]])).tolist() == [0, 0]
    chain = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0, 0.0]])  # 0 beats 1 beats 2: no maximum without a prior
    first, second, third = bradley_terry(chain).tolist()
    assert first > second > third
    assert second == pytest.approx(0, abs=1e-9)
    first, second = bradley_terry(torch.tensor([[0, 3e3], [1e3, 0]])).tolist()
    assert first - second == pytest.approx(math.log(3), rel=1e-2)
    assert bradley_terry(torch.zeros(0, 0)).shape == (0,)


@pytest.mark.parametrize(
    ("wins", "prior", "says"),
    [
        (torch.zeros(2, 3), 0.5, r"shape \[2, 3\], expected \[n, n\]"),
        (torch.tensor([[0, -1.0], [0, 0]]), 0.5, "numbers >= 0"),
        (torch.tensor([[0, math.nan], [0, 0]]), 0.5, "finite numbers"),
        (torch.eye(2), 0.5, "diagonal of 0"),
        (torch.zeros(2, 2), 0.0, "prior"),
    ],
)
def test_what_is_no_count_is_refused(wins: Tensor, prior: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        bradley_terry(wins, prior=prior)
