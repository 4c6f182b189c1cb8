"""Pairs per pass of an update, chosen by proof: more of them only where each row keeps the bits of the rollout."""

import itertools
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.marks import long
from helpers.spied_runs import rows_of
from helpers.tiny_jobs import TinyCond
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

from fluvial.engines.engine.items import split
from fluvial.engines.engine.optimizers import OptimizerConfig
from fluvial.engines.methods.table import AcDmd, AlignProp, Awm, Dpo
from fluvial.engines.run import build, saving
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.passes import micro_batch
from fluvial.engines.run.passes.probe import RunPasses, explain_fixed_pairs
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import AllSteps, RandomWindow

CHOOSE = micro_batch.choose_size
# 24 samples of 2 recorded steps: 48 pairs, in passes of 12 rows, from which on a row's bits do not depend on the batch.
ROLLOUT = SamplingConfig(prompts=6, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5), window=RandomWindow(2))
RUN: dict[str, Any] = {"engine.micro_batch": 12, "engine.update_micro_batch": "auto", "passes.minibatches": 1, "updates": 2}


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every size the same seconds, after real trials, so that the bits alone decide."""

    def choose(sizes: Any, measure: Any, **options: Any) -> micro_batch.Choice:
        return CHOOSE(sizes, lambda size: measure(size)._replace(seconds=1.0), **options)

    monkeypatch.setattr(micro_batch, "choose_size", choose)


@given(count=st.integers(0, 500), sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4, unique=True))
def test_items_are_split_into_the_largest_passes_that_they_fill(count: int, sizes: list[int]) -> None:
    """All items, in falling sizes; the last size alone may not be filled."""
    sizes.sort(reverse=True)
    found = split(count, sizes)
    assert found == sorted(found, reverse=True)
    assert set(found) <= set(sizes)
    assert 0 <= sum(found) - count < sizes[-1]
    assert all(sum(each for each in found if each < size) < size + sizes[-1] for size in sizes[:-1])


def chosen(seconds: dict[int, float], *, budget: int = 10**9, other: int = 0) -> micro_batch.Choice:
    """Return the choice among sizes with known seconds per pair; one size has other bits."""

    def measure(size: int) -> micro_batch.Trial:
        return micro_batch.Trial(size * seconds.get(size, math.inf), size, same=size != other)

    return CHOOSE([8, 16, 32, 64], measure, budget=budget, most=micro_batch.SLOWER, again=True)


def test_the_fastest_number_with_the_bits_of_the_rollout() -> None:
    """The smallest within 2 % of the best; larger ones are tried after one that is hardly faster."""
    faster = {8: 1.0, 16: 0.99, 32: 0.8, 64: 0.79}
    assert chosen(faster).micro_batch == 32
    assert chosen(faster).sizes == (32, 16, 8)
    assert list(chosen(faster).trials) == [8, 16, 32, 64]
    assert chosen({**faster, 64: 0.7}).micro_batch == 64
    assert chosen(faster, other=32).micro_batch == 8
    assert chosen(faster, other=64).micro_batch == 32
    assert "64: other bits" in str(chosen(faster, other=64))
    assert list(chosen(faster, budget=40).trials) == [8, 16, 32]
    assert list(chosen({**faster, 16: 1.2}).trials) == [8, 16]
    assert chosen({8: 1.0, 16: 0.9}).micro_batch == 16  # 32 is out of memory
    assert chosen({8: 1.0}).micro_batch == 8


def test_other_programs_do_not_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a trial counts the time of its own process: a clock would count that of others, which have the cores too."""
    with Trainer(tiny.config(tmp_path, sampling=ROLLOUT), tiny.job()) as run:
        passes = RunPasses(run.config, run.job, run.engine, run.schedule)
        own = itertools.count(0.0, 3.0)
        monkeypatch.setattr(micro_batch, "time", SimpleNamespace(process_time=lambda: next(own)))
        with micro_batch.open_trials(run.engine, passes.build(passes.largest)) as measure:
            assert measure(2).seconds == 3.0


@pytest.mark.bits
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize(
    ("train", "guidance"), [("full", Guidance()), ("lora", Guidance(scale=2.0))], ids=["full, plain", "lora, guided"]
)
def test_the_first_ratio_is_one(tmp_path: Path, threads: int, train: Any, guidance: Guidance) -> None:
    """In the second update, too, where adapters add something."""
    config = tiny.config(tmp_path, **RUN, train=train, sampling=replace(ROLLOUT, guidance=guidance))
    config = replace(config, optimizer=OptimizerConfig(lr=1e-2))
    with Trainer(config, tiny.job()) as run:
        rows = rows_of(run)
        assert run.pairs[-1] == 12
        assert run.choices["update_micro_batch"].sizes == run.pairs
        first, second = list(run)
    assert first["first_pass_max_abs_log_ratio"] == second["first_pass_max_abs_log_ratio"] == 0.0
    each = 1 if guidance.scale == 1 else 2  # rows of a pair
    assert {size // each for graph, size in rows if graph} <= set(run.pairs)


@pytest.mark.bits
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_half_of_guidance_without_a_gradient_has_no_graph(tmp_path: Path, train: Any) -> None:
    """Of passes of more pairs than a rollout's rows, in trials, too; first ratios stay 1, and results to rounding."""
    guidance, found = Guidance(scale=2.0, gradient="conditional"), dict[str, Any]()
    for pairs in ("auto", "rollout"):
        config = tiny.config(tmp_path, **{**RUN, "engine.update_micro_batch": pairs}, train=train)
        config = with_values(
            config, {"sampling": replace(ROLLOUT, guidance=guidance), "optimizer": OptimizerConfig(lr=1e-2)}
        )
        model = Recording()
        with Trainer(config, replace(tiny.job(), model=model)) as run:
            tried = model.clear()
            records = list(run)
            weights = {name: shard.clone() for name, shard in run.engine.sharded.shards().items()}
        assert [record["first_pass_max_abs_log_ratio"] for record in records] == [0.0, 0.0]
        found[pairs] = tried, model.clear(), records, weights
    rollout = [(False, 24)] * (2 * tiny.STEPS)
    assert found["auto"][1] == 2 * [*rollout, (False, 48), (True, 48)]
    assert found["rollout"][1] == 2 * [*rollout, *[(True, 24)] * 4]
    assert {rows for graph, rows in found["auto"][0] if graph} == {2, 24, 48}  # of 1, 12 or 24, and 48 pairs
    for own, other in zip(*(found[pairs][2] for pairs in ("auto", "rollout")), strict=True):
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    for name, shard in found["auto"][3].items():
        torch.testing.assert_close(shard, found["rollout"][3][name], rtol=1e-3, atol=2e-5)


class Recording(tiny.Tiny):
    """A model that records whether each pass has a graph, and its rows."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "passes", list[tuple[bool, int]]())

    def clear(self) -> list[tuple[bool, int]]:
        """Return the passes since the last call."""
        held: list[tuple[bool, int]] = self.__dict__["passes"]
        object.__setattr__(self, "passes", [])
        return held

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: TinyCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Record a pass and make it."""
        self.__dict__["passes"].append((torch.is_grad_enabled(), len(x)))
        return super().predict(module, x, sigma, cond)


class Telling(tiny.Tiny):
    """A model whose prediction tells how many rows a pass has, from a number on, where its adapters add something."""

    def __init__(self, most: int, *, through: str = "adapter") -> None:
        super().__init__()
        object.__setattr__(self, "most", most)
        object.__setattr__(self, "through", through)

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: TinyCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return the net's output, and more of it in a pass of many rows."""
        v, most, through = super().predict(module, x, sigma, cond), self.__dict__["most"], self.__dict__["through"]
        if len(x) <= most:
            return v
        if through == "means":  # the last row alone
            return torch.cat([v[:-1], v[-1:] * (1 + 1e-6)])
        held = {name: value for name, value in module.named_parameters() if "lora_B" in name}
        return v + 1e-3 * sum(value.sum() for value in held.values())


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize(("most", "pairs"), [(12, (12,)), (24, (24, 12)), (99, (48, 24, 12))])
@pytest.mark.parametrize("through", ["adapter", "means"])
def test_a_size_with_other_bits_is_not_taken(tmp_path: Path, most: int, pairs: tuple[int, ...], through: str) -> None:
    """Adapters start at 0 and would hide it; what is tried leaves them so."""
    config = tiny.config(tmp_path, **RUN, train="lora", sampling=ROLLOUT)
    with Trainer(config, replace(tiny.job(), model=Telling(most, through=through))) as run:
        assert run.pairs == pairs
        tried = run.choices["update_micro_batch"]
        assert [size for size, trial in tried.trials.items() if not trial.same] == [2 * pairs[0]] * (most < 48)
        assert ("other bits" in str(tried)) == (most < 48)
        seconds = {name: shard for name, shard in run.engine.sharded.shards().items() if "lora_B" in name}
        assert seconds
        assert not any(shard.any() for shard in seconds.values())


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({"train": "lora"}, 48),
        ({"passes.minibatches": 2, "updates": 4}, 24),
        ({"method": Awm(), "sampling": replace(ROLLOUT, sampler=Ode(), window=AllSteps())}, 96),
        ({"method": Dpo(), "sampling": replace(ROLLOUT, sampler=Ode(), window=AllSteps())}, 48),
    ],
    ids=["steps", "minibatches", "noised", "preferences"],
)
def test_the_results_are_those_of_the_rollouts_rows(tmp_path: Path, changes: dict[str, Any], largest: int) -> None:
    """To rounding, with as many pairs per pass as an update has, and the same random numbers."""
    found = {}
    for pairs in ("auto", "rollout"):
        config = tiny.config(tmp_path, **{**RUN, "sampling": ROLLOUT, **changes, "engine.update_micro_batch": pairs})
        torch.manual_seed(0)
        with Trainer(config, tiny.job()) as run:
            assert run.pairs[:1] == (() if pairs == "rollout" else (largest,))
            records = list(run)
            weights = {name: shard.clone() for name, shard in run.engine.sharded.shards().items()}
            found[pairs] = [record["loss"] for record in records], weights, torch.rand(3)
    assert found["auto"][0] == pytest.approx(found["rollout"][0], rel=1e-4, abs=1e-6)
    for name, shard in found["auto"][1].items():
        torch.testing.assert_close(shard, found["rollout"][1][name], rtol=1e-3, atol=2e-5)
    assert torch.equal(found["auto"][2], found["rollout"][2])


def test_a_loss_that_holds_three_passes_has_a_third_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AC-DMD, whose loss takes two steps with the network; without them it holds one."""
    budgets = list[int]()

    def choose(sizes: Any, measure: Any, **options: Any) -> micro_batch.Choice:
        budgets.append(options["budget"])
        return CHOOSE(sizes, measure, **options)

    monkeypatch.setattr(micro_batch, "choose_size", choose)
    monkeypatch.setattr(micro_batch, "measure_free_memory", lambda device: 3 * 10**9)
    few = SamplingConfig(prompts=24, group=1, steps=4, sampler=Stochastic("cps", 0.9))
    for weight in (0.0, 0.5):
        method = AcDmd(sampling=few, fake_updates=2, consistency=weight)
        own = {name: value for name, value in RUN.items() if name != "passes.minibatches"}
        with Trainer(tiny.config(tmp_path, **own, method=method, sampling=few), tiny.job()):
            pass
    assert budgets[1] == budgets[0] // 3


def test_pairs_that_fill_no_large_pass_go_in_smaller_ones(tmp_path: Path) -> None:
    """42 of the 48 pairs of an update count: one pass of 24, one of 12, and one of 12 that is filled up."""
    config = tiny.config(tmp_path, **RUN, sampling=ROLLOUT)
    assert config.choose_pass_sizes(48, (48, 24, 12)) == (48, 24, 12)
    with Trainer(config, tiny.job()) as run:
        run.run.pairs = (48, 24, 12)
        rows, real = rows_of(run), run.run.record_steps

        def recorded(*args: Any, **options: Any) -> Any:
            items = real(*args, **options)
            used = items.used.clone()
            used[:3] = 0
            return replace(items, used=used)

        run.run.record_steps = recorded
        run.update()
    assert [size for graph, size in rows if graph] == [24, 12, 12]


def saved(tmp_path: Path, **changes: Any) -> tuple[TrainConfig, Path, tuple[int, ...]]:
    """Return a configuration, its checkpoint after one update, and the numbers of pairs that were chosen."""
    config = tiny.config(tmp_path, **{**RUN, "sampling": ROLLOUT, **changes})
    with Trainer(config, tiny.job()) as run:
        run.update()
        run.save()
        return config, tmp_path / "checkpoints" / "000001", run.pairs


def never(*_: Any) -> Any:
    """Fail where nothing is to be tried."""
    raise AssertionError("a resumed run chose again")


@pytest.mark.usefixtures("faster")
def test_a_resumed_run_takes_the_numbers_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, checkpoint, pairs = saved(tmp_path)
    assert pairs[0] > 12
    monkeypatch.setattr(build, "choose_pairs", never)
    console = Console(file=StringIO(), width=500)
    with Trainer(config, tiny.job(), console=console, resume_from=checkpoint) as run:
        assert run.pairs == run.run.pairs == tuple(run.saver.pairs) == pairs
        assert not run.choices
        assert run.config.engine.update_micro_batch == "auto"
    assert "bits may differ" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("faster")
def test_a_run_resumed_on_another_processor_finds_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says which one it was, and which number of pairs it had."""
    config, checkpoint, pairs = saved(tmp_path)
    monkeypatch.setattr(saving, "describe_processor", lambda device: "another one")
    console = Console(file=StringIO(), width=500)
    with Trainer(
        config, replace(tiny.job(), model=Telling(12, through="means")), console=console, resume_from=checkpoint
    ) as run:
        assert run.pairs == (12,) != pairs
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "another one now" in said
    assert f"update_micro_batch {list(pairs)} then, [12] now" in said


@pytest.mark.usefixtures("faster")
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("compiled", [False, long(True)])
def test_compiled_blocks_take_one_larger_pass_whatever_its_bits(tmp_path: Path, *, compiled: bool) -> None:
    """A model that rounds otherwise in larger passes keeps a rollout's rows, unless its blocks are compiled."""
    config = tiny.config(tmp_path, **{**RUN, "engine.compile": compiled}, sampling=ROLLOUT)
    with Trainer(config, replace(tiny.job(), model=Telling(12, through="means"))) as run:
        assert len(run.pairs) == 1
        assert (run.pairs[0] > 12) == compiled


@pytest.mark.parametrize(("method", "reason"), [(Awm(), None), (AlignProp(), "a reward's gradient is followed")])
def test_what_cannot_be_chosen(method: Any, reason: str | None) -> None:
    assert explain_fixed_pairs(SimpleNamespace(method=method)) == reason  # type: ignore[arg-type]


def test_a_number_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "choose_pairs", None)
    with Trainer(tiny.config(tmp_path, **{**RUN, "engine.update_micro_batch": 12}, sampling=ROLLOUT), tiny.job()) as run:
        assert run.pairs == ()
