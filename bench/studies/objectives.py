"""Train every recipe on the built-in jobs, and compare them at equal samples and at equal time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from fluvial.bench import harness
from fluvial.bench.studies.trial import StudyRun, StudyScore, group_curves, read_at, run_trials
from fluvial.engines.cli import preferences
from fluvial.engines.errors import UsageError
from fluvial.engines.run.config import with_values
from fluvial.engines.run.recipes import RECIPES

OFFLINE = "dpo, offline"  # dpo on a file of preferences between the base model's samples
TEACHER = "grpo"  # the recipe whose first seed's weights teach distillation
LEFT_OUT = "handwriting", "words", "edit-words", "opd"  # grpo with other numbers, and distillation by two other runs
NAMES = (*(name for name in RECIPES if name not in LEFT_OUT), OFFLINE)


@dataclass(frozen=True)
class ObjectivesConfig:
    """Train with every objective, and compare them at equal samples and at equal time.

    Args:
        recipes: Names of recipes; distill needs the weights of grpo's first seed, run here or kept from before.
        seeds: Seeds of each recipe.
        rollouts: Number of rollouts per run: equal samples.
        seconds: Training time at which runs are compared, of the CPU: equal time. It is read off the same runs, between two
            of their evaluations; a run that is over before is left out.
        looks: Number of evaluations of a run after the first one.
        samples: Number of held-out samples of an evaluation.
        parallel: Number of runs at the same time, each with one thread.
        keep: Folder for preferences and the teacher's weights.
        out: Folder of the table and the plot.
    """

    recipes: tuple[str, ...] = NAMES
    seeds: tuple[int, ...] = (0, 1, 2)
    rollouts: int = 15
    seconds: float = 40.0
    looks: int = 5
    samples: int = 1000
    parallel: int = 1
    keep: Path = Path("runs/objectives")
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        if unknown := [name for name in self.recipes if name not in NAMES]:
            raise UsageError(f"recipes: there is no {unknown[0]!r}, expected some of {', '.join(NAMES)}")
        if not self.seeds or not 1 <= self.looks <= self.rollouts:
            raise UsageError("seeds, looks: expected at least one seed, and no more looks than rollouts")
        if "distill" in self.recipes and TEACHER not in self.recipes and not (self.keep / TEACHER).is_dir():
            raise UsageError(f"recipes: distill takes its teacher from {TEACHER}, which is not among them")

    def list_trials(self) -> list[StudyRun]:
        """Return each recipe with each seed."""
        return [self._build_trial(name, seed) for seed in self.seeds for name in self.recipes]

    def locate_preferences(self, seed: int) -> Path:
        """Return the folder of the base model's samples that offline DPO learns from."""
        return self.keep / f"preferences-{seed}"

    def _build_trial(self, name: str, seed: int) -> StudyRun:
        config = RECIPES[name.partition(",")[0]]()
        proxy = config.rewards[0].partition("=")[0] if config.rewards else "reward"
        evaluation = {"rewards": (proxy, "heldout", "sharpness"), "samples": self.samples, "every": 0}
        values: dict[str, Any] = {"seed": seed, "out": self.keep / "none"}
        values |= {f"evaluation.{key}": value for key, value in evaluation.items()}
        if name == OFFLINE:
            values |= {"method.preferences": self.locate_preferences(seed)}
        if name == "distill":
            values |= {"method.teacher": (str(self.keep / TEACHER / "weights"),)}
        config = with_values(config, values)
        config = replace(config, updates=self.rollouts * config.updates_per_rollout)
        teaches = "distill" in self.recipes and (name, seed) == (TEACHER, self.seeds[0])
        kept = self.keep / TEACHER if teaches else None
        return StudyRun(name, "", config, looks=self.looks, keep=kept, waits=name == "distill")


def run(config: ObjectivesConfig) -> None:
    """Make the runs, write objectives.csv row by row, draw its plot, and print its tables."""
    for seed in config.seeds if OFFLINE in config.recipes else ():
        if not (config.locate_preferences(seed) / "preferences.jsonl").is_file():
            words = ["handwriting", "--out", str(config.locate_preferences(seed)), "--seed", str(seed)]
            harness.run_in_processes(preferences.run, words)
    rows = run_trials(config.list_trials(), config.out / "objectives.csv", parallel=config.parallel)
    draw(rows, config.out / "objectives.png")
    print(f"{format_table(rows)}\n\nafter {config.seconds:g} s\n\n{format_table(rows, config.seconds)}")


def format_table(rows: Sequence[StudyScore], seconds: float | None = None) -> str:
    """Return a Markdown table with mean and spread over the seeds of each recipe, the best first.

    Args:
        rows: evaluations.
        seconds: training time at which runs are compared; None compares them at their end.
    """
    lines = []
    for (name, _), seeds in group_curves(rows).items():
        if seconds is not None and min(curve[-1].seconds for curve in seeds) < seconds:
            continue

        def read(of: str, curves: Sequence[Sequence[StudyScore]] = seeds) -> list[Any]:
            return [getattr(c[-1], of) if seconds is None else read_at(c, of, "seconds", seconds) for c in curves]

        right = read("exact")
        shares = [
            end / curve[1].diversity for end, curve in zip(read("diversity"), seeds, strict=True) if curve[1].diversity
        ]
        kept = [share for share in shares if share == share]  # without groups it is NaN, and 0 with one sample per prompt
        line = {"recipe": name, "before": f"{mean(curve[0].exact for curve in seeds):.3f}"}
        line["after, mean (least to most)"] = f"{mean(right):.3f} ({min(right):.3f} to {max(right):.3f})"
        line["seeds"] = str(len(seeds))
        for of, style in (("seconds", ".0f"), ("samples", ",.0f"), ("updates", ".0f"), ("drift", ".3f")):
            line[of] = format(mean(read(of)), style)
        lines.append({**line, "diversity kept": f"{mean(kept):.2f}" if kept else "-"})
    return harness.format_markdown(sorted(lines, key=lambda line: -float(line["after, mean (least to most)"].split()[0])))


def draw(rows: Sequence[StudyScore], path: Path) -> None:
    """Plot accuracy over samples and seconds, and drift and diversity over updates; bands span the seeds."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 12), layout="constrained")
    right = "whole held-out codes right"
    panels = (
        ("samples", "exact", right),
        ("seconds", "exact", right),
        ("updates", "drift", "drift from the base model"),
        ("updates", "diversity", "distance between samples of a group"),
    )
    curves = sorted(group_curves(rows).items(), key=lambda item: -mean(curve[-1].exact for curve in item[1]))
    for axes, (across, up, title) in zip(figure.subplots(2, 2).ravel(), panels, strict=True):
        for i, ((name, _), seeds) in enumerate(curves):
            length, colour = min(map(len, seeds)), colormaps["tab20"](i % 20)
            x, y = (np.array([[getattr(row, of) for row in one[:length]] for one in seeds], float) for of in (across, up))
            if not np.isnan(y[:, 1:]).all():
                line = "-" if i < 20 else "--"
                axes.plot(x.mean(0), y.mean(0), line, color=colour, label=name, marker="o", markersize=3)
                axes.fill_between(x.mean(0), y.min(0), y.max(0), color=colour, alpha=0.12, linewidth=0)
        axes.set(title=title, xlabel=across, ylabel=up)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=80)
