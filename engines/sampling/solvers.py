"""Solvers for samples whose steps are not recorded: Euler's method, and higher-order ones of diffusers' schedulers."""

import warnings
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fluvial.core import transitions
from fluvial.core.random import Key, fold_in, key, normal
from fluvial.core.rollout import Velocity, scan
from fluvial.core.table import plan
from fluvial.core.transitions import Sampler
from fluvial.core.types import Samples
from fluvial.engines.errors import UsageError
from fluvial.models import Prediction, Schedule
from fluvial.models.host_values import to_device

Solver = Literal["euler", "dpmpp_2m", "unipc", "sa_solver", "consistency"]
SolverChoice = Literal["auto", "euler", "dpmpp_2m", "unipc", "sa_solver", "consistency"]
NOISY = 0.3, 0.9  # levels between which AWM's SA-Solver adds noise


class Estimate(NamedTuple):
    """Clean estimate of a step, x - sigma v, which a multistep solver combines with the next step's."""

    step: int
    level: float
    clean: Samples


def deterministic_step(prediction: Prediction) -> Sampler:
    """Return the sampler without noise: Euler's step for a velocity, DDIM's for epsilon."""
    return transitions.ode if prediction == "velocity" else partial(transitions.ddim, eta=0.0)


def solve(
    solver: Solver,
    velocity: Velocity,
    x: Samples,
    schedule: Schedule,
    *,
    prediction: Prediction,
    eta: float = 0.0,
    keys: Key | None = None,
    before: Estimate | None = None,
) -> Samples:
    """Solve the ODE from noise along a model's schedule, and return the samples, `[B, *event]`.

    dpmpp_2m is DPM-Solver++ 2M (arXiv 2211.01095), the second-order multistep method of DiffusionNFT (2509.16117).
    unipc is UniPC of order 2 (2302.04867), Wan's default. sa_solver is SA-Solver with predictor and corrector of order 2
    (2309.05019), which adds noise. consistency predicts the clean sample and renoises it to the next level (2303.01469), as
    few-step students are sampled. All evaluate the model once per step.

    Args:
        solver: euler, dpmpp_2m, unipc, sa_solver or consistency.
        velocity: prediction of the model, v = velocity(x, level `[B]`, step).
        x: initial noise, `[B, *event]`.
        schedule: T+1 levels and T timesteps; from `sa_schedule` for sa_solver.
        prediction: velocity, whose levels are sigma, or epsilon, whose levels are alpha_bar.
        eta: noise tau of sa_solver at levels from 0.3 to 0.9.
        keys: key per sample for the noise, `[B]`; only for eta above 0 and for consistency.
        before: estimate of the step before the schedule, for dpmpp_2m; with None the first step is of first order.

    Raises:
        ValueError: the solver is unknown, or does not support epsilon prediction or rows with their own levels.
    """
    if solver not in get_args(Solver):
        raise UsageError(f"solve: solver is {solver!r}, expected one of {', '.join(map(repr, get_args(Solver)))}")
    levels, steps = schedule.levels.to(torch.float32), len(schedule.levels) - 1
    if steps == 0:
        return x
    euler = deterministic_step(prediction)
    if solver == "euler":
        table = plan(levels, euler, batch=len(x), window=(), deterministic=euler, record=(), device=x.device)
        return scan(velocity, x, table, key(0)).final
    if levels.ndim == 2 and solver == "sa_solver":
        hint = "and the pieces of a sample have noise levels of their own: use 'euler'"
        raise UsageError(f"solve: solver is 'sa_solver', {hint}")
    if solver in ("sa_solver", "consistency") and prediction != "velocity":
        raise UsageError(f"solve: solver is {solver!r}, which is for models that predict a velocity: use 'dpmpp_2m'")
    if solver == "consistency":
        assert keys is not None
        noisy = transitions.bind("cps", 1.0, levels)
        return scan(velocity, x, plan(levels, noisy, batch=len(x), record=(), device=x.device), keys).final
    if solver == "sa_solver":
        return _sa_solver(velocity, x, schedule, eta, keys)
    columns, sizes = [levels], list[int]()
    if levels.ndim == 2:  # consecutive rows with the same levels form a piece
        pieces, counts = torch.unique_consecutive(levels, dim=1, return_counts=True)
        columns, sizes = [*pieces.unbind(1)], counts.tolist()
    schedulers = [_multistep(solver, column, prediction, before) for column in columns]
    per_sample = to_device(levels.to(x.dtype), x.device)
    for step in range(steps):
        v = velocity(x, per_sample[step].expand(len(x), *levels.shape[1:]).contiguous(), step)
        parts = zip(schedulers, *([each] if len(columns) == 1 else each.split(sizes, dim=1) for each in (v, x)), strict=True)
        ends = [one.step(v_part, one.timesteps[step], x_part, return_dict=False)[0] for one, v_part, x_part in parts]
        x = ends[0] if len(ends) == 1 else torch.cat(ends, dim=1)
    return x


def _multistep(solver: Literal["dpmpp_2m", "unipc"], levels: Tensor, prediction: Prediction, before: Estimate | None) -> Any:
    """Return diffusers' scheduler, set to its first step."""
    from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

    flow = prediction == "velocity"
    # diffusers scales a variance-preserving path so that the signal is 1.
    sigmas = levels if flow else torch.sqrt((1 - levels) / levels)
    options: dict[str, Any] = {
        "solver_order": 2,
        "prediction_type": "flow_prediction" if flow else "epsilon",
        "use_flow_sigmas": flow,
    }
    if solver == "unipc":
        scheduler: Any = UniPCMultistepScheduler(final_sigmas_type="zero" if flow else "sigma_min", **options)
        sigmas = torch.cat([sigmas[:1].clamp(max=1 - 1e-6), sigmas[1:]]) if flow else sigmas  # as diffusers does
    else:
        scheduler = DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", **options)
    first = 0
    if before is not None:
        first, sigmas = 1, torch.cat([sigmas.new_tensor([before.level]), sigmas])
    with warnings.catch_warnings():  # numpy warns about diffusers' conversion of tensors
        warnings.simplefilter("ignore", DeprecationWarning)
        scheduler.set_timesteps(len(sigmas) - 1)
    if before is not None:
        scheduler.model_outputs[-1], scheduler.lower_order_nums = before.clean, 1
    # Steps are counted, because timesteps cannot be looked up: the levels are the model's own.
    scheduler.sigmas, scheduler.timesteps = sigmas, torch.arange(len(sigmas) - 1)
    scheduler.set_begin_index(first)
    return scheduler


def serving_solver(choice: SolverChoice, model: Any, method: Any = None) -> Solver:
    """Resolve solver auto: the method's serving solver, else the model's, else euler."""
    if choice != "auto":
        return choice
    solver: Solver | None = getattr(method, "serving_solver", None) or getattr(model, "serving_solver", None)
    return solver or "euler"


def sa_schedule(schedule: Schedule) -> Schedule:
    """Return the schedule of AWM's SA-Solver: it starts at 0.999, and its last level above 0 is half the one before.

    SA-Solver steps in log((1 - sigma) / sigma), which is infinite at 1 and at 0.
    """
    levels = schedule.levels.clone()
    levels[0] = levels[0].clamp(max=1 - 1e-3)
    if len(levels) > 3:
        levels[-2] = levels[-3] / 2
    scale = (levels[:-1] / schedule.levels[:-1]).to(schedule.timesteps)
    return Schedule(levels, schedule.timesteps * scale)


def _sa_solver(velocity: Velocity, x: Samples, schedule: Schedule, eta: float, keys: Key | None) -> Samples:
    """Return samples of SA-Solver in PEC mode, with diffusers' coefficients and noise from `keys`.

    As in the published code, the first step is not corrected, and the last one returns the clean estimate.
    """
    from diffusers import SASolverScheduler

    levels = schedule.levels.to(torch.float32)
    steps = len(levels) - 1
    scheduler: Any = SASolverScheduler(
        predictor_order=2, corrector_order=2, prediction_type="flow_prediction", use_flow_sigmas=True
    )
    scheduler.sigmas, scheduler.model_outputs, scheduler._step_index = levels.to(x.dtype), [None, None], 0
    taus = [eta if NOISY[0] <= level <= NOISY[1] else 0.0 for level in levels.tolist()]
    per_sample = to_device(levels.to(x.dtype), x.device)
    last, noise = x, torch.zeros_like(x)
    for step in range(steps):
        v = velocity(x, per_sample[step].expand(len(x)).contiguous(), step)
        clean = scheduler.convert_model_output(v, sample=x)
        if step == steps - 1:
            return clean
        if step > 1:
            x = scheduler.stochastic_adams_moulton_update(
                this_model_output=clean, last_sample=last, last_noise=noise, this_sample=x, order=2, tau=taus[step]
            )
        scheduler.model_outputs = [scheduler.model_outputs[1], clean]
        if taus[step + 1]:
            assert keys is not None
            noise = normal(fold_in(keys, step), tuple(x.shape), dtype=x.dtype)
        last = x
        x = scheduler.stochastic_adams_bashforth_update(
            model_output=clean, sample=x, noise=noise, order=min(2, step + 1), tau=taus[step + 1]
        )
        scheduler._step_index += 1
    raise AssertionError("a schedule has at least one step")
