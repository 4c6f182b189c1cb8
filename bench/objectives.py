"""The objectives on the built-in jobs: whole codes right on held-out prompts, against time, samples and updates.

Every run is `fluvial train RECIPE --seed S` in its own process; the numbers are read from its folder. Seconds count training
only. Recipes that run at the same time slow each other down alike.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fluvial.bench import harness
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.train.recipes import RECIPES

OFFLINE = "dpo, offline"  # dpo on a file of preferences between the base model's samples
TEACHER = "grpo"  # the recipe whose first seed's weights teach distillation
NAMES = (*(name for name in RECIPES if name != "handwriting"), OFFLINE)  # that one is grpo, longer


@dataclass(frozen=True)
class ObjectivesConfig:
    """Train with every objective, and compare them.

    Args:
        recipes: names of recipes; distill needs the weights of grpo's first seed, run here or kept from before.
        seeds: seeds of each recipe.
        rollouts: rollouts per run instead of the recipe's own number, with five evaluations on the way.
        label: suffix of the recipes' names in the table, to mark runs of another length.
        parallel: runs at the same time, each with one thread.
        keep: folder that keeps the runs; by default they are deleted.
        out: folder of the table and the plot.
        plot: only draw the plot, from the table.
    """

    recipes: tuple[str, ...] = NAMES
    seeds: tuple[int, ...] = (0, 1, 2)
    rollouts: int | None = None
    label: str = ""
    parallel: int = 2
    keep: Path | None = None
    out: Path = harness.RESULTS
    plot: bool = False

    def __post_init__(self) -> None:
        if unknown := [name for name in self.recipes if name not in NAMES]:
            raise UsageError(f"recipes: there is no {unknown[0]!r}, expected some of {', '.join(NAMES)}")
        if not self.seeds or self.parallel < 1 or (self.rollouts is not None and self.rollouts < 5):
            raise UsageError("seeds and parallel: expected at least one, and at least five rollouts")
        taught = self.keep is not None and (self.keep / f"{TEACHER}-{self.seeds[0]}" / "weights").is_dir()
        if "distill" in self.recipes and TEACHER not in self.recipes and not taught and not self.plot:
            raise UsageError(f"recipes: distill takes its teacher from {TEACHER}, which is not among them")


@dataclass(frozen=True)
class Point:
    """An evaluation of a run."""

    recipe: str
    seed: int
    updates: int
    samples: int  # drawn and scored so far, or read from data
    seconds: float  # training time so far
    heldout: float  # whole codes right, by the recogniser that training never sees
    reward: float  # the same, by the recogniser that is the reward
    drift: float  # relative distance of the velocity from the base model's
    diversity: float  # mean distance within a group of the last rollout; NaN without groups
    evaluated: int  # samples per evaluation
    max_log_ratio: float  # largest first-pass |log ratio|; NaN without one
    device: str
    torch: str
    date: str


def run(config: ObjectivesConfig) -> None:
    """Train, write bench/results/objectives.csv and its plot, print a table."""
    path = config.out / "objectives.csv"
    if not config.plot:
        with tempfile.TemporaryDirectory() as folder:
            for points in measure(config, Path(folder) if config.keep is None else config.keep):
                made = {(point.recipe, point.seed) for point in points}
                write(path, [*(point for point in read(path) if (point.recipe, point.seed) not in made), *points])
    points = read(path)
    draw(points, config.out / "objectives.png")
    Console(width=150).print(table(points), highlight=False)


def measure(config: ObjectivesConfig, folder: Path) -> Iterator[list[Point]]:
    """Yield the evaluations of each run; runs that need another's weights come last."""
    first = [(name, seed) for seed in config.seeds for name in config.recipes if name != "distill"]
    last = [("distill", seed) for seed in config.seeds if "distill" in config.recipes]
    with ThreadPoolExecutor(config.parallel) as pool:
        for jobs in (first, last):
            yield from pool.map(lambda job: list(_run(job[0], job[1], config, folder)), jobs)


def read(path: Path) -> list[Point]:
    """Return the evaluations of a table."""
    if not path.exists():
        return []
    kinds: dict[str, Any] = {field.name: field.type for field in fields(Point)}
    with path.open() as file:
        return [Point(**{name: kinds[name](text) for name, text in record.items()}) for record in csv.DictReader(file)]


def write(path: Path, points: Sequence[Point]) -> None:
    """Write a table of evaluations."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Point)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)


def ends(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the last evaluation of each seed, by recipe, the best recipe first."""
    last: dict[tuple[str, int], Point] = {}
    for point in points:
        known = last.get((point.recipe, point.seed))
        if known is None or point.updates >= known.updates:
            last[point.recipe, point.seed] = point
    by_recipe: dict[str, list[Point]] = {}
    for point in last.values():
        by_recipe.setdefault(point.recipe, []).append(point)
    return dict(sorted(by_recipe.items(), key=lambda item: -np.mean([point.heldout for point in item[1]])))


def table(points: Sequence[Point]) -> Table:
    """Return the mean and the spread over seeds of each recipe's last evaluation."""
    starts = {(point.recipe, point.seed): point for point in reversed(points) if point.updates == 0}
    first_diversity: dict[tuple[str, int], float] = {}
    for point in points:
        if point.updates and not np.isnan(point.diversity):
            first_diversity.setdefault((point.recipe, point.seed), point.diversity)
    sheet = Table(title="whole held-out codes right: mean over seeds (least to most)", title_justify="left")
    for column in (
        "recipe",
        "before",
        "after",
        "reward's recogniser",
        "seconds",
        "samples",
        "updates",
        "drift",
        "diversity kept",
    ):
        sheet.add_column(column, justify="left" if column == "recipe" else "right")
    for name, found in ends(points).items():
        right = [point.heldout for point in found]
        before = [starts[name, point.seed].heldout for point in found if (name, point.seed) in starts]
        kept = [
            point.diversity / first_diversity[name, point.seed] for point in found if (name, point.seed) in first_diversity
        ]
        sheet.add_row(
            name,
            f"{np.mean(before):.3f}" if before else "-",
            f"{np.mean(right):.3f} ({min(right):.3f} to {max(right):.3f})",
            f"{np.mean([point.reward for point in found]):.3f}",
            f"{np.mean([point.seconds for point in found]):.0f}",
            f"{found[0].samples}",
            f"{found[0].updates}",
            f"{np.mean([point.drift for point in found]):.3f}",
            f"{np.mean(kept):.2f}" if kept else "-",
        )
    return sheet


def draw(points: Sequence[Point], path: Path) -> None:
    """Plot accuracy against seconds, samples and updates, and its cost: drift and diversity."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 9), layout="constrained")
    places = figure.subplots(2, 3).ravel()
    panels = (
        ("seconds", "heldout", "whole held-out codes right"),
        ("samples", "heldout", "whole held-out codes right"),
        ("updates", "heldout", "whole held-out codes right"),
        ("reward", "heldout", "unseen recogniser against the reward's"),
        ("updates", "drift", "drift from the base model"),
        ("updates", "diversity", "distance between samples of a group"),
    )
    names = list(ends(points))
    for axes, (across, up, title) in zip(places, panels, strict=True):
        for i, name in enumerate(names):
            colour = colormaps["tab20"](i % 20)
            seeds = sorted({point.seed for point in points if point.recipe == name})
            runs = [
                sorted((p for p in points if p.recipe == name and p.seed == seed), key=lambda p: p.updates) for seed in seeds
            ]
            length = min(len(one) for one in runs)
            x, y = (np.array([[getattr(p, of) for p in one[:length]] for one in runs], dtype=float) for of in (across, up))
            if np.isnan(y[:, 1:]).all():
                continue
            axes.plot(x.mean(0), y.mean(0), color=colour, label=name, marker="o", markersize=3)
            if across != "reward":
                axes.fill_between(x.mean(0), y.min(0), y.max(0), color=colour, alpha=0.12, linewidth=0)
        axes.set(title=title, xlabel=across, ylabel=up)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    places[0].legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    figure.savefig(path, dpi=80)


def _run(recipe: str, seed: int, config: ObjectivesConfig, folder: Path) -> Iterator[Point]:
    """Train once, and yield its evaluations."""
    out = folder / f"{recipe.replace(', ', '-')}-{seed}"
    flags = ["--out", str(out), "--seed", str(seed)]
    if config.rollouts is not None:
        each = RECIPES[recipe.partition(",")[0]]().updates_per_rollout
        flags += ["--updates", str(config.rollouts * each), "--eval-every", str(config.rollouts // 5 * each)]
    if recipe == "distill":
        flags += ["--objective.teacher", str(folder / f"{TEACHER}-{config.seeds[0]}" / "weights")]
    if recipe == OFFLINE:
        pairs = folder / f"preferences-{seed}"
        _fluvial("preferences", "handwriting", "--out", str(pairs), "--seed", str(seed))
        flags += ["--objective.preferences", str(pairs)]
    _fluvial("train", recipe.partition(",")[0], *flags)
    yield from points_of(out, recipe + config.label, seed)


def points_of(out: Path, recipe: str, seed: int) -> Iterator[Point]:
    """Yield the evaluations of a run folder."""
    versions = json.loads((out / "summary.json").read_text())["versions"]
    evaluated = json.loads((out / "config.json").read_text())
    device, date = harness.cpu(), datetime.now(UTC).strftime("%Y-%m-%d")
    samples, seconds, diversity, ratio = 0, 0.0, float("nan"), float("nan")
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "seconds" in record:
            samples, seconds = record["samples"], seconds + sum(record["seconds"].values())
            diversity = record.get("diversity", diversity)
            ratio = max(record.get("first_pass_max_abs_log_ratio", ratio), 0.0 if np.isnan(ratio) else ratio)
        if "exact" not in record:
            continue
        whole = record["update"] in (0, evaluated["updates"])
        yield Point(
            recipe, seed, record["update"], samples, round(seconds, 2), record["exact"]["heldout"],
            record["exact"]["reward"], record["drift"], diversity,
            evaluated["final_samples" if whole else "eval_samples"], ratio, device, versions["torch"], date,
        )  # fmt: skip


def _fluvial(*args: str) -> None:
    """Run the command line with one thread.

    Raises:
        RunError: the command failed; the message has its last line.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fluvial.engines", *args], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RunError(f"fluvial {' '.join(args)} failed: {lines[-1]}")
