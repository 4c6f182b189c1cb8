"""Classifier-free guidance: one prediction from a conditional and an unconditional one."""

import torch

from fluvial.core.checks import check_per_sample, match_tensors, per_sample
from fluvial.core.types import Samples, Scalar


def classifier_free(v: Samples, v_uncond: Samples, guidance: Scalar) -> Samples:
    """Return the guided velocity v_uncond + g (v - v_uncond), `[B, *event]`, in float32 (float64 if an argument is).

    Args:
        v, v_uncond: model outputs with the prompt and without it (or with a negative prompt), `[B, *event]`.
        guidance: scale g, `[B]`, 0-d or float; 1 gives v.

    Source: arXiv 2207.12598, with diffusers' definition of the scale.
    """
    v, v_uncond = match_tensors("classifier_free", v=v, v_uncond=v_uncond)
    scale = torch.as_tensor(guidance, dtype=v.dtype, device=v.device)
    check_per_sample("classifier_free", v.shape[0], guidance=scale)
    return v_uncond + per_sample(scale, v) * (v - v_uncond)
