"""Adjoint Matching in a run: products with the base's Jacobian, the adjoint of recorded steps, and dropped items."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from torch import Tensor
from torch.testing import assert_close

from fluvial.core import gaussian
from fluvial.core.random import key
from fluvial.core.transitions import Transition
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.methods.adjoint import AdjointMatching
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import StratifiedRecorded

SDE = SamplingConfig(prompts=4, group=1, steps=6, sampler=Stochastic(eta=math.sqrt(2)))
DDIM = replace(SDE, sampler=Stochastic("ddim", eta=1.0))


def build(method: AdjointMatching, sampling: SamplingConfig = SDE, **changes: Any) -> TrainConfig:
    """Return a run of which every pass has 2 rows, so that products are joined from several."""
    return tiny.config(Path("out"), method=method, sampling=sampling, rewards=("contrast=0.1",), train="lora", **changes)


@pytest.mark.parametrize("kind", ["velocity", "epsilon"])
@pytest.mark.parametrize("index", ["next", "current"])
def test_the_adjoint_of_recorded_steps_is_the_gradient_along_them(one: World, kind: Any, index: Any) -> None:
    """With the noise of each step held, which its record tells; the last step of ddim takes none."""
    method = AdjointMatching(scale=3.0, index=index)
    run = tiny.Run(build(method, SDE if kind == "velocity" else DDIM), one, tiny.job(kind)).trainer.run
    batch = run.score(run.sample(key(2)))
    steps = run.record_steps(batch, key(2), keep=torch.ones(4))
    got = method.carry_back(run, steps, -3.0 * run.differentiate_rewards(batch))
    trajectory, schedule, transitions = batch.trajectory, batch.spec.sampling.schedule, batch.spec.transitions
    assert transitions is not None
    x = trajectory.x[:, 0].clone().requires_grad_()
    states, noises = [x], list[Tensor]()
    for place in range(6):
        step = Transition(*(coefficient[place] for coefficient in transitions))
        level = schedule.levels[place].expand(4)
        v = run.job.model.predict(
            run.engine.module, states[-1], level, batch.cond, timestep=schedule.timesteps[place].expand(4)
        )
        noises.append(
            ((trajectory.x_next[:, place] - gaussian.mean(step, states[-1], v)) / step.std.clamp(min=1e-9)).detach()
        )
        states.append(gaussian.sample(step, states[-1], v, noises[-1] if step.std > 0 else None))
    assert_close(states[-1], trajectory.final)
    total = -3.0 * 0.1 * tiny.contrast(run.job.model.decode(states[-1]), []).sum()
    expected = torch.autograd.grad(total, states)
    chosen = expected[1:] if index == "next" else expected[:-1]
    assert_close(got, torch.cat(chosen), rtol=1e-4, atol=1e-5)
    assert got.dtype == torch.float32


def test_the_product_is_that_of_the_base_alone(one: World) -> None:
    """Not of the policy, once that has moved; and it leaves no gradient behind."""
    config = build(AdjointMatching(scale=50.0), optimizer=OptimizerConfig(lr=0.05))
    trained = tiny.Run(config, one)
    run = trained.trainer.run
    batch = run.score(run.sample(key(1)))
    steps = run.record_steps(batch, key(1), keep=torch.ones(4))
    cotangent = torch.randn_like(steps.rows.x)
    before = {name: run.vjp(steps, name, cotangent) for name in ("base", "policy")}
    assert_close(before["base"], before["policy"])  # a new adapter is 0
    trained.rollout()
    after = {name: run.vjp(steps, name, cotangent) for name in ("base", "policy")}
    assert torch.equal(before["base"], after["base"])
    assert (before["policy"] - after["policy"]).abs().max() > 1e-3
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in run.engine.module.parameters())


def test_the_largest_losses_add_nothing(one: World) -> None:
    """Those at or above the moving average of the quantile; the mean is still over all."""
    trained = tiny.Run(build(AdjointMatching(scale=1.0, quantile=0.5), updates=2), one)
    seen = list[Any]()
    gather = trained.trainer.run.gather

    def note(items: Any, values: Tensor) -> Tensor:
        seen.append(gather(items, values))
        return seen[-1]

    trained.trainer.run.gather = note  # type: ignore[method-assign]
    records = [trained.rollout(), trained.rollout()]
    sizes = [table.sqrt().flatten() for table in seen]
    first, second = (size.quantile(0.5) for size in sizes)
    assert trained.trainer.progress.state == {"adjoint": [pytest.approx(float(0.9 * first + 0.1 * second))]}
    for size, bound, info in zip(sizes, (first, 0.9 * first + 0.1 * second), trained.infos, strict=True):
        assert info.loss == pytest.approx(float((size**2 * (size < bound)).mean()), rel=1e-4)
    assert [record["pairs"] for record in records] == [24, 24]


def test_steps_are_drawn_from_both_parts() -> None:
    steps = StratifiedRecorded(0.6, first=2, rest=1)
    mask = steps.mask(key(0), 200, 7)  # the first part is 5 steps
    assert torch.equal(mask[:, :5].sum(1), torch.full((200,), 2.0))
    assert torch.equal(mask[:, 5:].sum(1), torch.ones(200))
    assert mask.mean(0)[:5].sub(0.4).abs().max() < 0.12
    assert (steps.count(7), steps.count(2), StratifiedRecorded().count(50)) == (3, 2, 4)


def test_a_step_without_noise_is_left_out(one: World) -> None:
    """The last one of cps, which has no control; the others are trained on."""
    trained = tiny.Run(build(AdjointMatching(quantile=None), replace(SDE, sampler=Stochastic("cps", eta=1.0))), one)
    assert trained.rollout()["pairs"] == 20
