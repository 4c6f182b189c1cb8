"""The mathematics: pure functions over tensors, one concept per file.

The modules are the public surface. The names that research code uses most are re-exported.
"""

from fluvial.core.advantages import group_advantages
from fluvial.core.gaussian import kl, log_prob
from fluvial.core.policy import clipped_surrogate
from fluvial.core.random import Key, fold_in, key, normal
from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import Transition, cps, dance_sde, ddim, flow_sde, ode, wan_sde

__all__ = [
    "Key",
    "Trajectory",
    "Transition",
    "clipped_surrogate",
    "cps",
    "dance_sde",
    "ddim",
    "flow_sde",
    "fold_in",
    "group_advantages",
    "key",
    "kl",
    "log_prob",
    "normal",
    "ode",
    "wan_sde",
]
