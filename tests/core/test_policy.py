"""The clipped surrogate: its value, where it lets the gradient through, its symmetry, and its diagnostics."""

import math

import pytest
import torch
from helpers.tables import normals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fluvial.core import gaussian
from fluvial.core.policy import (
    PolicyInfo,
    clipped_surrogate,
    noise_weighted_surrogate,
    share_ratio,
    step_scale,
)
from fluvial.core.sigmas import shifted
from fluvial.core.transitions import bind

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
