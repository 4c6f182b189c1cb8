"""Pipelines with two networks, one for high and one for low noise levels, as Wan 2.2: trained and replayed as one."""

from typing import Any

from torch import Tensor, nn

from fluvial.models import host_values
from fluvial.models.pipelines.wan import EXPERTS, Experts
from fluvial.models.replay.checks import refusal


class Through(nn.Module):
    """One of two networks in its place in a pipeline, called through both, whose parameters may be sharded together.

    Args:
        experts: both networks.
        part: name of this one.
    """

    def __init__(self, experts: Experts, part: str) -> None:
        super().__init__()
        self.experts, self.part = experts, part

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the network, e.g. its config."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            experts: Any = super().__getattr__("experts")
            return getattr(experts[self.part], name)

    def forward(self, hidden_states: Tensor, timestep: Tensor, **arguments: Any) -> tuple[Tensor]:
        """Return what the network returns; ReplayError if the timesteps are the other one's."""
        if bool((host_values.read(timestep) < self.experts.boundary).any()) != (self.part == EXPERTS[1]):
            raise refusal(
                "the pipeline", f"its {self.part} is called on the other side of the boundary between its networks"
            )
        timestep = host_values.to_device(timestep, hidden_states.device)
        return self.experts(hidden_states=hidden_states, timestep=timestep, **arguments)


def list_trained(pipe: Any, component: str) -> tuple[str, ...]:
    """Return the names of the networks of a pipeline that are trained: one, or two that take turns by the noise level."""
    return EXPERTS if component == EXPERTS[0] and pipe.components.get(EXPERTS[1]) is not None else (component,)


def join_experts(pipe: Any, component: str) -> nn.Module:
    """Return the network of a pipeline that is trained; two networks as one.

    Raises:
        ReplayError: there are two, and no boundary between their noise levels.
    """
    first: nn.Module = pipe.components[component]
    if list_trained(pipe, component) != EXPERTS:
        return first
    if isinstance(first, Through):
        return first.experts
    if pipe.config.boundary_ratio is None:
        raise refusal(type(pipe).__name__, "it has two networks and no boundary between their noise levels")
    return Experts({part: pipe.components[part] for part in EXPERTS}, boundary=1000 * pipe.config.boundary_ratio)


def place_network(module: nn.Module, part: str) -> nn.Module:
    """Return what a pipeline calls as one of its networks, given the one that is trained."""
    return Through(module, part) if isinstance(module, Experts) else module
