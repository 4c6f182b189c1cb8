"""Two networks for one schedule, one for much noise and one for little, as Wan 2.2 has."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fluvial.core.checks import per_sample

EXPERTS = ("transformer", "transformer_2")  # for much noise, and for little


class Experts(nn.ModuleDict):
    """Two networks: `transformer` computes samples at timesteps from `boundary` up, `transformer_2` those below.

    A batch on one side runs one network, any other both. Ranks agree on that, so that they gather the same parameters: a
    number is read from the device at each forward pass.
    """

    def __init__(self, networks: Mapping[str, nn.Module], *, boundary: float) -> None:
        super().__init__(networks)
        self.boundary = boundary

    def forward(self, hidden_states: Tensor, timestep: Tensor, **given: Any) -> tuple[Tensor]:
        """Return `(v,)`, `[B, C, F, H, W]`, as a transformer does."""
        low = timestep < self.boundary
        wanted = torch.stack([(~low).any(), low.any()]).to(torch.int32)
        if distributed.is_initialized():
            distributed.all_reduce(wanted, op=distributed.ReduceOp.MAX)
        names = [name for name, runs in zip(EXPERTS, wanted.tolist(), strict=True) if runs]
        outputs = [self[name](hidden_states=hidden_states, timestep=timestep, **given)[0] for name in names]
        return (outputs[0] if len(outputs) == 1 else torch.where(per_sample(low, outputs[0]), outputs[1], outputs[0]),)
