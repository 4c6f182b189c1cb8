"""The policy gradient is unbiased: on a problem whose expected reward is known, its mean is the exact gradient.

The model is linear, v_i = theta_i x at step i, the reward quadratic, R = -(x_T - c)^2. Samplers are affine in x and v, so
x_T is Gaussian with moments that a recursion gives, and with them the gradient of the expected reward.
"""

from functools import lru_cache, partial

import pytest
import torch
from helpers.tables import STOCHASTIC, SamplerRow
from torch import Tensor

from fluvial.core import transitions
from fluvial.core.advantages import group_advantages
from fluvial.core.gaussian import log_prob
from fluvial.core.policy import clipped_surrogate, dppo_surrogate
from fluvial.core.random import key, normal
from fluvial.core.rollout import Trajectory, rollout
from fluvial.core.table import Record
from fluvial.core.transitions import Sampler

STEPS, ETA, GOAL, SAMPLES, GROUP = 4, 0.6, 0.7, 100_000, 8


def problem(row: SamplerRow) -> tuple[Tensor, Tensor, Sampler, Sampler]:
    grid = row.grid(STEPS + 1).double()
    grid = grid[: STEPS + 1] if row.name == "ddim" else torch.cat([grid[:STEPS], grid[-1:]])
    theta = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64)
    still = partial(transitions.ddim, eta=0.0) if row.name == "ddim" else transitions.ode
    return grid, theta, row.bind(ETA), still


def recorded_steps(row: SamplerRow, window: range, grid: Tensor) -> list[int]:
    return [i for i in window if float(row.bind(ETA)(grid[i], grid[i + 1]).std) > 0]


def exact_gradient(grid: Tensor, theta: Tensor, sampler: Sampler, still: Sampler, window: range) -> Tensor:
    """d E[R] / d theta_i of every step, by autograd through the recursion of mean and variance."""
    theta = theta.clone().requires_grad_()
    mean, variance = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for i in range(STEPS):
        step = (sampler if i in window else still)(grid[i], grid[i + 1])
        factor = step.a + step.b * theta[i]
        mean, variance = factor * mean, factor**2 * variance + step.std**2
    (gradient,) = torch.autograd.grad(-((mean - GOAL) ** 2 + variance), theta)
    return gradient


@lru_cache(maxsize=8)
def sampled(row: SamplerRow, window: range, shared: bool = False) -> tuple[Trajectory, Tensor, Tensor]:
    grid, theta, sampler, still = problem(row)
    run = partial(
        rollout, lambda x, sigma, step: theta[step] * x, sigmas=grid, transition=sampler, deterministic=still, key=key(4)
    )
    if shared:
        first = normal(key(3), (SAMPLES // GROUP, 1), dtype=torch.float64)
        before = run(first, window=(), record=(), steps=range(window.start)).final
        start, steps = before.repeat_interleave(GROUP, dim=0), range(window.start, STEPS)
    else:
        start, steps = normal(key(3), (SAMPLES, 1), dtype=torch.float64), range(STEPS)
    trajectory = run(start, window=window, record=Record(velocity=True), steps=steps)
    return trajectory, grid, theta


def estimates(
    row: SamplerRow, window: range, loss_of: str, *, baseline: bool = True, shared: bool = False
) -> tuple[Tensor, Tensor]:
    trajectory, grid, theta = sampled(row, window, shared)
    _, _, sampler, still = problem(row)
    reward = -((trajectory.final[:, 0] - GOAL) ** 2)
    advantage = group_advantages(reward, torch.arange(SAMPLES) // GROUP, scale="none") if baseline else reward
    parts = []
    for place, i in enumerate(trajectory.steps[0].tolist()):
        # One theta per sample, so that one backward pass gives every sample's gradient.
        own = theta[i].expand(SAMPLES).clone().requires_grad_()
        x, x_next = trajectory.x[:, place], trajectory.x_next[:, place]
        v = own[:, None] * x
        step = sampler(grid[i], grid[i + 1])
        new = log_prob(step, x, v, x_next, reduction="sum")
        old = trajectory.log_prob[:, place]
        if loss_of == "clipped":
            loss, _ = clipped_surrogate(new, old, advantage, clip_low=1e-3, clip_high=1e-3)
        else:
            assert trajectory.velocity is not None
            v_old = trajectory.velocity[:, place]
            loss, _ = dppo_surrogate(new, old, advantage, step, v, v_old, kl_threshold=1e-5)
        (gradient,) = torch.autograd.grad(loss.sum(), own)
        parts.append(-gradient)
    exact = exact_gradient(grid, theta, sampler, still, window)[trajectory.steps[0]]
    return torch.stack(parts, dim=1), exact


@pytest.mark.parametrize("loss_of", ["clipped", "dppo"])
@pytest.mark.parametrize(
    ("window", "shared"),
    [(range(STEPS), False), (range(1, 3), False), (range(1, 3), True)],
    ids=["all steps", "a window", "a window after a shared prefix"],
)
@pytest.mark.parametrize("row", STOCHASTIC, ids=lambda row: row.name)
def test_the_policy_gradient_is_unbiased(row: SamplerRow, window: range, shared: bool, loss_of: str) -> None:
    """Within 4.5 standard errors at each step; a group's mean as baseline takes 1/G of it away, as it is known to."""
    found, exact = estimates(row, window, loss_of, shared=shared)
    assert found.shape[1] == len(recorded_steps(row, window, problem(row)[0])) > 0
    # E[(r_i - mean_group r) g_i] = (1 - 1/G) E[r g]: the sample itself is part of its group's mean.
    error = found.reshape(-1, GROUP, found.shape[1]).mean(1).std(0) / (SAMPLES / GROUP) ** 0.5
    expected = (1 - 1 / GROUP) * exact
    assert ((found.mean(0) - expected).abs() < 4.5 * error).all(), (found.mean(0), expected, error)
    # The problem tells right from wrong: the exact gradient is many standard errors from 0.
    assert (expected.abs() > 10 * error).any()


@pytest.mark.parametrize("row", STOCHASTIC, ids=lambda row: row.name)
def test_the_baseline_only_takes_noise_away(row: SamplerRow) -> None:
    with_baseline, exact = estimates(row, range(STEPS), "clipped")
    bare, _ = estimates(row, range(STEPS), "clipped", baseline=False)
    error = bare.std(0) / SAMPLES**0.5
    assert ((bare.mean(0) - exact).abs() < 4.5 * error).all()
    assert with_baseline.std(0).sum() < bare.std(0).sum()
