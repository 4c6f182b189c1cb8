"""Starts the ranks that measure, appends what they return to the tables, and prints it.

python -P -m fluvial.bench update --json                                  the line of JSON, in some minutes
python -P -m fluvial.bench update --ranks 1 2 --steps 2 4 10 --json       every row
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fluvial.bench import harness
from fluvial.bench.harness import Row
from fluvial.bench.update.cases import (
    UpdateConfig,
)
from fluvial.bench.update.measure import COMPARED, Compared, CountRow, Measured


def run(config: UpdateConfig) -> dict[str, Any]:
    """Measure with each number of ranks, append to update.csv and update-counts.csv, print, and return the summary.

    Raises:
        RunError: the processes failed; their messages are on standard error.
    """
    measured = [_in_processes(config, ranks) for ranks in config.ranks]
    rows = [row for part in measured for row in part.rows]
    counts = [row for part in measured for row in part.counts]
    compared = [case for part in measured for case in part.compared]
    harness.append(config.out / "update.csv", rows)
    harness.append(config.out / "update-counts.csv", counts, CountRow)
    harness.show("update of a stored rollout", rows, baseline="baseline")
    _show_counts(counts)
    for case in compared:
        ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in case.speedup.items() if name != "baseline")
        mfu = "".join(f"; MFU of {name} {value:.2f}" for name, value in case.mfu.items())
        print(
            f"{case.size}, {case.ranks} process(es), {case.train}, {case.steps} steps: {ratios} of the baseline's speed; "
            f"gradients apart by {case.distance:.1g}{mfu}"
        )
    summary = summarize(counts, compared, config.counted)
    if config.json:
        print(json.dumps(summary))
    return summary


def summarize(
    counts: Sequence[CountRow], compared: Sequence[Compared], counted: tuple[int, int, int]
) -> dict[str, dict[str, float] | float]:
    """Return the content of the line of JSON: counts with the most ranks, and the speed-up with the most ranks and steps.

    An FSDP unit is a block or the rest of the model; counts per block are means over units. Of LoRA and full fine-tuning
    the larger counts are taken. The speed-up is the smallest over both and over sizes.

    Args:
        counts, compared: rows of all numbers of ranks.
        counted: numbers of recorded steps that were counted: few, some and many. Collectives are those of "some".
    """
    ranks = max(row.ranks for row in counts)
    summary: dict[str, dict[str, float] | float] = {}
    for provider in COMPARED:
        few, some, many = (
            [row for row in counts if (row.provider, row.ranks, row.steps) == (provider, ranks, steps)] for steps in counted
        )
        if few:
            summary[provider] = {
                "micro_batches": some[0].micro_batches,
                "all_gather_per_block": max(row.all_gathers / row.units for row in some),
                "reduce_scatter_per_block": max(row.reduce_scatters / row.units for row in some),
                "host_reads_per_micro_batch": max(
                    (b.host_reads - a.host_reads) / (b.micro_batches - a.micro_batches)
                    for a, b in zip(few, some, strict=True)
                ),
                f"peak_bytes_{counted[0]}_steps": max(row.peak_bytes for row in few),
                f"peak_bytes_{counted[-1]}_steps": max(row.peak_bytes for row in many),
            }
    steps = max(case.steps for case in compared)
    headline = [case for case in compared if (case.steps, case.ranks) == (steps, ranks)]
    summary["speedup_vs_baseline"] = min(case.speedup["keep"] for case in headline)
    summary["speedup_vs_baseline_with_stored_log_probs"] = min(case.speedup_stored for case in headline)
    summary["gradient_distance"] = max(case.distance for case in compared)
    return summary


def _in_processes(config: UpdateConfig, ranks: int) -> Measured:
    """Measure in new processes, under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        told, out = Path(folder) / "config.json", Path(folder) / "measured.json"
        told.write_text(json.dumps({name: value for name, value in asdict(config).items() if name != "out"}))
        harness.in_processes("update", "update.measure", [str(told), str(out)], ranks=ranks, threads=config.threads)
        read = json.loads(out.read_text())
    return Measured(
        [Row(**row) for row in read["rows"]],
        [CountRow(**row) for row in read["counts"]],
        [Compared(**case) for case in read["compared"]],
    )


def _show_counts(rows: Sequence[CountRow]) -> None:
    columns = [field.name for field in fields(CountRow) if field.name != "torch"]
    lines = [[str(getattr(row, name)) for name in columns] for row in rows]
    shown = [name.replace("_", " ") for name in columns]
    harness.show_table("counts of an update on one rank", shown, lines, left=("provider", "shape", "mode"), width=180)
