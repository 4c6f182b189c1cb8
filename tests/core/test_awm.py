"""Advantage weighted matching: each weighting's formula, how they are related, and the policy gradient they make."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fluvial.core.awm import WEIGHTINGS, Weighting, awm_log_prob

every_weighting = pytest.mark.parametrize("weighting", WEIGHTINGS)
errors = st.floats(0, 1e4)
times = st.floats(0, 1)


def reference(error: float, t: float, weighting: Weighting, delta: float, power: float) -> float:
    return {
        "uniform": -error,
        "t": -t * error,
        "t2": -t * t * error,
        "huber": -t * (math.sqrt(error + delta**2) - delta),
        "ghuber": -t * ((error + delta**2) ** power - delta ** (2 * power)) / power,
    }[weighting]


@every_weighting
@given(error=errors, t=times, delta=st.floats(1e-5, 1), power=st.floats(0.05, 1))
def test_it_is_the_formula(weighting: Weighting, error: float, t: float, delta: float, power: float) -> None:
    got = awm_log_prob(torch.tensor([error]).double(), t, weighting=weighting, delta=delta, power=power)
    error = torch.tensor([error]).double().item()
    want = reference(error, t, weighting, delta, power)
    # The offset is subtracted from a power near 1 at small powers, then divided by the power.
    assert got.item() == pytest.approx(want, rel=1e-12, abs=1e-13)


def test_the_defaults_are_the_published_ones() -> None:
    error, t = torch.tensor([0.0, 1e-9, 0.3, 7.0]).double(), torch.tensor([0.1, 0.4, 0.7, 1.0]).double()
    assert_close(awm_log_prob(error, t, weighting="huber"), -((error + 1e-10).sqrt() - 1e-5) * t, rtol=1e-10, atol=1e-15)
    want = -((error + 1e-10) ** 0.25 - 1e-10**0.25) * t / 0.25
    assert_close(awm_log_prob(error, t, weighting="ghuber"), want, rtol=1e-10, atol=1e-15)


@every_weighting
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("delta", "power"), [(1e-5, 0.25), (0.1, 0.7)])
def test_no_error_is_exactly_no_loss(weighting: Weighting, dtype: torch.dtype, delta: float, power: float) -> None:
    error = torch.zeros(3, dtype=dtype).requires_grad_()
    got = awm_log_prob(error, 0.7, weighting=weighting, delta=delta, power=power)
    assert got.tolist() == [0, 0, 0]
    (gradient,) = torch.autograd.grad(got.sum(), error)
    assert gradient.isfinite().all()
    assert bool((gradient < 0).all())


@every_weighting
def test_a_larger_error_is_less_likely_at_every_size(weighting: Weighting) -> None:
    error = torch.tensor([0.0, 1e-12, 1e-8, 1e-4, 1.0, 1e4, 1e15, 1e30])
    got = awm_log_prob(error, 0.5, weighting=weighting)
    assert got.isfinite().all()
    assert bool((got[1:] <= got[:-1]).all())
    assert bool((got[3:] < got[2:-1]).all())
