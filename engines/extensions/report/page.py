"""Report of a run: curves, images, numbers and settings in one HTML file, which loads nothing from the network.

It is written from the files of the run folder alone, so that `fluvial report RUN` works while a run is still going on.
"""

import base64
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.report import charts, panels
from fluvial.engines.extensions.report.concerns import concerns
from fluvial.engines.run.log.records import read_json, read_records

FILE = "report.html"
EVALUATION = "evaluation"  # of a summary: the rows of the last evaluation
SHOWN = 8  # pairs of images that are not folded
LARGE = 8192  # bytes of an image
# Not even a script of a prompt's would run.
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #667; --paper: #fff; --card: #f5f6f8; --line: #d8dbe0;
  --good: #147a3c; --bad: #b42318; --warn: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa3ad; --paper: #14161a; --card: #1e2127;
  --line: #363b44; --good: #5bd38a; --bad: #ff8d80; --warn: #3a3215; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 24px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { margin: 0; font-size: 26px; } h2 { margin: 32px 0 10px; font-size: 18px; } p { margin: 6px 0; }
.dim, figcaption em { color: var(--dim); } figcaption em { display: block; font-weight: 400; font-size: 13px; }
.headline, .cards, .charts, .samples { display: grid; gap: 12px; }
.headline { grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); margin: 18px 0; }
.headline div, .cards div { background: var(--card); border-radius: 8px; padding: 10px 14px; }
.headline div > b { display: block; font-size: 30px; line-height: 1.25; white-space: nowrap; }
.headline div > span { display: block; } em { font-style: normal; }
.cards { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); } .cards b { display: block; font-size: 18px; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
.samples { grid-template-columns: repeat(auto-fill, minmax(min(100%, 200px), 1fr)); margin: 12px 0; }
.samples.pairs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; padding: 10px; border: 1px solid var(--line); border-radius: 8px; break-inside: avoid; }
figcaption { font-weight: 600; } .samples figcaption { font-weight: 400; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 8px; } .pair span { font-size: 13px; color: var(--dim); }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 12px; color: var(--dim); }
.legend i { display: inline-block; width: 12px; height: 4px; border-radius: 2px; margin-right: 5px; vertical-align: 3px; }
img { display: block; width: 100%; height: auto; border-radius: 4px; }
audio { display: block; width: 100%; margin-top: 4px; }
svg { display: block; width: 100%; height: auto; margin-top: auto; }
.charts figure { display: flex; flex-direction: column; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 6px 0 18px; } td, th { padding: 4px 10px; vertical-align: top;
  border-bottom: 1px solid var(--line); text-align: left; font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 400; }
.good { color: var(--good); } .bad { color: var(--bad); }
.warnings { background: var(--warn); border-radius: 8px; padding: 10px 14px; }
.warnings ul { margin: 4px 0; padding-left: 20px; }
pre { overflow: auto; padding: 12px; background: var(--card); border-radius: 8px; font-size: 12px; }
summary { cursor: pointer; font-weight: 600; }
@media print { body { max-width: none; padding: 0; font-size: 12px; }
  details > pre { overflow: visible; white-space: pre-wrap; } }
"""


def write(out: Path) -> Path:
    """Write report.html to a run folder, and return its path.

    Raises:
        UsageError: the folder holds no run.
        RunError: the report cannot be written.
    """
    path, text = out / FILE, page(out)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    return path


def finish(out: Path) -> Path:
    """Write curves.png and report.html to the folder of a run that has ended, and return the path of the page.

    Raises:
        UsageError: the folder holds no run.
        RunError: the report cannot be written.
    """
    charts.curves(out / "curves.png", panels.overview(list(read_records(out / "metrics.jsonl"))))
    return write(out)


def damage(out: Path) -> list[str]:
    """Return what a report of a run folder leaves out, because it cannot be read: one line per file."""
    metrics, summary = out / "metrics.jsonl", out / "summary.json"
    found = []
    lines = len(metrics.read_text(encoding="utf-8", errors="replace").splitlines()) if metrics.is_file() else 0
    if left_out := lines - sum(1 for _ in read_records(metrics)):
        found.append(f"{metrics}, line {lines - left_out + 1} is damaged: the report leaves out it and all after it")
    files = [file for file in (summary, *sorted((out / "samples").glob("*.json"))) if file.is_file()]
    return [*found, *(f"{file} is damaged: the report leaves it out" for file in files if read_json(file) is None)]


def page(out: Path) -> str:
    """Return the report of a run folder.

    Raises:
        UsageError: the folder holds no run.
    """
    config = read_json(out / "config.json")
    if not isinstance(config, dict) or not (out / "metrics.jsonl").is_file():
        raise UsageError(f"{out} holds no run: name the folder of one, with its config.json and metrics.jsonl")
    records, summary = list(read_records(out / "metrics.jsonl")), read_json(out / "summary.json") or {}
    warnings = out / "warnings.txt"  # those that the run printed
    printed = warnings.read_text(encoding="utf-8", errors="replace").splitlines() if warnings.is_file() else []
    title, written = f"fluvial: {out.resolve().name}", escape(json.dumps(config, indent=1))
    body = [
        f"<h1>{escape(out.resolve().name)}</h1>",
        f'<p class="dim">{escape(describe_run(config, records))}</p>',
        headline(records, summary),
        render_warnings([*concerns(config, records, summary), *dict.fromkeys(printed)]),
        section("Before and after, from the same noise", before_and_after(out / "samples")),
        section("Curves", f'<div class="charts">{"".join(panels.charts(records))}</div>'),
        section("Best samples", alone(out / "samples", "best")),
        section("Worst samples", alone(out / "samples", "worst")),
        section("Summary", cards(records, summary) + tables(summary)),
        section("Configuration", f"<details><summary>config.json</summary><pre>{written}</pre></details>"),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>\n<body>\n{''.join(part for part in body if part)}\n</body></html>\n"
    )


def section(title: str, content: str) -> str:
    """Return a section, nothing without content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n" if content else ""


def _relative(place: str) -> str:
    """Return a path in the current folder as it is typed there, anything else as it is."""
    path = Path(place)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else place


def describe_run(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return what was trained, in a line."""
    method = config.get("method") or {}
    sampling = method.get("sampling") or {}
    done = max((record["update"] for record in records), default=0)
    parts = [
        f"{method.get('name')} on {_relative(str(config.get('model')))}",
        "LoRA" if config.get("train") == "lora" else "all weights",
        f"sampler {phrase(sampling.get('sampler'))}, {sampling.get('steps')} steps",
        f"{done} of {config.get('updates')} updates",
        f"seed {config.get('seed')}",
    ]
    return " · ".join(parts)


def phrase(choice: Any) -> str:
    """Return a choice among kinds in words, e.g. "ddim (eta 1.0)"."""
    if not isinstance(choice, Mapping):
        return str(choice)
    kind, *settings = [str(choice.get("kind")), *(f"{key} {value}" for key, value in choice.items() if key != "kind")]
    return f"{kind} ({', '.join(settings)})" if settings else kind


def headline(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return the result: each evaluator's score before and after, with the interval of the change, and the reward."""
    found: list[str] = []
    evaluations = [record for record in records if "exact" in record]
    compared = {
        row["evaluator"]: row for row in list_evaluation(summary) if row.get("part") == "all" and "difference" in row
    }
    for name in evaluations[0]["score"] if evaluations else ():
        before, after = (
            tuple(each[kind].get(name) for kind in ("score", "exact")) for each in (evaluations[0], evaluations[-1])
        )
        exact = "" if not (before[1] or after[1]) else f"exactly right {percent(before[1])} → {percent(after[1])}"
        change = f'{difference(compared[name])} <em class="dim">95 % interval</em>' if name in compared else ""
        lines = [f"held-out prompts, score by the {escape(name)} evaluator", change, escape(exact)]
        found.append(result(before[0], after[0], lines, single=len(evaluations) == 1))
    rewards = [record["reward"]["mean"] for record in records if (record.get("reward") or {}).get("mean") is not None]
    if rewards:
        found.append(result(rewards[0], rewards[-1], ["mean reward while training, first and last update"]))
    return f'<div class="headline">{"".join(found)}</div>' if found else ""


def result(before: float | None, after: float | None, lines: Sequence[str], *, single: bool = False) -> str:
    """Return two numbers with lines of HTML below, coloured by improvement."""
    numbers = number(after) if single else f"{number(before)} → {colour_score(after, before)}"
    return f"<div><b>{numbers}</b>{''.join(f'<span>{line}</span>' for line in lines if line)}</div>"


def difference(row: Mapping[str, Any]) -> str:
    """Return a difference with its interval as HTML; coloured if the interval does not hold 0."""
    low, high = row.get("low"), row.get("high")
    text = f"{row['difference']:+.3f}" + ("" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]")
    sure = "good" if low is not None and low > 0 else "bad" if high is not None and high < 0 else ""
    return f'<span class="{sure}">{text}</span>'


def cards(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return what the run took."""
    found: list[tuple[str, str]] = []
    if updates := [record for record in records if "grad_norm" in record]:
        last = updates[-1]
        found.append(("updates", number(last["update"])))
        found.append(("samples", f"{last['samples']:,}" if "samples" in last else "unknown"))
        found += [(f"GiB of memory, {name}", number(size)) for name, size in last.get("memory", {}).items()]
    if "samples_per_second" in summary:
        found.append(("samples per second", number(summary["samples_per_second"])))
    shown = (f"<div><b>{escape(value)}</b>{escape(label)}</div>" for label, value in found)
    return f'<div class="cards">{"".join(shown)}</div>' if found else ""


def render_warnings(lines: Sequence[str]) -> str:
    """Return the warnings."""
    if not lines:
        return ""
    return f'<div class="warnings"><b>Warnings</b><ul>{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul></div>'


def before_and_after(samples: Path) -> str:
    """Return the images of the first and the last evaluation, which start from the same noise, side by side.

    Those whose score changed most come first; the others are folded.
    """
    before, after = _sheet(samples, "before"), _sheet(samples, "after")
    if not before or not after:
        return alone(samples, "before")
    pairs = [pair for pair in zip(before, after, strict=False) if pair[0].prompt == pair[1].prompt]
    pairs.sort(key=lambda pair: -abs((pair[1].score or 0.0) - (pair[0].score or 0.0)))
    figures = []
    for one, other in pairs:
        pair = "".join(
            f"<div><span>{when} {score}</span>{_render_sample(shown, f'{when}: {shown.prompt}')}</div>"
            for when, shown, score in (
                ("before", one, colour_score(one.score, one.score)),
                ("after", other, colour_score(other.score, one.score)),
            )
        )
        figures.append(f'<figure><div class="pair">{pair}</div><figcaption>{escape(one.prompt)}</figcaption></figure>')
    if not figures:
        return ""
    first, rest = ("".join(part) for part in (figures[:SHOWN], figures[SHOWN:]))
    more = f'<details><summary>{len(figures) - SHOWN} more</summary><div class="samples pairs">{rest}</div></details>'
    about = f'<p class="dim">The first {len(figures)} samples of the evaluation, largest change of the score first.</p>'
    return f'{about}<div class="samples pairs">{first}</div>{more if rest else ""}'


def alone(samples: Path, name: str) -> str:
    """Return the images of one sheet with prompts and scores."""
    figures = [
        f"<figure>{_render_sample(one, one.prompt)}<figcaption>{escape(one.prompt)} {colour_score(one.score, one.score)}"
        "</figcaption></figure>"
        for one in _sheet(samples, name)
    ]
    return f'<div class="samples">{"".join(figures)}</div>' if figures else ""


def colour_score(score: float | None, base: float | None) -> str:
    """Return a score as HTML: green above that of the base, red below it; nothing without a score."""
    if score is None:
        return ""
    kind = "" if base is None or score == base else "good" if score > base else "bad"
    return f'<b class="{kind}">{number(score)}</b>' if kind else f"<b>{number(score)}</b>"


def tables(summary: Mapping[str, Any]) -> str:
    """Return a summary as tables: what was evaluated, then all other numbers by their path, in words."""
    rows = list_evaluation(summary)
    found = ""
    if rows:
        compared, exact = any("difference" in row for row in rows), any(row.get("exact") for row in rows)
        head = [
            "evaluator",
            "of",
            "samples",
            *(["before", "after", "change, 95 % interval", "win rate"] if compared else ["score"]),
        ]
        found = grid([*head, *(["exactly right"] if exact else [])], [_cells(row, compared, exact) for row in rows])
    repeated = re.compile(r"(?s).*_(?:exact|score)_(?:before|after)" if rows else r"(?!)")
    others = {name: value for name, value in summary.items() if name != EVALUATION and not repeated.fullmatch(name)}
    leaves = [[escape(name), escape(number(value))] for name, value in flat(others)]
    return found + (grid([], leaves) if leaves else "")


def _cells(row: Mapping[str, Any], compared: bool, exact: bool) -> list[str]:
    """Return the cells of a row of an evaluation as HTML."""
    part = row.get("name") or row.get("part", "")
    cells = [escape(str(row["evaluator"])), escape(str(part)), number(row.get("samples", ""))]
    if compared:
        base = row.get("base_mean")
        cells += ["" if base is None else number(base), colour_score(row.get("mean"), base)]
        cells += [difference(row) if "difference" in row else "", percent(row.get("win_rate"))]
    else:
        cells += [number(row.get("mean", ""))]
    return [*cells, *([percent(row.get("exact"))] if exact else [])]


def list_evaluation(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of the last evaluation in a summary; none where there are none."""
    rows = summary.get(EVALUATION)
    return [row for row in rows if isinstance(row, Mapping) and "evaluator" in row] if isinstance(rows, list) else []


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells of HTML, which scrolls by itself where it is wider than the page."""
    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists with their paths in words, e.g. "train seconds by phase, rollout"."""
    for name, value in record.items():
        path = f"{prefix}{str(name).replace('_', ' ')}"
        if isinstance(value, list | tuple) and any(isinstance(each, Mapping | list) for each in value):
            value = {str(place): each for place, each in enumerate(value, start=1)}
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}, ")
        else:
            yield path, ", ".join(map(number, value)) if isinstance(value, list | tuple) else value


def percent(share: float | None) -> str:
    """Return a share in percent, nothing without one."""
    return "" if share is None else f"{100 * share:.1f}\u00a0%"


def number(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 10 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "" if value is None else str(value)


class Shown(NamedTuple):
    """A sample of a sheet."""

    image: Image.Image
    prompt: str
    score: float | None
    sound: bytes | None = None  # WAV file


def _sheet(samples: Path, name: str) -> list[Shown]:
    """Return the samples of a sheet; none if it is missing."""
    index, path = read_json(samples / f"{name}.json"), samples / f"{name}.png"
    if not isinstance(index, list) or not path.is_file():
        return []
    with Image.open(path) as sheet:
        return [
            Shown(
                sheet.crop(tuple(row["box"])), str(row["prompt"]), row["score"], _sound(samples / f"{name}-{number:02d}.wav")
            )
            for number, row in enumerate(index)
        ]


def _sound(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _render_sample(shown: Shown, alt: str) -> str:
    """Return the image of a sample, with a player of its sound if it has one."""
    if shown.sound is None:
        return _img(shown.image, alt)
    source = f"data:audio/wav;base64,{base64.b64encode(shown.sound).decode()}"
    return f'{_img(shown.image, alt)}<audio controls aria-label="{escape(alt)}" src="{source}"></audio>'


def _img(image: Image.Image, alt: str) -> str:
    """Return an image as an element that holds its data: as PNG, or as JPEG if that is smaller."""
    kind, data = "png", _encode(image, "png", compress_level=6)
    if len(data) > LARGE and len(smaller := _encode(image, "jpeg", quality=88)) < len(data):
        kind, data = "jpeg", smaller
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<img alt="{escape(alt)}" width="{image.width}" height="{image.height}" src="{source}">'


def _encode(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, **options)
    return buffer.getvalue()
