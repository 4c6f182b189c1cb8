"""The policies that objectives compare with: the old one, the reference and a teacher; preferences, and what RAFT keeps."""

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.spied_runs import spy

from fluvial.core.dpo import best_and_worst
from fluvial.engines.engine.world import World
from fluvial.engines.methods.table import Dpo, Raft
from fluvial.models.lora import use_adapter


@pytest.mark.parametrize(
    ("old", "decays"),
    [
        ("old=none", [0.0, 0.0, 0.0, 0.0]),
        ("old.rise=0.2 old.cap=0.5", [0.2, 0.4, 0.5, 0.5]),
        ("old.rise=0.1 old.cap=0.5 old.unit=updates", [0.2, 0.4, 0.5, 0.5]),
        ("old.rise=0.3 old.cap=0.4 old.delay=2", [0.0, 0.0, 0.3, 0.4]),
    ],
)
def test_the_old_policy_follows(one: World, old: str, decays: list[float]) -> None:
    """After rollout n it is d old + (1 - d) policy; without one the policy itself is compared with."""
    run = spy(one, f"nft ode lora fast {old} updates=8 passes.epochs=2 kl.coef=0.1")
    names = {name for name in run.weights() if ".old." in name}
    assert bool(names) == (old != "old=none")
    expected = {name: tensor for name, tensor in run.weights().items() if name in names}
    for n, decay in enumerate(decays):
        before = run.weights()
        run.rollout()
        now, first = run.weights(), run.infos[2 * n]
        for name in names:
            policy = now[name.replace(".old.", ".default.")]
            expected[name] = decay * expected[name] + (1 - decay) * policy
            torch.testing.assert_close(now[name], expected[name])
        # Policy and old policy agree in a rollout's first update where they were made to be the same after the last.
        assert (first.mean["drift"] == 0.0) == (n == 0 or decays[n - 1] == 0)
        assert run.infos[2 * n + 1].mean["drift"] > 0
        # Both updates of a rollout compare with the policy that made it.
        assert "old" in run.updates[2 * n].items.predictions or not names
        for update in run.updates[2 * n : 2 * n + 2]:
            assert all(torch.equal(update.policy[name], before[name]) for name in names)


def test_the_old_policy_makes_the_rollouts(one: World) -> None:
    """Images change with it, and not with the policy."""
    seen = {}
    for moved in ("none", "default", "old"):
        run = spy(one, "nft ode lora")
        if moved != "none":
            for name, tensor in run.trainer.engine.sharded.shards().items():
                if f".{moved}." in name:
                    tensor.add_(0.3)
        run.rollout()
        seen[moved] = run.trajectories[0].final
        # What it is compared with is the policy that made the samples.
        items, module = run.updates[0].items, run.trainer.engine.module
        if moved == "old":
            for name, tensor in run.trainer.engine.sharded.shards().items():
                tensor.copy_(run.updates[0].policy[name])  # it has moved on after the rollout
            with use_adapter(module, "old"):
                torch.testing.assert_close(items.predictions["old"], run.velocity(items))
    assert torch.equal(seen["none"], seen["default"])
    assert not torch.allclose(seen["none"], seen["old"], atol=1e-2)


@pytest.mark.parametrize(
    ("best", "reward", "expected"),
    [
        (0.25, [1, 2, 3, 4, 8, 7, 6, 5], [0, 0, 0, 1, 1, 0, 0, 0]),
        (0.5, [1, 2, 3, 4, 8, 7, 6, 5], [0, 0, 1, 1, 1, 1, 0, 0]),
        (0.01, [1, 2, 3, 4, 8, 7, 6, 5], [0, 0, 0, 1, 1, 0, 0, 0]),
        (0.45, [1, 2, 3, 4, 8, 7, 6, 5], [0, 0, 0, 1, 1, 0, 0, 0]),  # of 1.8 samples one
        (0.7, [1, 2, 3, 4, 8, 7, 6, 5], [0, 0, 1, 1, 1, 1, 0, 0]),  # of 2.8 two
        (1.0, [1, 2, 3, 4, 5, 5, 5, 5], [1, 1, 1, 1, 0, 0, 0, 0]),
        (0.25, [2, 2, 1, 2, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]),
        (0.5, [1, 2, 2, 2, 3, 1, 3, 3], [0, 1, 1, 0, 1, 0, 1, 0]),
    ],
)
def test_what_raft_keeps(best: float, reward: list[float], expected: list[float]) -> None:
    """The best part of each group, at least one; of equal ones the first; nothing of a group whose rewards are equal."""
    rewards, group = torch.tensor(reward, dtype=torch.float32), torch.arange(8) // 4
    assert Raft(best=best).choose_best(rewards, group).tolist() == expected
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(0))  # groups need not lie together
    kept = Raft(best=best).choose_best(rewards[shuffled], group[shuffled])
    assert kept.sum() == sum(expected)
    for part, size in ((0.58, 50), (0.53, 100), (0.84, 75)):  # the product is not whole in floating point
        best_of_one = Raft(best=part).choose_best(torch.arange(float(size)), torch.zeros(size, dtype=torch.int64))
        assert best_of_one.sum() == round(part * size)
    assert torch.equal(rewards[shuffled][kept > 0].sort().values, rewards[torch.tensor(expected) > 0].sort().values)


def test_online_preferences(one: World) -> None:
    """A pair for each group that is not all equal, of its best and its worst, at as many levels as are asked for."""
    rewards = {"some": lambda images, prompts: images.mean((1, 2, 3)) * torch.tensor([p != "0" for p in prompts])}
    line = "dpo ode sampling.prompts=4 noising.each=3 seed=8 data.order=draws"
    run = spy(one, line, tiny.job(rewards=rewards, prompts=("0", "1")))
    record = run.rollout()
    asked = run.prompts[::4]
    assert set(asked) == {"0", "1"}
    valid = [i for i, prompt in enumerate(asked) if prompt != "0"]
    assert valid == [0, 2, 3]
    final = run.trajectories[0].final
    reward = tiny.brightness(tiny.Tiny().decode(final), ())
    found = best_and_worst(reward, torch.arange(16) // 4)
    assert [preference.prompt.text for preference in run.preferences] == ["1"] * len(valid)
    for preference, group in zip(run.preferences, valid, strict=True):
        assert torch.equal(preference.win, final[found.win[4 * group]])
        assert torch.equal(preference.lose, final[found.lose[4 * group]])
    items = run.updates[0].items
    assert record["pairs"] == run.updates[0].over == len(items.level) == 3 * len(valid)
    assert items.x.shape == items.target.shape == (3 * len(valid), 2, *tiny.SHAPE)
    assert run.infos[0].loss == pytest.approx(0.6931, abs=1e-4)  # where the policy is the reference
    assert run.infos[0].grad_norm > 0


@pytest.mark.parametrize("line", ["dpo ode", "raft ode", "awm ode", "grpo", "grpo weighting=std_over_b", "chunk"])
def test_groups_that_are_all_equal(one: World, line: str) -> None:
    """They teach nothing, and the update is made all the same; no weight has a mean then, and no chunk a ratio."""
    job = tiny.job(rewards={"none": lambda images, prompts: torch.ones(len(prompts))})
    run = spy(one, f"{line} updates=2 passes.minibatches=2", job)
    record = run.rollout()
    assert len(run.infos) == 2
    assert all(info.grad_norm == info.loss == 0.0 for info in run.infos)
    assert record["update"] == 2
    assert record["reward"] == {"mean": 1.0, "std": 0.0}


@pytest.mark.parametrize("train", ["", "lora"])
def test_dpo_compares_with_the_start(one: World, train: str) -> None:
    """The reference stays what training started from; the first margin is 0, and the next the policy's distance from it."""
    run, errors = spy(one, f"dpo ode fast {train} updates=2"), []
    run.rollout(), run.rollout()
    items = run.updates[-1].items
    rows = tiny.Tiny().encode([run.preferences[int(i)].prompt.text for i in items.sample]).rows
    with torch.no_grad():
        for side in (0, 1):
            expected = tiny.Tiny().build()(items.x[:, side], rows, items.level)
            torch.testing.assert_close(items.predictions["ref"][:, side], expected)
    for name, tensor in run.trainer.engine.sharded.shards().items():
        tensor.copy_(run.updates[-1].policy[name])  # the policy before the last update
    with run.trainer.engine.inference() as module:
        cond = tiny.Tiny().encode([run.preferences[int(i)].prompt.text for i in items.sample])
        for side in (0, 1):
            v = tiny.Tiny().predict(module, items.x[:, side], items.level, cond)
            ours, ref = ((each - items.target[:, side]) ** 2 for each in (v, items.predictions["ref"][:, side]))
            errors.append((ours - ref).mean((1, 2, 3)))
    margin = -Dpo().beta / 2 * (errors[0] - errors[1])
    first, last = (info.mean for info in run.infos)
    assert first["margin"] == first["accuracy"] == 0.0
    assert abs(float(margin.mean())) > 1e-2
    assert last["margin"] == pytest.approx(float(margin.mean()), rel=1e-3)
    assert last["accuracy"] == pytest.approx(float((margin > 0).float().mean()))


def test_the_moving_average_of_a_kl_follows(one: World) -> None:
    """After n updates it is d average + (1 - d) policy, d = min(cap, rise n), and the KL to it joins the loss."""
    run = spy(one, "awm ode lora fast updates=3 kl.ema_coef=0.5 kl.ema_cap=0.3 kl.ema_rise=0.2")
    names = [name for name in run.weights() if ".ema." in name]
    assert names
    expected = {name: run.weights()[name] for name in names}
    for n, decay in enumerate((0.2, 0.3, 0.3)):
        run.rollout()
        now = run.weights()
        for name in names:
            expected[name] = decay * expected[name] + (1 - decay) * now[name.replace(".ema.", ".default.")]
            torch.testing.assert_close(now[name], expected[name])
        assert run.infos[n].mean["kl_ref"] == 0.0  # there is no other reference
        plain = -float(run.updates[n].items.signal.mean())  # on policy the ratio is 1
        assert (abs(run.infos[n].loss - plain) > 1e-6) is (n > 0)
