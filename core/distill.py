"""Distillation: the teacher's steps at samples that the student visits, and matching of distributions (DMD, TDM)."""

from typing import Literal

import torch
from einops import reduce
from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.checks import check_choice, check_number, check_per_sample, match_tensors, number, per_sample
from fluvial.core.flow_matching import velocity_error
from fluvial.core.transitions import Transition
from fluvial.core.types import Level, PerSample, Samples, Scalar

MatchForm = Literal["dmd", "square", "huber"]
MATCH_FORMS: tuple[MatchForm, ...] = ("dmd", "square", "huber")


def mean_kl(transition: Transition, v: Samples, v_teacher: Samples) -> PerSample:
    """Return the KL between the student's and the teacher's step, in nats per dimension, `[B]`.

        KL = mean b^2 |v - v_teacher|^2 / (2 std^2)

    The two steps share their std, so only their means differ, and the KL is the same in both directions. It is exact:
    unlike the log-ratio of a drawn step, it has no noise. Gradients flow to v and not to v_teacher.

    Args:
        transition: coefficients of each pair's step, `[B]`, 0-d or `[B, R]`, std > 0.
        v, v_teacher: model outputs of student and teacher at the samples of the student's rollout, `[B, *event]`.

    Raises:
        ValueError: std is 0 and its value is known; otherwise the result is NaN. Use `velocity_mse` for deterministic steps.

    Source: arXiv 2306.13649 for language models, applied to the Gaussians of `core.gaussian`.
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


def scaled_mse(v: Samples, v_teacher: Samples, scale: Level, *, relative: bool = False) -> PerSample:
    """Return the mean over the event of d^2 with d = scale (v - v_teacher), `[B]`.

        relative    mean d^2 / (sg(mean |d|) + 1e-8), whose gradient does not grow with d

    With a step's coefficient b as the scale (dt for an ODE step) it is the squared distance of the two next samples. With a
    flow's noise level it is that of the two predicted clean samples. Gradients flow to v and not to v_teacher.

    Args:
        v, v_teacher: model outputs of student and teacher at the same samples and times, `[B, *event]`.
        scale: `[B]`, 0-d or float; `[B, R]` for a scale per block of samples `[B, R, ...]`.
        relative: whether to divide by the mean absolute distance.

    Source: DiffusionOPD, arXiv 2605.15055; the division follows Flow-Factory's code.
    """
    v, v_teacher = match_tensors("scaled_mse", v=v, v_teacher=v_teacher)
    check_number("scaled_mse", "scale", scale, batch=v.shape)
    scale = scale.to(v.dtype) if isinstance(scale, Tensor) else scale
    d = (per_sample(scale, v) if isinstance(scale, Tensor) else scale) * (v - v_teacher.detach())
    return _event_mean(d**2) / (_event_mean(d.detach().abs()) + 1e-8) if relative else _event_mean(d**2)


def matching_loss(
    x0: Samples, correction: Samples, reference: Samples, *, form: MatchForm = "dmd", huber: Scalar = 1e-3
) -> PerSample:
    """Return a loss whose gradient moves a clean sample x0 along a correction d, `[B]`.

        W = mean |x0 - reference|, e = x0 - sg(x0 + d), of N elements each; sg stops the gradient
        dmd      1/2 mean (x0 - sg(x0 + d / W))^2      gradient -d / (W N)
        square   mean e^2 / W                          gradient -2 d / (W N)
        huber    mean (sqrt(e^2 + c^2) - c) / W        gradient -d / (sqrt(d^2 + c^2) W N)

    d is the clean sample predicted by the teacher minus the one predicted by a model of the student's distribution, both at
    the same noised version of x0. It is then proportional to the gradient of the KL between the two distributions. The forms
    are from published code and differ in their step sizes. Gradients flow to x0 only.

    Args:
        x0: sample of the student, with gradient, `[B, *event]`.
        correction: d, `[B, *event]`.
        reference: clean sample predicted by the teacher, which sets the scale W, `[B, *event]`.
        form: see above.
        huber: c of form huber, > 0.

    Source: dmd from DMD2, arXiv 2405.14867, and its code; square and huber from the code of TDM, arXiv 2503.06674.
    """
    check_choice("matching_loss", "form", form, MATCH_FORMS)
    x0, d, reference = match_tensors("matching_loss", x0=x0, correction=correction, reference=reference)
    c = number("matching_loss", "huber", huber, x0, low=1e-12)
    d, scale = d.detach(), per_sample(_event_mean((x0 - reference).detach().abs()).clamp(min=torch.finfo(x0.dtype).tiny), x0)
    move = x0 - x0.detach()  # 0, with gradient
    if form == "dmd":
        return _event_mean((move - d / scale) ** 2) / 2
    error = move - d
    if form == "square":
        return _event_mean(error**2 / scale)
    c = per_sample(c, x0) if isinstance(c, Tensor) else c
    return _event_mean((torch.sqrt(error**2 + c**2) - c) / scale)


def renoise(x: Samples, noise: Samples, sigma: Scalar, sigma_noisy: Scalar) -> Samples:
    """Return a sample at a higher noise level, x_t = alpha x_s + beta noise, `[B, *event]`.

        alpha = (1 - t) / (1 - s), beta^2 = t^2 - (s alpha)^2

    If x_s is distributed as a flow's samples at level s, x_t is at level t; at s = 0 it is `flow_matching.interpolate`.

    Args:
        x: sample at level s, `[B, *event]`.
        noise: standard-normal noise, `[B, *event]`.
        sigma: level s in [0, 1), `[B]`, 0-d or float.
        sigma_noisy: level t in [s, 1], `[B]`, 0-d or float.

    Source: TDM, arXiv 2503.06674.
    """
    x, noise = match_tensors("renoise", x=x, noise=noise)
    alpha, beta = _renoise_factors("renoise", x, sigma, sigma_noisy)[2:]
    return per_sample(alpha, x) * x + per_sample(beta, x) * noise


def ambient_velocity(x: Samples, noise: Samples, sigma: Scalar, sigma_noisy: Scalar) -> Samples:
    """Return a regression target for the velocity at x_t = `renoise(x, noise, s, t)` from x_s alone, `[B, *event]`.

        u = -x_s / (1 - s) + noise (t + s^2 alpha / (1 - s)) / beta

    E[u | x_t] = E[noise_0 - x0 | x_t], so that a model fitted to u models the clean samples behind x_s. At s = 0, u is
    noise - x0.

    Args:
        x, noise, sigma, sigma_noisy: arguments of `renoise`, t > s.

    Source: the target of TDM-R1's surrogate, arXiv 2603.07700, and of AC-DMD, arXiv 2605.26108.
    """
    x, noise = match_tensors("ambient_velocity", x=x, noise=noise)
    s, t, alpha, beta = _renoise_factors("ambient_velocity", x, sigma, sigma_noisy)
    still = beta == 0  # at s = t = 0, where the factor is 1 in the limit
    factor = torch.where(still, 1.0, (t + s**2 * alpha / (1 - s)) / torch.where(still, 1.0, beta))
    return -x / per_sample(1 - s, x) + noise * per_sample(factor, x)


def ambient_weight(sigma: Scalar, sigma_noisy: Scalar, *, largest: Scalar = 10.0) -> Tensor:
    """Return the weight of the error against `ambient_velocity`, min(1, largest beta^2), `[B]`, or 0-d if the levels are.

    beta is defined in `renoise`. Where little noise is added, the target is noisy, and the weight falls.

    Args:
        sigma, sigma_noisy: levels s and t, as in `renoise`.
        largest: bound of 1 / beta^2, > 0.

    Source: AC-DMD's code, arXiv 2605.26108, whose loss is mean |beta (v - u)|^2 times min(1 / beta^2, largest).
    """
    s, t = torch.as_tensor(sigma), torch.as_tensor(sigma_noisy)
    t = t.expand_as(s) if t.ndim == 0 else t
    t = t if t.dtype == torch.float64 else t.float()
    beta = _renoise_factors("ambient_weight", t.reshape(-1), s, t)[3]
    return (number("ambient_weight", "largest", largest, t.reshape(-1), low=1e-12) * beta**2).clamp(max=1)


def consistency_loss(x0: Samples, x0_first: Samples, x0_second: Samples) -> PerSample:
    """Return the distance of a model's clean sample from the mean of its clean samples at a lower level, `[B]`.

        loss = mean (h_1 - h) (h_2 - h)

    h is the clean sample predicted at a noisy sample; h_1 and h_2 are predicted after two steps of the model from there to
    the same lower level with independent noise. The product has the expectation |E h_1 - h|^2 per element, which is 0 if h
    is the mean of the clean samples; a single value may be negative. Gradients flow to all three.

    Args:
        x0, x0_first, x0_second: h, h_1 and h_2, `[B, *event]`.

    Source: AC-DMD, arXiv 2605.26108.
    """
    h, first, second = match_tensors("consistency_loss", x0=x0, x0_first=x0_first, x0_second=x0_second)
    return _event_mean((first - h) * (second - h))


def noise_weight(e: Samples, noise: Samples, sigma: Scalar, sigma_noisy: Scalar) -> PerSample:
    """Return the likelihood ratio of the noise in a renoised sample to the added noise, `[B]`.

        w = exp((mean noise^2 - mean e_t^2) / 2), e_t = (s alpha e + beta noise) / t

    e_t is the noise in x_t if e is the noise in x_s. The ratio is per dimension, and 1 at s = 0.

    Args:
        e: noise that the model predicts in x_s, `[B, *event]`.
        noise, sigma, sigma_noisy: arguments of `renoise`, t > 0.

    Source: TDM's code, arXiv 2503.06674, which takes the mean over the event, not the sum.
    """
    e, noise = match_tensors("noise_weight", e=e, noise=noise)
    s, t, alpha, beta = _renoise_factors("noise_weight", e, sigma, sigma_noisy)
    mixed = per_sample(s * alpha / t, e) * e + per_sample(beta / t, e) * noise
    return torch.exp((_event_mean(noise**2) - _event_mean(mixed**2)) / 2)


def snr_weight(sigma: Scalar, *, largest: Scalar) -> Tensor:
    """Return the signal-to-noise weight of a clean sample's squared error, min(((1 - t) / t)^2, largest).

    It is `[B]`, or 0-d if the level is.

    Args:
        sigma: noise level t of a flow, in [0, 1].
        largest: bound of the ratio, > 0.

    Source: arXiv 2303.09556.
    """
    level = torch.as_tensor(sigma)
    level = level if level.dtype == torch.float64 else level.float()
    if level.ndim > 1:
        raise ValueError(f"snr_weight: sigma has shape {list(level.shape)}, expected [] or [B]")
    largest = number("snr_weight", "largest", largest, level.reshape(-1), low=1e-12)
    return torch.clamp(((1 - level) / level) ** 2, max=largest)


def _renoise_factors(function: str, x: Tensor, sigma: Scalar, sigma_noisy: Scalar) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return s, t, alpha and beta, `[B]` or 0-d."""
    s, t = (torch.as_tensor(level, dtype=x.dtype, device=x.device) for level in (sigma, sigma_noisy))
    check_per_sample(function, x.shape[0], sigma=s, sigma_noisy=t)
    alpha = (1 - t) / (1 - s)
    return s, t, alpha, torch.sqrt((t**2 - (s * alpha) ** 2).clamp(min=0))


def _event_mean(values: Tensor) -> Tensor:
    return reduce(values, "b ... -> b", "mean")
