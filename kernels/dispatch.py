"""Which implementation of the per-step hot path runs: an explicit argument, decided here and nowhere else."""

from typing import Literal

from fluvial.core import gaussian
from fluvial.core.checks import check_choice
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.transitions import Transition
from fluvial.core.types import PerSample, Samples

Implementation = Literal["auto", "reference"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "reference")


def resolve(implementation: Implementation) -> Literal["reference"]:
    """Return the implementation that runs: today the functions of `core` everywhere.

    Raises:
        ValueError: one that does not exist was asked for; nothing is replaced silently.
    """
    check_choice("dispatch", "implementation", implementation, IMPLEMENTATIONS)
    return "reference"


def step_log_prob(
    v: Samples,
    x: Samples,
    x_next: Samples,
    transition: Transition,
    *,
    v_ref: Samples | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
    implementation: Implementation = "auto",
) -> tuple[PerSample, PerSample | None]:
    """Return the step's log-probability `[B]` and, if v_ref is given, its KL to the reference's step `[B]`, else None.

    The equations are those of `core.gaussian.log_prob` and `core.gaussian.kl`.

    Args:
        v, x, x_next: model output, sample and next sample, `[B, *event]`.
        transition: coefficients `[B]` or 0-d.
        v_ref: output of the reference model, `[B, *event]`.
        form, reduction: as in `core.gaussian.log_prob`.
        implementation: see `resolve`.
    """
    resolve(implementation)
    log_prob = gaussian.log_prob(transition, x, v, x_next, form=form, reduction=reduction)
    return log_prob, None if v_ref is None else gaussian.kl(transition, v, v_ref, reduction=reduction)
