"""On-policy distillation: a student walks, and a teacher says what step it would have taken from there."""

from fluvial.core import gaussian
from fluvial.core.checks import check_same_shape, compute_dtype
from fluvial.core.flow_matching import velocity_error
from fluvial.core.transitions import Transition
from fluvial.core.types import PerSample, Samples


def mean_kl(transition: Transition, v: Samples, v_teacher: Samples) -> PerSample:
    """Return the KL between the student's and the teacher's step, in nats a dimension, `[B]`.

        KL = mean b^2 |v - v_teacher|^2 / (2 std^2)

    The two steps share their std, so only their means differ, and the KL is the same in both directions. It is exact:
    unlike the log-ratio of a drawn step it has no noise. Gradients flow to v; the teacher is data.

    Args:
        transition: coefficients of each pair's step, `[B]` or 0-d, std > 0.
        v, v_teacher: model outputs of the two at the sample that the student came to, `[B, *event]`.

    Raises:
        ValueError: std is 0 (looked at only where that is free, as in `gaussian.kl`; elsewhere the answer is NaN). For
            deterministic steps there is `velocity_mse`.

    Source: the idea for language models, arXiv 2306.13649; here over the Gaussians of `core.gaussian`.
    """
    _check("mean_kl", v, v_teacher)
    return gaussian.kl(transition, v, v_teacher.detach())


def velocity_mse(v: Samples, v_teacher: Samples) -> PerSample:
    """Return the student's mean squared distance to the teacher, mean over the event of (v - v_teacher)^2, `[B]`.

    It is `mean_kl` without the weight b^2 / (2 std^2) of the step, so it serves deterministic steps too. Gradients flow
    to v; the teacher is data.

    Args:
        v, v_teacher: model outputs of the two at the same sample and time, `[B, *event]`.
    """
    _check("velocity_mse", v, v_teacher)
    return velocity_error(v, v_teacher.detach())


def _check(function: str, v: Samples, v_teacher: Samples) -> None:
    compute_dtype(function, v=v, v_teacher=v_teacher)
    check_same_shape(function, v=v, v_teacher=v_teacher)
