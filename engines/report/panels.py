"""Which curves of a run are drawn, out of its records."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fluvial.engines.report.charts import bar_chart, line_chart

Record = Mapping[str, Any]
MOST_LINES = 8
BY_STEP = {"abs_log_ratio": "|log ratio|", "kl_old": "KL to the old policy", "kl_ref": "KL to the reference"}


def charts(records: Sequence[Record]) -> Iterator[str]:
    """Yield the figures of a run's records; what was not recorded has none."""
    updates = [record for record in records if "grad_norm" in record]
    evaluations = [record for record in records if "exact" in record]
    exact = any(number for record in evaluations for number in record["exact"].values())
    yield line_chart("Reward while training", {"mean": points(updates, "reward", "mean"), **lines(updates, "rewards")})
    title = "Held-out prompts exactly right" if exact else "Score on held-out prompts"
    yield line_chart(title, lines(evaluations, "exact" if exact else "score"))
    for kind in ("sources", "tags"):
        yield line_chart(f"Reward by {kind.removesuffix('s')}", lines(updates, kind, inner="reward"))
    yield line_chart("Spread of the reward within groups", {"standard deviation": points(updates, "groups", "reward_std")})
    yield line_chart(
        "Shares",
        {
            "groups without signal": points(updates, "groups", "without_signal"),
            "advantages of 0": points(updates, "advantage", "zero"),
            "clipped": points(updates, "objective", "clipped"),
            "padding of prompts": points(updates, "text", "padding_waste"),
        },
    )
    kl = {"to the reference": points(updates, "objective", "kl_ref"), "to the old": points(updates, "objective", "kl_old")}
    yield line_chart("KL", moving(kl))
    for name, what in BY_STEP.items():
        yield line_chart(f"{what} by step", moving(by_step(updates, name)), xlabel="step")
    yield bar_chart("Advantages", histograms(updates), xlabel="lower edge")
    yield line_chart("Distance between samples of a group", {"root mean square": points(updates, "diversity")})
    yield line_chart("Drift from the model at the start", {"of the velocity, relative": points(evaluations, "drift")})
    yield line_chart("Loss", {"loss": points(updates, "loss")})
    yield line_chart("Gradient norm", {"before clipping": points(updates, "grad_norm")})
    yield line_chart("Seconds per phase", lines(updates, "seconds"))
    yield line_chart("Samples per second", {"samples": points(updates, "speed", "samples_per_second")})
    yield line_chart("Model FLOPs utilisation of updates", {"mfu": points(updates, "speed", "mfu")})
    yield line_chart("Peak memory in GiB", lines(updates, "memory"))


def points(records: Sequence[Record], *path: str) -> list[tuple[float, float]]:
    """Return the numbers at a path in the records, over updates; records without one are left out."""
    found = []
    for record in records:
        value: Any = record
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, int | float):
            found.append((float(record["update"]), float(value)))
    return found


def lines(records: Sequence[Record], name: str, inner: str | None = None) -> dict[str, list[tuple[float, float]]]:
    """Return a line of each number in a dict of the records; those that are not shown are counted in no line."""
    labels = dict.fromkeys(label for record in records for label in record.get(name) or {})
    path = () if inner is None else (inner,)
    return {label: points(records, name, label, *path) for label in list(labels)[:MOST_LINES]}


def by_step(updates: Sequence[Record], name: str) -> dict[str, list[tuple[float, float]]]:
    """Return a number by step, or by level, at the first, a middle and the last update."""
    held = [record for record in updates if name in (record.get("by_step") or {})]
    chosen = {record["update"]: record for record in (held[:1] + held[len(held) // 2 :][:1] + held[-1:])}
    return {
        f"update {update}": sorted(
            (float(step), float(value)) for step, value in record["by_step"][name].items() if value is not None
        )
        for update, record in chosen.items()
    }


def moving(found: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Sequence[tuple[float, float]]]:
    """Return the lines that are not 0 throughout, as a KL is that a run does not have."""
    return {label: line for label, line in found.items() if any(y for _, y in line)}


def histograms(updates: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return the shares of the samples by advantage, at the first and the last update."""
    held = [record for record in updates if "advantage" in record]
    chosen = {record["update"]: record["advantage"]["histogram"] for record in held[:1] + held[-1:]}
    return {f"update {update}": dict(shares) for update, shares in chosen.items()}
