"""CRD: implicit rewards and the loss, by loops in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fluvial.core.crd import crd_loss, implicit_reward


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 5), st.booleans())
def test_the_implicit_reward_is_the_gain_over_the_old_policy(seed: int, elements: int, adaptive: bool) -> None:
    drawn = torch.Generator().manual_seed(seed)
    v, old, target = torch.randn(3, 2, elements, generator=drawn, dtype=torch.float64)
    got = implicit_reward(v, old, target, adaptive=adaptive)
    for i in range(2):
        errors = []
        for prediction in (v, old):
            off = [float(prediction[i, k] - target[i, k]) for k in range(elements)]
            size = max(sum(map(abs, off)) / elements, 1e-5) if adaptive else 1.0
            errors.append(sum(d * d for d in off) / elements / size)
        assert float(got[i]) == pytest.approx(errors[1] - errors[0], rel=1e-9, abs=1e-12)
    assert implicit_reward(v, v, target, adaptive=adaptive).tolist() == [0.0, 0.0]


@settings(max_examples=20)
@given(*[st.floats(-2, 2) for _ in range(3)], st.floats(0.1, 3), st.floats(0.5, 5))
def test_both_losses(implicit: float, centre: float, reward: float, beta: float, scale: float) -> None:
    values = [torch.tensor([number], dtype=torch.float64) for number in (implicit, centre, reward)]
    own = beta * (implicit - centre)
    p, q = 1 / (1 + math.exp(-own)), 1 / (1 + math.exp(-reward))
    wants = {"mse": (own - reward) ** 2, "bce": -(q * math.log(p) + (1 - q) * math.log(1 - p))}
    for match, want in wants.items():
        got = crd_loss(*values, beta=beta, scale=scale, match=match)  # type: ignore[arg-type]
        assert float(got) == pytest.approx(scale / beta * want, rel=1e-9, abs=1e-12)


def test_the_sizes_that_errors_are_divided_by_are_constants() -> None:
    """The gradient of -mean |v - target|^2 / w in v is -2 (v - target) / (N w): none flows through w."""
    v, old, target = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v.requires_grad_()
    implicit_reward(v, old, target).sum().backward()
    off = v.detach() - target
    torch.testing.assert_close(v.grad, -2 * off / (6 * off.abs().mean(1, keepdim=True)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("weight_min", [1e-5, 1.5, 5.0])
def test_no_error_is_divided_by_less_than_the_minimum(weight_min: float) -> None:
    target = torch.zeros(1, 4, dtype=torch.float64)
    got = implicit_reward(target + 1, target + 2, target, weight_min=weight_min)
    assert float(got) == pytest.approx(4 / max(2, weight_min) - 1 / max(1, weight_min), rel=1e-12)
