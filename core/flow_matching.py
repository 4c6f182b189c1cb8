"""Flow matching: the supervised loss, and the noising that SFT, AWM, DPO and NFT share."""

import torch
from einops import reduce

from fluvial.core.checks import check_per_sample, match_tensors, per_sample
from fluvial.core.types import Level, PerSample, Samples


def interpolate(x0: Samples, noise: Samples, sigma: Level) -> Samples:
    """Return the sample at noise level sigma on the straight path, x_t = (1 - sigma) x0 + sigma noise, `[B, *event]`.

    Args:
        x0, noise: clean samples and standard-normal noise, `[B, *event]`.
        sigma: noise level in [0, 1], `[B]`, 0-d or float; `[B, R]` for a level per block of samples `[B, R, ...]`.
    """
    x0, noise = match_tensors("interpolate", x0=x0, noise=noise)
    level = torch.as_tensor(sigma, dtype=x0.dtype, device=x0.device)
    check_per_sample("interpolate", x0.shape, sigma=level)
    level = per_sample(level, x0)
    return (1 - level) * x0 + level * noise


def recover(x: Samples, v: Samples, noise: Samples, sigma: Level, sigma_next: Level) -> Samples:
    """Return the clean sample implied by a step from a sample with known noise, `[B, *event]`.

        x0 = (x + (s' - s) v - s' noise) / (1 - s')

    With v = noise - x0 it is x0 at every s and s'; at s' = 0 it is the clean sample x - s v that the model predicts.
    Gradients flow to v as (s' - s) / (1 - s').

    Args:
        x: sample at level s, (1 - s) x0 + s noise, `[B, *event]`.
        v: velocity at x, `[B, *event]`.
        noise: noise in x, `[B, *event]`.
        sigma, sigma_next: levels s in [0, 1] and s' in [0, 1), `[B]`, 0-d or float.

    Source: Direct-Align of SRPO, arXiv 2509.06942.
    """
    x, v, noise = match_tensors("recover", x=x, v=v, noise=noise)
    s, s_next = (torch.as_tensor(level, dtype=x.dtype, device=x.device) for level in (sigma, sigma_next))
    check_per_sample("recover", x.shape, sigma=s, sigma_next=s_next)
    s, s_next = per_sample(s, x), per_sample(s_next, x)
    return (x + (s_next - s) * v - s_next * noise) / (1 - s_next)


def velocity_error(v: Samples, target: Samples) -> PerSample:
    """Return the mean squared error of a velocity, mean over the event of (v - target)^2, `[B]`.

    The target of flow matching is noise - x0 (arXiv 2210.02747, 2209.03003). Computed in float32 (in float64 if one is).
    """
    v, target = match_tensors("velocity_error", v=v, target=target)
    return reduce((v - target) ** 2, "b ... -> b", "mean")
