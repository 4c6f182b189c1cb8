"""The mathematics: pure functions over tensors, one concept per file.

The modules are the public surface. The names that research code types most are re-exported here.
"""

from fluvial.core import (
    advantages,
    awm,
    correction,
    crd,
    dgpo,
    distill,
    dpo,
    ema,
    flow_matching,
    gaussian,
    guidance,
    nft,
    policy,
    random,
    rollout,
    sigmas,
    step,
    transitions,
)
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
    "advantages",
    "awm",
    "clipped_surrogate",
    "correction",
    "cps",
    "crd",
    "dance_sde",
    "ddim",
    "dgpo",
    "distill",
    "dpo",
    "ema",
    "flow_matching",
    "flow_sde",
    "fold_in",
    "gaussian",
    "group_advantages",
    "guidance",
    "key",
    "kl",
    "log_prob",
    "nft",
    "normal",
    "ode",
    "policy",
    "random",
    "rollout",
    "sigmas",
    "step",
    "transitions",
    "wan_sde",
]
