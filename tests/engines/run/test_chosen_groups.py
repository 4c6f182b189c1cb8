"""Groups that are filled up, and samples whose initial noise scouts chose: what stands in the batch, and what it costs."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.spied_runs import Spied, spy
from torch import Tensor

from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import World
from fluvial.engines.methods.table import Grpo
from fluvial.engines.run.job import Job
from fluvial.engines.run.rollouts import Rollouts

REFILLED = "sampling.groups=refilled sampling.groups.rounds"
SCOUTED = "lora sampling.groups=scouted sampling.groups.scouts"


def mostly_flat(images: Tensor, prompts: list[str]) -> Tensor:
    """Return the brightness for an even prompt, and for others the same for all."""
    return torch.where(torch.tensor([int(prompt) % 2 == 0 for prompt in prompts]), images.mean((1, 2, 3)), 0.5)


def flat(images: Tensor, prompts: list[str]) -> Tensor:
    return torch.full((len(images),), 0.5)


def run(one: World, line: str, reward: Any = mostly_flat, job: Job | None = None, **changes: Any) -> Spied:
    job = replace(job or tiny.job(), rewards={"reward": reward})
    spied = spy(one, f"{line} seed={changes.pop('seed', 1)}", job, **{"engine.micro_batch": 2, **changes})
    spied.record = spied.rollout()
    return spied


@pytest.mark.bits
@pytest.mark.parametrize("order", ["epochs", "draws", "distinct"])
def test_flat_groups_are_replaced(one: World, order: str) -> None:
    """By groups of other prompts, in the same slots; other samples keep their bits, and each score is that of its sample."""
    many = tiny.job(prompts=("1", "3", "0", "2"))
    line, seed = f"grpo sampling.prompts=3 data.order={order}", 3 if order == "draws" else 2
    plain, filled = (run(one, f"{line} {words}", job=many, seed=seed) for words in ("", f"{REFILLED}=8"))
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
    ("line", "groups"),
    [("grpo", f"{REFILLED}=2"), ("nft ode lora", f"{SCOUTED}=4 sampling.groups.steps=2")],
    ids=["no flat group", "every scout is taken"],
)
def test_what_chooses_nothing_is_the_plain_method(one: World, line: str, groups: str) -> None:
    """To the bit."""
    plain, chosen = (run(one, f"{line} {words}", tiny.brightness) for words in ("", groups))
    assert all(torch.equal(before, chosen.weights()[name]) for name, before in plain.weights().items())


def test_a_group_is_flat_if_no_samples_of_it_that_are_compared_differ() -> None:
    """Two branches of two samples each; one that differs is enough."""
    rewards = SimpleNamespace(scores=torch.tensor([[1.0], [1.0], [3.0], [2.0], [1.0], [1.0], [2.0], [2.0]]))
    of, batch = SimpleNamespace(runners=SimpleNamespace(weights=torch.ones(1))), SimpleNamespace(rewards=rewards, compared=2)
    batch.spec = SimpleNamespace(group=4)
    assert Rollouts._find_flat(cast(Any, of), cast(Any, batch), 0.0) == [1]
    rewards.scores = torch.tensor([[math.nan], [0.0], [1.0], [2.0], [10.0], [20.0], [30.0], [math.nan]])
    found = Rollouts.find_extremes(cast(Any, of), cast(Any, batch), 1)
    assert found == [1, 3, 4, 6]  # a failed scout counts as the median of its group


@pytest.mark.parametrize("line", ["grpo", "nft ode"])
def test_groups_that_stay_flat_add_nothing(one: World, line: str) -> None:
    """To any method's loss, whose denominator stays; each round samples all of them again."""
    spied = run(one, f"{line} lora {REFILLED}=2", flat)
    method: Any = spied.trainer.config.method
    assert spied.record["refill"] == {"replaced": 4, "flat": 2}
    assert spied.infos[0].grad_norm == 0 == float(spied.updates[0].weight.sum())
    assert spied.updates[0].over == 8 * (tiny.STEPS if isinstance(method, Grpo) else method.noising.each)


def test_a_floor_and_branches(one: World) -> None:
    """A group is flat if its standard deviation is no larger, or that of each of its branches."""
    plain = run(one, "grpo", tiny.brightness)
    spread = plain.scores[:, 0].double().unflatten(0, (2, 4)).std(1).sort().values
    for floor, count in ((float(spread[0]) * 0.999, 0), (float(spread[0]) * 1.001, 1), (float(spread[1]) * 1.001, 2)):
        filled = run(one, f"grpo {REFILLED}=1 sampling.groups.floor={floor}", tiny.brightness)
        assert filled.record["refill"]["replaced"] == count
    branches = "grpo branches sampling.window.samples=4 sampling.window.high=2"
    assert run(one, f"{branches} {REFILLED}=2", flat).record["refill"] == {"replaced": 4, "flat": 2}


def test_prompts_that_replace_others_have_their_size(one: World) -> None:
    """And each round has others, in the order of their own epochs."""
    asked = list[Prompt]()
    spied = run(one, f"grpo {REFILLED}=3", flat)
    for number in (1, 2):
        asked += spied.trainer.sampler._choose_replacements(None, None, 2, 0, number)  # type: ignore[arg-type]
    assert sorted(prompt.text for prompt in asked) == sorted(tiny.PROMPTS)


@pytest.mark.bits
@pytest.mark.parametrize("count", [8, 12])
def test_the_extremes_of_scouts_are_sampled(one: World, count: int) -> None:
    """With as many steps, the rewards of a group are the largest and the smallest of all that were scouted."""
    everyone = run(one, f"nft ode lora sampling.group={count}", tiny.brightness)
    chosen = run(one, f"nft ode {SCOUTED}={count} sampling.groups.steps={tiny.STEPS}", tiny.brightness)
    assert chosen.prompts == [prompt for prompt in everyone.prompts[::count] for _ in range(4)]
    ordered = everyone.scores[:, 0].unflatten(0, (2, count)).sort(1).values
    expected = torch.cat([ordered[:, :2], ordered[:, -2:]], 1)
    assert torch.equal(chosen.scores[:, 0].unflatten(0, (2, 4)).sort(1).values, expected)


def test_scouts_take_their_own_steps(one: World) -> None:
    """The samples that are learnt from take all; pairs are made of them, too."""
    spied = run(one, "dpo ode sampling.groups=scouted sampling.groups.scouts=6 sampling.groups.steps=1", tiny.brightness)
    assert len(spied.preferences) == 2
    assert spied.trainer.sampler._schedules[1].of(tiny.SHAPE)[0].levels.tolist() == [1.0, 0.0]
