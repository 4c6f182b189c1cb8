"""Solvers against flows that are known and diffusers' schedulers, and the fewer steps after the window."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, SASolverScheduler
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from helpers.spied_runs import STEPS, Spied
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fluvial.core import gaussian
from fluvial.core.random import fold_in, key, normal
from fluvial.core.rollout import rollout
from fluvial.core.sigmas import shifted, shifted_twice
from fluvial.engines.engine.world import World
from fluvial.engines.sampling.solvers import Estimate, deterministic_step, sa_schedule, solve
from fluvial.engines.sampling.tail import Tail, after_schedule
from fluvial.engines.sampling.window import RandomWindow
from fluvial.models import Prediction, Schedule

MEAN, DEVIATION = 1.5, 0.4  # of the clean samples, each element alone
Velocity = Callable[[Tensor, Tensor, int], Tensor]


def moments(level: Tensor, prediction: Prediction) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is left of the sample at a level, its noise, and the deviation of both together."""
    signal, noise = (1 - level, level) if prediction == "velocity" else (level**0.5, (1 - level) ** 0.5)
    return signal, noise, (signal**2 * DEVIATION**2 + noise**2) ** 0.5


def exact(prediction: Prediction) -> Velocity:
    """Return the velocity, or the noise, that is expected at a point of the flow from noise to a normal distribution."""

    def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
        signal, noise, total = (part[:, None] for part in moments(level.double(), prediction))
        place = (x.double() - signal * MEAN) / total**2
        eps = noise * place
        x0 = MEAN + signal * DEVIATION**2 * place
        return (eps - x0 if prediction == "velocity" else eps).to(x.dtype)

    return velocity


def schedule(steps: int, prediction: Prediction) -> Schedule:
    """Return levels that are even in the logarithm of noise to signal, in which the method takes its steps."""
    ratio = torch.linspace(math.log(20.0), math.log(0.02), steps + 1, dtype=torch.float64)
    levels = torch.sigmoid(ratio) if prediction == "velocity" else torch.sigmoid(-2 * ratio)
    return Schedule(levels.float(), torch.linspace(900, 100, steps))


def goal(x: Tensor, levels: Tensor, prediction: Prediction) -> Tensor:
    """Return where the flow takes a point: it keeps its distance to the mean in standard deviations."""
    (signal, _, total), (signal_end, _, total_end) = (moments(levels[i].double(), prediction) for i in (0, -1))
    return signal_end * MEAN + total_end / total * (x.double() - signal * MEAN)


def ended(prediction: Prediction, grid: Schedule, solver: str) -> tuple[Tensor, Tensor]:
    """Return where a solver ends, and where the flow does."""
    x = normal(key(0), (64, 3), dtype=torch.float64)
    if solver == "dpmpp_2m":
        return solve("dpmpp_2m", exact(prediction), x, grid, prediction=prediction), goal(x, grid.levels, prediction)
    found, levels = x, [level.expand(64) for level in grid.levels.double()]
    for step, (level, after) in enumerate(pairwise(levels)):
        coefficients = deterministic_step(prediction)(level, after)
        found = gaussian.mean(coefficients, found, exact(prediction)(found, level, step))
    return found, goal(x, grid.levels, prediction)


def error(prediction: Prediction, grid: Schedule, solver: str) -> float:
    """Return the root of the mean square of a solver's error."""
    found, known = ended(prediction, grid, solver)
    assert found.dtype == torch.float64
    return float((found - known).square().mean().sqrt())


@pytest.mark.parametrize("prediction", ["velocity", "epsilon"])
def test_it_is_of_second_order(prediction: Prediction) -> None:
    """Twice the steps leave about a quarter of the error, where Euler's leave half; and it is the smaller one throughout."""
    grids = [schedule(steps, prediction) for steps in (20, 40, 80)]
    errors = {solver: [error(prediction, grid, solver) for grid in grids] for solver in ("dpmpp_2m", "euler")}
    for solver, order in (("dpmpp_2m", 2), ("euler", 1)):
        for coarse, fine in pairwise(errors[solver]):
            assert math.log2(coarse / fine) == pytest.approx(order, abs=0.2), errors
    assert all(second < first for second, first in zip(errors["dpmpp_2m"], errors["euler"], strict=True))


@pytest.mark.parametrize("steps", [10, 25])
def test_on_a_models_own_levels(steps: int) -> None:
    """From noise to exactly none, shifted as the built-in model's are: nearer to where the flow ends than Euler's method."""
    levels = shifted(steps, 3.0)
    grid = Schedule(levels, 1000 * levels[:-1])
    assert float(levels[-1]) == 0.0
    found = {solver: error("velocity", grid, solver) for solver in ("dpmpp_2m", "euler")}
    assert found["dpmpp_2m"] < 0.9 * found["euler"]


@pytest.mark.parametrize("prediction", ["velocity", "epsilon"])
def test_it_is_diffusers_scheduler(prediction: Prediction) -> None:
    """Over its own levels: the same samples as from the scheduler by itself, timesteps looked up and all."""
    flow, steps = prediction == "velocity", 8
    options = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"} if flow else {"prediction_type": "epsilon"}
    scheduler = DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", solver_order=2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's
        scheduler.set_timesteps(steps)
    sigmas = scheduler.sigmas.double()
    levels = sigmas if flow else 1 / (1 + sigmas**2)
    grid = Schedule(levels.float(), scheduler.timesteps.float())
    start = normal(key(0), (64, 3))
    known, velocity = start, exact(prediction)
    for step, timestep in enumerate(scheduler.timesteps):
        known = scheduler.step(velocity(known, grid.levels[step].expand(64), step), timestep, known, return_dict=False)[0]
    found = solve("dpmpp_2m", velocity, start, grid, prediction=prediction)
    torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-5)


def test_one_prediction_per_step() -> None:
    """At the schedule's own levels, all samples alike, in their dtype."""
    grid, seen = schedule(5, "velocity"), []

    def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
        seen.append(step)
        assert level.shape == (7,)
        assert torch.equal(level, grid.levels[step].expand(7))
        return torch.zeros_like(x)

    found = solve("dpmpp_2m", velocity, torch.ones(7, 2), grid, prediction="velocity")
    assert seen == [0, 1, 2, 3, 4]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.ones(7, 2))  # nothing moves it


def test_another_solver() -> None:
    """An unknown solver raises."""
    with pytest.raises(ValueError, match="solver is 'heun', expected one of 'euler', 'dpmpp_2m'"):
        solve("heun", exact("velocity"), torch.ones(1, 2), schedule(2, "velocity"), prediction="velocity")  # type: ignore[arg-type]


@pytest.mark.parametrize("prediction", ["velocity", "epsilon"])
def test_eulers_steps_are_those_of_a_rollout(prediction: Prediction) -> None:
    """To the bit: the deterministic steps of an epsilon-prediction model are DDIM's."""
    grid, x = schedule(6, prediction), torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    if prediction == "velocity":
        grid = Schedule(shifted(6, 3.0), grid.timesteps)
    still = deterministic_step(prediction)
    want = rollout(exact(prediction), x, grid.levels, transition=still, key=key(0), record=())
    assert torch.equal(solve("euler", exact(prediction), x, grid, prediction=prediction), want.final)


class Seen:
    """The exact velocity, and the points that it was asked for."""

    def __init__(self) -> None:
        self.x: list[Tensor] = []

    def __call__(self, x: Tensor, level: Tensor, step: int) -> Tensor:
        self.x.append(x)
        return exact("velocity")(x, level, step)


@pytest.mark.parametrize("solver", ["unipc", "sa_solver"])
def test_other_solvers_of_higher_order(solver: Any) -> None:
    """Twice the steps leave a quarter of the error, or less; the last step of SA-Solver, of order 1, is left out."""
    errors = []
    for steps in (20, 40, 80):
        grid = schedule(steps, "velocity")
        x = normal(key(0), (64, 3), dtype=torch.float64)
        if solver == "unipc":
            found, known = solve(solver, exact("velocity"), x, grid, prediction="velocity"), goal(x, grid.levels, "velocity")
        else:
            seen = Seen()
            solve(solver, seen, x, grid, prediction="velocity")
            found, known = seen.x[-1], goal(x, grid.levels[:-1], "velocity")
        errors.append(float((found - known).square().mean().sqrt()))
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) > 1.7, errors


@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m", "unipc"])
def test_each_piece_is_solved_along_its_own_levels(solver: Any) -> None:
    """Rows with levels of their own end where they do apart; SA-Solver knows one level alone."""
    levels = [shifted(6, 12.0), shifted(6, 3.0)]
    times, x = torch.linspace(900, 100, 6), normal(key(0), (4, 3, 5), dtype=torch.float64)

    def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
        return x * level.reshape(*level.shape, *[1] * (x.ndim - level.ndim))

    together = Schedule(torch.stack([levels[0], levels[1], levels[1]], dim=1), times)
    found = solve(solver, velocity, x, together, prediction="velocity")
    for rows, column in ((slice(0, 1), levels[0]), (slice(1, 3), levels[1])):
        apart = solve(solver, velocity, x[:, rows], Schedule(column, times), prediction="velocity")
        torch.testing.assert_close(found[:, rows], apart, rtol=0, atol=1e-12)
    refuses(
        "the pieces of a sample have noise levels of their own: use 'euler'",
        solve,
        "sa_solver",
        velocity,
        x,
        together,
        prediction="velocity",
    )


def test_noise_of_sa_solver_keeps_the_distribution() -> None:
    """With noise, samples end with the mean and the deviation of the data; their noise is that of their keys."""
    levels = shifted(60, 3.0)
    grid = sa_schedule(Schedule(levels, 1000 * levels[:-1]))
    keys = fold_in(key(1), torch.arange(4000))
    x = normal(fold_in(key(2), torch.arange(4000)), (4000, 2), dtype=torch.float64)
    run = {"prediction": "velocity", "eta": 0.8}
    found = solve("sa_solver", exact("velocity"), x, grid, keys=keys, **run)  # type: ignore[arg-type]
    assert float(found.mean()) == pytest.approx(MEAN, abs=0.02)
    assert float(found.std()) == pytest.approx(DEVIATION, rel=0.05)
    still = solve("sa_solver", exact("velocity"), x, grid, prediction="velocity")
    assert (found - still).abs().mean() > 0.05
    part = solve("sa_solver", exact("velocity"), x[7:9], grid, keys=fold_in(key(1), torch.arange(7, 9)), **run)  # type: ignore[arg-type]
    torch.testing.assert_close(part, found[7:9])


def test_the_levels_of_sa_solver() -> None:
    """AWM's: 0.999 first, and half the level before it last; the timesteps follow."""
    levels = shifted(14, 3.0)
    grid = sa_schedule(Schedule(levels, 1000 * levels[:-1]))
    assert float(grid.levels[0]) == pytest.approx(0.999)
    assert float(grid.levels[-2]) == pytest.approx(float(levels[-3]) / 2)
    assert torch.equal(grid.levels[1:-2], levels[1:-2])
    torch.testing.assert_close(grid.timesteps, 1000 * grid.levels[:-1])
    refuses(
        "for models that predict a velocity",
        solve,
        "sa_solver",
        exact("epsilon"),
        torch.zeros(1, 3),
        grid,
        prediction="epsilon",
    )


def test_sa_solver_is_diffusers_scheduler() -> None:
    """Without noise: its own steps, the first of them not corrected, up to the clean estimate of the last."""
    levels = shifted(10, 3.0)
    grid = sa_schedule(Schedule(levels, 1000 * levels[:-1]))
    scheduler: Any = SASolverScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, tau_func=lambda t: 0)
    with warnings.catch_warnings():  # from numpy, about how diffusers converts a tensor
        warnings.simplefilter("ignore", DeprecationWarning)
        scheduler.set_timesteps(10)
    scheduler.sigmas, scheduler.timesteps = grid.levels.double(), torch.arange(10)
    scheduler.set_begin_index(0)
    found = x = normal(key(0), (4, 3), dtype=torch.float64)
    for step in range(9):
        if step == 1:
            scheduler.last_sample = None
        v = exact("velocity")(found, grid.levels[step].expand(4), step)
        found = scheduler.step(v, scheduler.timesteps[step], found, return_dict=False)[0]
    clean = found - grid.levels[9] * exact("velocity")(found, grid.levels[9].expand(4), 9)
    torch.testing.assert_close(solve("sa_solver", exact("velocity"), x, grid, prediction="velocity"), clean)


X = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FLASH = Tail("dpmpp_2m", 0.4)


def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
    """Return a velocity that depends on sample and level, in no simple way."""
    return torch.tanh(x) * (1 + level[:, None, None]) + 0.3 * x.roll(1, -1)


def on_levels(levels: Tensor) -> Schedule:
    return Schedule(levels, 1000 * levels[:-1])


@given(st.integers(3, 30), st.floats(0.5, 6), st.floats(0.05, 1), st.data())
def test_levels_are_spaced_as_those_of_the_schedule(T: int, shift: float, fraction: float, data: st.DataObject) -> None:
    """They are the shifted levels of evenly spaced times, as MixGRPO's code makes them; timesteps follow the levels."""
    start = data.draw(st.integers(1, T - 1))
    found = after_schedule(on_levels(shifted(T, shift)), start, fraction)
    steps = max(int((T - start + 1) * fraction + 1e-9) - 1, 1)
    time = torch.linspace(1 - start / T, 0, steps + 1, dtype=torch.float64)
    assert_close(found.levels, (shift * time / (1 + (shift - 1) * time)).float(), rtol=1e-5, atol=1e-6)
    assert_close(found.timesteps, 1000 * found.levels[:-1])
    assert (float(found.levels[0]), float(found.levels[-1])) == (float(shifted(T, shift)[start]), 0.0)


def test_levels_of_other_schedules_stay_in_order() -> None:
    """SD3's, which shifts twice: all steps are its own levels, and fewer ones fall between them."""
    levels = shifted_twice(10, 3.0)
    assert_close(after_schedule(on_levels(levels), 4, 1.0).levels, levels[4:], rtol=1e-5, atol=1e-6)
    fewer = after_schedule(on_levels(levels), 4, 0.6).levels
    assert len(fewer) == 4
    assert (fewer.diff() < 0).all()


def test_timesteps_are_those_of_the_steps_nearest_before() -> None:
    """Where a timestep is no multiple of its level, as with a schedule that rounds them, each step has its own factor."""
    levels = shifted(10, 3.0)
    rounded = Schedule(levels, (1000 * levels[:-1] ** 2).round())
    found = after_schedule(rounded, 4, 1.0)
    assert_close(found.timesteps, rounded.timesteps[4:])
    fewer = after_schedule(rounded, 4, 0.6)
    factors = fewer.timesteps / fewer.levels[:-1]
    assert_close(factors, (rounded.timesteps / levels[:-1])[[4, 6, 8]])


def test_no_step_may_be_left() -> None:
    """MixGRPO-Flash's code ends at the level after its window where 0.4 of the steps are fewer than one."""
    levels = shifted(25, 3.0)
    assert after_schedule(on_levels(levels), 23, 0.4).levels.tolist() == [float(levels[23]), 0.0]
    none = after_schedule(on_levels(levels), 23, 0.4, least=0)
    assert none.levels.tolist() == [float(levels[23])]
    assert torch.equal(solve("dpmpp_2m", velocity, X, none, prediction="velocity"), X)


def test_the_second_order_steps_are_those_of_diffusers() -> None:
    """With the estimate of the step before, the rest of DPM-Solver++ 2M's path is the rest of the whole one."""
    levels = shifted(8, 3.0).double()
    whole = solve("dpmpp_2m", velocity, X, on_levels(levels[2:]), prediction="velocity")
    s, after = levels[2], levels[3]
    clean = X - s * velocity(X, s.expand(3), 0)
    gained = torch.log((1 - after) / after) - torch.log((1 - s) / s)
    x = after / s * X - (1 - after) * torch.expm1(-gained) * clean
    rest = partial(solve, velocity=velocity, x=x, schedule=on_levels(levels[3:]), prediction="velocity")
    assert_close(rest("dpmpp_2m", before=Estimate(2, float(s), clean)), whole, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(rest("dpmpp_2m"), whole, rtol=1e-4)
    assert not torch.allclose(rest("euler"), whole, rtol=1e-4)


def test_a_rollout_with_fewer_steps_after_its_window(one: World, tmp_path: Path) -> None:
    """The window's steps keep their bits, the samples are other ones, and the first ratio is 1."""
    window = replace(STEPS, steps=12, window=RandomWindow(2, high=3))
    found, calls = {}, {}
    for name, after in {"euler": Tail(), "flash": FLASH}.items():
        run = Spied(
            tiny.config(
                tmp_path, sampling=replace(window, window=RandomWindow(2, high=3, tail=after)), **{"engine.micro_batch": 8}
            ),
            one,
        )
        model: Any = run.trainer.job.model
        count, predict = [0], type(model).predict

        def counted(self: Any, *args: Any, count: list[int] = count, predict: Any = predict, **options: Any) -> Tensor:
            count[0] += not torch.is_grad_enabled()
            return predict(self, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model), "predict", counted)
            run.rollout()
        found[name], calls[name] = run.trajectories[0], count[0]
        assert float(run.infos[0].mean["log_ratio"]) == 0.0
    last = int(found["flash"].steps[0, -1]) + 1
    assert calls == {"euler": 12, "flash": last + int((12 - last + 1) * 0.4) - 1}
    assert torch.equal(found["euler"].x_next, found["flash"].x_next)
    assert not torch.equal(found["euler"].final, found["flash"].final)
