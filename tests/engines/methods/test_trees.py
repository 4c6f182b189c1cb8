"""Trees of paths: shared noise, candidates of which one goes on, and what is learnt from their edges."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from torch import Tensor
from torch.testing import assert_close

from fluvial.core import gaussian
from fluvial.core.random import fold_in, key, normal
from fluvial.core.transitions import Transition
from fluvial.engines.engine.world import World
from fluvial.engines.methods import ConstantMargin, NoiseMargin
from fluvial.engines.methods.branch import BranchGrpo
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.methods.spo import Spo
from fluvial.engines.run.method import Method
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import Candidates, Splits
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.engines.streams import Stream

TREE = SamplingConfig(prompts=2, group=8, steps=6, sampler=Stochastic("dance_sde", 0.5), window=Splits((0, 2, 3), high=5))
STATES = replace(TREE, window=Candidates(4, low=2))


def build(world: World, method: Method, sampling: SamplingConfig, **changes: Any) -> tiny.Run:
    changes = {"train": "lora", "rewards": ("brightness",), **changes}
    return tiny.Run(tiny.config(Path("out"), method=method, sampling=sampling, **changes), world)


@pytest.mark.parametrize("sampling", [TREE, STATES], ids=lambda sampling: sampling.window.kind)
def test_samples_are_paths_with_the_noise_of_their_edges(one: World, sampling: SamplingConfig) -> None:
    """That of the first sample that shares the edge; a candidate records its own, and goes on with the first one's."""
    run = build(one, Grpo() if sampling is TREE else Spo(), sampling).trainer.run
    batch, window, root = run.sample(key(1)), sampling.window, fold_in(key(1), Stream.SAMPLES)
    trajectory, transitions, module = batch.trajectory, batch.spec.transitions, run.engine.module
    assert transitions is not None
    trunk = torch.arange(16) // (8 if sampling is TREE else 4)
    x = normal(fold_in(fold_in(root, trunk), Stream.INITIAL), (16, *tiny.SHAPE))
    for step in range(trajectory.steps.shape[1]):
        own = torch.arange(16)
        if isinstance(window, Splits):
            below = 8 >> sum(split <= step for split in window.splits)
            leads = own = own // below * below
        else:
            leads = own // 4 * 4
            own = leads if step < 2 else own
        taken = Transition(*(each[step] for each in transitions))
        v = run.job.model.predict(module, x, batch.spec.sampling.schedule.levels[step].expand(16), batch.cond).detach()
        after, recorded = (
            gaussian.sample(taken, x, v, normal(fold_in(fold_in(fold_in(root, ids), Stream.STEPS), step), tuple(x.shape)))
            for ids in (leads, own)
        )
        assert_close(trajectory.x[:, step], x)
        assert_close(trajectory.x_next[:, step], recorded)
        table = trajectory.x_next[:, step].flatten(1)
        assert torch.equal(table[own], table)  # to the bit
        assert len(table.unique(dim=0)) == len(own.unique())
        x = after
    if sampling is STATES:
        assert torch.equal(trajectory.x, trajectory.x[torch.arange(16) // 4 * 4])


@pytest.mark.parametrize(("method", "sampling"), [(BranchGrpo(), TREE), (Spo(), STATES)])
def test_a_tree_does_not_depend_on_its_chunks(one: World, method: Any, sampling: SamplingConfig) -> None:
    found = [
        build(one, method, sampling, **{"engine.micro_batch": size}).trainer.run.sample(key(1)).trajectory
        for size in (2, 8, 16)
    ]
    for name in ("x", "x_next", "log_prob", "final"):
        first, *others = (getattr(each, name) for each in found)
        for other in others:
            assert_close(other, first)


@pytest.mark.parametrize("ddof", [0, 1])
def test_every_edge_is_trained_on_once(one: World, ddof: Any) -> None:
    """With the advantage of the mean of its leaves among the edges of its step."""
    trained, seen = build(one, BranchGrpo(advantage=AdvantageConfig(eps=1e-8, ddof=ddof)), TREE), list[Any]()
    run = trained.trainer.run
    record_steps = run.record_steps

    def note(batch: Any, key: Any, signal: Tensor, **options: Any) -> Any:
        seen.append((run.weigh_rewards(batch), signal, options["keep"]))
        return record_steps(batch, key, signal, **options)

    run.record_steps = note  # type: ignore[assignment]
    record = trained.rollout()
    ((reward, signal, keep),) = seen
    assert record["pairs"] == keep.sum() == 2 * (2 + 2 + 4 + 8 + 8)
    for step, edges in enumerate((2, 2, 4, 8, 8)):
        means = reward.reshape(2, edges, -1).mean(2)
        expected = (means - means.mean(1, keepdim=True)) / (means.std(1, correction=ddof, keepdim=True) + 1e-8)
        found = signal[:, step].reshape(2, edges, -1)
        assert_close(found[..., 0], expected)
        assert torch.equal(found, found[..., :1].expand_as(found))
        assert torch.equal(keep[:, step].reshape(2, edges, -1)[..., 0], torch.ones(2, edges))


@pytest.mark.parametrize("margin", [ConstantMargin(0.0), ConstantMargin(0.02), NoiseMargin(0.0, 0.05)])
def test_pairs_are_the_best_and_the_worst_candidate_of_a_state(one: World, margin: Any) -> None:
    """By the reward of the clean sample that is predicted from each, where they are far enough apart."""
    run = build(one, Spo(margin=margin), STATES).trainer.run
    batch, seen, spy = run.score(run.sample(key(3))), list[Tensor](), Spo(margin=margin)
    object.__setattr__(spy, "sampling", STATES)

    def compare(run: Any, batch: Any, key: Any, preferred: Tensor) -> tuple[()]:
        seen.append(preferred)
        return ()

    object.__setattr__(spy, "compare", compare)
    list(spy.learn(run, batch, key(3)))
    levels, transitions = batch.spec.sampling.schedule.levels, batch.spec.transitions
    assert transitions is not None
    std, expected = transitions.std[2:], torch.zeros(16, 6)
    for step in range(2, 6):
        x, level = batch.trajectory.x_next[:, step], levels[step + 1]
        v = run.job.model.predict(run.engine.module, x, level.expand(16), batch.cond).detach()
        reward = tiny.brightness(run.job.model.decode(x - level * v), []).reshape(4, 4)
        place = (std[step - 2] - std.min()) / (std.max() - std.min())
        least = margin.size if isinstance(margin, ConstantMargin) else 0.05 * place
        for state in range(4):
            high, low = int(reward[state].argmax()), int(reward[state].argmin())
            better = torch.softmax(reward[state][[high, low]], 0)
            if better[0] - better[1] > least:
                expected[4 * state + high, step], expected[4 * state + low, step] = 1, -1
    assert torch.equal(seen[0], expected)
    assert 0 < int(expected.abs().sum()) <= 32
    assert (margin == ConstantMargin(0.0)) == (int(expected.abs().sum()) == 32)


def test_the_partner_of_a_step_is_that_of_its_state(one: World) -> None:
    """Before any update every ratio is 1; after one, an item's context is the log-ratio of its partner."""
    method = Spo(beta=100.0, margin=ConstantMargin(0.0))
    trained, seen = build(one, method, STATES, updates=2, **{"passes.epochs": 2}), list[Any]()
    run = trained.trainer.run
    update = run.update

    def note(items: Any, loss: Any, **options: Any) -> Any:
        ratios = run.gather(items, run.measure(items, method.log_ratio))
        seen.append((ratios, run.gather(items, items.rows.context), run.gather(items, items.rows.signal)))
        return update(items, loss, **options)

    run.update = note  # type: ignore[method-assign]
    trained.rollout()
    assert not seen[0][0].any()
    ratios, others, preferred = seen[1]
    assert ratios.abs().max() > 1e-6
    for state in range(4):
        for step in range(2, 6):
            rows = slice(4 * state, 4 * state + 4)
            win, lose = int(preferred[rows, step].argmax()), int(preferred[rows, step].argmin())
            assert_close(others[rows, step][[win, lose]], ratios[rows, step][[lose, win]])
