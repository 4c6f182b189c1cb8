"""What is learnt from a rollout: its samples become a flat set of pairs, and these an update or several."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core.advantages import group_advantages, multi_reward_advantages
from fluvial.core.correction import CorrectionInfo, rollout_weights
from fluvial.core.dpo import best_and_worst
from fluvial.core.random import Key, fold_in, uniform
from fluvial.core.rollout import Trajectory
from fluvial.engines.data.preferences import Preference
from fluvial.engines.fsdp.engine import Engine, UpdateInfo
from fluvial.engines.fsdp.world import World
from fluvial.engines.objectives.table import LossConfig, Nft
from fluvial.engines.rollout.generate import SampleBatch
from fluvial.engines.rollout.items import Items, flatten, rebalance, select
from fluvial.engines.rollout.noising import noised, preferred
from fluvial.engines.rollout.streams import Stream
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.job import Job
from fluvial.engines.train.policies import Policies, velocities
from fluvial.kernels import step_log_prob
from fluvial.models import Cond, Schedule
from fluvial.models.guidance import guided_velocity


class Learnt(NamedTuple):
    """What a rollout's updates did."""

    updates: list[UpdateInfo]
    correction: CorrectionInfo | None


class Samples(NamedTuple):
    """Which of a batch's samples this rank holds: `first`, first + 1, ... of `batch`; a slot past the end is a repeat."""

    first: int
    slots: int
    batch: int

    def rows(self, values: Tensor) -> Tensor:
        """Return this rank's part of a number for each sample of the batch `[B, ...]`, 0 for the repeats."""
        spread = values.new_zeros((self.first + self.slots, *values.shape[1:]))
        held = min(self.batch, len(spread))
        spread[:held] = values[:held]
        return spread[self.first :]


class Work(NamedTuple):
    """What the updates of a rollout are made from."""

    items: Items  # M * slots pairs of this rank, ordered as `adds.T`
    cond: Cond  # a pytree of tensors `[slots, ...]`
    adds: Tensor  # [B, M], 0 for pairs of all ranks that add nothing to the loss and need not be computed
    count: int  # pairs that the loss is averaged over, including those that need not be computed
    samples: Samples
    correction: CorrectionInfo | None = None


class Learner:
    """Makes the updates of a run out of its rollouts.

    Args:
        config, job, world: of the run.
        engine: whose module is trained.
        policies: the policies that the objective compares with.
        schedule: its timesteps on the device.
    """

    def __init__(
        self, config: TrainConfig, job: Job, world: World, engine: Engine, policies: Policies, schedule: Schedule
    ) -> None:
        self.config, self.job, self.world, self.engine, self.policies = config, job, world, engine, policies
        self.schedule = schedule
        self.sampler = config.rollout.bound_sampler(schedule.levels, job.model.prediction)
        self.loss_config = LossConfig(
            config.rollout.form, config.rollout.reduction, config.kl.coef, config.kl.weight, config.implementation
        )
        # An item of preferences is two samples, and the model sees both.
        self.width = 2 if config.objective.trains_on == "preferences" else 1
        self.micro_batch = max(config.micro_batch // self.width, 1)

    def advantages(self, rewards: Tensor, weights: Tensor, group: Tensor) -> Tensor:
        """Return the advantages `[B]` of rewards `[B, K]` of which each has a weight."""
        config = self.config.advantage
        if config.combine == "gdpo" and rewards.shape[1] > 1:
            advantage = multi_reward_advantages(rewards, weights, group, scale=config.scale, eps=config.eps)
        else:
            advantage = group_advantages(rewards @ weights, group, scale=config.scale, eps=config.eps)
        return advantage if config.clip is None else advantage.clamp(-config.clip, config.clip)

    def items(self, samples: SampleBatch, rewards: Tensor, weights: Tensor, key: Key) -> Work:
        """Return the items of one rollout; every rank must take part.

        Args:
            samples: samples of this rank.
            rewards: rewards of all samples `[B, K]`, on the host.
            weights: weight of each reward `[K]`.
            key: key of the rollout.
        """
        config, objective, batch = self.config, self.config.objective, self.config.rollout.batch
        group = torch.arange(batch) // config.rollout.group
        reward = rewards @ weights
        if objective.trains_on == "preferences":
            return self._best_and_worst(samples, reward, group, key)
        advantage = self.advantages(rewards, weights, group) if rewards.shape[1] else torch.zeros(batch)
        target_weight = objective.target_weight(reward, advantage, group)
        slots = len(samples.prompts)
        mine = Samples(self.world.data_rank * slots, slots, batch)
        cond, trajectory = samples.cond, samples.trajectory
        device = self.world.device
        own_target_weight, own_weight = mine.rows(target_weight).to(device), mine.rows(torch.ones(batch)).to(device)
        # Which of a sample's pairs are learnt from, by their place in its row; the same on every rank.
        info = None
        if objective.trains_on == "steps":
            taken = self._fraction(trajectory.log_prob.shape[1], key)
            flat, info = self._recorded(trajectory, cond, own_target_weight, own_weight, mine)
        else:
            taken = torch.ones(batch, config.noising.each)
            keys = fold_in(fold_in(key, Stream.NOISING), torch.tensor(self._numbers(mine), device=device))
            flat = noised(
                trajectory.final,
                keys,
                own_target_weight,
                own_weight,
                self.schedule,
                config.noising,
                self.job.model.prediction,
            )
        # With a KL a pair adds something whatever its target_weight, unless it is none of those that are learnt from.
        every = not objective.skips_zero or (config.kl.coef > 0 and not objective.mean_over_kept)
        adds = taken if every else taken * (target_weight != 0).to(taken.dtype)[:, None]
        count = int((adds if objective.mean_over_kept else taken).sum())
        return Work(flat, cond, adds, count, mine, info)

    def preference_items(self, chosen: Sequence[Preference], numbers: Sequence[int], key: Key) -> Work:
        """Return the items of preferences; each rank takes its share of them.

        Args:
            chosen: preferences of this rollout, all of them on every rank.
            numbers: id of each preference, which its noise is drawn by.
            key: key of the rollout.
        """
        if not chosen:
            chosen, numbers, real = [self.job.blank_preference()], [0], 0
        else:
            real = len(chosen)
        slots = -(-len(chosen) // self.world.data_size)
        mine = Samples(self.world.data_rank * slots, slots, real)
        rows = [(mine.first + i) % len(chosen) for i in range(slots)]
        device, prompts = self.world.device, [chosen[row].prompt for row in rows]
        cond = optree.tree_map(
            lambda tensor: tensor.to(device), self.config.rollout.guidance.encode(self.job.model, prompts)
        )
        keys = fold_in(fold_in(key, Stream.NOISING), torch.tensor([numbers[row] for row in rows], device=device))
        ones = mine.rows(torch.ones(real)).to(device)
        win, lose = (
            noised(
                torch.stack([getattr(chosen[row], side) for row in rows]).to(device), keys, ones, ones, self.schedule,
                self.config.noising, self.job.model.prediction,
            )
            for side in ("win", "lose")
        )  # fmt: skip
        adds = torch.ones(real, self.config.noising.each)
        return Work(preferred(win, lose), cond, adds, int(adds.sum()), mine)

    def _best_and_worst(self, samples: SampleBatch, reward: Tensor, group: Tensor, key: Key) -> Work:
        """Return the items of the best and the worst sample of each group; a group whose rewards are equal has none."""
        found = best_and_worst(reward, group)
        places = torch.nonzero(found.valid).flatten().tolist()
        # The two may be on different ranks: every rank gets all clean samples, which are small beside what made them.
        everyone = self.world.gather_data(samples.trajectory.final)[: self.config.rollout.batch]
        by_rank = self.world.gather_items(list(samples.prompts))[:: self.world.sequence]
        prompts = [prompt for part in by_rank for prompt in part]
        win, lose = found.win.tolist(), found.lose.tolist()
        chosen = [Preference(prompts[i], everyone[win[i]], everyone[lose[i]]) for i in places]
        return self.preference_items(chosen, [int(group[i]) for i in places], key)

    def _numbers(self, mine: Samples) -> list[int]:
        return [(mine.first + slot) % mine.batch for slot in range(mine.slots)]

    def _fraction(self, recorded: int, key: Key) -> Tensor:
        """Return 1 for the recorded steps of each sample that are trained on, else 0, `[B, S]`."""
        batch, fraction = self.config.rollout.batch, self.config.rollout.fraction
        if fraction == 1:
            return torch.ones(batch, recorded)
        drawn = uniform(fold_in(fold_in(key, Stream.FRACTION), torch.arange(batch)), (batch, recorded))
        place = torch.argsort(torch.argsort(drawn, dim=1), dim=1)
        return (place < max(round(fraction * recorded), 1)).float()

    def _recorded(
        self, trajectory: Trajectory, cond: Cond, target_weight: Tensor, weight: Tensor, mine: Samples
    ) -> tuple[Items, CorrectionInfo | None]:
        """Return the pairs of a trajectory; with a correction, old log-probs are computed anew, and weights with them."""
        flat = flatten(trajectory, self.schedule, target_weight, weight)
        correction = self.config.correction
        if correction.mode == "none":
            return flat, None
        recorded = trajectory.log_prob.shape[1]
        with self.engine.inference() as module:
            v_old = self._velocities(module, flat, cond, len(flat.level))
        assert flat.x_next is not None
        assert flat.level_next is not None
        chunks = []
        for start in range(0, len(flat.level), self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            transition = self.sampler(flat.level[rows], flat.level_next[rows])
            chunks.append(
                step_log_prob(
                    transition, flat.x[rows], v_old[rows], flat.x_next[rows], form=self.loss_config.form,
                    reduction=self.loss_config.reduction, implementation=self.loss_config.implementation,
                )[0]
            )  # fmt: skip
        log_prob = torch.cat(chunks)
        own = log_prob.unflatten(0, (recorded, -1)).T.contiguous()
        # Of all ranks, so that every one has the same diagnostics: they are a number a step.
        computed, known = (self.world.gather_data(values)[: mine.batch] for values in (own, trajectory.log_prob))
        factor, info = rollout_weights(
            computed, known, mode=correction.mode, threshold=correction.threshold, level=correction.level
        )
        flat = flat._replace(log_prob_old=log_prob, weight=flat.weight * mine.rows(factor).T.flatten())
        return flat if flat.v_old is None else flat._replace(v_old=v_old), info

    def update(self, work: Work, key: Key) -> Learnt:
        """Make the optimizer updates of a rollout; every rank must take part.

        Args:
            work: items of this rank.
            key: key of the rollout.
        """
        config, minibatches, flat, mine = self.config, self.config.minibatches, work.items, work.samples
        if self._old_comes_from_the_policy and config.updates_per_rollout > 1:
            # Its velocity must be known before the first update; with one update alone it is the policy's own.
            with self.engine.inference() as module:
                flat = flat._replace(v_old=self._velocities(module, flat, work.cond, len(flat.level)))
        infos = []
        for epoch in range(config.epochs):
            shuffled = uniform(fold_in(fold_in(key, Stream.MINIBATCH), epoch), (max(mine.batch, 1),)).argsort().argsort()
            part = shuffled[: mine.batch] * minibatches // max(mine.batch, 1)
            for minibatch in range(minibatches):
                chosen = work.adds * (part == minibatch)[:, None] if minibatches > 1 else work.adds
                infos.append(self._update(flat, work.cond, chosen, work.count / minibatches, mine))
        return Learnt(infos, work.correction)

    def _update(self, flat: Items, cond: Cond, adds: Tensor, count: float, mine: Samples) -> UpdateInfo:
        """Take one optimizer step on the pairs that add something, levelled over the ranks."""
        by_rank = torch.cat([adds, adds.new_zeros((self.world.data_size * mine.slots - len(adds), adds.shape[1]))])
        by_rank = by_rank.unflatten(0, (self.world.data_size, mine.slots))
        held = [int(number) for number in (by_rank != 0).sum((1, 2))]
        first: Items = optree.tree_map(lambda tensor: tensor[:1].clone(), flat)
        flat = select(flat, by_rank[self.world.data_rank].T.flatten())
        longest = -(-sum(held) // len(held))
        if -(-max(held) // self.micro_batch) > -(-longest // self.micro_batch):
            flat, cond = rebalance(flat, cond, held, self.world)
        else:  # moving pairs would save no forward pass
            longest = max(held)
        longest = max(longest, 1)
        if not len(flat.level):  # there has to be something to run
            flat = first._replace(weight=torch.zeros_like(first.weight))
        if self.policies.keeps_old:
            with self.policies.behaviour(self.engine) as module:
                flat = flat._replace(v_old=self._velocities(module, flat, cond, longest))
        if self.policies.needs_reference:
            with self.policies.referring(self.engine) as module:
                flat = flat._replace(v_ref=self._velocities(module, flat, cond, longest))
        if self.policies.teacher is not None:
            with self.policies.teaching() as module:
                flat = flat._replace(v_teacher=self._velocities(module, flat, cond, longest))
        return self.engine.update(
            flat,
            lambda batch: self._loss(batch, cond),
            flat.weight,
            count=max(count, 1),
            micro_batch=self.micro_batch,
            pad_to=longest,
        )

    @property
    def _old_comes_from_the_policy(self) -> bool:
        """Whether the old policy is the one before the rollout's first update, and no rollout has recorded its velocity."""
        objective = self.config.objective
        return objective.trains_on == "noised" and "old" in objective.compares_with and not self.policies.keeps_old

    def _loss(self, batch: Items, cond: Cond) -> tuple[Tensor, Any]:
        """Return the objective of a micro-batch of pairs, and diagnostics."""
        v = self._velocity(self.engine.module, batch, cond)
        if batch.v_old is None and self._old_comes_from_the_policy:
            batch = batch._replace(v_old=v.detach())
        transition = None if batch.level_next is None else self.sampler(batch.level, batch.level_next)
        return self.config.objective.loss(v, batch, transition, self.loss_config)

    def _velocity(self, module: nn.Module, batch: Items, cond: Cond) -> Tensor:
        """Return the velocity of each pair; both samples of a preference go through one forward pass."""
        guidance, width = self.config.rollout.guidance, self.width
        v = guided_velocity(
            self.job.model,
            module,
            batch.x if width == 1 else batch.x.flatten(0, 1),
            batch.level.repeat_interleave(width) if width > 1 else batch.level,
            optree.tree_map(lambda table: table[batch.sample.repeat_interleave(width)], cond),
            timestep=None if batch.timestep is None else batch.timestep.repeat_interleave(width),
            forwards=guidance.forwards,
            gradient=guidance.gradient,
        )
        return v if width == 1 else v.unflatten(0, (-1, width))

    def _velocities(self, module: nn.Module, flat: Items, cond: Cond, pad_to: int) -> Tensor:
        return velocities(
            lambda net, batch: self._velocity(net, batch, cond), module, flat, micro_batch=self.micro_batch, pad_to=pad_to,
            device=self.world.device,
        )  # fmt: skip


def old_decay(config: TrainConfig, rollouts: int) -> float | None:
    """Return how much of the old policy stays after a number of rollouts; None where there is none that lags behind."""
    return config.objective.old_decay(rollouts) if config.keeps_old and isinstance(config.objective, Nft) else None
