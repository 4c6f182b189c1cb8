"""A block that the last backward pass goes through more than once (how often it is then reduced: bench/test_update.py)."""

from typing import Any

import pytest
import torch
from tiny_models import Info, Net, data, squared
from torch import Tensor

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World, init_world


def trained(one: World, net: Net, loss: Any, *, micro_batch: int, **sharding: Any) -> dict[str, Tensor]:
    """Return the weights after an update of six items."""
    engine = Engine(net, list(net.blocks), OptimizerConfig(lr=0.01), one, updates=1, sharding=EngineConfig(**sharding))
    items, weight = data(6)
    engine.update(items, loss, weight, count=6, micro_batch=micro_batch, pad_to=6)
    return dict(engine.weights(average=False))


@pytest.mark.parametrize("sharding", [{}, {"comm": "reshard"}, {"grad_sync": "every"}, {"checkpointing": "block"}])
@pytest.mark.parametrize("micro_batch", [2, 6])
def test_two_uses_in_a_loss_take_the_step_of_plain_torch(sharding: dict[str, Any], micro_batch: int) -> None:
    """Both parts of the gradient are in it, and what earlier micro-batches left."""

    def twice(net: Net) -> Any:
        def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
            error = (net(items["x"]) * net(items["x"] + 1) - items["y"]) ** 2
            return error, Info(error.detach())

        return loss

    items, weight = data(6)
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    ((twice(plain)(items)[0] * weight).sum() / 6).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    net = Net()
    with init_world() as one:
        weights = trained(one, net, twice(net), micro_batch=micro_batch, **sharding)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_pass_that_the_loss_does_not_need_is_refused() -> None:
    """Its backward pass never comes, so gradients would wait for it unreduced; without gradient it is fine."""
    net = Net()

    def wasteful(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        net(items["x"])
        return squared(net)(items)

    def thrifty(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        with torch.no_grad():
            net(items["x"])
        return squared(net)(items)

    with init_world() as one:
        with pytest.raises(ValueError, match=r"the loss does not need.*no_grad"):
            trained(one, net, wasteful, micro_batch=3)
        net = Net()
        trained(one, net, thrifty, micro_batch=3)
