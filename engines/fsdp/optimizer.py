"""AdamW, its learning-rate schedule, clipping and averaging, as one frozen configuration."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from diffusers.optimization import get_scheduler
from torch import nn

from fluvial.core.checks import check_number


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule, gradient clipping and the average of weights.

    Args:
        lr: peak learning rate.
        betas: decay of AdamW's first and second moment.
        weight_decay: of AdamW.
        schedule: "constant" or "cosine" (to the floor at the last update), after the warm-up.
        warmup: updates over which the learning rate rises linearly from 0.
        warmup_ratio: the same as a fraction of all updates, in place of `warmup`.
        min_lr_ratio: floor of the schedule after the warm-up, as a fraction of `lr`.
        max_grad_norm: the gradient's norm over all parameters and ranks is clipped to this.
        ema_decay: decay of the moving average of weights, which evaluation and export use; 0 uses the weights as they are.
        max_skipped: stop after this many updates in a row whose gradient was not finite.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0
    max_skipped: int = 10

    def __post_init__(self) -> None:
        check_number("optimizer", "lr", self.lr, low=0)
        check_number("optimizer", "weight_decay", self.weight_decay, low=0)
        check_number("optimizer", "warmup", self.warmup, low=0)
        check_number("optimizer", "warmup_ratio", self.warmup_ratio, low=0, high=1)
        check_number("optimizer", "min_lr_ratio", self.min_lr_ratio, low=0, high=1)
        check_number("optimizer", "max_grad_norm", self.max_grad_norm, low=1e-12)
        check_number("optimizer", "max_skipped", self.max_skipped, low=1)
        if self.warmup and self.warmup_ratio:
            raise ValueError(
                f"optimizer: warmup is {self.warmup} and warmup_ratio {self.warmup_ratio:g}, expected one of the two"
            )
        for beta in (*self.betas, self.ema_decay):
            check_number("optimizer", "betas and ema_decay", beta, low=0, high=1)
            if beta == 1:
                raise ValueError("optimizer: a decay of 1 never takes in anything new, expected below 1")


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over the parameters, fused."""
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def lr_factor(optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, updates: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the updates done, in units of the peak.

    min(n / w, 1) in the warm-up of w updates, then floor + (1 - floor) * s(n), with s constant or a half cosine.
    """
    warmup = config.warmup or math.ceil(config.warmup_ratio * updates)
    # Only the function of the number of updates is taken: without state there is nothing to resume.
    schedule: Callable[[int], float] = get_scheduler(
        "constant_with_warmup" if config.schedule == "constant" else "cosine",
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=updates,
    ).lr_lambdas[0]
    floor = config.min_lr_ratio
    return lambda done: schedule(done) if done < warmup else floor + (1 - floor) * schedule(done)
