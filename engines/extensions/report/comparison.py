"""Comparison of runs in one HTML file: overlaid curves, settings that differ, scores with intervals, seconds, samples."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.report import page, panels
from fluvial.engines.extensions.report.charts import LineChart, line_chart
from fluvial.engines.run.log.records import flatten, read_json, read_records

FILE = "comparison.html"
MOST_RUNS = 16
PROMPTS = 8  # whose samples are shown
UNCOMPARED = ("out", "resume", "checkpoint.resume_from")  # settings that say nothing of a run


class ComparedRun(NamedTuple):
    """The contents of a run folder.

    Args:
        name: name of the folder, below what all have in common.
        config: settings, by dotted names.
        records: records of updates and evaluations.
        summary: summary; empty while the run goes on.
    """

    out: Path
    name: str
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]

    @property
    def updates(self) -> int:
        """Number of updates that are done."""
        return max((record["update"] for record in self.records), default=0)

    @property
    def state(self) -> str:
        """Whether the run has ended."""
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
    """Return the folders of runs that a folder is or holds, those of sweeps in it, too."""
    return [folder] if is_run(folder) else sorted(filter(is_run, (*folder.glob("*"), *folder.glob("*/*"))))


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs in folders: a folder is one, or holds runs and sweeps. Files are left out, other folders with a line.

    Raises:
        UsageError: a folder does not exist, or none of them holds a run.
    """
    inside = dict[Path, list[Path]]()
    for folder in folders:
        if not folder.exists():
            raise UsageError(f"there is no folder {folder}: name folders of runs, such as runs/*")
        inside[folder] = find_runs(folder)
    run_folders = list(dict.fromkeys(each for runs in inside.values() for each in runs))
    if not run_folders:
        raise UsageError(f"{' '.join(map(str, folders))} holds no run: name folders with a config.json and metrics.jsonl")
    if empty := [str(folder) for folder, runs in inside.items() if folder.is_dir() and not runs]:
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
    """Write comparison.html beside the runs, where they lie in one folder, else to the current one; return its path.

    Raises:
        UsageError: there is no run, or more than `MOST_RUNS`.
        RunError: the page cannot be written.
    """
    runs = read_runs(folders)
    if len(runs) > MOST_RUNS:
        raise UsageError(f"report compares {MOST_RUNS} runs at most, got {len(runs)}: name fewer folders")
    parents = {run.out.absolute().parent for run in runs}
    path = (runs[0].out.parent if len(parents) == 1 else Path()) / FILE
    text = page.template("comparison.html").render(
        runs=runs,
        scores=[*list_scores(runs)],
        settings=differing(runs),
        charts=[*filter(None, map(line_chart, list_charts(runs)))],
        prompts=list_samples(runs),
    )
    return page.save(path, text)


def differing(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, by name: one value per run, `-` where a run does not have it."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in UNCOMPARED)
    values = {name: [_show(run.config[name]) if name in run.config else "-" for run in runs] for name in names}
    return {name: each for name, each in values.items() if len({*each}) > 1}


def _show(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def list_scores(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, list[Mapping[str, Any] | None]]]:
    """Yield each evaluator with its row of all samples, per run; None where a run has not ended or has none."""
    rows = [{row["evaluator"]: row for row in page.list_evaluation(run.summary) if row["part"] == "all"} for run in runs]
    for evaluator in dict.fromkeys(name for each in rows for name in each):
        yield evaluator, [each.get(evaluator) for each in rows]


def list_charts(runs: Sequence[ComparedRun]) -> Iterator[LineChart]:
    """Yield charts with a line per run: of the reward, of each evaluator, and of what says how a run goes."""

    def over(title: str, unit: str, *path: str, **options: Any) -> LineChart:
        return LineChart(title, {run.name: panels.points(run.records, *path) for run in runs}, unit, **options)

    yield over("Reward while training", "mean over the samples", "reward", "mean")
    for name in dict.fromkeys(name for run in runs for record in run.records for name in record.get("score") or {}):
        yield over(f"Held-out score, {name} evaluator", "mean over the samples", "score", name)
    yield over("Distance within groups", "root mean square between samples", "diversity", y="from_zero")
    yield over("Drift from the start", "relative change of the velocity", "drift", y="from_zero")
    distances = panels.moving({run.name: panels.points(run.records, "objective", "kl_ref") for run in runs})
    yield LineChart("KL to the reference", distances, "nats", y="from_zero")
    yield over("Gradient norm", "before clipping", "grad_norm", y="from_zero")
    spent = {
        run.name: [(float(r["update"]), float(sum(r["seconds"].values()))) for r in run.records if "seconds" in r]
        for run in runs
    }
    yield LineChart("Time", spent, "seconds per rollout and its updates", y="from_zero")


class PromptSamples(NamedTuple):
    """Samples of a prompt.

    Args:
        prompt: the prompt.
        samples: the sample of each run's last evaluation, from the same noise; None where it has none.
    """

    prompt: str
    samples: list[page.SheetSample | None]


def list_samples(runs: Sequence[ComparedRun]) -> list[PromptSamples]:
    """Return samples of the same prompts of the last evaluations, those first that most runs have."""
    sheets = list[dict[str, page.SheetSample]]()
    for run in runs:
        last_sheet = page.read_sheet(run.out / "samples", "after") or page.read_sheet(run.out / "samples", "before")
        sheets.append({sample.prompt: sample for sample in reversed(last_sheet)})
    prompts = dict.fromkeys(prompt for sheet in sheets for prompt in reversed(sheet))
    shown = [PromptSamples(prompt, [sheet.get(prompt) for sheet in sheets]) for prompt in prompts]
    return sorted(shown, key=lambda each: each.samples.count(None))[:PROMPTS]
