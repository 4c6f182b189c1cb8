"""Deterministic samplers of higher order, through the schedulers of diffusers, for samples whose steps are not recorded."""

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fluvial.core.types import Samples
from fluvial.models import Prediction, Schedule

Solver = Literal["euler", "dpmpp_2m"]


def solve(
    solver: Solver,
    velocity: Callable[[Tensor, Tensor, int], Tensor],
    x: Samples,
    schedule: Schedule,
    *,
    prediction: Prediction,
) -> Samples:
    """Return samples `[B, *event]`, the solution of the ODE from noise over a model's own schedule.

    dpmpp_2m is DPM-Solver++ 2M (arXiv 2211.01095), the second-order multistep method of DiffusionNFT (2509.16117).
    It evaluates the model once per step, like Euler's method.

    Args:
        solver: dpmpp_2m; Euler's steps are taken by `core.rollout.rollout`.
        velocity: prediction of the model, v = velocity(x, level `[B]`, step).
        x: initial noise, `[B, *event]`.
        schedule: T+1 levels and T timesteps.
        prediction: velocity, whose levels are sigma, or epsilon, whose levels are alpha_bar.

    Raises:
        ValueError: the solver is unknown.
    """
    from diffusers import DPMSolverMultistepScheduler

    if solver != "dpmpp_2m":
        raise ValueError(f"solve: solver is {solver!r}, expected 'dpmpp_2m'")
    flow = prediction == "velocity"
    levels = schedule.levels.to(torch.float32)
    # diffusers scales a variance-preserving path so that the signal is 1.
    sigmas = levels if flow else torch.sqrt((1 - levels) / levels)
    steps = len(levels) - 1
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        prediction_type="flow_prediction" if flow else "epsilon",
        use_flow_sigmas=flow,
    )
    with warnings.catch_warnings():  # from numpy, about how diffusers converts a tensor
        warnings.simplefilter("ignore", DeprecationWarning)
        scheduler.set_timesteps(steps)
    # The position is counted, never looked up by timestep: the levels are the model's own.
    scheduler.sigmas, scheduler.timesteps = sigmas, torch.arange(steps)
    scheduler.set_begin_index(0)
    per_sample = levels.to(device=x.device, dtype=x.dtype)
    for step in range(steps):
        v = velocity(x, per_sample[step].expand(len(x)).contiguous(), step)
        x = scheduler.step(v, scheduler.timesteps[step], x, return_dict=False)[0]
    return x
