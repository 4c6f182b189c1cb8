"""The run folder: what is written where, and what a resumed run keeps."""

import json
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.refusals import fails, refuses
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fluvial.engines.run.process import run_folder
from fluvial.engines.run.process.run_folder import FolderLock, RunFolder, claim, without_infinities, write_json

UPDATE = {"update": 1, "loss": 0.5, "grad_norm": 2.0, "reward": {"mean": 0.25, "std": 0.1}, "diversity": 0.5}
EVALUATION = {"update": 1, "exact": {"heldout": 0.5}, "drift": 0.01}
HANDSHAKE = {"update": 0, "handshake": {"servers": ["http://127.0.0.1:30000"], "kind": "fluvial", "sigmas": [1.0, 0.0]}}


def records(folder: Path) -> list[dict[str, Any]]:
    """Return what metrics.jsonl holds."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path) -> EventAccumulator:
    """Return the points of the tracker."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_a_record_is_a_line_of_json_and_a_point_of_each_tag(tmp_path: Path) -> None:
    """Nested names are joined by a slash; the step is the update."""
    folder = RunFolder(tmp_path, {"seed": 3})
    for record in (UPDATE, EVALUATION, UPDATE | {"update": 2, "loss": 0.25}):
        folder.log(dict(record))
    folder.close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 3}
    assert records(tmp_path) == [UPDATE, EVALUATION, UPDATE | {"update": 2, "loss": 0.25}]
    tags = {"update", "loss", "grad_norm", "reward/mean", "reward/std", "diversity", "exact/heldout", "drift"}
    events = scalars(tmp_path)
    assert set(events.Tags()["scalars"]) == tags
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


def test_what_is_no_point_of_a_tracker(tmp_path: Path) -> None:
    """Texts, such as addresses in records of servers, and numbers that JSON lacks, which are null."""
    folder = RunFolder(tmp_path, {})
    folder.log(dict(HANDSHAKE))
    folder.log({"update": 1, "loss": float("nan"), "reward": {"mean": float("inf")}})
    folder.close()
    assert records(tmp_path) == [HANDSHAKE, {"update": 1, "loss": None, "reward": {"mean": None}}]
    assert not (tmp_path / "warnings.txt").exists()
    assert set(scalars(tmp_path).Tags()["scalars"]) == {"update", "handshake/sigmas/0", "handshake/sigmas/1"}
    assert without_infinities({"a": [float("-inf"), 1, None], "b": "text"}) == {"a": [None, 1, None], "b": "text"}


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    """Also a last line that was cut short, and a record that is logged again."""
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(UPDATE)}\n{{"update": 2, "loss": 1.0}}\n{{"update": 3, "lo')
    (tmp_path / "summary.json").write_text("{}")  # of its end: with more updates now, it has not ended
    folder = RunFolder(tmp_path, {"updates": 2}, update=1)
    assert not (tmp_path / "summary.json").exists()
    assert records(tmp_path) == [UPDATE]
    folder.log(dict(UPDATE))
    folder.log({"update": 2, "loss": 2.0})
    folder.close()
    assert records(tmp_path) == [UPDATE, {"update": 2, "loss": 2.0}]


@pytest.mark.usefixtures("charts")
def test_samples_and_curves_are_images(tmp_path: Path) -> None:
    """A name with spaces is a file name without; curves need no record at all."""
    claim(tmp_path / "run", resume=False)
    folder = RunFolder(tmp_path / "run", {})
    path = folder.write_samples("after 20 updates", torch.zeros(2, 1, 8, 32), ["0427", "1999"], torch.ones(2), title="after")
    assert path == tmp_path / "run" / "samples" / "after-20-updates.png"
    curves = tmp_path / "run" / "curves.png"
    assert folder.write_reports() == [tmp_path / "run" / "report.html"]
    empty = curves.read_bytes()
    scored = {**EVALUATION, "score": {"heldout": 0.5}}
    for record in (UPDATE, scored, {"update": 2, "grad_norm": None}):  # a skipped update has no norm
        folder.log(dict(record))
    folder.write_reports()
    assert curves.read_bytes() != empty
    for image in (path, curves):
        with Image.open(image) as opened:
            opened.load()
            assert opened.format == "PNG"
    folder.close()


def test_what_python_warns_of_is_kept_for_the_report(tmp_path: Path) -> None:
    """A line each, and still shown; what is deprecated is for programmers. Afterwards all is as before."""
    folder = RunFolder(tmp_path, {}, tracker="none")
    before = warnings.showwarning
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with folder.keep_warnings():
            warnings.warn("the gradient\nis small", stacklevel=1)
            warnings.warn("an old name", DeprecationWarning, stacklevel=1)
        warnings.warn("later", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["the gradient\nis small", "an old name", "later"]
    assert (tmp_path / "warnings.txt").read_text() == "the gradient is small\n"
    assert warnings.showwarning is before


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    """A value that cannot be written leaves the old file, and no partial one."""
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": 2})
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads(path.read_text()) == {"a": 2}


def test_a_folder_is_claimed_once_and_resumed_only_if_it_holds_a_run(tmp_path: Path) -> None:
    refuses("holds no run to resume", claim, tmp_path / "run", resume=True)
    claim(tmp_path / "run", resume=False)
    write_json(tmp_path / "run" / "config.json", {})
    refuses("already holds a run: set resume to continue it", claim, tmp_path / "run", resume=False)
    claim(tmp_path / "run", resume=True)
    (tmp_path / "file").write_text("")
    refuses("cannot be made: Not a directory", claim, tmp_path / "file" / "run", resume=False)


# A process that takes the lease of a folder, as one of the host of a name, and ends or lives until its input is closed.
HOLDER = """
import os, socket, sys
path, host, beat, stale, lives = sys.argv[1:]
socket.gethostname = lambda: host
from filelock import SoftFileLease
lease = SoftFileLease(path, lease_duration=float(stale), heartbeat_interval=float(beat), thread_local=False)
lease.acquire()
print("holds", flush=True)
if lives == "True":
    sys.stdin.read()
os._exit(0)
"""


@contextmanager
def held(folder: Path, *, host: str, lives: bool) -> Iterator[int]:
    """Let another process hold a folder, and yield its number; it has ended unless it lives."""
    beat = (run_folder.BEAT, run_folder.STALE)
    words = [str(folder / run_folder.LOCK), host, *map(str, beat), str(lives)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, *words], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        if not lives:
            process.wait()
        yield process.pid


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("host", [socket.gethostname(), "other"])
def test_a_living_holder_refuses_others_and_a_dead_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, lives: bool
) -> None:
    """A dead one of this machine at once; one of another is watched first, and a sign of life refuses the newcomer."""
    monkeypatch.setattr(run_folder, "BEAT", 0.2)
    monkeypatch.setattr(run_folder, "STALE", 1.0)
    said = list[str]()
    with held(tmp_path, host=host, lives=lives) as holder:
        if lives:
            says = rf"is held by process {holder} on {host}\S*: wait for its end, or set out to another folder"
            refuses(says, FolderLock, tmp_path, said.append)
        else:
            began = time.monotonic()
            taken = FolderLock(tmp_path, said.append)
            assert (time.monotonic() - began >= run_folder.STALE) == (host == "other")
            taken.check()
            taken.release()
            assert [*tmp_path.iterdir()] == []
    watched = lives or host == "other"
    assert ["waiting up to 1 s for a sign of life" in line for line in said] == [True] * watched


def test_a_run_whose_folder_was_taken_stops(tmp_path: Path) -> None:
    """And leaves the other's hold as it is."""
    own = FolderLock(tmp_path)
    own.check()
    (tmp_path / run_folder.LOCK).unlink()
    other = FolderLock(tmp_path)
    fails(r"is held by process .* on .*, while this process was suspended", own.check)
    own.release()
    other.check()
    assert (tmp_path / run_folder.LOCK).is_file()


def test_a_refused_claim_leaves_no_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run began, and ended, between the look at the folder and the hold."""
    held_before = run_folder._check_holds_run

    def check(out: Path, **options: Any) -> None:
        held_before(out, **options)
        write_json(tmp_path / "config.json", {})

    monkeypatch.setattr(run_folder, "_check_holds_run", check)
    refuses("already holds a run", claim, tmp_path, resume=False)
    assert not (tmp_path / run_folder.LOCK).exists()
