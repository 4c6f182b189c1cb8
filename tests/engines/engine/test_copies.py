"""Ranks that hold whole copies compute without FSDP2: the bits are FSDP2's, and parameters have no second copy."""

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.tiny_models import Net, data, gather_state, squared
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from workers import copies

from fluvial.engines.engine import module, parallelize
from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.engine import Engine, OptimizerConfig
from fluvial.engines.engine.shards import local
from fluvial.engines.engine.world import World
from fluvial.models.lora import copy_adapter, use_adapter

CONFIGS: dict[str, dict[str, Any]] = {
    "keep": {},
    "reshard": {"comm": "reshard"},
    "every": {"grad_sync": "every"},
    "checkpointed": {"checkpointing": "block"},
    "bfloat16": {"compute": "bfloat16"},
    "bfloat16, reshard": {"compute": "bfloat16", "comm": "reshard", "checkpointing": "block"},
    "bfloat16, reduced in it": {"compute": "bfloat16", "reduce": "bfloat16"},
    "bfloat16, offload between phases": {"compute": "bfloat16", "offload": "phases"},
    "compiled": {"compute": "bfloat16", "compile": True},
}


def trained(one: World, config: EngineConfig) -> Engine:
    """Return an engine after three updates of three micro-batches."""
    net = Net()
    engine = Engine(net, list(net.blocks), OptimizerConfig(lr=0.01, ema_decay=0.9), one, updates=9, sharding=config)
    items, weight = data(6)
    for _ in range(3):
        engine.update(items, squared(net), weight, count=6, micro_batch=2)
    return engine


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("config", CONFIGS)
def test_the_bits_are_those_of_fsdp(one: World, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # traces, and needs no C++ compiler
    alone = trained(one, EngineConfig(**CONFIGS[config]))
    monkeypatch.setattr(parallelize, "is_whole", lambda *_, **__: False)
    wrapped = trained(one, EngineConfig(**CONFIGS[config]))
    assert alone.sharded.is_whole
    assert isinstance(wrapped.module, FSDPModule)
    found, expected = alone.state(), wrapped.state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(found[name], tensor.to_local()), name


def test_the_module_computes_with_the_parameters_that_are_trained(one: World) -> None:
    """None of them is copied, and none is a tensor over ranks."""
    engine = trained(one, EngineConfig())
    held = {name: shard.data_ptr() for name, shard in engine.sharded.shards().items()}
    with engine.inference() as network:
        network(data(6)[0]["x"])
        assert {name: parameter.data_ptr() for name, parameter in network.named_parameters()} == held
    engine.update(data(6)[0], squared(engine.module), micro_batch=2)
    assert all(parameter.grad is None for parameter in engine.module.parameters())  # the optimizer has freed the gradients
    assert not any(isinstance(tensor, DTensor) for tensor in engine.state().values())


@pytest.mark.parametrize("options", [{}, {"compute": "bfloat16"}, {"compute": "bfloat16", "masters": "bfloat16"}], ids=str)
def test_gradients_add_up_over_backward_passes_outside_of_an_update(one: World, options: dict[str, Any]) -> None:
    """As with FSDP2: a backward pass leaves its gradient on the parameters, and a second one adds to it."""
    engine = trained(one, EngineConfig(**options))
    loss, (items, _) = squared(engine.module), data(6)
    gradients = []
    for _ in range(2):
        loss(items)[0].sum().backward()
        with engine.inference() as network:  # computes with what was cast, and leaves the gradients
            network(items["x"])
        gradients.append({name: p.grad.clone() for name, p in engine.trainable.items() if p.grad is not None})
        assert all(gradient.dtype == engine.trainable[name].dtype for name, gradient in gradients[-1].items())
    assert gradients[0].keys() == engine.trainable.keys()
    for name, gradient in gradients[1].items():
        assert torch.equal(gradient, 2 * gradients[0][name])


def test_a_pass_that_ended_halfway_leaves_nothing(one: World) -> None:
    """Neither cast parameters nor gradients; what an earlier pass left stays, and the next update is as without it."""
    sharding, (items, weight) = EngineConfig(compute="bfloat16"), data(6)
    broken, other = trained(one, sharding), trained(one, sharding)
    loss = squared(broken.module)
    loss(items)[0].sum().backward()
    before = {name: local(p.grad).clone() for name, p in broken.trainable.items()}
    broken.sharded.set_last(False)
    loss(items)[0].sum().backward()
    broken.module(items["x"])
    assert broken.sharded.copies is not None
    broken.sharded.copies.reset_iter_state()
    for name, parameter in broken.trainable.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(local(parameter.grad), before[name])
    broken.optimizer.zero_grad()
    for engine in (broken, other):
        engine.update(items, squared(engine.module), weight, count=6, micro_batch=2)
    assert all(torch.equal(tensor, other.state()[name]) for name, tensor in broken.state().items())


ADAPTED = copies.adapted()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_needs_fsdp_keeps_it(ranks: int) -> None:
    assert parallelize.is_whole(Net(), EngineConfig(replicas=ranks), ranks=ranks)
    assert not parallelize.is_whole(Net(), EngineConfig(replicas=ranks, offload="always"), ranks=ranks)
    assert not parallelize.is_whole(Net(), EngineConfig(replicas=ranks), ranks=2 * ranks)
    assert parallelize.replicas(ADAPTED, EngineConfig(offload="always"), ranks=ranks) == 1


def test_a_parameter_of_another_dtype_is_cast_only_while_the_module_computes(one: World) -> None:
    """The trained ones, which have float32 masters; a frozen one is computed with as it is held."""
    net = Net()
    net.blocks[0].requires_grad_(False)
    engine = Engine(net, list(net.blocks), OptimizerConfig(), one, sharding=EngineConfig(compute="bfloat16"))
    held = {name: shard.data_ptr() for name, shard in engine.sharded.shards().items()}
    with engine.inference() as network:
        network(data(6)[0]["x"])
        assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
        shared = {name for name, parameter in network.named_parameters() if parameter.data_ptr() == held[name]}
        assert shared == {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
        cast = [
            weakref.ref(parameter.data.untyped_storage()) for parameter in network.parameters() if parameter.requires_grad
        ]
    assert not any(storage() for storage in cast)
    assert {name: shard.data_ptr() for name, shard in engine.sharded.shards().items()} == held


def test_what_is_written_to_parameters_is_computed_with(one: World) -> None:
    """An adapter that follows another, while what was cast for earlier passes is kept."""
    net = copies.adapted()
    engine = Engine(net, [], OptimizerConfig(), one, sharding=EngineConfig(compute="bfloat16"))
    x = data(6)[0]["x"]

    def compute(adapter: str) -> torch.Tensor:
        with engine.inference() as network, use_adapter(network, adapter):
            return network(x)

    with engine.gathered_once():
        before, expected = compute("old"), compute("default")
        copy_adapter(net, "default", "old")
        assert not torch.equal(before, expected)
        assert torch.equal(compute("old"), expected)
    assert torch.equal(compute("old"), expected)  # and it stays


TRAINED = {"adapters": ADAPTED, "all": Net(), "none": Net().requires_grad_(False)}


def test_auto_copies_what_would_be_gathered_anyway() -> None:
    for trained, options, ranks, expected in (
        ("adapters", {}, 8, 8),
        ("adapters", {}, 1, 1),
        ("adapters", {"replicas": 1}, 8, 1),
        ("adapters", {"replicas": 2}, 8, 2),
        ("adapters", {"comm": "reshard"}, 8, 1),  # asks for the least memory
        ("adapters", {"context_parallel": 2}, 8, 1),
        ("adapters", {"compute": "bfloat16", "compile": True}, 8, 8),
        ("adapters", {"offload": "always"}, 8, 1),
        ("all", {}, 8, 1),  # moments would be copied, too
        ("none", {}, 8, 1),  # a reference gathers for a moment
    ):
        config = EngineConfig(**options)
        assert parallelize.replicas(TRAINED[trained], config, ranks=ranks) == expected, (trained, options)


def test_gradients_are_summed_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket holds at most its bytes, or one tensor; together they hold each tensor once, in order."""
    monkeypatch.setattr(module, "BUCKET", 40)
    sizes = [16, 24, 4, 120, 40]
    assert [sizes[bucket] for bucket in module.buckets(sizes)] == [[16, 24], [4], [120], [40]]
    assert module.largest_bucket(sizes) == 120
    assert module.largest_bucket([]) == 0


@pytest.fixture(scope="module")
def trained_on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder with the checkpoints of adapters trained on two ranks, and what each rank says."""
    folder = tmp_path_factory.mktemp("copies")
    return folder, launch.on_ranks(2, "workers.copies:checkpoints", str(folder))


def test_copies_reduce_once_and_stay_alike(trained_on_two: tuple[Path, list[dict[str, Any]]]) -> None:
    """One all-reduce for the gradients of all adapters and one gather for the metrics, read once."""
    for found in trained_on_two[1]:
        assert found["copies"]["whole"]
        assert not found["shards"]["whole"]
        assert found["copies"]["collectives"] == {"allreduce_": 1, "allgather_": 1}
        assert found["copies"]["reads"] == 1
        assert found["ranks alike"]
        assert found["apart"] < 1e-5


@pytest.mark.parametrize("kind", copies.KINDS)
def test_checkpoints_of_copies_are_restored_as_shards_and_back(
    one: World, trained_on_two: tuple[Path, list[dict[str, Any]]], kind: str
) -> None:
    """To the bit, on as many ranks and on one; what follows is the same up to rounding.

    A gradient that is not finite on one rank is skipped on all.
    """
    folder, results = trained_on_two
    for found in results:
        assert found[kind]["skipped"] == [False, True, False]
        assert found[kind]["counters"] == {"updates": 4, "skipped": 1, "skipped_in_a_row": 0}
        assert found[kind]["restored as the other"]
        assert found[kind]["goes on as the other"] < 1e-5
    engine, alone = copies.restored(folder / kind / "000003", one), copies.start(one)
    copies.train(alone)
    assert copies.apart(gather_state(engine), gather_state(alone)) < 1e-5
    exported = load_file(next((folder / kind / "export").glob("*.safetensors")))
    weights = {f"transformer.{name}": tensor for name, tensor in engine.weights(adapter="default", average=False)}
    assert exported.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.items())
