"""Runs that end because their reward is gamed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from torch import Tensor

from fluvial.engines.run import train
from fluvial.engines.run.monitoring.diagnostics import EvaluationPoint, best_of, describe_gaming, evaluator_of, find_gaming


@pytest.mark.parametrize(
    ("scores", "rewards", "count", "is_gamed"),
    [
        ([5, 4, 3], [1, 2, 3], 2, True),
        ([5, 4, 3], [1, 2, 3], 3, False),  # not that often
        ([5, 4, 3], [3, 2, 1], 2, False),  # the reward fell, too
        ([5, 4, 3], [2, 9, 2], 2, False),  # it is where it was
        ([5, 4, 4], [1, 2, 3], 2, False),  # the score stayed
        ([4, 5, 3], [1, 2, 3], 2, False),  # it had risen
        ([1, 5, 4, 3], [0, 1, 0, 2], 2, True),
        ([5, 4], [1, 2], 1, True),
        ([5], [1], 1, False),
        ([5, 4, 3], [1, 2, 3], 0, False),
    ],
)
def test_what_counts_as_gamed(scores: list[float], rewards: list[float], count: int, is_gamed: bool) -> None:
    """The score falls at each of the last evaluations, and the reward is higher than before."""
    points = [
        EvaluationPoint(10 * number, *point) for number, point in enumerate(zip(scores, rewards, strict=True), start=1)
    ]
    found, best = find_gaming(points, count), best_of(points)
    assert bool(found) == is_gamed
    assert best is not None
    assert best.update == 10 * (scores.index(max(scores)) + 1)
    if is_gamed:
        assert [point.score for point in found] == scores[-count - 1 :]
        assert f"fell at {count} evaluations in a row" in describe_gaming(found, "heldout")


def test_the_evaluator_that_is_watched() -> None:
    """The one of that name, or the last."""
    assert evaluator_of(("reward", "heldout", "other")) == "heldout"
    assert evaluator_of(("a", "b")) == "b"


def test_a_run_that_is_gamed_ends_early(tmp_path: Path) -> None:
    """With its weights, a report, and the checkpoint of the best evaluation, however few are kept; resumed it watches on."""
    calls = [0]

    def rising(images: Tensor, prompts: Sequence[str]) -> Tensor:
        calls[0] += 1
        return images.mean((1, 2, 3)) + calls[0]

    def falling(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.full((len(prompts),), -float(calls[0]))

    settings: Any = {
        "updates": 6,
        "evaluation.every": 1,
        "evaluation.samples": 2,
        "evaluation.final_samples": 2,
        "checkpoint.every": 1,
        "checkpoint.keep": 1,
        "tracker": "none",
        "evaluation.stop_when_gamed": 2,
    }
    job, out = tiny.job(rewards={"rising": rising}, evaluators={"heldout": falling}), tmp_path / "run"
    summary = train(tiny.config(out, **settings), job)
    assert summary["updates"] == 3
    said = summary["stopped_when_gamed"]
    assert said.startswith("stopped after update 3: the score of the heldout evaluator fell at 2 evaluations in a row (")
    assert said.endswith(f"best evaluation after update 1: checkpoint {out / 'checkpoints' / '000001'}")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["000001", "000003"]
    assert (out / "weights" / "diffusion_pytorch_model.safetensors").exists()
    assert json.loads((out / "summary.json").read_text())["stopped_when_gamed"] == said
    manifest = json.loads((out / "checkpoints" / "000003" / "manifest.json").read_text())
    assert [update for update, _, _ in manifest["meta"]["evaluations"]] == [1, 2, 3]
