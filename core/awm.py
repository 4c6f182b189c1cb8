"""Advantage weighted matching: the policy gradient whose log-probability is the pre-training loss (arXiv 2509.25050)."""

from typing import Literal

import torch
from torch import Tensor

from fluvial.core.checks import check_choice, check_per_sample, first_block, match_tensors, number
from fluvial.core.types import Level, PerSample, Scalar

Weighting = Literal["uniform", "t", "t2", "huber", "ghuber"]
WEIGHTINGS: tuple[Weighting, ...] = ("uniform", "t", "t2", "huber", "ghuber")


def awm_log_prob(
    error: PerSample, t: Level, *, weighting: Weighting, delta: Scalar = 1e-5, power: Scalar = 0.25
) -> PerSample:
    """Return the surrogate log-probability of a clean sample, `[B]`: its negative weighted matching error.

        uniform   -error
        t         -t error
        t2        -t^2 error
        huber     -t ((error + delta^2)^(1/2) - delta)
        ghuber    -t ((error + delta^2)^power - delta^(2 power)) / power

    Pass it to `policy.clipped_surrogate`, with the old policy's value at the same noise and time; on policy, the old value
    is this one, detached. It does not depend on the sampler of the samples. The two Huber forms grow more slowly than the
    error, which keeps one bad sample from dominating a batch; delta rounds their corner at 0. ghuber equals t at power = 1,
    and twice huber at power = 1/2.

    Args:
        error: `flow_matching.velocity_error` at (x_t, t), `[B]`, >= 0.
        t: noise level in [0, 1], `[B]`, 0-d or float; the first block's is used of `[B, R]`. It is not a model's timestep
            of 0 to 1000.
        weighting: see above.
        delta: width of the corner of the two Huber forms, > 0.
        power: exponent of ghuber, in (0, 1].

    Source: AWM, arXiv 2509.25050. The five formulas and the two defaults are from its published code, whose default
    weighting is ghuber.
    """
    check_choice("awm_log_prob", "weighting", weighting, WEIGHTINGS)
    (error,) = match_tensors("awm_log_prob", error=error)
    delta = number("awm_log_prob", "delta", delta, error, low=1e-12)
    power = number("awm_log_prob", "power", power, error, low=1e-12, high=1)
    level = first_block(torch.as_tensor(t, dtype=error.dtype, device=error.device))
    check_per_sample("awm_log_prob", error.shape[0], t=level)
    if weighting == "uniform":
        return -error
    if weighting == "t":
        return -level * error
    if weighting == "t2":
        return -(level**2) * error
    if weighting == "huber":
        return -level * _root(error, delta, 0.5)
    return -level * _root(error, delta, power) / power


def _root(error: Tensor, delta: Scalar, power: Scalar) -> Tensor:
    # Both powers are computed on tensors, so that they round alike and an error of 0 gives exactly 0.
    corner = (delta**2).expand_as(error) if isinstance(delta, Tensor) else torch.full_like(error, delta**2)
    return (error + delta**2) ** power - corner**power
