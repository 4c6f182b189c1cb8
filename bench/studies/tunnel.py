"""The wind tunnel of reward hacking: a reward with a known hole, and the true score beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any, cast

from torch import Tensor

from fluvial.bench import harness
from fluvial.bench.studies.trial import StudyRun, StudyScore, group_curves, read_at, run_trials
from fluvial.engines.errors import UsageError
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.recipes import RECIPES
from fluvial.models.handwriting.recognisers import DigitRecogniser, load_reward_recogniser

PROXY = "fluvial.bench.studies.tunnel:proxy"
HOLE = 3.0  # weight of the ink
GUARDS = ("none", "kl", "ema", "floor")
METHODS = ("grpo", "nft", "awm", "dgpo", "ddpo")
STEPPED_KL = 5.0  # the KL of a step is a distance of means, |b v|^2, not |v|^2
PANELS = 5  # of a row of the plot
GARDO = "gardo"  # a method that is a guard itself


@cache
def _load_recogniser() -> DigitRecogniser:
    return load_reward_recogniser()


def proxy(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the share of characters that are read right, plus 3 x the mean ink, `[B]`.

    The ink is the hole: thick strokes are easier to draw than right ones, and too much ink is unreadable.
    """
    return _load_recogniser().characters(images, prompts) + HOLE * images.flatten(1).mean(1).to("cpu")


def _list_guards(name: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each guard that a recipe takes."""
    method: Any = RECIPES[name]().method
    has_kl, has_floors = hasattr(method, "kl"), hasattr(getattr(method, "advantage", None), "floors")
    step = {"method.kl.weight": "mse"} if has_kl and hasattr(method.kl, "weight") else {}
    guards: dict[str, dict[str, Any]] = {"none": {"method.kl.coef": 0.0} if has_kl else {}}
    if has_kl:
        coef = STEPPED_KL if step else 0.3
        guards |= {
            "kl": {**step, "method.kl.coef": coef},
            "ema": {**step, "method.kl.coef": 0.0, "method.kl.ema_coef": coef},
        }
    if has_floors:
        floors = {"rewards": (PROXY, "likeness"), "method.advantage.floors": ("likeness=-0.6",)}
        guards["floor"] = {**guards["none"], **floors}
    return guards


@dataclass(frozen=True)
class TunnelConfig:
    """Train on a reward with a known hole, with each guard against hacking, and compare true scores at equal proxy.

    Args:
        methods: Names of recipes; gardo is its own guard.
        guards: Names of guards; a method is left without those that it does not take.
        seeds: Seeds of each run.
        rollouts: Number of rollouts of 64 samples per run.
        looks: Number of evaluations of a run after the first one.
        samples: Number of held-out samples of an evaluation.
        parallel: Number of runs at the same time, each with one thread.
        out: Folder of the table and the plot.
    """

    methods: tuple[str, ...] = (*METHODS, GARDO)
    guards: tuple[str, ...] = GUARDS
    seeds: tuple[int, ...] = (0, 1, 2)
    rollouts: int = 24
    looks: int = 4
    samples: int = 200
    parallel: int = 1
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        if unknown := [name for name in self.methods if name not in RECIPES]:
            raise UsageError(f"methods: there is no {unknown[0]!r}, expected some of {', '.join(RECIPES)}")
        if unknown := [name for name in self.guards if name not in GUARDS]:
            raise UsageError(f"guards: there is no {unknown[0]!r}, expected some of {', '.join(GUARDS)}")
        if not self.seeds or not 1 <= self.looks <= self.rollouts:
            raise UsageError("seeds, looks: expected at least one seed, and no more looks than rollouts")

    def list_trials(self) -> Iterator[StudyRun]:
        """Yield each method with each guard that it takes, and seed; GARDO once."""
        for seed in self.seeds:
            for name in self.methods:
                for guard in ("own",) if name == GARDO else filter(_list_guards(name).__contains__, self.guards):
                    yield StudyRun(name, guard, self._build_config(name, guard, seed), looks=self.looks)

    def _build_config(self, name: str, guard: str, seed: int) -> TrainConfig:
        config = RECIPES[name]()
        evaluation = {"rewards": (PROXY, "heldout", "sharpness"), "samples": self.samples, "every": 0}
        values: dict[str, Any] = {
            **{"seed": seed, "out": Path("runs/tunnel"), "method.sampling.prompts": 8, "rewards": (PROXY,)},
            **{f"evaluation.{key}": value for key, value in evaluation.items()},
            "optimizer.lr": 2 * config.optimizer.lr if name != "ddpo" else config.optimizer.lr,
        }
        values |= {"rewards": (PROXY, "likeness")} if name == GARDO else _list_guards(name)[guard]
        config = with_values(config, values)
        return replace(config, updates=self.rollouts * config.updates_per_rollout)


def run(config: TunnelConfig) -> None:
    """Make the runs, write tunnel.csv row by row, draw its plot, and print its table."""
    rows = run_trials(list(config.list_trials()), config.out / "tunnel.csv", parallel=config.parallel)
    draw(rows, config.out / "tunnel.png")
    print(format_table(rows))


def format_table(rows: Sequence[StudyScore], gain: float = 0.2) -> str:
    """Return a Markdown table: true score where the proxy has risen by `gain` and after equal time, and all at the end.

    The time is that of the shortest run.
    """
    lines, time = [], int(min(curve[-1].seconds for seeds in group_curves(rows).values() for curve in seeds))
    for (method, guard), seeds in group_curves(rows).items():
        at = [value for curve in seeds if (value := read_at(curve, "exact", "proxy", gain)) is not None]
        line = {"method": method, "guard": guard, "right at the start": f"{mean(curve[0].exact for curve in seeds):.3f}"}
        line[f"right at proxy + {gain:g}"] = (
            f"{format_spread(at)} ({len(at)} of {len(seeds)})" if at else f"never ({len(seeds)})"
        )
        line[f"right after {time} s"] = format_spread(
            [cast(float, read_at(curve, "exact", "seconds", time)) for curve in seeds]
        )
        for title, of in (("right at the end", "exact"), ("ink and characters", "proxy"), ("diversity", "diversity")):
            line[title] = format_spread([getattr(curve[-1], of) for curve in seeds])
        lines.append({**line, "seconds": f"{mean(curve[-1].seconds for curve in seeds):.0f}"})
    return harness.format_markdown(sorted(lines, key=lambda line: (line["method"], line["guard"])))


def format_spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation over seeds."""
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def draw(rows: Sequence[StudyScore], path: Path) -> None:
    """Plot the true score against the proxy, a panel per method and a line per guard, as means over seeds."""
    from matplotlib.figure import Figure

    grouped = group_curves(rows)
    methods = list(dict.fromkeys(method for method, _ in grouped if method != GARDO))
    rows_of_panels = max(1, -(-len(methods) // PANELS))
    figure = Figure(figsize=(4 * PANELS, 4 * rows_of_panels), layout="constrained")
    panels = figure.subplots(rows_of_panels, PANELS, squeeze=False).flatten()
    for axes in panels[len(methods) :]:
        axes.remove()
    for axes, method in zip(panels, methods, strict=False):
        for (name, guard), seeds in grouped.items():
            if name in (method, GARDO):
                length = min(map(len, seeds))
                x, y = ([mean(getattr(curve[i], of) for curve in seeds) for i in range(length)] for of in ("proxy", "exact"))
                label = GARDO if name == GARDO else guard
                axes.plot(x, y, f"C{[*GUARDS, GARDO].index(label)}", marker="o", markersize=3, label=label)
        axes.set(title=method, xlabel="proxy", ylabel="whole codes right, held out")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=80)
