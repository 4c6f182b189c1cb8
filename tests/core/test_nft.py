"""DiffusionNFT: the probability that a sample is a good one, and the loss, by independent formulas in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fluvial.core.nft import MODES, Mode, nft_loss, reward_prob

every_mode = pytest.mark.parametrize("mode", MODES)
ADVANTAGES = [-7.0, -2.0, -1.0, -0.25, -0.0, 0.0, 1e-3, 0.25, 1.0, 2.0, 7.0]


def expected_prob(advantage: float, adv_clip: float, mode: Mode) -> float:
    clipped = min(max(advantage, -adv_clip), adv_clip)
    value = {
        "all": clipped,
        "positive_only": max(clipped, 0.0),
        "negative_only": min(clipped, 0.0),
        "one_only": 1.0 if clipped > 0 else 0.0,
        "binary": float((clipped > 0) - (clipped < 0)),
    }[mode]
    return min(max((value / adv_clip + 1) / 2, 0.0), 1.0)


@every_mode
@pytest.mark.parametrize("adv_clip", [0.5, 1.0, 5.0])
def test_reward_prob_is_its_formula(mode: Mode, adv_clip: float) -> None:
    got = reward_prob(torch.tensor(ADVANTAGES, dtype=torch.float64), adv_clip=adv_clip, mode=mode)
    want = torch.tensor([expected_prob(value, adv_clip, mode) for value in ADVANTAGES], dtype=torch.float64)
    assert_close(got, want, rtol=1e-15, atol=0)


def problem() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    v, v_old, x0, xt = torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64)
    return v, v_old, x0, xt, torch.tensor([0.2, 0.5, 1.0]).double(), torch.tensor([0.0, 0.3, 1.0]).double()


BETA, ADV_CLIP = 0.3, 5.0


def sides(of: int, weight_min: float) -> tuple[float, float, list[float], list[float], float, float]:
    v, v_old, x0, xt, t, _ = problem()
    rows = [[float(value) for value in tensor[of].flatten()] for tensor in (v, v_old, x0, xt)]
    level = float(t[of])
    positive, negative = [], []
    for a, b, clean, noised in zip(*rows, strict=True):
        positive.append(noised - level * (BETA * a + (1 - BETA) * b) - clean)
        negative.append(noised - level * ((1 + BETA) * b - BETA * a) - clean)
    squares = [math.fsum(e * e for e in errors) / 4 for errors in (positive, negative)]
    weights = [max(math.fsum(abs(e) for e in errors) / 4, weight_min) for errors in (positive, negative)]
    return squares[0], squares[1], positive, negative, weights[0], weights[1]


@pytest.mark.parametrize("weight_min", [1e-5, 2.0])
def test_the_loss_is_its_formula(weight_min: float) -> None:
    v, v_old, x0, xt, t, r = problem()
    got = nft_loss(v, v_old, x0, xt, t, r, beta=BETA, adv_clip=ADV_CLIP, weight_min=weight_min)
    for of in range(3):
        positive_sq, negative_sq, _, _, positive_weight, negative_weight = sides(of, weight_min)
        mixed = r[of] * positive_sq / positive_weight + (1 - r[of]) * negative_sq / negative_weight
        assert_close(got[of], ADV_CLIP / BETA * mixed, rtol=1e-12, atol=0)


@pytest.mark.parametrize("weight_min", [1e-5, 2.0])
def test_no_gradient_flows_through_the_self_normalising_weight(weight_min: float) -> None:
    """d loss / d v = 2 t beta scale / N (-r e+ / w+ + (1 - r) e- / w-), with w+ and w- held."""
    v, v_old, x0, xt, t, r = problem()
    v.requires_grad_()
    loss = nft_loss(v, v_old, x0, xt, t, r, beta=BETA, adv_clip=ADV_CLIP, weight_min=weight_min)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    for of in range(3):
        _, _, positive, negative, positive_weight, negative_weight = sides(of, weight_min)
        scale = 2 * float(t[of]) * ADV_CLIP / 4
        pull, push = float(r[of]) / positive_weight, (1 - float(r[of])) / negative_weight
        want = [scale * (push * minus - pull * plus) for plus, minus in zip(positive, negative, strict=True)]
        assert_close(gradient[of].flatten(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-14)
