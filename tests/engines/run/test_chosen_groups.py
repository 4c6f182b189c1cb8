"""Groups that are filled up, and samples whose initial noise scouts chose: what stands in the batch, and what it costs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.spied_runs import ODE, STEPS, Spied
from torch import Tensor

from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import World
from fluvial.engines.methods.table import Dpo, Grpo, Nft
from fluvial.engines.run.job import Job
from fluvial.engines.sampling.config import AllGroups, Groups, RefilledGroups, ScoutedGroups
from fluvial.engines.sampling.window import Branches

REFILLED = RefilledGroups(rounds=2)


def mostly_flat(images: Tensor, prompts: list[str]) -> Tensor:
    """Return the brightness for an even prompt, and for others the same for all."""
    return torch.where(torch.tensor([int(prompt) % 2 == 0 for prompt in prompts]), images.mean((1, 2, 3)), 0.5)


def flat(images: Tensor, prompts: list[str]) -> Tensor:
    return torch.full((len(images),), 0.5)


def run(
    folder: Path, one: World, groups: Groups, reward: Any = mostly_flat, job: Job | None = None, **changes: Any
) -> Spied:
    method = changes.get("method", Grpo())
    sampling = changes.pop("sampling", STEPS if isinstance(method, Grpo) else ODE)
    changes = {"engine.micro_batch": 2, "seed": 1, **changes, "sampling": replace(sampling, groups=groups)}
    spied = Spied(tiny.config(folder, **changes), one, replace(job or tiny.job(), rewards={"reward": reward}))
    spied.record = spied.rollout()
    return spied


@pytest.mark.bits
@pytest.mark.parametrize("order", ["epochs", "draws", "distinct"])
def test_flat_groups_are_replaced(one: World, tmp_path: Path, order: str) -> None:
    """By groups of other prompts, in the same slots; other samples keep their bits, and each score is that of its sample."""
    many = tiny.job(prompts=("1", "3", "0", "2"))
    changes = {"sampling": replace(STEPS, prompts=3), "data.order": order, "seed": 3 if order == "draws" else 2}
    plain = run(tmp_path, one, AllGroups(), job=many, **changes)
    filled = run(tmp_path, one, RefilledGroups(rounds=8), job=many, **changes)
    kept = torch.tensor([int(prompt) % 2 == 0 for prompt in plain.prompts])
    assert 0 < int(kept.sum()) < len(kept)
    assert all(int(prompt) % 2 == 0 for prompt in filled.prompts)
    assert filled.record["refill"]["flat"] == 0
    assert filled.record["refill"]["replaced"] >= int((~kept).sum()) // 4
    for name in ("x", "x_next", "log_prob", "final"):
        before, after = (getattr(spied.trajectories[0], name) for spied in (plain, filled))
        assert torch.equal(before[kept], after[kept])
        assert not torch.equal(before[~kept], after[~kept])
    images = tiny.Tiny().decode(filled.trajectories[0].final)
    assert torch.equal(filled.scores[:, 0], mostly_flat(images, filled.prompts))
    assert filled.infos[0].max_abs["log_ratio"] == 0.0
    assert filled.updates[0].over == plain.updates[0].over == 12 * tiny.STEPS
    assert filled.infos[0].items == 12 * tiny.STEPS


@pytest.mark.bits
@pytest.mark.parametrize(
    ("changes", "groups", "reward"),
    [
        ({}, REFILLED, tiny.brightness),  # without a flat group
        ({"method": Nft(), "train": "lora"}, ScoutedGroups(4, 2), tiny.brightness),  # which take every scout
    ],
)
def test_what_chooses_nothing_is_the_plain_method(
    one: World, tmp_path: Path, changes: dict[str, Any], groups: Groups, reward: Any
) -> None:
    """To the bit."""
    plain, chosen = (run(tmp_path, one, each, reward, **changes) for each in (AllGroups(), groups))
    assert all(torch.equal(before, chosen.weights()[name]) for name, before in plain.weights().items())


@pytest.mark.parametrize("method", [Grpo(), Nft()])
def test_groups_that_stay_flat_add_nothing(one: World, tmp_path: Path, method: Any) -> None:
    """To any method's loss, whose denominator stays; each round samples all of them again."""
    spied = run(tmp_path, one, REFILLED, flat, method=method, train="lora")
    assert spied.record["refill"] == {"replaced": 4, "flat": 2}
    assert spied.infos[0].grad_norm == 0 == float(spied.updates[0].weight.sum())
    assert spied.updates[0].over == 8 * (tiny.STEPS if isinstance(method, Grpo) else method.noising.each)


def test_a_floor_and_branches(one: World, tmp_path: Path) -> None:
    """A group is flat if its standard deviation is no larger, or that of each of its branches."""
    plain = run(tmp_path, one, AllGroups(), tiny.brightness)
    spread = plain.scores[:, 0].double().unflatten(0, (2, 4)).std(1).sort().values
    for floor, count in ((float(spread[0]) * 0.999, 0), (float(spread[0]) * 1.001, 1), (float(spread[1]) * 1.001, 2)):
        filled = run(tmp_path, one, RefilledGroups(1, floor), tiny.brightness)
        assert filled.record["refill"]["replaced"] == count
    branches = replace(STEPS, group=8, window=Branches(size=1, samples=4, high=2))
    assert run(tmp_path, one, REFILLED, flat, sampling=branches).record["refill"] == {"replaced": 4, "flat": 2}


def test_prompts_that_replace_others_have_their_size(one: World, tmp_path: Path) -> None:
    """And each round has others, in the order of their own epochs."""
    asked = list[Prompt]()
    spied = run(tmp_path, one, RefilledGroups(rounds=3), flat)
    for number in (1, 2):
        asked += spied.trainer.sampler._further_prompts(None, None, 2, 0, number)  # type: ignore[arg-type]
    assert sorted(prompt.text for prompt in asked) == sorted(tiny.PROMPTS)


@pytest.mark.bits
@pytest.mark.parametrize("count", [8, 12])
def test_the_extremes_of_scouts_are_sampled(one: World, tmp_path: Path, count: int) -> None:
    """With as many steps, the rewards of a group are the largest and the smallest of all that were scouted."""
    nft: dict[str, Any] = {"method": Nft(), "train": "lora"}
    everyone = run(tmp_path, one, AllGroups(), tiny.brightness, sampling=replace(ODE, group=count), **nft)
    chosen = run(tmp_path, one, ScoutedGroups(count, tiny.STEPS), tiny.brightness, **nft)
    assert chosen.prompts == [prompt for prompt in everyone.prompts[::count] for _ in range(4)]
    ordered = everyone.scores[:, 0].unflatten(0, (2, count)).sort(1).values
    expected = torch.cat([ordered[:, :2], ordered[:, -2:]], 1)
    assert torch.equal(chosen.scores[:, 0].unflatten(0, (2, 4)).sort(1).values, expected)


def test_scouts_take_their_own_steps(one: World, tmp_path: Path) -> None:
    """The samples that are learnt from take all; pairs are made of them, too."""
    spied = run(tmp_path, one, ScoutedGroups(6, 1), tiny.brightness, method=Dpo())
    assert len(spied.preferences) == 2
    assert spied.trainer.sampler._schedules[1].of(tiny.SHAPE)[0].levels.tolist() == [1.0, 0.0]
