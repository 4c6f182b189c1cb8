"""The table of an evaluation: one row per evaluator and part of the samples, alone or beside a base model."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import rich.table
import torch

from fluvial.engines.data.records import Prompt, split_scores, texts
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.run.evaluation import statistics
from fluvial.engines.run.evaluation.evaluate import Scores

Part = Literal["all", "source", "tag", "tags", "prompts"]
MEANS: dict[Part, str] = {"tags": "mean over tags", "prompts": "any sample of a prompt"}


@dataclass(frozen=True)
class ScoreRow:
    """An evaluator's results for a part of the samples.

    A part is all samples, or those of one source or one tag. An evaluator that passes or fails samples also has the parts
    tags (mean over the tags, GenEval's overall score) and prompts (fraction with a passed sample).
    """

    evaluator: str
    part: Part
    name: str  # of the source or the tag
    samples: int
    mean: float
    mean_low: float | None = None  # 95 % bootstrap interval of the mean, over prompts; None for a single prompt
    mean_high: float | None = None
    std: float | None = None  # of the scores of the samples
    exact: float | None = None  # fraction of samples with the score 1
    base_mean: float | None = None  # mean score of the base model
    win_rate: float | None = None  # fraction of samples above the base model's from the same noise; a tie counts one half
    difference: float | None = None  # mean of score - base's score
    low: float | None = None  # 95 % bootstrap interval of the difference, over prompts
    high: float | None = None


def list_rows(scores: Scores, base: Scores | None = None) -> list[ScoreRow]:
    """Return the rows of an evaluation: per evaluator all samples, each source, each tag, and overall pass rates.

    Samples that either evaluation left out are in no row.

    Args:
        scores: scores of the samples.
        base: scores of a base model on the same prompts from the same noise.

    Raises:
        ValueError: the base has other samples or evaluators.
    """
    if base is not None:
        if not has_same_samples(scores, base):
            raise ValueError("the scores of the base are of other samples or by other evaluators")
        scores, base = _select(scores, base.names), _select(base, scores.names)
    return [row for column in range(len(scores.evaluators)) for row in _list_evaluator_rows(scores, base, column)]


def has_same_samples(scores: Scores, other: Scores) -> bool:
    """Return whether two evaluations have the same prompts, noise and evaluators.

    Each may have left out a few samples without a score.
    """
    known = dict(zip(other.names, texts(other.prompts), strict=True))
    shared = [(known[name], prompt.text) for name, prompt in zip(scores.names, scores.prompts, strict=True) if name in known]
    return (
        tuple(scores.evaluators) == tuple(other.evaluators)
        and 2 * len(shared) > max(len(scores.names), len(other.names))
        and all(text == other_text for text, other_text in shared)
    )


def _select(scores: Scores, names: Sequence[str]) -> Scores:
    """Return the scores of the samples with these names; their order is kept."""
    wanted = set(names)
    selected = [i for i, name in enumerate(scores.names) if name in wanted]
    return Scores(
        scores.evaluators,
        [scores.names[i] for i in selected],
        [scores.prompts[i] for i in selected],
        scores.values[torch.tensor(selected, dtype=torch.int64)],
    )


def average_over_tags(scores: Scores) -> dict[str, float]:
    """Return the mean over tags of each evaluator that passes or fails samples; empty if no prompt has a tag."""
    tags = [prompt.tag for prompt in scores.prompts]
    if not any(tag is not None for tag in tags):
        return {}
    columns = {name: scores.values[:, i] for i, name in enumerate(scores.evaluators)}
    return {
        name: statistics.compute_pass_rates(column, tags, texts(scores.prompts)).overall
        for name, column in columns.items()
        if statistics.is_pass_fail(column)
    }


def _list_evaluator_rows(scores: Scores, base: Scores | None, column: int) -> Iterator[ScoreRow]:
    """Yield the rows of the evaluator in a column of the scores."""
    name, prompts = scores.evaluators[column], scores.prompts
    sources, tags = [prompt.source for prompt in prompts], [prompt.tag for prompt in prompts]
    parts: list[tuple[Part, str, list[int]]] = [("all", "", list(range(len(prompts))))]
    kinds = split_scores(scores.values, prompts, scores.evaluators)  # the same parts as in a run's records
    labels: tuple[tuple[Part, str, Sequence[str | None]], ...] = (("source", "sources", sources), ("tag", "tags", tags))
    for part, kind, labels_of_kind in labels:
        parts += [
            (part, label, [number for number, other in enumerate(labels_of_kind) if other == label])
            for label in kinds.get(kind, {})
        ]
    for part, label, numbers in parts:
        values = scores.values[torch.tensor(numbers)]
        texts_of = [prompts[number].text for number in numbers]
        interval = statistics.bootstrap_interval(values[:, column], texts_of) if len({*texts_of}) > 1 else None
        row: dict[str, Any] = {
            "mean": values.mean(0)[column].item(),
            "mean_low": None if interval is None else interval.low,
            "mean_high": None if interval is None else interval.high,
            "std": values[:, column].double().std(correction=0).item(),
            "exact": (values[:, column] == 1).double().mean().item(),
        }
        if base is not None:
            theirs = base.values[torch.tensor(numbers)]
            compared = statistics.compare(values[:, column], theirs[:, column], texts_of)
            row |= {
                "base_mean": theirs.mean(0)[column].item(),
                "win_rate": compared.win_rate,
                "difference": compared.difference,
                "low": compared.interval.low,
                "high": compared.interval.high,
            }
        yield ScoreRow(name, part, label, len(numbers), **row)
    yield from _list_pass_rates(scores, base, column, tags)


def _list_pass_rates(scores: Scores, base: Scores | None, column: int, tags: Sequence[str | None]) -> Iterator[ScoreRow]:
    """Yield the overall rows of an evaluator that passes or fails samples, if prompts have tags."""
    columns = [each.values[:, column] for each in (scores, base) if each is not None]
    if not any(tag is not None for tag in tags) or not all(map(statistics.is_pass_fail, columns)):
        return
    ours, *theirs = (statistics.compute_pass_rates(column, tags, texts(scores.prompts)) for column in columns)
    parts: tuple[Part, ...] = ("tags", "prompts")
    for part, field in zip(parts, ("overall", "prompts"), strict=True):
        mean = float(getattr(ours, field))
        row: dict[str, float] = {}
        for other in theirs:
            row = {"base_mean": getattr(other, field), "difference": mean - getattr(other, field)}
        yield ScoreRow(scores.evaluators[column], part, MEANS[part], len(scores.prompts), mean, **row)


def format_tables(title: str, rows: Sequence[ScoreRow]) -> list[rich.table.Table]:
    """Format rows as tables for the console: the scores, and with a base the comparison with it."""
    exact = any(row.exact for row in rows)
    scores = _start_table(title, ("samples", "mean [95 %]", "std", *(["exactly right"] if exact else [])))
    for row in rows:
        cells = [str(row.samples), _format_mean(row), _format_number(row.std)]
        cells += [_format_number(row.exact)] if exact else []
        scores.add_row(row.evaluator, _name_part(row), *cells)
    if all(row.base_mean is None for row in rows):
        return [scores]
    compared = _start_table("against the base on the same noise", ("base", "win rate", "difference [95 %]"))
    for row in rows:
        cells = [_format_number(row.base_mean), _format_number(row.win_rate), _format_difference(row)]
        compared.add_row(row.evaluator, _name_part(row), *cells)
    return [scores, compared]


def _start_table(title: str, columns: Sequence[str]) -> rich.table.Table:
    sheet = rich.table.Table(title=title, title_justify="left")
    for name in ("evaluator", "of"):
        sheet.add_column(name, overflow="fold")
    for name in columns:
        sheet.add_column(name, justify="right")
    return sheet


def _name_part(row: ScoreRow) -> str:
    return "all" if row.part == "all" else row.name if row.part in MEANS else f"{row.part} {row.name}"


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _format_mean(row: ScoreRow) -> str:
    interval = "" if row.mean_low is None else f" [{_format_number(row.mean_low)}, {_format_number(row.mean_high)}]"
    return _format_number(row.mean) + interval


def _format_difference(row: ScoreRow) -> str:
    if row.difference is None:
        return ""
    return f"{row.difference:+.4f}" + ("" if row.low is None else f" [{row.low:+.4f}, {row.high:+.4f}]")


def as_records(rows: Sequence[ScoreRow]) -> list[dict[str, Any]]:
    """Return rows as values of JSON, without the fields that are None."""
    return [{name: value for name, value in asdict(row).items() if value is not None} for row in rows]


def write_rows(path: Path, rows: Sequence[ScoreRow]) -> None:
    """Write rows as CSV."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([field.name for field in fields(ScoreRow)])
        writer.writerows(["" if value is None else value for value in asdict(row).values()] for row in rows)


def write_scores(path: Path, scores: Scores, base: Scores | None = None) -> None:
    """Write the score of each sample as CSV: name, prompt, source and tag, a column per evaluator, and those of a base.

    Numbers keep all digits, so that `read_scores` returns the same values.
    """
    names = [*scores.evaluators, *(f"base {name}" for name in (() if base is None else base.evaluators))]
    values = scores.values if base is None else torch.cat([scores.values, base.values], dim=1)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["sample", "prompt", "source", "tag", *names])
        for name, prompt, line in zip(scores.names, scores.prompts, values.tolist(), strict=True):
            writer.writerow([name, prompt.text, prompt.source, "" if prompt.tag is None else prompt.tag, *line])


def read_scores(path: Path) -> Scores:
    """Read the scores of a file that `write_scores` wrote without a base; prompts have their text only.

    Raises:
        UsageError: the file is missing or has another format.
    """
    with convert_errors(
        UsageError, OSError, ValueError, KeyError, TypeError, says=f"{path} does not hold the scores of an evaluation"
    ):
        with path.open(newline="", encoding="utf-8") as stream:
            table = csv.DictReader(stream)
            names, lines = list(table.fieldnames or ())[4:], list(table)
        values = torch.tensor([[float(line[name]) for name in names] for line in lines], dtype=torch.float32)
        return Scores(
            tuple(names),
            [line["sample"] for line in lines],
            [Prompt(line["prompt"]) for line in lines],
            values.reshape(len(lines), len(names)),
        )
