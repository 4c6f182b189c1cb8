"""The comparison of runs: what differs, curves over each other, scores, samples, and a list of runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import chromium, launch

from fluvial.engines.cli import main as cli
from fluvial.engines.extensions.report import comparison
from fluvial.engines.extensions.report.comparison import find_differences, list_charts, list_samples, read_runs
from fluvial.engines.run.process.run_folder import RunFolder, claim, write_json

EVIL = "<script>document.title = 'owned'</script>"


def make(out: Path, lr: float, *, ended: bool = True, prompts: tuple[str, ...] = ("a fox", EVIL)) -> Path:
    """Write a run of two updates."""
    claim(out, resume=False)
    method: dict[str, Any] = {"name": "grpo", "sampling": {"window": {"kind": "random", "size": 2}, "group": 8}}
    config = {"out": str(out), "model": "handwriting", "updates": 2, "optimizer": {"lr": lr}, "method": method}
    folder = RunFolder(out, config, tracker="none")
    for number in (1, 2):
        record = {"update": number, "reward": {"mean": lr * number, "std": 0.1}, "grad_norm": 0.1, "diversity": 0.5}
        folder.log({**record, "objective": {"kl_ref": 0.0}, "seconds": {"rollout": 1.0, "update": 2.0}})
    folder.log({"update": 2, "score": {"heldout": lr}, "exact": {"heldout": 0.0}, "drift": 0.1})
    images = torch.rand(len(prompts), 3, 8, 8, generator=torch.Generator().manual_seed(0))
    folder.write_samples("after", images, list(prompts), [lr] * len(prompts), title="after")
    if ended:
        row = {"evaluator": "heldout", "part": "all", "name": "", "samples": 9, "mean": lr}
        row |= {"difference": 0.1, "low": 0.05, "high": 0.2}
        write_json(out / "summary.json", {"updates": 2, "train_seconds": 7.0, "evaluation": [row]})
    folder.close()
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs that differ in their learning rate, one of which goes on, beside a file and a folder of something else."""
    make(tmp_path / "runs" / "low", 0.25)
    make(tmp_path / "runs" / "high", 0.5, ended=False, prompts=("a fox",))
    (tmp_path / "runs" / "encoded").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("nothing")
    return tmp_path / "runs"


def test_the_page_says_what_differs_and_how_the_runs_went(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report runs/*` and `report` of the folder's runs are the same page; a folder without a run is left out, in a line."""
    assert cli.run(["report", *map(str, sorted(folder.iterdir()))]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(folder / "comparison.html")
    assert shown.err == f"fluvial: left out, without a run: {folder / 'encoded'}\n"
    assert cli.run(["report", str(folder)]) == 0
    assert capsys.readouterr() == (shown.out, "")
    high, low = runs = read_runs([folder])
    assert [run.name for run in runs] == ["high", "low"]
    assert (high.state, low.state, high.seconds, low.seconds) == ("2 of 2 updates", "done", 6.0, 7.0)
    assert find_differences(runs) == {"optimizer.lr": ["0.5", "0.25"]}
    charts = {chart.title: chart.finite for chart in list_charts(runs)}
    assert charts["Reward while training"] == {"high": [(1.0, 0.5), (2.0, 1.0)], "low": [(1.0, 0.25), (2.0, 0.5)]}
    assert charts["Held-out score, heldout evaluator"] == {"high": [(2.0, 0.5)], "low": [(2.0, 0.25)]}
    assert charts["KL to the reference"] == {}
    samples = {each.prompt: [sample is not None for sample in each.samples] for each in list_samples(runs)}
    assert list(samples.items()) == [("a fox", [True, True]), (EVIL, [False, True])]


def test_runs_are_listed(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a table, and as JSON; without a folder those in ./runs."""
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.run(["runs", "ls"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["runs/high", "grpo", "handwriting", "2", "of", "2", "updates", "1.000", "-", "6"]
    assert lines[2] == ["runs/low", "grpo", "handwriting", "done", "0.500", "heldout", "0.250", "7"]
    make(folder / "sweep" / "lr=1", 1.0)
    assert cli.run(["runs", "ls"]) == cli.run(["report", "runs/sweep"]) == 0
    assert f"\n{Path('runs', 'sweep', 'lr=1')} " in capsys.readouterr().out
    assert cli.run(["runs", "ls", "runs/low", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["scores"], row["seconds"]) == ("runs/low", {"heldout": 0.25}, 7.0)


def test_without_runs_the_line_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoded = str(folder / "encoded")
    for words in (["report", encoded, encoded], ["runs", "ls", encoded]):
        assert cli.run(words) == 2
        assert f"{encoded} holds no run" in launch.one_line(capsys.readouterr().err)
    for words in (["report", str(folder / "low"), str(folder / "lwo")], ["runs", "ls", str(folder / "lwo")]):
        assert cli.run(words) == 2
        assert f"there is no folder {folder / 'lwo'}" in launch.one_line(capsys.readouterr().err)


@pytest.mark.long
@pytest.mark.skipif(chromium.binary() is None, reason="needs Chromium: apt-get install chromium")
def test_a_browser_shows_the_comparison(folder: Path) -> None:
    """Nothing is asked of the network, no text of a prompt runs, and nothing is wider than a telephone."""
    path = comparison.write([folder])
    with chromium.tab() as tab:
        tab.open(path)
        assert tab.requests() == [path.resolve().as_uri()]
        assert tab.complaints() == []
        assert tab.value("document.title") == "fluvial: 2 runs"
        assert len(tab.value("[...document.images].map(image => image.naturalWidth)")) == 3
        text = tab.value("document.body.innerText")
        for part in (EVIL, "optimizer.lr", "+0.100 [+0.050, +0.200]", "Reward while training", "Settings that differ"):
            assert part in text, part
        for width in (390, 1280):
            tab.resize(width)
            ends = "[...document.querySelectorAll('tr:first-child > *')].map(cell => cell.getBoundingClientRect().right)"
            assert max(tab.value(ends)) <= width, f"two runs are not beside each other at {width} pixels"
