"""The per-step hot path: one function per operation, in front of a fused Triton kernel and its reference."""

from fluvial.kernels.dispatch import (
    Implementation,
    nft_loss,
    policy_loss,
    sde_step,
    step_log_prob,
    velocity_error,
)

__all__ = ["Implementation", "nft_loss", "policy_loss", "sde_step", "step_log_prob", "velocity_error"]
