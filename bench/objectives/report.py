"""The comparison of objectives: runs its cases, keeps their rows, and makes the table and the plot of them."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import numpy as np

from fluvial.bench import harness
from fluvial.bench.objectives import cases
from fluvial.bench.objectives.cases import TEACHER, CurvePoint, ObjectiveCase, ObjectivesConfig
from fluvial.engines.errors import RunError


def run(config: ObjectivesConfig) -> None:
    """Train, write objectives.csv row by row, draw its plot, and print its tables.

    Raises:
        RunError: a run failed; the others are made nevertheless.
    """
    path = config.out / "objectives.csv"
    failed = []
    if not config.plot:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) if config.keep is None else config.keep
            folder.mkdir(parents=True, exist_ok=True)
            for timed in (False, True):  # which runs of equal time are needed is known when those of equal samples are done
                cases = [
                    case for case in _missing(config, harness.read(path, CurvePoint), folder) if bool(case.seconds) == timed
                ]
                for case, curve in measure(cases, config, folder):
                    if isinstance(curve, str):
                        failed.append(f"{case.recipe}, seed {case.seed}, {case.limit}: {curve}")
                        continue
                    harness.write(
                        path,
                        [*(point for point in harness.read(path, CurvePoint) if not _is_of(point, case)), *curve],
                        CurvePoint,
                    )
                    end = curve[-1]
                    print(
                        f"{case.recipe}, seed {case.seed}, {case.limit}: {curve[0].heldout:.3f} -> {end.heldout:.3f} in "
                        f"{end.seconds:.0f} s, {end.samples} samples",
                        flush=True,
                    )
    points = harness.read(path, CurvePoint)
    shown = [point for point in points if point.limit.endswith("rollouts")] + at_time(points, config.cases(Path()))
    if shown:
        draw(shown, config.out / "objectives.png")
    for limit in sorted({point.limit for point in shown}, key=lambda limit: (limit.endswith(" s"), limit)):
        print(f"\n{limit}\n\n{table([point for point in shown if point.limit == limit])}")
    if failed:
        raise RunError("; ".join(failed))


def measure(
    cases: Sequence[ObjectiveCase], config: ObjectivesConfig, folder: Path
) -> Iterator[tuple[ObjectiveCase, list[CurvePoint] | str]]:
    """Yield each run with its evaluations, or with what it failed with, as it ends; distillation waits for its teacher."""
    with ThreadPoolExecutor(config.parallel) as pool:
        for learning in (False, True):
            now = [case for case in cases if (case.recipe == "distill") == learning]
            futures = {pool.submit(_run, case): case for case in now}
            for future in as_completed(futures):
                yield futures[future], future.result()
            teacher, kept = folder / f"teacher-{config.seeds[0]}", folder / "teacher"
            if teacher.is_dir() and not kept.exists():
                teacher.rename(kept)


def at_time(points: Sequence[CurvePoint], cases: Sequence[ObjectiveCase]) -> list[CurvePoint]:
    """Return the evaluations of the cases of equal time, the last one at their time.

    A case has its own run, or else those evaluations of the run of equal samples that came before, and one that is
    interpolated between the neighbours of that time.
    """
    parts = []
    for case in cases:
        known = [point for point in points if (point.recipe, point.seed) == (case.recipe, case.seed)]
        measured = [point for point in known if point.limit == case.limit]
        longer = [point for point in known if point.limit.endswith("rollouts")]
        curves = [[p for p in longer if p.limit == limit] for limit in sorted({point.limit for point in longer})]
        if case.seconds:
            parts += measured or next((_until(curve, case) for curve in curves if case.is_covered(curve)), [])
    return parts


def _until(curve: Sequence[CurvePoint], case: ObjectiveCase) -> list[CurvePoint]:
    """Return the evaluations of a run up to a time, and one at that time, interpolated linearly."""
    curve = sorted(curve, key=lambda point: point.seconds)
    before = [point for point in curve if point.seconds < case.seconds]
    start, end = before[-1], curve[len(before)]
    share = (case.seconds - start.seconds) / (end.seconds - start.seconds)

    def between(name: str) -> float:
        first, last = getattr(start, name), getattr(end, name)
        return float(last if math.isnan(first) else first + share * (last - first))

    numbers = {name: between(name) for name in ("heldout", "reward", "drift", "diversity")}
    whole = {name: round(between(name)) for name in ("updates", "samples")}
    here = replace(end, seconds=case.seconds, **whole, **numbers)  # type: ignore[arg-type]
    return [replace(point, limit=case.limit) for point in [*before, here]]


def ends(points: Sequence[CurvePoint]) -> dict[str, list[CurvePoint]]:
    """Return the last evaluation of each seed, by recipe, the best recipe first."""
    last: dict[tuple[str, int], CurvePoint] = {}
    for point in points:
        known = last.get((point.recipe, point.seed))
        if known is None or point.updates >= known.updates:
            last[point.recipe, point.seed] = point
    by_recipe: dict[str, list[CurvePoint]] = {}
    for point in last.values():
        by_recipe.setdefault(point.recipe, []).append(point)
    return dict(sorted(by_recipe.items(), key=lambda item: -np.mean([point.heldout for point in item[1]])))


def table(points: Sequence[CurvePoint]) -> str:
    """Return a Markdown table: mean and spread over seeds of each recipe's last evaluation."""
    starts = {(point.recipe, point.seed): point for point in points if point.updates == 0}
    first_diversity: dict[tuple[str, int], float] = {}
    for point in points:
        if point.updates and not math.isnan(point.diversity):
            first_diversity.setdefault((point.recipe, point.seed), point.diversity)
    lines = []
    for name, ends_of in ends(points).items():
        right = [point.heldout for point in ends_of]
        before = [starts[name, point.seed].heldout for point in ends_of if (name, point.seed) in starts]
        kept = [
            point.diversity / first
            for point in ends_of
            if (first := first_diversity.get((name, point.seed)))  # 0: one sample per prompt
        ]
        line = {
            "recipe": name,
            "before": f"{np.mean(before):.3f}" if before else "-",
            "after, mean (least to most)": f"{np.mean(right):.3f} ({min(right):.3f} to {max(right):.3f})",
            "seeds": f"{len(ends_of)}",
        }
        means = (("reward's recogniser", "reward", ".3f"), ("seconds", "seconds", ".0f"), ("samples", "samples", ",.0f"))
        for column, field, style in (*means, ("updates", "updates", ".0f"), ("drift", "drift", ".3f")):
            line[column] = format(np.mean([getattr(point, field) for point in ends_of]), style)
        lines.append({**line, "diversity kept": f"{np.mean(kept):.2f}" if kept else "-"})
    return harness.markdown(lines)


def draw(points: Sequence[CurvePoint], path: Path) -> None:
    """Plot accuracy against samples (runs of equal samples) and seconds (of equal time), and its cost: drift, diversity."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 9), layout="constrained")
    places = figure.subplots(2, 3).ravel()
    sampled = [point.limit for point in points if point.limit.endswith("rollouts")]
    by_samples = [point for point in points if point.limit == max(sampled, key=sampled.count, default="")]
    by_time = [point for point in points if point.limit.endswith(" s")]
    right = "whole held-out codes right"
    panels = (
        (by_samples, "samples", "heldout", f"{right}, equal samples"),
        (by_time, "seconds", "heldout", f"{right}, equal time"),
        (by_samples, "updates", "heldout", f"{right}, equal samples"),
        (by_samples, "reward", "heldout", "unseen recogniser against the reward's"),
        (by_samples, "updates", "drift", "drift from the base model"),
        (by_samples, "updates", "diversity", "distance between samples of a group"),
    )
    names = list(ends([*by_samples, *by_time]))
    for axes, (shown, across, up, title) in zip(places, panels, strict=True):
        for i, name in enumerate(names):
            seeds = sorted({point.seed for point in shown if point.recipe == name})
            runs = [
                sorted((p for p in shown if p.recipe == name and p.seed == seed), key=lambda p: p.updates) for seed in seeds
            ]
            if not runs:
                continue
            length, colour = min(len(one) for one in runs), colormaps["tab20"](i % 20)
            x, y = (np.array([[getattr(p, of) for p in one[:length]] for one in runs], dtype=float) for of in (across, up))
            if np.isnan(y[:, 1:]).all():
                continue
            axes.plot(x.mean(0), y.mean(0), color=colour, label=name, marker="o", markersize=3)
            if across != "reward":
                axes.fill_between(x.mean(0), y.min(0), y.max(0), color=colour, alpha=0.12, linewidth=0)
        axes.set(title=title, xlabel=across, ylabel=up)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in places[:2]:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    figure.savefig(path, dpi=80)


def _missing(config: ObjectivesConfig, known: Sequence[CurvePoint], folder: Path) -> list[ObjectiveCase]:
    """Return the cases whose numbers are not in the table; the teacher's too if distillation has to wait for it."""
    cases = config.cases(folder)
    rows = {case: [point for point in known if _is_of(point, case, same=True)] for case in cases}
    equal = {(case.recipe, case.seed): rows[case] for case in cases if case.rollouts}
    missing = [case for case in cases if not case.is_covered(equal.get((case.recipe, case.seed), ()))]
    if config.again:
        return missing
    missing = [case for case in missing if not rows[case]]
    if any(case.recipe == "distill" for case in missing) and not (folder / "teacher").is_dir():
        teachers = [case for case in cases if case.recipe == TEACHER and case.seed == config.seeds[0] and case.rollouts]
        missing = [*(case for case in teachers if case not in missing), *missing]
    return missing


def _is_of(point: CurvePoint, case: ObjectiveCase, *, same: bool = False) -> bool:
    """Return whether a row comes from a case, and from its very settings if `same`."""
    alike = (point.recipe, point.seed, point.limit) == (case.recipe, case.seed, case.limit)
    return alike and (not same or point.settings == case.settings)


def _run(case: ObjectiveCase) -> list[CurvePoint] | str:
    """Return the evaluations of a run, made by a process with one thread, or what went wrong."""
    try:
        return harness.in_processes(cases.points, case, threads=1)
    except RunError as error:
        return str(error)
