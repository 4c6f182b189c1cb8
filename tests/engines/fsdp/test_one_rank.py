"""One rank computes without FSDP2: the bits are FSDP2's, and no second copy of the parameters exists."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import Net, data, squared
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fluvial.engines.fsdp import parallelize
from fluvial.engines.fsdp.config import EngineConfig
from fluvial.engines.fsdp.engine import Engine, OptimizerConfig
from fluvial.engines.fsdp.one_rank import OneRankModule
from fluvial.engines.fsdp.world import World, init_world

CPU = torch.device("cpu")
CONFIGS: dict[str, dict[str, Any]] = {
    "keep": {},
    "reshard": {"comm": "reshard"},
    "every": {"grad_sync": "every"},
    "checkpointed": {"checkpointing": "block"},
}


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """Return the world of this process."""
    with init_world() as world:
        yield world


def trained(one: World, config: EngineConfig) -> Engine:
    """Return an engine after three updates of three micro-batches."""
    net = Net()
    engine = Engine(net, list(net.blocks), OptimizerConfig(lr=0.01, ema_decay=0.9), one, updates=9, sharding=config)
    items, weight = data(6)
    for _ in range(3):
        engine.update(items, squared(net), weight, count=6, micro_batch=2)
    return engine


@pytest.mark.parametrize("config", CONFIGS)
def test_the_bits_are_those_of_fsdp(one: World, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trained(one, EngineConfig(**CONFIGS[config]))
    monkeypatch.setattr(parallelize, "is_whole", lambda *_, **__: False)
    wrapped = trained(one, EngineConfig(**CONFIGS[config]))
    assert isinstance(alone.module, OneRankModule)
    assert isinstance(wrapped.module, FSDPModule)
    assert not isinstance(wrapped.module, OneRankModule)
    found, expected = alone.state(), wrapped.state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        mine = found[name]
        assert isinstance(mine, DTensor)
        assert isinstance(tensor, DTensor)
        assert mine.placements == tensor.placements
        assert torch.equal(mine.to_local(), tensor.to_local()), name


def test_computation_shares_the_shards_storage(one: World) -> None:
    engine = trained(one, EngineConfig())
    held = {name: shard.data_ptr() for name, shard in engine.sharded.shards().items()}
    with engine.inference() as module:
        module(data(6)[0]["x"])
        computed = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
        assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
        plain = list(module.parameters())
    assert computed == held
    engine.update(data(6)[0], squared(engine.module), micro_batch=2)
    assert all(parameter.grad is None for parameter in plain)  # the optimizer has freed the gradients
    assert all(isinstance(parameter, DTensor) for parameter in engine.module.parameters())


def test_gradients_add_up_over_backward_passes_outside_of_an_update(one: World) -> None:
    """As with FSDP2: a backward pass leaves its gradient on the shards, and a second one adds to it."""
    engine = trained(one, EngineConfig())
    loss, (items, _) = squared(engine.module), data(6)
    gradients = []
    for _ in range(2):
        loss(items)[0].sum().backward()
        gradients.append({name: p.grad.to_local().clone() for name, p in engine.trainable.items() if p.grad is not None})  # type: ignore
    assert gradients[0].keys() == engine.trainable.keys()
    for name, gradient in gradients[1].items():
        assert torch.equal(gradient, 2 * gradients[0][name])


@pytest.mark.parametrize(
    "options", [{"offload": "always"}, {"compile": True}, {"compute": "bfloat16"}, {"reduce": "bfloat16"}], ids=str
)
def test_what_needs_fsdp_keeps_it(options: dict[str, Any]) -> None:
    assert parallelize.is_whole(Net(), EngineConfig(), ranks=1, device=CPU)
    assert not parallelize.is_whole(Net(), EngineConfig(**options), ranks=1, device=CPU)
    assert not parallelize.is_whole(Net(), EngineConfig(), ranks=2, device=CPU)
    assert not parallelize.is_whole(Net().bfloat16(), EngineConfig(), ranks=1, device=CPU)
