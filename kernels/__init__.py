"""The per-step hot path: fused Triton kernels, the compiled reference and the reference, behind one function each."""

from fluvial.kernels.dispatch import (
    Implementation,
    nft_loss,
    policy_loss,
    sde_step,
    step_log_prob,
    velocity_error,
)

__all__ = ["Implementation", "nft_loss", "policy_loss", "sde_step", "step_log_prob", "velocity_error"]
