"""The run folder: everything that a run writes, by rank 0.

config.json  metrics.jsonl  summary.json  curves.png  probe.safetensors  samples/*.{png,csv}  tensorboard/  checkpoints/
weights/
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optree
from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.evaluation.evaluate import Scores
from fluvial.engines.evaluation.table import read_scores, same_samples, write_scores
from fluvial.engines.report import images, plots
from fluvial.engines.run import restart

CONFIG = "config.json"


def claim(out: Path, *, resume: bool) -> None:
    """Make a run folder, or check that it holds the run to resume.

    Raises:
        UsageError: it already holds a run, holds no run to resume, or cannot be written.
    """
    held = (out / CONFIG).exists()
    if resume and not held:
        raise UsageError(f"{out} holds no run to resume: start one without resume, or set out to the folder of a run")
    if held and not resume:
        restart.unmark(out)
        raise UsageError(f"{out} already holds a run: set resume to continue it, or set out to another folder")
    try:
        (out / "samples").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"run folder {out} cannot be made: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise UsageError(f"run folder {out} cannot be written")
    restart.mark(out)


class RunFolder:
    """Writes the records and images of a run.

    Args:
        out: claimed folder.
        config: configuration of the run, as JSON.
        update: update that the run starts after; later records of an interrupted run are dropped.
    """

    def __init__(self, out: Path, config: Mapping[str, Any], *, update: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.out = out
        self.records = self._kept(update)
        self.metrics = out / "metrics.jsonl"
        write_json(out / CONFIG, config)
        _write(self.metrics, "".join(json.dumps(record) + "\n" for record in self.records))
        self.tensorboard = SummaryWriter(str(out / "tensorboard"), purge_step=update + 1 if update else None)

    def log(self, record: dict[str, Any]) -> None:
        """Append a record, {"update": n, name: number or a dict of them}, to metrics.jsonl and TensorBoard."""
        record = finite(record)
        if record in self.records:  # a finished run that is resumed evaluates again
            return
        self.records.append(record)
        try:
            with self.metrics.open("a") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        except OSError as error:
            raise RunError(f"{self.metrics} cannot be written: {error.strerror}") from error
        for path, number in zip(*optree.tree_flatten_with_path(record)[:2], strict=True):
            self.tensorboard.add_scalar("/".join(map(str, path)), number, record["update"])

    def samples(self, name: str, shown: Tensor, prompts: Sequence[str], scores: Tensor | None, *, title: str) -> Path:
        """Write images `[n, C, H, W]` as a captioned grid to samples/NAME.png, and return its path."""
        sheet = images.sheet_of(shown, prompts, scores, title=title)
        path = self.out / "samples" / f"{name.replace(' ', '-')}.png"
        sheet.save(path)
        return path

    def scores(self, name: str, scores: Scores) -> None:
        """Write the score of each sample of an evaluation to samples/NAME.csv."""
        write_scores(self._scores(name), scores)

    def compared(self, name: str, scores: Scores) -> Scores | None:
        """Return the scores of an earlier evaluation of the same samples; None if there is no whole one."""
        path = self._scores(name)
        try:
            found = read_scores(path)
        except UsageError:
            return None
        return found if same_samples(found, scores) else None

    def _scores(self, name: str) -> Path:
        return self.out / "samples" / f"{name.replace(' ', '-')}.csv"

    def curves(self) -> Path:
        """Draw reward, held-out accuracy, diversity, drift and gradient norm against updates, and return the path."""
        updates = [record for record in self.records if "grad_norm" in record]
        evaluations = [record for record in self.records if "exact" in record]
        path = self.out / "curves.png"
        plots.curves(
            path,
            {
                "reward while training": {
                    "mean reward": [(r["update"], r["reward"]["mean"]) for r in updates if "reward" in r]
                },
                "held-out prompts exactly right": {
                    f"by the {evaluator} evaluator": [(r["update"], r["exact"][evaluator]) for r in evaluations]
                    for evaluator in (evaluations[0]["exact"] if evaluations else ())
                },
                "distance between samples of a group": {
                    "root mean square": [(r["update"], r["diversity"]) for r in updates if "diversity" in r]
                },
                "drift from the model at the start": {
                    "of the velocity, relative": [(r["update"], r["drift"]) for r in evaluations]
                },
                "gradient norm": {
                    "before clipping": [(r["update"], r["grad_norm"]) for r in updates if r["grad_norm"] is not None]
                },
            },
            xlabel="updates",
        )
        return path

    def close(self) -> None:
        """Flush the buffered records."""
        self.tensorboard.close()

    def _kept(self, update: int) -> list[dict[str, Any]]:
        """Return the records of an interrupted run up to an update; a last line that a crash cut short is dropped."""
        path = self.out / "metrics.jsonl"
        records: list[dict[str, Any]] = []
        for line in path.read_text(errors="replace").splitlines() if update and path.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not isinstance(record, dict) or not isinstance(record.get("update"), int):
                break
            records.append(record)
        return [record for record in records if record["update"] <= update]


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a file atomically."""
    _write(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def finite(record: Any) -> Any:
    """Return a record with None in place of infinities and NaN, which JSON does not have."""
    return optree.tree_map(
        lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf, record, none_is_leaf=True
    )


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
