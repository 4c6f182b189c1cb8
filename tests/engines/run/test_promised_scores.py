"""Runs whose scores come late, as those of people do, or fail for a while."""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import fake_servers
from helpers import tiny_jobs as tiny
from helpers.spied_runs import STEPS
from torch import Tensor

from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.judges.votes import Votes
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.run import train
from fluvial.engines.run.build import _rewards
from fluvial.engines.run.process.stop import StopRequest
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import Truncate


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


def test_promised_scores_are_learnt_from_as_others_are(tmp_path: Path) -> None:
    """To the bit."""
    found = []
    with init_world() as world:
        for reward in (tiny.brightness, promised):
            with Trainer(tiny.config(tmp_path, updates=2), tiny.job(rewards={"it": reward}), world) as trainer:
                assert len([*trainer]) == 2
                found.append(parameters(trainer))
        assert all(map(torch.equal, *found))


def test_a_run_that_waits_for_scores_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    """The rollout is given up, and nothing is learnt from it; a resumed run makes it again, as if nothing had been."""
    config = tiny.config(tmp_path, updates=1)
    stop, found = StopRequest(), []
    with init_world() as world:
        with Trainer(config, tiny.job(rewards={"it": never}), world, stop=stop) as trainer:
            before = parameters(trainer)
            threading.Timer(0.3, setattr, [stop, "name", "SIGINT"]).start()
            assert [*trainer] == []
            assert trainer.stopping
            assert (trainer.engine.updates, trainer.progress.samples) == (0, 0)
            assert all(map(torch.equal, before, parameters(trainer)))
            trainer.save()
        for resumed in (None, f"{config.checkpoint_folder}/000000"):
            with Trainer(config, tiny.job(rewards={"it": promised}), world, resume_from=resumed) as trainer:
                assert len([*trainer]) == 1
                found.append(parameters(trainer))
        assert all(map(torch.equal, *found))


def test_rollouts_ahead_are_refused(tmp_path: Path) -> None:
    """A checkpoint would have to hold their votes."""
    votes = Votes(HttpClient("http://localhost:1", clock=fake_servers.FakeClock()))
    config = tiny.config(tmp_path, correction=Truncate(), **{"rollout.ahead": 1})
    with init_world() as world, pytest.raises(UsageError, match=r"rollout.ahead is 1, expected 0: a checkpoint would"):
        Trainer(config, tiny.job(rewards={"votes": votes}), world)


def test_a_timeout_shorter_than_the_wait_for_votes_is_refused(tmp_path: Path) -> None:
    """Ranks wait for each other's votes."""
    job = tiny.job(rewards={"votes": Votes(HttpClient("http://localhost:1", clock=fake_servers.FakeClock()))})
    with init_world() as world:
        ranks = replace(world, size=2)
        _rewards(tiny.config(tmp_path, **{"engine.timeout": 3601.0}), job, ranks)
        with pytest.raises(UsageError, match=r"engine.timeout is 600, expected more than 3600: processes wait for each"):
            _rewards(tiny.config(tmp_path), job, ranks)


def test_a_run_with_a_server_that_is_away_for_a_while(tmp_path: Path) -> None:
    """What fails is counted and kept for the report, what is too much ends the run, and the checkpoint goes on."""
    calls = {"rollout": 0}

    def away(images: Tensor, prompts: Sequence[str]) -> Tensor:
        calls["rollout"] += 1
        if calls["rollout"] in broken:
            raise ConnectionError("connection refused")
        return images.mean((1, 2, 3))

    broken: set[int] = {4}  # the first call is the trial; a rollout of two groups is two
    config = tiny.config(
        tmp_path / "run",
        sampling=replace(STEPS, prompts=2),
        updates=3,
        tracker="none",
        **{
            "engine.micro_batch": 4,
            "rollout.max_invalid": 0.5,
            "checkpoint.every": 1,
            "evaluation.final_samples": 2,
            "evaluation.samples": 2,
            "evaluation.every": 0,
        },
    )
    with pytest.warns(UserWarning, match=r"^reward 'it' raised ConnectionError \(connection refused\) for prompt"):
        train(config, tiny.job(rewards={"it": away}))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["invalid"]["groups"] for record in records if "invalid" in record] == [0, 1, 0]
    assert "connection refused" in (tmp_path / "run" / "warnings.txt").read_text()
    calls["rollout"], broken = 0, {4, 5, 6, 7}
    config = replace(config, resume=True, updates=6)
    with pytest.raises(
        RunError,
        match=r"connection refused.*; 2 of the 2 groups of the .*above rollout.max_invalid 0.5\nin the phase reward$",
    ):
        train(config, tiny.job(rewards={"it": away}))
    calls["rollout"] = 100
    assert train(config, tiny.job(rewards={"it": away}))["updates"] == 6
