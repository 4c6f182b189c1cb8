"""Charts of a run's records."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fluvial.engines.extensions.report.charts import LineChart, draw_bars, draw_lines

Record = Mapping[str, Any]
MOST_LINES = 8
BY_STEP = {"abs_log_ratio": "|log ratio|", "kl_old": "KL to the old policy", "kl_ref": "KL to the reference"}


def draw_charts(records: Sequence[Record]) -> Iterator[str]:
    """Yield the figures of a run's records as HTML; numbers that were not recorded have none."""
    yield from map(draw_lines, [*list_overview(records), *list_details(records)])
    updates = [record for record in records if "grad_norm" in record]
    yield draw_bars("Advantages", read_advantages(updates), xlabel="lower edge of the advantage")


def list_overview(records: Sequence[Record]) -> list[LineChart]:
    """Return the main charts of a run: rewards, scores, signal, diversity, drift and gradient."""
    updates = [record for record in records if "grad_norm" in record]
    evaluations = [record for record in records if "exact" in record]
    exact = any(number for record in evaluations for number in record["exact"].values())
    held_out = read_lines(evaluations, "exact" if exact else "score")
    mean, parts = read_points(updates, "reward", "mean"), read_lines(updates, "rewards")
    return [
        LineChart("Reward while training", {"mean": mean, **parts} if parts else {"": mean}, "mean over the samples"),
        LineChart("Held-out prompts exactly right", held_out, "share of the samples", y="share")
        if exact
        else LineChart("Score on held-out prompts", held_out, "mean over the samples"),
        LineChart(
            "Shares",
            {
                "groups without signal": read_points(updates, "groups", "without_signal"),
                "advantages of 0": read_points(updates, "advantage", "zero"),
                "clipped": read_points(updates, "objective", "clipped"),
                "padding of prompts": read_points(updates, "text", "padding_waste"),
            },
            "of groups, samples, pairs, tokens",
            y="share",
        ),
        _chart_size("Distance within groups", "root mean square between samples", updates, "diversity"),
        _chart_size("Drift from the start", "relative change of the velocity", evaluations, "drift"),
        _chart_size("Gradient norm", "before clipping", updates, "grad_norm"),
    ]


def list_details(records: Sequence[Record]) -> Iterator[LineChart]:
    """Yield the other charts of a run."""
    updates = [record for record in records if "grad_norm" in record]
    for kind in ("sources", "tags"):
        label = kind.removesuffix("s")
        yield LineChart(f"Reward by {label}", read_lines(updates, kind, inner="reward"), "mean over the samples")
    yield _chart_size("Spread of the reward within groups", "standard deviation", updates, "groups", "reward_std")
    kl = {
        "to the reference": read_points(updates, "objective", "kl_ref"),
        "to the old": read_points(updates, "objective", "kl_old"),
    }
    yield LineChart("KL", drop_zero_lines(kl), "nats", y="from_zero")
    for name, title in BY_STEP.items():
        yield LineChart(f"{title} by step", drop_zero_lines(read_steps(updates, name)), "nats", xlabel="step", y="from_zero")
    yield LineChart("Loss", {"": read_points(updates, "loss")})
    yield LineChart("Time per phase", read_lines(updates, "seconds"), "seconds per update", y="from_zero")
    yield _chart_size("Speed", "samples per second", updates, "speed", "samples_per_second")
    mfu = read_points(updates, "speed", "mfu")
    yield LineChart("Model FLOPs utilisation of updates", {"": mfu}, "share of the peak", y="share")
    yield LineChart("Peak memory", read_lines(updates, "memory"), "GiB", y="from_zero")


def _chart_size(title: str, unit: str, records: Sequence[Record], *path: str) -> LineChart:
    """Return the chart of the numbers at a path in the records, with y from 0."""
    return LineChart(title, {"": read_points(records, *path)}, unit, y="from_zero")


def read_points(records: Sequence[Record], *path: str) -> list[tuple[float, float]]:
    """Return the numbers at a path in the records, by update; records without one are left out."""
    pairs = []
    for record in records:
        value: Any = record
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, int | float):
            pairs.append((float(record["update"]), float(value)))
    return pairs


def read_lines(records: Sequence[Record], name: str, inner: str | None = None) -> dict[str, list[tuple[float, float]]]:
    """Return a line for each number in a dict of the records, at most `MOST_LINES` lines."""
    labels = dict.fromkeys(label for record in records for label in record.get(name) or {})
    path = () if inner is None else (inner,)
    return {label: read_points(records, name, label, *path) for label in list(labels)[:MOST_LINES]}


def read_steps(updates: Sequence[Record], name: str) -> dict[str, list[tuple[float, float]]]:
    """Return a number by step, or by level, at the first, the middle and the last update."""
    stated = [record for record in updates if name in (record.get("by_step") or {})]
    chosen = {record["update"]: record for record in (stated[:1] + stated[len(stated) // 2 :][:1] + stated[-1:])}
    return {
        f"update {update}": sorted(
            (float(step), float(value)) for step, value in record["by_step"][name].items() if value is not None
        )
        for update, record in chosen.items()
    }


def drop_zero_lines(curves: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Sequence[tuple[float, float]]]:
    """Return the lines that are not 0 throughout; the KL of a run without one is 0."""
    return {label: line for label, line in curves.items() if any(y for _, y in line)}


def read_advantages(updates: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return the fraction of the samples by advantage, at the first and the last update."""
    stated = [record for record in updates if "advantage" in record]
    chosen = {record["update"]: record["advantage"]["histogram"] for record in stated[:1] + stated[-1:]}
    return {f"update {update}": dict(shares) for update, shares in chosen.items()}
