"""On-policy distillation: the teacher is evaluated at the samples that the student's own rollout visits."""

from fluvial.core import gaussian
from fluvial.core.checks import match_tensors
from fluvial.core.flow_matching import velocity_error
from fluvial.core.transitions import Transition
from fluvial.core.types import PerSample, Samples


def mean_kl(transition: Transition, v: Samples, v_teacher: Samples) -> PerSample:
    """Return the KL between the student's and the teacher's step, in nats per dimension, `[B]`.

        KL = mean b^2 |v - v_teacher|^2 / (2 std^2)

    The two steps share their std, so only their means differ, and the KL is the same in both directions. It is exact:
    unlike the log-ratio of a drawn step, it has no noise. Gradients flow to v and not to v_teacher.

    Args:
        transition: coefficients of each pair's step, `[B]` or 0-d, std > 0.
        v, v_teacher: model outputs of student and teacher at the samples of the student's rollout, `[B, *event]`.

    Raises:
        ValueError: std is 0; use `velocity_mse` for deterministic steps. Values are checked as in `gaussian.kl`; where
            they are not, the result is NaN.

    Source: the idea for language models, arXiv 2306.13649; here over the Gaussians of `core.gaussian`.
    """
    v, v_teacher = match_tensors("mean_kl", v=v, v_teacher=v_teacher)
    return gaussian.kl(transition, v, v_teacher.detach())


def velocity_mse(v: Samples, v_teacher: Samples) -> PerSample:
    """Return the student's mean squared distance to the teacher, mean over the event of (v - v_teacher)^2, `[B]`.

    It is `mean_kl` without the step's weight b^2 / (2 std^2), so it also works for deterministic steps. Gradients flow to v
    and not to v_teacher.

    Args:
        v, v_teacher: model outputs of student and teacher at the same samples and times, `[B, *event]`.
    """
    v, v_teacher = match_tensors("velocity_mse", v=v, v_teacher=v_teacher)
    return velocity_error(v, v_teacher.detach())
