"""Runs whose rewards fail, whose samples are left out as if never drawn, or come late, as those of people do."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fake_servers
from helpers import tiny_jobs as tiny
from helpers.objective_rows import OBJECTIVE_ROWS
from helpers.refusals import fails, refuses
from helpers.spied_runs import FAST, ODE, STEPS
from torch import Tensor

from fluvial.engines.data.records import as_prompts
from fluvial.engines.engine.world import World
from fluvial.engines.extensions.judges.votes import Votes
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.methods.table import Refl, Rtdmd, TdmR1
from fluvial.engines.run.build import _select_rewards
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.declared import find_followers
from fluvial.engines.run.process.stop import StopRequest
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import Truncate
from fluvial.engines.sampling.window import AllSteps
from fluvial.engines.scoring.advantages import AdvantageConfig

LEARNING = [name for name, row in OBJECTIVE_ROWS.items() if row.needs.rewards is not None and row.is_scored]
BAD = "3"  # the prompt whose samples have no valid score


def smooth(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Score images with a gradient."""
    return images.mean((1, 2, 3))


def failing(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Give the second sample of the bad prompt no score."""
    scores, bad = smooth(images, prompts), [i for i, prompt in enumerate(prompts) if prompt == BAD]
    mask = torch.tensor([i in bad[1:2] for i in range(len(prompts))])
    return scores.masked_fill(mask, math.nan)


def config_of(name: str, out: Path, prompts: int) -> TrainConfig:
    """Return the settings of a rollout of groups of four for an objective."""
    method = OBJECTIVE_ROWS[name]
    sampling = replace(ODE if method.recorded is None else STEPS, prompts=prompts)
    if isinstance(method, Refl | Rtdmd | TdmR1) or method.sampling.window.is_tree:  # which take no other sampler, or window
        window = method.sampling.window if method.sampling.window.is_tree else AllSteps()
        sampling = replace(sampling, sampler=method.sampling.sampler, window=window)
    lora = "lora" if find_followers(method.networks()) else "full"
    return tiny.config(out, method=method, train=lora, optimizer=FAST, sampling=sampling, **{"engine.micro_batch": 4})


def updated(
    config: TrainConfig, world: World, reward: Any, prompts: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the record of an update on given prompts, and its gradient."""
    run = tiny.Run(config, world, tiny.job(rewards={"it": reward}))
    run.trainer.sampler.choose_prompts = lambda root, updates: list(as_prompts(prompts))  # type: ignore[method-assign]
    return run.rollout(), run.gradient()


@pytest.mark.parametrize("name", LEARNING)
def test_an_invalid_group_is_as_if_it_had_not_been_drawn(one: World, tmp_path: Path, name: str) -> None:
    """The same loss, gradient and statistics as a rollout of the other groups, by every objective that reads rewards."""
    with pytest.warns(UserWarning, match="1 of the 4 groups of the rollout have no valid reward and are left out"):
        record, gradient = updated(config_of(name, tmp_path, 4), one, failing, ["0", "1", "2", BAD])
    expected, other = updated(config_of(name, tmp_path, 3), one, smooth, ["0", "1", "2"])
    assert record["invalid"] == {"samples": 1, "groups": 1}
    assert expected["invalid"] == {"samples": 0, "groups": 0}
    for part in ("reward", "groups", "advantage", "pairs"):
        assert record.get(part) == expected.get(part), part
    assert record["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
    assert any(float(tensor.abs().max()) > 0 for tensor in gradient.values())
    for key, tensor in gradient.items():
        torch.testing.assert_close(tensor, other[key], rtol=1e-4, atol=1e-7)


def test_a_history_of_rewards_takes_in_valid_ones_alone(one: World, tmp_path: Path) -> None:
    """Those of an invalid group are left out whole."""
    config = with_values(config_of("clipped", tmp_path, 4), {"advantage": AdvantageConfig(history=8, history_min=2)})
    run = tiny.Run(config, one, tiny.job(rewards={"it": failing}))
    run.trainer.sampler.choose_prompts = lambda root, updates: list(as_prompts(["0", "1", "2", BAD]))  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="are left out"):
        run.rollout()
    assert {prompt: len(known) for prompt, known in run.trainer.progress.rewards.items()} == {"0": 4, "1": 4, "2": 4}


def test_several_numbers_of_a_reward_are_logged(one: World, tmp_path: Path) -> None:
    """The means over the samples that are learnt from."""

    def several(images: Tensor, prompts: Sequence[str], latents: Tensor, group: int) -> dict[str, Any]:
        assert latents.shape[1:] == tiny.SHAPE
        assert len({*prompts}) == 1
        return {"score": smooth(images, prompts), "twice": 2 * smooth(images, prompts), "group": [group] * len(prompts)}

    record, _ = updated(config_of("clipped", tmp_path, 4), one, several, ["0", "1", "2", "3"])
    parts = record["reward_parts"]["it"]
    assert parts["twice"] == pytest.approx(2 * record["reward"]["mean"], rel=1e-5)
    assert parts["group"] == 1.5
    assert set(record["speed"]) > {"reward_hidden", "reward_waited"}


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda images, prompts: 1 / 0, r"reward 'it' raised ZeroDivisionError \(division by zero\) for prompt '\d'"),
        (lambda images, prompts: [0.0], r"reward 'it' returned shape \[1\] for 4 images"),
        (lambda videos, prompts: [0.0], r"reward 'it': it takes videos, and these are images \[1, 4, 4\]"),
    ],
)
def test_a_reward_is_tried_before_anything_is_computed(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: Any, says: str
) -> None:
    """On blank images: one line, and the network is not even built."""

    def build(self: Any, *, empty: bool = False) -> Any:
        raise AssertionError("the network is built")

    monkeypatch.setattr(tiny.Tiny, "build", build)
    fails(
        rf"^{says}.*; it was tried on blank images before the run$",
        tiny.Run,
        config_of("clipped", tmp_path, 2),
        one,
        tiny.job(rewards={"it": reward}),
    )
    fails(
        r"^evaluator 'heldout'", tiny.Run, config_of("clipped", tmp_path, 2), one, tiny.job(evaluators={"heldout": reward})
    )


def test_a_reward_of_groups_is_no_evaluator(one: World, tmp_path: Path) -> None:
    """Where rewards stand in for evaluators it is left out; where it is asked for, it is refused."""

    def preferred(images: Tensor, prompts: Sequence[str], group: int) -> Tensor:
        return smooth(images, prompts)

    job = tiny.job(rewards={"preferred": preferred}, evaluators={})
    assert tiny.Run(config_of("clipped", tmp_path, 2), one, job).trainer.job.evaluators == {}
    job = tiny.job(evaluators={"preferred": preferred})
    fails(
        r"^evaluator 'preferred': it compares the samples of a group, and there are no groups",
        tiny.Run,
        config_of("clipped", tmp_path, 2),
        one,
        job,
    )


def promised(images: Tensor, prompts: Sequence[str]) -> "Future[Tensor]":
    """Score brightness a little later."""
    scores = Future[Tensor]()
    threading.Timer(0.02, scores.set_result, [tiny.brightness(images, prompts)]).start()
    return scores


def never(images: Tensor, prompts: Sequence[str]) -> "Future[Tensor]":
    """Promise scores that do not come."""
    return Future()


def parameters(trainer: Trainer) -> list[Tensor]:
    """Return copies of the trained parameters."""
    return [value.detach().clone() for value in trainer.engine.module.parameters() if value.requires_grad]


def test_promised_scores_are_learnt_from_as_others_are(one: World, tmp_path: Path) -> None:
    """To the bit."""
    found = []
    for reward in (tiny.brightness, promised):
        with Trainer(tiny.config(tmp_path, updates=2), tiny.job(rewards={"it": reward}), one) as trainer:
            assert len([*trainer]) == 2
            found.append(parameters(trainer))
    assert all(map(torch.equal, *found))


def test_a_run_that_waits_for_scores_stops_when_it_is_asked_to(one: World, tmp_path: Path) -> None:
    """The rollout is given up, and nothing is learnt from it; a resumed run makes it again, as if nothing had been."""
    config = tiny.config(tmp_path, updates=1)
    stop, found = StopRequest(), []
    with Trainer(config, tiny.job(rewards={"it": never}), one, stop=stop) as trainer:
        before = parameters(trainer)
        threading.Timer(0.3, setattr, [stop, "name", "SIGINT"]).start()
        assert [*trainer] == []
        assert trainer.stopping
        assert (trainer.engine.updates, trainer.progress.samples) == (0, 0)
        assert all(map(torch.equal, before, parameters(trainer)))
        trainer.save()
    for resumed in (None, f"{config.checkpoint_folder}/000000"):
        with Trainer(config, tiny.job(rewards={"it": promised}), one, resume_from=resumed) as trainer:
            assert len([*trainer]) == 1
            found.append(parameters(trainer))
    assert all(map(torch.equal, *found))


def test_votes_refuse_rollouts_ahead_and_a_timeout_shorter_than_their_wait(one: World, tmp_path: Path) -> None:
    """A checkpoint would have to hold their votes, and ranks wait for each other's."""
    job = tiny.job(rewards={"votes": Votes(HttpClient("http://localhost:1", clock=fake_servers.FakeClock()))})
    ahead = tiny.config(tmp_path, correction=Truncate(), **{"rollout.ahead": 1})
    refuses(r"rollout\.ahead is 1, expected 0", Trainer, ahead, job, one)
    ranks = replace(one, size=2)
    _select_rewards(tiny.config(tmp_path, **{"engine.timeout": 3601.0}), job, ranks)
    refuses(r"engine\.timeout is 600, expected more than 3600", _select_rewards, tiny.config(tmp_path), job, ranks)
