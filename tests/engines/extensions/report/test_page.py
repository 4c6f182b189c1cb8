"""The report of a run: what it says, that it runs nothing and asks for nothing, and that a browser shows it."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import chromium

from fluvial.engines.cli import main as cli
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.report import page
from fluvial.engines.run.log.sounds import write_wave
from fluvial.engines.run.process.run_folder import RunFolder, claim, write_json

EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">&'\""
CONFIG = {"model": EVIL, "train": "lora", "updates": 4, "seed": 0, "rollout": {"sampler": "flow_sde", "steps": 4}}

ROW = {"evaluator": EVIL, "part": "all", "name": "", "samples": 1000, "mean": 0.75, "exact": 0.375, "std": 0.1}
COMPARED = {"base_mean": 0.25, "win_rate": 0.9, "difference": 0.5, "low": 0.4375, "high": 0.5625}
SUMMARY = {
    "updates": 4,
    f"{EVIL}_score_before": 0.25,
    "samples_per_second": 2.0,
    "train_seconds_by_phase": {"rollout": 1.5},
    "versions": {"torch": EVIL},
    "sizes": [[512, 512], [256, 1024]],
    "evaluation": [ROW | COMPARED, {**ROW, **COMPARED, "part": "tag", "name": "a tag", "low": -0.1}],
}


def update(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "update": number,
        "samples": 8 * number,
        "loss": 0.5,
        "grad_norm": 0.1 * number,
        "first_pass_max_abs_log_ratio": 0.0,
        "objective": {"ratio": 1.0, "clipped": 0.25, "kl_ref": 0.01 * number, "kl_old": 0.0},
        "by_step": {"abs_log_ratio": {"1": 0.1, "2": 0.2}, "kl_ref": {"1": 0.0, "2": None}},
        "reward": {"mean": 0.5 + 0.1 * number, "std": 0.1},
        "tags": {EVIL: {"reward": 0.5, "samples": 4}},
        "groups": {"reward_std": 0.1, "without_signal": 0.25},
        "advantage": {"zero": 0.0, "histogram": {"below": 0.0, "-1": 0.5, "0": 0.5}},
        "speed": {"samples_per_second": 2.0},
        "memory": {"resident": 0.5},
        "seconds": {"rollout": 1.0, "update": 2.0},
        "skipped_steps": 0,
        "diversity": 0.5,
        **changes,
    }


def evaluation(number: int, score: float) -> dict[str, Any]:
    return {"update": number, "score": {EVIL: score}, "exact": {EVIL: score / 2}, "drift": 0.1 * number}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended, whose names and prompts are hostile."""
    out = tmp_path / "<b>run"
    claim(out, resume=False)
    folder = RunFolder(out, CONFIG, tracker="none")
    for record in (evaluation(0, 0.25), update(1), update(2), update(3), update(4), evaluation(4, 0.75)):
        folder.log(record)
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    prompts = [EVIL, "a red fox", "a blue fox"]
    sheets = {"before": [0.0, 0.5, 1.0], "after": [1.0] * 3, "best": [1.0] * 3, "worst": [0.25] * 3}
    for name, scores in sheets.items():
        folder.write_samples(name, images, prompts, scores, title=name)
    folder.warn(f"a warning {EVIL}")
    write_json(out / "summary.json", SUMMARY)
    folder.close()
    return out


class Elements(HTMLParser):
    """Counts the elements of a page, keeps their attributes, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, list[dict[str, str | None]]] = {}
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.setdefault(tag, []).append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_everything_and_runs_nothing(run: Path) -> None:
    """Hostile text is text. All images are data, and nothing has another address, a handler or a script.

    It opens with the run's name, each score before and after with the interval of its change, warnings and images.
    """
    elements = Elements(page.build_page(run))
    assert not {"script", "iframe", "object", "base", "form"} & set(elements.found)
    assert len(elements.found["img"]) == 2 * 3 + 3 + 3
    images = [image["src"] or "" for image in elements.found["img"]]
    assert all(image.startswith(("data:image/png;base64,", "data:image/jpeg;base64,")) for image in images)
    attributes = [item for found in elements.found.values() for element in found for item in element.items()]
    assert not [name for name, _ in attributes if name.startswith("on")]
    assert all((value or "").startswith("data:") for name, value in attributes if name in ("href", "src"))
    parts = ["Reward while training", "|log ratio| by step", "Advantages", "12.5\u00a0% → 37.5\u00a0%", "2.000"]
    for part in (*parts, "+0.500 [+0.438, +0.562]", "a warning", "a red fox"):
        assert part in elements.text, part
    first = "<b>run", "0.250 → 0.750", "95 % interval", "0.600 → 0.900", "Warnings", "Before and after", "Curves"
    places = [elements.text.index(part) for part in (*first, "Summary")]
    assert places == sorted(places)
    assert elements.text.count(EVIL) >= 4 + 3  # prompts with their images; model, tag, evaluator and version


def test_sounds_of_samples_are_played(run: Path, tmp_path: Path) -> None:
    """Beside the image of their sample, as data, which the page's policy allows."""
    shutil.copytree(run, tmp_path / "run")
    write_wave(file := tmp_path / "run" / "samples" / "after-01.wav", torch.tensor([[0.5, -0.5]]), 400)
    text = page.build_page(tmp_path / "run")
    (sound,) = Elements(text).found["audio"]
    assert sound["src"] == f"data:audio/wav;base64,{base64.b64encode(file.read_bytes()).decode()}"
    assert "controls" in sound
    prompt = json.loads((run / "samples" / "after.json").read_text())[1]["prompt"]
    assert sound["aria-label"] == f"after: {prompt}"
    assert "media-src data:;" in text
    assert "audio" not in Elements(page.build_page(run)).found


def test_the_largest_changes_come_first(run: Path) -> None:
    """A score that rose is green, one that fell is red, and an equal one is neither."""
    index = run / "samples" / "after.json"
    rows = json.loads(index.read_text())
    for row, score in zip(rows, (0.0, 0.25, 1.75), strict=True):
        row["score"] = score
    index.write_text(json.dumps(rows))
    pairs = re.findall(r'<div class="pair">(.*?)</figcaption>', page.build_page(run), re.DOTALL)
    found = [re.findall(r"<span>(before|after) <b(.*?)>(.*?)</b>", pair) for pair in pairs]
    assert [[score for _, _, score in pair] for pair in found] == [["1.000", "1.750"], ["0.500", "0.250"], ["0", "0"]]
    assert [colour for pair in found for _, colour, _ in pair] == ["", ' class="good"', "", ' class="bad"', "", ""]


def test_the_summary_is_tables(run: Path) -> None:
    """Names in words, no raw dicts or lists, and no number twice; an interval that holds 0 has no colour."""
    text = page.build_page(run).partition("<h2>Summary</h2>")[2].partition("<h2>Configuration")[0]
    assert not re.search(r"[{}]|\[[^+-]", Elements(text).text.replace(EVIL, ""))
    cells = re.findall(r"<td>(.*?)</td>", text)
    assert cells[cells.index("train seconds by phase, rollout") + 1] == "1.500"
    assert cells[cells.index("sizes, 2") + 1] == "256, 1,024"
    assert not [cell for cell in cells if "score before" in cell]
    rows = [cells[:8], cells[8:16]]
    assert [row[1] for row in rows] == ["all", "a tag"]
    changes = '<span class="good">+0.500 [+0.438, +0.562]</span>', '<span class="">+0.500 [-0.100, +0.562]</span>'
    assert tuple(row[5] for row in rows) == changes


def test_what_is_worth_a_look_is_said(run: Path) -> None:
    """Nothing of a run that went well, but for what it warned of; a line for each that did not."""

    def lines() -> list[str]:
        found = re.search(r'class="warnings">.*?</div>', page.build_page(run), re.DOTALL)
        assert found is not None
        return re.findall("<li>(.*?)</li>", found[0], re.DOTALL)

    assert len(lines()) == 1
    bad = {
        "skipped_steps": 2,
        "first_pass_max_abs_log_ratio": 1e-3,
        "diversity": 0.2,
        "groups": {"without_signal": 0.75, "reward_std": 0.0},
    }
    records = [evaluation(0, 0.75), update(1), update(2), update(3), update(4, **bad), evaluation(4, 0.25)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"update": 5, "lo')
    (run / "summary.json").unlink()
    found = "\n".join(lines()[:-1])
    parts = (
        "not ended: 4 of 4",
        "2 steps were skipped",
        "is 0.001",
        "75% of the groups",
        "from 0.5 to 0.2",
        "from 0.750 to 0.250",
    )
    assert all(part in found for part in parts), found
    assert len(lines()) == 7


def test_a_run_that_goes_on_has_a_report_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of its first evaluation alone; without samples, numbers or a summary as well."""
    folder = RunFolder(tmp_path, CONFIG, tracker="none")
    assert "<h2>Summary</h2>" not in page.build_page(tmp_path)
    (tmp_path / "samples").mkdir()
    folder.write_samples("before", torch.zeros(1, 1, 4, 4), ["a fox"], None, title="")
    folder.log(update(1, grad_norm=None, reward={"mean": None}))
    assert cli.run(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    text = (tmp_path / "report.html").read_text()
    assert len(Elements(text).found["img"]) == 1
    assert "The run has not ended" in text


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="holds no run: name the folder of one"):
        page.build_page(tmp_path)
    assert cli.run(["report", str(tmp_path / "none")]) == 2
    assert cli.run(["report"]) == 2
    assert cli.run(["report", "--help"]) == 0
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.skipif(chromium.binary() is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.usefixtures("charts")
def test_a_browser_shows_the_page(run: Path) -> None:
    """Every image is loaded, nothing is asked for or complained of, no hostile text runs, and it follows the dark theme."""
    path = page.write(run)
    with chromium.tab() as tab:
        tab.open(path)
        assert tab.requests() == [path.resolve().as_uri()]
        assert tab.complaints() == []
        assert tab.value("document.title") == "fluvial: <b>run"
        assert tab.value("[...document.images].map(image => image.naturalWidth)") == [256] * 12
        assert tab.value("document.images[0].getBoundingClientRect().width") > 200, "pairs are large"
        text = tab.value("document.body.innerText")
        for part in (EVIL, "Reward while training", "Worst samples", "a blue fox", "Warnings", "0.250 → 0.750"):
            assert part in text, part
        assert 'flow_sde"' not in text, "the configuration is folded"
        tab.value("document.querySelector('details').open = true")
        assert 'flow_sde"' in tab.value("document.body.innerText")
        assert tab.value("document.querySelector('svg').getBoundingClientRect().height") > 10
        assert "rgb(37, 99, 235)" in tab.value("[...document.querySelectorAll('path')].map(p => getComputedStyle(p).stroke)")
        background = "getComputedStyle(document.body).backgroundColor"
        light = tab.value(background)
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert (light, tab.value(background)) == ("rgb(255, 255, 255)", "rgb(20, 22, 26)")
        for width in (400, 800, 1600):
            tab.resize(width)
        words = "[...document.querySelectorAll('td')].filter(cell => cell.innerText == 'train seconds by phase, rollout')"
        assert tab.value(f"{words}[0].getBoundingClientRect().height") < 40, "a name is on one line"
        assert tab.complaints() == []


@pytest.mark.skipif(chromium.binary() is None, reason="needs Chromium: apt-get install chromium")
def test_the_browser_sees_what_a_page_does(tmp_path: Path) -> None:
    """A script, an error, a missing image and a request are seen, so that the test above can fail."""
    path = tmp_path / "page.html"
    path.write_text(
        "<title>a</title><script>document.title = 'owned'; nothing()</script><img src='http://localhost:9/x.png'>"
    )
    with chromium.tab() as tab:
        tab.open(path)
        assert tab.value("document.title") == "owned"
        assert tab.value("document.images[0].naturalWidth") == 0
        assert tab.requests()[1:] == ["http://localhost:9/x.png"]
        assert any("nothing is not defined" in json.dumps(complaint) for complaint in tab.complaints())
