"""DiffusionNFT: learning from rewards on re-noised clean samples, by contrast with the old policy (arXiv 2509.16117)."""

from typing import Literal

import torch
from einops import reduce
from torch import Tensor

from fluvial.core.checks import (
    check_choice,
    check_number,
    check_per_sample,
    check_same_shape,
    clip,
    compute_dtype,
    number,
    per_sample,
)
from fluvial.core.types import Level, PerSample, Samples, Scalar

Mode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
MODES: tuple[Mode, ...] = ("all", "positive_only", "negative_only", "one_only", "binary")


def nft_loss(
    v: Samples,
    v_old: Samples,
    x0: Samples,
    xt: Samples,
    t: Level,
    reward_prob: PerSample,
    *,
    beta: Scalar,
    adv_clip: Scalar,
    weight_min: Scalar = 1e-5,
) -> PerSample:
    """Return the loss of negative-aware fine-tuning, `[B]`: it draws the policy to good samples and away from bad ones.

        v+ = beta v + (1 - beta) v_old,  v- = (1 + beta) v_old - beta v,  x0+- = xt - t v+-
        w+- = max(mean |x0+- - x0|, weight_min), without gradient
        loss = adv_clip / beta (r mean (x0+ - x0)^2 / w+  +  (1 - r) mean (x0- - x0)^2 / w-)

    Gradients flow to v only. At v = v_old and r = 1/2 the gradient is zero.

    Args:
        v, v_old: velocities of the policy and of the old policy at (xt, t), `[B, *event]`.
        x0, xt: clean sample and its noised version, `[B, *event]`.
        t: noise level in [0, 1], `[B]`, 0-d or float; `[B, R]` for a level per block of samples `[B, R, ...]`.
        reward_prob: probability r that a sample is good, in [0, 1], `[B]`; see `reward_prob`.
        beta: distance of the implicit policies from the old one, > 0.
        adv_clip: bound that advantages were clipped to, > 0; it restores their scale in the loss.
        weight_min: lower bound of the self-normalising weights, > 0.
    """
    samples = {"v": v, "v_old": v_old, "x0": x0, "xt": xt}
    dtype = compute_dtype("nft_loss", **samples, reward_prob=reward_prob)
    check_same_shape("nft_loss", **samples)
    level = torch.as_tensor(t, dtype=dtype, device=v.device)
    check_per_sample("nft_loss", v.shape, t=level)
    check_per_sample("nft_loss", v.shape[0], reward_prob=reward_prob)
    v, v_old, x0, xt = v.to(dtype), v_old.to(dtype).detach(), x0.to(dtype).detach(), xt.to(dtype).detach()
    level, r = per_sample(level, v), reward_prob.to(dtype)
    named = {"beta": beta, "adv_clip": adv_clip, "weight_min": weight_min}
    beta, adv_clip, weight_min = (number("nft_loss", name, value, v, low=1e-12) for name, value in named.items())
    near = per_sample(beta, v) if isinstance(beta, Tensor) else beta
    positive = _normalise_error(xt - level * (near * v + (1 - near) * v_old) - x0, weight_min)
    negative = _normalise_error(xt - level * ((1 + near) * v_old - near * v) - x0, weight_min)
    return adv_clip / beta * (r * positive + (1 - r) * negative)


def reward_prob(advantage: PerSample, *, adv_clip: Scalar, mode: Mode = "all") -> PerSample:
    """Return the probability that a sample is a good one, r = (A' / c + 1) / 2 clipped to [0, 1], with c = adv_clip, `[B]`.

        all             A' = A clipped to [-c, c]
        positive_only   A' = A clipped to [0, c]
        negative_only   A' = A clipped to [-c, 0]
        one_only        A' = 1 if A > 0, else 0
        binary          A' = sign(A)

    Args:
        advantage: advantage A, `[B]`.
        adv_clip: bound c of the advantages, > 0.
        mode: see above.

    Source: DiffusionNFT, arXiv 2509.16117; the modes are from its published code.
    """
    check_choice("reward_prob", "mode", mode, MODES)
    dtype = compute_dtype("reward_prob", advantage=advantage)
    if advantage.ndim != 1:
        raise ValueError(f"reward_prob: advantage has shape {list(advantage.shape)}, expected [B]")
    advantage = advantage.to(dtype)
    adv_clip = number("reward_prob", "adv_clip", adv_clip, advantage, low=1e-12)
    clipped = clip(advantage, -adv_clip, adv_clip)
    if mode == "positive_only":
        clipped = clipped.clamp(min=0)
    elif mode == "negative_only":
        clipped = clipped.clamp(max=0)
    elif mode == "one_only":
        clipped = (clipped > 0).to(dtype)
    elif mode == "binary":
        clipped = torch.sign(clipped)
    return ((clipped / adv_clip + 1) / 2).clamp(0, 1)


def check_nft_numbers(*, beta: Scalar, adv_clip: Scalar, weight_min: Scalar, batch: int | None = None) -> None:
    """Raise unless the hyper-parameters of `nft_loss` are finite and positive; `batch` as in `checks.check_number`."""
    for name, value in (("beta", beta), ("adv_clip", adv_clip), ("weight_min", weight_min)):
        check_number("nft_loss", name, value, low=1e-12, batch=batch)


def _normalise_error(error: Tensor, weight_min: Scalar) -> Tensor:
    weight = reduce(error.detach().abs(), "b ... -> b", "mean").clamp(min=weight_min)
    return reduce(error**2, "b ... -> b", "mean") / weight
