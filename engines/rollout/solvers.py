"""Deterministic samplers of higher order, through diffusers' schedulers, for samples whose steps nobody asks for."""

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
    """Return samples `[B, *event]`, solved from noise over a model's own schedule.

    dpmpp_2m is DPM-Solver++ 2M (arXiv 2211.01095), the second-order multistep method of DiffusionNFT (2509.16117).
    It evaluates the model once a step, as Euler's method does.

    Args:
        solver: dpmpp_2m; Euler's steps are `core.rollout.rollout`'s.
        velocity: v = velocity(x, level `[B]`, step), as a rollout takes it.
        x: initial noise, `[B, *event]`.
        schedule: T+1 levels and T timesteps.
        prediction: what the model predicts, and so what a level is.

    Raises:
        ValueError: the solver is not one of these.
    """
    from diffusers import DPMSolverMultistepScheduler

    if solver != "dpmpp_2m":
        raise ValueError(f"solve: solver is {solver!r}, expected 'dpmpp_2m'")
    flow = prediction == "velocity"
    levels = schedule.levels.to(torch.float32)
    # diffusers counts noise of a variance-preserving path against a signal of 1.
    sigmas = levels if flow else torch.sqrt((1 - levels) / levels)
    steps = len(levels) - 1
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        prediction_type="flow_prediction" if flow else "epsilon",
        use_flow_sigmas=flow,
    )
    with warnings.catch_warnings():  # numpy's, of the way in which diffusers makes an array of a tensor
        warnings.simplefilter("ignore", DeprecationWarning)
        scheduler.set_timesteps(steps)
    # Its place in the schedule is counted, never looked up: the levels are the model's own.
    scheduler.sigmas, scheduler.timesteps = sigmas, torch.arange(steps)
    scheduler.set_begin_index(0)
    per_sample = levels.to(device=x.device, dtype=x.dtype)
    for step in range(steps):
        v = velocity(x, per_sample[step].expand(len(x)).contiguous(), step)
        x = scheduler.step(v, scheduler.timesteps[step], x, return_dict=False)[0]
    return x
