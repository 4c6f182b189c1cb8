"""Whole runs whose reward fails for a while."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny_jobs as tiny
from helpers.spied_runs import STEPS
from torch import Tensor

from fluvial.engines.errors import RunError
from fluvial.engines.run import train


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
