"""Two networks for one schedule, one for high and one for low noise levels, as in Wan 2.2."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fluvial.core.checks import per_sample

EXPERTS = ("transformer", "transformer_2")  # for high noise levels, and for low ones


class Experts(nn.ModuleDict):
    """Two networks: `transformer` for samples at timesteps of at least `boundary`, `transformer_2` for those below.

    A batch with timesteps on one side runs one network, any other batch both. All ranks run the same networks, so that they
    gather the same parameters; therefore each forward pass reads two numbers from the device.
    """

    def __init__(self, networks: Mapping[str, nn.Module], *, boundary: float) -> None:
        super().__init__(networks)
        self.boundary = boundary

    def forward(self, hidden_states: Tensor, timestep: Tensor, **given: Any) -> tuple[Tensor]:
        """Return `(v,)`, `[B, C, F, H, W]`, like a single transformer."""
        low = timestep < self.boundary
        wanted = torch.stack([(~low).any(), low.any()]).to(torch.int32)
        if distributed.is_initialized():
            distributed.all_reduce(wanted, op=distributed.ReduceOp.MAX)
        names = [name for name, runs in zip(EXPERTS, wanted.tolist(), strict=True) if runs]
        outputs = [self[name](hidden_states=hidden_states, timestep=timestep, **given)[0] for name in names]
        return (outputs[0] if len(outputs) == 1 else torch.where(per_sample(low, outputs[0]), outputs[1], outputs[0]),)
