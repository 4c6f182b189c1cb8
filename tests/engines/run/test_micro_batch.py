"""A run that chooses its micro-batch: the bits of the chosen number, which its folder and its checkpoints hold."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import launch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from helpers.spied_runs import rows_of
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fluvial.engines.engine.world import init_world
from fluvial.engines.extensions.published.resolve import resolve
from fluvial.engines.extensions.published.runs import find_run
from fluvial.engines.methods.table import Dpo
from fluvial.engines.run import build, recipes, train
from fluvial.engines.run.config import with_values
from fluvial.engines.run.evaluation.evaluate import find_chunk_size
from fluvial.engines.run.method import NoisedRows
from fluvial.engines.run.monitoring import expected
from fluvial.engines.run.passes import micro_batch, probe
from fluvial.engines.run.passes.micro_batch import WarmUp
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import assign_slots
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import RandomWindow

CHOOSE = micro_batch.choose_size
ROLLOUT = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))


def choosing(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make a size win, after real trials of all up to it."""

    def choose(sizes: Any, measure: Any, *, budget: int) -> micro_batch.Choice:
        return CHOOSE([s for s in sizes if s <= size], lambda s: measure(s)._replace(seconds=1.0), budget=budget)

    monkeypatch.setattr(micro_batch, "choose_size", choose)


@given(batch=st.integers(1, 300), size=st.integers(1, 200), ranks=st.integers(1, 8))
def test_repeats_are_named_where_another_size_has_fewer(batch: int, size: int, ranks: int) -> None:
    """The named size has as few as any, and as many samples per pass as that allows."""
    config: Any = SimpleNamespace(
        method=SimpleNamespace(sampling=SimpleNamespace(batch=batch)), samples_per_pass=size, makes_samples=True
    )
    world = SimpleNamespace(size=ranks, data_size=ranks, data_rank=0)
    engine: Any = SimpleNamespace(world=world, sharded=SimpleNamespace(is_whole=False))
    said = list(expected.describe_spread(config, engine))
    sizes = {s: ranks * len(assign_slots(batch, micro_batch=s, world=world).ids) for s in range(1, size + 1)}  # type: ignore[arg-type]
    least = min(sizes.values())
    if sizes[size] == least:
        assert said == []
        return
    better = max(s for s, total in sizes.items() if total == least)
    assert said == [
        f"{sizes[size] - batch} of the {sizes[size]} samples that {ranks} ranks compute per rollout are repeats, because "
        f"engine.micro_batch is {size} and there are {batch} samples: micro_batch {better} has {least - batch}"
    ]
    config.samples_per_pass = better
    assert list(expected.describe_spread(config, engine)) == []


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"engine.update_micro_batch": "rollout"}, [4, 4, 4, 4]),  # 8 samples of 2 recorded steps
        ({"engine.update_micro_batch": 16}, [16]),
        ({"engine.update_micro_batch": 5}, [5, 5, 5, 4]),  # what is left goes in a pass of the rollout's size, filled up
        ({"engine.update_micro_batch": 999}, [16]),  # no more than there are
        ({"engine.update_micro_batch": 2}, [2] * 8),
        ({"engine.update_micro_batch": 8, "method": Dpo()}, [8]),  # best and worst of 2 groups, at 2 levels
    ],
    ids=["default", "all", "uneven", "more", "fewer", "preferences"],
)
def test_an_update_takes_as_many_pairs_per_pass(tmp_path: Path, changes: dict[str, Any], rows: list[int]) -> None:
    """The rollout's passes keep `micro_batch`, and the update is the same to rounding."""
    found, rollout = {}, replace(ROLLOUT, window=RandomWindow(2, high=3))
    if "method" in changes:
        rollout = replace(ROLLOUT, sampler=Ode())
        changes = {**changes, "noising": NoisingConfig(each=2)}
    for each in (changes, {**changes, "engine.update_micro_batch": "rollout"}):
        sizes = {"engine.micro_batch": 4, "passes.minibatches": 1}
        with Trainer(tiny.config(tmp_path, updates=1, sampling=rollout, **each, **sizes), tiny.job()) as run:
            passed = rows_of(run)
            record = run.update()
            assert [size for gradient, size in passed if not gradient] == [4] * (2 * tiny.STEPS)
            weights = {name: tensor.clone() for name, tensor in run.engine.sharded.shards().items()}
            found[each["engine.update_micro_batch"]] = (
                [size for gradient, size in passed if gradient],
                record["loss"],
                weights,
            )
    taken, loss, weights = found[changes["engine.update_micro_batch"]]
    assert taken == rows
    assert loss == pytest.approx(found["rollout"][1], rel=1e-4, abs=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, found["rollout"][2][name], rtol=1e-4, atol=1e-5)


@given(samples=st.integers(1, 5000), most=st.integers(1, 600))
def test_chunks_of_an_evaluation_repeat_as_few_samples_as_their_number_allows(samples: int, most: int) -> None:
    size = find_chunk_size(samples, most)
    chunks = -(-samples // most)
    assert size <= most
    assert -(-samples // size) <= chunks
    assert size * chunks - samples < chunks


def test_no_pass_has_more_rows_than_there_are_samples(tmp_path: Path) -> None:
    """Of a rollout, an update or an evaluation, and of a reference that predicts the pairs of an update."""
    rollout = replace(ROLLOUT, window=RandomWindow(2, high=3))
    with Trainer(tiny.config(tmp_path, sampling=rollout, **{"engine.micro_batch": 64}), tiny.job()) as run:
        passed = rows_of(run)
        for call, rows in (
            (run.update, [8] * (tiny.STEPS + 2)),
            (lambda: run.evaluate(50), [50] * tiny.STEPS),
            (lambda: run.evaluate(66), [33] * (2 * tiny.STEPS)),
        ):
            call()
            assert [size for _, size in passed] == rows
            passed.clear()
    sizes = {"engine.micro_batch": 4, "engine.update_micro_batch": 999, "passes.minibatches": 1, "kl.coef": 0.1}
    with Trainer(tiny.config(tmp_path, updates=1, train="lora", sampling=rollout, **sizes), tiny.job()) as run:
        passed = rows_of(run)
        run.update()
    assert [size for _, size in passed] == [4] * (2 * tiny.STEPS) + [16, 16]


@pytest.mark.parametrize(("pairs", "sizes"), [("rollout", [4]), (4, [4]), (16, [4, 16])])
def test_blocks_compile_for_the_passes_of_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: int | None, sizes: list[int]
) -> None:
    """Its own number of pairs is another size, which a rollout does not have."""
    warmed = list[tuple[int, bool]]()

    def warm_up(engine: Any, each: Any, size: int, *, progress: Any) -> WarmUp:
        warmed.append((size, each[0].rollout is not None))
        return WarmUp(2, 0.5)

    monkeypatch.setattr(probe, "warm_up", warm_up)
    config = tiny.config(tmp_path, **{"engine.micro_batch": 4, "engine.update_micro_batch": pairs})
    with Trainer(config, tiny.job()) as run:
        found = probe.compile_blocks(config, run.job, run.engine, run.schedule)
    assert warmed == [(size, size == 4) for size in sizes]
    assert found == WarmUp(2 * len(sizes), 0.5 * len(sizes))


def test_a_real_choice_divides_the_samples(tmp_path: Path) -> None:
    """12 samples: 1, 2, 4 or 12."""
    config = tiny.config(tmp_path, sampling=replace(ROLLOUT, prompts=3), **{"engine.micro_batch": "auto"})
    with Trainer(config, tiny.job()) as run:
        choice = run.choices["micro_batch"]
        assert choice.micro_batch == run.config.engine.micro_batch
        assert choice.micro_batch in choice.trials
        assert set(choice.trials) <= {1, 2, 4, 12}
        assert run.run.config is run.sampler.config is run.saver.config is run.config


def test_the_run_says_and_keeps_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line on the console, a record in the metrics, config.json and the checkpoint; a resumption takes it."""
    choosing(monkeypatch, 2)
    settings = {"engine.micro_batch": "auto", "evaluation.every": 0, "evaluation.final_samples": 4, "checkpoint.every": 1}
    config = tiny.config(tmp_path / "run", sampling=ROLLOUT, updates=2, **settings)
    console = Console(file=StringIO(), width=500)

    def held() -> Any:
        return json.loads((config.out / "config.json").read_text())["engine"]["micro_batch"]

    train(config, tiny.job(), console=console)
    (line,) = [line for line in console.file.getvalue().splitlines() if "micro_batch" in line]  # type: ignore[attr-defined]
    assert line.startswith("micro_batch 2, chosen in")
    assert held() == 2
    assert [record["micro_batch"]["chosen"] for record in launch.records(config.out) if "micro_batch" in record] == [2]
    finished = launch.weights(config.out)
    monkeypatch.setattr(build, "choose_micro_batch", lambda *_, **__: pytest.fail("a resumed run chose again"))
    first = str(config.out / "checkpoints" / "000001")
    train(with_values(config, {"checkpoint.resume_from": first}), tiny.job())
    assert held() == 2
    assert launch.weights(config.out) == finished
    refuses(
        r"engine\.micro_batch 2 there, 4 here",
        train,
        with_values(config, {"checkpoint.resume_from": first, "engine.micro_batch": 4}),
        tiny.job(),
    )


def test_a_trainer_that_has_chosen_takes_the_number_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path, sampling=ROLLOUT, **{"engine.micro_batch": "auto"})
    with init_world() as world:
        choosing(monkeypatch, 2)
        with Trainer(config, tiny.job(), world) as run:
            run.update()
            run.save()
        choosing(monkeypatch, 8)
        with Trainer(config, tiny.job(), world) as run:
            assert run.config.engine.micro_batch == 8
        with Trainer(config, tiny.job(), world, resume_from=tmp_path / "checkpoints" / "000001") as run:
            assert run.config.engine.micro_batch == run.saver.config.engine.micro_batch == 2


def test_ranks_choose_the_same_and_get_the_bits_of_it(tmp_path: Path) -> None:
    """Two ranks whose clocks differ: both take what the slower one says, and the weights of that number."""
    (first, numbers), (second, others) = launch.on_ranks(2, "workers.micro_batches:chosen", tmp_path)
    assert first == second == 4
    assert numbers["auto"] == numbers["4"] == others["auto"] == others["4"]


def test_recipes_choose_for_large_models_alone() -> None:
    """The built-in models keep 128 or 64, with which their results are reproduced; published runs keep their number."""
    for name, recipe in recipes.RECIPES.items():
        large = recipe("someone/a-model")
        assert recipe(recipes.HANDWRITING).engine.micro_batch == (64 if name == "ddpo" else 128), name
        method = large.method
        noising = method.rows.noising.draw if isinstance(method.rows, NoisedRows) else ""
        fixed = method.needs.rewards == "gradients" or "call" in (method.sampling.window.draw, noising)
        assert isinstance(large.engine.micro_batch, int) if fixed else large.engine.micro_batch == "auto", name
    assert resolve(find_run("flow_grpo/sd3.5-medium/ocr")).engine.micro_batch == 9


@pytest.mark.bits
def test_choosing_changes_neither_weights_nor_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates with the number that was chosen are those with the same number typed."""
    choosing(monkeypatch, 4)
    found: dict[Any, Any] = {}
    for size in ("auto", 4):
        torch.manual_seed(0)
        with Trainer(tiny.config(tmp_path, updates=2, sampling=ROLLOUT, **{"engine.micro_batch": size}), tiny.job()) as run:
            run.update(), run.update()
            assert run.config.samples_per_pass == 4
            found[size] = {**run.engine.sharded.shards(), "drawn": torch.rand(3)}
    assert all(torch.equal(tensor, found[4][name]) for name, tensor in found["auto"].items())
