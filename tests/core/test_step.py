"""The hot path of a step: the KL in the policy loss is a penalty, however its weight and dt are passed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fluvial import kernels
from fluvial.core import gaussian, step
from fluvial.core.transitions import Transition

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
    """Return the loss with a KL of coefficient 0.5, minus the loss without."""
    stored = {"log_prob_old": OLD, "advantage": ADVANTAGE, **CLIP}
    with_kl, info = loss(STEP, X, V, X_NEXT, **stored, v_ref=V_REF, kl_coef=0.5, kl_weight=kl_weight, dt=dt)
    without, _ = loss(STEP, X, V, X_NEXT, **stored)
    assert torch.equal(info.kl_ref, gaussian.kl(STEP, V, V_REF))
    return with_kl - without


@pytest.mark.parametrize("loss", [step.policy_loss, kernels.policy_loss], ids=["core", "kernels"])
@pytest.mark.parametrize("dt", DTS)
def test_the_kl_is_a_penalty_of_its_size_times_the_length_of_the_step(loss: Any, dt: str) -> None:
    """dt is negative, and the KL is added, never subtracted, for a float dt as for a tensor."""
    term = kl_term(loss, DTS[dt], "rate")
    assert (term > 0).all()
    assert_close(term, 0.5 * torch.as_tensor(DTS[dt]).abs() * gaussian.kl(STEP, V, V_REF), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", [step.policy_loss, kernels.policy_loss], ids=["core", "kernels"])
def test_the_exact_kl_does_not_depend_on_dt(loss: Any) -> None:
    terms = [kl_term(loss, dt, "exact") for dt in (None, -0.25, -0.5)]
    assert_close(terms[0], 0.5 * gaussian.kl(STEP, V, V_REF), rtol=1e-12, atol=1e-14)
    assert torch.equal(terms[0], terms[1])
    assert torch.equal(terms[0], terms[2])


def test_swapping_sample_and_velocity_changes_the_result() -> None:
    """The order (transition, x, v, x_next) means something: both orders pass every check of shapes."""
    right, _ = step.step_log_prob(STEP, X, V, X_NEXT)
    wrong, _ = step.step_log_prob(STEP, V, X, X_NEXT)
    assert torch.equal(right, gaussian.log_prob(STEP, X, V, X_NEXT))
    assert not torch.allclose(right, wrong)
