"""GRPO-Guard's surrogate: its formula, 1 on policy, and a gradient of one size at every step of Flow-SDE."""

import torch
from helpers.tables import normals
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fluvial.core import gaussian
from fluvial.core.policy import clipped_surrogate, guard_surrogate
from fluvial.core.sigmas import shifted
from fluvial.core.transitions import Transition, flow_sde

GRID = shifted(10, 3.0).double()


def steps(eta: float = 0.8) -> tuple[Transition, Tensor]:
    return flow_sde(GRID[:-1], GRID[1:], eta=eta, sigma_max=GRID[1]), GRID[1:] - GRID[:-1]


@given(seed=st.integers(0, 10_000), distance=st.floats(0, 0.3), clip=st.floats(1e-4, 0.5))
def test_the_loss_is_the_formula(seed: int, distance: float, clip: float) -> None:
    transition, dt = steps()
    x, v, noise, direction = normals(seed, 4, 10, 6)
    v_old = v + distance * direction
    x_next = gaussian.sample(transition, x, v_old, noise)
    new, old = (gaussian.log_prob(transition, x, u, x_next) for u in (v, v_old))
    advantage = torch.linspace(-2, 2, 10, dtype=torch.float64)
    loss, info = guard_surrogate(new, old, advantage, transition, v, v_old, dt, clip=clip)
    mean_shift = ((transition.b[:, None] * (v - v_old)) ** 2).mean(1) / (2 * transition.std**2)
    rho = torch.exp((new - old + mean_shift) * transition.std)
    want = torch.maximum(-advantage * rho, -advantage * rho.clamp(1 - clip, 1 + clip)) / dt.abs()
    assert_close(loss, want, rtol=1e-10, atol=1e-12)
    assert_close(info.ratio, rho, rtol=1e-10, atol=1e-12)
    none, of_none = guard_surrogate(new, old, 0 * advantage, transition, v, v_old, dt, clip=clip)
    assert not none.any()
    assert not of_none.clipped.any()
    # The correction centres the log-ratio: what is left is linear in the noise.
    linear = (transition.b[:, None] * (v - v_old) * noise).mean(1) / transition.std
    assert_close(new - old + mean_shift, linear, rtol=1e-6, atol=1e-9)


@given(seed=st.integers(0, 10_000), eta=st.floats(0.1, 1.5))
def test_the_gradient_is_of_one_size_at_every_step(seed: int, eta: float) -> None:
    """On policy it is A (1 + eta^2 / 2) noise / N for Flow-SDE beyond its clamped first step; the plain one's is not."""
    transition, dt = steps(eta)
    x, v, noise = normals(seed, 3, 10, 6)
    x_next = gaussian.sample(transition, x, v, noise)
    v = v.requires_grad_()
    new = gaussian.log_prob(transition, x, v, x_next)
    advantage = torch.full((10,), 1.5, dtype=torch.float64)
    loss, info = guard_surrogate(new, new.detach(), advantage, transition, v, v.detach(), dt, clip=0.1)
    assert torch.equal(info.ratio, torch.ones(10, dtype=torch.float64))
    assert not info.clipped.any()
    assert_close(loss.detach(), -advantage / dt.abs())
    (gradient,) = torch.autograd.grad(loss.sum(), v, retain_graph=True)
    assert_close(gradient[1:], (1.5 * (1 + eta**2 / 2) * noise / 6)[1:], rtol=1e-6, atol=1e-9)
    plain, _ = clipped_surrogate(new, new.detach(), advantage, clip_low=0.1, clip_high=0.1)
    (gradient,) = torch.autograd.grad(plain.sum(), v)
    sizes = (gradient / noise).abs().mean(1)
    assert sizes[-1] > 10 * sizes[1]
