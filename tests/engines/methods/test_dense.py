"""Rewards of single steps: what the ODE makes of recorded states, and numbers per step in an update."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from torch import Tensor
from torch.testing import assert_close

from fluvial.core.random import fold_in, key
from fluvial.engines.engine.world import World
from fluvial.engines.methods.dense import DenseGrpo, score_steps
from fluvial.engines.run.run import Run
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import AllSteps, RandomWindow, ScatteredSteps, Window

SDE = SamplingConfig(prompts=3, group=2, steps=6, sampler=Stochastic(eta=0.7))


def sample(world: World, window: Window, eta: float = 0.7, rewards: tuple[str, ...] = ("brightness",)) -> tuple[Run, Batch]:
    sampling = replace(SDE, window=window, sampler=Stochastic(eta=eta))
    run = tiny.Run(tiny.config(Path("out"), sampling=sampling, method=DenseGrpo(), rewards=rewards), world).trainer.run
    return run, run.score(run.sample(key(5)))


def euler(run: Run, batch: Batch, x: Tensor, step: int, *, jump: bool = False) -> Tensor:
    """Return what a loop of Euler's steps makes of samples."""
    levels = batch.spec.sampling.schedule.levels
    stops = [step, len(levels) - 1] if jump and step < len(levels) - 1 else range(step, len(levels))
    stops, module = list(stops), run.engine.module
    for start, end in itertools.pairwise(stops):
        v = run.job.model.predict(module, x, levels[start].expand(len(x)), batch.cond)
        x = x + (levels[end] - levels[start]) * v
    return x.detach()


@pytest.mark.parametrize("jump", [False, True])
def test_finished_samples_are_those_of_the_ode(one: World, jump: bool) -> None:
    """From every step, the end included, where nothing is left to do; and they are scored as any sample is."""
    run, batch = sample(one, AllSteps())
    for step in (0, 3, 5, 6):
        x = batch.trajectory.x[:, step] if step < 6 else batch.trajectory.final
        got = run.finish(batch, x, step, jump=jump)
        assert_close(got.trajectory.final, euler(run, batch, x, step, jump=jump))
        assert_close(run.weigh_rewards(got), tiny.brightness(run.job.model.decode(got.trajectory.final), []))
    assert torch.equal(run.weigh_rewards(got), run.weigh_rewards(batch))


@pytest.mark.parametrize("window", [AllSteps(), AllSteps(low=1, high=4), RandomWindow(2, high=5), ScatteredSteps(3)])
def test_gains_add_up_to_that_of_the_sample(one: World, window: Window) -> None:
    """Whatever steps are recorded: between them, and after the last, the rollout itself takes ODE steps."""
    run, batch = sample(one, window)
    kept, rewards = score_steps(run, batch)
    first = run.finish(batch, batch.trajectory.x[:, 0], int(batch.trajectory.steps[0, 0]))
    assert torch.equal(rewards[:, -1], run.weigh_rewards(batch))
    assert_close(DenseGrpo().gains(rewards).sum(1), run.weigh_rewards(batch) - run.weigh_rewards(first))
    assert kept.trajectory is batch.trajectory
    for place in range(batch.trajectory.steps.shape[1] - 1):  # a state is where the step before it ended
        step = int(batch.trajectory.steps[0, place])
        got = run.finish(batch, batch.trajectory.x_next[:, place], step + 1)
        assert_close(run.weigh_rewards(got), rewards[:, place + 1])


def test_steps_without_noise_gain_nothing(one: World) -> None:
    run, batch = sample(one, AllSteps(high=5), eta=1e-5)
    assert score_steps(run, batch)[1].diff(dim=1).abs().max() < 1e-5
    run, batch = sample(one, AllSteps(high=5))
    assert score_steps(run, batch)[1].diff(dim=1).abs().min() > 1e-5


def test_a_number_per_step_is_that_of_its_item(one: World) -> None:
    """The same number at all steps is one number per sample, and 0 is no item."""
    run, batch = sample(one, AllSteps(high=5))
    each, keep = torch.randn(6), torch.ones(6)
    items = run.record_steps(batch, key(0), each, keep=keep, skip_zero=True)
    same = run.record_steps(batch, key(0), each[:, None].expand(-1, 5), keep=keep, skip_zero=True)
    assert torch.equal(items.rows.signal, same.rows.signal)
    assert torch.equal(items.used, same.used)
    table = torch.randn(6, 5) * (torch.rand(6, 5) > 0.3)
    got = run.record_steps(batch, key(0), table, keep=keep, skip_zero=True)
    assert torch.equal(got.rows.signal, got.look_up(table))
    assert torch.equal(got.used, (table != 0).float())
    assert got.count == 30
    counted = run.record_steps(batch, key(0), table, keep=(table != 0).float())
    assert torch.equal(counted.used, got.used)
    assert counted.count == int((table != 0).sum())
    refuses(
        r"signal has shape \[6, 4\], expected \[6\], .* or \[6, 5\], one per recorded step",
        run.record_steps,
        batch,
        key(0),
        table[:, :4],
        keep=keep,
    )


def test_a_group_that_fails_on_the_way_is_left_out(one: World) -> None:
    """The reward raises for one sample of one completion; its group is learnt from no more, the others are."""
    calls = list[int]()

    def fussy(images: Tensor, prompts: Any) -> Tensor:
        calls.append(len(images))
        return torch.where(torch.arange(len(images)) == 0, float("nan") if len(calls) == 5 else 0.0, images.mean((1, 2, 3)))

    config = tiny.config(Path("out"), sampling=SDE, method=DenseGrpo(), rewards=("fussy",), **{"rollout.max_invalid": 0.5})
    trained = tiny.Run(config, one, tiny.job(rewards={"fussy": fussy}))
    run = trained.trainer.run
    batch = run.score(run.sample(fold_in(key(0), 1)))
    with pytest.warns(UserWarning, match="reward 'fussy' is nan"):
        kept, rewards = score_steps(run, batch)
    assert (len(batch.kept_ids), len(kept.kept_ids), tuple(rewards.shape)) == (6, 4, (4, 7))
    assert torch.isfinite(rewards).all()
