"""Pipelines with two networks, one for high and one for low noise levels, as Wan 2.2: trained and replayed as one."""

from typing import Any

from torch import Tensor, nn

from fluvial.models import host_values
from fluvial.models.pipelines.wan import EXPERTS, Experts
from fluvial.models.replay.checks import build_error


class ExpertProxy(nn.Module):
    """Part of a pipeline that calls one expert through both, whose parameters may be sharded together.

    Args:
        experts: both networks.
        part: name of the pipeline's part.
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
        """Return the output of the network; ReplayError if the timesteps belong to the other one."""
        if bool((host_values.read(timestep) < self.experts.boundary).any()) != (self.part == EXPERTS[1]):
            raise build_error("the pipeline", f"its {self.part} is called on the other side of the boundary of its networks")
        timestep = host_values.to_device(timestep, hidden_states.device)
        return self.experts(hidden_states=hidden_states, timestep=timestep, **arguments)


def list_trained(pipe: Any, component: str) -> tuple[str, ...]:
    """Return the names of a pipeline's trained networks: one, or two that take turns by the noise level."""
    return EXPERTS if component == EXPERTS[0] and pipe.components.get(EXPERTS[1]) is not None else (component,)


def join_experts(pipe: Any, component: str) -> nn.Module:
    """Return the trained network of a pipeline; two networks as one.

    Raises:
        ReplayError: there are two networks without a boundary between their noise levels.
    """
    first: nn.Module = pipe.components[component]
    if list_trained(pipe, component) != EXPERTS:
        return first
    if isinstance(first, ExpertProxy):
        return first.experts
    if pipe.config.boundary_ratio is None:
        raise build_error(type(pipe).__name__, "it has two networks and no boundary between their noise levels")
    return Experts({part: pipe.components[part] for part in EXPERTS}, boundary=1000 * pipe.config.boundary_ratio)


def place_network(module: nn.Module, part: str) -> nn.Module:
    """Return the module to register as a part of a pipeline, given the trained network."""
    return ExpertProxy(module, part) if isinstance(module, Experts) else module
