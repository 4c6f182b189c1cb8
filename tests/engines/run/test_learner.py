"""Learning from a rollout: which items an update is made of, in one update or several, on one rank or two."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers import tiny_jobs as tiny
from helpers.settings import settings_of
from helpers.spied_runs import STEPS, spy
from torch import Tensor

from fluvial.bench.counting import HostReads
from fluvial.core.advantages import group_advantages, multi_reward_advantages
from fluvial.core.random import key
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import World
from fluvial.engines.methods import StepKLConfig
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.batch import make_batch
from fluvial.engines.sampling.samplers import sampler_rule
from fluvial.engines.sampling.window import OneRecorded
from fluvial.engines.scoring.gather import Scoring


@pytest.mark.parametrize("line", ["grpo sampling.prompts=4", "awm ode sampling.prompts=4", "dpo ode sampling.prompts=8"])
def test_minibatches_partition_the_samples(one: World, line: str) -> None:
    """Every pair of a sample is in the same minibatch, and in one an epoch; each epoch has another order."""
    run = spy(one, f"{line} sampling.group=2 updates=4 passes.epochs=2 passes.minibatches=2")
    run.rollout()
    assert len(run.updates) == 4
    parts = []
    for update in run.updates:
        pairs = [(int(i), float(level)) for i, level in zip(update.items.sample, update.items.level, strict=True)]
        assert len(set(pairs)) == len(pairs)
        samples = {i for i, _ in pairs}
        assert len(samples) == 4
        assert len(pairs) == 4 * tiny.STEPS == update.over
        assert torch.equal(update.weight, torch.ones(len(pairs)))
        parts.append(samples)
    for first, second in (parts[:2], parts[2:]):
        assert first | second == set(range(8))
        assert not first & second
    assert parts[0] not in parts[2:]


@pytest.mark.bits
@pytest.mark.parametrize("passes", ["epochs", "minibatches"])
def test_the_old_velocity_of_awm(one: World, passes: str) -> None:
    """It is the policy's before the rollout's first update, in all of them; with one update there is none to keep."""
    run = spy(one, f"awm ode fast updates=2 passes.{passes}=2")
    start = run.weights()
    run.rollout()
    assert all(torch.equal(tensor, run.updates[0].policy[name]) for name, tensor in start.items())
    now = run.velocity(run.updates[0].items)
    for name, tensor in run.trainer.engine.sharded.shards().items():
        tensor.copy_(start[name])
    for update in run.updates:
        torch.testing.assert_close(update.items.predictions["old"], run.velocity(update.items))
    assert float((now - run.updates[0].items.predictions["old"]).norm()) > 0.01
    assert run.infos[0].max_abs["log_ratio"] == 0.0 < run.infos[1].max_abs["log_ratio"]
    alone = spy(one, "awm ode")
    alone.rollout()
    assert "old" not in alone.updates[0].items.predictions
    assert alone.infos[0].max_abs["log_ratio"] == 0.0


@pytest.mark.bits
@pytest.mark.parametrize("method", ["grpo", "guard"])
def test_what_is_old_is_the_rollouts(one: World, method: str) -> None:
    """In both updates the log-probs, and Guard's velocity; the ratio is 1 in the first alone."""
    run = spy(one, f"{method} fast updates=2 passes.epochs=2")
    run.rollout()
    known, velocity = run.trajectories[0].log_prob.T.flatten(), run.trajectories[0].velocity
    assert len(run.updates) == 2
    assert (velocity is not None) == (method == "guard")
    for update in run.updates:
        assert torch.equal(update.items.log_prob_old, known)
        if velocity is not None:
            assert torch.equal(update.items.predictions["old"], velocity.transpose(0, 1).flatten(0, 1))
    assert run.infos[0].max_abs["log_ratio"] == 0.0
    assert abs(run.infos[1].mean["log_ratio"]) > 1e-5


def test_the_loss_is_a_mean_over_the_minibatch(one: World) -> None:
    """Each of two halves is divided by its own number of items."""
    line = "grpo updates={0} passes.minibatches={0}"
    whole, halves = (spy(one, line.format(number)) for number in (1, 2))
    whole.rollout(), halves.rollout()
    assert [update.over for update in halves.updates] == [whole.updates[0].over / 2] * 2
    assert [len(update.items.level) for update in halves.updates] == [len(whole.updates[0].items.level) // 2] * 2


def test_steps_are_weighted_by_their_noise(one: World) -> None:
    """Relative to the mean over those that are learnt from, in their advantages."""
    line = "grpo window sampling.window.size=1 sampling.window.draw=group sampling.prompts=4 sampling.group=2 seed=3"
    found = []
    for weighting in ("none", "std_over_b"):
        run = spy(one, f"{line} weighting={weighting} engine.micro_batch=8")
        run.rollout()
        found.append(run.updates[0].items)
    before, after = found
    scale = after.transition.std / after.transition.b.abs()
    torch.testing.assert_close(after.signal, before.signal * scale / scale.mean())
    assert len(scale.unique()) > 1


def test_a_fraction_of_the_steps(one: World) -> None:
    """Half of each sample's steps, drawn for each sample and rollout; the loss is their mean."""
    run, drawn = spy(one, "grpo trained=random trained.fraction=0.5 updates=2 engine.micro_batch=8"), []
    for _ in range(2):
        record = run.rollout()
        update = run.updates[-1]
        steps: list[set[float]] = [set() for _ in range(8)]
        for i, level in zip(update.items.sample, update.items.level, strict=True):
            steps[int(i)].add(float(level))
        assert [len(levels) for levels in steps] == [2] * 8
        assert update.over == record["pairs"] == 16
        drawn.append(tuple(map(frozenset, steps)))
    assert len(set(drawn[0])) > 1
    assert drawn[0] != drawn[1]


def test_one_step_of_each_sample_late_ones_more_often() -> None:
    """Step n of three is drawn with odds n; of a rollout all samples have the same."""
    drawn = torch.stack([OneRecorded("rollout", "late").mask(key(n), 4, 3) for n in range(3000)])
    assert torch.equal(drawn, drawn[:, :1].expand_as(drawn))
    assert torch.equal(drawn.sum(2), torch.ones(3000, 4))
    torch.testing.assert_close(drawn[:, 0].mean(0), torch.tensor([1, 2, 3]) / 6, rtol=0, atol=0.03)
    assert (OneRecorded("sample", "late").mask(key(2), 5000, 50).sum(1) == 1).all()  # two draws of sample 4280 are equal


def test_the_first_steps(one: World) -> None:
    """Every sample's noisiest steps are trained on; the last one takes noise in the rollout, and is not."""
    run = spy(one, "grpo trained=first trained.fraction=0.99 engine.micro_batch=8")
    record = run.rollout()
    update, levels = run.updates[-1], run.trainer.schedule.levels
    assert update.over == record["pairs"] == 8 * (tiny.STEPS - 1)
    assert set(update.items.level.tolist()) == set(levels[: tiny.STEPS - 1].tolist())
    last = run.trajectories[0]
    assert last.log_prob.shape[1] == tiny.STEPS
    assert not torch.equal(last.x_next[:, -1], last.x[:, -1])


@pytest.mark.parametrize(
    ("line", "items", "over"),
    [
        ("grpo", 4, 8),  # they are not computed, and the loss is still a mean over all
        ("grpo advantage.drop_zero=True", 4, 4),
        ("grpo advantage.drop_zero=True kl.coef=0.1", 4, 4),
        ("grpo kl.coef=0.1", 8, 8),
        ("raft ode best=0.25", 1, 1),  # which fits what it keeps
    ],
)
def test_samples_without_advantage(one: World, line: str, items: int, over: int) -> None:
    """They get neither loss nor KL and do not count where they are dropped; otherwise they get the KL, and count."""
    rewards = {"half": lambda images, prompts: torch.arange(len(prompts)) % 2 * torch.tensor([p == "0" for p in prompts])}
    run = spy(one, f"{line} seed=1 engine.micro_batch=8", tiny.job(rewards=rewards, prompts=("0", "1")))
    run.rollout()
    assert set(run.prompts) == {"0", "1"}
    assert (run.infos[0].items, run.updates[0].over) == (items * tiny.STEPS, over * tiny.STEPS)


def test_the_kl_has_the_published_weight_of_the_sampler() -> None:
    """Times |dt| for Flow-SDE, whose std is a rate in the published code, and the exact KL of the others."""
    found = {kind: StepKLConfig(0.1).weight_of(sampler_rule(kind)) for kind in ("flow_sde", "dance_sde", "cps", "wan_sde")}
    assert found == {"flow_sde": "rate", "dance_sde": "exact", "cps": "exact", "wan_sde": "exact"}


@pytest.mark.parametrize(("kind", "factor"), [("flow_sde", "rate"), ("cps", "exact")])
def test_the_loss_has_that_weight(one: World, kind: str, factor: str) -> None:
    losses = []
    for weight in ("auto", factor):
        line = f"grpo sampling.sampler={kind} window sampling.window.high=3 fast updates=2 passes.epochs=2 kl.coef=9.0"
        run = spy(one, f"{line} kl.weight={weight}")
        run.rollout()
        losses.append(run.infos[1].loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("shared", [False, True])
def test_shared_noise(one: World, shared: bool) -> None:
    """The samples of a group begin alike, and end apart."""
    run = spy(one, f"grpo sampling.shared_noise={shared}")
    run.rollout()
    first, final = run.trajectories[0].x[:, 0].unflatten(0, (2, 4)), run.trajectories[0].final.unflatten(0, (2, 4))
    assert torch.equal(first, first[:, :1].expand_as(first)) == shared
    assert not torch.equal(first[0, 0], first[1, 0])
    assert float((final[:, 0] - final[:, 1]).norm()) > 0.1


@pytest.mark.parametrize("combine", ["sum", "gdpo", "advantages"])
def test_several_rewards(one: World, combine: str) -> None:
    """Their advantages are those of core/advantages.py, for the weights that were asked for."""
    line = f"grpo rewards=('contrast=0.5','brightness=-2') advantage.combine={combine} advantage.clip=1.2"
    run = spy(one, f"{line} engine.micro_batch=8")
    record = run.rollout()
    images = tiny.Tiny().decode(run.trajectories[0].final)
    rewards = torch.stack([tiny.contrast(images, ()), tiny.brightness(images, ())], dim=1)
    weights, group = torch.tensor([0.5, -2.0]), torch.arange(8) // 4
    each = [group_advantages(column, group) for column in rewards.T]
    expected = {
        "sum": group_advantages(rewards @ weights, group),
        "gdpo": multi_reward_advantages(rewards, weights, group),
        "advantages": weights[0] * each[0] + weights[1] * each[1],  # MixGRPO's: the sum is not normalised again
    }
    torch.testing.assert_close(run.updates[0].items.signal[:8], expected[combine].clamp(-1.2, 1.2), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected["sum"], expected["gdpo"], atol=1e-2)
    means = {"contrast": float(rewards[:, 0].mean()), "brightness": float(rewards[:, 1].mean())}
    assert record["rewards"] == pytest.approx(means)
    assert record["reward"]["mean"] == pytest.approx(float((rewards @ weights).mean()))


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_make_the_update_of_one(tmp_path: Path) -> None:
    """Rewards to the bit; gradients, clip and weights to the order of float32 sums; for every objective."""
    one, two = (launch.on_ranks(size, "workers.objective_ranks:rollouts", tmp_path)[0] for size in (1, 2))
    assert list(one) == list(two)
    assert len(one) == 33
    assert one["refilled"]["refill"]["replaced"] > one["refilled"]["refill"]["flat"] > 0
    for name, alone in one.items():
        both = two[name]
        assert alone["reward"] == both["reward"], name
        assert alone["refill"] == both["refill"], name
        assert alone["pairs"] == both["pairs"], name
        assert alone["correction"] == pytest.approx(both["correction"], rel=1e-5), name
        for first, second in zip(alone["gradients"], both["gradients"], strict=True):
            a, b = torch.tensor(first), torch.tensor(second)
            assert float(a.norm()) > 0, name
            assert float((a - b).norm() / a.norm()) < 1e-5, name


def scaled(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the brightness, times a number that the prompt says; it has a gradient."""
    return images.flatten(1).mean(1) * torch.tensor([1.0 + int(prompt) for prompt in prompts])


@pytest.mark.bits
@pytest.mark.parametrize("line", ["grpo", "nft old=none ode", "dpo ode", "alignprop ode last=2"])
def test_batches_of_two_schedules_can_be_collected_before_either_update(one: World, line: str) -> None:
    """Each update has the schedule, sampler, prompts and size of its own rollout: that of a trainer which makes no other."""
    run = tiny.config(Path("out"), **{"sampling": STEPS, **settings_of(line), "rewards": ("scaled",)})
    rollout = run.method.sampling

    def trained() -> Trainer:
        return Trainer(run, tiny.job(rewards={"scaled": scaled}), one)

    def made(trainer: Trainer, number: int) -> tuple[Any, Any]:
        """Return a batch: each has another prompt, noise levels and a size of its own."""
        keys = key(7 + number)
        spec = trainer.sampler.specify(keys, [Prompt(tiny.PROMPTS[2 * number])] * rollout.prompts, 0)
        schedule, stochastic = spec.sampling.schedule, spec.sampling.stochastic
        levels = schedule.levels ** (1 + number)
        if stochastic is not None:
            stochastic = replace(stochastic, transition=rollout.bound_sampler(levels))
        schedule, shape = schedule._replace(levels=levels), ((1, 4, 4), (1, 2, 8))[number]
        sampling = replace(spec.sampling, schedule=schedule, stochastic=stochastic, shape=shape)
        transitions = None if stochastic is None else stochastic.transition(levels[:-1], levels[1:])
        spec = spec._replace(sampling=sampling, transitions=transitions)
        samples = make_batch(trainer.sampler.generate(spec, trainer.runners))
        return trainer.run.score(trainer.run._batch(spec, made=samples, scoring=Scoring(trainer.runners))), keys

    def weights(trainer: Trainer) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in trainer.engine.sharded.shards().items()}

    alone, together = list[dict[str, Tensor]](), list[dict[str, Tensor]]()
    for number in (0, 1):
        with trained() as trainer:
            trainer.learn(*made(trainer, number))
            alone.append(weights(trainer))
    with trained() as trainer:
        state, counters = trainer.engine.state(), trainer.engine.counters()
        start = {name: tensor.clone() for name, tensor in state.items()}
        for batch, keys in [made(trainer, number) for number in (0, 1)]:
            trainer.engine.restore({name: tensor.clone() for name, tensor in start.items()}, counters)
            trainer.learn(batch, keys)
            together.append(weights(trainer))
    assert any(not torch.equal(alone[0][name], alone[1][name]) for name in alone[0])
    for each, other in zip(alone, together, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in each.items())


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("line", ["grpo", "guard", "dppo", "grpo cps"])
def test_no_read_a_micro_batch(one: World, line: str, guidance: float) -> None:
    """The host waits for the device as often whatever the number of micro-batches, once: to read the results back."""
    for micro_batch in (16, 8, 2):
        words = f"{line} window sampling.window.high=3 engine.micro_batch={micro_batch} sampling.guidance.scale={guidance}"
        run, counters = spy(one, words), list[int]()
        optimize = run.trainer.engine.update

        def counted(*args: Any, counters: list[int] = counters, optimize: Any = optimize, **kwargs: Any) -> Any:
            with HostReads() as counter:
                info = optimize(*args, **kwargs)
            counters.append(counter.total)
            return info

        run.trainer.engine.update = counted  # type: ignore[method-assign]
        run.rollout()
        run.trainer.close()
        assert counters == [1]
        assert torch.isfinite(next(iter(run.weights().values()))).all()
