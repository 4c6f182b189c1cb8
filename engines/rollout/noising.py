"""Clean samples with noise put on them anew: the items of objectives that need no recorded steps."""

import torch
from torch import Tensor

from fluvial.core.checks import per_sample
from fluvial.core.flow_matching import interpolate
from fluvial.core.random import Key, fold_in, normal, uniform
from fluvial.engines.rollout.items import Items
from fluvial.engines.rollout.streams import Stream
from fluvial.engines.train.config import NoisingConfig
from fluvial.models import Prediction, Schedule


def noised(
    x0: Tensor,
    keys: Key,
    target_weight: Tensor,
    weight: Tensor,
    schedule: Schedule,
    config: NoisingConfig,
    prediction: Prediction,
) -> Items:
    """Return each sample at `config.each` noise levels: pair m * B + i is sample i at its m-th level.

        x_t = (1 - sigma) x0 + sigma noise, target = noise - x0       of a flow
        x_t = sqrt(ab) x0 + sqrt(1 - ab) noise, target = noise        of a model of epsilon

    Args:
        x0: clean samples `[B, *event]`.
        keys: of each sample, which its levels and its noise depend on, and nothing else.
        target_weight, weight: `[B]`.
        schedule: of the model.
        config: how many levels, and which.
        prediction: of the model.
    """
    batch = len(x0)
    levels, timesteps = draw_levels(keys, schedule, config)
    parts = []
    for m in range(config.each):
        level, noise = levels[:, m], normal(fold_in(fold_in(keys, Stream.NOISE), m), tuple(x0.shape), dtype=x0.dtype)
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
    """Return samples at levels `[B]`, and what a model of this prediction should say of them, each `[B, *event]`."""
    if prediction == "velocity":
        return interpolate(x0, noise, level), noise - x0
    power = per_sample(level, x0)
    return torch.sqrt(power) * x0 + torch.sqrt(1 - power) * noise, noise


def preferred(win: Items, lose: Items) -> Items:
    """Return pairs of two samples at the same levels with the same noise, `[P, 2, *event]`, the preferred one first.

    Args:
        win, lose: the two samples' pairs, of the same keys.
    """

    def both(left: Tensor | None, right: Tensor | None) -> Tensor | None:
        return None if left is None or right is None else torch.stack([left, right], dim=1)

    x = both(win.x, lose.x)
    assert x is not None
    return win._replace(x=x, x0=both(win.x0, lose.x0), target=both(win.target, lose.target))


def draw_levels(keys: Key, schedule: Schedule, config: NoisingConfig) -> tuple[Tensor, Tensor | None]:
    """Return noise levels `[B, each]` and the timesteps that the model is given for them, None if it is to derive them.

    Of the schedule a sample gets different steps; the others are drawn independently.
    """
    assert isinstance(keys.low, Tensor)
    batch, device = len(keys.low), keys.low.device
    levels, timesteps = schedule.levels.to(device), schedule.timesteps.to(device)
    steps, drawn = len(timesteps), fold_in(keys, Stream.LEVELS)
    if config.levels == "schedule":
        step = torch.argsort(uniform(drawn, (batch, steps)), dim=1)[:, : config.each]
        return levels[step], timesteps[step]
    if config.levels == "logit_normal":
        return torch.sigmoid(normal(drawn, (batch, config.each))), None
    # Along the schedule, so that levels lie towards noise as the scheduler's do.
    place = uniform(drawn, (batch, config.each)) * steps
    below = place.long().clamp(max=steps - 1)
    return torch.lerp(levels[below], levels[below + 1], place - below), None
