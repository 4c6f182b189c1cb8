"""The run as a method sees it: samples, predictions, updates, and what is gathered over the ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import optree
import torch
from torch import Tensor, nn

from fluvial.core.random import Key, fold_in, uniform
from fluvial.engines import plugins
from fluvial.engines.data.preferences import Preference
from fluvial.engines.data.records import Prompt, model_inputs, texts
from fluvial.engines.engine.engine import Engine, UpdateInfo
from fluvial.engines.engine.items import micro_batches, split
from fluvial.engines.errors import UsageError
from fluvial.engines.run.batch import (
    Batch,
    Items,
    RolloutPlan,
    make_batch,
    noise_samples,
    record_steps,
    renoise,
    replace_groups,
    return_to,
)
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.declared import Before, Loss
from fluvial.engines.run.jobs.base import Job
from fluvial.engines.run.method import EpochsConfig
from fluvial.engines.run.networks import BuiltNetworks
from fluvial.engines.run.sampler import Sampler
from fluvial.engines.sampling.generate import SampleBatch, Sampling
from fluvial.engines.sampling.groups import AllGroups
from fluvial.engines.sampling.items import Pairs, Rows, Share, rebalance, select
from fluvial.engines.sampling.noising import Levels, NoisingConfig, knows_its_schedule_only
from fluvial.engines.sampling.window import AllRecorded, Trained
from fluvial.engines.scoring.advantages import AdvantageConfig, Grades, extreme, grade
from fluvial.engines.scoring.floors import learnt_weights, update_multipliers
from fluvial.engines.scoring.gather import Scoring, gather_rewards
from fluvial.engines.scoring.gradients import weighted_sum
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.runner import RewardRunners
from fluvial.engines.scoring.signature import Samples
from fluvial.engines.streams import Stream
from fluvial.kernels.dispatch import prefer, resolve
from fluvial.models import Cond, decoded, host_values, is_recorded
from fluvial.models.guidance import Guided, guidance_halves, guided_velocity, is_classifier_free, scale_at
from fluvial.models.host_values import to_device
from fluvial.models.lora import copy_adapter
from fluvial.models.routing import Routed

ADVANTAGE, ALL_RECORDED, ALL_GROUPS = AdvantageConfig(), AllRecorded(), AllGroups()


class Memory(Protocol):
    """What a run remembers between batches; a checkpoint holds it."""

    rewards: dict[str, list[float]]  # last rewards of each prompt
    state: dict[str, list[float]]  # numbers of the method's own
    multipliers: dict[str, float]  # of rewards that have a floor


class Run:
    """What a method sees of a run. Every rank must take part in every verb.

    Args:
        networks: the policy's engine, and the networks that the method declares.
        sampler: prompts, and samples of them.
        rewards: rewards with their weights, by name.
        runners: threads of these rewards.
        memory: what is remembered between batches.
        pairs: numbers of (sample, step) pairs per pass that were chosen, if `engine.update_micro_batch` is auto.
        stop: whether this rank was asked to stop.
        check_loss: function of a loss that returns it with its results checked, for a method of the user's.

    Raises:
        UsageError: the implementation does not run on this device.
    """

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        networks: BuiltNetworks,
        sampler: Sampler,
        rewards: Mapping[str, tuple[Reward, float]],
        runners: RewardRunners,
        memory: Memory,
        *,
        pairs: Sequence[int] = (),
        stop: Callable[[], bool] = lambda: False,
        check_loss: Callable[[Loss], Loss] = lambda loss: loss,
    ) -> None:
        self.config, self.job, self.networks, self.sampler = config, job, networks, sampler
        self.rewards, self.runners, self.memory, self.stop = rewards, runners, memory, stop
        self.check_loss, self.pairs = check_loss, tuple(pairs)
        if len(rewards) < (least := config.method.needs.least_rewards):
            hint = f"{config.method.method_name} compares the first one with the others"
            raise UsageError("rewards", config.rewards, f"at least {least}", hint)
        self.engine: Engine = networks.engine
        self.world, self.stopping, self.notes = self.engine.world, False, dict[str, Any]()
        self._on_schedule = knows_its_schedule_only(job.model.prediction, recorded=is_recorded(job.model))
        self._routed = any(isinstance(part, Routed) for part in self.engine.sharded.parts)
        try:
            resolve("train", config.engine.implementation, [torch.empty(0, device=self.world.device)])
        except ValueError as error:
            raise UsageError(str(error).removeprefix("train: ")) from error

    @property
    def clock(self) -> int:
        """Number of updates before those on the batch that is collected."""
        return self.engine.updates

    @property
    def state(self) -> dict[str, list[float]]:
        """Numbers that the method remembers between batches, by name; a checkpoint holds them."""
        return self.memory.state

    def log(self, **values: Any) -> None:
        """Add values to the record of this batch."""
        self.notes.update(values)

    # samples

    def sample(
        self, key: Key, *, group: int | None = None, steps: int | None = None, starts: Sequence[int] | None = None
    ) -> Batch:
        """Return samples of the next prompts, of the network that makes rollouts now; they are scored meanwhile.

        Args:
            group: number of samples per prompt, by default the method's; others are scored, and not learnt from.
            steps: number of steps of these.
            starts: index of each sample's initial noise, `[B]`, by default its own.
        """
        sampling, draft, runners = self.config.method.sampling, None, self.runners
        if group is not None:
            draft = replace(sampling, group=group, steps=steps or sampling.steps, groups=ALL_GROUPS)  # type: ignore[call-arg]
            runners = self.runners.apart(group)
        plan = self.sampler.plan(key, self.sampler.prompts(key, self.clock), self.clock, draft=draft, starts=starts)
        samples = self._generate(plan, runners)
        return self._batch(plan, made=make_batch(samples), scoring=Scoring(runners), version=self.engine.updates)

    def fill(self, batch: Batch, key: Key, *, rounds: int, floor: float = 0.0) -> Batch:
        """Return a batch with samples of other prompts in place of groups that are flat; the last of these are skipped.

        Args:
            key: key of the batch.
            rounds: largest number of times that flat groups are replaced.
            floor: a group is flat if the standard deviation of its weighted reward is no larger.
        """
        batch, replaced = self.score(batch), 0
        flat = self._find_flat(batch, floor)
        for number in range(1, rounds + 1):
            if not flat:
                break
            plan = self.sampler.replan(batch.plan, flat, key, self.clock, number)
            samples = self._generate(plan, self.runners)
            scoring = Scoring(self.runners)
            scoring.collect(self.world, batch=batch.share.batch, stop=self.stop)
            held = batch.made.result()
            if plan.sampling.text_tokens != batch.plan.sampling.text_tokens:
                held = held._replace(cond=self._encode(plan.sampling, held.prompts))
            batch = self.score(replace_groups(batch, plan, samples, scoring, flat, held))
            replaced, flat = replaced + len(flat), self._find_flat(batch, floor)
        skipped = torch.zeros(len(batch.plan.asked), dtype=torch.bool)
        skipped[flat] = True
        self.log(refill={"replaced": replaced, "flat": len(flat)})
        return replace(batch, skipped=skipped.repeat_interleave(batch.plan.group))

    def find_extremes(self, batch: Batch, count: int) -> list[int]:
        """Return the indices of the `count` best and the `count` worst samples of each group by reward, in their order.

        Samples without a valid reward stand in the middle.
        """
        assert batch.rewards is not None
        by_group = (batch.rewards.scores @ self.runners.weights).unflatten(0, (-1, batch.plan.group))
        reward = torch.where(by_group.isnan(), by_group.nanmedian(1, keepdim=True).values, by_group).nan_to_num().flatten()
        chosen = extreme(reward, torch.arange(len(reward)) // batch.plan.group, count)
        places: list[int] = torch.nonzero(chosen).flatten().tolist()
        return places

    def read(self, key: Key, *, scored: bool = False) -> Batch:
        """Return clean samples of the job's data, whose images the rewards score if `scored`."""
        plan = self.sampler.plan(key, self.sampler.prompts(key, self.clock), self.clock)
        samples = self.sampler.read_data(plan, self.runners if scored else None)
        return self._batch(plan, made=make_batch(samples), scoring=Scoring(self.runners))

    def read_pairs(self, key: Key) -> Batch:
        """Return the next of the given preferences, as a batch of pairs."""
        given, size = self.sampler.read_pairs(key, self.clock)
        shape = tuple(given[0].win.shape)
        batch = self.sampler.pair_up(given, range(len(given)), shape, self.sampler.data_sampling(shape), size)
        return replace(batch, scoring=Scoring(self.runners))

    def pair(self, batch: Batch, win: Tensor, lose: Tensor) -> Batch:
        """Return pairs of samples of a batch, spread over the ranks again.

        Args:
            win, lose: index in the batch of the preferred sample of each pair, and of the other, `[N]`.
        """
        final, total = batch.trajectory.final, batch.share.batch
        # The two may be on different ranks: every rank gets all clean samples, which are small beside a trajectory.
        everyone = self.world.gather_data(final)[:total]
        chosen = [
            Preference(batch.prompt(better), everyone[better], everyone[worse])
            for better, worse in zip(win.tolist(), lose.tolist(), strict=True)
        ]
        numbers = [place // batch.compared for place in win.tolist()]
        pairs = self.sampler.pair_up(chosen, numbers, tuple(final.shape[1:]), batch.plan.sampling, None)
        self.log(padding=pairs.plan.padding)
        return pairs

    def score(self, batch: Batch) -> Batch:
        """Return a batch with the rewards of all of its samples, once they are there."""
        if batch.rewards is not None:
            return batch
        config = self.config
        assert batch.scoring is not None
        if config.engine.offload == "phases" and config.method.source is None:
            self.engine.offload()
        own = batch.scoring.collect(self.world, batch=batch.share.batch, stop=self.stop)
        rewards, self.stopping = gather_rewards(
            own,
            stop=self.stop(),
            group=1 if batch.paired else batch.plan.group,
            max_invalid=config.rollout.max_invalid,
            world=self.world,
        )
        self.engine.onload()
        self.networks.onload()
        return replace(batch, rewards=rewards)

    def reward(self, batch: Batch) -> Tensor:
        """Return the weighted sum of the rewards of each sample that is learnt from, `[N]`."""
        assert batch.rewards is not None
        return batch.rewards.scores[batch.kept] @ self.runners.weights

    def grade(self, batch: Batch, config: AdvantageConfig = ADVANTAGE) -> Grades:
        """Return the reward and the advantage of each sample that is learnt from, and which the loss is averaged over."""
        memory, rewards = self.memory, batch.rewards
        assert rewards is not None
        kept, weights = batch.kept, self.runners.weights
        scores = rewards.scores[kept]
        if config.floors:  # a reward with a floor has its multiplier as its weight, after this batch
            means = dict(zip(self.rewards, scores.double().mean(0).tolist(), strict=True))
            memory.multipliers = update_multipliers(
                memory.multipliers, means, config.floor_of, lr=config.floor_lr, most=config.floor_max
            )
            weights = learnt_weights(weights, list(self.rewards), memory.multipliers)
        prompts = [str(model_inputs([batch.prompt(place)])[0]) for place in kept.tolist()] if config.history else ()
        found = grade(scores, weights, batch.group, config, prompts=prompts, history=memory.rewards)
        self.log(advantage=found.advantage.clone())  # what a method does to its own changes no record
        return found

    def features(self, batch: Batch, name: str = "thumbnails") -> Tensor:
        """Return features of each sample that is learnt from, `[N, D]`, the same on every rank.

        Args:
            name: thumbnails (its pixels, averaged), or a function of (images, prompts) as module:name, of whose result each
                row is one sample's.
        """
        samples = batch.made.result()
        found = samples.thumbnails
        if name != "thumbnails":
            function = plugins.load(name, "features", plugins.callable_with("images", "prompts"), field="features")
            size, parts = self.config.samples_per_pass, []
            for i in range(0, len(samples.prompts), size):
                prompts = samples.prompts[i : i + size]
                with torch.no_grad():
                    images = decoded(self.job.model, samples.trajectory.final[i : i + size], model_inputs(prompts))
                parts.append(torch.as_tensor(function(images, texts(prompts))).flatten(1))
            found = torch.cat(parts).to(self.world.device)
        assert found is not None
        return self.world.gather_data(found.contiguous())[: batch.share.batch].cpu()[batch.kept]

    # items

    def record_steps(
        self,
        batch: Batch,
        key: Key,
        signal: Tensor | None = None,
        *,
        trained: Trained = ALL_RECORDED,
        keep: Tensor,
        skip_zero: bool = False,
    ) -> Items:
        """Return the recorded steps that are trained on, see `batch.record_steps`."""
        return record_steps(batch, signal, keep=keep, skip_zero=skip_zero, trained=trained, key=key)

    def noise_samples(
        self,
        batch: Batch,
        noising: NoisingConfig,
        key: Key,
        signal: Tensor | None = None,
        *,
        keep: Tensor | None = None,
        skip_zero: bool = False,
    ) -> Items:
        """Return the clean samples, or pairs, of a batch with noise, see `batch.noise_samples`."""
        noising = noising.choose_levels(on_schedule=self._on_schedule)
        return noise_samples(batch, noising, key, signal, keep=keep, skip_zero=skip_zero)

    def renoise(
        self, items: Items, x: Tensor, level: Tensor, levels: Levels, key: Key, highest: Tensor | None = None
    ) -> Items:
        """Return a noisy sample for each row of recorded steps, see `batch.renoise`."""
        return renoise(items, x, level, levels, key, highest)

    def return_to(self, batch: Batch, key: Key, count: int, *, keep: Tensor) -> Items:
        """Return the samples of a batch before their last `count` steps, see `batch.return_to`."""
        return return_to(batch, key, count, keep)

    def minibatches(self, items: Items, key: Key, passes: EpochsConfig) -> Iterator[Items]:
        """Yield the items of each update: the samples dealt to minibatches, the work spread evenly over the ranks.

        There are `passes.epochs` passes over the samples, each in `passes.minibatches` updates.
        """
        epochs, minibatches, total = passes.epochs, passes.minibatches, items.batch.share.batch
        if self._routed and items.rows.timestep is not None:
            host_values.read(items.rows.timestep)  # once, where levels are drawn on the device
        if epochs * minibatches > 1:  # with a single update the policy before it is the policy itself
            for name in self._before:
                with self.engine.inference() as module:
                    items = items.with_predictions(**{name: self._predictions(module, items, items.cond)})
        for epoch in range(epochs):
            if minibatches == 1:
                yield self._deal(items, items.used, items.count)
                continue
            drawn = uniform(fold_in(fold_in(key, Stream.MINIBATCH), epoch), (max(total, 1),))
            part = drawn.argsort().argsort()[:total] * minibatches // max(total, 1)
            for minibatch in range(minibatches):
                yield self._deal(items, items.used * (part == minibatch)[:, None], items.count / minibatches)

    # networks

    def predict(self, items: Items, *names: str) -> Items:
        """Return items with the predictions of those of the named networks that the method declares."""
        declared, known = self.networks.declared, items.rows.predictions
        todo = [name for name in names if name in declared and name not in known and name not in self._before]
        # Modules of their own come first, so that they and the engine's are not gathered at the same time.
        for name in sorted(todo, key=lambda name: name not in self.networks.separate):
            cond = self._condition(name, items)
            with self.networks.open(name) as module:
                items = items.with_predictions(**{name: self._predictions(module, items, cond)})
        return items

    def measure(self, items: Items, function: Callable[[Tensor, Any], Any]) -> Any:
        """Return a function of the policy's prediction at each row, `[P, ...]`, without gradient; no prediction is stored.

        Args:
            function: `(v, rows) -> tensors`, `[p, ...]` each.
        """
        found = []
        with self.engine.inference() as module, prefer(self.config.engine.implementation):
            for rows in self._passes(items):
                v = self._predict(module, rows, items.cond)
                before = {name: v for name in self._before if name not in rows.predictions}
                # Copied, because a function may return one buffer each time.
                found.append(optree.tree_map(lambda tensor: tensor.clone(), function(v, _with(rows, before))))
        return optree.tree_map(lambda *parts: torch.cat(parts)[: len(items.rows.level)], *found)

    def gather(self, items: Items, values: Tensor) -> Tensor:
        """Return a number per row of this rank as a table of all ranks, `[P] -> [B, M]`, 0 for items that are not used."""
        table = values.new_zeros(items.used.numel() + 1)  # the last entry is that of repeats
        table[items.rows.place[: items.real]] = values[: items.real]
        return self.world.gather_data(table[None, :-1].contiguous()).sum(0).view(items.used.shape)

    def mean(self, items: Items, values: Tensor) -> Tensor:
        """Return the mean of a number per row over the items of all ranks that are used, 0-d; of none it is 0."""
        used = to_device(items.used, values.device).to(values.dtype)
        return (self.gather(items, values) * used).sum() / used.sum().clamp(min=1)

    def update(self, items: Items, loss: Loss, *, network: str = "policy", split_guidance: bool = False) -> UpdateInfo:
        """Take one optimizer step on the mean of a loss over the items of all ranks.

        Args:
            items: what `minibatches` yields, with the predictions that the loss reads.
            loss: `(v, rows) -> (loss [P], diagnostics)`.
            network: name of the network that learns, whose prediction `v` is; an update of another than the policy is not
                yielded, and is recorded under its name.
            split_guidance: give the loss the conditional prediction, and with guidance the unconditional one in
                `rows.predictions["uncond"]` and the scale in `rows.guidance`.
        """
        items, loss = items if items.dealt else self._deal(items, items.used, items.count), self.check_loss(loss)
        cond = self._condition(network, items)
        with self.networks.train(network) as engine:
            info = engine.update(
                items.rows,
                lambda rows: self._loss(engine.module, rows, cond, loss, split_guidance=split_guidance),
                items.rows.weight,
                count=max(items.count, 1),
                micro_batch=self._pass_sizes(items.pad_to),
                pad_to=items.pad_to,
                inputs=cond,
                parts=items.rows.parts(items.batch.plan.sampling.schedule.levels),
            )
        if engine is not self.engine:
            record = {"loss": info.loss, "grad_norm": info.grad_norm, "lr": info.lr, "objective": info.mean}
            self.log(networks={**self.notes.get("networks", {}), network: record})
        return info

    def copy_policy(self, name: str) -> None:
        """Copy the policy to a network that follows it."""
        copy_adapter(self.engine.module, "default", name)

    def forward(self, items: Items, rows: Rows) -> Tensor:
        """Return the policy's prediction at rows of items, with gradient: for a loss that takes further steps."""
        return self._predict(self.engine.module, rows, items.cond)

    def rewards_of(self, final: Tensor, prompts: Sequence[Prompt], *, method: str) -> Tensor:
        """Return the weighted sum of the rewards of clean samples, `[P]`, with gradient.

        Args:
            method: name of the method, for messages.
        """
        images = decoded(self.job.model, final, model_inputs(prompts))
        return weighted_sum(self.rewards, Samples(images, list(prompts), final), objective=method)

    # below: what no method sees

    @property
    def _before(self) -> list[str]:
        return [name for name, network in self.networks.declared.items() if isinstance(network, Before)]

    def _generate(self, plan: RolloutPlan, runners: RewardRunners) -> SampleBatch:
        """Return samples of the network that makes rollouts now, which the rewards score meanwhile."""
        if self.config.engine.offload == "phases":
            self.engine.offload(parameters=False)
            self.networks.offload()
        self.sampler.source.push(self.engine, self.engine.updates)
        # From elsewhere one rank may fail where no collective tells the others.
        failing = self.world.agreed if self.config.rollout.source else nullcontext
        return self.sampler.generate_verified(plan, runners, self.networks.open_sampler, self.world, failing=failing)

    def _encode(self, sampling: Sampling, prompts: Sequence[Prompt]) -> Cond:
        """Return the conditioning of prompts, computed in the rollout's own passes."""
        size = self.config.samples_per_pass
        parts = [sampling.encode(self.job.model, prompts[i : i + size]) for i in range(0, len(prompts), size)]
        cond: Cond = optree.tree_map(host_values.join, *parts)
        return cond

    def _find_flat(self, batch: Batch, floor: float) -> list[int]:
        """Return the groups all of whose samples that are compared have equal weighted rewards."""
        assert batch.rewards is not None
        reward = (batch.rewards.scores @ self.runners.weights).double()
        spread = reward.unflatten(0, (-1, batch.plan.group // batch.compared, batch.compared)).std(2).amax(1)
        flat: list[int] = torch.nonzero(spread <= floor).flatten().tolist()
        return flat

    def _batch(self, plan: RolloutPlan, **fields: Any) -> Batch:
        sampling, slots = self.config.method.sampling, len(plan.requests.ids)
        share = Share(self.world.data_rank * slots, slots, sampling.batch // sampling.group * plan.group)
        compared, prediction = sampling.window.count_compared(plan.group), self.job.model.prediction
        return Batch(plan, share, share.numbers, compared, prediction, **fields)

    def _deal(self, items: Items, used: Tensor, count: float) -> Items:
        """Return this rank's part of an update: the used items, as many on each rank as passes are saved by it."""
        share, ranks = items.batch.share, self.world.data_size
        repeats = used.new_zeros((ranks * share.slots - len(used), used.shape[1]))
        by_rank = torch.cat([used, repeats]).unflatten(0, (ranks, share.slots))
        held = [int(number) for number in (by_rank != 0).sum((1, 2))]
        rows, cond = select(items.rows, by_rank[self.world.data_rank].T.flatten()), items.cond
        longest = -(-sum(held) // len(held))
        passes = [sum(split(number, self._pass_sizes(number))) for number in (max(held), longest)]
        if passes[0] > passes[1]:
            rows, cond = rebalance(rows, cond, held, self.world)
        else:
            longest = max(held)
        real = len(rows.level)
        if not real:  # a rank without items still takes part in the collectives
            first = optree.tree_map(lambda tensor: tensor[:1].clone(), items.rows)
            rows = first._replace(weight=torch.zeros_like(first.weight))
        return replace(items, rows=rows, cond=cond, used=used, count=count, pad_to=max(longest, 1), real=real, dealt=True)

    def _condition(self, network: str, items: Items) -> Cond:
        """Return the conditioning of items for a network."""
        return self.networks.condition(network, items.cond, self.config.method.sampling.guidance.negative)

    def _loss(self, module: nn.Module, rows: Any, cond: Cond, loss: Loss, *, split_guidance: bool) -> tuple[Tensor, Any]:
        """Return the loss of each row of a micro-batch, and diagnostics."""
        model = self.job.model
        inputs, options = self._inputs(rows, cond)
        if split_guidance and isinstance(inputs[-1], Guided) and is_classifier_free(model):
            v, v_uncond = guidance_halves(model, module, *inputs, **options)
            scale = scale_at(model, inputs[-1], rows.level, rows.timestep)
            rows = _with(rows, {"uncond": v_uncond})._replace(guidance=scale)
        else:
            v = self._predict(module, rows, cond)
        before = {name: v.detach() for name in self._before if name not in rows.predictions}
        with prefer(self.config.engine.implementation):
            return loss(v, _with(rows, before))

    def _predict(self, module: nn.Module, rows: Rows, cond: Cond) -> Tensor:
        """Return the prediction at each row; both samples of a pair go through one forward pass."""
        inputs, options = self._inputs(rows, cond)
        v = guided_velocity(self.job.model, module, *inputs, **options)
        return v.unflatten(0, (-1, 2)) if isinstance(rows, Pairs) else v

    def _inputs(self, rows: Rows, cond: Cond) -> tuple[tuple[Tensor, Tensor, Cond], dict[str, Any]]:
        """Return the model's inputs (x, level, conditioning) for a micro-batch, and the options of its guidance."""
        guidance = self.config.method.sampling.guidance
        if guidance.update == "conditional" and isinstance(cond, Guided):
            cond = cond.cond
        x, level, sample, timestep = rows.x, rows.level, rows.sample, rows.timestep
        if isinstance(rows, Pairs):
            x, level, sample = x.flatten(0, 1), level.repeat_interleave(2), sample.repeat_interleave(2)
            timestep = None if timestep is None else timestep.repeat_interleave(2)
        inputs = x, level, optree.tree_map(lambda table: host_values.rows(table, sample), cond)
        forwards = self.config.update_forwards(len(x))
        return inputs, {"timestep": timestep, "forwards": forwards, "gradient": guidance.gradient}

    def _predictions(self, module: nn.Module, items: Items, cond: Cond) -> Tensor:
        """Return a network's prediction at each row, `[P, ...]`, computed in the update's own micro-batches."""
        return torch.cat([self._predict(module, rows, cond) for rows in self._passes(items)])[: len(items.rows.level)]

    def _passes(self, items: Items) -> Iterator[Any]:
        """Yield the rows of items in micro-batches."""
        sizes = self._pass_sizes(items.pad_to)
        return micro_batches(items.rows, micro_batch=sizes, pad_to=items.pad_to, device=self.world.device)

    def _pass_sizes(self, count: int) -> tuple[int, ...]:
        """Return the items per pass of `count` items; none is smaller than a rollout's rows, which have its bits."""
        return self.config.pass_sizes(count, self.pairs)


def _with(rows: Any, predictions: Mapping[str, Tensor]) -> Any:
    """Return rows with the predictions of further networks."""
    return rows._replace(predictions={**rows.predictions, **predictions})
