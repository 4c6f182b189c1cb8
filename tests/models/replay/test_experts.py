"""Pipelines with two networks: those that cannot be replayed as one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fluvial.models.pipelines.wan import EXPERTS, Experts
from fluvial.models.replay.checks import ReplayError
from fluvial.models.replay.experts import join_experts, place_network


class Negates(nn.Module):
    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> tuple[torch.Tensor]:
        return (-hidden_states,)


def pipe(boundary: float | None) -> SimpleNamespace:
    parts = {part: Negates() for part in EXPERTS}
    return SimpleNamespace(components=parts, config=SimpleNamespace(boundary_ratio=boundary))


def test_networks_without_a_boundary_and_calls_on_its_other_side_are_refused() -> None:
    module = join_experts(pipe(0.5), EXPERTS[0])
    assert isinstance(module, Experts)
    high, low = (place_network(module, part) for part in EXPERTS)
    x, above, below = torch.ones(2, 3), torch.tensor([500.0, 900]), torch.tensor([499.0, 100])
    assert torch.equal(high(x, above)[0], -x)
    assert torch.equal(low(x, below)[0], -x)
    for network, timestep, part in ((high, below, "transformer"), (low, above, "transformer_2")):
        with pytest.raises(ReplayError, match=f"its {part} is called on the other side of the boundary"):
            network(x, timestep)
    with pytest.raises(ReplayError, match=r"it has two networks and no boundary between their noise levels$"):
        join_experts(pipe(None), EXPERTS[0])
