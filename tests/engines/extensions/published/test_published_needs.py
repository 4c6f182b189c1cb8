"""Needs of single published runs: branches, windows of a run, a guided reference, best-of-n, distinct prompts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.spied_runs import ODE, STEPS, Spied
from hypothesis import given
from hypothesis import strategies as st

from fluvial.core.random import key
from fluvial.engines.engine.world import World
from fluvial.engines.methods.table import Nft
from fluvial.engines.run import trainer as trainers
from fluvial.engines.run.build import check_model
from fluvial.engines.run.config import with_values
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.solvers import serving_solver
from fluvial.engines.sampling.window import Branches, RandomWindow
from fluvial.engines.scoring.advantages import AdvantageConfig, extreme
from fluvial.models.pipelines.wan import Wan

BRANCHES = replace(STEPS, group=12, window=Branches(1, 2, high=3))


@given(st.integers(1, 3), st.integers(0, 2), st.integers(2, 4), st.lists(st.integers(0, 200), min_size=1, max_size=9))
def test_branches_take_the_places_in_turn(size: int, low: int, branches: int, ids: list[int]) -> None:
    """Samples 0 to `branches` - 1 take the first place of the range, the next ones the second, and so on, over again."""
    places = range(low, 7 - size + 1)
    found = Branches(size, branches, low).choose_steps(key(0), key(0), done=0, steps=7, group=1)(ids)
    expected = [[places[i // branches % len(places)] + step for step in range(size)] for i in ids]
    assert torch.as_tensor(found).tolist() == expected


def test_a_rollout_of_branches(one: World, tmp_path: Path) -> None:
    """A trunk's samples start alike and differ in one step; each is compared with those of its own step alone."""
    run = Spied(tiny.config(tmp_path, sampling=BRANCHES, **{"engine.micro_batch": 6}), one)
    run.rollout()
    trajectory, step = run.trajectories[0], run.updates[0].items
    # 2 prompts of 2 trunks of 3 places of 2 branches.
    assert trajectory.steps.flatten().tolist() == [0, 0, 1, 1, 2, 2] * 4
    before = trajectory.x[:, 0].unflatten(0, (4, 3, 2))
    assert torch.equal(before[:, :, 0], before[:, :, 1])  # until their step they are the trunk
    assert len(before[:, 0, 0].flatten(1).unique(dim=0)) == 4  # a trunk has noise of its own
    assert len(trajectory.final.flatten(1).unique(dim=0)) == 24
    reward = run.scores.sum(1).unflatten(0, (12, 2))
    better = (reward[:, 0] > reward[:, 1]).repeat_interleave(2) == (torch.arange(24) % 2 == 0)
    assert torch.equal(step.signal[step.sample.argsort()] > 0, better)


def test_windows_of_a_run(one: World, tmp_path: Path) -> None:
    """The groups at one index have the same window in every rollout; another seed has others."""
    found = {}
    for seed in (0, 1):
        rollout = replace(STEPS, prompts=12, group=2, window=RandomWindow(1, draw="run"))
        run = Spied(tiny.config(tmp_path, sampling=rollout, updates=3, seed=seed, **{"engine.micro_batch": 8}), one)
        for _ in range(3):
            run.rollout()
        steps = [trajectory.steps.flatten() for trajectory in run.trajectories]
        assert torch.equal(steps[0], steps[1])
        assert torch.equal(steps[0], steps[2])
        assert torch.equal(steps[0][::2], steps[0][1::2])
        found[seed] = steps[0]
    assert len(found[0].unique()) > 1
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_reference_with_guidance_of_its_own(one: World, tmp_path: Path, scale: float) -> None:
    """The reference's prediction is that of the base model with kl.guidance, whatever the policy's is (CRD)."""
    rollout = replace(ODE, guidance=Guidance(scale=2.0 if scale == 1 else 1.0))
    config = tiny.config(
        tmp_path,
        sampling=rollout,
        method=Nft(),
        train="lora",
        **{"engine.micro_batch": 8, "kl.coef": 0.1, "kl.guidance": scale},
    )
    assert config.is_guided
    run = Spied(config, one)
    run.rollout()
    items, net, model = run.updates[0].items, tiny.Net(0), tiny.Tiny()
    with torch.no_grad():
        v, blank = (
            net(items.x, model.encode(prompts).rows, items.level)
            for prompts in ([run.prompts[int(i)] for i in items.sample], [""] * len(items.sample))
        )
    torch.testing.assert_close(items.predictions["ref"], blank + scale * (v - blank))


def test_guidance_of_a_reference_that_there_is_not(tmp_path: Path) -> None:
    """It is an error where the update has none either, and for a pipeline without an adapter."""
    guided = tiny.config(tmp_path, sampling=ODE, method=Nft(), train="lora", **{"kl.coef": 0.1, "kl.guidance": 3.0})
    with pytest.raises(ValueError, match=r"kl.guidance is 3, expected None: handwriting has no adapter"):
        check_model(guided, "velocity", recorded=True)
    conditional = replace(ODE, guidance=Guidance(scale=2.0, update="conditional"))
    with pytest.raises(ValueError, match=r"kl.guidance is 3, expected None or 1: the negative prompt gets its images only"):
        check_model(guided, "velocity", conditioned=True)
    with pytest.raises(ValueError, match=r"kl.guidance has no effect with sampling.guidance.update conditional"):
        with_values(guided, {"sampling": conditional})


@given(st.integers(0, 3), st.lists(st.floats(-5, 5), min_size=12, max_size=12), st.randoms())
def test_the_best_and_the_worst_of_a_group(count: int, rewards: list[float], random: Any) -> None:
    """As many of each end of the sorted rewards are kept, whatever the order of the samples."""
    order = list(range(12))
    random.shuffle(order)
    reward, group = torch.tensor(rewards), torch.tensor(order) % 2
    kept = extreme(reward, group, count)
    for number in (0, 1):
        mine = group == number
        ranked = sorted(reward[mine].tolist())
        expected = ranked[:count] + ranked[len(ranked) - count :] if count else ranked
        assert sorted(reward[mine][kept[mine] == 1].tolist()) == expected
    assert set(kept.tolist()) <= {0.0, 1.0}


def test_an_update_on_the_best_and_the_worst(one: World, tmp_path: Path) -> None:
    """DanceGRPO's best-of-n: the others are not computed and not counted, and their group's mean is of all."""
    found = {}
    for extremes in (0, 1):
        run = Spied(
            tiny.config(tmp_path, sampling=STEPS, advantage=AdvantageConfig(extremes=extremes), **{"engine.micro_batch": 8}),
            one,
        )
        run.rollout()
        found[extremes] = run.updates[0]
    whole, part = found[0].items, found[1].items
    assert found[1].over == found[0].over / 2 == len(part.level)
    rows = torch.isin(whole.sample, part.sample)
    assert torch.equal(whole.signal[rows], part.signal)
    assert len(part.sample.unique()) == 4


def test_distinct_prompts_of_a_rollout(one: World, tmp_path: Path) -> None:
    """Each prompt comes at most once per rollout while there are enough; rollouts are drawn apart, and by the data seed."""
    found = {}
    for seeds in ((0, 5), (1, 5), (0, 6)):
        rollout = replace(STEPS, prompts=3, group=2)
        config = tiny.config(
            tmp_path, sampling=rollout, seed=seeds[0], updates=4, **{"data.order": "distinct", "data.seed": seeds[1]}
        )
        run = Spied(config, one)
        drawn = []
        for _ in range(4):
            run.rollout()
            drawn.append(run.prompts[::2])
        assert all(len(set(prompts)) == 3 for prompts in drawn)
        assert len({tuple(prompts) for prompts in drawn}) > 1
        found[seeds] = drawn
    assert found[0, 5] == found[1, 5] != found[0, 6]
    more = Spied(tiny.config(tmp_path, sampling=replace(STEPS, prompts=6, group=2), **{"data.order": "distinct"}), one)
    more.rollout()
    assert set(more.prompts[:8:2]) == set(tiny.PROMPTS)


def test_wan_is_evaluated_with_the_solver_that_it_is_served_with(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UniPC, not the Euler's method that it is trained on; a solver that is named stays, and other models have Euler's."""
    assert (serving_solver("auto", Wan), serving_solver("auto", tiny.Tiny())) == ("unipc", "euler")
    assert (serving_solver("euler", Wan), serving_solver("dpmpp_2m", tiny.Tiny())) == ("euler", "dpmpp_2m")
    seen = []
    monkeypatch.setattr(trainers, "evaluate", lambda *args, **options: seen.append(options["solver"]))
    monkeypatch.setattr(tiny.Tiny, "serving_solver", "unipc", raising=False)
    with Trainer(tiny.config(tmp_path, sampling=STEPS), tiny.job(), one) as trainer:
        trainer.evaluate()
    assert seen == ["unipc"]
