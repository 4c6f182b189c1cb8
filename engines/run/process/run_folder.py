"""The run folder: all files of a run, written by rank 0 of one run at a time.

config.json  metrics.jsonl  summary.json  warnings.txt  tracker.json  probe.safetensors
samples/*.{png,json,csv,wav}  checkpoints/  weights/

From extensions: report.html  curves.png  tensorboard/
"""

import contextlib
import json
import math
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import optree
from filelock import SoftFileLease, Timeout
from PIL import Image
from torch import Tensor

from fluvial.engines import plugins
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.engines.run.evaluation.evaluate import Scores
from fluvial.engines.run.evaluation.table import has_same_samples, read_scores, write_scores
from fluvial.engines.run.log import images, trackers
from fluvial.engines.run.log.records import read_json, read_records
from fluvial.engines.run.log.sounds import write_wave
from fluvial.engines.run.log.trackers import SafeTracker, TrackedRun, TrackedSamples
from fluvial.models.images import to_image
from fluvial.models.protocol import Sounds

LOCK = ".lock"
BEAT, STALE = 5.0, 120.0  # seconds; network file systems may report a file's attributes up to 60 s late


class FolderLock:
    """Lock of a run folder by this process: a lease of `filelock`, renewed every `BEAT` seconds.

    It is not a kernel lock, because some network file systems do not share these between hosts. A dead holder on this
    machine is replaced at once; any other holder after `STALE` seconds without renewal, by the clock of the waiting process.

    Args:
        folder: existing folder.
        say: function that prints a line, e.g. while this waits for the holder.

    Raises:
        UsageError: a living process holds the lock.
        OSError: the lock file cannot be written.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self.folder = folder
        path, pause = folder / LOCK, min(1.0, BEAT / 4)
        self._lease = SoftFileLease(
            path, lease_duration=STALE, heartbeat_interval=BEAT, poll_interval=pause, thread_local=False
        )
        try:
            self._lease.acquire(timeout=0)
        except Timeout:
            say(f"{self._holder}: waiting up to {STALE:g} s for a sign of life")
            renewed = _read_time(path)
            try:
                self._lease.acquire(timeout=STALE + 2 * BEAT, cancel_check=lambda: _read_time(path) not in (renewed, None))
            except Timeout:
                raise UsageError(f"{self._holder}: wait for its end, or set `out` to another folder") from None

    @property
    def _holder(self) -> str:
        owner = self._lease.owner
        who = "another process" if owner is None else f"process {owner.pid} on {owner.hostname}"
        return f"run folder {self.folder} is held by {who}"

    def check(self) -> None:
        """Raise RunError if another process has taken the folder, e.g. because this one was suspended for minutes."""
        owner = self._lease.owner
        if owner is not None and owner.token != self._lease.token:
            raise RunError(f"{self._holder}, while this process was suspended: it stops, nothing is written")

    def release(self) -> None:
        """Release the lock."""
        self._lease.release()


def _read_time(path: Path) -> int | None:
    """Return the time of a file's last change; None if the file is gone."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return None


MARK = ".launch"
LAUNCH = "TORCHELASTIC_RUN_ID"  # id of the torchrun that started this process, the same on all ranks and in all attempts


def mark(out: Path) -> None:
    """Write the id of this process's torchrun, if any, to a run folder; OSError if it cannot be written."""
    if (name := os.environ.get(LAUNCH)) is not None:
        (out / MARK).write_text(name, encoding="utf-8")


def unmark(out: Path) -> None:
    """Remove the mark of an earlier torchrun with the same id, so that this one does not mistake that run for its own."""
    if _is_marked(out):
        (out / MARK).unlink()


@collective
def check_restart(out: Path, world: World) -> bool:
    """Return whether an earlier attempt of the same torchrun began or resumed this run.

    So a run that torchrun restarts (--max-restarts) continues by itself, and never continues another run.

    Raises:
        RunError: the run folder cannot be read.
    """
    # torchrun counts restarts per machine, and not on machines whose processes did not fail.
    if not any(world.gather_items(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))):
        return False
    with world.agreed():
        mine = world.is_main and _is_marked(out) and (out / "config.json").exists()
    return world.gather_items(mine)[0]


def _is_marked(out: Path) -> bool:
    note = out / MARK
    return note.is_file() and note.read_text(encoding="utf-8") == os.environ.get(LAUNCH)


CONFIG, SUMMARY, WARNINGS, TRACKER = "config.json", "summary.json", "warnings.txt", "tracker.json"
WIDTH = 256  # of a sample, in pixels, about


def claim(out: Path, *, resume: bool, say: Callable[[str], None] = lambda line: None) -> FolderLock:
    """Create a run folder, or check that it holds the run to resume, and lock it.

    Raises:
        UsageError: it already holds a run, holds no run to resume, is locked by a living run, or cannot be written.
    """
    _check_holds_run(out, resume=resume)
    with convert_errors(UsageError, OSError, says=f"run folder {out} cannot be made"):
        (out / "samples").mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise UsageError(f"run folder {out} cannot be written")
    lock = FolderLock(out, say)
    try:
        _check_holds_run(out, resume=resume)  # another process may have begun and ended a run meanwhile
        mark(out)
    except BaseException:
        lock.release()
        raise
    return lock


def _check_holds_run(out: Path, *, resume: bool) -> None:
    """Raise UsageError if a new run would start in the folder of another, or a resumed one in a folder without a run."""
    holds_run = (out / CONFIG).exists()
    if resume and not holds_run:
        raise UsageError(f"{out} holds no run to resume: start one without resume, or set `out` to the folder of a run")
    if holds_run and not resume:
        unmark(out)
        raise UsageError(f"{out} already holds a run: set `resume` to continue it, or set `out` to another folder")


class RunFolder:
    """Writer of the records and images of a run.

    Args:
        out: claimed folder.
        config: configuration of the run, as JSON.
        update: update that the run starts after; later records of an interrupted run are dropped.
        tracker: trackers that receive numbers and images as well, see `trackers.find_trackers`.
        say: function that prints warnings, e.g. of a failed tracker; they also go to warnings.txt.
    """

    def __init__(
        self,
        out: Path,
        config: Mapping[str, Any],
        *,
        update: int = 0,
        tracker: str = trackers.DEFAULT,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.out, self.say = out, say
        self.metrics = out / "metrics.jsonl"
        earlier = read_records(self.metrics) if update else ()  # of an interrupted run; an incomplete last line is dropped
        self.records = [record for record in earlier if record["update"] <= update]
        write_json(out / CONFIG, config)
        if update < config.get("updates", 0):
            (out / SUMMARY).unlink(missing_ok=True)  # of a run that had ended, and has more updates now
        _write(self.metrics, "".join(json.dumps(record) + "\n" for record in self.records))
        makers = trackers.find_trackers(tracker)
        run = TrackedRun(
            out, without_infinities(config), self._find_tracker_id(kept=bool({*makers} - {trackers.DEFAULT})), update
        )
        self.trackers = [SafeTracker(name, maker, run, self.warn) for name, maker in makers.items()]

    def log(self, record: dict[str, Any]) -> None:
        """Append a record, {"update": n, name: number or nested dict}, to metrics.jsonl and the trackers."""
        record = without_infinities(record)
        if record in self.records:  # a finished run that is resumed evaluates again
            return
        self.records.append(record)
        problem = convert_errors(RunError, OSError, says=f"{self.metrics} cannot be written")
        with problem, self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        for tracker in self.trackers:
            tracker.log(flatten_numbers(record), record["update"])

    def write_samples(
        self,
        name: str,
        shown: Tensor | Sequence[Tensor | Image.Image],
        prompts: Sequence[str],
        scores: Tensor | Sequence[float] | None,
        *,
        title: str,
        update: int = 0,
    ) -> Path:
        """Write images as a captioned grid to samples/NAME.png, and return its path.

        NAME.json beside it has prompt, score and box in the grid of each image. The trackers get the images too. A score is
        green if it is above that of the same image before training, red if below.

        Args:
            name: name of the grid, e.g. "update 0020".
            shown: n images, or tensors `[C, H, W]` in [0, 1].
            prompts: n prompts.
            scores: n scores.
            title: text above the grid.
            update: number of updates that made the images.
        """
        drawn = [image if isinstance(image, Image.Image) else to_image(image, width=WIDTH) for image in shown]
        base = None if scores is None else self._read_scores_before(list(map(str, prompts)))
        sheet = images.caption_images(drawn, prompts, scores, base=base, title=title)
        path = self.out / "samples" / f"{name.replace(' ', '-')}.png"
        sheet.image.save(path)
        rows = [
            {"prompt": str(prompt), "score": None if scores is None else float(scores[i]), "box": list(sheet.boxes[i])}
            for i, prompt in enumerate(prompts)
        ]
        write_json(path.with_suffix(".json"), rows)
        for tracker in self.trackers:
            tracker.log_images(TrackedSamples(path.stem, drawn, sheet.captions, sheet.image), update)
        return path

    def write_sounds(self, name: str, sounds: Sounds) -> None:
        """Write the sounds of images of an evaluation to samples/NAME-00.wav, NAME-01.wav and so on."""
        for number, wave in enumerate(sounds.waves):
            write_wave(self.out / "samples" / f"{name.replace(' ', '-')}-{number:02d}.wav", wave, sounds.rate)

    def write_scores(self, name: str, scores: Scores) -> None:
        """Write the score of each sample of an evaluation to samples/NAME.csv."""
        write_scores(self._locate_scores(name), scores)

    def find_earlier(self, name: str, scores: Scores) -> Scores | None:
        """Read the scores of an earlier evaluation of the same samples; None if missing, damaged or of other samples."""
        path = self._locate_scores(name)
        try:
            earlier = read_scores(path)
        except UsageError:
            return None
        return earlier if has_same_samples(earlier, scores) else None

    def _locate_scores(self, name: str) -> Path:
        return self.out / "samples" / f"{name.replace(' ', '-')}.csv"

    def _read_scores_before(self, prompts: Sequence[str]) -> list[float] | None:
        """Read the scores of the images before training; None if they have other prompts or no scores."""
        rows = read_json(self.out / "samples" / "before.json") or []
        scores = [row["score"] for row in rows]
        return scores if [row["prompt"] for row in rows] == prompts and None not in scores else None

    def warn(self, line: str) -> None:
        """Keep a warning for the report, and print it."""
        self._keep(line)
        if self.say:
            self.say(line)

    @contextlib.contextmanager
    def keep_warnings(self) -> Iterator[None]:
        """Keep Python's warnings inside the block for the report, besides showing them."""
        shown = warnings.showwarning

        def keep(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if category in (UserWarning, RuntimeWarning):
                self._keep(str(message))
            shown(message, category, *where, **more)

        warnings.showwarning = keep
        try:
            yield
        finally:
            warnings.showwarning = shown

    def write_reports(self) -> list[Path]:
        """Write the reports of the run, such as report.html and curves.png, and return their paths.

        Reports are entry points of `fluvial.reports`; without any, the files here hold the same numbers.
        """
        return [write(self.out) for write in plugins.load_all("reports")]

    def close(self) -> None:
        """Flush the buffered records, and end the trackers."""
        for tracker in self.trackers:
            tracker.finish()

    def _keep(self, line: str) -> None:
        # A failure here must not stop training.
        with contextlib.suppress(OSError), (self.out / WARNINGS).open("a", encoding="utf-8") as file:
            file.write(" ".join(line.split()) + "\n")

    def _find_tracker_id(self, *, kept: bool) -> str:
        """Return the run's id for trackers: that of the folder, or a new one, which `kept` writes to the folder."""
        path = self.out / TRACKER
        try:
            run_id = json.loads(path.read_text(encoding="utf-8"))["id"]
        except (OSError, ValueError, KeyError, TypeError):
            run_id = None
        if isinstance(run_id, str):
            return run_id
        run_id = uuid.uuid4().hex[:21]  # the length that SwanLab requires
        if kept:
            write_json(path, {"id": run_id})
        return run_id


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a file atomically."""
    _write(path, json.dumps(without_infinities(value), indent=1, allow_nan=False) + "\n")


def flatten_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by path, e.g. "reward/mean"; texts, such as servers' addresses, are left out."""
    leaves = zip(*optree.tree_flatten_with_path(record)[:2], strict=True)
    return {"/".join(map(str, path)): leaf for path, leaf in leaves if isinstance(leaf, int | float)}


def without_infinities(record: Any) -> Any:
    """Return a record with None in place of infinities and NaN, which JSON lacks."""
    return optree.tree_map(
        lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf, record, none_is_leaf=True
    )


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with convert_errors(RunError, OSError, says=f"{path} cannot be written"):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
