"""Learning from a rollout: its samples become a flat set of items, and these one or several updates."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core.correction import CorrectionInfo
from fluvial.core.dpo import best_and_worst
from fluvial.core.random import Key, fold_in, uniform
from fluvial.core.rollout import Trajectory
from fluvial.engines.data.preferences import Preference
from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.engine import Engine, UpdateInfo
from fluvial.engines.fsdp.world import World
from fluvial.engines.objectives.advantages import advantages, extreme
from fluvial.engines.objectives.losses import LossConfig, add_ema_kl
from fluvial.engines.objectives.table import check_loss, check_target_weight, located, name_of
from fluvial.engines.rewards.gradients import weighted_sum
from fluvial.engines.rewards.invalid import kept_samples, spread
from fluvial.engines.rewards.protocol import Reward
from fluvial.engines.rewards.signature import Samples
from fluvial.engines.rollout.backprop import final_samples, last_items, number_of_steps
from fluvial.engines.rollout.correction import correct
from fluvial.engines.rollout.generate import SampleBatch
from fluvial.engines.rollout.items import Items, Share, flatten, given, rebalance, select
from fluvial.engines.rollout.noising import noised, preferred
from fluvial.engines.rollout.schedules import Schedules
from fluvial.engines.rollout.streams import Stream
from fluvial.engines.rollout.text import TextLengths
from fluvial.engines.rollout.window import trained_steps
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.job import Job
from fluvial.engines.train.monitoring.signal import parts_of
from fluvial.engines.train.policies import Policies, predictions
from fluvial.engines.train.prompt_statistics import History, PromptStatistics
from fluvial.kernels import step_log_prob
from fluvial.kernels.dispatch import resolve
from fluvial.models import Cond
from fluvial.models.guidance import Guided, guidance_halves, guided_velocity, is_classifier_free


class Learnt(NamedTuple):
    """What the updates of a rollout did."""

    updates: list[UpdateInfo]
    correction: CorrectionInfo | None = None
    advantage: Tensor | None = None  # of the samples that are learnt from, on the host; None for preferences


class Work(NamedTuple):
    """The items of a rollout, from which its updates are made: M items per sample."""

    items: Items  # this rank's, M * slots, ordered as `adds.T`
    cond: Cond  # conditioning of this rank's samples, a pytree of tensors `[slots, ...]`
    adds: Tensor  # [B, M], of all ranks; 0 for items that need not be computed
    divisor: int  # number of items that the loss is averaged over, those that need not be computed included
    share: Share
    correction: CorrectionInfo | None = None
    target_weight: Tensor | None = None  # `[B]` of all samples, on the host; None for preferences
    advantage: Tensor | None = None  # of the samples that are learnt from


class Learner:
    """Makes the updates of a run out of its rollouts.

    Args:
        config: the run.
        job: what is trained.
        world: process group that samples are spread over.
        engine: engine of the policy.
        policies: the policies that the objective compares with.
        schedules: schedule and sampler by the shape of a sample.
        texts: lengths that prompts are padded to.
        rewards: rewards with their weights, for objectives that follow their gradients.

    Raises:
        UsageError: the sampler cannot be used, or the implementation does not run on this device.
    """

    def __init__(
        self, config: TrainConfig, job: Job, world: World, engine: Engine, policies: Policies, schedules: Schedules,
        texts: TextLengths, rewards: Mapping[str, tuple[Reward, float]] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.job, self.world, self.engine, self.policies = config, job, world, engine, policies
        self.schedules, self.texts, self.rewards = schedules, texts, rewards or {}
        self.schedule, self.sampler = schedules.of(job.shape)
        self.prompts: tuple[str, ...] = ()  # of this rank's samples, for rewards that are called again
        self.loss_config = LossConfig(
            config.rollout.form,
            config.rollout.reduction,
            config.kl.coef,
            config.kl.weight_of(config.rollout.sampler_name),
            config.implementation,
            config.kl.ema_coef,
        )
        try:
            resolve("train", config.implementation, [torch.empty(0, device=world.device)])
        except ValueError as error:
            raise UsageError(str(error).removeprefix("train: ")) from error
        self.statistics = PromptStatistics(config.advantage) if config.advantage.history else None
        # An item of preferences is two samples, and the model sees both.
        self.width = 2 if config.objective.traits.trains_on == "preferences" else 1

    def remember_in(self, history: History) -> None:
        """Keep the rewards that later advantages depend on in `history`, which checkpoints hold."""
        if self.statistics is not None:
            self.statistics.history = history

    def items(self, samples: SampleBatch, rewards: Tensor, weights: Tensor, key: Key) -> Work:
        """Return the items of one rollout; every rank must take part.

        The items of recorded steps are views of the samples' trajectory, so that nothing is stored twice.

        Args:
            samples: samples of this rank.
            rewards: rewards of all samples, `[B, K]`, on the host; groups with NaN are left out.
            weights: weight of each reward, `[K]`.
            key: key of the rollout.
        """
        config, objective, batch = self.config, self.config.objective, self.config.rollout.batch
        self.schedule, self.sampler = self.schedules.of(tuple(samples.trajectory.final.shape[1:]))
        traits = objective.traits
        kept = kept_samples(rewards, config.rollout.group)
        group, rewards = torch.nonzero(kept).flatten() // config.rollout.compared, rewards[kept]
        reward = rewards @ weights
        if traits.trains_on == "preferences":
            return self._best_and_worst(samples, reward, group, kept, key)
        if self.statistics is None:
            valid = advantages(rewards, weights, group, config.advantage)
        else:
            asked = self._prompts(samples)
            valid = self.statistics.advantages(reward, [asked[i] for i in torch.nonzero(kept).flatten().tolist()])
        with located(objective, "target_weight"):
            target_weight = objective.target_weight(reward, valid, group)
        check_target_weight(objective, target_weight, len(group))
        advantage, target_weight = spread(valid, kept), spread(target_weight, kept)
        slots = len(samples.prompts)
        share, device = Share(self.world.data_rank * slots, slots, batch), self.world.device
        own_target, own_weight = share.rows(target_weight).to(device), share.rows(torch.ones(batch)).to(device)
        correction = None
        if traits.through is not None:
            steps = number_of_steps(key, config.rollout.steps, last=traits.through[0], spread=traits.through[1])
            taken, self.prompts = torch.ones(batch, 1), tuple(samples.prompts)
            flat = last_items(samples.trajectory, self.schedule, share, key, steps, own_target, own_weight)
        elif traits.trains_on == "steps":
            recorded = samples.trajectory.log_prob.shape[1]
            trained = config.rollout.trained_of(recorded)
            taken = trained_steps(fold_in(key, Stream.FRACTION), batch, recorded, trained=trained, pick=config.rollout.pick)
            flat = flatten(samples.trajectory, self.schedule, own_target, own_weight)
            if config.correction.mode != "none":
                flat, correction = self._corrected(flat, samples.cond, samples.trajectory, share)
        else:
            taken = torch.ones(batch, config.noising.each)
            flat = self._noised(samples.trajectory.final, share.numbers, own_target, own_weight, key)
        taken = taken * spread(extreme(reward, group, config.advantage.extremes).to(taken.dtype), kept)[:, None]
        # With a KL an item adds something whatever its target weight, unless the mean is over the kept ones.
        drops = config.advantage.drop_zero
        over_kept = traits.mean_over_kept or drops
        every = not (traits.skips_zero or drops) or (config.kl.is_on and not over_kept)
        kept = (advantage if drops else target_weight) != 0
        adds = taken if every else taken * kept.to(taken.dtype)[:, None]
        count = int((adds if over_kept else taken).sum())
        return Work(flat, samples.cond, adds, count, share, correction, target_weight, valid)

    def preference_items(self, chosen: Sequence[Preference], numbers: Sequence[int], key: Key) -> Work:
        """Return the items of given preferences; each rank takes its share of them.

        Args:
            chosen: the preferences, the same on every rank; none makes updates without a gradient.
            numbers: index of each preference in its stream of noise.
            key: key of the rollout.
        """
        real = len(chosen)
        if not real:
            chosen, numbers = [self.job.blank_preference()], [0]
        self.schedule, self.sampler = self.schedules.of(tuple(chosen[0].win.shape))
        slots = -(-len(chosen) // self.world.data_size)
        share = Share(self.world.data_rank * slots, slots, real)
        rows = [(share.first + slot) % len(chosen) for slot in range(slots)]
        device, prompts = self.world.device, [chosen[row].prompt for row in rows]
        encoded = self.texts.encode(self.config.rollout.guidance, prompts)
        cond = optree.tree_map(lambda tensor: tensor.to(device), encoded)
        ones = share.rows(torch.ones(real)).to(device)
        win, lose = (
            self._noised(
                torch.stack([getattr(chosen[row], side) for row in rows]).to(device), [numbers[row] for row in rows], ones,
                ones, key,
            )
            for side in ("win", "lose")
        )  # fmt: skip
        adds = torch.ones(real, self.config.noising.each)
        return Work(preferred(win, lose), cond, adds, int(adds.sum()), share)

    def _best_and_worst(self, samples: SampleBatch, reward: Tensor, group: Tensor, kept: Tensor, key: Key) -> Work:
        """Return the items of the best and the worst sample of each group; groups with equal rewards have none."""
        found, numbers = best_and_worst(reward, group), torch.nonzero(kept).flatten()
        places = torch.nonzero(found.valid).flatten().tolist()
        # The two may be on different ranks: every rank gets all clean samples, which are small beside a trajectory.
        everyone = self.world.gather_data(samples.trajectory.final)[: self.config.rollout.batch]
        prompts = self._prompts(samples)
        own, win, lose = numbers.tolist(), numbers[found.win].tolist(), numbers[found.lose].tolist()
        chosen = [Preference(prompts[own[i]], everyone[win[i]], everyone[lose[i]]) for i in places]
        return self.preference_items(chosen, [int(group[i]) for i in places], key)

    def _prompts(self, samples: SampleBatch) -> list[str]:
        """Return the prompt of each sample of the rollout, `[B]`; every rank must take part."""
        by_rank = self.world.gather_items(list(samples.prompts))[:: self.world.sequence]
        return [prompt for part in by_rank for prompt in part][: self.config.rollout.batch]

    def _noised(self, x0: Tensor, numbers: Sequence[int], target_weight: Tensor, weight: Tensor, key: Key) -> Items:
        """Return clean samples with noise on them; each sample's noise depends on its number, or its group's, alone."""
        root, own, levels = fold_in(key, Stream.NOISING), torch.tensor(numbers, device=self.world.device), None
        if self.config.noising.shared:
            own, levels = own // self.config.rollout.group, fold_in(root, torch.zeros_like(own))
        elif self.config.noising.draw == "call":
            levels = fold_in(root, own // self.config.samples_per_pass)
        return noised(
            x0, fold_in(root, own), target_weight, weight, self.schedule, self.config.noising, self.job.model.prediction,
            level_keys=levels,
        )  # fmt: skip

    def _corrected(self, flat: Items, cond: Cond, trajectory: Trajectory, share: Share) -> tuple[Items, CorrectionInfo]:
        """Return recorded steps with the old log-probs, and velocities, that the update itself computes, and weights."""
        with self.engine.inference() as module:
            v_old = self._predictions(module, flat, cond, len(flat.level))
        x_next, level_next, parts = given(flat.x_next), given(flat.level_next), []
        for start in range(0, len(flat.level), self.config.items_per_pass):
            rows = slice(start, start + self.config.items_per_pass)
            parts.append(
                step_log_prob(
                    self.sampler(flat.level[rows], level_next[rows]), flat.x[rows], v_old[rows], x_next[rows],
                    form=self.loss_config.form, reduction=self.loss_config.reduction,
                    implementation=self.loss_config.implementation,
                )[0]
            )  # fmt: skip
        flat, info = correct(
            flat, torch.cat(parts), trajectory.log_prob, self.config.correction, share=share, gather=self.world.gather_data
        )
        return flat if flat.v_old is None else flat._replace(v_old=v_old), info

    def update(self, work: Work, key: Key) -> Learnt:
        """Make the optimizer updates of a rollout, `epochs` passes in `minibatches` each; every rank must take part.

        Args:
            work: items of this rank.
            key: key of the rollout.
        """
        config, minibatches, batch = self.config, self.config.minibatches, work.share.batch
        if self.policies.old_is_the_policy and config.updates_per_rollout > 1:
            # Its predictions must be known before the first update; with a single update they are the policy's own.
            with self.engine.inference() as module:
                v_old = self._predictions(module, work.items, work.cond, len(work.items.level))
            work = work._replace(items=work.items._replace(v_old=v_old))
        infos = []
        for epoch in range(config.epochs):
            shuffled = uniform(fold_in(fold_in(key, Stream.MINIBATCH), epoch), (max(batch, 1),)).argsort().argsort()
            part = shuffled[:batch] * minibatches // max(batch, 1)
            for minibatch in range(minibatches):
                chosen = work.adds * (part == minibatch)[:, None] if minibatches > 1 else work.adds
                infos.append(self._update(work, chosen, work.divisor / minibatches))
        return Learnt(infos, work.correction, work.advantage)

    def _update(self, work: Work, adds: Tensor, count: float) -> UpdateInfo:
        """Take one optimizer step on the items that add something to the loss.

        Args:
            work: the rollout's items.
            adds: `[B, M]`, 0 for items that this update leaves out.
            count: what the sum of the losses is divided by.
        """
        if self.config.objective.traits.gathers:
            work = work._replace(items=self._gathered(work, adds))
        flat, cond, longest = self._levelled(work, adds)
        # Predictions that were gathered already are not computed again.
        flat = self.policies.compare(flat, cond, self.engine, self._predictions, pad_to=longest)
        # The coefficients of all items at once: a call of the sampler is some twenty small operations.
        if flat.level_next is not None:
            flat = flat._replace(transition=self.sampler(flat.level, flat.level_next))
        return self.engine.update(
            flat,
            lambda batch: self._loss(batch, cond),
            flat.weight,
            count=max(count, 1),
            micro_batch=self._items_per_pass(longest),
            pad_to=longest,
            inputs=cond,
            parts=parts_of(flat, self.schedule.levels),
        )

    def _gathered(self, work: Work, adds: Tensor) -> Items:
        """Return this rank's items with what the other samples of the update are to the loss; every rank must take part."""
        objective: Any = self.config.objective
        share, flat = work.share, work.items
        if flat.level_next is not None:
            flat = flat._replace(transition=self.sampler(flat.level, flat.level_next))

        with self.engine.inference() as module:
            v = self._predictions(module, flat, work.cond, len(flat.level))
        seen = self.policies.compare(flat, work.cond, self.engine, self._predictions, pad_to=len(flat.level))
        if seen.v_old is None and self.policies.old_is_the_policy:
            seen = seen._replace(v_old=v)
        with located(objective, "statistic"):
            own = objective.statistic(v, seen).unflatten(0, (-1, share.slots)).T.contiguous()
        everyone = self.world.gather_data(own)[: share.batch].cpu()
        group, target = torch.arange(share.batch) // self.config.rollout.compared, given(work.target_weight)
        with located(objective, "gathered"):
            context = objective.gathered(everyone, target, group, adds != 0)
        return seen._replace(context=share.rows(context).to(v.device).transpose(0, 1).flatten(0, 1))

    def _levelled(self, work: Work, adds: Tensor) -> tuple[Items, Cond, int]:
        """Return this rank's items of an update, their conditioning, and the largest number of items of any rank.

        Items are moved between ranks where that saves a forward pass.
        """
        world, share = self.world, work.share
        by_rank = torch.cat([adds, adds.new_zeros((world.data_size * share.slots - len(adds), adds.shape[1]))])
        by_rank = by_rank.unflatten(0, (world.data_size, share.slots))
        held = [int(number) for number in (by_rank != 0).sum((1, 2))]
        first: Items = optree.tree_map(lambda tensor: tensor[:1].clone(), work.items)
        flat, cond = select(work.items, by_rank[world.data_rank].T.flatten()), work.cond
        longest = -(-sum(held) // len(held))
        moves = self.config.objective.traits.through is None  # else the prompts of this rank's samples are needed
        if moves and -(-max(held) // self.config.items_per_pass) > -(-longest // self.config.items_per_pass):
            flat, cond = rebalance(flat, cond, held, world)
        else:
            longest = max(held)
        if not len(flat.level):  # a rank without items still takes part in the collectives
            flat = first._replace(weight=torch.zeros_like(first.weight))
        return flat, cond, max(longest, 1)

    def _loss(self, batch: Items, cond: Cond) -> tuple[Tensor, Any]:
        """Return the loss of each item of a micro-batch, and diagnostics."""
        objective = self.config.objective
        inputs, options = self._inputs(batch, cond)
        folds = objective.traits.folds_guidance and batch.v_ema is None and is_classifier_free(self.job.model)
        if folds and isinstance(inputs[-1], Guided):
            v, v_uncond = guidance_halves(self.job.model, self.engine.module, *inputs, **options)
            batch = batch._replace(v_uncond=v_uncond, guidance=inputs[-1].scale)
        else:
            v = self._predict(self.engine.module, batch, cond)
        if batch.v_old is None and self.policies.old_is_the_policy:
            batch = batch._replace(v_old=v.detach())
        config = self.loss_config
        if objective.traits.rewards == "gradients":
            config = config._replace(reward=lambda v, items: self._rewarded(v, items, cond))
        with located(objective, "loss"):
            loss, info = objective.loss(v, batch, batch.transition, config)
        check_loss(objective, loss, info, len(batch.level))
        return add_ema_kl(loss, v, batch, self.loss_config), info

    def _rewarded(self, v: Tensor, items: Items, cond: Cond) -> Tensor:
        """Return the weighted sum of the rewards of each item's clean sample, `[P]`, with gradient.

        Raises:
            UsageError: a reward gives no gradient.
        """
        final = final_samples(
            v, items, self.sampler, self.schedule, lambda items: self._predict(self.engine.module, items, cond)
        )
        prompts = [self.prompts[i] for i in items.sample.tolist()]
        samples = Samples(self.job.model.decode(final), prompts, final)
        return weighted_sum(self.rewards, samples, objective=name_of(self.config.objective))

    def _predict(self, module: nn.Module, batch: Items, cond: Cond) -> Tensor:
        """Return the prediction at each item; both samples of a preference go through one forward pass."""
        inputs, options = self._inputs(batch, cond)
        v = guided_velocity(self.job.model, module, *inputs, **options)
        return v if self.width == 1 else v.unflatten(0, (-1, self.width))

    def _inputs(self, batch: Items, cond: Cond) -> tuple[tuple[Tensor, Tensor, Cond], dict[str, Any]]:
        """Return the model's inputs (x, level, conditioning) for a micro-batch, and the options of its guidance."""
        guidance, width = self.config.rollout.guidance, self.width
        if guidance.update == "conditional" and isinstance(cond, Guided):
            cond = cond.cond
        x, level, sample, timestep = batch.x, batch.level, batch.sample, batch.timestep
        if width > 1:
            x, level, sample = x.flatten(0, 1), level.repeat_interleave(width), sample.repeat_interleave(width)
            timestep = None if timestep is None else timestep.repeat_interleave(width)
        inputs = x, level, optree.tree_map(lambda table: table[sample], cond)
        return inputs, {"timestep": timestep, "forwards": guidance.forwards, "gradient": guidance.gradient}

    def _predictions(self, module: nn.Module, flat: Items, cond: Cond, pad_to: int) -> Tensor:
        return predictions(
            lambda net, batch: self._predict(net, batch, cond), module, flat, micro_batch=self._items_per_pass(pad_to),
            pad_to=pad_to, device=self.world.device,
        )  # fmt: skip

    def _items_per_pass(self, count: int) -> int:
        """Return the items per pass of `count` items; by default a rollout's rows, also for fewer items, and so its bits."""
        size = self.config.items_per_pass
        return size if self.config.update_micro_batch is None else min(size, count)
