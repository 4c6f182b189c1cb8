"""Surrogates: their values, what gradient they let through, and their diagnostics; clipped, of GRPO-Guard, of Flow-DPPO."""

import math

import pytest
import torch
from helpers.tables import normals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from fluvial.core import gaussian
from fluvial.core.policy import (
    PolicyInfo,
    clipped_surrogate,
    dppo_surrogate,
    guard_surrogate,
    noise_weighted_surrogate,
    share_ratio,
    step_scale,
)
from fluvial.core.sigmas import shifted
from fluvial.core.transitions import Transition, bind, cps, dance_sde, flow_sde, ode

advantages = st.floats(-5, 5).filter(lambda a: abs(a) > 1e-3)
clips = st.floats(1e-3, 0.9)
log_ratios = st.floats(-3, 3)


def surrogate(log_ratio: float, advantage: float, low: float, high: float) -> tuple[Tensor, Tensor, PolicyInfo]:
    log_prob_old = torch.tensor([-1.25], dtype=torch.float64)
    log_prob = (log_prob_old + log_ratio).requires_grad_()
    advantage_of_pair = torch.tensor([advantage], dtype=torch.float64)
    loss, info = clipped_surrogate(log_prob, log_prob_old, advantage_of_pair, clip_low=low, clip_high=high)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    return loss.detach(), gradient, info


@given(log_ratio=log_ratios, advantage=st.floats(-5, 5), low=clips, high=clips)
def test_the_loss_is_the_formula(log_ratio: float, advantage: float, low: float, high: float) -> None:
    loss, _, _ = surrogate(log_ratio, advantage, low, high)
    rho = math.exp(log_ratio)
    want = max(-advantage * rho, -advantage * min(max(rho, 1 - low), 1 + high))
    assert loss.item() == pytest.approx(want, rel=1e-14, abs=1e-300)


@given(advantage=advantages, low=clips | st.just(0.0), high=clips | st.just(0.0))
def test_the_gradient_is_minus_the_advantage_on_policy(advantage: float, low: float, high: float) -> None:
    loss, gradient, info = surrogate(0.0, advantage, low, high)
    assert loss.item() == gradient.item() == -advantage
    assert (info.ratio.item(), info.log_ratio.item(), info.clipped.item(), info.kl_old.item()) == (1, 0, 0, 0)


@given(log_ratio=log_ratios, advantage=advantages, low=clips, high=clips)
def test_the_gradient_vanishes_only_where_the_advantage_has_pushed_too_far(
    log_ratio: float, advantage: float, low: float, high: float
) -> None:
    rho = math.exp(log_ratio)
    if min(abs(rho - (1 - low)), abs(rho - (1 + high))) < 1e-9:
        return  # the kink itself
    _, gradient, info = surrogate(log_ratio, advantage, low, high)
    held = rho > 1 + high if advantage > 0 else rho < 1 - low
    assert gradient.item() == pytest.approx(0.0 if held else -advantage * rho, rel=1e-13)
    assert info.clipped.item() == float(held)


@given(log_ratio=log_ratios, low=clips, high=clips)
def test_an_advantage_of_0_is_not_clipped(log_ratio: float, low: float, high: float) -> None:
    loss, gradient, info = surrogate(log_ratio, 0.0, low, high)
    assert (loss.item(), gradient.item(), info.clipped.item()) == (0.0, 0.0, 0.0)


@given(log_ratio=log_ratios)
def test_diagnostics(log_ratio: float) -> None:
    _, _, info = surrogate(log_ratio, 1.0, 0.2, 0.2)
    assert info.ratio.item() == pytest.approx(math.exp(log_ratio))
    assert info.log_ratio.item() == pytest.approx(log_ratio, abs=1e-15)
    assert info.kl_old.item() >= 0
    assert info.kl_old.item() == pytest.approx(math.exp(log_ratio) - 1 - log_ratio, abs=1e-14)
    assert not any(tensor.requires_grad for tensor in info)


def test_a_small_step_is_not_lost_in_rounding() -> None:
    # In float32 exp(1e-4) - 1 - 1e-4 is rounding noise around 5e-9; expm1 keeps a quarter of its digits.
    log_prob = torch.tensor([1e-3])
    _, info = clipped_surrogate(log_prob, torch.zeros(1), torch.ones(1), clip_low=0.2, clip_high=0.2)
    assert info.kl_old.item() == pytest.approx(5e-7, rel=1e-3)


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_an_overflowing_ratio_is_held_without_nan(advantage: float) -> None:
    # exp(200) is beyond float32. A sample clipped that far, or without advantage, has a gradient of 0, not 0 * inf.
    log_prob = torch.tensor([200.0], requires_grad=True)
    loss, _ = clipped_surrogate(log_prob, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
    assert loss.item() == pytest.approx(-advantage * 1.2)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert gradient.item() == 0


@settings(max_examples=20)
@given(st.floats(-0.01, 0.01), st.floats(-2, 2), st.floats(1e-3, 2), st.floats(0.1, 3))
def test_the_noise_weighted_surrogate_is_the_clipped_one_times_the_noise(
    log_ratio: float, advantage: float, std: float, scale: float
) -> None:
    new = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    old, gain, noise = (torch.tensor([value], dtype=torch.float64) for value in (0.0, advantage, std))
    loss, _ = noise_weighted_surrogate(new, old, gain, noise, clip_low=1e-3, clip_high=2e-3, scale=scale)
    loss.sum().backward()
    ratio = math.exp(log_ratio)
    want = max(-advantage * ratio, -advantage * min(max(ratio, 1 - 1e-3), 1 + 2e-3))
    assert float(loss.detach()) == pytest.approx(scale * std * want, rel=1e-12, abs=1e-300)
    held = (advantage > 0 and ratio > 1 + 2e-3) or (advantage < 0 and ratio < 1 - 1e-3)
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(0.0 if held else -scale * std * advantage * ratio, rel=1e-9, abs=1e-300)


def test_a_scale_takes_the_noise_of_a_step_out_of_its_gradient() -> None:
    """Which is then the step's own draw, at the last levels as at the first."""
    levels = shifted(12, 3.0).double()
    step, z = bind("flow_sde", 0.7, levels)(levels[:-1], levels[1:]), normals(1, 12, 5)
    x, v = normals(2, 12, 5), normals(3, 12, 5).requires_grad_()
    x_next = (step.a[:, None] * x + step.b[:, None] * v + step.std[:, None] * z).detach()
    log_prob = gaussian.log_prob(step, x, v, x_next)
    loss, _ = clipped_surrogate(log_prob, log_prob.detach(), torch.ones(12).double(), clip_low=1, clip_high=1)
    (gradient,) = torch.autograd.grad((step_scale(step) * loss).sum(), v)
    assert_close(gradient.abs(), z.abs() / 5)


def test_the_scale_is_that_of_the_table_of_flash_grpo() -> None:
    """Of the first ten of 20 steps at shift 3, whose grid ends a little apart."""
    levels = shifted(20, 3.0).double()
    scale = step_scale(bind("wan_sde", 1.0, levels)(levels[:-1], levels[1:]))
    assert (scale[1:] < scale[:-1])[:9].all()
    assert_close(scale[[0, 1, 9]], torch.tensor([7.477, 7.041, 3.775]).double(), rtol=2e-3, atol=0)


@given(seed=st.integers(0, 2**20), size=st.sampled_from([None, 1, 2, 3, 7]), clip=st.sampled_from([1e-3, 0.2]))
def test_the_steps_of_a_chunk_share_its_loss_and_its_gradient(seed: int, size: int | None, clip: float) -> None:
    """Value and gradient of the mean over a chunk's used steps are those of the clipped surrogate of its mean log-ratio."""
    generator = torch.Generator().manual_seed(seed)
    new, old = (torch.randn(3, 5, generator=generator, dtype=torch.float64) / 5 for _ in range(2))
    used = (torch.rand(3, 5, generator=generator) < 0.7).to(new.dtype)
    advantage = torch.randn(3, 1, generator=generator, dtype=torch.float64).expand(3, 5)
    clips = {"clip_low": clip, "clip_high": clip}
    shared = share_ratio(new, old, used, size=size)
    new.requires_grad_()
    steps, _ = clipped_surrogate(new.flatten(), shared.flatten(), advantage.flatten(), **clips)
    (gradient,) = torch.autograd.grad((steps * used.flatten()).sum(), new)
    whole = torch.zeros((), dtype=torch.float64)
    for places in torch.arange(5).split(size or 5):
        count = used[:, places].sum(1)
        mean = ((new - old) * used)[:, places].sum(1) / count.clamp(min=1)
        whole = whole + (count * clipped_surrogate(mean, 0 * mean, advantage[:, 0], **clips)[0]).sum()
    assert_close((steps * used.flatten()).sum(), whole)
    assert_close(gradient, torch.autograd.grad(whole, new)[0])
    if size == 1:
        alone = clipped_surrogate(new.flatten(), old.flatten(), advantage.flatten(), **clips)[0]
        assert_close((steps * used.flatten()).sum(), (alone * used.flatten()).sum())


GRID = shifted(10, 3.0).double()


def guard_steps(eta: float = 0.8) -> tuple[Transition, Tensor]:
    return flow_sde(GRID[:-1], GRID[1:], eta=eta, sigma_max=GRID[1]), GRID[1:] - GRID[:-1]


@given(seed=st.integers(0, 10_000), distance=st.floats(0, 0.3), clip=st.floats(1e-4, 0.5))
def test_the_loss_of_guard_is_the_formula(seed: int, distance: float, clip: float) -> None:
    transition, dt = guard_steps()
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
def test_the_gradient_of_guard_is_of_one_size_at_every_step(seed: int, eta: float) -> None:
    """On policy it is A (1 + eta^2 / 2) noise / N for Flow-SDE beyond its clamped first step; the plain one's is not."""
    transition, dt = guard_steps(eta)
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


A, B, STD = 0.9, -0.3, 0.2  # of one step: its KL is (0.3 / 0.2)^2 / 2 |v - v_old|^2


def dppo(
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


@given(
    log_ratio=log_ratios.filter(lambda d: d == 0 or abs(d) > 1e-9),
    advantage=st.floats(-50, 50),
    distance=st.floats(0, 2),
    threshold=st.floats(0, 2),
)
def test_the_loss_of_dppo_is_the_formula(log_ratio: float, advantage: float, distance: float, threshold: float) -> None:
    kl = B**2 * distance**2 / (2 * STD**2)
    if math.isclose(kl, threshold, rel_tol=1e-9, abs_tol=1e-12):
        return  # which side a rounding falls on
    loss, gradient, info = dppo(log_ratio, advantage, distance, threshold)
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
        low, high = (dppo(0.5, 1.0, distance, 1e-3, dtype=dtype) for dtype in (torch.float32, torch.float64))
        assert low[0].dtype == low[2].clipped.dtype == torch.float32
        assert_close(low[0].double(), high[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("advantage", "held"), [(1.0, True), (-1.0, False), (0.0, False)])
def test_an_overflowing_ratio_of_dppo_is_without_nan(advantage: float, held: bool) -> None:
    loss, gradient, info = dppo(200.0, advantage, 1.0, 1e-5, dtype=torch.float32)
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
