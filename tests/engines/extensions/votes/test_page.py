"""People vote in a browser: one who prefers brighter images makes a model draw brighter ones."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import chromium, launch
from PIL import Image

from fluvial.engines.extensions.judges.votes import Votes
from fluvial.engines.extensions.wire.client import HttpClient

pytestmark = pytest.mark.skipif(chromium.binary() is None, reason="needs Chromium: apt-get install chromium")
KEY, SHOWN = "a-key", "document.body.dataset.shown"
# Mean brightness of the two images that are shown.
BRIGHTNESS = """['left-image', 'right-image'].map(name => {
  const image = document.getElementById(name), canvas = document.createElement('canvas');
  canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return data.reduce((sum, value) => sum + value, 0) / data.length;
})"""
RUN = "train ddpo --updates 1 --micro-batch 4 --evaluation.samples 8 --final-samples 8 --evaluation.every 0"
RUN += " --sampling.prompts 2 --sampling.group 4"


class Served(NamedTuple):
    """A server of votes that runs."""

    address: str
    folder: Path

    def page(self, voter: str) -> str:
        return f"{self.address}/#key={KEY}&voter={voter}"

    @property
    def votes(self) -> list[dict[str, Any]]:
        file = self.folder / "preferences.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def option(self) -> str:
        return f"votes:url={self.address},key_env=FLUVIAL_SERVE_KEY"


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    with launch.start("rewards", "vote", "--out", str(folder), "--port", "0", FLUVIAL_SERVE_KEY=KEY) as server:
        until = time.monotonic() + 60
        while not (found := re.search(rf"the page for voters is (http://127\.0\.0\.1:\d+)/#key={KEY}\n", server.stdout)):
            assert server.poll() is None, server.stderr
            assert time.monotonic() < until, "the server does not listen"
            time.sleep(0.02)
        yield Served(found[1], folder)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, server.stderr


def vote(tab: chromium.Tab, key: Callable[[list[float]], str]) -> str:
    """Press a key that depends on the brightness of both images, wait for the next pair, and return what was shown."""
    before: str = tab.until(SHOWN)
    tab.press(key(tab.value(BRIGHTNESS)))
    tab.until(f"{SHOWN} != '{before}'")
    return before


def brighter(brightness: list[float]) -> str:
    left, right = brightness
    return "ArrowLeft" if left > right else "ArrowRight" if right > left else "ArrowDown"


def brightness_of(folder: Path, name: str) -> float:
    with Image.open(folder / name) as image:
        return float(np.asarray(image.convert("L"), dtype=np.float64).mean())


def check_prefers_brighter(served: Served) -> None:
    assert served.votes
    for line in served.votes:
        first, second = (brightness_of(served.folder, line[name]) for name in ("image_0", "image_1"))
        assert line["label_0"] == (1 if first > second else 0 if second > first else 0.5)


def test_two_people_vote_by_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees another pair; undo brings the last one back; the score is the strength; nothing is complained of."""
    monkeypatch.setenv("FLUVIAL_SERVE_KEY", KEY)
    with serving(tmp_path) as served, chromium.tab() as ann, chromium.tab() as bob:
        images = torch.tensor([0.1, 0.9, 0.5]).view(3, 1, 1, 1).expand(3, 1, 8, 32)
        scores = Votes(HttpClient(served.address, key_env="FLUVIAL_SERVE_KEY"))(images, ["0427"] * 3, 0)
        ann.open(served.page("ann"))
        bob.open(served.page("bob"))
        first, other = ann.until(SHOWN), bob.until(SHOWN)
        assert first != other
        assert ann.value("document.getElementById('prompt').innerText") == "0427"
        bob.press("ArrowDown")  # a tie
        bob.until(f"{SHOWN} != '{other}'")
        assert [(line["voter"], line["label_0"]) for line in served.votes] == [("bob", 0.5)]
        bob.press("u")
        bob.until(f"{SHOWN} == '{other}'")
        assert served.votes == []
        assert vote(ann, brighter) == first
        ann.until(SHOWN)
        for tab in (ann, bob):
            for width in (800, 1600):
                tab.resize(width)
        vote(bob, brighter)
        vote(ann, brighter)
        for tab in (ann, bob):
            tab.until("!document.getElementById('waiting').hidden")
        found = scores.result(20)
        assert sorted(range(3), key=found.__getitem__) == [0, 2, 1]
        assert {line["voter"] for line in served.votes} == {"ann", "bob"}
        check_prefers_brighter(served)
        assert ann.complaints() + bob.complaints() == []
        assert all(url.startswith((served.address, "blob:")) for url in ann.requests() + bob.requests())
        assert KEY not in " ".join(url.partition("#")[0] for url in ann.requests())


def test_without_the_key_the_page_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as served, chromium.tab() as tab:
        tab.open(served.address + "/")
        tab.until("!document.getElementById('problem').hidden")
        assert "lacks the key: open the one that the server printed" in tab.value(chromium.TEXT)


@pytest.mark.long
def test_a_run_learns_from_votes_and_resumes_where_it_was_stopped(tmp_path: Path) -> None:
    """Ctrl-C while it waits for people ends it, saved; resumed, it makes the same images, and waits for the votes that lack.

    A second run of the same settings makes the same images and needs nobody, and ends with the same weights; the votes are
    preferences for dpo.
    """
    with serving(tmp_path / "votes") as served, chromium.tab() as tab:
        settings = (*RUN.split(), "--rewards", served.option)
        tab.open(served.page("ann"))
        with launch.start(*settings, "--out", str(tmp_path / "a"), FLUVIAL_SERVE_KEY=KEY) as run:
            for _ in range(3):
                vote(tab, brighter)
            until = time.monotonic() + 60
            while "waiting for votes: " not in run.stderr:
                assert time.monotonic() < until
                time.sleep(0.05)
            run.send_signal(signal.SIGINT)
            assert run.wait(120) == 0, run.stderr
            assert "SIGINT: stopped after update 0, all saved; continue with --resume" in run.stdout
        assert len(served.votes) == 3
        again = ("--out", str(tmp_path / "a"), "--resume")
        with launch.start(*settings, *again, FLUVIAL_SERVE_KEY=KEY) as run:
            for _ in range(8 - 3):
                vote(tab, brighter)
            assert run.wait(240) == 0, run.stderr
        assert len(served.votes) == 8, "no pair was asked for twice"
        check_prefers_brighter(served)
        with launch.start(*settings, "--out", str(tmp_path / "b"), FLUVIAL_SERVE_KEY=KEY) as run:
            assert run.wait(240) == 0, run.stderr
        assert len(served.votes) == 8
        assert launch.weights(tmp_path / "a") == launch.weights(tmp_path / "b")
        (record,) = [record for record in launch.records(tmp_path / "b") if "reward" in record]
        assert record["invalid"] == {"samples": 0, "groups": 0}
        assert record["reward"]["std"] > 0
        assert tab.complaints() == []
    model = json.loads((tmp_path / "a" / "config.json").read_text())["model"]
    given = ("--preferences", str(tmp_path / "votes"), "--model", model, "--out", str(tmp_path / "dpo"))
    few = "--updates 1 --evaluation.samples 8 --final-samples 8 --sampling.prompts 2"
    done = launch.fluvial("train", "dpo", *given, *few.split())
    assert done.returncode == 0, done.stderr
