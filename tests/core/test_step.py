"""The hot path of a step: the KL in the policy loss is a penalty, however its weight and dt are passed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fluvial import kernels
from fluvial.core import gaussian, step
from fluvial.core.random import fold_in, key, normal
from fluvial.core.rollout import Record, rollout
from fluvial.core.sigmas import linear
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


@pytest.mark.parametrize("loss", [step.policy_loss, kernels.policy_loss], ids=["core", "kernels"])
def test_the_mse_is_the_distance_of_the_means(loss: Any) -> None:
    """Without the division by 2 std^2, as Flow-CPS's code has it."""
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
    """To the bit, from the noise itself and from its key."""
    keys = fold_in(key(3), torch.arange(len(X)))
    noise = normal(keys, tuple(X.shape))
    for given in ({"noise": noise}, {"key": keys}):
        x_next, log_prob = draw(STEP, X, V, form=form, reduction="sum", **given)
        assert torch.equal(x_next, gaussian.sample(STEP, X, V, noise))
        assert torch.equal(log_prob, gaussian.log_prob(STEP, X, V, x_next, form=form, reduction="sum"))


@pytest.mark.parametrize("draw", [step.sde_step, kernels.sde_step], ids=["core", "kernels"])
def test_a_draw_takes_a_key_or_noise(draw: Any) -> None:
    with pytest.raises(ValueError, match="sde_step: neither key nor noise is given, expected one of the two"):
        draw(STEP, X, V)
    with pytest.raises(ValueError, match="sde_step: both key and noise are given"):
        draw(STEP, X, V, key=key(0), noise=X)
    with pytest.raises(ValueError, match="implementation is 'triton', which draws its noise: give a key instead"):
        kernels.sde_step(STEP, X, V, noise=X, implementation="triton")


@pytest.mark.parametrize("by_key", [False, True])
def test_a_rollout_that_draws_and_scores_at_once_is_the_same(by_key: bool) -> None:
    """Samples, log-probs and velocities, to the bit, with a window and a step of it that is not recorded."""
    calls, levels, x = [], linear(5), torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))

    def draw(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(options)
        return kernels.sde_step(*args, **options)

    settings: tuple[dict[str, Any], ...] = ({}, {"draw": draw, "by_key": by_key})
    found = [
        rollout(
            lambda x, level, step: torch.sin(3 * x) - level[:, None, None], x, levels, key=key(7), window=[0, 1, 3],
            transition=bind("flow_sde", 0.7, levels), record=Record(steps=[0, 3], velocity=True, **options),
        )
        for options in settings
    ]  # fmt: skip
    for left, right in zip(*found, strict=True):
        assert left is right is None or torch.equal(left, right)
    assert len(calls) == 2
    assert all(("key" in options) is by_key for options in calls)
