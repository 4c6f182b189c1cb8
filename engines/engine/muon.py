"""Muon for matrices, AdamW for all other parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.shards import first_row, local, plain, set_lr, shard_like

MOMENTUM = 0.95


class MuonAdamW(Optimizer):
    """Muon (arXiv 2502.16982), with AdamW for parameters that are no matrices, for parameters that are sharded by rows.

    With G the gradient of a matrix of m rows and n columns, and O(U) = A B^T of the singular value decomposition U = A S B^T
    by five Newton-Schulz steps:

        M <- 0.95 M + 0.05 G    U = 0.05 G + 0.95 M    W <- W (1 - lr weight_decay) - 0.2 sqrt(max(m, n)) lr O(U)

    The factor gives a step the RMS of AdamW's, so that its learning rate can be used again. O needs whole matrices: each is
    gathered from its shards when its turn comes, orthogonalised on every rank alike, and freed. Momentum stays sharded.
    """

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        params = list(params)
        super().__init__(params, {"lr": config.lr, "weight_decay": config.weight_decay})
        others = [p for p in params if p.ndim != 2]
        options: Any = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay, "fused": True}
        self._adamw = AdamW(others, lr=config.lr, **options) if others else None
        if self._adamw is not None:
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.ndim != 2:
                    continue
                momentum, gradient, weight = local(self.state[p]["momentum_buffer"]), local(p.grad), local(p)
                momentum.lerp_(gradient, 1 - MOMENTUM)
                update = shard_like(p, gradient.lerp(momentum, MOMENTUM))
                step = _orthogonal_step(update.full_tensor() if isinstance(update, DTensor) else update, group["lr"])
                first = first_row(p)
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(step[first : first + len(weight)])
        if self._adamw is not None:
            set_lr(self._adamw, self.param_groups[0]["lr"])
            with plain(self._adamw):
                self._adamw.step()


def _orthogonal_step(update: Tensor, lr: float) -> Tensor:
    """Return Muon's step of a whole matrix from 0, without momentum."""
    moved = nn.Parameter(torch.zeros_like(update))
    moved.grad = update
    Muon([moved], lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    return moved.detach()
