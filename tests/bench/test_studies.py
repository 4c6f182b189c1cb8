"""Studies of few steps and of reward hacking: whole ones of a few samples, and what their tables say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fluvial.bench import harness
from fluvial.bench.studies import few_steps, tunnel
from fluvial.bench.studies.few_steps import FewStepsConfig
from fluvial.bench.studies.trial import StudyScore
from fluvial.bench.studies.tunnel import TunnelConfig
from fluvial.engines.errors import UsageError
from fluvial.models.handwriting.recognisers import reward_recogniser


def score(seed: int, updates: int, proxy: float, exact: float) -> StudyScore:
    run = ("nft", "kl", "handwriting", 10, seed, "a", updates, 64 * updates, 2.0 * updates)
    return StudyScore(*run, proxy, exact, exact, 0.5, 0.1, float("nan") if updates == 0 else 0.2, "cpu", "2", "day")


def test_true_scores_are_compared_at_equal_proxy(tmp_path: Path) -> None:
    """And at equal time, linearly between two evaluations; a run whose proxy rises less has none, and is counted."""
    rows = [score(0, 0, 1.0, 0.5), score(0, 4, 1.1, 0.7), score(0, 8, 1.3, 0.3)]
    rows += [score(1, 0, 1.0, 0.5), score(1, 6, 1.05, 0.6)]
    first, second = tunnel.curves(rows)["nft", "kl"]
    assert tunnel.read_at(first, "exact", "proxy", 0.2) == pytest.approx(0.5)
    assert tunnel.read_at(first, "diversity", "proxy", 0.05) == pytest.approx(0.2)
    assert tunnel.read_at(second, "exact", "proxy", 0.2) is None
    (line,) = tunnel.table(rows).splitlines()[2:]
    assert line.startswith("| nft | kl | 0.500 | 0.500 (1 of 2) | 0.550 ± 0.071 | 0.450 ± 0.212 |")
    tunnel.draw(rows, tmp_path / "tunnel.png")
    assert (tmp_path / "tunnel.png").stat().st_size > 1000


def test_the_proxy_pays_for_ink() -> None:
    """Three times its mean, beside the characters; each guard changes the run."""
    images, codes = torch.rand(2, 1, 8, 32, generator=torch.Generator().manual_seed(0)), ["0427", "1999"]
    paid = tunnel.proxy(images, codes) - reward_recogniser().characters(images, codes)
    assert paid.tolist() == pytest.approx((3 * images.mean((1, 2, 3))).tolist(), abs=1e-5)
    trials = list(TunnelConfig(seeds=(0,)).trials())
    assert len({trial.settings for trial in trials}) == len(trials) == 5 * 4 + 1
    others = TunnelConfig(("raft", "d3po"), seeds=(0,)).trials()  # without floors, and without a KL
    assert [(trial.method, trial.variant) for trial in others] == [
        ("raft", "none"),
        ("raft", "kl"),
        ("raft", "ema"),
        ("d3po", "none"),
    ]
    with pytest.raises(UsageError, match="there is no 'brakes'"):
        TunnelConfig(guards=("brakes",))


@pytest.mark.long
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
    assert len(replace(config, seeds=(0, 1)).trials()) == 14
