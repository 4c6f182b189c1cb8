"""Report of a run: curves, images, numbers and settings in one HTML file, which loads nothing from the network.

It is written from the files of the run folder, so `fluvial report RUN` works while the run goes on. The template
`page.html` escapes every text.
"""

import base64
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, Template
from PIL import Image

from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.engines.extensions.report import charts, panels
from fluvial.engines.run.log.records import read_json, read_records

FILE = "report.html"
EVALUATION = "evaluation"  # key of a summary: rows of the last evaluation
COLUMNS = ("name", "part", "samples", "mean", "base_mean", "difference", "low", "high", "win_rate", "exact")
UNFOLDED = 8  # number of pairs of images that are shown at once
LARGE = 8192  # bytes of a PNG above which JPEG is tried
# Thresholds of concerns.
WITHOUT_SIGNAL = 0.5  # fraction of the groups
LESS_DIVERSE = 0.5  # fraction of the diversity at the start
SAME_POLICY = 1e-6  # |log ratio| of a first pass
Record = Mapping[str, Any]


def write(out: Path) -> Path:
    """Write report.html to a run folder, and return its path.

    Raises:
        UsageError: the folder holds no run.
        RunError: the report cannot be written.
    """
    return save(out / FILE, build_page(out))


def save(path: Path, text: str) -> Path:
    """Write a page, and return its path; RunError if it cannot be written."""
    with convert_errors(RunError, OSError, says=f"{path} cannot be written"):
        path.write_text(text, encoding="utf-8")
    return path


def finish(out: Path) -> Path:
    """Write curves.png and report.html to the folder of an ended run, and return the path of the page.

    Raises:
        UsageError: the folder holds no run.
        RunError: the report cannot be written.
    """
    charts.draw_curves(out / "curves.png", panels.list_overview(list(read_records(out / "metrics.jsonl"))))
    return write(out)


def find_damage(out: Path) -> list[str]:
    """Return a message per damaged file of a run folder, which the report leaves out."""
    metrics, summary = out / "metrics.jsonl", out / "summary.json"
    messages = []
    lines = len(metrics.read_text(encoding="utf-8", errors="replace").splitlines()) if metrics.is_file() else 0
    if left_out := lines - sum(1 for _ in read_records(metrics)):
        messages.append(f"{metrics}, line {lines - left_out + 1} is damaged: the report leaves out it and all after it")
    files = [file for file in (summary, *sorted((out / "samples").glob("*.json"))) if file.is_file()]
    return [*messages, *(f"{file} is damaged: the report leaves it out" for file in files if read_json(file) is None)]


def build_page(out: Path) -> str:
    """Return the report of a run folder.

    Raises:
        UsageError: the folder holds no run.
    """
    config = read_json(out / "config.json")
    if not isinstance(config, dict) or not (out / "metrics.jsonl").is_file():
        raise UsageError(f"{out} holds no run: name the folder of one, with its config.json and metrics.jsonl")
    records, summary = list(read_records(out / "metrics.jsonl")), read_json(out / "summary.json") or {}
    warnings = out / "warnings.txt"  # printed by the run
    printed = warnings.read_text(encoding="utf-8", errors="replace").splitlines() if warnings.is_file() else []
    sheets = {name: read_sheet(out / "samples", name) for name in ("before", "after", "best", "worst")}
    evaluation = list_evaluation(summary)
    return load_template("page.html").render(
        name=out.resolve().name,
        about=describe_run(config, records),
        results=[*list_results(records, evaluation)],
        warnings=[*list_concerns(config, records, summary), *dict.fromkeys(printed)],
        before=[] if sheets["after"] else sheets["before"],
        pairs=pair_samples(sheets["before"], sheets["after"]),
        unfolded=UNFOLDED,
        charts=[*panels.draw_charts(records)],
        sheets={"Best samples": sheets["best"], "Worst samples": sheets["worst"]},
        cards=[*list_cards(records, summary)],
        evaluation=evaluation,
        others=[*flatten(drop_evaluation(summary, evaluation))],
        config=json.dumps(config, indent=1),
    )


def load_template(name: str) -> Template:
    """Return the template of a page, which escapes every text."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": format_number, "percent": format_percent, "image": encode_image, "sound": encode_sound}
    return environment.get_template(name)


def _shorten_path(name: str) -> str:
    """Return an absolute path in the current folder as a relative one, anything else unchanged."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else name


def describe_run(config: Record, records: Sequence[Record]) -> str:
    """Describe a run in one line: method, model, sampler, updates and seed."""
    method = config.get("method") or {}
    sampling = method.get("sampling") or {}
    done = max((record["update"] for record in records), default=0)
    parts = [
        f"{method.get('name')} on {_shorten_path(str(config.get('model')))}",
        "LoRA" if config.get("train") == "lora" else "all weights",
        f"sampler {format_choice(sampling.get('sampler'))}, {sampling.get('steps')} steps",
        f"{done} of {config.get('updates')} updates",
        f"seed {config.get('seed')}",
    ]
    return " · ".join(parts)


def format_choice(choice: Any) -> str:
    """Return a choice among kinds as text, e.g. "ddim (eta 1.0)"."""
    if not isinstance(choice, Mapping):
        return str(choice)
    kind, *settings = [str(choice.get("kind")), *(f"{key} {value}" for key, value in choice.items() if key != "kind")]
    return f"{kind} ({', '.join(settings)})" if settings else kind


def list_concerns(config: Record, records: Sequence[Record], summary: Record) -> Iterator[str]:
    """Yield concerns about a run, one sentence each; the summary is empty if the run has not ended."""
    updates = [record for record in records if "grad_norm" in record]
    if not summary:
        done = max((record["update"] for record in records), default=0)
        yield f"The run has not ended: {done} of {config.get('updates')} updates are recorded."
    if not updates:
        return
    if skipped := updates[-1].get("skipped_steps"):
        yield f"{skipped} steps were skipped because their gradient was not finite."
    ratio = max((record.get("first_pass_max_abs_log_ratio") or 0.0 for record in updates), default=0.0)
    if ratio > SAME_POLICY:
        yield f"The largest |log ratio| of a first pass is {ratio:.2g}: rollout and update computed different policies."
    last_quarter = updates[-max(len(updates) // 4, 1) :]
    without_signal = [record["groups"]["without_signal"] for record in last_quarter if "groups" in record]
    if without_signal and fmean(without_signal) > WITHOUT_SIGNAL:
        yield (
            f"{fmean(without_signal):.0%} of the groups in the last quarter have samples of equal reward and teach nothing: "
            "try harder prompts or a finer reward."
        )
    diversity = [record["diversity"] for record in updates if isinstance(record.get("diversity"), float)]
    if len(diversity) > 1 and diversity[-1] < LESS_DIVERSE * diversity[0]:
        yield f"Samples of a group became more alike: their distance fell from {diversity[0]:.3g} to {diversity[-1]:.3g}."
    yield from _find_hacking(updates, [record for record in records if "exact" in record])


def _find_hacking(updates: Sequence[Record], evaluations: Sequence[Record]) -> Iterator[str]:
    """Yield a sentence per evaluator whose score fell while the reward rose."""
    rewards = [record["reward"]["mean"] for record in updates if (record.get("reward") or {}).get("mean") is not None]
    quarter = max(len(rewards) // 4, 1)
    if len(evaluations) < 2 or len(rewards) < 2 or fmean(rewards[-quarter:]) <= fmean(rewards[:quarter]):
        return
    for name, before in evaluations[0]["score"].items():
        after = evaluations[-1]["score"].get(name)
        if None not in (before, after) and after < before:
            yield (
                f"The reward rose while the {name} evaluator's score fell from {before:.3f} to {after:.3f}, as in reward "
                "hacking."
            )


class Result(NamedTuple):
    """Number before and after a run.

    Args:
        before, after: the number; None if it is unknown.
        what: meaning of the number.
        compared: row of the evaluation with the interval of the change.
        exact: fraction of the prompts that are exactly right, as text.
        single: whether there is only the number after.
    """

    before: float | None
    after: float | None
    what: str
    compared: Record | None = None
    exact: str = ""
    single: bool = False


def list_results(records: Sequence[Record], evaluation: Sequence[Record]) -> Iterator[Result]:
    """Yield the scores of each evaluator before and after, with the interval of the change, and the reward."""
    evaluations = [record for record in records if "exact" in record]
    compared = {row["evaluator"]: row for row in evaluation if row["part"] == "all" and row["difference"] is not None}
    for name in evaluations[0]["score"] if evaluations else ():
        before, after = (
            tuple(each[kind].get(name) for kind in ("score", "exact")) for each in (evaluations[0], evaluations[-1])
        )
        exact = (
            "" if not (before[1] or after[1]) else f"exactly right {format_percent(before[1])} → {format_percent(after[1])}"
        )
        what = f"held-out prompts, score by the {name} evaluator"
        yield Result(before[0], after[0], what, compared.get(name), exact, single=len(evaluations) == 1)
    rewards = [record["reward"]["mean"] for record in records if (record.get("reward") or {}).get("mean") is not None]
    if rewards:
        yield Result(rewards[0], rewards[-1], "mean reward while training, first and last update")


def list_cards(records: Sequence[Record], summary: Record) -> Iterator[tuple[str, str]]:
    """Yield the costs of a run, as (label, number)."""
    if updates := [record for record in records if "grad_norm" in record]:
        last = updates[-1]
        yield "updates", format_number(last["update"])
        yield "samples", f"{last['samples']:,}" if "samples" in last else "unknown"
        yield from ((f"GiB of memory, {name}", format_number(size)) for name, size in last.get("memory", {}).items())
    if "samples_per_second" in summary:
        yield "samples per second", format_number(summary["samples_per_second"])


def list_evaluation(summary: Record) -> list[Record]:
    """Return the rows of the last evaluation in a summary; missing columns are None."""
    rows = summary.get(EVALUATION)
    evaluators = [row for row in rows if isinstance(row, Mapping) and "evaluator" in row] if isinstance(rows, list) else []
    return [{**dict.fromkeys(COLUMNS), **row} for row in evaluators]


def drop_evaluation(summary: Record, evaluation: Sequence[Record]) -> Record:
    """Return a summary without the numbers that the rows of its evaluation repeat."""
    repeated = re.compile(r"(?s).*_(?:exact|score)_(?:before|after)" if evaluation else r"(?!)")
    return {name: value for name, value in summary.items() if name != EVALUATION and not repeated.fullmatch(name)}


def flatten(record: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists with their paths as text, e.g. "train seconds by phase, rollout"."""
    for name, value in record.items():
        path = f"{prefix}{str(name).replace('_', ' ')}"
        if isinstance(value, list | tuple) and any(isinstance(each, Mapping | list) for each in value):
            value = {str(number): each for number, each in enumerate(value, start=1)}
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}, ")
        else:
            yield path, ", ".join(map(format_number, value)) if isinstance(value, list | tuple) else value


def format_percent(share: float | None) -> str:
    """Return a fraction in percent; empty for None."""
    return "" if share is None else f"{100 * share:.1f}\u00a0%"


def format_number(value: Any) -> str:
    """Return a value as short text."""
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 10 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "" if value is None else str(value)


class SheetSample(NamedTuple):
    """Sample of a sheet."""

    image: Image.Image
    prompt: str
    score: float | None
    sound: bytes | None = None  # WAV file


def read_sheet(samples: Path, name: str) -> list[SheetSample]:
    """Return the samples of a sheet; none if it is missing."""
    index, path = read_json(samples / f"{name}.json"), samples / f"{name}.png"
    if not isinstance(index, list) or not path.is_file():
        return []
    files = (samples / f"{name}-{number:02d}.wav" for number in range(len(index)))
    sounds = (file.read_bytes() if file.is_file() else None for file in files)
    with Image.open(path) as sheet:
        return [
            SheetSample(sheet.crop(tuple(row["box"])), str(row["prompt"]), row["score"], sound)
            for row, sound in zip(index, sounds, strict=True)
        ]


def pair_samples(before: Sequence[SheetSample], after: Sequence[SheetSample]) -> list[tuple[SheetSample, SheetSample]]:
    """Return pairs of samples of the first and the last evaluation, from the same noise; largest change of score first."""
    pairs = [pair for pair in zip(before, after, strict=False) if pair[0].prompt == pair[1].prompt]
    return sorted(pairs, key=lambda pair: -abs((pair[1].score or 0.0) - (pair[0].score or 0.0)))


def encode_sound(file: bytes) -> str:
    """Return a WAV file as a data URL."""
    return f"data:audio/wav;base64,{base64.b64encode(file).decode()}"


def encode_image(image: Image.Image) -> str:
    """Return an image as a data URL: as PNG, or as JPEG if that is smaller."""
    kind, data = "png", _encode(image, "png", compress_level=6)
    if len(data) > LARGE and len(smaller := _encode(image, "jpeg", quality=88)) < len(data):
        kind, data = "jpeg", smaller
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _encode(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, **options)
    return buffer.getvalue()
