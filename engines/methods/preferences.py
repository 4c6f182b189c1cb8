"""Objectives that fit preferences: between pairs of samples, between their steps, and between the samples of a group."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fluvial.core import dgpo
from fluvial.core.checks import check_fields
from fluvial.core.dgpo import DgpoInfo
from fluvial.core.dpo import D3poInfo, DpoInfo, best_and_worst, clipped_log_ratio, d3po_loss, dpo_loss
from fluvial.core.random import Key
from fluvial.core.types import to_device
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import KLConfig, LossConfig, add_velocity_kl, log_prob_and_kl
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.batch import Batch, Record
from fluvial.engines.run.networks import Follower, Networks, Start, ramp
from fluvial.engines.run.run import Run
from fluvial.engines.sampling.items import NoisedSamples, Pairs, RecordedSteps

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig


def _dpo_needs(config: "TrainConfig", *, name: str = "dpo") -> Iterator[UsageError]:
    if config.kl.coef > 0:
        hint = f"{name} has the reference in its loss already; `objective.beta` weighs it"
        yield UsageError("kl.coef", config.kl.coef, "0", hint)


@dataclass(frozen=True)
class Dpo(Method):
    """Diffusion-DPO: fit the preferred of two samples more than the other (arXiv 2311.12908, 2501.13918).

    Online, the two are the best and the worst sample of each group of a rollout. Offline, they are read from a folder.

    Args:
        beta: Inverse temperature of the preference, without a unit. It includes the number of steps of the bound, so that
            thousands are usual.
        lose_weight: Weight of the rejected sample in the margin. Below 1 a run diverges less easily, because the policy
            gains less from getting worse at rejected samples.
        preferences: Folder of preferences as `fluvial preferences` writes it (preferences.jsonl and its images), or records
            like those of Pick-a-Pic and HPD; without one the pairs come from the rollout.
    """

    beta: float = 2000.0
    lose_weight: float = 1.0
    preferences: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, "objective", beta=(1e-12, math.inf), lose_weight=(0, 1e6))

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """A folder of preferences makes the objective offline."""
        return ObjectiveTraits(
            trains_on="preferences",
            rewards="order",
            takes_implementation=True,
            offline=self.preferences is not None,
            preferences=self.preferences,
            refuses=_dpo_needs,
        )

    def networks(self, kl: KLConfig) -> Networks:
        """Keep the policy that training starts from: the margin is relative to it."""
        return {"ref": Start(kl.guidance)}

    def collect(self, run: Run, key: Key) -> Batch:
        """Sample groups of images, or read pairs."""
        return run.sample(key) if self.preferences is None else run.read_pairs(key)

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Pair the best and the worst sample of each group, and fit the pairs at the same noise."""
        pairs = batch if batch.paired else self._pair_extremes(run, batch)
        for part in run.minibatches(run.noise_samples(pairs, key), key):
            yield run.update(run.predict(part, "ref"), self.loss)

    def _pair_extremes(self, run: Run, batch: Batch) -> Batch:
        """Return the best and the worst sample of each group as pairs; groups with equal rewards have none."""
        chosen = best_and_worst(run.reward(batch), batch.group)
        return run.pair(batch, batch.kept[chosen.win[chosen.valid]], batch.kept[chosen.lose[chosen.valid]])

    def loss(self, v: Tensor, items: Pairs, config: LossConfig) -> tuple[Tensor, DpoInfo]:
        """Return `dpo.dpo_loss`; an item holds the preferred sample and the other, `[P, 2, *event]`."""
        policies = v, items.predictions["ref"]
        errors = [config.error(each[:, i], items.target[:, i]) for each in policies for i in (0, 1)]
        return dpo_loss(*errors, beta=self.beta, lose_weight=self.lose_weight)


def _d3po_needs(config: "TrainConfig") -> Iterator[UsageError]:
    rollout = config.rollout
    if rollout.sampler.is_deterministic:
        expected = "ddim or flow_sde, whose steps have the log-probability that d3po needs"
        yield UsageError("rollout.sampler", rollout.sampler.kind, expected)
    if config.minibatches > 1:
        yield UsageError("minibatches", config.minibatches, "1", "d3po's pairs belong together in one update")
    if rollout.trained.kind == "random":
        yield UsageError("rollout.trained", "random", "all or first", "d3po compares both samples at the same steps")
    yield from _dpo_needs(config, name="d3po")


@dataclass(frozen=True)
class D3po(Method):
    """D3PO's loss: a preference between the best and the worst sample of a group, step by step (arXiv 2311.13231).

        -log sigmoid(beta (log clip(rho_best) - log clip(rho_worst))),  rho = p(x_next | x) / p_ref(x_next | x)

    Args:
        beta: Inverse temperature of the preference, without a unit.
        eps: Half-width of the clip of the ratio to the reference, which is per dimension.
    """

    beta: float = 0.1
    eps: float = 0.1
    traits = ObjectiveTraits(trains_on="steps", rewards="order", takes_implementation=True, refuses=_d3po_needs)
    record = Record()

    def __post_init__(self) -> None:
        check_fields(self, "objective", beta=(1e-12, math.inf), eps=(1e-12, 1 - 1e-6))

    def networks(self, kl: KLConfig) -> Networks:
        """Keep the policy that training starts from: ratios are relative to it."""
        return {"ref": Start(kl.guidance)}

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Compare each step of the best sample of a group with the same step of its worst."""
        preferred = self.prefer(run.grade(batch).reward, batch.group)
        steps = run.record_steps(batch, key, preferred, keep=(preferred != 0).to(preferred.dtype))
        side, group = batch.spread(preferred), torch.arange(batch.share.batch) // batch.compared
        partner = (group[:, None] == group) & (side[:, None] * side == -1)  # [B, B]
        for part in run.minibatches(steps, key):
            part = run.predict(part, "ref")
            ratios = run.gather(part, run.measure(part, partial(self._log_ratio, config=LossConfig())))
            part = part.with_rows(context=part.look_up(to_device(partner.to(ratios.dtype), ratios.device) @ ratios))
            yield run.update(part, self.loss)

    def prefer(self, reward: Tensor, group: Tensor) -> Tensor:
        """Return 1 for the best sample of each group, -1 for the worst, else 0; groups with equal rewards have none."""
        chosen, preferred = best_and_worst(reward, group), torch.zeros_like(reward)
        preferred[chosen.win[chosen.valid]], preferred[chosen.lose[chosen.valid]] = 1.0, -1.0
        return preferred

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, D3poInfo]:
        """Return `dpo.d3po_loss`."""
        own, other, preferred = self._log_ratio(v, items, config), items.context, items.signal
        assert other is not None
        loss = d3po_loss(own, other, preferred, beta=self.beta)
        margin = (self.beta * preferred * (own - other)).detach()
        edge = (own.detach().exp() - 1).abs() >= self.eps * (1 - 1e-5)
        return 2 * loss, D3poInfo(self.beta * own.detach(), margin, (margin > 0).to(margin.dtype), edge.to(margin.dtype))

    def _log_ratio(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> Tensor:
        both = v, items.predictions["ref"]
        log_prob, reference = (log_prob_and_kl(each, items, config, v_ref=None)[0] for each in both)
        return clipped_log_ratio(log_prob, reference, eps=self.eps)


def _dgpo_needs(config: "TrainConfig") -> Iterator[UsageError]:
    if not config.noising.is_shared:
        yield UsageError("noising.draw", config.noising.draw, "rollout", "dgpo compares samples at the same levels")
    if config.minibatches > 1:
        yield UsageError("minibatches", config.minibatches, "1", "dgpo's groups belong together in one update")
    if config.advantage.drop_zero:
        yield UsageError("advantage.drop_zero", True, "False", "dgpo weighs whole groups")


@dataclass(frozen=True)
class Dgpo(Method):
    """DGPO's loss: a matching error, weighted by the advantage and by how little its group is preferred (arXiv 2510.08425).

        loss = w_g A |v - (noise - x0)|^2,  w_g = sigmoid(beta / G sum_g A (error - error_ref)),  both means over the event

    An old policy, a fast moving average, gives the ratio exp(error_old - error) that is clipped. After each rollout it
    becomes d old + (1 - d) policy, with d = min(old_rise (n - 1), old_cap) after n updates.

    Args:
        beta: Inverse temperature of the preference of a group, without a unit.
        clip_low: Lower half-width of the clip of the ratio; beyond it an item adds no gradient.
        clip_high: Upper half-width of the clip.
        old_rise: Growth of the decay d per update.
        old_cap: Largest decay d, below 1.
        old_samples_from: Number of updates after which the old policy makes the rollouts; None: the policy makes them.
        reference: Policy of error_ref: base (the one that training starts from) or old (TDM-R1, arXiv 2603.07700).
    """

    beta: float = 100.0
    clip_low: float = 1e-2
    clip_high: float = 1e-2
    old_rise: float = 0.001
    old_cap: float = 0.3
    old_samples_from: int | None = None
    reference: Literal["base", "old"] = "base"
    traits = ObjectiveTraits(
        trains_on="noised", flows_only=True, takes_kl=True, takes_implementation=True, refuses=_dgpo_needs
    )

    def __post_init__(self) -> None:
        any_size = (0, math.inf)
        own = {"old_rise": (0, 1), "old_cap": (0, 0.999999), "old_samples_from": any_size}
        check_fields(self, "objective", beta=(1e-12, math.inf), clip_low=(0, 1), clip_high=any_size, **own)

    def networks(self, kl: KLConfig) -> Networks:
        """Keep an old policy that follows the policy fast, and the policy that training starts from."""
        start = None if self.old_samples_from is None else self.old_samples_from + 1
        decay = partial(ramp, rise=self.old_rise, cap=self.old_cap, delay=1)
        return {"old": Follower(decay, samples_from=start), "ref": Start(kl.guidance), **kl.networks()}

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Weigh each item by its advantage, and by the sigmoid of its group's margin at its level."""
        grades = run.grade(batch)
        items = run.noise_samples(batch, key, grades.advantage, keep=grades.keep)
        group = torch.arange(batch.share.batch) // batch.compared
        for part in run.minibatches(items, key):
            part = run.predict(part, "old", "ref", "ema")
            margins = run.gather(part, run.measure(part, self.margin))
            counts = to_device((part.used != 0).to(margins.dtype), margins.device)
            weight = dgpo.group_weight(margins, to_device(group, margins.device), counts=counts)
            yield run.update(part.with_rows(context=part.look_up(weight)), self.loss)

    def margin(self, v: Tensor, items: NoisedSamples) -> Tensor:
        """Return what each item adds to the argument of its group's sigmoid."""
        reference = items.predictions["ref" if self.reference == "base" else "old"]
        error, error_ref = (LossConfig().error(each, items.target) for each in (v, reference))
        return dgpo.preference_margin(error, error_ref, items.signal, beta=self.beta)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, DgpoInfo]:
        """Return `dgpo.dgpo_loss`."""
        assert items.context is not None
        error, error_old = (config.error(each, items.target) for each in (v, items.predictions["old"]))
        loss, info = dgpo.dgpo_loss(
            error, error_old, items.signal, items.context, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, info._replace(kl_ref=kl)
