"""The comparison of objectives: what is run, what is kept in the table, and what is made of it."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fluvial.bench import harness
from fluvial.bench.objectives import cases, report
from fluvial.bench.objectives.cases import NAMES, CurvePoint, ObjectiveCase, ObjectivesConfig
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.run import recipes
from fluvial.engines.run.config import with_values
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.window import RandomWindow

pytestmark = pytest.mark.long


def point(
    recipe: str, seed: int, updates: int, heldout: float, *, limit: str = "9 rollouts", settings: str = "a"
) -> CurvePoint:
    spent, scores = (updates, 128 * updates, 2.0 * updates), (heldout, heldout - 0.1, 0.01, 0.2)
    return CurvePoint(recipe, seed, limit, settings, *spent, *scores, 1000, 0.0, "cpu", "2", "day")


def test_a_table_is_read_back_and_its_ends_are_the_last(tmp_path: Path) -> None:
    """By recipe, the best first; the plot and the table can be made of it."""
    points = [
        point(name, seed, n, 0.5 + n * up) for name, up in (("a", 0.01), ("b", 0.02)) for seed in (0, 1) for n in (0, 9)
    ]
    harness.write(tmp_path / "t.csv", points, CurvePoint)
    assert harness.read(tmp_path / "t.csv", CurvePoint) == points
    found = report.ends(points)
    assert list(found) == ["b", "a"]
    assert [p.updates for p in found["a"]] == [9, 9]
    report.draw([*points, replace(points[0], limit="60 s")], tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 1000
    lines = report.table(points).splitlines()
    assert lines[2].startswith("| b | 0.500 | 0.680 (0.680 to 0.680) | 2 | 0.580 | 18 | 1,152 | 9 |")
    assert len(lines) == 4


def test_runs_whose_rows_are_there_with_the_same_settings_are_not_made_again(tmp_path: Path) -> None:
    """Another seed, other settings and another limit are other runs; distillation brings its teacher's run along."""
    config = ObjectivesConfig(recipes=("nft", "awm"), seeds=(0, 1), rollouts=5, budget_seconds=70, out=tmp_path)
    cases = config.cases(tmp_path)
    assert len({(case.recipe, case.seed, case.limit) for case in cases}) == len(cases) == 8

    def rows(*cases: ObjectiveCase, settings: str | None = None) -> list[CurvePoint]:
        return [point(c.recipe, c.seed, 9, 0.6, limit=c.limit, settings=settings or c.settings) for c in cases]

    assert report._missing(config, [], tmp_path) == cases
    assert report._missing(config, rows(cases[0], cases[5]), tmp_path) == [*cases[1:5], *cases[6:]]
    assert report._missing(config, rows(cases[0], settings="old"), tmp_path) == cases
    assert report._missing(replace(config, again=True), rows(*cases), tmp_path) == cases
    taught = ObjectivesConfig(recipes=("grpo", "distill"), seeds=(3,), rollouts=5, budget_seconds=0, out=tmp_path)
    teacher, student = taught.cases(tmp_path)
    assert report._missing(taught, rows(teacher), tmp_path) == [teacher, student]
    (tmp_path / "teacher").mkdir()
    assert report._missing(taught, rows(teacher), tmp_path) == [student]


def test_equal_time_is_read_off_a_longer_run(tmp_path: Path) -> None:
    """Between its evaluations, linearly; a run that is over too early gets another one."""
    config = ObjectivesConfig(recipes=("nft", "ddpo"), seeds=(0, 1), rollouts=9, budget_seconds=7, out=tmp_path)
    nft, early, *_ = config.cases(tmp_path)
    timed = [case for case in config.cases(tmp_path) if case.seconds]
    rows = [
        point(case.recipe, case.seed, n, 0.1 * n, settings=case.settings)
        for case, ends in ((nft, (0, 3, 9)), (early, (0, 3)))
        for n in ends
    ]
    missing = report._missing(config, rows, tmp_path)
    assert [(c.recipe, c.seed) for c in missing if c.seconds] == [("ddpo", 0), ("nft", 1), ("ddpo", 1)]
    assert report._missing(replace(config, again=True), rows, tmp_path)[-3:] == missing[-3:]
    found = report.at_time(rows, timed)
    assert [(p.recipe, p.seed, p.limit, p.seconds) for p in found] == [("nft", 0, "7 s", t) for t in (0.0, 6.0, 7.0)]
    assert found[-1].heldout == pytest.approx(0.35)
    assert found[-1].samples == 128 * 3.5
    own = point("ddpo", 0, 2, 0.9, limit="7 s")
    assert report.at_time([*rows, own], timed)[-1] == own


@pytest.mark.parametrize("name", NAMES)
def test_the_hash_of_a_run_is_that_of_its_settings_alone(name: str, tmp_path: Path) -> None:
    """The folder and the seed do not matter, the number of rollouts does, and where time is the limit it does not."""
    case = ObjectiveCase(name, 0, rollouts=5, seconds=0.0, folder=tmp_path)
    assert case.settings == replace(case, folder=tmp_path / "x", seed=1).settings != replace(case, rollouts=6).settings
    assert case.config.updates == 5 * case.config.updates_per_rollout
    timed = replace(case, rollouts=0, seconds=5.0)
    assert timed.settings == replace(timed, seconds=6.0).settings


def test_a_run_is_driven_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of the base, which the next run reads, then of the run; a budget decides on the updates."""
    rollout = SamplingConfig(prompts=2, group=2, steps=3, window=RandomWindow(1, high=3))
    tiny: dict[str, Any] = {"sampling": rollout, "engine.micro_batch": 4, "passes.minibatches": 1}
    tiny |= {"evaluation.samples": 2, "evaluation.final_samples": 4}
    usual = recipes.RECIPES["grpo"]
    monkeypatch.setitem(recipes.RECIPES, "grpo", lambda: with_values(usual(), tiny))
    monkeypatch.setattr("fluvial.bench.objectives.cases.EVALUATED", 4)
    case = ObjectiveCase("grpo", 0, rollouts=5, seconds=0.0, folder=tmp_path)
    points = cases.points(case)
    assert [(p.updates, p.samples, p.evaluated) for p in points] == [(n, 4 * n, 4 if n in (0, 5) else 2) for n in range(6)]
    assert points[0].seconds == points[0].drift == 0 < points[1].drift
    assert all(a.seconds < b.seconds for a, b in pairwise(points))
    assert points[-1].max_log_ratio == 0
    assert (tmp_path / "teacher-0" / "weights").is_dir()
    (base,) = tmp_path.glob("base-*.json")
    base.write_text(base.read_text().replace('"heldout": ', '"heldout": 2'))
    monkeypatch.setattr(cases, "_time_rollout", lambda config: 3.0)
    timed = cases.points(replace(case, rollouts=0, seconds=7.0))
    assert [p.updates for p in timed] == [0, 1, 2]
    assert timed[0].heldout >= 2


def test_what_fails_is_named_and_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the others are written, and the error says which run failed with what."""
    config = ObjectivesConfig(recipes=("nft", "awm"), seeds=(0,), rollouts=5, budget_seconds=0, out=tmp_path)

    def one(case: ObjectiveCase) -> list[CurvePoint] | str:
        return "it broke" if case.recipe == "nft" else [point("awm", 0, 5, 0.7, limit=case.limit, settings=case.settings)]

    monkeypatch.setattr(report, "_run", one)
    with pytest.raises(RunError, match=r"^nft, seed 0, 5 rollouts: it broke$"):
        report.run(config)
    assert [p.recipe for p in harness.read(tmp_path / "objectives.csv", CurvePoint)] == ["awm"]


def test_what_cannot_be_compared_is_refused() -> None:
    """A recipe that there is not, distillation without its teacher, numbers without a meaning."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"recipes": ("x",)}, "there is no 'x'"),
        ({"recipes": ("distill",)}, "teacher"),
        ({"rollouts": 3}, "expected 0 or at least 5"),
        ({"rollouts": 0, "budget_seconds": 0.0}, "one of them above 0"),
        ({"budget_seconds": float("nan")}, "budget_seconds is nan"),
        ({"parallel": 0}, "at least one"),
    ]
    for words, message in wrong:
        with pytest.raises(UsageError, match=message):
            ObjectivesConfig(**words)
    # A budget is exceeded by no more than one rollout.
    assert [cases.affordable(seconds, 60.0) for seconds in (1.0, 7.0, 90.0)] == [60, 8, 1]
