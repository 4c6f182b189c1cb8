"""Preference optimisation: losses of pairs and of labels, D3PO, and the pairs that a policy's own samples make."""

import math
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from helpers.tables import normals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fluvial.core.dpo import (
    UTILITIES,
    DpoInfo,
    Utility,
    best_and_worst,
    clip_log_ratio,
    d3po_loss,
    dpo_loss,
    kto_loss,
    mapo_loss,
)

errors = st.floats(0, 10)
betas = st.floats(0.01, 5000)
rewards = st.lists(
    st.tuples(st.sampled_from([-1.5, 0.0, 0.25, 3.0, 1e30]), st.sampled_from([-(2**40), 0, 1, 7])), max_size=16
)


def double(*values: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@given(win=errors, lose=errors, win_ref=errors, lose_ref=errors, beta=betas)
def test_the_loss_is_the_formula(win: float, lose: float, win_ref: float, lose_ref: float, beta: float) -> None:
    z = -beta / 2 * ((win - win_ref) - (lose - lose_ref))
    # -log sigmoid(z), written so that no exponential overflows.
    want = max(-z, 0.0) + math.log1p(math.exp(-abs(z)))
    got, info = dpo_loss(*double(win, lose, win_ref, lose_ref), beta=beta)
    assert got.item() == pytest.approx(want, rel=1e-12, abs=1e-300)
    assert isinstance(info, DpoInfo)
    assert info.margin.item() == z
    assert info.accuracy.item() == float(z > 0)
    assert info.reward_win.item() == pytest.approx(-beta / 2 * (win - win_ref), abs=1e-9)
    assert info.reward_lose.item() == pytest.approx(-beta / 2 * (lose - lose_ref), abs=1e-9)


@given(win=errors, lose=errors, beta=betas, weight=st.floats(0, 2))
def test_the_rejected_sample_counts_by_its_weight(win: float, lose: float, beta: float, weight: float) -> None:
    asked: dict[str, Any] = {"beta": beta, "lose_weight": weight}
    moved = double(win, 1 + weight * (lose - 1), 1.0, 1.0)
    loss, info = dpo_loss(*double(win, lose, 1.0, 1.0), **asked)
    assert_close(loss, dpo_loss(*moved, beta=beta)[0], rtol=1e-9, atol=1e-9)
    assert info.margin.item() == pytest.approx(-beta / 2 * ((win - 1) - weight * (lose - 1)), rel=1e-9, abs=1e-9)
    refuses("lose_weight", dpo_loss, *double(win, lose, 1.0, 1.0), beta=beta, lose_weight=-0.1)


def test_the_gradient_lowers_one_error_and_raises_the_other() -> None:
    win, lose, win_ref, lose_ref = (tensor.requires_grad_() for tensor in normals(0, 4, 7).exp().unbind())
    loss, info = dpo_loss(win, lose, win_ref, lose_ref, beta=3.0)
    wins, loses = torch.autograd.grad(loss.sum(), (win, lose))
    z = -1.5 * ((win - win_ref) - (lose - lose_ref)).detach()
    assert_close(wins, 1.5 * torch.sigmoid(-z))
    assert torch.equal(wins, -loses)
    assert not any(tensor.requires_grad for tensor in info)
    assert all(tensor.shape == (7,) for tensor in info)


@pytest.mark.parametrize("utility", UTILITIES)
@given(gain=st.floats(-2, 2), baseline=st.floats(0, 2), good=st.booleans(), beta=st.floats(0.01, 50))
def test_the_loss_of_labels_is_the_formula(utility: Utility, gain: float, baseline: float, good: bool, beta: float) -> None:
    """Its gradient has the sign of the label, and both may be shifted alike; where policy and reference agree it is 1/2."""
    label, u = (1.0 if good else -1.0), (1 if good else -1) * beta * (gain - baseline)
    g, z, y = double(gain, baseline, label)
    got, info = kto_loss(g.requires_grad_(), z.requires_grad_(), y, beta=beta, utility=utility)
    lower = 1 / (1 + math.exp(u)) if u < 500 else 0.0
    assert got.item() == pytest.approx(
        lower if utility == "sigmoid" else max(-u, 0) + math.log1p(math.exp(-abs(u))), rel=1e-9
    )
    (slope,) = torch.autograd.grad(got.sum(), g)
    factor = lower * (1 - lower) if utility == "sigmoid" else lower
    assert slope.item() == pytest.approx(-label * beta * factor, rel=1e-9, abs=1e-12)
    assert_close(kto_loss(g + 1, z + 1, y, beta=beta, utility=utility)[0], got, rtol=1e-9, atol=1e-12)
    same = kto_loss(*double(0.0, 0.0, label), beta=beta, utility=utility)[0].item()
    assert same == pytest.approx(0.5 if utility == "sigmoid" else math.log(2))
    assert [tensor.item() for tensor in info] == [gain, baseline, float(label * gain > 0)]
    refuses("beta", kto_loss, g, z, y, beta=0.0, utility=utility)


@given(win=errors, lose=errors, beta=st.floats(0, 2), temperature=st.floats(0.1, 100), snr=st.floats(0.01, 3))
def test_preferences_without_a_reference(win: float, lose: float, beta: float, temperature: float, snr: float) -> None:
    """The formula; log 2 where both errors are equal, the error of the preferred alone at beta 0; likelihoods fall."""

    def phi(error: float) -> float:
        return snr * error / math.expm1(snr * error) if snr * error else 1.0

    asked: Any = {"temperature": temperature, "snr": snr}
    z = temperature * (phi(win) - phi(lose))
    one, other = (tensor.requires_grad_() for tensor in double(win, lose))
    got, info = mapo_loss(one, other, beta=beta, **asked)
    want = win + beta * (max(-z, 0.0) + math.log1p(math.exp(-abs(z))))
    assert got.item() == pytest.approx(want, rel=1e-7, abs=1e-9)
    assert info.margin.item() == pytest.approx(z, rel=1e-6, abs=1e-7 * temperature)
    up, down = torch.autograd.grad(got.sum(), (one, other))
    assert up.item() >= 1
    assert down.item() <= 1e-300  # 0, but for the rounding of a subnormal beta
    assert mapo_loss(one, other, beta=0.0, **asked)[0].item() == win
    assert mapo_loss(one, one, beta=beta, **asked)[0].item() == pytest.approx(win + beta * math.log(2))


@given(error=st.floats(1e-9, 0.01))
def test_the_likelihood_of_a_small_error_is_its_series(error: float) -> None:
    """1 - c e / 2 and its slope, on both sides of where the series begins."""
    one, zero = double(error, 0.0)
    margin = -mapo_loss(zero, one.requires_grad_(), beta=1.0, temperature=1.0, snr=0.5)[1].margin
    assert margin.item() == pytest.approx(-error / 4 + error**2 / 48, rel=1e-6, abs=1e-15)
    loss = mapo_loss(zero, one, beta=1.0, temperature=1.0, snr=0.5)[0]
    (slope,) = torch.autograd.grad(loss.sum(), one)
    assert slope.item() == pytest.approx(-(0.25 - error / 24) / (1 + math.exp(-margin.item())), rel=1e-3)


def test_a_large_error_has_no_likelihood_and_no_slope() -> None:
    """Where exp(c e) is above the range of float32, the gradient is that of the error on the preferred sample."""
    far, one = torch.tensor([200.0, 1e6, 1e30], requires_grad=True), torch.ones(3)
    loss, info = mapo_loss(one, far, beta=1.0)
    assert info.margin.gt(0).all()
    assert not torch.autograd.grad(loss.sum(), far)[0].any()
    assert torch.autograd.grad(mapo_loss(far, one, beta=1.0)[0].sum(), far)[0].eq(1).all()


def test_extreme_margins_are_linear_on_one_side_and_vanish_on_the_other() -> None:
    zero, far = torch.zeros(3), torch.tensor([1e3, 1e10, 1e30])
    assert_close(dpo_loss(far, zero, zero, zero, beta=2.0)[0], far)
    win = far.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(dpo_loss(win, zero, zero, zero, beta=2.0)[0].sum(), win)
    assert_close(gradient, torch.ones(3))
    assert_close(dpo_loss(zero, far, zero, zero, beta=2.0)[0], zero)


def reference_pairs(reward: list[float], group: list[int]) -> set[tuple[int, int]]:
    pairs = set()
    for name in set(group):
        members = [i for i, of in enumerate(group) if of == name]
        best = max(members, key=lambda i: reward[i])  # max and min take the first of equals
        worst = min(members, key=lambda i: reward[i])
        if reward[best] > reward[worst]:
            pairs.add((best, worst))
    return pairs


@given(samples=rewards)
def test_the_pairs_are_those_of_the_loop_one_would_write(samples: list[tuple[float, int]]) -> None:
    reward = torch.tensor([r for r, _ in samples], dtype=torch.float64)
    group = torch.tensor([g for _, g in samples], dtype=torch.int64)
    win, lose, valid = best_and_worst(reward, group)
    got = list(zip(win[valid].tolist(), lose[valid].tolist(), strict=True))
    assert len(got) == len(set(got))
    assert set(got) == reference_pairs(reward.tolist(), group.tolist())
    # Invalid places hold places of the batch too, in the same group: indexing with all of them is safe.
    assert win.shape == lose.shape == valid.shape == (len(samples),)
    assert torch.equal(group[win], group)
    assert torch.equal(group[lose], group)
    assert bool((reward[win] >= reward).all())
    assert bool((reward[lose] <= reward).all())


def test_pairs_of_a_large_batch() -> None:
    reward, group = normals(0, 1271, dtype=torch.bfloat16), torch.arange(1271, dtype=torch.int32) % 97
    win, lose, valid = best_and_worst(reward.requires_grad_(), group)
    got = set(zip(win[valid].tolist(), lose[valid].tolist(), strict=True))
    assert got == reference_pairs(reward.tolist(), group.tolist())
    assert len(got) == 97


def test_a_reward_that_is_not_a_number_gives_no_pair_where_it_cannot_be_seen() -> None:
    reward, group = torch.tensor([1.0, torch.nan, 0.0, 1.0, 2.0]), torch.tensor([0, 0, 0, 1, 1])
    refuses(r"best_and_worst: rewards are not finite at indices \[1\]", best_and_worst, reward, group)
    seen = torch.func.vmap(lambda r: best_and_worst(r, group))(reward[None])
    assert seen.valid[0].tolist() == [False, False, False, False, True]


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
