"""Learning from a rollout: flattens samples into items and runs the updates on them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor, nn

from fluvial.core.correction import CorrectionInfo
from fluvial.core.dpo import best_and_worst
from fluvial.core.random import Key, fold_in, uniform
from fluvial.core.transitions import Sampler
from fluvial.engines.data.preferences import Preference
from fluvial.engines.data.records import Prompt, model_inputs
from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.engine import Engine, UpdateInfo
from fluvial.engines.fsdp.items import micro_batches, split
from fluvial.engines.objectives.advantages import History, graded
from fluvial.engines.objectives.losses import LossConfig, add_ema_kl, log_prob_and_kl
from fluvial.engines.objectives.protocol import Gathering
from fluvial.engines.objectives.table import checked, name_of
from fluvial.engines.rewards.gather import Rewards
from fluvial.engines.rewards.gradients import weighted_sum
from fluvial.engines.rewards.protocol import Reward
from fluvial.engines.rewards.signature import Samples
from fluvial.engines.rollout.backprop import final_samples, number_of_steps
from fluvial.engines.rollout.correction import correct
from fluvial.engines.rollout.generate import SampleBatch
from fluvial.engines.rollout.items import (
    Items,
    LastSteps,
    NoisedSamples,
    Pairs,
    RecordedSteps,
    Share,
    last_steps,
    noised_pairs,
    noised_samples,
    rebalance,
    recorded_steps,
    select,
)
from fluvial.engines.rollout.text import Padding, TextLengths
from fluvial.engines.streams import Stream
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.job import Job
from fluvial.engines.train.policies import Policies
from fluvial.engines.train.rollouts import GivenPairs, Rollout
from fluvial.engines.train.validate import knows_its_schedule_only
from fluvial.kernels.dispatch import resolve
from fluvial.models import Cond, Schedule, decoded, host_values, is_recorded
from fluvial.models.guidance import Guided, guidance_halves, guided_velocity, is_classifier_free, scale_at
from fluvial.models.host_values import to_device
from fluvial.models.routing import Routed


class Learnt(NamedTuple):
    """Results of the updates of a rollout."""

    updates: list[UpdateInfo]
    correction: CorrectionInfo | None
    advantage: Tensor | None  # of the samples that are learnt from, on the host; None for preferences
    padding: Padding | None  # of the prompts, where it is trimmed


class Work(NamedTuple):
    """The items of a rollout, and all else that their updates need: M items per sample."""

    items: Items  # this rank's, M * slots, ordered as `computed.T`
    cond: Cond  # conditioning of this rank's samples, a pytree of tensors `[slots, ...]`
    computed: Tensor  # [B, M], of all ranks; 0 for items that need not be computed
    divisor: int  # number of items that the loss is averaged over, those that need not be computed included
    share: Share
    prompts: Sequence[Prompt]  # of this rank's samples
    schedule: Schedule
    sampler: Sampler | None = None  # of recorded steps
    target_weight: Tensor | None = None  # `[B]` of all samples, on the host; None for preferences
    advantage: Tensor | None = None  # of the samples that are learnt from
    correction: CorrectionInfo | None = None
    padding: Padding | None = None


class Learner:
    """Makes the updates of a run out of its rollouts.

    Args:
        engine: engine of the policy, on the ranks that samples are spread over.
        policies: the policies that the objective compares with.
        texts: lengths that prompts are padded to.
        rewards: rewards with their weights, for objectives that follow their gradients.
        pairs: numbers of pairs per pass that were chosen, if `update_micro_batch` is auto.

    Raises:
        UsageError: the implementation does not run on this device.
    """

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        engine: Engine,
        policies: Policies,
        texts: TextLengths,
        rewards: Mapping[str, tuple[Reward, float]],
        pairs: Sequence[int] = (),
    ) -> None:
        self.config, self.job, self.world, self.engine, self.policies = config, job, engine.world, engine, policies
        on_schedule = knows_its_schedule_only(job.model.prediction, recorded=is_recorded(job.model))
        self.noising = config.noising.chosen(on_schedule=on_schedule)
        self.texts, self.rewards = texts, rewards
        self.rank, self.ranks = self.world.data_rank, self.world.data_size
        self.objective = checked(config.objective)
        self.traits = self.objective.traits
        self.routed = any(isinstance(part, Routed) for part in engine.sharded.parts)
        self.has_kl, self.pairs_per_pass = config.kl.is_on, tuple(pairs)
        self.compared = config.rollout.window.compared(config.rollout.group)
        self.loss_config = LossConfig(
            config.rollout.form,
            config.rollout.reduction,
            config.kl.coef,
            config.kl.weight_of(config.rollout.sampler.rule),
            config.implementation,
            config.kl.ema_coef,
        )
        try:
            resolve("train", config.implementation, [torch.empty(0, device=self.world.device)])
        except ValueError as error:
            raise UsageError(str(error).removeprefix("train: ")) from error

    def items(self, rollout: Rollout, rewards: Rewards, weights: Tensor, key: Key, history: History) -> Work:
        """Return the items of one rollout; every rank must take part.

        The items of recorded steps are views of the samples' trajectory, so that nothing is stored twice.

        Args:
            rewards: rewards of all samples, on the host.
            weights: weight of each reward, `[K]`.
            history: last rewards of each prompt, to which those of this rollout are added if advantages read them.
        """
        config, samples, kept = self.config, rollout.samples, rewards.kept
        if self.traits.trains_on == "preferences":
            return self._best_and_worst(rollout, rewards.scores[kept] @ weights, torch.nonzero(kept).flatten(), key)
        grades = graded(
            self.objective,
            rewards.scores,
            kept,
            weights,
            config.advantage,
            compared=self.compared,
            has_kl=self.has_kl,
            prompts=list(map(str, model_inputs(self._prompts(samples, len(kept))))) if config.advantage.history else (),
            history=history,
        )
        share, sampling = Share(self.rank * len(samples.prompts), len(samples.prompts), len(kept)), rollout.plan.sampling
        items, used, correction = self._made(rollout, share, grades.target_weight, key)
        return Work(
            items,
            samples.cond,
            used * grades.computed[:, None],
            int((used * grades.counted[:, None]).sum()),
            share,
            samples.prompts,
            sampling.schedule,
            None if sampling.stochastic is None else sampling.stochastic.transition,
            grades.target_weight,
            grades.advantage,
            correction,
            rollout.plan.padding,
        )

    def _made(
        self, rollout: Rollout, share: Share, target_weight: Tensor, key: Key
    ) -> tuple[Items, Tensor, CorrectionInfo | None]:
        """Return this rank's items, whether each of all ranks' is used, `[B, M]`, and what a correction did."""
        config, trajectory, batch, device = self.config, rollout.samples.trajectory, share.batch, self.world.device
        schedule = rollout.plan.sampling.schedule
        weight, own = (to_device(share.rows(values), device) for values in (torch.ones(batch), target_weight))
        if self.traits.trains_on == "noised":
            keys, levels = self._noising_keys(share.numbers, key)
            noised = noised_samples(
                trajectory.final, keys, own, weight, schedule, self.noising, self.job.model.prediction, level_keys=levels
            )
            return noised, torch.ones(batch, self.noising.each), None
        if self.traits.through is not None:
            last, spread = self.traits.through
            count = number_of_steps(key, config.rollout.steps, last=last, spread=spread)
            return last_steps(trajectory, schedule, share, key, count, weight), torch.ones(batch, 1), None
        assert rollout.plan.transitions is not None
        steps, correction = recorded_steps(trajectory, schedule, rollout.plan.transitions, own, weight), None
        if config.correction.mode != "none":
            steps, correction = self._corrected(steps, rollout.samples, share)
        return steps, rollout.trained, correction

    def pairs(self, given: GivenPairs, key: Key) -> Work:
        """Return the items of given preferences; each rank takes its share of them.

        Args:
            given: the preferences, the same on every rank; none makes updates without a gradient.
        """
        chosen, numbers, real = given.preferences, given.numbers, len(given.preferences)
        if not real:
            zeros = torch.zeros(given.shape)
            chosen, numbers = [Preference(self.job.prompts[0], zeros, zeros)], [0]
        slots = -(-len(chosen) // self.ranks)
        share = Share(self.rank * slots, slots, real)
        places = [(share.first + slot) % len(chosen) for slot in range(slots)]
        device, prompts = self.world.device, [chosen[place].prompt for place in places]
        cond, padding = self.texts.encode(self.config.rollout.guidance, prompts)
        keys, levels = self._noising_keys([numbers[place] for place in places], key)
        items = noised_pairs(
            to_device(torch.stack([chosen[place].win for place in places]), device),
            to_device(torch.stack([chosen[place].lose for place in places]), device),
            keys,
            to_device(share.rows(torch.ones(real)), device),
            given.schedule,
            self.noising,
            self.job.model.prediction,
            level_keys=levels,
        )
        computed = torch.ones(real, self.noising.each)
        cond = optree.tree_map(lambda table: to_device(table, device), cond)
        return Work(items, cond, computed, computed.numel(), share, prompts, given.schedule, padding=padding)

    def _best_and_worst(self, rollout: Rollout, reward: Tensor, places: Tensor, key: Key) -> Work:
        """Return the items of the best and the worst sample of each group; groups with equal rewards have none."""
        batch, final = self.config.rollout.batch, rollout.samples.trajectory.final
        chosen = best_and_worst(reward, places // self.compared)
        # The two may be on different ranks: every rank gets all clean samples, which are small beside a trajectory.
        everyone, prompts = self.world.gather_data(final)[:batch], self._prompts(rollout.samples, batch)
        best, worst = places[chosen.win].tolist(), places[chosen.lose].tolist()
        found = torch.nonzero(chosen.valid).flatten().tolist()
        preferences = [Preference(prompts[places[i]], everyone[best[i]], everyone[worst[i]]) for i in found]
        numbers = [int(places[i]) // self.compared for i in found]
        return self.pairs(
            GivenPairs(preferences, numbers, tuple(final.shape[1:]), rollout.plan.sampling.schedule, None), key
        )

    def _prompts(self, samples: SampleBatch, batch: int) -> list[Prompt]:
        """Return the prompt of each sample of the rollout, `[B]`; every rank must take part."""
        by_rank = self.world.gather_items(list(samples.prompts))[:: self.world.sequence]
        return [prompt for part in by_rank for prompt in part][:batch]

    def _noising_keys(self, numbers: Sequence[int], key: Key) -> tuple[Key, Key | None]:
        """Return the key of each sample's noise, which depends on its number or its group's, and that of its levels."""
        root, own = fold_in(key, Stream.NOISING), to_device(torch.tensor(numbers), self.world.device)
        if self.noising.is_shared:
            own = own // self.config.rollout.group
            return fold_in(root, own), fold_in(root, torch.zeros_like(own))
        calls = self.noising.draw == "call"
        return fold_in(root, own), fold_in(root, own // self.config.samples_per_pass) if calls else None

    def _corrected(self, items: RecordedSteps, samples: SampleBatch, share: Share) -> tuple[RecordedSteps, CorrectionInfo]:
        """Return recorded steps with the old log-probs, and velocities, that the update itself computes, and weights."""
        with self.engine.inference() as module:
            v_old = self._predictions(module, items, samples.cond, len(items.level))
        log_prob, start = [], 0
        for size in split(len(items.level), self._pass_sizes(len(items.level))):
            rows = slice(start, start := start + size)
            part = optree.tree_map(lambda tensor, rows=rows: tensor[rows], items)
            log_prob.append(log_prob_and_kl(v_old[rows], part, self.loss_config, v_ref=None)[0])
        recorded, gather = samples.trajectory.log_prob, self.world.gather_data
        items, info = correct(items, torch.cat(log_prob), recorded, self.config.correction, share=share, gather=gather)
        return _with(items, old=v_old) if "old" in items.predictions else items, info

    def update(self, work: Work, key: Key) -> Learnt:
        """Make the optimizer updates of a rollout, `epochs` passes in `minibatches` each; every rank must take part."""
        epochs, minibatches, batch = self.config.epochs, self.config.minibatches, work.share.batch
        if self.routed and work.items.timestep is not None:
            host_values.read(work.items.timestep)  # once, where levels are drawn on the device
        if self.policies.old_is_the_policy and epochs * minibatches > 1:
            # Its predictions must be known before the first update; with a single update they are the policy's own.
            with self.engine.inference() as module:
                v_old = self._predictions(module, work.items, work.cond, len(work.items.level))
            work = work._replace(items=_with(work.items, old=v_old))
        infos = []
        for epoch in range(epochs):
            if minibatches == 1:
                infos.append(self._update(work, work.computed, work.divisor))
                continue
            drawn = uniform(fold_in(fold_in(key, Stream.MINIBATCH), epoch), (max(batch, 1),))
            part = drawn.argsort().argsort()[:batch] * minibatches // max(batch, 1)
            for minibatch in range(minibatches):
                chosen = work.computed * (part == minibatch)[:, None]
                infos.append(self._update(work, chosen, work.divisor / minibatches))
        return Learnt(infos, work.correction, work.advantage, work.padding)

    def _update(self, work: Work, computed: Tensor, count: float) -> UpdateInfo:
        """Take one optimizer step on the items that add something to the loss."""
        if self.traits.gathers:
            work = work._replace(items=self._gathered(work, computed))
        items, cond, longest = self._balanced(work, computed)
        # Predictions that were gathered already are not computed again.
        items = self.policies.compared(items, cond, self.engine, self._predictions, pad_to=longest)
        return self.engine.update(
            items,
            lambda batch: self._loss(batch, cond, work),
            items.weight,
            count=max(count, 1),
            micro_batch=self._pass_sizes(longest),
            pad_to=longest,
            inputs=cond,
            parts=items.parts(work.schedule.levels),
        )

    def _gathered(self, work: Work, computed: Tensor) -> Items:
        """Return this rank's items with what the loss reads of the other samples; every rank must take part."""
        objective, share, count = cast(Gathering, self.objective), work.share, len(work.items.level)
        items = self.policies.compared(work.items, work.cond, self.engine, self._predictions, pad_to=count)
        with self.engine.inference() as module:
            v = self._predictions(module, work.items, work.cond, count)
        if self.policies.old_is_the_policy and "old" not in items.predictions:
            items = _with(items, old=v)
        statistic = objective.statistic(v, items).unflatten(0, (-1, share.slots)).T.contiguous()
        everyone = self.world.gather_data(statistic)[: share.batch]
        assert work.target_weight is not None
        assert isinstance(items, RecordedSteps | NoisedSamples)
        of_samples = work.target_weight, torch.arange(share.batch) // self.compared, computed != 0
        context = objective.gathered(everyone, *(to_device(values, everyone.device) for values in of_samples))
        return items._replace(context=share.rows(context).transpose(0, 1).flatten(0, 1))

    def _balanced(self, work: Work, computed: Tensor) -> tuple[Items, Cond, int]:
        """Return this rank's items of an update, their conditioning, and the largest number of items of any rank."""
        share = work.share
        repeats = computed.new_zeros((self.ranks * share.slots - len(computed), computed.shape[1]))
        by_rank = torch.cat([computed, repeats]).unflatten(0, (self.ranks, share.slots))
        held = [int(number) for number in (by_rank != 0).sum((1, 2))]
        items, cond = select(work.items, by_rank[self.rank].T.flatten()), work.cond
        longest = -(-sum(held) // len(held))
        moves = self.traits.through is None  # else the prompts of this rank's samples are needed
        rows = [sum(split(count, self._pass_sizes(count))) for count in (max(held), longest)]
        if moves and rows[0] > rows[1]:
            items, cond = rebalance(items, cond, held, self.world)
        else:
            longest = max(held)
        if not len(items.level):  # a rank without items still takes part in the collectives
            first: Items = optree.tree_map(lambda tensor: tensor[:1].clone(), work.items)
            items = first._replace(weight=torch.zeros_like(first.weight))
        return items, cond, max(longest, 1)

    def _loss(self, batch: Items, cond: Cond, work: Work) -> tuple[Tensor, Any]:
        """Return the loss of each item of a micro-batch, and diagnostics."""
        module, config = self.engine.module, self.loss_config
        inputs, options = self._inputs(batch, cond)
        folds = self.traits.folds_guidance and "ema" not in batch.predictions and is_classifier_free(self.job.model)
        if folds and isinstance(inputs[-1], Guided) and isinstance(batch, RecordedSteps):
            v, v_uncond = guidance_halves(self.job.model, module, *inputs, **options)
            scale = scale_at(self.job.model, inputs[-1], batch.level, batch.timestep)
            batch = _with(batch, uncond=v_uncond)._replace(guidance=scale)
        else:
            v = self._predict(module, batch, cond)
        if self.policies.old_is_the_policy and "old" not in batch.predictions:
            batch = _with(batch, old=v.detach())
        if self.traits.rewards == "gradients":
            config = config._replace(reward=lambda v, items: self._rewarded(v, items, cond, work))
        loss, info = self.objective.loss(v, batch, config)
        return add_ema_kl(loss, v, batch, config), info

    def _rewarded(self, v: Tensor, items: LastSteps, cond: Cond, work: Work) -> Tensor:
        """Return the weighted sum of the rewards of each item's clean sample, `[P]`, with gradient."""
        assert work.sampler is not None
        final = final_samples(
            v, items, work.sampler, work.schedule, lambda items: self._predict(self.engine.module, items, cond)
        )
        prompts = [work.prompts[i] for i in host_values.read(items.sample).tolist()]
        samples = Samples(decoded(self.job.model, final, model_inputs(prompts)), prompts, final)
        return weighted_sum(self.rewards, samples, objective=name_of(self.config.objective))

    def _predict(self, module: nn.Module, batch: Items, cond: Cond) -> Tensor:
        """Return the prediction at each item; both samples of a pair go through one forward pass."""
        inputs, options = self._inputs(batch, cond)
        v = guided_velocity(self.job.model, module, *inputs, **options)
        return v.unflatten(0, (-1, 2)) if isinstance(batch, Pairs) else v

    def _inputs(self, batch: Items, cond: Cond) -> tuple[tuple[Tensor, Tensor, Cond], dict[str, Any]]:
        """Return the model's inputs (x, level, conditioning) for a micro-batch, and the options of its guidance."""
        guidance = self.config.rollout.guidance
        if guidance.update == "conditional" and isinstance(cond, Guided):
            cond = cond.cond
        x, level, sample, timestep = batch.x, batch.level, batch.sample, batch.timestep
        if isinstance(batch, Pairs):
            x, level, sample = x.flatten(0, 1), level.repeat_interleave(2), sample.repeat_interleave(2)
            timestep = None if timestep is None else timestep.repeat_interleave(2)
        inputs = x, level, optree.tree_map(lambda table: host_values.rows(table, sample), cond)
        forwards = self.config.update_forwards(len(x))
        return inputs, {"timestep": timestep, "forwards": forwards, "gradient": guidance.gradient}

    def _predictions(self, module: nn.Module, items: Items, cond: Cond, pad_to: int) -> Tensor:
        """Return a network's prediction at each item, `[P, ...]`, computed in the update's own micro-batches."""
        device = self.world.device
        parts = micro_batches(items, micro_batch=self._pass_sizes(pad_to), pad_to=pad_to, device=device)
        return torch.cat([self._predict(module, part, cond) for part in parts])[: len(items.level)]

    def _pass_sizes(self, count: int) -> tuple[int, ...]:
        """Return the items per pass of `count` items; none is smaller than a rollout's rows, which have its bits."""
        return self.config.pass_sizes(count, self.pairs_per_pass)


def _with(items: Any, **predictions: Tensor) -> Any:
    """Return items with the predictions of further policies."""
    return items._replace(predictions={**items.predictions, **predictions})
