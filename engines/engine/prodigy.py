"""Prodigy: AdamW that estimates its own step size."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.shards import local, sum_over_shards

START = 1e-6  # d before the first step


class Prodigy(Optimizer):
    """Prodigy (arXiv 2306.06101), for parameters that are sharded by rows.

    With G the gradient, W0 the first weights, c = sqrt(b2), h = d lr, and sums over all parameters and ranks:

        m <- b1 m + (1 - b1) d G    v <- b2 v + (1 - b2) d^2 G^2    s <- c s + d h G / d0
        r <- c r + d h sum(G (W0 - W)) / d0    d' = max(d, r / sum |s|)
        W <- W (1 - weight_decay h) - h m / (sqrt(v) + d' eps)    d <- d'

    d estimates the distance to the solution from below, so that it never falls; lr is a factor, 1 as published. This is the
    rule of the package prodigyopt without bias correction, which sums over the parameters on the host, keeps d outside of
    the optimizer's tensors, and has no shards of FSDP2. Here one all-reduce per step sums over the ranks, nothing is read on
    the host, and d and r are tensors that a checkpoint holds.
    """

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        super().__init__(params, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._betas, self._eps = config.betas, config.eps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        (group,) = self.param_groups
        held = [p for p in group["params"] if p.grad is not None]
        states = [{key: local(value) for key, value in self.state[p].items()} for p in held]
        (b1, b2), c = self._betas, math.sqrt(self._betas[1])
        d, r = states[0]["estimate"].clone().unbind()  # every parameter has the same two
        d = d.clamp(min=START)
        h, sums = d * group["lr"], []
        for p, state in zip(held, states, strict=True):
            gradient = local(p.grad)
            state["step"] += 1
            if state["step"] == 1:
                state["first"].copy_(local(p))
            state["exp_avg"].mul_(b1).add_(gradient * ((1 - b1) * d))
            state["exp_avg_sq"].mul_(b2).add_((gradient * d).square() * (1 - b2))
            state["sum"].mul_(c).add_(gradient * (d * h / START))
            distance = (gradient * (state["first"] - local(p))).sum() * (d * h / START)
            sums.append(torch.stack([distance, state["sum"].abs().sum()]))
        numerator, denominator = torch.stack(sum_over_shards(sums, held)).sum(0)
        r = c * r + numerator
        estimate = torch.maximum(d, torch.where(denominator > 0, r / denominator, 0))
        for p, state in zip(held, states, strict=True):
            step = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + estimate * self._eps)
            local(p).mul_(1 - group["weight_decay"] * h).sub_(step * h)
            state["estimate"].copy_(torch.stack([estimate, r]))
