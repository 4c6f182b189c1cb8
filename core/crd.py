"""Centred reward distillation (CRD): fit the model's implicit rewards to the true rewards, both centred."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import reduce
from torch import Tensor

from fluvial.core.checks import check_choice, match_tensors, number
from fluvial.core.types import PerSample, Samples, Scalar

Match = Literal["mse", "bce"]


class CrdInfo(NamedTuple):
    """Diagnostics of CRD, one number per item, without gradient."""

    implicit: Tensor  # implicit reward of the item
    centred: Tensor  # implicit reward minus the mean of the update's items with the same level index
    kl_ref: Tensor  # KL term to the reference, before its weight; 0 without one


def implicit_reward(
    v: Samples, v_old: Samples, target: Samples, *, adaptive: bool = True, weight_min: Scalar = 1e-5
) -> PerSample:
    """Return the implicit reward of each item, `[B]`: by how much the policy fits it better than the old policy.

        r = mean |v_old - target|^2 / w_old - mean |v - target|^2 / w
        w = max(mean |v - target|, weight_min) without gradient if adaptive, else 1; w_old likewise

    Gradients flow to v only.

    Args:
        v, v_old: velocities of the policy and of the old policy, `[B, *event]`.
        target: noise - x0, `[B, *event]`.
        adaptive: divide each error by its mean absolute error.
        weight_min: lower bound of the mean absolute error, > 0.

    Source: CRD, arXiv 2603.14128, in the form of Flow-Factory's port.
    """
    v, v_old, target = match_tensors("implicit_reward", v=v, v_old=v_old, target=target)
    weight_min = number("implicit_reward", "weight_min", weight_min, v, low=1e-12)
    errors = []
    for prediction in (v_old.detach(), v):
        off = prediction - target.detach()
        size = reduce(off.detach().abs(), "b ... -> b", "mean").clamp(min=weight_min) if adaptive else 1.0
        errors.append(reduce(off**2, "b ... -> b", "mean") / size)
    return errors[0] - errors[1]


def crd_loss(
    implicit: PerSample, centre: PerSample, reward_centred: PerSample, *, beta: Scalar, scale: Scalar, match: Match = "mse"
) -> PerSample:
    """Return the loss of each item, `[B]`: the distance of its centred implicit reward to its centred reward.

        mse   scale / beta (beta (r - centre) - R)^2
        bce   scale / beta BCE(sigmoid(beta (r - centre)), sigmoid(R))

    Args:
        implicit: `implicit_reward` r of each item, `[B]`.
        centre: mean of the implicit rewards, `[B]`, taken without gradient.
        reward_centred: reward R in [0, 1] minus the mean of the rewards, `[B]`.
        beta: inverse temperature of the implicit reward, > 0.
        scale: bound that advantages were clipped to, > 0; it restores their scale in the loss.
        match: see above.

    Source: CRD, arXiv 2603.14128, in the form of Flow-Factory's port, with a uniformly weighted mean.
    """
    check_choice("crd_loss", "match", match, ("mse", "bce"))
    implicit, centre, target = match_tensors("crd_loss", implicit=implicit, centre=centre, reward_centred=reward_centred)
    beta = number("crd_loss", "beta", beta, implicit, low=1e-12)
    scale = number("crd_loss", "scale", scale, implicit, low=1e-12)
    reward_implied, target = beta * (implicit - centre.detach()), target.detach()
    if match == "mse":
        return scale / beta * (reward_implied - target) ** 2
    return scale / beta * F.binary_cross_entropy_with_logits(reward_implied, torch.sigmoid(target), reduction="none")
