"""The per-step hot path. `dispatch` decides which implementation runs."""

from fluvial.kernels.dispatch import Implementation, step_log_prob

__all__ = ["Implementation", "step_log_prob"]
