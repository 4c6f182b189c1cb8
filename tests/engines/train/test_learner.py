"""What is learnt from a rollout: whose old policy, which pairs, which weights; one update or several; one rank or two."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import launch
import pytest
import tiny_jobs as tiny
import torch
from torch import Tensor

from fluvial.core import correction, gaussian
from fluvial.core.advantages import group_advantages, multi_reward_advantages
from fluvial.core.dpo import best_and_worst
from fluvial.core.rollout import Trajectory
from fluvial.engines.fsdp.optimizer import OptimizerConfig
from fluvial.engines.fsdp.world import World, init_world
from fluvial.engines.objectives.table import Awm, Distill, Dpo, Guard, Nft, Raft
from fluvial.engines.rollout.items import Items
from fluvial.engines.train.config import (
    AdvantageConfig,
    CorrectionConfig,
    KLConfig,
    NoisingConfig,
    RolloutConfig,
    TrainConfig,
)
from fluvial.models.lora import adapter_parameters, use_adapter

STEPS = RolloutConfig(prompts=2, group=4, steps=tiny.STEPS, eta=0.5)
ODE = RolloutConfig(prompts=2, group=4, steps=tiny.STEPS, sampler="ode", eta=0.0)
FAST = OptimizerConfig(lr=0.05)


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """The world of this process."""
    with init_world() as world:
        yield world


class Update(NamedTuple):
    """What an optimizer update was made of."""

    items: Items
    weight: Tensor
    over: float  # what the sum of its losses is divided by
    policy: dict[str, Tensor]  # before it


class Spied(tiny.Run):
    """A run that notes its trajectories, its preferences, and what each update was made of."""

    def __init__(self, config: TrainConfig, world: World, job: Any = None) -> None:
        super().__init__(config, world, job)
        self.trajectories: list[Trajectory] = []
        self.updates: list[Update] = []
        self.scores = torch.zeros(0, 0)  # rewards [B, K] of the last rollout
        engine, learner = self.trainer.engine, self.trainer.learner
        optimize, learn, learn_given = engine.update, learner.items, learner.preference_items

        def noted(items: Items, loss_fn: Any, weight: Tensor, **options: Any) -> Any:
            self.updates.append(Update(items, weight, options["count"], self.weights()))
            return optimize(items, loss_fn, weight, **options)

        def learnt(samples: Any, *args: Any) -> Any:
            self.trajectories.append(samples.trajectory)
            self.prompts, self.scores = list(samples.prompts), args[0]
            return learn(samples, *args)

        def learnt_given(given: Any, *args: Any) -> Any:
            self.preferences = list(given)
            return learn_given(given, *args)

        engine.update, learner.items, learner.preference_items = noted, learnt, learnt_given  # type: ignore

    def velocity(self, items: Items) -> Tensor:
        """The velocity of the policy as it is, or of the adapter that computes."""
        with self.trainer.engine.inference() as module:
            cond = self.trainer.job.model.encode([self.prompts[int(i)] for i in items.sample])
            return self.trainer.job.model.predict(module, items.x, items.level, cond)


# Several updates on one rollout.


def test_the_old_log_prob_is_the_rollouts(one: World, tmp_path: Path) -> None:
    """In every update: the ratio is 1 in the first, and in the second what the moved policy says of the stored steps."""
    run = Spied(tiny.config(tmp_path, rollout=STEPS, epochs=2, updates=2, optimizer=FAST), one)
    moved: list[Tensor] = []
    optimize = run.trainer.engine.update

    def by_hand(items: Items, loss_fn: Any, weight: Tensor, **options: Any) -> Any:
        assert items.level_next is not None
        assert items.x_next is not None
        assert items.log_prob_old is not None
        transition = run.trainer.learner.sampler(items.level, items.level_next)
        log_prob = gaussian.log_prob(transition, items.x, run.velocity(items), items.x_next)
        moved.append((log_prob - items.log_prob_old).mean())
        return optimize(items, loss_fn, weight, **options)

    run.trainer.engine.update = by_hand  # type: ignore[method-assign]
    run.rollout()
    known = run.trajectories[0].log_prob.T.flatten()
    for update in run.updates:
        assert update.items.log_prob_old is not None
        assert torch.equal(update.items.log_prob_old, known)
    first, second = run.infos
    assert first.max_abs["log_ratio"] == 0.0
    assert abs(second.mean["log_ratio"]) > 1e-5
    assert second.mean["log_ratio"] == pytest.approx(float(moved[1]), rel=1e-3)


@pytest.mark.parametrize("objective", ["clipped", "awm", "dpo"])
def test_minibatches_partition_the_samples(one: World, tmp_path: Path, objective: str) -> None:
    """Every pair of a sample is in the same minibatch, and in one an epoch; each epoch has another order."""
    kinds: dict[str, dict[str, Any]] = {
        "clipped": {"rollout": replace(STEPS, prompts=4, group=2)},
        "awm": {"rollout": replace(ODE, prompts=4, group=2), "objective": Awm()},
        "dpo": {"rollout": replace(ODE, prompts=8, group=2), "objective": Dpo()},
    }
    run = Spied(tiny.config(tmp_path, epochs=2, minibatches=2, updates=4, **kinds[objective]), one)
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


def test_the_loss_is_a_mean_over_the_minibatch(one: World, tmp_path: Path) -> None:
    """Gradients of two halves, taken at the same weights, average to that of the whole."""
    gradients: dict[int, list[Tensor]] = {}
    for minibatches in (1, 2):
        still = OptimizerConfig(lr=1e-12, weight_decay=0.0, betas=(0.5, 0.999), max_grad_norm=1e9)
        changes = {"minibatches": minibatches, "updates": minibatches, "optimizer": still}
        run = tiny.Run(tiny.config(tmp_path, rollout=STEPS, **changes), one)
        optimize, moments = run.trainer.engine.update, [torch.zeros(())]

        def noted(*args: Any, run: Any = run, moments: Any = moments, optimize: Any = optimize, **options: Any) -> Any:
            info = optimize(*args, **options)
            moments.append(torch.cat([moment.flatten() for moment in run.gradient().values()]))
            return info

        run.trainer.engine.update = noted  # type: ignore[method-assign]
        run.rollout()
        assert [info.items for info in run.infos] == [32 // minibatches] * minibatches
        # moment <- moment / 2 + gradient / 2
        gradients[minibatches] = [2 * after - before for before, after in itertools.pairwise(moments)]
    (whole,), halves = gradients[1], gradients[2]
    assert float(whole.norm()) > 1e-3
    assert float((halves[0] - halves[1]).norm()) > 0.1 * float(whole.norm())
    torch.testing.assert_close((halves[0] + halves[1]) / 2, whole, rtol=1e-4, atol=1e-6 * float(whole.norm()))


def test_the_old_velocity_of_awm(one: World, tmp_path: Path) -> None:
    """It is the policy's before the rollout's first update, in all of them; with one update there is none to keep."""
    run = Spied(tiny.config(tmp_path, rollout=ODE, objective=Awm(), epochs=2, updates=2, optimizer=FAST), one)
    start = run.weights()
    run.rollout()
    for update in run.updates:
        assert update.items.v_old is not None
        assert torch.equal(update.items.v_old, run.updates[0].items.v_old)  # type: ignore[arg-type]
    assert all(torch.equal(tensor, run.updates[0].policy[name]) for name, tensor in start.items())
    now = run.velocity(run.updates[0].items)
    for name, tensor in run.trainer.engine.sharded.shards().items():
        tensor.copy_(start[name])
    torch.testing.assert_close(run.updates[0].items.v_old, run.velocity(run.updates[0].items))
    assert float((now - run.updates[0].items.v_old).norm()) > 0.01  # type: ignore[operator]
    assert run.infos[0].max_abs["log_ratio"] == 0.0
    assert run.infos[1].max_abs["log_ratio"] > 0.0

    alone = Spied(tiny.config(tmp_path, rollout=ODE, objective=Awm()), one)
    alone.rollout()
    assert alone.updates[0].items.v_old is None
    assert alone.infos[0].max_abs["log_ratio"] == 0.0


def test_the_old_velocity_of_guard(one: World, tmp_path: Path) -> None:
    """It is what the rollout recorded, so that a rollout of several updates needs no pass of its own."""
    run = Spied(tiny.config(tmp_path, rollout=STEPS, objective=Guard(), epochs=2, updates=2, optimizer=FAST), one)
    run.rollout()
    recorded = run.trajectories[0].velocity
    assert recorded is not None
    for update in run.updates:
        assert torch.equal(update.items.v_old, recorded.transpose(0, 1).flatten(0, 1))  # type: ignore[arg-type]


# DiffusionNFT's old policy.

OLD: dict[str, tuple[Nft, list[float]]] = {
    "none": (Nft(old="none"), [0.0, 0.0, 0.0, 0.0]),
    "linear": (Nft(old="linear", old_rise=0.2, old_cap=0.5), [0.2, 0.4, 0.5, 0.5]),
    "by updates": (Nft(old="linear", old_rise=0.1, old_cap=0.5, old_unit="updates"), [0.2, 0.4, 0.5, 0.5]),
    "delayed": (Nft(old="delayed", old_rise=0.3, old_cap=0.4, old_delay=2), [0.0, 0.0, 0.3, 0.4]),
}


@pytest.mark.parametrize("old", OLD)
def test_the_old_policy_follows(one: World, tmp_path: Path, old: str) -> None:
    """After rollout n it is d old + (1 - d) policy; without one the policy itself is compared with."""
    objective, decays = OLD[old]
    run = Spied(
        tiny.config(
            tmp_path, rollout=ODE, objective=objective, train="lora", updates=8, epochs=2, optimizer=FAST,
            kl=KLConfig(0.1),
        ),
        one,
    )  # fmt: skip
    names = {name for name in run.weights() if ".old." in name}
    assert bool(names) == (old != "none")
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
        assert run.updates[2 * n].items.v_old is not None or old == "none"
        for update in run.updates[2 * n : 2 * n + 2]:
            assert all(torch.equal(update.policy[name], before[name]) for name in names)


def test_the_old_policy_makes_the_rollouts(one: World, tmp_path: Path) -> None:
    """Images change with it, and not with the policy."""
    seen = {}
    for moved in ("none", "default", "old"):
        run = Spied(tiny.config(tmp_path, rollout=ODE, objective=Nft(), train="lora"), one)
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
                torch.testing.assert_close(items.v_old, run.velocity(items))
    assert torch.equal(seen["none"], seen["default"])
    assert not torch.allclose(seen["none"], seen["old"], atol=1e-2)


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": Nft(old_rise=0.3), "rollout": ODE, "train": "lora", "kl": KLConfig(0.1)},
        {"objective": Dpo(), "rollout": ODE, "train": "full"},
        {"objective": Awm(), "rollout": ODE, "minibatches": 2, "epochs": 2, "updates": 12},
        {"rollout": replace(STEPS, fraction=0.5, window=2), "minibatches": 2, "updates": 6, "kl": KLConfig(0.1)},
    ],
    ids=["nft", "dpo", "awm", "clipped"],
)
def test_a_resumed_run_is_the_same(one: World, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Three rollouts = two, a checkpoint, and one more, to the bit: old policy, reference, shuffles and noise included."""
    run = tiny.config(tmp_path / "run", **{"updates": 3, "optimizer": OptimizerConfig(lr=0.05, ema_decay=0.9), **changes})
    whole = tiny.Run(run, one)
    for _ in range(3):
        record = whole.rollout()
    before = tiny.Run(run, one)
    for _ in range(2):
        before.rollout()
    before.trainer.save()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    after = tiny.Run(run, one)
    after.trainer.resume(saved)
    again = after.rollout()
    state, expected = after.trainer.engine.state(), whole.trainer.engine.state()
    assert any(".old." in name for name in state) == isinstance(run.objective, Nft)
    for name, tensor in expected.items():
        assert torch.equal(torch.as_tensor(state[name].full_tensor()), tensor.full_tensor()), name  # type: ignore[attr-defined]
    assert all(torch.equal(tensor, after.weights()[name]) for name, tensor in whole.weights().items())
    for name in ("update", "samples", "loss", "grad_norm", "reward", "objective"):
        assert again[name] == record[name], name


# Which pairs.


def test_a_fraction_of_the_steps(one: World, tmp_path: Path) -> None:
    """Half of each sample's steps, drawn for each sample and rollout; the loss is their mean."""
    run = Spied(tiny.config(tmp_path, rollout=replace(STEPS, fraction=0.5), updates=2, micro_batch=8), one)
    drawn = []
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


def test_the_first_steps(one: World, tmp_path: Path) -> None:
    """Every sample's noisiest steps are trained on; the last one takes noise in the rollout, and is not."""
    run = Spied(tiny.config(tmp_path, rollout=replace(STEPS, fraction=0.99, pick="first"), micro_batch=8), one)
    record = run.rollout()
    update, levels = run.updates[-1], run.trainer.schedule.levels
    assert update.over == record["pairs"] == 8 * (tiny.STEPS - 1)
    assert set(update.items.level.tolist()) == set(levels[: tiny.STEPS - 1].tolist())
    last = run.trajectories[0]
    assert last.log_prob.shape[1] == tiny.STEPS
    assert not torch.equal(last.x_next[:, -1], last.x[:, -1])


@pytest.mark.parametrize(("coef", "drop"), [(0.0, True), (0.1, True), (0.1, False)])
def test_samples_without_advantage_are_dropped_if_asked(one: World, tmp_path: Path, coef: float, drop: bool) -> None:
    """They get neither loss nor KL, and do not count; otherwise they get the KL, and count."""
    rewards = {"half": lambda images, prompts: torch.arange(len(prompts)) % 2 * torch.tensor([p == "0" for p in prompts])}
    config = tiny.config(
        tmp_path, rollout=STEPS, micro_batch=8, seed=1, kl=KLConfig(coef), advantage=AdvantageConfig(drop_zero=drop)
    )
    run = Spied(config, one, tiny.job(rewards=rewards, prompts=("0", "1")))
    run.rollout()
    assert set(run.prompts) == {"0", "1"}
    kept = 4 if drop else 8
    assert (run.infos[0].items, run.updates[0].over) == (kept * tiny.STEPS, kept * tiny.STEPS)


@pytest.mark.parametrize(("sampler", "factor"), [("flow_sde", "rate"), ("dance_sde", "exact"), ("cps", "exact")])
def test_the_kl_has_the_published_weight_of_the_sampler(one: World, tmp_path: Path, sampler: str, factor: str) -> None:
    """Times |dt| for Flow-SDE, whose std is a rate in the published code, and the exact KL of the others."""
    rollout = replace(STEPS, sampler=sampler, window=2, window_high=tiny.STEPS - 1)
    learners = [
        Spied(tiny.config(tmp_path, rollout=rollout, kl=KLConfig(0.1, weight)), one).trainer.learner
        for weight in ("auto", factor)
    ]
    assert learners[0].loss_config == learners[1].loss_config
    assert learners[0].loss_config.kl_weight == factor


def test_pairs_without_advantage_count(one: World, tmp_path: Path) -> None:
    """They are not computed, and the loss is still a mean over all; but for RAFT, which fits what it keeps."""
    rewards = {"half": lambda images, prompts: torch.arange(len(prompts)) % 2 * torch.tensor([p == "0" for p in prompts])}
    job = tiny.job(rewards=rewards, prompts=("0", "1"))
    found = {}
    for objective, rollout in ((None, STEPS), (Raft(best=0.25), ODE)):
        changes = {} if objective is None else {"objective": objective}
        run = Spied(tiny.config(tmp_path, rollout=rollout, micro_batch=8, seed=1, **changes), one, job)
        run.rollout()
        assert set(run.prompts) == {"0", "1"}
        found[objective] = (run.infos[0].items, run.updates[0].over)
    assert found[None] == (4 * tiny.STEPS, 8 * tiny.STEPS)
    assert found[Raft(best=0.25)] == (tiny.STEPS, tiny.STEPS)


def test_shared_noise(one: World, tmp_path: Path) -> None:
    """The samples of a group begin alike, and end apart."""
    for shared in (False, True):
        run = Spied(tiny.config(tmp_path, rollout=replace(STEPS, shared_noise=shared)), one)
        run.rollout()
        first, final = run.trajectories[0].x[:, 0].unflatten(0, (2, 4)), run.trajectories[0].final.unflatten(0, (2, 4))
        assert torch.equal(first, first[:, :1].expand_as(first)) == shared
        assert not torch.equal(first[0, 0], first[1, 0])
        assert float((final[:, 0] - final[:, 1]).norm()) > 0.1


# Correction.


def corrected(tmp_path: Path, one: World, mode: Any, threshold: float, level: Any = "step") -> tuple[Spied, dict[str, Any]]:
    """Return a run whose rollout computed in bfloat16, and its record."""
    run = Spied(
        tiny.config(
            tmp_path, rollout=replace(STEPS, autocast=True), correction=CorrectionConfig(mode, level, threshold),
            optimizer=OptimizerConfig(max_grad_norm=1e9),
        ),
        one,
    )  # fmt: skip
    return run, run.rollout()


@pytest.mark.parametrize("level", ["step", "trajectory"])
@pytest.mark.parametrize(
    ("mode", "threshold"), [("truncate", 1.0), ("truncate", 1e30), ("reject", 1.0001), ("mask", 1.0001)]
)
def test_the_weights_are_the_corrections(one: World, tmp_path: Path, mode: Any, threshold: float, level: Any) -> None:
    """The first ratio is exactly 1, and each pair has the weight that core/correction.py gives the two log-probs."""
    run, record = corrected(tmp_path, one, mode, threshold, level)
    assert run.infos[0].max_abs["log_ratio"] == 0.0
    assert record["correction"]["gap_mean"] > 1e-6
    assert all(record["correction"][name] > 0 for name in ("gap_mean", "gap_p99", "kl", "effective"))
    items, known = run.updates[0].items, run.trajectories[0].log_prob
    assert items.log_prob_old is not None
    own = items.log_prob_old.unflatten(0, (tiny.STEPS, 8)).T
    weight, info = correction.rollout_weights(own, known, mode=mode, threshold=threshold, level=level)
    assert float((own - known).abs().max()) > 1e-5
    assert torch.equal(run.updates[0].weight, torch.ones(8 * tiny.STEPS))  # a KL term is not corrected
    advantage = group_advantages(run.scores[:, 0], torch.arange(8) // 4)
    torch.testing.assert_close(items.target_weight, (weight * advantage[:, None]).T.flatten(), rtol=1e-4, atol=1e-5)
    assert record["correction"]["limited"] == pytest.approx(float(info.limited))
    if threshold < 1e30:
        assert 0 < record["correction"]["limited"] < 1


def test_the_weights_scale_the_gradient(one: World, tmp_path: Path) -> None:
    """A gradient of untruncated weights is not that of truncated ones; where all pairs are masked there is none."""
    free, held = (corrected(tmp_path, one, "truncate", threshold)[0] for threshold in (1e30, 1.0))
    masked, _ = corrected(tmp_path, one, "mask", 1.0)
    apart = torch.cat([(a - held.gradient()[name]).flatten() for name, a in free.gradient().items()])
    assert float(apart.norm()) > 1e-7
    assert free.infos[0].grad_norm != held.infos[0].grad_norm
    assert masked.infos[0].grad_norm == 0.0 < held.infos[0].grad_norm


def test_guard_with_a_correction(one: World, tmp_path: Path) -> None:
    """Its old velocity is then the update's own too, so that the first ratio is 1."""
    rollout = replace(STEPS, autocast=True)
    run = Spied(tiny.config(tmp_path, rollout=rollout, objective=Guard(), correction=CorrectionConfig("truncate")), one)
    run.rollout()
    recorded = run.trajectories[0].velocity
    assert recorded is not None
    assert not torch.equal(run.updates[0].items.v_old, recorded.transpose(0, 1).flatten(0, 1))  # type: ignore[arg-type]
    assert run.infos[0].max_abs["log_ratio"] == 0.0


# Several rewards.


@pytest.mark.parametrize("combine", ["sum", "gdpo"])
def test_several_rewards(one: World, tmp_path: Path, combine: Any) -> None:
    """Their advantages are those of core/advantages.py, for the weights that were asked for."""
    changes = {"rewards": ("contrast=0.5", "brightness=-2"), "advantage": AdvantageConfig(combine=combine, clip=1.2)}
    run = Spied(tiny.config(tmp_path, rollout=STEPS, micro_batch=8, **changes), one)
    record = run.rollout()
    images = tiny.Tiny().decode(run.trajectories[0].final)
    rewards = torch.stack([tiny.contrast(images, ()), tiny.brightness(images, ())], dim=1)
    weights, group = torch.tensor([0.5, -2.0]), torch.arange(8) // 4
    expected = {
        "sum": group_advantages(rewards @ weights, group), "gdpo": multi_reward_advantages(rewards, weights, group),
    }  # fmt: skip
    torch.testing.assert_close(
        run.updates[0].items.target_weight[:8], expected[combine].clamp(-1.2, 1.2), rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(expected["sum"], expected["gdpo"], atol=1e-2)
    assert record["rewards"] == pytest.approx(
        {"contrast": float(rewards[:, 0].mean()), "brightness": float(rewards[:, 1].mean())}
    )
    assert record["reward"]["mean"] == pytest.approx(float((rewards @ weights).mean()))


# RAFT and DPO.


@pytest.mark.parametrize(
    ("best", "reward", "expected"),
    [
        (0.25, [1, 2, 3, 4, 8, 7, 6, 5], [0, 0, 0, 1, 1, 0, 0, 0]),
        (0.5, [1, 2, 3, 4, 8, 7, 6, 5], [0, 0, 1, 1, 1, 1, 0, 0]),
        (0.01, [1, 2, 3, 4, 8, 7, 6, 5], [0, 0, 0, 1, 1, 0, 0, 0]),
        (1.0, [1, 2, 3, 4, 5, 5, 5, 5], [1, 1, 1, 1, 0, 0, 0, 0]),
        (0.25, [2, 2, 1, 2, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]),
        (0.5, [1, 2, 2, 2, 3, 1, 3, 3], [0, 1, 1, 0, 1, 0, 1, 0]),
    ],
)
def test_what_raft_keeps(best: float, reward: list[float], expected: list[float]) -> None:
    """The best part of each group, at least one; of equal ones the first; nothing of a group whose rewards are equal."""
    rewards, group = torch.tensor(reward, dtype=torch.float32), torch.arange(8) // 4
    assert Raft(best=best).target_weight(rewards, torch.zeros(8), group).tolist() == expected
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(0))  # groups need not lie together
    kept = Raft(best=best).target_weight(rewards[shuffled], torch.zeros(8), group[shuffled])
    assert kept.sum() == sum(expected)
    assert torch.equal(rewards[shuffled][kept > 0].sort().values, rewards[torch.tensor(expected) > 0].sort().values)


def test_online_preferences(one: World, tmp_path: Path) -> None:
    """A pair for each group that is not all equal, of its best and its worst, at as many levels as are asked for."""
    rewards = {"some": lambda images, prompts: images.mean((1, 2, 3)) * torch.tensor([p != "0" for p in prompts])}
    rollout, job = replace(ODE, prompts=4), tiny.job(rewards=rewards, prompts=("0", "1"))
    run = Spied(tiny.config(tmp_path, rollout=rollout, objective=Dpo(), noising=NoisingConfig(3), seed=8), one, job)
    record = run.rollout()
    asked = run.prompts[::4]
    assert set(asked) == {"0", "1"}
    valid = [i for i, prompt in enumerate(asked) if prompt != "0"]
    assert valid == [0, 2, 3]
    final = run.trajectories[0].final
    reward = tiny.brightness(tiny.Tiny().decode(final), ())
    found = best_and_worst(reward, torch.arange(16) // 4)
    assert [preference.prompt for preference in run.preferences] == ["1"] * len(valid)
    for preference, group in zip(run.preferences, valid, strict=True):
        assert torch.equal(preference.win, final[found.win[4 * group]])
        assert torch.equal(preference.lose, final[found.lose[4 * group]])
    items = run.updates[0].items
    assert record["pairs"] == run.updates[0].over == len(items.level) == 3 * len(valid)
    assert items.x.shape == items.target.shape == (3 * len(valid), 2, *tiny.SHAPE)  # type: ignore[union-attr]
    assert run.infos[0].loss == pytest.approx(0.6931, abs=1e-4)  # where the policy is the reference
    assert run.infos[0].grad_norm > 0


@pytest.mark.parametrize("objective", [Dpo(), Raft(), Awm()])
def test_groups_that_are_all_equal(one: World, tmp_path: Path, objective: Any) -> None:
    """They teach nothing, and the update is made all the same."""
    job = tiny.job(rewards={"none": lambda images, prompts: torch.ones(len(prompts))})
    run = Spied(tiny.config(tmp_path, rollout=ODE, objective=objective, updates=2, minibatches=2), one, job)
    record = run.rollout()
    assert len(run.infos) == 2
    assert all(info.grad_norm == info.loss == 0.0 for info in run.infos)
    assert record["update"] == 2
    assert record["reward"] == {"mean": 1.0, "std": 0.0}


@pytest.mark.parametrize("train", ["full", "lora"])
def test_dpo_compares_with_the_start(one: World, tmp_path: Path, train: Any) -> None:
    """The reference stays what training started from, and the margin is the policy's distance from it."""
    run = Spied(tiny.config(tmp_path, rollout=ODE, objective=Dpo(), train=train, updates=2, optimizer=FAST), one)
    start, errors = tiny.Tiny().build(), {}
    for _ in range(2):
        run.rollout()
        items = run.updates[-1].items
        prompts = [run.preferences[int(i)].prompt for i in items.sample]
        rows = tiny.Tiny().encode(prompts).rows
        with torch.no_grad():
            for side in (0, 1):
                expected = start(items.x[:, side], rows, items.level)
                torch.testing.assert_close(items.v_ref[:, side], expected)  # type: ignore[index]
    for name, tensor in run.trainer.engine.sharded.shards().items():
        tensor.copy_(run.updates[-1].policy[name])  # the policy before the last update
    with run.trainer.engine.inference() as module:
        for side in (0, 1):
            v = tiny.Tiny().predict(module, items.x[:, side], items.level, tiny.Tiny().encode(prompts))
            of_policy, of_start = ((each - items.target[:, side]) ** 2 for each in (v, items.v_ref[:, side]))  # type: ignore
            errors[side] = (of_policy - of_start).mean((1, 2, 3))
    margin = -Dpo().beta / 2 * (errors[0] - errors[1])
    first, last = (info.mean for info in run.infos)
    assert first["margin"] == first["accuracy"] == 0.0
    assert abs(float(margin.mean())) > 1e-2
    assert last["margin"] == pytest.approx(float(margin.mean()), rel=1e-3)
    assert last["accuracy"] == pytest.approx(float((margin > 0).float().mean()))


def test_distillation_finds_its_teacher(one: World, tmp_path: Path) -> None:
    """The student comes near the teacher along its own walk, and the reference is left alone."""
    objective = Distill(teacher=Path("teacher"), match="velocity_mse")
    run = Spied(
        tiny.config(tmp_path, rollout=STEPS, objective=objective, updates=10, optimizer=OptimizerConfig(lr=0.03)), one
    )
    for _ in range(10):
        run.rollout()
    errors = [info.mean["error"] for info in run.infos]
    assert errors[-1] < 0.2 * errors[0]
    items = run.updates[-1].items
    teacher = tiny.Tiny(seed=1).build()
    with torch.no_grad():
        said = teacher(items.x, tiny.Tiny().encode([run.prompts[int(i)] for i in items.sample]).rows, items.level)
    torch.testing.assert_close(items.v_teacher, said)


def test_adapters_apart(one: World, tmp_path: Path) -> None:
    """An optimizer of NFT's policy holds nothing of the old one."""
    run = tiny.Run(tiny.config(tmp_path, rollout=ODE, objective=Nft(), train="lora"), one)
    module = run.trainer.engine.module
    assert all(p.requires_grad for p in adapter_parameters(module, "default").values())
    assert not any(p.requires_grad for p in adapter_parameters(module, "old").values())


# One rank or two.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return the results of the rollouts by the number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return {size: launch.on_ranks(size, "objective_ranks:rollouts", folder)[0] for size in (1, 2)}


@pytest.mark.slow
def test_two_ranks_make_the_update_of_one(ranks: dict[int, dict[str, Any]]) -> None:
    """Rewards to the bit; gradients, clip and weights to the order of float32 sums; for every objective."""
    one, two = ranks[1], ranks[2]
    assert list(one) == list(two)
    assert len(one) == 11
    for name, alone in one.items():
        both = two[name]
        assert alone["reward"] == both["reward"], name
        assert alone["pairs"] == both["pairs"], name
        assert alone["correction"] == pytest.approx(both["correction"], rel=1e-5), name
        for first, second in zip(alone["gradients"], both["gradients"], strict=True):
            a, b = torch.tensor(first), torch.tensor(second)
            assert float(a.norm()) > 0, name
            assert float((a - b).norm() / a.norm()) < 1e-5, name
