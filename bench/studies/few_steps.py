"""Few steps: distil a built-in model to two and four steps, and measure what each RL method then does to its samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from fluvial.bench import harness
from fluvial.bench.studies.trial import StudyRun, StudyScore, run_trials
from fluvial.engines.errors import UsageError
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.recipes import RECIPES
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import AllSteps

TEACHER_STEPS = 10
CONSISTENCY, FLOW = Stochastic("cps", eta=1.0), Ode()
STUDENTS = {"dmd2": "consistency", "tdm": "euler"}  # the solver that each is served with
STARTS = {"grpo": "dmd2", "rtdmd": "dmd2", "nft": "tdm", "tdm-r1": "tdm"}  # whose student each begins from


@dataclass(frozen=True)
class FewStepsConfig:
    """Distil a built-in model to few steps, and improve the students by RL: accuracy and sharpness beside the teacher's.

    A student of DMD2 is improved by methods that sample with noise, one of TDM by methods that follow the ODE.

    Args:
        model: Which model.
        steps: Numbers of steps of the students.
        seeds: Seeds of each run.
        distilled: Number of rollouts of a distillation.
        improved: Number of rollouts of RL.
        samples: Number of held-out samples of an evaluation.
        parallel: Number of runs at the same time, each with one thread.
        keep: Folder for the students' adapters.
        out: Folder of the table.
    """

    model: Literal["words", "handwriting"] = "words"
    steps: tuple[int, ...] = (2, 4)
    seeds: tuple[int, ...] = (0,)
    distilled: int = 100
    improved: int = 30
    samples: int = 350
    parallel: int = 1
    keep: Path = Path("runs/few-steps")
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        if not self.steps or min(self.steps) < 2 or not self.seeds:
            raise UsageError("steps and seeds: expected at least one of each, and 2 steps or more")

    def list_trials(self) -> list[StudyRun]:
        """Return the teacher's evaluation, the distillations, and the runs of RL that begin from their students."""
        teachers = [
            StudyRun("teacher", "", self._build_run("nft", TEACHER_STEPS, seed, solver="euler"), looks=0)
            for seed in self.seeds
        ]
        students = [
            StudyRun(kind, "distilled", self._build_student(kind, steps, seed), keep=self._locate_student(kind, steps, seed))
            for seed in self.seeds
            for steps in self.steps
            for kind in STUDENTS
        ]
        improved = [
            StudyRun(name, f"from {start}", self._build_improvement(name, start, steps, seed), waits=True)
            for seed in self.seeds
            for steps in self.steps
            for name, start in STARTS.items()
        ]
        return [*teachers, *students, *improved]

    def _locate_student(self, kind: str, steps: int, seed: int) -> Path:
        return self.keep / f"{self.model}-{kind}-{steps}-{seed}"

    def _build_run(
        self, recipe: str, steps: int, seed: int, *, solver: str, sampling: Any = None, **values: Any
    ) -> TrainConfig:
        config = RECIPES[recipe](self.model)
        method: Any = config.method
        few = replace(method.sampling, steps=steps, **(sampling or {}))
        changes: dict[str, Any] = {}
        if recipe == "rtdmd":
            changes = {"first": steps - 1, "reward_term": type(method.reward_term)()}
        if recipe == "nft":  # at the levels of the student's own steps
            changes = {"noising": replace(method.noising, each=min(method.noising.each, steps))}
        evaluation = {"rewards": ("reward", "heldout", "sharpness"), "solver": solver, "samples": self.samples, "every": 0}
        known = {"method": replace(method, sampling=few, **changes), "seed": seed, "out": self.keep / "none", "rewards": ()}
        return with_values(
            config, {**known, **{f"evaluation.{name}": value for name, value in evaluation.items()}, **values}
        )

    def _build_student(self, kind: str, steps: int, seed: int) -> TrainConfig:
        size = {"optimizer.lr": 3e-4, "updates": self.distilled}
        return self._build_run(kind, steps, seed, solver=STUDENTS[kind], sampling={"prompts": 80}, **size)

    def _build_improvement(self, name: str, start: str, steps: int, seed: int) -> TrainConfig:
        sampling: dict[str, Any] = {"sampler": CONSISTENCY if start == "dmd2" else FLOW, "prompts": 16, "group": 8}
        if name in ("grpo", "rtdmd"):
            sampling["window"] = AllSteps()
        student = {"lora.weights": self._locate_student(start, steps, seed) / "lora"}
        config = self._build_run(name, steps, seed, solver=STUDENTS[start], sampling=sampling, **student)
        return replace(config, updates=self.improved * config.updates_per_rollout)


def run(config: FewStepsConfig) -> None:
    """Make the runs, write few-steps.csv row by row, and print its table."""
    rows = run_trials(config.list_trials(), config.out / "few-steps.csv", parallel=config.parallel)
    print(format_table([row for row in rows if row.model == config.model]))


def format_table(rows: Sequence[StudyScore]) -> str:
    """Return a Markdown table of one model: the teacher, and each student before and after its training.

    Sharpness is relative to the teacher's. Numbers are means over seeds; in brackets the least and the most after training.
    """
    ends: dict[tuple[str, str, int], list[tuple[StudyScore, StudyScore]]] = {}
    trials: dict[tuple[str, str, int, int], list[StudyScore]] = {}
    for row in rows:
        trials.setdefault((row.method, row.variant, row.steps, row.seed), []).append(row)
    for (method, variant, steps, _), points in trials.items():
        points.sort(key=lambda row: row.updates)
        ends.setdefault((method, variant, steps), []).append((points[0], points[-1]))
    sharp = mean(last.sharpness for first, last in ends["teacher", "", TEACHER_STEPS])
    lines = []
    for (method, variant, steps), pairs in sorted(ends.items(), key=lambda item: (item[0][2] == TEACHER_STEPS, item[0][2])):
        columns = {"run": f"{method} {variant}".strip(), "steps": str(steps)}
        for title, of, scale in (
            ("right, held out", "exact", 1.0),
            ("right score", "true", 1.0),
            ("sharpness", "sharpness", sharp),
        ):
            before, after = ([getattr(pair[end], of) / scale for pair in pairs] for end in (0, 1))
            spread = f" ({min(after):.3f} to {max(after):.3f})" if min(after) < max(after) else ""
            columns[title] = (f"{mean(before):.3f} -> " if method != "teacher" else "") + f"{mean(after):.3f}{spread}"
        columns["seeds"] = str(len(pairs))
        lines.append({**columns, "seconds": f"{mean(last.seconds for _, last in pairs):.0f}"})
    return harness.format_markdown(lines)
