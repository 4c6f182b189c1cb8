"""Flow matching: the supervised loss, and the noising that SFT, AWM, DPO and NFT share."""

import torch
from einops import reduce

from fluvial.core.checks import check_per_sample, match_tensors, per_sample
from fluvial.core.types import PerSample, Samples, Scalar


def interpolate(x0: Samples, noise: Samples, sigma: Scalar) -> Samples:
    """Return the sample at noise level sigma on the straight path, x_t = (1 - sigma) x0 + sigma noise, `[B, *event]`.

    Args:
        x0, noise: clean samples and standard-normal noise, `[B, *event]`.
        sigma: noise level in [0, 1], `[B]`, 0-d or float.
    """
    x0, noise = match_tensors("interpolate", x0=x0, noise=noise)
    level = torch.as_tensor(sigma, dtype=x0.dtype, device=x0.device)
    check_per_sample("interpolate", x0.shape[0], sigma=level)
    level = per_sample(level, x0)
    return (1 - level) * x0 + level * noise


def velocity_error(v: Samples, target: Samples) -> PerSample:
    """Return the mean squared error of a velocity, mean over the event of (v - target)^2, `[B]`.

    The target of flow matching is noise - x0 (arXiv 2210.02747, 2209.03003). Computed in float32 (float64 if given).
    """
    v, target = match_tensors("velocity_error", v=v, target=target)
    return reduce((v - target) ** 2, "b ... -> b", "mean")
