"""Preference losses: DPO on pairs of a preferred and a rejected sample, MaPO without a reference, KTO without pairs."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluvial.core.advantages import check_rewards
from fluvial.core.checks import check_choice, clip, match_tensors, number
from fluvial.core.types import Ids, PerSample, Scalar

Utility = Literal["sigmoid", "log_sigmoid"]
UTILITIES: tuple[Utility, ...] = ("sigmoid", "log_sigmoid")


class DpoInfo(NamedTuple):
    """Diagnostics of the preference loss, one number per pair, without gradient."""

    reward_win: Tensor  # -beta/2 (err_win - err_win_ref), the implicit reward of the preferred sample
    reward_lose: Tensor  # of the rejected sample, times its weight; if both rewards fall, the model gets worse at both
    margin: Tensor  # reward_win - reward_lose
    accuracy: Tensor  # 1 where the margin is above 0, else 0


class D3poInfo(NamedTuple):
    """Diagnostics of D3PO, one number per item, without gradient."""

    implicit: Tensor  # beta log clip(rho), the implicit reward of the step
    margin: Tensor  # implicit reward of the preferred step minus the rejected step's
    accuracy: Tensor  # 1 where the margin is above 0, else 0
    clipped: Tensor  # 1 where the clip sets the gradient of this step to 0, else 0


class KtoInfo(NamedTuple):
    """Diagnostics of KTO, one number per item, without gradient."""

    gain: Tensor  # err_ref - err
    baseline: Tensor  # z, which is subtracted from the gain
    accuracy: Tensor  # 1 where the gain has the sign of the label, else 0


class MapoInfo(NamedTuple):
    """Diagnostics of MaPO, one number per pair, without gradient."""

    error: Tensor  # err_win, the error on the preferred sample
    margin: Tensor  # T (phi(err_win) - phi(err_lose))
    accuracy: Tensor  # 1 where the margin is above 0, else 0


class BestWorst(NamedTuple):
    """The best and the worst sample of each sample's group, `[B]`; `win[valid]` and `lose[valid]` are the pairs."""

    win: Tensor  # [B] int64, index in the batch of the best of the group
    lose: Tensor  # [B] int64, index of the worst
    valid: Tensor  # [B] bool, true at the best sample itself if it is better than the worst: at most once per group


def dpo_loss(
    err_win: PerSample,
    err_lose: PerSample,
    err_win_ref: PerSample,
    err_lose_ref: PerSample,
    *,
    beta: Scalar,
    lose_weight: Scalar = 1.0,
) -> tuple[PerSample, DpoInfo]:
    """Return the preference loss of each pair, `[P]`, and diagnostics; it falls as the preferred sample is fitted better.

        loss = -log sigmoid(-beta/2 ((err_win - err_win_ref) - w (err_lose - err_lose_ref)))

    It is log 2 if the policy equals the reference policy. Gradients flow to err_win and err_lose only.

    Args:
        err_win, err_lose: `flow_matching.velocity_error` of the policy on the preferred and the rejected sample, `[P]`,
            with the same noise and time within a pair (for epsilon-prediction models: the error of epsilon).
        err_win_ref, err_lose_ref: the same errors of the reference policy, `[P]`.
        beta: strength of the implicit KL, > 0. It includes the number of steps that the bound sums over, so values in
            the thousands are usual.
        lose_weight: weight w of the rejected sample. Below 1 the policy gains less from getting worse at it, which is how
            runs diverge; 0 fits only the preferred sample.

    Source: Diffusion-DPO, arXiv 2311.12908; Flow-DPO, 2501.13918, with one beta for all times.
    """
    err_win, err_lose, err_win_ref, err_lose_ref = match_tensors(
        "dpo_loss", err_win=err_win, err_lose=err_lose, err_win_ref=err_win_ref, err_lose_ref=err_lose_ref
    )
    beta = number("dpo_loss", "beta", beta, err_win, low=1e-12)
    lose_weight = number("dpo_loss", "lose_weight", lose_weight, err_win, low=0)
    win, lose = err_win - err_win_ref.detach(), err_lose - err_lose_ref.detach()
    reward, margin = -beta / 2 * win, -beta / 2 * (win - lose_weight * lose)
    info = DpoInfo(*(tensor.detach() for tensor in (reward, reward - margin, margin, (margin > 0).to(margin.dtype))))
    return -F.logsigmoid(margin), info


def kto_loss(
    gain: PerSample, baseline: PerSample, label: PerSample, *, beta: Scalar, utility: Utility = "sigmoid"
) -> tuple[PerSample, KtoInfo]:
    """Return the loss of samples labelled good or bad, without pairs, `[P]`, and diagnostics.

        u = y beta (g - z)
        sigmoid        1 - sigmoid(u)
        log_sigmoid    -log sigmoid(u)

    Gradients flow to the gain only.

    Args:
        gain: g = err_ref - err, the reference's error minus the policy's error at the same noise, `[P]`.
        baseline: z, the mean gain of the batch, at least 0, `[P]`.
        label: y, 1 for a good sample and -1 for a bad one, `[P]`.
        beta: inverse temperature, > 0.
        utility: see above.

    Source: Diffusion-KTO, arXiv 2404.04465, and its code.
    """
    check_choice("kto_loss", "utility", utility, UTILITIES)
    gain, baseline, label = match_tensors("kto_loss", gain=gain, baseline=baseline, label=label)
    beta = number("kto_loss", "beta", beta, gain, low=1e-12)
    label = label.detach()
    u = label * beta * (gain - baseline.detach())
    correct = (label * gain > 0).to(gain.dtype)
    info = KtoInfo(*(tensor.detach() for tensor in (gain, baseline, correct)))
    return torch.sigmoid(-u) if utility == "sigmoid" else -F.logsigmoid(u), info


def mapo_loss(
    err_win: PerSample, err_lose: PerSample, *, beta: Scalar, temperature: Scalar = 1000.0, snr: Scalar = 0.5
) -> tuple[PerSample, MapoInfo]:
    """Return the error on the preferred sample plus a reference-free preference loss, `[P]`, and diagnostics.

        loss = err_win - beta log sigmoid(T (phi(err_win) - phi(err_lose))),  phi(e) = c e / (exp(c e) - 1)

    phi falls from 1 at e = 0. With beta 0 it is supervised fine-tuning on the preferred samples.

    Args:
        err_win, err_lose: errors of the policy on the preferred and the rejected sample, with the same noise, `[P]`, >= 0.
        beta: weight of the preference, >= 0.
        temperature: T, > 0.
        snr: c, > 0, a constant in the published code.

    Source: MaPO, arXiv 2406.06424, and its code.
    """
    err_win, err_lose = match_tensors("mapo_loss", err_win=err_win, err_lose=err_lose)
    beta = number("mapo_loss", "beta", beta, err_win, low=0)
    temperature = number("mapo_loss", "temperature", temperature, err_win, low=1e-12)
    snr = number("mapo_loss", "snr", snr, err_win, low=1e-12)
    margin = temperature * (_likelihood(snr * err_win) - _likelihood(snr * err_lose))
    info = MapoInfo(*(tensor.detach() for tensor in (err_win, margin, (margin > 0).to(margin.dtype))))
    return err_win - beta * F.logsigmoid(margin), info


def _likelihood(x: Tensor) -> Tensor:
    """Return x / (exp(x) - 1), 1 at 0, by its series near 0."""
    small = x.abs() < 1e-3  # the next term of the series is x^4 / 720
    far = torch.where(small, 1.0, x).clamp(max=80)  # beyond, x exp(-x) is 0, and exp(x) overflows in the gradient
    return torch.where(small, 1 - x / 2 + x**2 / 12, far / torch.expm1(far))


def clip_log_ratio(log_prob: PerSample, log_prob_ref: PerSample, *, eps: Scalar) -> PerSample:
    """Return log clip(rho, 1 - eps, 1 + eps) of each step, `[B]`, with rho = exp(log_prob - log_prob_ref).

    Args:
        log_prob, log_prob_ref: log-probs of each step under the policy and the reference, `[B]`.
        eps: half-width of the clip, in (0, 1).

    Source: D3PO's published code.
    """
    log_prob, log_prob_ref = match_tensors("clip_log_ratio", log_prob=log_prob, log_prob_ref=log_prob_ref)
    eps = number("clip_log_ratio", "eps", eps, log_prob, low=1e-12, high=1 - 1e-6)
    ratio = torch.exp((log_prob - log_prob_ref).clamp(max=80))
    return torch.log(clip(ratio, 1 - eps, 1 + eps))


def d3po_loss(log_ratio: PerSample, log_ratio_other: PerSample, preferred: PerSample, *, beta: Scalar) -> PerSample:
    """Return each step's half of its pair's loss, `[B]`; the halves sum to the loss in value and gradient.

        loss of a pair = -log sigmoid(beta (l_win - l_lose)),  l = log clip(rho)

    The two steps of a pair are separate items, so they need not share a forward pass. Each item has half of the loss and the
    full gradient in its own log-ratio; the other log-ratio is a constant.

    Args:
        log_ratio: `clip_log_ratio` l of the item's step, `[B]`.
        log_ratio_other: `clip_log_ratio` of the pair's other step under the same policy, `[B]`; it is detached.
        preferred: 1 for the step of the preferred sample, -1 for the rejected one's, 0 for items without a pair, `[B]`.
        beta: inverse temperature of the preference, > 0.

    Source: D3PO, arXiv 2311.13231.
    """
    preferred_ratio, other_ratio, preferred = match_tensors(
        "d3po_loss", log_ratio=log_ratio, log_ratio_other=log_ratio_other, preferred=preferred
    )
    beta = number("d3po_loss", "beta", beta, preferred_ratio, low=1e-12)
    margin = beta * preferred * (preferred_ratio - other_ratio.detach())
    loss = -F.logsigmoid(margin)
    return preferred.abs() * (loss - loss.detach() / 2)


def best_and_worst(reward: PerSample, group: Ids) -> BestWorst:
    """Return the best and the worst sample of each group, to build pairs from a policy's own samples.

    Ties go to the first sample in the batch. A group whose rewards are all equal, or a group of one, yields no pair. The
    result has the length of the batch, so the number of groups is not read from the device.

    Args:
        reward: `[B]`.
        group: group of each sample, `[B]` integers of any value and in any order; the samples of a prompt share one.

    Raises:
        ValueError: shapes differ, or a reward is not finite. Where values are not known (see `checks.can_look`), a group
            with a NaN yields no pair.
    """
    check_rewards("best_and_worst", reward, group)
    if reward.ndim != 1:
        raise ValueError(f"best_and_worst: reward has shape {list(reward.shape)}, expected [B]")
    reward, group = reward.detach(), group.contiguous()
    win, lose = _first_of_group(reward, group, descending=True), _first_of_group(reward, group, descending=False)
    index = torch.arange(len(reward), device=reward.device)
    return BestWorst(win, lose, (win == index) & (reward[win] > reward[lose]))


def _first_of_group(reward: Tensor, group: Tensor, *, descending: bool) -> Tensor:
    """Return the index of the sample that comes first when each sample's group is sorted by reward, `[B]`."""
    order = torch.argsort(reward, stable=True, descending=descending)
    order = order[torch.argsort(group[order], stable=True)]
    return order[torch.searchsorted(torch.sort(group).values, group)]
