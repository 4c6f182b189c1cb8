"""The comparison of objectives: what is read from a run folder, kept in the table, and drawn."""

import json
from pathlib import Path

import pytest

from fluvial.bench import objectives
from fluvial.bench.objectives import ObjectivesConfig, Point
from fluvial.engines.errors import UsageError


def point(recipe: str, seed: int, updates: int, heldout: float) -> Point:
    """Return an evaluation."""
    return Point(
        recipe, seed, updates, 128 * updates, 2.0 * updates, heldout, heldout - 0.1, 0.01, 0.2, 1000, 0.0, "cpu", "2", "day"
    )


def test_a_table_is_read_back_and_its_ends_are_the_last(tmp_path: Path) -> None:
    """By recipe, the best first; the plot and the table can be made of it."""
    points = [
        point(name, seed, n, 0.5 + n * up) for name, up in (("a", 0.01), ("b", 0.02)) for seed in (0, 1) for n in (0, 9)
    ]
    objectives.write(tmp_path / "t.csv", points)
    assert objectives.read(tmp_path / "t.csv") == points
    found = objectives.ends(points)
    assert list(found) == ["b", "a"]
    assert [p.updates for p in found["a"]] == [9, 9]
    objectives.draw(points, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 1000
    assert objectives.table(points).row_count == 2


def test_evaluations_come_with_what_training_had_cost(tmp_path: Path) -> None:
    """Seconds add up over the updates before; the evaluation in the course of a run is the smaller one."""
    (tmp_path / "summary.json").write_text(json.dumps({"versions": {"torch": "2"}}))
    (tmp_path / "config.json").write_text(json.dumps({"updates": 2, "final_samples": 10, "eval_samples": 3}))
    score = {"exact": {"heldout": 0.5, "reward": 0.4}, "drift": 0.1}
    update = {"seconds": {"rollout": 1.0, "update": 0.5}, "first_pass_max_abs_log_ratio": 0.0}
    records = [
        {"update": 0, **score}, {"update": 1, "samples": 8, "diversity": 0.3, **update}, {"update": 1, **score},
        {"update": 2, "samples": 16, "diversity": 0.2, **update}, {"update": 2, **score},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = list(objectives.points_of(tmp_path, "a", 3))
    assert [(p.updates, p.samples, p.seconds, p.evaluated) for p in found] == [(0, 0, 0, 10), (1, 8, 1.5, 3), (2, 16, 3, 10)]
    assert [p.diversity for p in found[1:]] == [0.3, 0.2]


def test_what_cannot_be_compared_is_refused() -> None:
    """A recipe that is none, and distillation without its teacher."""
    with pytest.raises(UsageError, match="there is no 'x'"):
        ObjectivesConfig(recipes=("x",))
    with pytest.raises(UsageError, match="teacher"):
        ObjectivesConfig(recipes=("distill",))
