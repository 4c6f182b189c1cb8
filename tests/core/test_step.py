"""The hot path of a step: the KL in the policy loss is a penalty, however its weight and dt are passed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from torch import Tensor
from torch.testing import assert_close

from fluvial import kernels
from fluvial.core import gaussian, step
from fluvial.core.random import Key, fold_in, key, normal
from fluvial.core.rollout import scan
from fluvial.core.sigmas import linear
from fluvial.core.table import Record, plan
from fluvial.core.transitions import Transition, bind

V, X, X_NEXT, V_REF = torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
STEP = Transition(*(torch.tensor(c, dtype=torch.float64) for c in ([0.9, 1.0, 1.1], [-0.1, -0.2, -0.3], [0.3, 0.2, 0.4])))
OLD, ADVANTAGE = torch.tensor([-0.1, 0.2, 0.3]).double(), torch.tensor([1.0, -1.0, 2.0]).double()
CLIP = {"clip_low": 0.1, "clip_high": 0.2}
DTS: dict[str, Any] = {
    "float": -0.25,
    "0-d": torch.tensor(-0.25, dtype=torch.float64),
    "per sample": torch.tensor([-0.25, -0.5, -0.125], dtype=torch.float64),
}


def kl_term(loss: Any, dt: Any, kl_weight: Any) -> Tensor:
    stored = {"log_prob_old": OLD, "advantage": ADVANTAGE, **CLIP}
    with_kl, info = loss(STEP, X, V, X_NEXT, **stored, v_ref=V_REF, kl_coef=0.5, kl_weight=kl_weight, dt=dt)
    without, _ = loss(STEP, X, V, X_NEXT, **stored)
    assert torch.equal(info.kl_ref, gaussian.kl(STEP, V, V_REF))
    return with_kl - without


@pytest.mark.parametrize("loss", [step.policy_loss, kernels.policy_loss], ids=["core", "kernels"])
@pytest.mark.parametrize("dt", DTS)
def test_the_kl_is_a_penalty_of_its_size_times_the_length_of_the_step(loss: Any, dt: str) -> None:
    term = kl_term(loss, DTS[dt], "rate")
    assert (term > 0).all()
    assert_close(term, 0.5 * torch.as_tensor(DTS[dt]).abs() * gaussian.kl(STEP, V, V_REF), rtol=1e-12, atol=1e-14)
    refuses(r"policy_loss: std has shape \[3\], expected \[\] or \[3, ", kl_term, loss, -torch.ones(V.shape[:2]), "rate")


@pytest.mark.parametrize("loss", [step.policy_loss, kernels.policy_loss], ids=["core", "kernels"])
def test_the_exact_kl_does_not_depend_on_dt(loss: Any) -> None:
    terms = [kl_term(loss, dt, "exact") for dt in (None, -0.25, -0.5)]
    assert_close(terms[0], 0.5 * gaussian.kl(STEP, V, V_REF), rtol=1e-12, atol=1e-14)
    assert torch.equal(terms[0], terms[1])
    assert torch.equal(terms[0], terms[2])


@pytest.mark.parametrize("loss", [step.policy_loss, kernels.policy_loss], ids=["core", "kernels"])
def test_the_mse_is_the_distance_of_the_means(loss: Any) -> None:
    distance = ((gaussian.mean(STEP, X, V) - gaussian.mean(STEP, X, V_REF)) ** 2).flatten(1).mean(1)
    assert_close(kl_term(loss, None, "mse"), 0.5 * distance, rtol=1e-12, atol=1e-14)


def test_swapping_sample_and_velocity_changes_the_result() -> None:
    """The order (transition, x, v, x_next) means something: both orders pass every check of shapes."""
    right, _ = step.step_log_prob(STEP, X, V, X_NEXT)
    wrong, _ = step.step_log_prob(STEP, V, X, X_NEXT)
    assert torch.equal(right, gaussian.log_prob(STEP, X, V, X_NEXT))
    assert not torch.allclose(right, wrong)


@pytest.mark.parametrize("draw", [step.sde_step, kernels.sde_step], ids=["core", "kernels"])
@pytest.mark.parametrize("form", gaussian.FORMS)
def test_a_draw_is_a_sample_and_its_log_prob(draw: Any, form: gaussian.Form) -> None:
    keys = fold_in(key(3), torch.arange(len(X)))
    x_next, log_prob = draw(STEP, X, V, form=form, reduction="sum", key=keys)
    assert torch.equal(x_next, gaussian.sample(STEP, X, V, normal(keys, tuple(X.shape))))
    assert torch.equal(log_prob, gaussian.log_prob(STEP, X, V, x_next, form=form, reduction="sum"))


def test_a_scan_that_draws_and_scores_at_once_is_the_same() -> None:
    """Samples, log-probs and velocities, to the bit, with a window and a step of it that is not recorded."""
    calls, levels, x = [], linear(5), torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))

    def draw(transition: Transition, x: Tensor, v: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        calls.append(key)
        return kernels.sde_step(transition, x, v, key=key)

    def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
        return torch.sin(3 * x) - level[:, None, None]

    record = Record(steps=[0, 3], velocity=True)
    planned = plan(levels, bind("flow_sde", 0.7, levels), batch=3, window=[0, 1, 3], record=record)
    found = [scan(velocity, x, planned, key(7), draw=function) for function in (None, draw)]
    for left, right in zip(*found, strict=True):
        assert left is right is None or torch.equal(left, right)
    assert len(calls) == 2
    # Rounded samples and debug tensors are not those of a kernel.
    for other in (replace(record, debug=True), replace(record, dtype=torch.bfloat16)):
        scan(velocity, x, planned._replace(record=other), key(7), draw=draw)
    assert len(calls) == 2
