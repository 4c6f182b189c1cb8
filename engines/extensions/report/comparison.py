"""Comparison of runs in one HTML file: curves, settings that differ, scores with intervals, seconds and samples."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.report import page, panels
from fluvial.engines.extensions.report.charts import LineChart, draw_lines
from fluvial.engines.run.log.records import flatten, read_json, read_records

FILE = "comparison.html"
MOST_RUNS = 16
PROMPTS = 8  # number of prompts with shown samples
UNCOMPARED = ("out", "resume", "checkpoint.resume_from")  # settings without an effect on the result


class ComparedRun(NamedTuple):
    """Contents of a run folder.

    Args:
        out: run folder.
        name: path of the folder below the common parent of all runs.
        config: settings, by dotted name.
        records: records of updates and evaluations.
        summary: summary; empty until the run has ended.
    """

    out: Path
    name: str
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]

    @property
    def updates(self) -> int:
        """Number of completed updates."""
        return max((record["update"] for record in self.records), default=0)

    @property
    def state(self) -> str:
        """State of the run: not begun, the number of updates so far, or done."""
        planned = self.config.get("updates")
        return "done" if self.summary else "not begun" if not self.updates else f"{self.updates} of {planned} updates"

    @property
    def seconds(self) -> float | None:
        """Seconds of training so far: rollouts, rewards and updates."""
        spent = [sum(record["seconds"].values()) for record in self.records if "seconds" in record]
        return self.summary.get("train_seconds") or (sum(spent) if spent else None)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each rollout."""
        means = ((record.get("reward") or {}).get("mean") for record in self.records)
        return [value for value in means if value is not None]


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run with a record."""
    return (folder / "config.json").is_file() and (folder / "metrics.jsonl").is_file()


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders in a folder, including those of sweeps; a run folder holds itself."""
    return [folder] if is_run(folder) else sorted(filter(is_run, (*folder.glob("*"), *folder.glob("*/*"))))


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs in folders, each a run folder or a folder of runs and sweeps.

    Files are ignored. Folders without a run are named on stderr.

    Raises:
        UsageError: a folder does not exist, or none of them holds a run.
    """
    runs_of = dict[Path, list[Path]]()
    for folder in folders:
        if not folder.exists():
            raise UsageError(f"there is no folder {folder}: name folders of runs, such as runs/*")
        runs_of[folder] = find_runs(folder)
    run_folders = list(dict.fromkeys(each for runs in runs_of.values() for each in runs))
    if not run_folders:
        raise UsageError(f"{' '.join(map(str, folders))} holds no run: name folders with a config.json and metrics.jsonl")
    if empty := [str(folder) for folder, runs in runs_of.items() if folder.is_dir() and not runs]:
        print(f"fluvial: left out, without a run: {', '.join(empty)}", file=sys.stderr)
    common = Path(os.path.commonpath([str(path.absolute().parent) for path in run_folders]))
    return [_read(path, str(path.absolute().relative_to(common))) for path in run_folders]


def _read(out: Path, name: str) -> ComparedRun:
    config, summary = read_json(out / "config.json"), read_json(out / "summary.json")
    settings = flatten(config) if isinstance(config, dict) else {}
    settings = {name.removeprefix("method.").removesuffix(".kind"): value for name, value in settings.items()}
    records = [record for record in read_records(out / "metrics.jsonl") if "update" in record]
    return ComparedRun(out, name, settings, records, summary if isinstance(summary, dict) else {})


def write(folders: Sequence[Path]) -> Path:
    """Write comparison.html to the common folder of the runs, else to the current folder, and return its path.

    Raises:
        UsageError: there is no run, or more than `MOST_RUNS`.
        RunError: the page cannot be written.
    """
    runs = read_runs(folders)
    if len(runs) > MOST_RUNS:
        raise UsageError(f"report compares {MOST_RUNS} runs at most, got {len(runs)}: name fewer folders")
    parents = {run.out.absolute().parent for run in runs}
    path = (runs[0].out.parent if len(parents) == 1 else Path()) / FILE
    text = page.load_template("comparison.html").render(
        runs=runs,
        scores=[*list_scores(runs)],
        settings=find_differences(runs),
        charts=[*filter(None, map(draw_lines, list_charts(runs)))],
        prompts=list_samples(runs),
    )
    return page.save(path, text)


def find_differences(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, by name: one value per run, `-` where a run lacks the setting."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in UNCOMPARED)
    values = {name: [_format_value(run.config[name]) if name in run.config else "-" for run in runs] for name in names}
    return {name: each for name, each in values.items() if len({*each}) > 1}


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def list_scores(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, list[Mapping[str, Any] | None]]]:
    """Yield each evaluator with one row over all samples per run; None for a run without it or that has not ended."""
    rows = [{row["evaluator"]: row for row in page.list_evaluation(run.summary) if row["part"] == "all"} for run in runs]
    for evaluator in dict.fromkeys(name for each in rows for name in each):
        yield evaluator, [each.get(evaluator) for each in rows]


def list_charts(runs: Sequence[ComparedRun]) -> Iterator[LineChart]:
    """Yield charts with a line per run: the reward, the score of each evaluator, and the health of the run."""

    def chart(title: str, unit: str, *path: str, **options: Any) -> LineChart:
        return LineChart(title, {run.name: panels.read_points(run.records, *path) for run in runs}, unit, **options)

    yield chart("Reward while training", "mean over the samples", "reward", "mean")
    for name in dict.fromkeys(name for run in runs for record in run.records for name in record.get("score") or {}):
        yield chart(f"Held-out score, {name} evaluator", "mean over the samples", "score", name)
    yield chart("Distance within groups", "root mean square between samples", "diversity", y="from_zero")
    yield chart("Drift from the start", "relative change of the velocity", "drift", y="from_zero")
    distances = panels.drop_zero_lines({run.name: panels.read_points(run.records, "objective", "kl_ref") for run in runs})
    yield LineChart("KL to the reference", distances, "nats", y="from_zero")
    yield chart("Gradient norm", "before clipping", "grad_norm", y="from_zero")
    seconds = {
        run.name: [(float(r["update"]), float(sum(r["seconds"].values()))) for r in run.records if "seconds" in r]
        for run in runs
    }
    yield LineChart("Time", seconds, "seconds per rollout and its updates", y="from_zero")


class PromptSamples(NamedTuple):
    """Samples of a prompt.

    Args:
        prompt: the prompt.
        samples: sample of each run's last evaluation, all from the same noise; None for a run without one.
    """

    prompt: str
    samples: list[page.SheetSample | None]


def list_samples(runs: Sequence[ComparedRun]) -> list[PromptSamples]:
    """Return samples of the same prompts from the last evaluations; prompts shared by most runs come first."""
    sheets = list[dict[str, page.SheetSample]]()
    for run in runs:
        last_sheet = page.read_sheet(run.out / "samples", "after") or page.read_sheet(run.out / "samples", "before")
        sheets.append({sample.prompt: sample for sample in reversed(last_sheet)})
    prompts = dict.fromkeys(prompt for sheet in sheets for prompt in reversed(sheet))
    samples = [PromptSamples(prompt, [sheet.get(prompt) for sheet in sheets]) for prompt in prompts]
    return sorted(samples, key=lambda each: each.samples.count(None))[:PROMPTS]
