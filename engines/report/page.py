"""Report of a run: curves, images, numbers and settings in one HTML file, which loads nothing from the network.

It is written from the files of the run folder alone, so that `fluvial report RUN` works while a run is still going on.
"""

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.report import panels
from fluvial.engines.report.concerns import concerns
from fluvial.engines.report.records import read_json, read_records

FILE = "report.html"
LARGE = 8192  # bytes of an image
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # not even a script of a prompt's would run
STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #667; --paper: #fff; --card: #f5f6f8; --line: #d8dbe0;
  --good: #147a3c; --bad: #b42318; --warn: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa3ad; --paper: #14161a; --card: #1e2127;
  --line: #363b44; --good: #5bd38a; --bad: #ff8d80; --warn: #3a3215; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 24px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 26px; } h2 { margin: 32px 0 10px; font-size: 18px; } p { margin: 6px 0; }
.dim, figcaption em { color: var(--dim); }
.cards, .charts, .samples { display: grid; gap: 12px; }
.cards { grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); margin: 18px 0; }
.card { background: var(--card); border-radius: 8px; padding: 10px 14px; } .card b { display: block; font-size: 21px; }
.charts { grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); }
.samples { grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); }
figure { margin: 0; padding: 10px; border: 1px solid var(--line); border-radius: 8px; break-inside: avoid; }
figcaption { font-weight: 600; overflow-wrap: anywhere; } .samples figcaption { font-weight: 400; font-size: 13px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 6px; } .pair span { font-size: 12px; color: var(--dim); }
img { display: block; width: 100%; height: auto; border-radius: 4px; }
svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; } td, th { padding: 4px 10px; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; overflow-wrap: anywhere; }
td:not(:first-child) { font-variant-numeric: tabular-nums; }
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
        f'<p class="dim">{escape(described(config, records))}</p>',
        cards(records, summary),
        warned([*concerns(config, records, summary), *dict.fromkeys(printed)]),
        section("Curves", f'<div class="charts">{"".join(panels.charts(records))}</div>'),
        section("Before and after, from the same noise", before_and_after(out / "samples")),
        section("Best samples", alone(out / "samples", "best")),
        section("Worst samples", alone(out / "samples", "worst")),
        section("Summary", table(summary)),
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


def described(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return what was trained, in a line."""
    objective, rollout = config.get("objective") or {}, config.get("rollout") or {}
    done = max((record["update"] for record in records), default=0)
    parts = [
        f"{objective.get('name')} on {config.get('model')}",
        "LoRA" if config.get("train") == "lora" else "all weights",
        f"sampler {rollout.get('sampler')}, {rollout.get('steps')} steps",
        f"{done} of {config.get('updates')} updates",
        f"seed {config.get('seed')}",
    ]
    return " · ".join(parts)


def cards(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return the numbers that are looked at first."""
    found: list[tuple[str, str]] = []
    evaluations = [record for record in records if "exact" in record]
    if evaluations:
        kind = "exact" if any(record["exact"].get(name) for record in evaluations for name in record["exact"]) else "score"
        for name in evaluations[0][kind]:
            values = [record[kind][name] for record in evaluations]
            what = "exactly right" if kind == "exact" else "score"
            found.append((f"{what}, {name} evaluator", " → ".join(dict.fromkeys(map(number, (values[0], values[-1]))))))
    updates = [record for record in records if "grad_norm" in record]
    rewards = [record["reward"]["mean"] for record in updates if "reward" in record]
    if rewards:
        found.append(("mean reward", f"{number(rewards[0])} → {number(rewards[-1])}"))
    if updates:
        last = updates[-1]
        found.append(("updates", number(last["update"])))
        found.append(("samples", f"{last['samples']:,}" if "samples" in last else "unknown"))
        found += [(f"GiB of memory, {name}", number(size)) for name, size in last.get("memory", {}).items()]
    if "samples_per_second" in summary:
        found.append(("samples per second", number(summary["samples_per_second"])))
    shown = (f'<div class="card"><b>{escape(value)}</b>{escape(label)}</div>' for label, value in found)
    return f'<div class="cards">{"".join(shown)}</div>' if found else ""


def warned(lines: Sequence[str]) -> str:
    """Return the warnings."""
    if not lines:
        return ""
    return f'<div class="warnings"><b>Warnings</b><ul>{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul></div>'


def before_and_after(samples: Path) -> str:
    """Return the images of the first and the last evaluation, which start from the same noise, side by side."""
    before, after = _sheet(samples, "before"), _sheet(samples, "after")
    if not before or not after:
        return alone(samples, "before")
    figures = []
    for (image, prompt, score), (image_after, prompt_after, score_after) in zip(before, after, strict=False):
        if prompt != prompt_after:
            continue
        pair = "".join(
            f"<div><span>{when} {scored(found)}</span>{_img(shown, f'{when}: {prompt}')}</div>"
            for when, shown, found in (("before", image, score), ("after", image_after, score_after))
        )
        figures.append(f'<figure><div class="pair">{pair}</div><figcaption>{escape(prompt)}</figcaption></figure>')
    return f'<div class="samples">{"".join(figures)}</div>' if figures else ""


def alone(samples: Path, name: str) -> str:
    """Return the images of one sheet with prompts and scores."""
    figures = [
        f"<figure>{_img(image, prompt)}<figcaption>{escape(prompt)} {scored(score)}</figcaption></figure>"
        for image, prompt, score in _sheet(samples, name)
    ]
    return f'<div class="samples">{"".join(figures)}</div>' if figures else ""


def scored(score: float | None) -> str:
    """Return a score as HTML, nothing without one."""
    if score is None:
        return ""
    return f'<b class="{"good" if score == 1 else "bad"}">{number(score)}</b>'


def table(summary: Mapping[str, Any]) -> str:
    """Return a summary as a table, nested fields by their path."""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(number(value))}</td></tr>" for name, value in flat(summary))
    return f"<table>{rows}</table>" if rows else ""


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts with their paths."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def number(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 10 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _sheet(samples: Path, name: str) -> list[tuple[Image.Image, str, float | None]]:
    """Return the image, prompt and score of each sample of a sheet; none if it is missing."""
    index, path = read_json(samples / f"{name}.json"), samples / f"{name}.png"
    if not isinstance(index, list) or not path.is_file():
        return []
    with Image.open(path) as sheet:
        return [(sheet.crop(tuple(row["box"])), str(row["prompt"]), row["score"]) for row in index]


def _img(image: Image.Image, alt: str) -> str:
    """Return an image as an element that holds its data: as PNG, or as JPEG if that is smaller."""
    kind, data = "png", _encoded(image, "png", compress_level=6)
    if len(data) > LARGE and len(smaller := _encoded(image, "jpeg", quality=88)) < len(data):
        kind, data = "jpeg", smaller
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<img alt="{escape(alt)}" width="{image.width}" height="{image.height}" src="{source}">'


def _encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, **options)
    return buffer.getvalue()
