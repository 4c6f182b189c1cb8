"""Studies of few steps, of reward hacking and of all objectives: whole ones of a few samples, and what their tables say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fluvial.bench import harness
from fluvial.bench.studies import few_steps, objectives, tunnel
from fluvial.bench.studies.few_steps import FewStepsConfig
from fluvial.bench.studies.objectives import ObjectivesConfig
from fluvial.bench.studies.trial import StudyRun, StudyScore, group_curves, read_at, run_trial, run_trials
from fluvial.bench.studies.tunnel import TunnelConfig
from fluvial.engines.errors import RunError, UsageError
from fluvial.models.handwriting.recognisers import load_reward_recogniser


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make trials in this process, which has imported everything."""
    monkeypatch.setattr("fluvial.bench.studies.trial._run_in_process", run_trial)


def score(seed: int, updates: int, proxy: float, exact: float) -> StudyScore:
    run = ("nft", "kl", "handwriting", 10, seed, "a", updates, 64 * updates, 2.0 * updates)
    return StudyScore(*run, proxy, exact, exact, 0.5, 0.1, float("nan") if updates == 0 else 0.2, "cpu", "2", "day")


def test_true_scores_are_compared_at_equal_proxy(tmp_path: Path) -> None:
    """And at equal time, linearly between two evaluations; a run whose proxy rises less has none, and is counted."""
    rows = [score(0, 0, 1.0, 0.5), score(0, 4, 1.1, 0.7), score(0, 8, 1.3, 0.3)]
    rows += [score(1, 0, 1.0, 0.5), score(1, 6, 1.05, 0.6)]
    first, second = group_curves(rows)["nft", "kl"]
    assert read_at(first, "exact", "proxy", 0.2) == pytest.approx(0.5)
    assert read_at(first, "diversity", "proxy", 0.05) == pytest.approx(0.2)
    assert read_at(second, "exact", "proxy", 0.2) is None
    (line,) = tunnel.format_table(rows).splitlines()[2:]
    assert line.startswith("| nft | kl | 0.500 | 0.500 (1 of 2) | 0.550 ± 0.071 | 0.450 ± 0.212 |")
    tunnel.draw(rows, tmp_path / "tunnel.png")
    assert (tmp_path / "tunnel.png").stat().st_size > 1000


def test_the_proxy_pays_for_ink() -> None:
    """Three times its mean, beside the characters; each guard changes the run."""
    images, codes = torch.rand(2, 1, 8, 32, generator=torch.Generator().manual_seed(0)), ["0427", "1999"]
    paid = tunnel.proxy(images, codes) - load_reward_recogniser().characters(images, codes)
    assert paid.tolist() == pytest.approx((3 * images.mean((1, 2, 3))).tolist(), abs=1e-5)
    trials = list(TunnelConfig(seeds=(0,)).list_trials())
    assert len({trial.settings for trial in trials}) == len(trials) == 5 * 4 + 1
    others = TunnelConfig(("raft", "d3po"), seeds=(0,)).list_trials()  # without floors, and without a KL
    assert [(trial.method, trial.variant) for trial in others] == [
        ("raft", "none"),
        ("raft", "kl"),
        ("raft", "ema"),
        ("d3po", "none"),
    ]
    with pytest.raises(UsageError, match="there is no 'brakes'"):
        TunnelConfig(guards=("brakes",))


def test_objectives_are_compared_at_equal_samples_and_at_equal_time(tmp_path: Path) -> None:
    """The best first; a recipe with a run that is over before that time is left out."""
    rows = [score(seed, updates, 0.0, 0.5 + 0.01 * (1 + seed) * updates) for seed in (0, 1) for updates in (0, 6, 8)]
    rows += [replace(row, method="awm", exact=0.9) for row in rows if row.updates < 8]
    ends, timed = (objectives.format_table(rows, seconds).splitlines()[2:] for seconds in (None, 14.0))
    assert [line.split(" | ")[0] for line in ends] == ["| awm", "| nft"]
    assert timed == ["| nft | 0.500 | 0.605 (0.570 to 0.640) | 2 | 14 | 448 | 7 | 0.100 | 1.00 |"]
    objectives.draw(rows, tmp_path / "objectives.png")
    assert (tmp_path / "objectives.png").stat().st_size > 1000


def test_students_are_compared_over_seeds() -> None:
    """Means, with the least and the most after; sharpness is a share of the teacher's."""
    rows = [replace(score(0, 0, 1.0, 0.5), method="teacher", variant="", sharpness=0.5)]
    for seed, exact in ((0, 0.8), (1, 0.6)):
        ends = [score(seed, updates, 1.0, right) for updates, right in ((0, 0.4), (8, exact))]
        rows += [replace(row, method="dmd2", variant="distilled", steps=2, sharpness=row.exact) for row in ends]
    line, _ = few_steps.format_table(rows).splitlines()[2:]
    right = "0.400 -> 0.700 (0.600 to 0.800)"
    assert line == f"| dmd2 distilled | 2 | {right} | {right} | 0.800 -> 1.400 (1.200 to 1.600) | 2 | 16 |"


@pytest.mark.long
def test_every_recipe_is_compared_and_distillation_waits_for_its_teacher(tmp_path: Path) -> None:
    """Settings tell runs apart, places of files do not."""
    config = ObjectivesConfig(seeds=(0, 1), keep=tmp_path)
    trials = config.list_trials()
    assert len({(trial.method, trial.config.seed, trial.settings) for trial in trials}) == len(trials)
    assert [trial.settings for trial in replace(config, keep=tmp_path / "x").list_trials()] == [t.settings for t in trials]
    assert {trial.method for trial in trials if trial.waits} == {"distill"}
    assert [(trial.method, trial.config.seed) for trial in trials if trial.keep] == [("grpo", 0)]
    assert {trial.config.evaluation.rewards[0] for trial in trials if trial.method == "refl"} == {"likeness"}
    last: Any = trials[-1].config.method
    assert last.preferences == tmp_path / "preferences-1"
    for wrong in ({"recipes": ("x",)}, {"recipes": ("distill",)}, {"looks": 0}, {"seeds": ()}):
        with pytest.raises(UsageError):
            ObjectivesConfig(**{"keep": tmp_path, **wrong})  # type: ignore[arg-type]


def test_what_fails_is_named_and_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the others are written, and the error says which run failed with what."""
    trials = list(TunnelConfig(("nft", "awm"), ("none",), seeds=(0,)).list_trials())

    def one(trial: StudyRun) -> list[StudyScore] | str:
        return "it broke" if trial.method == "nft" else [replace(score(0, 4, 1.0, 0.7), method="awm", variant="none")]

    monkeypatch.setattr("fluvial.bench.studies.trial._run_in_process", one)
    with pytest.raises(RunError, match=r"^nft, none, seed 0: it broke$"):
        run_trials(trials, tmp_path / "rows.csv", parallel=1)
    assert [row.method for row in harness.read(tmp_path / "rows.csv", StudyScore)] == ["awm"]


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_a_study_ends_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Students are kept, RL begins where they end, and what is in the table already is not made again."""
    out = tmp_path
    config = FewStepsConfig("handwriting", steps=(2,), distilled=1, improved=1, samples=8, keep=out / "kept", out=out)
    few_steps.run(config)
    rows = harness.read(tmp_path / "few-steps.csv", StudyScore)
    ends = {(row.method, row.variant): row for row in rows}
    starts = {(row.method, row.variant): row for row in rows if row.updates == 0}
    assert len(starts) == 7
    for name, start in few_steps.STARTS.items():
        begun, student = starts[name, f"from {start}"], ends[start, "distilled"]
        assert (begun.true, begun.sharpness) == (student.true, student.sharpness)
        assert ends[name, f"from {start}"].updates > 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| teacher | 10 | ")
    few_steps.run(config)
    assert "seed 0" not in capsys.readouterr().out
    assert list(map(str, harness.read(tmp_path / "few-steps.csv", StudyScore))) == list(map(str, rows))
    assert len(replace(config, seeds=(0, 1)).list_trials()) == 14


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_objectives_end_in_two_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The teacher's weights are kept and learnt from, and so are preferences."""
    recipes = ("grpo", "distill", objectives.OFFLINE)
    config = ObjectivesConfig(
        recipes, seeds=(0,), rollouts=1, looks=1, seconds=0.1, samples=8, keep=tmp_path / "k", out=tmp_path
    )
    objectives.run(config)
    rows = harness.read(tmp_path / "objectives.csv", StudyScore)
    assert [row.method for row in rows if row.updates] == list(dict.fromkeys(row.method for row in rows))
    assert {row.method for row in rows} == set(recipes)
    assert (tmp_path / "k" / "grpo" / "weights").is_dir()
    assert capsys.readouterr().out.count("| distill | ") == 2
