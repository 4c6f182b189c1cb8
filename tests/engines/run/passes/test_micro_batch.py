"""The choice of a micro-batch from trials, and trials of an engine's passes, which leave no trace."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from helpers.tiny_models import SHARDINGS, Net, data, squared
from torch import Tensor, nn

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.run.passes import micro_batch
from fluvial.engines.run.passes.micro_batch import Choice, Passes, Trial, choose_size, list_sizes, open_trials

ROWS = ("keep", "reshard, sync every", "checkpointing", "offload", "bfloat16", "bfloat16, all of it")


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(1, [1]), (7, [1, 7]), (9, [1, 3, 9]), (16, [1, 2, 4, 8, 16]), (144, [1, 2, 4, 8, 16, 36, 72, 144])],
)
def test_sizes_divide_the_samples(samples: int, expected: list[int]) -> None:
    assert list_sizes(samples) == expected


def chosen(seconds: dict[int, float], peaks: Callable[[int], int] = lambda size: size, *, budget: int = 10**9) -> Choice:
    """Return the choice among sizes with known seconds per sample; a size without is out of memory."""

    def measure(size: int) -> Trial:
        return Trial(size * seconds[size], peaks(size)) if size in seconds else Trial(math.inf, 0)

    return choose_size([1, 2, 4, 8, 16], measure, budget=budget)


def test_the_time_per_sample_decides() -> None:
    """The smallest size that the next one does not improve by more than 5 %; later ones are not tried."""
    choice = chosen({1: 1.0, 2: 0.6, 4: 0.5, 8: 0.49, 16: 0.1})
    assert choice.micro_batch == 4
    assert list(choice.trials) == [1, 2, 4, 8]
    assert chosen(dict.fromkeys((1, 2), 1.0)).micro_batch == 1
    assert chosen({size: 1 / size for size in (1, 2, 4, 8, 16)}).micro_batch == 16


def test_the_memory_decides_before_a_size_is_tried() -> None:
    """100 bytes and 10 per sample: size 8 takes 180; what only one size is known of is taken as proportional."""
    faster = {size: 1 / size for size in (1, 2, 4, 8, 16)}
    for budget, tried in ((1000, [1, 2, 4, 8, 16]), (259, [1, 2, 4, 8]), (219, [1])):
        choice = chosen(faster, lambda size: 100 + 10 * size, budget=budget)
        assert list(choice.trials) == tried
        assert choice.micro_batch == tried[-1]
    # Memory that grows faster than expected: the size was tried, and is not taken.
    choice = chosen(faster, lambda size: size**2, budget=15)
    assert (list(choice.trials), choice.micro_batch) == ([1, 2, 4], 2)


def test_a_size_out_of_memory_is_not_taken() -> None:
    choice = chosen({1: 1.0, 2: 0.5})
    assert (list(choice.trials), choice.micro_batch) == ([1, 2, 4], 2)
    assert "4: out of memory" in str(choice)
    assert choice.record["chosen"] == 2
    refuses(r"the passes of 1 sample.* do not fit into the memory: set engine.checkpointing", chosen, {})


def test_the_free_memory_is_that_of_the_tightest_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the host, or of the control group; the ranks of a host share it."""
    cpu = torch.device("cpu")
    whole = micro_batch.measure_free_memory(cpu)
    assert 2**20 < whole < 2**50
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert micro_batch._measure_container_memory(tmp_path) == 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert micro_batch._measure_container_memory(tmp_path) == 2**62
    monkeypatch.setattr(micro_batch, "_measure_container_memory", lambda: 4000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert micro_batch.measure_free_memory(cpu) == 1000


def out_of_memory(*_: Any) -> None:
    """Fail as an allocation does."""
    raise torch.OutOfMemoryError("not enough")


class Broken:
    """Passes of a net that run out of memory from a size on: in a block's forward pass, or in the backward pass."""

    def __init__(self, net: nn.Module, *, where: str, size: int = 4) -> None:
        self.where, self.size, self.now = where, size, 0
        net.blocks[1].register_forward_hook(self.block)  # type: ignore[index, union-attr]

    def update(self, module: nn.Module, size: int) -> Tensor:
        """Return the net's output for ones."""
        self.now = size
        out: Tensor = module(torch.ones(size, 3) + torch.randn(()))
        self.now = 0
        return out

    def block(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Fail, or let the backward pass fail."""
        if self.now >= self.size and self.where == "forward":
            out_of_memory()
        if self.now >= self.size and self.where == "backward" and output.requires_grad:
            output.register_hook(out_of_memory)


@pytest.mark.parametrize("where", ["nowhere", "forward", "backward"])
@pytest.mark.parametrize("sharding", ROWS)
def test_trials_leave_no_trace(one: World, sharding: str, where: str) -> None:
    """Weights, state, gradients, modes and random numbers are as before, and so are the bits of the next updates.

    Also after a pass that ran out of memory halfway.
    """
    items, weight = data(6)
    states = {}
    for tried in (False, True):
        engine = Engine(Net(), config=OptimizerConfig(lr=0.1), world=one, sharding=EngineConfig(**SHARDINGS[sharding]))
        engine.update(items, squared(engine.module), weight, micro_batch=2)
        engine.module.eval()
        torch.manual_seed(5)
        if tried:
            broken = Broken(engine.module, where=where)
            before = {name: tensor.clone() for name, tensor in engine.state().items()}
            with open_trials(engine, Passes(broken.update, lambda module, size: module(torch.ones(size, 3)))) as measure:
                found = {size: measure(size) for size in (1, 2, 4)}
            assert [trial.fits for trial in found.values()] == [True, True, where == "nowhere"]
            assert 0 < found[1].peak < found[2].peak
            assert found[1].seconds > 0
            assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state().items())
            assert all(parameter.grad is None for parameter in engine.module.parameters())
            assert not engine.module.training
        drawn = torch.rand(3)
        for _ in range(2):
            engine.update(items, squared(engine.module), weight, micro_batch=4)
        states[tried] = {**engine.state(), "drawn": drawn}
    assert all(torch.equal(tensor, states[True][name]) for name, tensor in states[False].items())


def test_a_gradient_that_was_there_is_still_there(one: World) -> None:
    engine = Engine(Net(), world=one)
    for parameter in engine.trainable.values():
        parameter.grad = torch.ones_like(parameter)
    with open_trials(engine, Passes(lambda module, size: module(torch.ones(size, 3)))) as measure:
        measure(2)
    assert all(bool((parameter.grad == 1).all()) for parameter in engine.trainable.values())  # type: ignore[union-attr]


def test_decoding_counts_for_the_memory_alone(one: World) -> None:
    """Once per sample, where the network is called once per step."""
    engine, calls = Engine(Net(), world=one), list[tuple[str, int]]()

    def rollout(module: nn.Module, size: int) -> Tensor:
        assert not torch.is_grad_enabled()
        calls.append(("rollout", size))
        return module(torch.ones(size, 3))

    def decode(v: Tensor) -> Tensor:
        calls.append(("decode", len(v)))
        return v

    with open_trials(engine, Passes(lambda module, size: module(torch.ones(size, 3)), rollout, decode)) as measure:
        calls.clear()
        measure(4)
    assert calls == [("rollout", 4), ("decode", 4), *[("rollout", 4)] * micro_batch.REPEATS]


def test_passes_of_one_sample_that_do_not_fit_end_the_run(one: World) -> None:
    engine = Engine(Net(), world=one)
    broken = Broken(engine.module, where="forward", size=1)
    with pytest.raises(UsageError, match=r"the passes of 1 sample.* do not fit"), open_trials(engine, Passes(broken.update)):
        pass


@pytest.mark.parametrize("sharding", ROWS)
def test_parameters_that_are_zero_are_filled_for_a_comparison_of_bits_alone(one: World, sharding: str) -> None:
    """Whatever holds the shards; afterwards they, the other parameters and the next update are as before."""
    items, weight = data(6)
    states = {}
    for tried in (False, True):
        net = Net()
        torch.nn.init.zeros_(net.head.weight)
        engine = Engine(net, config=OptimizerConfig(lr=0.1), world=one, sharding=EngineConfig(**SHARDINGS[sharding]))
        seen = list[bool]()

        def same(size: int, engine: Engine = engine, seen: list[bool] = seen) -> bool:
            with engine.inference() as module:
                seen.append(bool(module.get_parameter("head.weight").any()))
            return True

        if tried:
            passes = Passes(lambda module, size: module(torch.ones(size, 3)), same=same)
            with open_trials(engine, passes) as measure:
                assert [measure(size).same for size in (1, 2)] == [True, True]
            assert seen == [True, True]
            engine.sharded.reshard()
            assert not engine.sharded.shards()["head.weight"].any()
        engine.update(items, squared(engine.module), weight, micro_batch=2)
        states[tried] = dict(engine.state())
    assert all(torch.equal(tensor, states[True][name]) for name, tensor in states[False].items())
