"""A batch of samples with their rewards, and the items of an update: (sample, noise level) pairs.

Device tensors hold this rank's samples; host tensors hold all ranks', in the order of the batch.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import optree
import torch
from torch import Tensor

from fluvial.core.checks import first_block
from fluvial.core.random import Key, fold_in
from fluvial.core.rollout import Trajectory
from fluvial.core.table import step_coefficients
from fluvial.core.transitions import Transition
from fluvial.engines.data.records import Prompt, copy_prompts
from fluvial.engines.data.sizes import Size
from fluvial.engines.errors import UsageError
from fluvial.engines.sampling import items as rows_of
from fluvial.engines.sampling.generate import Requests, SampleBatch, Sampling
from fluvial.engines.sampling.items import Rows, Share
from fluvial.engines.sampling.noising import Levels, NoisingConfig
from fluvial.engines.sampling.text import Padding
from fluvial.engines.sampling.window import AllRecorded, Trained
from fluvial.engines.scoring.gather import Rewards, Scoring
from fluvial.engines.streams import Stream
from fluvial.models import Cond, Prediction, host_values
from fluvial.models.host_values import to_device

ALL_RECORDED = AllRecorded()


class RolloutSpec(NamedTuple):
    """Specification of a rollout: which samples, and how they are generated."""

    asked: list[Prompt]  # prompt of each group (or each sample), the same on every rank
    requests: Requests  # of this rank
    sampling: Sampling
    numbers: list[int]  # index of each sample in the rollout, -1 for a repeat
    size: Size | None  # of the samples; None if all have one size
    padding: Padding | None  # of the prompts; None if it is not trimmed
    group: int  # number of consecutive samples with the same prompt
    per_pass: int  # samples per pass of the rollout
    transitions: Transition | None = None  # `step_coefficients` of the schedule, if steps are recorded


@dataclass(frozen=True)
class Batch:
    """Samples of a rollout or a dataset, or pairs of samples; reading samples that are generated ahead waits for them.

    Args:
        spec: specification of the rollout.
        share: which samples of the batch this rank holds.
        ids: index of each sample in the noise streams.
        compared: number of consecutive samples that are compared with each other.
        prediction: what the model predicts.
        made: the samples; final samples of pairs are `[slots, 2, *event]`, the preferred one first.
        scoring: pending scores; None without rewards.
        version: number of updates of the weights that generate the samples.
        rewards: rewards of all samples, once gathered.
        paired: whether the samples are pairs.
        skipped: samples with loss 0 that still count in its average, bool `[B]` on the host; None skips none.
    """

    spec: RolloutSpec
    share: Share
    ids: Sequence[int]
    compared: int
    prediction: Prediction
    made: Future[SampleBatch]
    scoring: Scoring | None = None
    version: int = 0
    rewards: Rewards | None = None
    paired: bool = False
    skipped: Tensor | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompt of each sample of this rank (a copy)."""
        return copy_prompts(self.made.result().prompts)

    @property
    def cond(self) -> Cond:
        """Conditioning of this rank's samples, a pytree of tensors `[slots, ...]`."""
        return self.made.result().cond

    @property
    def trajectory(self) -> Trajectory:
        """Recorded steps and final samples of this rank."""
        return self.made.result().trajectory

    @property
    def thumbnails(self) -> Tensor | None:
        """Averaged pixels of this rank's samples, `[slots, D]`; None for samples of a dataset."""
        return self.made.result().thumbnails

    @property
    def samples(self) -> int:
        """Number of samples of all ranks."""
        return self.share.batch * (2 if self.paired else 1)

    @cached_property
    def kept_ids(self) -> Tensor:
        """Index of each sample that is trained on, `[N]`: with rewards, those whose group has valid ones."""
        if self.rewards is None or self.paired:
            return torch.arange(self.share.batch)
        return torch.nonzero(self.rewards.kept).flatten()

    @property
    def group(self) -> Tensor:
        """Group of each sample that is trained on, `[N]`."""
        return self.kept_ids // self.compared

    @property
    def noise(self) -> Tensor:
        """Standard deviation of each step's noise, `[T]`, on the host (the first row's, if rows have their own levels)."""
        sampling = self.spec.sampling
        assert sampling.stochastic is not None
        return first_block(step_coefficients(sampling.stochastic.transition, sampling.schedule.levels).std)

    def prompt(self, number: int) -> Prompt:
        """Return (a copy of) the prompt of a sample of any rank, by its index in the batch."""
        return copy_prompts([self.spec.asked[number * len(self.spec.asked) // self.share.batch]])[0]

    def spread(self, values: Tensor) -> Tensor:
        """Scatter values of the samples that are trained on to all samples, `[N, ...] -> [B, ...]`, 0 elsewhere."""
        everyone = values.new_zeros((self.share.batch, *values.shape[1:]))
        everyone[self.kept_ids] = values
        return everyone


@dataclass(frozen=True)
class Items:
    """The items of an update: this rank's rows, and which of the M items per sample are used, over all ranks.

    Args:
        rows: this rank's items.
        cond: conditioning, a pytree of tensors `[slots, ...]` that `rows.sample` indexes.
        used: 1 for the items that contribute to the loss, `[B, M]` on the host.
        count: divisor of the summed losses.
        batch: batch of the samples.
        pad_to: largest number of rows on any rank.
        real: number of rows of this rank that are not padding.
        dealt: whether unused rows are dropped and the rest is spread evenly over the ranks.
    """

    rows: Any
    cond: Cond
    used: Tensor
    count: float
    batch: Batch
    pad_to: int
    real: int
    dealt: bool = False

    def with_rows(self, **fields: Any) -> Self:
        """Return the items with fields of their rows replaced."""
        return replace(self, rows=self.rows._replace(**fields))

    def with_predictions(self, **predictions: Tensor) -> Self:
        """Return the items with the predictions of further networks."""
        return self.with_rows(predictions={**self.rows.predictions, **predictions})

    def take(self, chosen: slice) -> Self:
        """Return a subset of each sample's M items, e.g. its first two steps."""
        used = torch.zeros_like(self.used)
        used[:, chosen] = self.used[:, chosen]
        return replace(self, used=used, count=self.count * used[:, chosen].shape[1] / used.shape[1])

    def part(self, rows: slice) -> Self:
        """Return a slice of this rank's rows, for forward passes (an update needs all rows)."""
        chosen = optree.tree_map(lambda tensor: host_values.select_rows(tensor, rows), self.rows)
        return replace(self, rows=chosen, pad_to=len(chosen.level), real=len(chosen.level))

    def look_up(self, table: Tensor) -> Tensor:
        """Look up each row in a table of all items, `[B, M, ...] -> [P, ...]`, 0 for repeats."""
        flat = to_device(table, self.rows.place.device).flatten(0, 1)
        return torch.cat([flat, torch.zeros_like(flat[:1])])[self.rows.place]


def record_steps(
    batch: Batch,
    key: Key,
    signal: Tensor | None = None,
    *,
    trained: Trained = ALL_RECORDED,
    keep: Tensor,
    skip_zero: bool = False,
) -> Items:
    """Return the recorded steps of a batch that are trained on.

    Args:
        signal: number per sample that is trained on, `[N]`, or per recorded step, `[N, S]`, e.g. the advantage; 1 if None.
        trained: which recorded steps are trained on, drawn from `key`.
        keep: 1 for the samples, `[N]`, or steps, `[N, S]`, that the loss is averaged over.
        skip_zero: whether items with signal 0 have no gradient, so that they need no forward pass.
    """
    total, number = batch.share.batch, batch.trajectory.log_prob.shape[1]
    weights = _Weights.of(batch, signal, keep, skip_zero=skip_zero, steps=number)
    assert batch.spec.transitions is not None
    schedule = batch.spec.sampling.schedule
    rows = rows_of.make_recorded_steps(batch.trajectory, schedule, batch.spec.transitions, weights.signal, weights.weight)
    return _items(batch, rows, trained.mask(fold_in(key, Stream.FRACTION), total, number), weights)


def noise_samples(
    batch: Batch,
    noising: NoisingConfig,
    key: Key,
    signal: Tensor | None = None,
    *,
    keep: Tensor | None = None,
    skip_zero: bool = False,
) -> Items:
    """Return the clean samples, or pairs, of a batch with noise; for the other arguments see `record_steps`."""
    weights = _Weights.of(batch, signal, keep, skip_zero=skip_zero)
    keys, level_keys = _noising_keys(batch, noising, key)
    final, schedule = batch.trajectory.final, batch.spec.sampling.schedule
    rows: Rows
    if batch.paired:
        win, lose = final.unbind(1)
        rows = rows_of.make_noised_pairs(
            win, lose, keys, weights.weight, schedule, noising, batch.prediction, level_keys=level_keys
        )
    else:
        rows = rows_of.make_noised_samples(
            final, keys, weights.signal, weights.weight, schedule, noising, batch.prediction, level_keys=level_keys
        )
    return _items(batch, rows, torch.ones(batch.share.batch, noising.each), weights)


def renoise(
    items: Items,
    x: Tensor,
    level: Tensor,
    levels: Levels,
    key: Key,
    *,
    lowest: Tensor | None = None,
    highest: Tensor | None = None,
    shared: bool = False,
    draw: int = 0,
) -> Items:
    """Return a noisy sample for each row of recorded steps, in their order.

    Args:
        x: sample at `level`, `[P, *event]`.
        level: noise level of x, `[P]`.
        levels: distribution of the noisy levels: 0 stands for `lowest`, and 1 for `highest`.
        key: key of the draw; a row's draw depends on the key and the row's place alone.
        lowest, highest: levels, `[P]`; by default `level` and 1.
        shared: draw the same for all rows of a group.
        draw: index of the draw, for several draws from one key.
    """
    bounds = level if lowest is None else lowest, torch.ones_like(level) if highest is None else highest
    keys = row_keys(items, key, draw, stream=Stream.RENOISING, shared=shared)
    schedule = items.batch.spec.sampling.schedule
    return replace(items, rows=rows_of.make_renoised_samples(items.rows, x, level, bounds, keys, schedule, levels))


def row_keys(items: Items, key: Key, draw: int = 0, *, stream: Stream = Stream.STEPPING, shared: bool = False) -> Key:
    """Return a key per row, `[P]`, that depends on the row's place alone, for random numbers of a method.

    Args:
        draw: index of the draw, for several draws from one key.
        shared: whether the rows of a group have one key.
    """
    place = items.rows.place
    if shared:
        place = place // (items.used.shape[1] * items.batch.compared)
    return fold_in(fold_in(fold_in(key, stream), draw), place)


def return_to(batch: Batch, key: Key, count: int, *, keep: Tensor) -> Items:
    """Return the samples of a batch before the last `count` steps, with the noise that these steps took."""
    weights = _Weights.of(batch, None, keep, skip_zero=False)
    rows = rows_of.last_steps(batch.trajectory, batch.spec.sampling.schedule, batch.share, key, count, weights.weight)
    return _items(batch, rows, torch.ones(batch.share.batch, 1), weights)


class _Weights(NamedTuple):
    """Weights of samples in the loss, 1 or M per sample: this rank's on the device, all ranks' on the host."""

    weight: Tensor  # [slots], 0 for repeats
    signal: Tensor  # [slots], or [slots, M]
    computed: Tensor  # [B, 1 or M], 0 for items that contribute nothing to the loss
    counted: Tensor  # [B, 1 or M], 0 for items that are not in the loss's average

    @classmethod
    def of(
        cls, batch: Batch, signal: Tensor | None, keep: Tensor | None, *, skip_zero: bool, steps: int | None = None
    ) -> "_Weights":
        ones = torch.ones(len(batch.kept_ids))
        for name, values in {"signal": signal, "keep": keep}.items():
            if values is not None and values.shape not in (ones.shape, (*ones.shape, steps)):
                expected = f"{[*ones.shape]}, a number per sample"
                expected += "" if steps is None else f", or {[*ones.shape, steps]}, one per recorded step"
                raise UsageError(f"{name} has shape {[*values.shape]}, expected {expected}")
        if signal is not None and not torch.isfinite(signal).all():
            raise UsageError("signal is not finite, expected finite numbers")
        signal = batch.spread(ones if signal is None else signal)
        counted, taught = batch.spread(ones if keep is None else keep), (signal != 0).to(ones.dtype)
        counted, taught = (each[:, None] if each.ndim == 1 else each for each in (counted, taught))
        computed = counted * taught if skip_zero else counted
        if batch.skipped is not None:
            computed = computed * ~batch.skipped[:, None]
        device = batch.trajectory.final.device
        weight = to_device(batch.share.rows(torch.ones(batch.share.batch)), device)
        return cls(weight, to_device(batch.share.rows(signal), device), computed, counted)


def _items(batch: Batch, rows: Any, used: Tensor, weights: _Weights) -> Items:
    """Return items of rows, M per sample, with their places."""
    share, each = batch.share, used.shape[1]
    numbers = share.first + torch.arange(share.slots)
    places = torch.where(numbers < share.batch, numbers * each + torch.arange(each)[:, None], share.batch * each)
    rows = rows._replace(place=to_device(places.flatten(), rows.level.device))
    count, size = int((used * weights.counted).sum()), len(rows.level)
    return Items(rows, batch.cond, used * weights.computed, count, batch, size, size)


def _noising_keys(batch: Batch, noising: NoisingConfig, key: Key) -> tuple[Key, Key | None]:
    """Return a key per sample for the noise, from the id of the sample or its group, and one for the levels."""
    root = fold_in(key, Stream.NOISING)
    ids = to_device(torch.tensor(list(batch.ids)), batch.trajectory.final.device)
    if noising.is_shared:
        ids = ids // batch.spec.group
        return fold_in(root, ids), fold_in(root, torch.zeros_like(ids))
    return fold_in(root, ids), fold_in(root, ids // batch.spec.per_pass) if noising.draw == "call" else None


def replace_groups(
    batch: Batch, spec: RolloutSpec, samples: SampleBatch, scoring: Scoring, groups: Sequence[int], held: SampleBatch
) -> Batch:
    """Return a batch with the samples and scores of some groups replaced.

    Args:
        spec: specification of the new samples.
        samples: this rank's new samples, followed by repeats.
        scoring: their scores, already collected.
        groups: indices of the groups.
        held: this rank's samples of the batch, with conditioning of the same length as that of `samples`.
    """
    slots, prompts = batch.share.slots, list(held.prompts)
    slot_of = {number: slot for slot, number in enumerate(batch.spec.numbers)}
    index = torch.arange(slots)
    for row, number in enumerate(spec.numbers):
        if number >= 0:
            prompts[slot_of[number]], index[slot_of[number]] = samples.prompts[row], slots + row
    places = to_device(index, held.trajectory.final.device)
    tensors = [(each.cond, each.trajectory, each.thumbnails) for each in (held, samples)]
    merged = optree.tree_map(lambda old, new: host_values.select_rows(host_values.join(old, new), places), *tensors)
    assert batch.scoring is not None
    replaced = torch.zeros(len(spec.asked), dtype=torch.bool)
    replaced[list(groups)] = True
    return replace(
        batch,
        spec=spec._replace(requests=batch.spec.requests._replace(prompts=prompts), numbers=batch.spec.numbers),
        made=make_batch(SampleBatch(prompts, *merged)),
        scoring=batch.scoring.replace(scoring, replaced.repeat_interleave(spec.group)),
        rewards=None,
    )


def make_batch(samples: SampleBatch) -> Future[SampleBatch]:
    """Return finished samples as the future that a batch holds."""
    made = Future[SampleBatch]()
    made.set_result(samples)
    return made
