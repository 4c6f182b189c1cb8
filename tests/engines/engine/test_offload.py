"""Tensors that are moved to the host between phases come back to the bit, and nothing can be computed while it is away."""

import pytest
import torch
from helpers.tiny_models import Net, data, squared
from torch import Tensor

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.shards import local
from fluvial.engines.engine.world import World


def trained(one: World) -> Engine:
    """Return an engine with moments and an average, after an update."""
    net = Net()
    engine = Engine(net, list(net.blocks), OptimizerConfig(lr=0.01, ema_decay=0.5), one, updates=9)
    step(engine)
    return engine


def step(engine: Engine) -> None:
    """Take an update."""
    items, weight = data(5)
    engine.update(items, squared(engine.module), weight, count=5, micro_batch=2, pad_to=5)


def test_samples_are_made_while_the_optimizer_state_is_away(one: World) -> None:
    """With the parameters in place; everything else raises until it is back."""
    engine, items = trained(one), data(3)[0]
    with engine.inference() as module:
        there = module(items["x"])
    engine.offload(parameters=False)
    with engine.inference() as module:
        assert torch.equal(module(items["x"]), there)
    for forbidden in (engine.state, lambda: engine.inference(average=True).__enter__(), lambda: step(engine)):
        with pytest.raises(ValueError, match="call onload"):
            forbidden()
    engine.offload()
    with pytest.raises(ValueError, match="call onload"), engine.inference():
        pass
    engine.onload()
    step(engine)


def test_gradients_wait_on_the_host_too(one: World) -> None:
    """An update that was cut short leaves gradients; they are moved with the rest."""
    engine, items = trained(one), data(3)[0]
    squared(engine.module)(items)[0].sum().backward()
    gradients = [local(p.grad) for p in engine.trainable.values() if p.grad is not None]
    values = [gradient.clone() for gradient in gradients]
    assert values
    engine.offload()
    assert all(gradient.untyped_storage().nbytes() == 0 for gradient in gradients)
    engine.onload()
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, values, strict=True))


def test_a_forward_only_engine_holds_no_optimizer(one: World) -> None:
    """It computes what the module does, in evaluation mode, moves to the host and back, and keeps no gradient."""

    class Dropping(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)

    net, (items, _) = Dropping().train(), data(3)
    expected = Net()(items["x"]).detach()
    reference = ShardedModule(net.requires_grad_(False), list(net.blocks), one, EngineConfig())
    with reference.inference() as module:
        assert torch.equal(module(items["x"]), expected)
    assert net.training
    reference.offload()
    with pytest.raises(ValueError, match="call onload"), reference.inference():
        pass
    reference.onload()
    with reference.inference() as module:
        found = module(items["x"])
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert not [name for name in vars(reference) if "optim" in name]


def test_modes_are_put_back(one: World) -> None:
    """Updates train, inference evaluates, a submodule that was set apart stays apart, and one's own `train` is asked."""
    net, seen, told = Net(), list[bool](), list[bool]()

    class Watch(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.training)
            return x

        def train(self, mode: bool = True) -> "Watch":
            told.append(mode)
            return super().train(mode)

    first = net.blocks[0]
    assert isinstance(first, torch.nn.Sequential)
    first.append(Watch())
    net.blocks[1].eval()
    engine = Engine(net, list(net.blocks), OptimizerConfig(), one, updates=1)
    step(engine)
    told.clear()
    with engine.inference() as module:
        module(data(2)[0]["x"])
        assert not any(part.training for part in module.modules())
    assert seen == [True, True, True, False]
    assert told[:1] == [False]
    assert [net.training, net.blocks[0].training, net.blocks[1].training] == [True, True, False]
