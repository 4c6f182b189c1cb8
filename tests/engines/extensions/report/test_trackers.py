"""Trackers: what each is called with, what is kept for a resumption, and that none of them can end a run."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers import tiny_jobs as tiny
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fluvial.engines.cli import main as cli
from fluvial.engines.errors import UsageError
from fluvial.engines.run import train
from fluvial.engines.run.log import trackers
from fluvial.engines.run.log.trackers import SafeTracker, TrackedRun, TrackedSamples
from fluvial.engines.run.process.run_folder import RunFolder, claim

FAKE = '''
"""Notes its calls. Like the real one it takes these names alone."""
calls = []
class Image:
    def __init__(self, image, caption=None):
        self.image, self.caption = image, caption
class Histogram:
    def __init__(self, *, np_histogram):
        self.bins = np_histogram
class Settings:
    def __init__(self, console):
        self.console = console
class Run:
    def define_metric(self, name, step_metric=None):
        calls.append(("define_metric", name, step_metric))
    def log(self, numbers, step=None):
        calls.append(("log", numbers, step))
    def finish(self):
        calls.append(("finish",))
run = Run()
log, finish = run.log, run.finish
def init({arguments}):
    calls.append(("init", locals()))
    return run
'''
# Arguments of `init`, as wandb 0.31, trackio 0.43 and swanlab 0.10 name them.
ARGUMENTS = {
    "wandb": "project, name, id, resume, dir, config, mode, settings",
    "trackio": "project, name, config, resume, embed",
    "swanlab": "*, project, name, config, log_dir, mode, id, resume",
}


@pytest.fixture(autouse=True)
def no_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kept = {name: sys.modules.pop(name, None) for name in ARGUMENTS}
    for name, arguments in ARGUMENTS.items():
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(FAKE.replace("{arguments}", arguments))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield
    for name, module in kept.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def calls(name: str) -> list[Any]:
    found: list[Any] = sys.modules[name].calls
    return found


def folder(out: Path, name: str, update: int = 0) -> RunFolder:
    """Return a run folder with a tracker, which has logged an update and two images."""
    claim(out, resume=update > 0)
    made = RunFolder(out, {"seed": 3}, update=update, tracker=name)
    made.log({"update": update + 1, "reward": {"mean": 0.5}, "lost": float("nan")})
    made.write_samples("before", torch.zeros(2, 1, 4, 4), ["a fox", "an ox"], [0.25, 1.0], title="t", update=update)
    made.close()
    return made


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_tracker_gets_numbers_images_and_settings(tmp_path: Path, name: str) -> None:
    """By update, with prompts and scores; a number that is not finite is left out. Without a login it is offline."""
    folder(tmp_path / "run", name)
    start, *rest, end = calls(name)
    assert start[0] == "init"
    assert start[1]["config"] == {"seed": 3}
    assert start[1]["resume"] == "allow"
    assert start[1].get("mode", "offline") == "offline"
    assert end == ("finish",)
    logs = [call for call in rest if call[0] == "log"]
    numbers = {"update": 1, "reward/mean": 0.5}
    assert logs[0] == ("log", numbers, None if name == "wandb" else 1)
    images = [value for _, logged, _ in logs[1:] for key, value in logged.items() if key.startswith("samples/before")]
    shown = images if name == "trackio" else images[0]
    assert [image.caption for image in shown] == ["a fox   0.25", "an ox   1.00"]
    assert all(isinstance(image.image, Image.Image) for image in shown)
    assert all(step == 0 or logged["update"] == 0 for _, logged, step in logs[1:])
    if name == "wandb":  # a resumed run logs some updates again, and wandb drops what is not after its own step
        assert ("define_metric", "*", "update") in rest


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, name: str) -> None:
    folder(tmp_path / "run", name)
    folder(tmp_path / "run", name, update=1)
    folder(tmp_path / "other" / "run", name)
    key = "name" if name == "trackio" else "id"
    first, second, other = (call[1][key] for call in calls(name) if call[0] == "init")
    assert first == second != other
    kept = json.loads((tmp_path / "run" / "tracker.json").read_text())["id"]
    assert len(kept) == 21
    assert kept.startswith(first.rpartition("-")[2])


@pytest.mark.usefixtures("fakes")
def test_a_login_or_a_mode_takes_a_tracker_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the tracker's own settings decide, where offline was the default."""
    for number, change in enumerate(({}, {"WANDB_API_KEY": "x"}, {"WANDB_MODE": "online"}, {"netrc": "api.wandb.ai"})):
        with monkeypatch.context() as patch:
            for name, value in change.items():
                patch.setenv(name, value)
            if "netrc" in change:
                (tmp_path / "netrc").write_text(f"machine {change['netrc']} login user password secret\n")
            folder(tmp_path / f"run{number}", "wandb")
    assert [call[1]["mode"] for call in calls("wandb") if call[0] == "init"] == ["offline", None, None, None]
    (tmp_path / ".swanlab").mkdir()
    (tmp_path / ".swanlab" / ".netrc").write_text("")
    folder(tmp_path / "swan", "swanlab")
    assert calls("swanlab")[0][1]["mode"] is None


@pytest.mark.usefixtures("fakes")
def test_wandb_gets_a_histogram_as_one(tmp_path: Path) -> None:
    """The outer bins have no end; there they are as wide as 1. Whatever is no bin stays a number."""
    claim(tmp_path / "run", resume=False)
    made = RunFolder(tmp_path / "run", {}, tracker="wandb")
    made.log({"update": 1, "advantage": {"std": 1.0, "histogram": {"below": 0.25, "-0.5": 0.5, "2": 0.25}}})
    made.close()
    (logged,) = (call[1] for call in calls("wandb") if call[0] == "log")
    histogram = logged.pop("advantage/histogram")
    assert logged == {"update": 1, "advantage/std": 1.0}
    assert histogram.bins == ([0.25, 0.5, 0.25], [-1.5, -0.5, 2.0, 3.0])


# The functions of mlflow 3.17 that are called, over a list of runs that its module keeps.
MLFLOW = """
import re
from types import SimpleNamespace
calls, runs = [], []
def search_runs(*, filter_string, output_format):
    assert output_format == "list"
    wanted = re.fullmatch(r"tags\\.fluvial = '(\\w+)'", filter_string)[1]
    return [run for run in runs if run.tags["fluvial"] == wanted]
def start_run(run_id=None, *, run_name=None, tags=None):
    calls.append(("start_run", run_id, run_name))
    if run_id is None:
        runs.append(SimpleNamespace(tags=tags, info=SimpleNamespace(run_id=f"run{len(runs)}")))
def log_metrics(metrics, step=None):
    assert all(re.fullmatch(r"[\\w\\-. :/]+", name) for name in metrics), metrics
    calls.append(("log_metrics", metrics, step))
def log_image(image, *, key, step):
    calls.append(("log_image", image, key, step))
def get_experiment_by_name(name):
    return None
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **options: calls.append((name, *args, *options.values()))
"""


def test_mlflow_gets_numbers_images_and_settings_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database in the run folder, or the server that the environment names; names of numbers in its characters."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    out = tmp_path / "run"
    folder(out, "mlflow")
    first = calls("mlflow")[:]
    assert ("set_tracking_uri", f"sqlite:///{out}/mlflow.db") in first
    assert ("create_experiment", "fluvial", f"file://{out}/mlflow") in first
    assert ("start_run", None, "run") in first
    assert ("log_dict", {"seed": 3}, "config.json") in first
    assert ("log_metrics", {"update": 1, "reward/mean": 0.5}, 1) in first
    assert [call[2:] for call in first if call[0] == "log_image"] == [("samples/before", 0)]
    assert first[-1] == ("end_run",)
    calls("mlflow").clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    made = RunFolder(out, {}, update=1, tracker="mlflow")
    made.log({"update": 2, "tags": {"a (b)|c": {"reward": 1.0}}})
    made.close()
    assert ("start_run", "run0", None) in calls("mlflow")
    assert ("log_metrics", {"update": 2, "tags/a _b__c/reward": 1.0}, 2) in calls("mlflow")
    assert "set_tracking_uri" not in [call[0] for call in calls("mlflow")]
    sys.modules.pop("mlflow")


def test_tensorboard_gets_images_and_settings(tmp_path: Path) -> None:
    folder(tmp_path / "run", "tensorboard")
    assert not (tmp_path / "run" / "tracker.json").exists()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] == ["samples/before"]
    assert set(events.Tags()["scalars"]) == {"update", "reward/mean"}
    assert b'"seed": 3' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    none = folder(tmp_path / "none", "none")
    assert none.trackers == []
    assert not (tmp_path / "none" / "tensorboard").exists()


class Broken:
    """A tracker without a network, as far as `works` says."""

    works: tuple[str, ...] = ()
    asked: list[str] = []  # noqa: RUF012

    def __init__(self, run: TrackedRun) -> None:
        self._call("start")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._call("log")

    def log_images(self, samples: TrackedSamples, step: int) -> None:
        self._call("images")

    def finish(self) -> None:
        self._call("finish")

    def _call(self, name: str) -> None:
        self.asked.append(name)
        if name not in self.works:
            raise SystemExit(1) if name == "finish" else ConnectionError("no\nnetwork")


def test_a_tracker_that_fails_is_reported_once_and_left_alone_after_three_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a row: one that works in between is asked on. One that cannot start is not asked at all."""
    run = TrackedRun(tmp_path, {}, "x" * 21, 0)

    def used(works: tuple[str, ...], kinds: str) -> tuple[list[str], list[str]]:
        said: list[str] = []
        monkeypatch.setattr(Broken, "works", works)
        monkeypatch.setattr(Broken, "asked", [])
        safe = SafeTracker("mine:Broken", Broken, run, said.append)
        sheet = TrackedSamples("a", [], [], Image.new("RGB", (1, 1)))
        for kind in kinds:
            safe.log_images(sheet, 1) if kind == "i" else safe.log({}, 1)
        safe.finish()
        return Broken.asked, said

    asked, said = used((), "llll")
    assert asked == ["start"]
    goes_on = "training goes on, and metrics.jsonl holds every number"
    assert said == [f"tracker mine:Broken failed (ConnectionError: no network); {goes_on}"]
    asked, said = used(("start", "images"), "llillll")
    assert asked == ["start", "log", "log", "images", "log", "log", "log"]
    assert len(said) == 1
    asked, said = used(("start", "log"), "l")
    assert asked == ["start", "log", "finish"]
    assert said == [f"tracker mine:Broken failed (SystemExit: 1); {goes_on}"]


def test_a_run_with_a_broken_tracker_of_ones_own_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report has the warning. The tracker is named by its module; another beside it gets every number."""
    monkeypatch.setattr(Broken, "works", ("start",))
    name = f"{Broken.__module__}:Broken"
    few = {"evaluation.samples": 2, "evaluation.final_samples": 4}
    summary = train(tiny.config(tmp_path / "run", tracker=f"{name}, tensorboard", **few), tiny.job())
    assert summary["updates"] == 1
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"tracker {name} failed (ConnectionError: no network)" in report
    assert "Best samples" in report
    assert report.count("<img") == 4 * 2 + 2 + 2  # before and after, best, worst
    assert json.loads((tmp_path / "run" / "config.json").read_text())["tracker"] == f"{name}, tensorboard"


def test_a_tracker_that_cannot_be_had_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that is missing is named with its extra; a folder of its name in the working folder is none."""
    for name in ARGUMENTS:
        with monkeypatch.context() as patch:
            patch.setattr(trackers, "find_spec", lambda found: None)
            says = f"tracker is '{name}': {name} is not installed; pip install 'fluvial.{name}.'"
            with pytest.raises(UsageError, match=says):
                trackers.find_tracker(name)
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        if sys.modules.get(name) is None and not any((Path(entry) / name / "__init__.py").exists() for entry in sys.path):
            with pytest.raises(UsageError, match="is not installed"):
                trackers.find_tracker(name)
    out = tmp_path / "run"
    assert cli.run(["train", "grpo", "--tracker", "tensorbord", "--out", str(out)]) == 2
    said = launch.one_line(capsys.readouterr().err)
    assert "tracker is 'tensorbord', expected one of none, tensorboard, wandb, trackio, swanlab, mlflow, or" in said
    assert "did you mean 'tensorboard'?" in said
    assert not out.exists()
    with pytest.raises(UsageError, match="is of type str, expected a function or a class of a TrackedRun"):
        trackers.find_tracker("fluvial.engines.extensions.report.trackers:PROJECT")
