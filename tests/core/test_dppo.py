"""Flow-DPPO's surrogate: its formula, what it holds back and what it lets through, on policy and far from it."""

import math

import pytest
import torch
from helpers.tables import normals
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from fluvial.core import gaussian
from fluvial.core.policy import PolicyInfo, dppo_surrogate
from fluvial.core.transitions import Transition, cps, dance_sde, ode

log_ratios = st.floats(-3, 3).filter(lambda d: d == 0 or abs(d) > 1e-9)
A, B, STD = 0.9, -0.3, 0.2  # of one step: its KL is (0.3 / 0.2)^2 / 2 |v - v_old|^2


def surrogate(
    log_ratio: float, advantage: float, distance: float, threshold: float, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, PolicyInfo]:
    step = Transition(*(torch.tensor(c, dtype=dtype) for c in (A, B, STD)))
    old = torch.tensor([-1.25], dtype=dtype)
    log_prob = (old + log_ratio).requires_grad_()
    v_old = normals(3, 1, 2, 3, dtype=dtype)
    loss, info = dppo_surrogate(
        log_prob, old, torch.tensor([advantage], dtype=dtype), step, v_old + distance, v_old, kl_threshold=threshold
    )
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    return loss.detach(), gradient, info


@given(log_ratio=log_ratios, advantage=st.floats(-50, 50), distance=st.floats(0, 2), threshold=st.floats(0, 2))
def test_the_loss_is_the_formula(log_ratio: float, advantage: float, distance: float, threshold: float) -> None:
    kl = B**2 * distance**2 / (2 * STD**2)
    if math.isclose(kl, threshold, rel_tol=1e-9, abs_tol=1e-12):
        return  # which side a rounding falls on
    loss, gradient, info = surrogate(log_ratio, advantage, distance, threshold)
    rho = math.exp(log_ratio)
    moved = (advantage > 0 and rho > 1) or (advantage < 0 and rho < 1)
    held = kl >= threshold and moved
    want = 0.0 if held else -advantage * rho
    assert loss.item() == pytest.approx(want, rel=1e-13, abs=1e-300)
    assert gradient.item() == pytest.approx(want, rel=1e-13, abs=1e-300)  # d rho / d log_prob = rho
    assert info.clipped.item() == float(held)
    assert info.ratio.item() == pytest.approx(rho)
    assert info.log_ratio.item() == pytest.approx(log_ratio, abs=1e-15)
    assert info.kl_old.item() == pytest.approx(math.exp(log_ratio) - 1 - log_ratio, abs=1e-13)
    assert not any(tensor.requires_grad for tensor in info)


def test_the_kl_is_that_of_the_old_step_to_the_current_one() -> None:
    step = dance_sde(torch.tensor([0.9, 0.5, 0.3]).double(), torch.tensor([0.7, 0.4, 0.1]).double(), eta=0.6)
    v, v_old = normals(0, 2, 3, 4, 5)
    kl = gaussian.kl(step, v_old, v)
    up, ones = torch.full((3,), 0.1).double(), torch.ones(3).double()
    for threshold, held in ((kl.min() * 0.99, 3), (kl.median(), 2), (kl.max(), 1), (kl.max() * 1.01, 0)):
        loss, info = dppo_surrogate(up, 0 * up, ones, step, v, v_old, kl_threshold=threshold.item())
        assert info.clipped.sum() == held
        assert torch.equal(loss == 0, info.clipped == 1)


def test_a_float32_threshold_is_the_float64_one() -> None:
    for distance in (0.0, 0.01, 0.1, 1.0):
        low, high = (surrogate(0.5, 1.0, distance, 1e-3, dtype=dtype) for dtype in (torch.float32, torch.float64))
        assert low[0].dtype == low[2].clipped.dtype == torch.float32
        assert_close(low[0].double(), high[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("advantage", "held"), [(1.0, True), (-1.0, False), (0.0, False)])
def test_an_overflowing_ratio_is_without_nan(advantage: float, held: bool) -> None:
    loss, gradient, info = surrogate(200.0, advantage, 1.0, 1e-5, dtype=torch.float32)
    assert info.clipped.item() == float(held)
    assert loss.isfinite().all()
    assert gradient.item() == 0
    assert bool(loss.item() == 0) == (advantage >= 0)


def test_a_velocity_that_overflows_holds_its_pair() -> None:
    step = Transition(*(torch.tensor(c) for c in (A, B, STD)))
    far = torch.full((2, 3), 1e30)  # squared beyond float32: the KL is infinite
    up = torch.tensor([0.1, -0.1])
    loss, info = dppo_surrogate(up, 0 * up, torch.ones(2), step, far, -far, kl_threshold=1e-5)
    assert info.clipped.tolist() == [1, 0]
    assert_close(loss, torch.tensor([0.0, -math.exp(-0.1)]))


def test_a_deterministic_step_has_no_kl() -> None:
    x, p = torch.zeros(3, 5), torch.full((3,), 0.1)
    with pytest.raises(ValueError, match=r"std is not positive for samples \[0, 1, 2\]"):
        dppo_surrogate(p, p, p, ode(torch.tensor([0.9, 0.5, 0.3]), 0.1), x, x, kl_threshold=1e-5)
    last = cps(torch.tensor(0.3), 0.0, eta=0.5)

    def unread(p: Tensor) -> Tensor:
        return dppo_surrogate(p, 0 * p, p, last, x, x, kl_threshold=1e-5)[0].sum()

    with FlopCounterMode(display=False):  # under a dispatch mode no value is read
        gradient, loss = torch.func.grad_and_value(unread)(p)
    assert loss.isnan()
    assert gradient.isnan().all()
