"""The steps after the window: fewer, and of second order, as MixGRPO-Flash takes them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.spied_runs import STEPS, Spied
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fluvial.core.sigmas import shifted, shifted_twice
from fluvial.engines.engine.world import World
from fluvial.engines.sampling.solvers import Estimate, solve
from fluvial.engines.sampling.tail import Tail, after_schedule
from fluvial.engines.sampling.window import RandomWindow
from fluvial.models import Schedule

X = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FLASH = Tail("dpmpp_2m", 0.4)


def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
    """Return a velocity that depends on sample and level, in no simple way."""
    return torch.tanh(x) * (1 + level[:, None, None]) + 0.3 * x.roll(1, -1)


def schedule(levels: Tensor) -> Schedule:
    return Schedule(levels, 1000 * levels[:-1])


@given(st.integers(3, 30), st.floats(0.5, 6), st.floats(0.05, 1), st.data())
def test_levels_are_spaced_as_those_of_the_schedule(T: int, shift: float, fraction: float, data: st.DataObject) -> None:
    """They are the shifted levels of evenly spaced times, as MixGRPO's code makes them; timesteps follow the levels."""
    start = data.draw(st.integers(1, T - 1))
    found = after_schedule(schedule(shifted(T, shift)), start, fraction)
    steps = max(int((T - start + 1) * fraction + 1e-9) - 1, 1)
    time = torch.linspace(1 - start / T, 0, steps + 1, dtype=torch.float64)
    assert_close(found.levels, (shift * time / (1 + (shift - 1) * time)).float(), rtol=1e-5, atol=1e-6)
    assert_close(found.timesteps, 1000 * found.levels[:-1])
    assert (float(found.levels[0]), float(found.levels[-1])) == (float(shifted(T, shift)[start]), 0.0)


def test_levels_of_other_schedules_stay_in_order() -> None:
    """SD3's, which shifts twice: all steps are its own levels, and fewer ones fall between them."""
    levels = shifted_twice(10, 3.0)
    assert_close(after_schedule(schedule(levels), 4, 1.0).levels, levels[4:], rtol=1e-5, atol=1e-6)
    fewer = after_schedule(schedule(levels), 4, 0.6).levels
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
    assert after_schedule(schedule(levels), 23, 0.4).levels.tolist() == [float(levels[23]), 0.0]
    none = after_schedule(schedule(levels), 23, 0.4, least=0)
    assert none.levels.tolist() == [float(levels[23])]
    assert torch.equal(solve("dpmpp_2m", velocity, X, none, prediction="velocity"), X)


def test_the_second_order_steps_are_those_of_diffusers() -> None:
    """With the estimate of the step before, the rest of DPM-Solver++ 2M's path is the rest of the whole one."""
    levels = shifted(8, 3.0).double()
    whole = solve("dpmpp_2m", velocity, X, schedule(levels[2:]), prediction="velocity")
    s, after = levels[2], levels[3]
    clean = X - s * velocity(X, s.expand(3), 0)
    gained = torch.log((1 - after) / after) - torch.log((1 - s) / s)
    x = after / s * X - (1 - after) * torch.expm1(-gained) * clean
    rest = partial(solve, velocity=velocity, x=x, schedule=schedule(levels[3:]), prediction="velocity")
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
