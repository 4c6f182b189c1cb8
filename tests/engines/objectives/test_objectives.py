"""The whole product of options: every combination trains, or raises before anything is loaded."""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import tiny_jobs as tiny
import torch
from torch import Tensor

from fluvial.core import transitions
from fluvial.engines.data.preferences import write_preferences
from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.engine import UpdateInfo
from fluvial.engines.fsdp.optimizer import OptimizerConfig
from fluvial.engines.fsdp.world import World, init_world
from fluvial.engines.objectives import LossConfig, losses
from fluvial.engines.objectives.protocol import Objective
from fluvial.engines.objectives.table import (
    OBJECTIVES,
    Awm,
    Clipped,
    Distill,
    Dpo,
    Dppo,
    Guard,
    Nft,
    Raft,
    Sft,
    name_of,
)
from fluvial.engines.rollout.items import Items
from fluvial.engines.rollout.samplers import SAMPLERS
from fluvial.engines.train.config import (
    AdvantageConfig,
    CorrectionConfig,
    KLConfig,
    NoisingConfig,
    RolloutConfig,
    TrainConfig,
)
from fluvial.engines.train.validate import check_model
from fluvial.models import Prediction

TEACHER, GIVEN = Path("teacher"), Path("given")
ANSWERS: dict[str, Objective] = {
    "clipped": Clipped(),
    "guard": Guard(),
    "dppo": Dppo(),
    "distill, mean_kl": Distill(teacher=TEACHER),
    "distill, velocity_mse": Distill(teacher=TEACHER, match="velocity_mse"),
    "nft, none": Nft(old="none"),
    "nft, linear": Nft(old="linear"),
    "nft, delayed": Nft(old="delayed", old_delay=1),
    "awm": Awm(),
    "raft": Raft(),
    "sft": Sft(),
    "dpo, online": Dpo(),
    "dpo, offline": Dpo(preferences=GIVEN),
}
ROLLOUT: dict[str, Sequence[Any]] = {
    "sampler": tuple(SAMPLERS),
    "solver": ("euler", "dpmpp_2m"),
    "form": ("density", "no_const", "unscaled"),
    "reduction": ("mean", "sum"),
    "eta": (0.0, 0.5),
    "group": (1, 2),
    "window": (None, 1),
}
RUN: dict[str, Sequence[Any]] = {
    "objective": tuple(ANSWERS),
    "train": ("full", "lora"),
    "kl.coef": (0.0, 0.1),
    "kl.weight": ("auto", "exact"),
    "correction": ("none", "truncate"),
    "minibatches": (1, 2),
}
KL = {values: KLConfig(*values) for values in product(RUN["kl.coef"], RUN["kl.weight"])}
CORRECTION = {mode: CorrectionConfig(mode) for mode in RUN["correction"]}
Options = tuple[Any, ...]  # a value of each of ROLLOUT, then of each of RUN


def build(options: Options, base: TrainConfig, rollout: RolloutConfig) -> TrainConfig:
    """Return the run of a combination of options."""
    objective, train, coef, weight, correction, minibatches = options
    return replace(
        base, objective=ANSWERS[objective], train=train, kl=KL[coef, weight],
        correction=CORRECTION[correction], minibatches=minibatches, updates=minibatches, rollout=rollout,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built() -> tuple[dict[Options, TrainConfig], set[str]]:
    """The combinations that are runs, and what is said of the others."""
    base, rollouts, runs, refusals = tiny.config(Path("out")), {}, {}, set()
    with pytest.MonkeyPatch.context() as patch:
        # Single values are all accepted here; under the tests' own type checks their checks would take a minute.
        for module in ("train.config", "rollout.config", "rollout.correction", "objectives.losses"):
            patch.setattr(f"fluvial.engines.{module}.check_fields", lambda *args, **kwargs: None)
        for options in product(*ROLLOUT.values()):
            try:
                rollouts[options] = RolloutConfig(prompts=2, steps=tiny.STEPS, **dict(zip(ROLLOUT, options, strict=True)))
            except ValueError as error:
                refusals.add(str(error))
        for (first, rollout), rest in product(rollouts.items(), product(*RUN.values())):
            try:
                runs[(*first, *rest)] = build(rest, base, rollout)
            except ValueError as error:
                refusals.add(str(error))
    return runs, refusals


def test_every_objective_is_in_the_product() -> None:
    """The table's are all there."""
    assert {name_of(objective) for objective in ANSWERS.values()} == set(OBJECTIVES)


def test_refusals_say_what_to_use(built: tuple[dict[Options, TrainConfig], set[str]]) -> None:
    """Each is one line that names a way out."""
    runs, refusals = built
    assert len(runs) > 1000
    assert len(refusals) > 20
    for refusal in refusals:
        assert "\n" not in refusal
        assert "--" not in refusal, refusal  # fields, not flags
        assert re.search(r"\b(use|leave|expected)\b", refusal), refusal


def test_every_value_is_in_a_run(built: tuple[dict[Options, TrainConfig], set[str]]) -> None:
    """No option is refused wherever it is used, and every objective trains both ways, but what has to be LoRA."""
    runs, _ = built
    names = [*ROLLOUT, *RUN]
    for place, values in enumerate([*ROLLOUT.values(), *RUN.values()]):
        assert {options[place] for options in runs} == set(values), names[place]
    both = {(options[names.index("objective")], options[names.index("train")]) for options in runs}
    assert set(product(ANSWERS, ("full", "lora"))) - both == {("nft, linear", "full"), ("nft, delayed", "full")}


def cover(candidates: Sequence[Options]) -> list[Options]:
    """Return some of the candidates that hold each pair of two options' values which any of them holds; greedily."""
    columns = [torch.tensor([sorted(set(map(repr, column))).index(repr(value)) for value in column])
               for column in zip(*candidates, strict=True)]  # fmt: skip
    size = 1 + max(int(column.max()) for column in columns)
    places = torch.stack(
        [(number * size + a) * size + b for number, (a, b) in enumerate(combinations(columns, 2))], dim=1
    )  # [N, pairs of options], each a number of its own
    missing = torch.zeros(int(places.max()) + 1, dtype=torch.bool)
    missing[places] = True
    chosen = []
    while missing.any():
        best = int(missing[places].sum(1).argmax())
        chosen.append(candidates[best])
        missing[places[best]] = False
    return chosen


def test_the_cover_is_one() -> None:
    """Of a product of 3 x 3 x 2 with a hole: every pair that there is, in fewer rows than the product has."""
    candidates = [row for row in product(range(3), "abc", (False, True)) if row[:2] != (0, "a")]
    chosen = cover(candidates)
    for first, second in combinations(range(3), 2):
        assert {(row[first], row[second]) for row in chosen} == {(row[first], row[second]) for row in candidates}
    assert 8 <= len(chosen) < 12


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """The world of this process."""
    with init_world() as world:
        yield world


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of preferences."""
    folder = tmp_path_factory.mktemp("preferences") / "given"
    drawn = torch.rand(6, *tiny.SHAPE, generator=torch.Generator().manual_seed(0))
    write_preferences(folder, [(prompt, drawn[i], drawn[i + 3]) for i, prompt in enumerate(tiny.PROMPTS[:3])])
    return folder


class Direction(NamedTuple):
    """How an update moved the policy, on its own items."""

    before: float  # loss
    after: float
    towards: float | None  # mean of target weight times (ratio - 1); None for objectives without a ratio


def measure(trained: tiny.Run) -> list[Direction]:
    """Return the list that the directions of a run's updates will be added to."""
    update, found = trained.trainer.engine.update, []

    def measured(items: Any, loss_fn: Any, weight: Tensor, *, count: float, **options: Any) -> UpdateInfo:
        def now() -> tuple[float, Any]:
            with torch.no_grad():
                losses, info = loss_fn(items)
            return float((weight * losses).sum() / count), info

        before, _ = now()
        result = update(items, loss_fn, weight, count=count, **options)
        after, info = now()
        ratio = getattr(info, "ratio", None)
        towards = None if ratio is None else float((weight * items.target_weight * (ratio - 1)).sum() / count)
        found.append(Direction(before, after, towards))
        return result

    trained.trainer.engine.update = measured  # type: ignore[assignment]
    return found


# The step is short enough for the loss to follow its gradient.
DESCENT = OptimizerConfig(lr=1e-4, weight_decay=0.0, warmup=0)


@pytest.mark.slow
def test_what_is_built_trains(
    built: tuple[dict[Options, TrainConfig], set[str]], one: World, given: Path, tmp_path: Path
) -> None:
    """Each pair of values of two options that any run has, on a model of each kind.

    Losses are finite, the first update lowers the loss of its own items, and rewarded steps become more likely.
    """
    runs, predictions = built[0], get_args(Prediction)
    candidates: list[Options] = []
    for (options, run), prediction in product(runs.items(), predictions):
        try:
            check_model(run, prediction)
        except ValueError:
            continue
        candidates.append((*options, prediction))
    chosen = cover(candidates)
    assert len(chosen) < 200
    for *values, prediction in chosen:
        options = tuple(values)
        run = replace(runs[options], out=tmp_path, optimizer=DESCENT)
        if isinstance(run.objective, Dpo) and run.objective.preferences is not None:
            run = replace(run, objective=replace(run.objective, preferences=given))
        try:
            trained = tiny.Run(run, one, tiny.job(prediction))
            directions = measure(trained)
            record = trained.rollout()
        except Exception as error:
            error.add_note(f"in {options}, {prediction}")
            raise
        infos = trained.infos
        assert len(infos) == run.minibatches, options
        assert all(math.isfinite(info.loss) and math.isfinite(info.grad_norm) for info in infos), options
        assert not any(info.skipped for info in infos), options
        assert max(info.grad_norm for info in infos) > 0, (options, prediction)
        assert record["pairs"] > 0, options
        if "log_ratio" in infos[0].max_abs and run.correction.mode == "none":
            assert infos[0].max_abs["log_ratio"] == 0.0, options
        first = directions[0]
        # Without an old policy of its own, NFT and AWM with one update compare the policy with itself, before and after.
        if run.minibatches > 1 or "old" not in run.objective.compares_with or trained.trainer.policies.keeps_old:
            assert first.after < first.before, (options, prediction, first)
            if first.towards is not None:
                assert first.towards > 0, (options, prediction, first)


ODE: dict[str, Any] = {"sampler": "ode", "eta": 0.0}
GROUPS: dict[str, Any] = {"prompts": 2, "group": 2, "steps": tiny.STEPS, "eta": 0.5}


@pytest.mark.parametrize(
    ("rollout", "changes", "words"),
    [
        (ODE, {"objective": Clipped()}, "rollout.sampler is ode, and clipped needs the log-probability .* use flow_sde"),
        (ODE, {"objective": Guard()}, "guard needs the log-probability"),
        ({"sampler": "cps"}, {"objective": Guard()}, "rollout.sampler is cps, and guard needs .* use flow_sde or dance_sde"),
        ({"sampler": "ddim"}, {"objective": Guard()}, "rollout.sampler is ddim, and guard needs"),
        ({"form": "unscaled"}, {"objective": Guard()}, "guard takes .* use form density or no_const"),
        ({"reduction": "sum"}, {"objective": Dppo()}, "dppo compares .* reduction mean"),
        ({"eta": 0.0}, {}, "rollout.eta is 0, so every step of flow_sde is deterministic and has no density: use eta > 0"),
        ({"sampler": "ode"}, {}, "rollout.eta is 0.5, and ode takes no noise: use eta 0"),
        ({"sampler": "cps", "eta": 1.5}, {}, "eta is 1.5, expected at most 1 for cps"),
        ({"solver": "dpmpp_2m"}, {}, "rollout.solver is dpmpp_2m, .* rollout.sampler is flow_sde: use sampler ode"),
        (ODE | {"shared_noise": True}, {"objective": Nft(old="none")}, "all samples of a group would be the same"),
        ({"window": 5}, {}, "rollout.window: a window of 5 steps does not fit steps 0 to 4 of 4"),
        ({"group": 1}, {"objective": Clipped()}, "rollout.group is 1, expected at least 2: clipped .* nothing to be learnt"),
        (ODE | {"group": 1}, {"objective": Dpo()}, "group is 1, expected at least 2: dpo"),
        (ODE | {"group": 1}, {"objective": Raft()}, "group is 1, expected at least 2: raft"),
        (ODE, {"objective": Nft(), "train": "full"}, "train is full, .* use train lora, or objective.old none"),
        (ODE, {"objective": Nft(old="none"), "correction": CorrectionConfig("truncate")}, "truncate, .* nft takes none"),
        ({"form": "unscaled"}, {"correction": CorrectionConfig("mask")}, "form is unscaled, and correction .* use density"),
        ({"autocast": True}, {}, "rollout.autocast makes .* use correction.mode truncate"),
        (ODE, {"objective": Distill(teacher=TEACHER)}, "mean_kl.* have no noise: use objective.match velocity_mse"),
        ({}, {"objective": Distill()}, "objective.teacher is not set, and distill compares with a teacher: use the folder"),
        ({}, {"objective": Distill(teacher=TEACHER), "kl": KLConfig(0.1, "exact")}, "exact, and the KL term of distill"),
        (
            ODE | {"solver": "dpmpp_2m"},
            {"objective": Distill(teacher=TEACHER, match="velocity_mse")},
            "rollout.solver is dpmpp_2m, whose steps are no transition, and distill trains on steps: use euler",
        ),
        ({"form": "unscaled"}, {"objective": Distill(teacher=TEACHER)}, "distill takes no log-probability"),
        (ODE, {"objective": Dpo(), "kl": KLConfig(0.1)}, "dpo has the reference in its loss already"),
        (ODE, {"objective": Dpo(preferences=GIVEN), "rewards": ("brightness",)}, "rewards is set, and dpo"),
        (ODE, {"objective": Dpo(preferences=GIVEN), "prompts": Path("prompts")}, "prompts is set, .* has its own"),
        ({}, {"objective": Sft()}, "sft learns from data without a rollout: use sampler ode"),
        (ODE | {"solver": "dpmpp_2m"}, {"objective": Sft()}, "rollout.sampler, solver, .* is set, and sft learns from data"),
        (ODE, {"objective": Raft(), "advantage": AdvantageConfig("batch")}, "advantage is set, and raft takes no adv"),
        (ODE, {"objective": Raft(), "max_log_ratio": 0.1}, "max_log_ratio is 0.1, and raft has no ratio"),
        (ODE, {"objective": Raft(), "noising": NoisingConfig(5)}, "noising.each is 5, expected at most the 4 steps"),
        (ODE | {"window": 2}, {"objective": Raft()}, "rollout.window is set, and ode has no stochastic steps"),
        ({"fraction": 0.5}, {"objective": Awm()}, "rollout.fraction is 0.5, and awm trains on no recorded steps"),
        ({"reduction": "sum"}, {"objective": Awm()}, "rollout.reduction is set, and awm takes no log-prob"),
        ({}, {"noising": NoisingConfig(2)}, "noising is set, and clipped trains on the steps"),
        ({}, {"kl": KLConfig(0.0, "exact")}, "kl.weight is exact, and kl.coef is 0"),
        (ODE, {"objective": Awm(), "kl": KLConfig(0.1, "exact")}, "the KL term of awm is mean"),
        ({"sampler": "cps", "window": 1}, {}, "a window of 1 may be just that step"),
        ({"sampler": "cps", "form": "unscaled"}, {"kl": KLConfig(0.1)}, "the last step of cps .* has no KL"),
        ({}, {"minibatches": 3, "updates": 3}, "minibatches is 3, expected a divisor of the 4 samples"),
        ({}, {"minibatches": 2, "updates": 3}, "updates is 3, expected a multiple of epochs x minibatches = 2"),
    ],
)  # fmt: skip
def test_what_has_no_meaning(rollout: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    """It is refused when the run is built, in one line that says why."""
    with pytest.raises(ValueError, match=words) as refused:
        tiny.config(Path("out"), rollout=RolloutConfig(**(GROUPS | rollout)), **changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("prediction", "rollout", "changes", "words"),
    [
        (
            "epsilon",
            {},
            {},
            "rollout.sampler is flow_sde, which is for models that predict velocity, .* predicts epsilon: use ddim or ode",
        ),
        (
            "velocity",
            {"sampler": "ddim"},
            {},
            "ddim, which is for models that predict epsilon, .* use flow_sde or dance_sde or cps or ode",
        ),
        ("epsilon", ODE, {"objective": Nft(old="none")}, "nft is defined for flows"),
        ("epsilon", ODE, {"objective": Awm()}, "awm is defined for flows"),
        (
            "epsilon",
            ODE,
            {"objective": Raft(), "noising": NoisingConfig(levels="continuous")},
            "noising.levels is continuous, .* use schedule",
        ),
    ],
)
def test_what_does_not_fit_the_model(
    one: World, tmp_path: Path, prediction: Prediction, rollout: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    """It is refused before the first rollout, as what was typed wrongly is."""
    run = tiny.config(tmp_path, rollout=RolloutConfig(**(GROUPS | rollout)), **changes)
    with pytest.raises(UsageError, match=words):
        tiny.Run(run, one, tiny.job(prediction))


@pytest.mark.parametrize(
    ("objective", "lacks", "words"),
    [
        (Sft(), "data", "sft learns from data, and this job has none"),
        (Dpo(preferences=GIVEN), "encode", "cannot be used: "),
        (Dpo(preferences=GIVEN), "preferences", "preferences given/preferences.jsonl cannot be read: No such file"),
        (
            Distill(teacher=TEACHER, match="velocity_mse"),
            "load",
            "teacher cannot be loaded: this job has no function from a folder",
        ),
    ],
)
def test_what_the_job_lacks(one: World, tmp_path: Path, objective: Objective, lacks: str, words: str) -> None:
    """It is refused before the first rollout, too."""
    run = tiny.config(tmp_path, rollout=RolloutConfig(**(GROUPS | ODE)), objective=objective)
    with pytest.raises(UsageError, match=words):
        tiny.Run(run, one, tiny.job("velocity", **({} if lacks == "preferences" else {lacks: None})))


def test_hyper_parameters_out_of_range() -> None:
    """A single number says so itself."""
    for made in (
        lambda: Nft(old_cap=1.0), lambda: Nft(old_delay=3), lambda: Nft(beta=0.0), lambda: Awm(power=2.0),
        lambda: Raft(best=0.0), lambda: Dpo(beta=0.0), lambda: Guard(clip=-1.0), lambda: CorrectionConfig(threshold=0.5),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"expected|use|only") as refused:
            made()
        assert "\n" not in str(refused.value)


# Which implementation runs.

IMPLEMENTED = [name for name in ANSWERS if name != "distill, mean_kl"]


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_every_objective_hands_the_implementation_on(name: str) -> None:
    """Each loss, and each KL term, ends in a kernel that says that there is no Triton for these tensors."""
    objective, config = ANSWERS[name], LossConfig(kl_coef=0.1)
    drawn = torch.rand(9, 2, 2, *tiny.SHAPE, generator=torch.Generator().manual_seed(0))
    wide = objective.traits.trains_on == "preferences"
    x, v, x_next, x0, target, v_old, v_ref, v_teacher, _ = drawn if wide else drawn[:, :, 0]
    level, numbers = torch.tensor([0.8, 0.4]), torch.tensor([0.5, 0.25])
    items = Items(
        x=x, level=level, timestep=None, sample=torch.arange(2), target_weight=numbers, weight=torch.ones(2),
        level_next=level / 2, x_next=x_next, log_prob_old=-numbers, x0=x0, target=target, v_old=v_old, v_ref=v_ref,
        v_teacher=v_teacher,
    )  # fmt: skip
    transition = transitions.dance_sde(level, level / 2, eta=0.5)
    assert objective.loss(v, items, transition, config)[0].shape == (2,)
    with pytest.raises(ValueError, match="implementation is 'triton', but the tensors are on cpu"):
        objective.loss(v, items, transition, config._replace(implementation="triton"))
    if name.startswith("clipped"):
        return  # its loss and its KL are one kernel
    if objective.traits.takes_kl:
        seen: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for module in (losses, *(sys.modules[type(objective).__module__],)):
                for kernel in ("velocity_error", "step_log_prob", "nft_loss"):
                    if hasattr(module, kernel):
                        patch.setattr(module, kernel, spied(getattr(module, kernel), seen))
            objective.loss(v, items, transition, config._replace(implementation="reference"))
        assert len(seen) >= 1 + (objective.traits.trains_on == "noised")
        assert set(seen) == {"reference"}


def spied(kernel: Any, seen: list[str]) -> Any:
    """Return a kernel that notes the implementation that it is called with."""

    def called(*args: Any, implementation: str = "missing", **options: Any) -> Any:
        seen.append(implementation)
        return kernel(*args, implementation=implementation, **options)

    return called


def test_an_implementation_that_is_not_here(one: World, tmp_path: Path) -> None:
    """Triton on a CPU is refused before the first rollout."""
    rollout = RolloutConfig(**(GROUPS | ODE))
    with pytest.raises(UsageError, match="implementation is 'triton', but the tensors are on cpu") as refused:
        tiny.Run(tiny.config(tmp_path, rollout=rollout, objective=Raft(), implementation="triton"), one)
    assert "\n" not in str(refused.value)


def test_an_implementation_of_nothing() -> None:
    """Matching a teacher's steps calls no kernel, unless there is a KL."""
    rollout, objective = RolloutConfig(**GROUPS), Distill(teacher=TEACHER)
    with pytest.raises(ValueError, match="implementation is compiled, and no kernel takes part in distill"):
        tiny.config(Path("out"), rollout=rollout, objective=objective, implementation="compiled")
    tiny.config(Path("out"), rollout=rollout, objective=objective, implementation="compiled", kl=KLConfig(0.1))
