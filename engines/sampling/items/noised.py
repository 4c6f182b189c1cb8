"""Noised clean samples, single or in pairs: the items of methods that need no recorded steps."""

from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import first_block
from fluvial.core.distill import ambient_velocity, renoise
from fluvial.core.random import Key, fold_in, normal
from fluvial.engines.sampling.items.steps import RecordedSteps
from fluvial.engines.sampling.noising import Levels, NoisingConfig, add_noise, draw_levels
from fluvial.engines.streams import Stream
from fluvial.models import Prediction, Schedule
from fluvial.models.host_values import to_device

TENTHS = 10


class NoisedSamples(NamedTuple):
    """P noised clean samples, each field `[P, ...]`."""

    x: Tensor  # noised sample, input of the model
    level: Tensor  # its noise level: sigma (flow) or alpha_bar (epsilon prediction); [P, R] if its R rows have their own
    timestep: Tensor | None  # timestep for the model; None if the model derives it from the level
    sample: Tensor  # int64, index of the conditioning, which all items of a sample share
    signal: Tensor  # number per sample from the method, e.g. the advantage
    weight: Tensor  # weight in the loss: 1, or 0 for padding
    x0: Tensor  # clean sample
    target: Tensor  # regression target of the model: noise - x0, or the noise for epsilon prediction
    predictions: dict[str, Tensor]  # predictions of other networks at x, by name: old, ref, teacher, ema
    place: Tensor | None = None  # int64, index of the item among the B * M of all ranks; B * M for a repeat
    context: Tensor | None = None  # values that the method computed from all items

    def find_parts(self, levels: Tensor) -> Tensor:
        """Return which tenth of the noise levels from 0 to 1 each item is in, bool `[P, 10]`."""
        return find_tenth(self.level)


class RenoisedSamples(NamedTuple):
    """P samples x_s of a flow with noise up to a higher level t, each field `[P, ...]`."""

    x: Tensor  # renoised sample x_t, input of the model
    level: Tensor  # its noise level t
    timestep: Tensor | None  # None: the model derives it from the level
    sample: Tensor  # int64, index of the conditioning, which all items of a sample share
    signal: Tensor  # number per sample from the method, e.g. the advantage
    weight: Tensor  # weight in the loss: 1, or 0 for padding
    start: Tensor  # sample x_s
    start_level: Tensor  # its noise level s, 0 for a clean sample
    noise: Tensor
    predictions: dict[str, Tensor]  # predictions of other networks at x, and further tensors of the method, by name
    place: Tensor | None = None  # int64, index of the item among the B * M of all ranks; B * M for a repeat
    context: Tensor | None = None  # values that the method computed from all items

    @property
    def target(self) -> Tensor:
        """Regression target of a model of the samples, `core.distill.ambient_velocity`."""
        return ambient_velocity(self.start, self.noise, self.start_level, self.level)

    def find_parts(self, levels: Tensor) -> Tensor:
        """Return which tenth of the noise levels from 0 to 1 each item is in, bool `[P, 10]`."""
        return find_tenth(self.level)


class Pairs(NamedTuple):
    """P pairs of clean samples, noised to the same level with the same noise, the preferred sample first."""

    x: Tensor  # [P, 2, *event], noised samples, input of the model
    level: Tensor  # [P], their noise level
    timestep: Tensor | None  # [P], timestep for the model; None if the model derives it from the level
    sample: Tensor  # [P] int64, index of the conditioning
    weight: Tensor  # [P], weight in the loss: 1, or 0 for padding
    target: Tensor  # [P, 2, *event], regression target of the model
    predictions: dict[str, Tensor]  # predictions of other networks at x, by name: old, ref, teacher, ema
    place: Tensor | None = None  # int64, index of the item among the B * M of all ranks; B * M for a repeat

    def find_parts(self, levels: Tensor) -> Tensor:
        """Return which tenth of the noise levels from 0 to 1 each pair is in, bool `[P, 10]`."""
        return find_tenth(self.level)


def find_tenth(level: Tensor) -> Tensor:
    """Return which tenth of [0, 1] each level is in, bool `[P, 10]`; with levels per block, the first block counts."""
    tenth = (first_block(level) * TENTHS).long().clamp(0, TENTHS - 1)
    return tenth[:, None] == torch.arange(TENTHS, device=tenth.device)


def make_noised_samples(
    x0: Tensor,
    keys: Key,
    signal: Tensor,
    weight: Tensor,
    schedule: Schedule,
    config: NoisingConfig,
    prediction: Prediction,
    *,
    level_keys: Key | None = None,
) -> NoisedSamples:
    """Noise each sample to `config.each` levels: item m * B + i is sample i at its m-th level.

        x_t = (1 - sigma) x0 + sigma noise, target = noise - x0                        flow
        x_t = sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) noise, target = noise           epsilon prediction

    Args:
        x0: clean samples `[B, *event]`.
        keys: key per sample, which determines its levels and its noise.
        signal: number per sample from the method, `[B]`.
        weight: weight in the loss, `[B]`.
        schedule: the model's schedule.
        config: number and distribution of the levels.
        prediction: what the model predicts.
        level_keys: key per sample for the levels alone; by default `keys`.
    """
    batch, each = len(x0), config.each
    levels, timesteps = draw_levels(level_keys or keys, schedule, config)
    parts = []
    for m in range(each):
        noise_keys = fold_in(fold_in(keys, Stream.NOISE), 0 if config.is_shared else m)
        noise = normal(noise_keys, tuple(x0.shape), dtype=x0.dtype)
        parts.append(add_noise(x0, noise, levels[:, m], prediction=prediction))
    return NoisedSamples(
        x=torch.cat([x for x, _ in parts]),
        level=levels.transpose(0, 1).flatten(0, 1),
        timestep=None if timesteps is None else timesteps.T.flatten(),
        sample=to_device(torch.arange(batch).repeat(each), x0.device),
        signal=signal.repeat(each),
        weight=weight.repeat(each),
        x0=x0.repeat(each, *[1] * (x0.ndim - 1)),
        target=torch.cat([target for _, target in parts]),
        predictions={},
    )


def make_renoised_samples(
    rows: RecordedSteps,
    start: Tensor,
    level: Tensor,
    bounds: tuple[Tensor, Tensor],
    keys: Key,
    schedule: Schedule,
    levels: Levels,
) -> RenoisedSamples:
    """Noise one flow sample per recorded step to a higher level: item i belongs to row i.

    Args:
        rows: recorded steps, `[P, ...]`.
        start: sample per step, `[P, *event]`, e.g. the step's end, or the predicted clean sample.
        level: noise level s of these samples, `[P]`.
        bounds: levels (low, high), `[P]` each; a draw u in [0, 1] is the level t = low + (high - low) u.
        keys: key per row, `[P]`.
        schedule: the model's schedule.
        levels: distribution of u.
    """
    drawn, _ = draw_levels(keys, schedule, NoisingConfig(each=1, levels=levels).choose_levels(on_schedule=False))
    low, high = bounds
    noisy = low + (high - low) * drawn[:, 0]
    noise = normal(fold_in(keys, Stream.NOISE), tuple(start.shape), dtype=start.dtype)
    return RenoisedSamples(
        x=renoise(start, noise, level, noisy).to(start.dtype),
        level=noisy,
        timestep=None,
        sample=rows.sample,
        signal=rows.signal,
        weight=rows.weight,
        start=start,
        start_level=level,
        noise=noise,
        predictions={},
        place=rows.place,
    )


def make_noised_pairs(
    win: Tensor,
    lose: Tensor,
    keys: Key,
    weight: Tensor,
    schedule: Schedule,
    config: NoisingConfig,
    prediction: Prediction,
    *,
    level_keys: Key | None = None,
) -> Pairs:
    """Noise each pair to `config.each` levels: item m * B + i is pair i at its m-th level.

    Args:
        win, lose: preferred and rejected samples, `[B, *event]`.
        keys, weight, schedule, config, prediction, level_keys: see `make_noised_samples`.
    """
    better, worse = (
        make_noised_samples(x0, keys, weight, weight, schedule, config, prediction, level_keys=level_keys)
        for x0 in (win, lose)
    )
    return Pairs(
        x=torch.stack([better.x, worse.x], dim=1),
        level=better.level,
        timestep=better.timestep,
        sample=better.sample,
        weight=better.weight,
        target=torch.stack([better.target, worse.target], dim=1),
        predictions={},
    )
