"""The whole product of options: every combination trains, or raises before anything is loaded."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.objective_rows import OBJECTIVE_ROWS
from helpers.resumed import expect_resumed
from torch import Tensor

from fluvial.engines.data.preferences import write_preferences
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.engine.world import World
from fluvial.engines.methods.matching import Matching
from fluvial.engines.methods.table import METHODS, Dpo, Sft
from fluvial.engines.run.build import check_model
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.declared import Before
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Ode, SaSolver, Stochastic
from fluvial.engines.sampling.window import AllSteps, RandomWindow
from fluvial.models import Prediction

SAMPLING: dict[str, Sequence[Any]] = {
    "sampler": (*(Stochastic(name, 0.5) for name in Stochastic.list_kinds()), Ode(), Ode("dpmpp_2m"), SaSolver(0.5)),
    "group": (1, 2),
    "window": (AllSteps(), RandomWindow(1)),
}
# The first value of each is the default, which a method may lack.
RUN: dict[str, Sequence[Any]] = {
    "form": ("density", "no_const", "unscaled"),
    "reduction": ("mean", "sum"),
    "train": ("full", "lora"),
    "kl.coef": (0.0, 0.1),
    "kl.weight": ("auto", "exact"),
    "correction": ("none", "truncate"),
    "passes.minibatches": (1, 2),
}
# With policies that lag behind, which are LoRA adapters.
FOLLOWED = ("nft, linear", "nft, delayed", "dgpo", "crd", "tdm-r1", "gardo")
Options = tuple[Any, ...]  # a method, a value of each of SAMPLING, then of each of RUN


def build(options: Options, base: TrainConfig, sampling: SamplingConfig | None) -> TrainConfig:
    """Return the run of a combination of options."""
    name, *values = options
    chosen = {field: value for (field, known), value in zip(RUN.items(), values, strict=True) if value != known[0]}
    method: Any = OBJECTIVE_ROWS[name]
    if isinstance(method, Matching):  # whose form is not that of a log-probability
        chosen.pop("form", None)
    if sampling is not None and method.sampling.window.is_tree:  # without which these methods have no meaning
        sampling = replace(sampling, window=method.sampling.window)
    if not isinstance(method, Sft):
        method = replace(method, sampling=sampling)
    return with_values(base, {"method": method, "train": "full", "updates": values[-1], **chosen})


@pytest.fixture(scope="module")
def built() -> tuple[dict[Options, TrainConfig], set[str]]:
    """The combinations that are runs, and what is said of the others."""
    base, samplings, runs, refusals = tiny.config(Path("out")), {}, {}, set()
    with pytest.MonkeyPatch.context() as patch:
        # Single values are all accepted here; under the tests' own type checks their checks would take a minute.
        for module in ("run.config", "run.method", "sampling.config", "methods.losses"):
            patch.setattr(f"fluvial.engines.{module}.check_fields", lambda *args, **kwargs: None)
        for options in product(*SAMPLING.values()):
            try:
                samplings[options] = SamplingConfig(prompts=2, steps=tiny.STEPS, **dict(zip(SAMPLING, options, strict=True)))
            except ValueError as error:
                refusals.add(str(error))
        for name, (first, sampling), rest in product(OBJECTIVE_ROWS, samplings.items(), product(*RUN.values())):
            try:
                runs[(name, *first, *rest)] = build((name, *rest), base, sampling)
            except ValueError as error:
                refusals.add(str(error))
    return runs, refusals


def test_every_objective_is_in_the_product() -> None:
    """The table's are all there."""
    assert {method.method_name for method in OBJECTIVE_ROWS.values()} == set(METHODS)


@pytest.mark.long
def test_refusals_say_what_to_use(built: tuple[dict[Options, TrainConfig], set[str]]) -> None:
    """Each is one line that names a way out."""
    runs, refusals = built
    assert len(runs) > 1000
    assert len(refusals) > 20
    for refusal in refusals:
        assert "\n" not in refusal
        assert "--" not in refusal, refusal  # fields, not flags
        assert re.search(r"\b(use|leave|expected|remove|there is no field)\b", refusal), refusal


def test_every_value_is_in_a_run(built: tuple[dict[Options, TrainConfig], set[str]]) -> None:
    """No option is refused wherever it is used, and every objective trains both ways, but what has to be LoRA."""
    runs, _ = built
    names = ["method", *SAMPLING, *RUN]
    for place, values in enumerate([OBJECTIVE_ROWS, *SAMPLING.values(), *RUN.values()]):
        assert {options[place] for options in runs} == set(values), names[place]
    both = {(options[names.index("method")], options[names.index("train")]) for options in runs}
    assert set(product(OBJECTIVE_ROWS, ("full", "lora"))) - both == {(name, "full") for name in FOLLOWED}


def cover(candidates: Sequence[Options], ways: int) -> list[Options]:
    """Return some of the candidates with each combination of `ways` options' values that any of them has; greedily."""
    columns = []
    for column in zip(*candidates, strict=True):
        values = sorted(set(map(repr, column)))
        columns.append(torch.tensor([values.index(repr(value)) for value in column]))
    size = 1 + max(int(column.max()) for column in columns)
    places = torch.stack(
        [
            number * size**ways + sum(column * size**place for place, column in enumerate(group))
            for number, group in enumerate(combinations(columns, ways))
        ],
        dim=1,
    )  # [N, groups of options], each a number of its own
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
    chosen = cover(candidates, 2)
    for first, second in combinations(range(3), 2):
        assert {(row[first], row[second]) for row in chosen} == {(row[first], row[second]) for row in candidates}
    assert 8 <= len(chosen) < 12
    assert [{*column} for column in zip(*cover(candidates, 1), strict=True)] == [{0, 1, 2}, {*"abc"}, {False, True}]


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
    towards: float | None  # mean of signal times (ratio - 1); None for objectives without a ratio


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
        towards = None if ratio is None else float((weight * items.signal * (ratio - 1)).sum() / count)
        found.append(Direction(before, after, towards))
        return result

    trained.trainer.engine.update = measured  # type: ignore[assignment]
    return found


# The step is short enough for the loss to follow its gradient.
DESCENT = OptimizerConfig(lr=1e-4, weight_decay=0.0, warmup=0)


@pytest.mark.parametrize("ways", [1, pytest.param(2, marks=pytest.mark.long)])
def test_what_is_built_trains(
    built: tuple[dict[Options, TrainConfig], set[str]], one: World, given: Path, tmp_path: Path, ways: int
) -> None:
    """Each value of every option, or each pair of values of two options, that any run has; on a model of each kind.

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
    chosen = cover(candidates, ways)
    assert len(chosen) < 200
    for *values, prediction in chosen:
        options = tuple(values)
        run = replace(runs[options], out=tmp_path, optimizer=DESCENT)
        if isinstance(run.method, Dpo) and run.method.preferences is not None:
            run = with_values(run, {"method": replace(run.method, preferences=given)})
        try:
            trained = tiny.Run(run, one, tiny.job(prediction))
            directions = measure(trained)
            record = trained.rollout()
        except Exception as error:
            error.add_note(f"in {options}, {prediction}")
            raise
        infos = trained.infos
        assert len(infos) == run.method.passes.minibatches, options
        assert all(math.isfinite(info.loss) and math.isfinite(info.grad_norm) for info in infos), options
        assert not any(info.skipped for info in infos), options
        assert max(info.grad_norm for info in infos) > 0, (options, prediction)
        assert record["pairs"] > 0, options
        corrected = run.method.correction is not None and run.method.correction.kind != "none"
        if "log_ratio" in infos[0].max_abs and not corrected:
            assert infos[0].max_abs["log_ratio"] == 0.0, options
        first = directions[0]
        # Without an old policy of its own, NFT and AWM with one update compare the policy with itself, before and after.
        # What a rollout records of the policy is no network: such surrogates are 0 to first order.
        records = run.method.recorded is not None and run.method.recorded.velocity
        if run.method.passes.minibatches > 1 or not (records or isinstance(run.networks.get("old"), Before)):
            if options[0] != "gardo":  # whose KL is 0 at first, to a copy of the policy
                assert first.after < first.before, (options, prediction, first)
            if first.towards is not None:
                assert first.towards > 0, (options, prediction, first)


@pytest.mark.long
def test_every_objective_resumes_to_the_bit(
    built: tuple[dict[Options, TrainConfig], set[str]], one: World, given: Path, tmp_path: Path
) -> None:
    """Weights, optimizers, further networks, averages and statistics after two rollouts, with a new trainer in between."""
    for name in OBJECTIVE_ROWS:
        config, prediction = next(_trained_runs(name, built[0]))
        method = config.method
        if isinstance(method, Dpo) and method.preferences is not None:
            method = replace(method, preferences=given)
        config = replace(config, method=method, out=tmp_path / name.replace(", ", "-"), updates=2 * method.passes.updates)
        expect_resumed(config, tiny.job(prediction), one)


def _trained_runs(name: str, runs: dict[Options, TrainConfig]) -> Iterator[tuple[TrainConfig, Prediction]]:
    """Yield runs of an objective, each with what the model predicts; LoRA first, which all can train."""
    for options, run in sorted(runs.items(), key=lambda item: item[1].train == "full"):
        for prediction in get_args(Prediction):
            with suppress(ValueError):
                check_model(run, prediction)
                if options[0] == name:
                    yield run, prediction
