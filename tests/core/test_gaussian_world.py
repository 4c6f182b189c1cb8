"""Losses on noised samples in a world where the answer is known: x0 ~ N(m, c^2), and a reward of x0 itself.

At x_t = (1 - t) x0 + t e the clean sample is N(mu, V) with V = c^2 t^2 / ((1 - t)^2 c^2 + t^2), the exact velocity is
E[u | x_t] with u = e - x0, and the change that the reward asks for is the covariance of reward and velocity, -V / t.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fluvial.core.awm import awm_log_prob
from fluvial.core.crd import crd_loss, implicit_reward
from fluvial.core.dgpo import dgpo_loss
from fluvial.core.dpo import kto_loss
from fluvial.core.flow_matching import velocity_error
from fluvial.core.nft import nft_loss, reward_prob
from fluvial.core.policy import clipped_surrogate

BETA, CLIP, WIDE = 0.4, 1e3, 1e4  # WIDE: a size of errors, as which NFT takes a constant
Loss = Callable[..., Tensor]  # of (v, v_old, u, x0, xt, t, advantage)


def awm(weighting: Any) -> Loss:
    """Return the loss of AWM, on policy."""

    def loss(v: Tensor, old: Tensor, u: Tensor, x0: Tensor, xt: Tensor, t: float, advantage: Tensor) -> Tensor:
        now, before = (awm_log_prob(velocity_error(each, u), t, weighting=weighting, power=1.0) for each in (v, old))
        return clipped_surrogate(now, before, advantage, clip_low=0.1, clip_high=0.1)[0]

    return loss


def dgpo(v: Tensor, old: Tensor, u: Tensor, x0: Tensor, xt: Tensor, t: float, advantage: Tensor) -> Tensor:
    """Return the loss of DGPO with the weight of an undecided group."""
    half = torch.full_like(advantage, 0.5)
    return dgpo_loss(velocity_error(v, u), velocity_error(old, u), advantage, half, clip_low=0.1, clip_high=0.1)[0]


def nft(v: Tensor, old: Tensor, u: Tensor, x0: Tensor, xt: Tensor, t: float, advantage: Tensor) -> Tensor:
    """Return the loss of NFT, its errors divided by a constant."""
    good = reward_prob(advantage, adv_clip=CLIP)
    return WIDE * nft_loss(v, old, x0, xt, t, good, beta=BETA, adv_clip=CLIP, weight_min=WIDE)


def crd(v: Tensor, old: Tensor, u: Tensor, x0: Tensor, xt: Tensor, t: float, advantage: Tensor) -> Tensor:
    """Return the loss of CRD with the rewards as given."""
    implicit = implicit_reward(v, old, u, adaptive=False)
    return crd_loss(implicit, torch.zeros_like(implicit), advantage, beta=BETA, scale=1.0)


def kto(v: Tensor, old: Tensor, u: Tensor, x0: Tensor, xt: Tensor, t: float, advantage: Tensor) -> Tensor:
    """Return the loss of KTO, the label a number."""
    gain = velocity_error(old, u) - velocity_error(v, u)
    return kto_loss(gain, torch.zeros_like(gain), advantage, beta=BETA)[0]


def expected_gradient(loss: Loss, m: float, c: float, t: float, z: float, change: float = 0.0) -> tuple[float, float]:
    """Return the expected gradient in v at v_old + change V / t, and V / t; x_t is z deviations from its mean."""
    spread = (1 - t) ** 2 * c**2 + t**2
    variance = c**2 * t**2 / spread
    xt = (1 - t) * m + z * spread**0.5
    mu = m + (1 - t) * c**2 / spread * (xt - (1 - t) * m)
    places, weights = np.polynomial.hermite_e.hermegauss(12)  # exact for the polynomials that these losses are in x0
    x0 = torch.from_numpy(mu + variance**0.5 * places)[:, None]
    u = (xt - x0) / t
    old = torch.full_like(u, (xt - mu) / t)
    v = (old + change * variance / t).requires_grad_()
    losses = loss(v, old, u, x0, torch.full_like(u, xt), t, (x0 - m)[:, 0])
    (gradient,) = torch.autograd.grad(losses @ torch.from_numpy(weights / weights.sum()), v)
    return float(gradient.sum()), variance / t


TABLE: dict[str, tuple[Loss, Callable[[float], float]]] = {  # and the factor of V / t at the level t
    "awm uniform": (awm("uniform"), lambda t: 2.0),
    "awm t": (awm("t"), lambda t: 2 * t),
    "awm t2": (awm("t2"), lambda t: 2 * t**2),
    "awm ghuber": (awm("ghuber"), lambda t: 2 * t),
    "dgpo": (dgpo, lambda t: 2 * 0.5),
    "nft": (nft, lambda t: 2 * t**2),
    "crd": (crd, lambda t: 4.0),
    "kto": (kto, lambda t: BETA / 2),
}
WORLD = {"m": st.floats(-2, 2), "c": st.floats(0.3, 2), "t": st.floats(0.05, 0.95), "z": st.floats(-2, 2)}


@pytest.mark.parametrize("name", TABLE)
@settings(max_examples=25)
@given(**WORLD)
def test_the_first_step_is_towards_the_rewarded_samples(name: str, m: float, c: float, t: float, z: float) -> None:
    """For reward x0 the expected gradient is the covariance of reward and velocity times a factor of the method alone."""
    loss, factor = TABLE[name]
    got, want = expected_gradient(loss, m, c, t, z)
    assert got == pytest.approx(factor(t) * want, rel=1e-6, abs=1e-7)


@settings(max_examples=25)
@given(**WORLD)
def test_nft_ends_at_its_theorem(m: float, c: float, t: float, z: float) -> None:
    """v* = v_old + 2 / beta E[r (u - v_old) | x_t] (arXiv 2509.16117); with r = (A / clip + 1) / 2 that is
    V / t / (beta clip) away."""
    there, size = expected_gradient(nft, m, c, t, z, change=-1 / (BETA * CLIP))
    beyond, _ = expected_gradient(nft, m, c, t, z, change=-2 / (BETA * CLIP))
    assert there == pytest.approx(0.0, abs=1e-6 * t**2 * size)
    assert beyond < 0
