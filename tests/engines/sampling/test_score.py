"""Log-probabilities of given trajectories are those of the rollout, of a core rollout and of a generated one."""

import re
from typing import Any

import optree
import pytest
import torch
from helpers.refusals import refuses

from fluvial.core.random import fold_in, key, normal
from fluvial.core.rollout import Trajectory, rollout, wrap_samples
from fluvial.core.transitions import bind
from fluvial.engines import Engine, init_world, score
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.handwriting import Handwriting

MODEL, STEPS, COUNT = Handwriting(), 4, 3
SCHEDULE = MODEL.schedule(STEPS, (1, 8, 32))
SAMPLER = bind("flow_sde", 0.7, SCHEDULE.levels)
PROMPTS = ["0427", "1999", "3141"]


def made(module: torch.nn.Module, cond: Any, window: Any) -> Trajectory:
    """Return a rollout of the built-in model."""

    def velocity(x: torch.Tensor, level: torch.Tensor, step: int) -> torch.Tensor:
        timestep = SCHEDULE.timesteps[step].expand(len(x))
        return guided_velocity(MODEL, module, x, level, cond, timestep=timestep)

    x = normal(fold_in(key(0), torch.arange(COUNT)), (COUNT, 1, 8, 32))
    with torch.no_grad():
        return rollout(velocity, x, SCHEDULE.levels, transition=SAMPLER, key=key(1), window=window)


@pytest.mark.bits
@pytest.mark.parametrize("window", [(0, 2), torch.tensor([[0, 1], [1, 2], [0, 3]])])
@pytest.mark.parametrize("guided", [False, True])
def test_scores_are_those_of_the_rollout(window: Any, guided: bool) -> None:
    """With the same window for all samples, or one per sample; with other micro-batches, to rounding."""
    module, plain = MODEL.build().eval(), MODEL.encode(PROMPTS)
    cond: Any = Guided(plain, MODEL.encode([""] * COUNT), torch.full((COUNT,), 2.0)) if guided else plain
    trajectory = made(module, cond, window)
    fits: dict[str, Any] = {"model": MODEL, "cond": cond, "schedule": SCHEDULE, "sampler": SAMPLER}
    unread = trajectory._replace(log_prob=torch.full_like(trajectory.log_prob, torch.nan))
    found = score(unread, module, **fits)
    assert not found.requires_grad
    if isinstance(window, tuple):
        assert torch.equal(found, trajectory.log_prob)
    for size in (1, 4, 6):
        scored = score(unread, module, micro_batch=size, **fits)
        torch.testing.assert_close(scored, trajectory.log_prob, rtol=0, atol=1e-5)
    with init_world():
        network = MODEL.build()
        engine = Engine(network, MODEL.blocks(network))
        with engine.inference() as sharded:
            torch.testing.assert_close(score(unread, sharded, **fits), trajectory.log_prob, rtol=0, atol=1e-5)
    no_constants = score(unread, module, form="unscaled", **fits)
    assert (no_constants <= 0).all()
    assert not torch.allclose(no_constants, found)


def test_a_trajectory_that_does_not_fit_is_one_line() -> None:
    """Conditioning of other samples, steps beyond the schedule, shapes that differ."""
    module, cond = MODEL.build().eval(), MODEL.encode(PROMPTS)
    trajectory = made(module, cond, (0, 1))
    two = optree.tree_map(lambda tensor: tensor[:2], cond)
    for wrong, given, message in (
        (trajectory, two, "score: the conditioning has [2] rows, expected 3, one per sample"),
        (
            trajectory._replace(steps=torch.tensor([[0, 4]] * 3)),
            cond,
            "score: steps go up to 4, and the schedule has steps 0 to 3",
        ),
        (trajectory._replace(steps=torch.tensor([0])), cond, "score: steps has shape [1], expected [3, 2]"),
        (wrap_samples(trajectory.final), cond, "score: the trajectory has no recorded steps"),
        (trajectory._replace(x_next=trajectory.x_next[:, :1]), cond, "score: x has shape [3, 2, 1, 8, 32] and x_next"),
    ):
        refuses(re.escape(message), score, wrong, module, model=MODEL, cond=given, schedule=SCHEDULE, sampler=SAMPLER)
