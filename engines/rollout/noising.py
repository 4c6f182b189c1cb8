"""Clean samples with noise put on them: the items of objectives that need no recorded steps."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fluvial.core.checks import check_fields, per_sample
from fluvial.core.flow_matching import interpolate
from fluvial.core.random import Key, fold_in, normal, uniform
from fluvial.engines.rollout.items import Items
from fluvial.engines.rollout.streams import Stream
from fluvial.models import Prediction, Schedule


@dataclass(frozen=True)
class NoisingConfig:
    """The noise levels at which clean samples are trained on, for objectives that need no recorded steps.

    Args:
        each: Number of noise levels per sample, each with its own noise.
        levels: Distribution of the levels: schedule (steps of the sampling schedule, distinct per sample), stratified (one
            step of each of `each` equal parts of the schedule, as AWM's and Flow-Factory's code draws them), continuous
            (uniform along the schedule, between its steps too) or logit_normal (sigmoid of a standard normal, arXiv
            2403.03206).
        highest: Number of steps of the schedule that levels are drawn from, the noisiest ones; None is all. With levels
            schedule and stratified only.
        skip: Number of the noisiest steps that are left out, likewise (AWM's code leaves out the first, which is noise).
        draw: What one draw of the levels is for: each sample, or call (the `micro_batch` samples next to each other, as in
            AWM's code). The noise is each sample's own.
        shared: All samples of a rollout have the same levels, and those of a group the same noise at all of them (DGPO,
            arXiv 2510.08425). Otherwise each sample has levels and noise of its own.
    """

    each: int = 4
    levels: Literal["schedule", "stratified", "continuous", "logit_normal"] = "schedule"
    highest: int | None = None
    skip: int = 0
    draw: Literal["sample", "call"] = "sample"
    shared: bool = False

    def __post_init__(self) -> None:
        check_fields(self, each=(1, 2**31), highest=(1, 2**31), skip=(0, 2**31))
        steps = self.levels in ("schedule", "stratified")
        for name, given in (("highest", self.highest is not None), ("skip", self.skip > 0)):
            if given and not steps:
                raise ValueError(
                    f"noising.{name} is set, and noising.levels is {self.levels}: only steps of the schedule count"
                )
        if self.highest is not None and self.skip >= self.highest:
            raise ValueError(f"noising.skip is {self.skip}, expected less than noising.highest, which is {self.highest}")
        if self.levels == "schedule" and self.highest is not None and self.each > self.highest - self.skip:
            raise ValueError(
                f"noising.each is {self.each}, expected at most {self.highest - self.skip}, the steps from noising.skip to "
                "noising.highest: use fewer"
            )
        if self.draw == "call" and self.shared:
            raise ValueError("noising.draw is call, and noising.shared gives all samples the same levels: leave one of them")


def noised(
    x0: Tensor,
    keys: Key,
    target_weight: Tensor,
    weight: Tensor,
    schedule: Schedule,
    config: NoisingConfig,
    prediction: Prediction,
    *,
    level_keys: Key | None = None,
) -> Items:
    """Return each sample at `config.each` noise levels: item m * B + i is sample i at its m-th level.

        x_t = (1 - sigma) x0 + sigma noise, target = noise - x0                        flow
        x_t = sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) noise, target = noise           model that predicts epsilon

    Args:
        x0: clean samples `[B, *event]`.
        keys: key of each sample; its levels and its noise depend on nothing else.
        target_weight: `Objective.target_weight` of each sample, `[B]`.
        weight: weight in the loss, `[B]`.
        schedule: the model's schedule.
        config: number and distribution of the levels.
        prediction: what the model predicts.
        level_keys: key of each sample's levels, where it is not that of its noise.
    """
    batch = len(x0)
    levels, timesteps = draw_levels(level_keys or keys, schedule, config)
    parts = []
    for m in range(config.each):
        own = fold_in(fold_in(keys, Stream.NOISE), 0 if config.shared else m)
        level, noise = levels[:, m], normal(own, tuple(x0.shape), dtype=x0.dtype)
        parts.append(noised_at(x0, noise, level, prediction=prediction))
    return Items(
        x=torch.cat([x for x, _ in parts]),
        level=levels.T.flatten(),
        timestep=None if timesteps is None else timesteps.T.flatten(),
        sample=torch.arange(batch, device=x0.device).repeat(config.each),
        target_weight=target_weight.repeat(config.each),
        weight=weight.repeat(config.each),
        x0=x0.repeat(config.each, *[1] * (x0.ndim - 1)),
        target=torch.cat([target for _, target in parts]),
    )


def noised_at(x0: Tensor, noise: Tensor, level: Tensor, *, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Return samples at levels `[B]`, and what the model should predict for them, each `[B, *event]`."""
    if prediction == "velocity":
        return interpolate(x0, noise, level), noise - x0
    alpha_bar = per_sample(level, x0)
    return torch.sqrt(alpha_bar) * x0 + torch.sqrt(1 - alpha_bar) * noise, noise


def preferred(win: Items, lose: Items) -> Items:
    """Return items of two samples at the same levels with the same noise, `[P, 2, *event]`, the preferred one first.

    Args:
        win, lose: items of the preferred and of the other samples, drawn with the same keys.
    """

    def both(left: Tensor | None, right: Tensor | None) -> Tensor | None:
        return None if left is None or right is None else torch.stack([left, right], dim=1)

    x = both(win.x, lose.x)
    assert x is not None
    return win._replace(x=x, x0=both(win.x0, lose.x0), target=both(win.target, lose.target))


def draw_levels(keys: Key, schedule: Schedule, config: NoisingConfig) -> tuple[Tensor, Tensor | None]:
    """Return noise levels `[B, each]`, and the timesteps that the model is given, None if it derives them from the levels.

    A sample's levels are distinct steps of the schedule, one step of each part of it, or independent draws.
    """
    assert isinstance(keys.low, Tensor)
    batch, device = len(keys.low), keys.low.device
    levels, timesteps = schedule.levels.to(device), schedule.timesteps.to(device)
    steps, drawn = len(timesteps), fold_in(keys, Stream.LEVELS)
    end = config.highest or steps
    if config.levels == "schedule":
        step = config.skip + torch.argsort(uniform(drawn, (batch, end - config.skip)), dim=1)[:, : config.each]
        return levels[step], timesteps[step]
    if config.levels == "stratified":
        bounds = torch.linspace(config.skip, end, config.each + 1).long().to(device)
        step = bounds[:-1] + (uniform(drawn, (batch, config.each)) * bounds.diff()).long()
        return levels[step], timesteps[step]
    if config.levels == "logit_normal":
        return torch.sigmoid(normal(drawn, (batch, config.each))), None
    # Uniform along the schedule, so that the levels are as dense as its steps.
    place = uniform(drawn, (batch, config.each)) * steps
    below = place.long().clamp(max=steps - 1)
    return torch.lerp(levels[below], levels[below + 1], place - below), None
