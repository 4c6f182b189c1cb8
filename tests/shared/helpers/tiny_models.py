"""A net with two blocks, data for it and a loss: what the engine's tests train, in one process and in several."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.engines.engine.engine import Engine
from fluvial.engines.gathered import gather


class Info(NamedTuple):
    error: Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum(-1)


class Wide(nn.Module):
    """Two layers; the first weight has 18 rows of 256, which an optimizer may hold in 8 bits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(256, 18), nn.Linear(18, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.repeat(1, 86)[:, :256]))).sum(-1)


def data(count: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(count)
    items = {"x": torch.randn(count, 3, generator=generator), "y": torch.randn(count, generator=generator)}
    return items, torch.rand(count, generator=generator)


def squared(module: nn.Module) -> Any:
    def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        error = (module(items["x"]) - items["y"]) ** 2
        return error, Info(error.detach())

    return loss


def take_plain_step(loss: Any, net: nn.Module, *, items: int = 6, count: float | None = None) -> dict[str, Tensor]:
    """Return the weights after an update of `data(items)` that is written with torch alone, of AdamW at a rate of 0.01."""
    rows, weight = data(items)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    ((loss(net)(rows)[0] * weight).sum() / (items if count is None else count)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return net.state_dict()


def take_updates(engine: Engine, count: int) -> list[float]:
    items, weight = data(12)
    return [engine.update(items, squared(engine.module), weight, micro_batch=5).loss for _ in range(count)]


def gather_state(engine: Engine) -> dict[str, Tensor]:
    """Return copies of an engine's weights, optimizer state and average, whole; every rank must take part."""
    return {name: gather(tensor).clone() for name, tensor in engine.state().items()}


# The ways that a module can lie on the ranks; a new one is a row.
SHARDINGS: dict[str, dict[str, Any]] = {
    "keep": {},
    "reshard": {"comm": "reshard"},
    "sync every": {"grad_sync": "every"},
    "reshard, sync every": {"comm": "reshard", "grad_sync": "every"},
    "two replicas": {"replicas": 2},
    "two replicas, sync every": {"replicas": 2, "grad_sync": "every"},
    "two replicas, reshard, checkpointing": {"replicas": 2, "comm": "reshard", "checkpointing": "block"},
    "two replicas, offload between phases": {"replicas": 2, "offload": "phases"},
    "two replicas, bfloat16": {"replicas": 2, "compute": "bfloat16"},
    "checkpointing": {"checkpointing": "block"},
    "selective checkpointing": {"checkpointing": "selective"},
    "offload": {"offload": "always"},
    "offload between phases": {"offload": "phases"},
    "compile": {"compile": True},
    "bfloat16": {"compute": "bfloat16"},
    "bfloat16, all of it": {"compute": "bfloat16", "comm": "reshard", "checkpointing": "block", "offload": "always"},
}
