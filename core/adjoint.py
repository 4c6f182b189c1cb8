"""Adjoint Matching: regression of a sampler's steps to the gradient of a reward at the clean sample."""

from einops import reduce

from fluvial.core.checks import check_per_sample, match_tensors, per_sample
from fluvial.core.gaussian import check_stochastic
from fluvial.core.transitions import Transition
from fluvial.core.types import PerSample, Samples


def lean_adjoint(transition: Transition, adjoint: Samples, product: Samples) -> Samples:
    """Return the adjoint before a step from the adjoint after it, `[B, *event]`.

        adj_k = a adj_{k+1} + b J(x_k)^T adj_{k+1}

    J is the Jacobian of the base model's output at x_k. The recursion starts at the clean sample x_T with
    adj_T = -lambda grad r(x_T). adj_k is the gradient of -lambda r(x_T) in x_k along the base's steps with fixed noise.

    Args:
        transition: coefficients of the step, `[B]`, 0-d or `[B, R]`.
        adjoint: adj_{k+1}, `[B, *event]`.
        product: J(x_k)^T adj_{k+1}, `[B, *event]`.

    Source: arXiv 2409.08861, for a step in discrete time.
    """
    adjoint, product = match_tensors("lean_adjoint", adjoint=adjoint, product=product)
    check_per_sample("lean_adjoint", adjoint.shape, a=transition.a, b=transition.b)
    a, b = (per_sample(coefficient.to(adjoint.dtype), adjoint) for coefficient in transition[:2])
    return a * adjoint + b * product


def adjoint_loss(transition: Transition, v: Samples, v_base: Samples, adjoint: Samples) -> PerSample:
    """Return the regression of a step's control to the adjoint, `[B]`.

        loss = sum |b (v - v_base) / std + std adj|^2

    Its minimum b (v - v_base) = -std^2 adj shifts the step's mean along the gradient of the reward. If the sampler is
    memoryless (`flow_sde` with eta sqrt(2), `ddim` with eta 1), a policy at the minimum of all steps samples from
    p_base exp(lambda r); with other noise x_T depends on x_0, and the samples are biased. adj is adj_{k+1}, the adjoint at
    the end of the step. Gradients flow to v only.

    Args:
        transition: coefficients of each step, `[B]`, 0-d or `[B, R]`, std > 0.
        v, v_base: outputs of the policy and the base model, `[B, *event]`.
        adjoint: adj, `[B, *event]`.

    Raises:
        ValueError: std is 0; values are checked as in `gaussian.kl`.

    Source: arXiv 2409.08861.
    """
    v, v_base, adjoint = match_tensors("adjoint_loss", v=v, v_base=v_base, adjoint=adjoint)
    check_per_sample("adjoint_loss", v.shape, b=transition.b, std=transition.std)
    check_stochastic("adjoint_loss", transition.std)
    b, std = (per_sample(coefficient.to(v.dtype), v).detach() for coefficient in transition[1:])
    control = b * (v - v_base.detach()) / std + std * adjoint.detach()
    return reduce(control**2, "b ... -> b", "sum")
