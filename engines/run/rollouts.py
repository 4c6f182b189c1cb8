"""The first half of the interface of methods: batches of samples, their rewards and advantages."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import optree
import torch
from torch import Tensor

from fluvial.core.random import Key, fold_in
from fluvial.engines import plugins
from fluvial.engines.data.preferences import Preference
from fluvial.engines.data.records import Prompt, model_inputs, texts
from fluvial.engines.engine.engine import Engine
from fluvial.engines.errors import UsageError
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.declared import Loss
from fluvial.engines.run.jobs.base import Job
from fluvial.engines.run.networks import BuiltNetworks
from fluvial.engines.run.sampler import RolloutSampler
from fluvial.engines.sampling.batch import Batch, RolloutSpec, make_batch, replace_groups
from fluvial.engines.sampling.config import AllGroups
from fluvial.engines.sampling.generate import SampleBatch, Sampling, finish
from fluvial.engines.sampling.items import Share
from fluvial.engines.sampling.noising import knows_its_schedule_only
from fluvial.engines.scoring.advantages import (
    AdvantageConfig,
    Grades,
    extreme,
    grade,
    learnt_weights,
    update_multipliers,
    weigh_rewards,
)
from fluvial.engines.scoring.gather import Rewards, Scoring, gather_rewards
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.runner import RewardRunners
from fluvial.engines.streams import Stream
from fluvial.kernels.dispatch import resolve
from fluvial.models import Cond, decode_samples, host_values, is_recorded, knows_any_level
from fluvial.models.routing import Routed

ADVANTAGE, ALL_GROUPS = AdvantageConfig(), AllGroups()


class Memory(Protocol):
    """State of a run between batches, part of its checkpoints."""

    rewards: dict[str, list[float]]  # latest rewards of each prompt
    state: dict[str, list[float]]  # numbers of the method, by name
    multipliers: dict[str, float]  # of each reward with a floor


class Rollouts:
    """Collection and scoring of batches; its subclass `Run` adds predictions and updates.

    Args:
        networks: the policy's engine, and the networks that the method declares.
        sampler: chooses prompts and generates samples.
        rewards: rewards with their weights, by name.
        runners: threads of these rewards.
        memory: state between batches.
        pairs: micro-batch sizes in (sample, step) pairs that `engine.update_micro_batch` auto chose.
        stop: returns whether this rank was asked to stop.
        check_loss: wraps a custom method's loss to check its results; None for built-in methods.

    Raises:
        UsageError: the implementation does not run on this device.
    """

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        networks: BuiltNetworks,
        sampler: RolloutSampler,
        rewards: Mapping[str, tuple[Reward, float]],
        runners: RewardRunners,
        memory: Memory,
        *,
        pairs: Sequence[int] = (),
        stop: Callable[[], bool] = lambda: False,
        check_loss: Callable[[Loss], Loss] | None = None,
    ) -> None:
        self.config, self.job, self.networks, self.sampler = config, job, networks, sampler
        self.rewards, self.runners, self.memory, self.stop = rewards, runners, memory, stop
        self.check_loss, self.pairs = check_loss, tuple(pairs)
        if len(rewards) < (least := config.method.needs.least_rewards):
            hint = f"{config.method.method_name} compares the first one with the others"
            raise UsageError("rewards", config.rewards, f"at least {least}", hint)
        self.engine: Engine = networks.engine
        self.world, self.stopping, self.notes = self.engine.world, False, dict[str, Any]()
        replayed = is_recorded(job.model) and not knows_any_level(job.model)
        self._on_schedule = knows_its_schedule_only(job.model.prediction, recorded=replayed)
        self._routed = any(isinstance(part, Routed) for part in self.engine.sharded.parts)
        try:
            resolve("train", config.engine.implementation, [torch.empty(0, device=self.world.device)])
        except ValueError as error:
            raise UsageError(str(error).removeprefix("train: ")) from error

    @property
    def clock(self) -> int:
        """Number of updates so far, e.g. for a coefficient that falls over training."""
        return self.engine.updates

    @property
    def state(self) -> dict[str, list[float]]:
        """Numbers that the method keeps between batches, by name, part of checkpoints."""
        return self.memory.state

    def log(self, **values: Any) -> None:
        """Add values to the record of this batch."""
        self.notes.update(values)

    def average(self, name: str, value: float, decay: float) -> float:
        """Return a moving average m <- decay m + (1 - decay) value, which starts at the first value; checkpoints hold it.

        Pass the same value on every rank.
        """
        (before,) = self.state.get(name, [value])
        self.state[name] = [after := decay * before + (1 - decay) * value]
        return after

    def sample(
        self, key: Key, *, group: int | None = None, steps: int | None = None, starts: Sequence[int] | None = None
    ) -> Batch:
        """Generate samples of the next prompts with the network that currently generates rollouts, and start scoring them.

        Args:
            group: number of samples per prompt. Unless None, they are scored but not trained on, e.g. to choose among them.
            steps: number of steps of these; by default the method's.
            starts: index of each sample's initial noise, `[B]`; by default the sample's own.
        """
        sampling, draft, runners = self.config.method.sampling, None, self.runners
        if group is not None:
            draft = replace(sampling, group=group, steps=steps or sampling.steps, groups=ALL_GROUPS)  # type: ignore[call-arg]
            runners = self.runners.fork(group)
        spec = self.sampler.specify(
            key, self.sampler.choose_prompts(key, self.clock), self.clock, draft=draft, starts=starts
        )
        samples = self._generate(spec, runners)
        return self._batch(spec, made=make_batch(samples), scoring=Scoring(runners), version=self.engine.updates)

    def fill(self, batch: Batch, key: Key, *, rounds: int, floor: float = 0.0) -> Batch:
        """Replace flat groups of a batch by samples of other prompts; groups that stay flat are skipped.

        Args:
            key: key of the batch.
            rounds: largest number of rounds of replacement.
            floor: a group is flat if the standard deviation of its weighted reward is at most this.
        """
        batch, replaced = self.score(batch), 0
        flat = self._find_flat(batch, floor)
        for number in range(1, rounds + 1):
            if not flat:
                break
            spec = self.sampler.respecify(batch.spec, flat, key, self.clock, number)
            samples = self._generate(spec, self.runners)
            scoring = Scoring(self.runners)
            scoring.collect(self.world, batch=batch.share.batch, stop=self.stop)
            earlier = batch.made.result()
            if spec.sampling.text_tokens != batch.spec.sampling.text_tokens:
                earlier = earlier._replace(cond=self._encode(spec.sampling, earlier.prompts))
            batch = self.score(replace_groups(batch, spec, samples, scoring, flat, earlier))
            replaced, flat = replaced + len(flat), self._find_flat(batch, floor)
        skipped = torch.zeros(len(batch.spec.asked), dtype=torch.bool)
        skipped[flat] = True
        self.log(refill={"replaced": replaced, "flat": len(flat)})
        return replace(batch, skipped=skipped.repeat_interleave(batch.spec.group))

    def find_extremes(self, batch: Batch, count: int) -> list[int]:
        """Return the indices of the `count` best and the `count` worst samples of each group by reward, in their order.

        Samples without a valid reward rank in the middle.
        """
        assert batch.rewards is not None
        by_group = weigh_rewards(batch.rewards.scores, self.runners.weights).unflatten(0, (-1, batch.spec.group))
        reward = torch.where(by_group.isnan(), by_group.nanmedian(1, keepdim=True).values, by_group).nan_to_num().flatten()
        chosen = extreme(reward, torch.arange(len(reward)) // batch.spec.group, count)
        indices: list[int] = torch.nonzero(chosen).flatten().tolist()
        return indices

    def read(self, key: Key, *, scored: bool = False) -> Batch:
        """Return clean samples of the job's data; with `scored`, start scoring their images."""
        spec = self.sampler.specify(key, self.sampler.choose_prompts(key, self.clock), self.clock)
        samples = self.sampler.read_data(spec, self.runners if scored else None)
        return self._batch(spec, made=make_batch(samples), scoring=Scoring(self.runners))

    def read_images(self, batch: Batch, key: Key) -> Tensor:
        """Return a clean sample of the job's data for the prompt of each of this rank's samples, `[slots, *event]`."""
        return self.sampler.read_images(batch.spec.requests._replace(key=fold_in(key, Stream.IMAGES)))

    def read_pairs(self, key: Key) -> Batch:
        """Return the next pairs of the preference dataset."""
        pairs, size = self.sampler.read_pairs(key, self.clock)
        shape = tuple(pairs[0].win.shape)
        sampling = Sampling(shape, self.sampler.schedules.of(shape)[0], self.config.method.sampling.guidance)
        batch = self.sampler.pair_up(pairs, range(len(pairs)), sampling, size)
        return replace(batch, scoring=Scoring(self.runners))

    def pair(self, batch: Batch, win: Tensor, lose: Tensor) -> Batch:
        """Return pairs of samples of a batch, spread over the ranks again.

        Args:
            win, lose: indices in the batch of the preferred and the other sample of each pair, `[N]`.
        """
        total = batch.share.batch
        # The two may be on different ranks. Every rank gets all clean samples, which are small compared to trajectories.
        final = self.world.gather_data(batch.trajectory.final)[:total]
        chosen = [
            Preference(batch.prompt(better), final[better], final[worse])
            for better, worse in zip(win.tolist(), lose.tolist(), strict=True)
        ]
        numbers = [index // batch.compared for index in win.tolist()]
        pairs = self.sampler.pair_up(chosen, numbers, batch.spec.sampling, None)
        self.log(padding=pairs.spec.padding)
        return pairs

    def score(self, batch: Batch) -> Batch:
        """Wait for the rewards of all samples of a batch, and return the batch with them."""
        if batch.rewards is not None:
            return batch
        config = self.config
        assert batch.scoring is not None
        if config.engine.offload == "phases" and config.method.source is None:
            self.engine.offload()
        rewards = self._gather_rewards(batch, batch.scoring)
        self.engine.onload()
        self.networks.onload()
        return replace(batch, rewards=rewards)

    def finish(self, batch: Batch, x: Tensor, step: int, *, jump: bool = False) -> Batch:
        """Finish intermediate samples of a scored batch with deterministic steps, score them, and return the new batch.

        The network is the one that currently generates rollouts. Groups in which a reward fails are dropped.

        Args:
            x: samples of this rank before a step, `[slots, *event]`, e.g. recorded ones.
            step: index of that step in the schedule, the same for all samples; T if x is clean already.
            jump: take one step to the end of the schedule instead of all remaining steps.
        """
        assert batch.rewards is not None
        spec, made, runners, parts = batch.spec, batch.made.result(), self.runners.fork(), list[Tensor]()
        how = spec.requests, spec.sampling
        with self.networks.open_sampler() as module:
            for chunk in finish(self.job.model, module, made, *how, x, step, micro_batch=spec.per_pass, jump=jump):
                done = sum(map(len, parts))
                ids = spec.numbers[done : done + spec.per_pass]
                runners.submit(chunk.images, chunk.prompts, chunk.trajectory.final, ids)
                parts.append(chunk.trajectory.final)
        rewards = self._gather_rewards(batch, Scoring(runners))
        rewards = rewards._replace(kept=rewards.kept & batch.rewards.kept)
        trajectory = made.trajectory._replace(final=torch.cat(parts))
        return replace(batch, made=make_batch(made._replace(trajectory=trajectory)), rewards=rewards)

    def weigh_rewards(self, batch: Batch) -> Tensor:
        """Return the weighted sum of rewards of each sample that is trained on, `[N]`."""
        assert batch.rewards is not None
        return weigh_rewards(batch.rewards.scores[batch.kept_ids], self.runners.weights)

    def grade(self, batch: Batch, config: AdvantageConfig = ADVANTAGE, gains: Tensor | None = None) -> Grades:
        """Return reward and advantage of each sample that is trained on, and which samples the loss is averaged over.

        Args:
            gains: reward of each recorded step, `[N, S]`; advantages are then per step.
        """
        memory, rewards = self.memory, batch.rewards
        assert rewards is not None
        kept, weights = batch.kept_ids, self.runners.weights
        scores = rewards.scores[kept]
        if config.floors:  # the weight of a reward with a floor is its multiplier, updated by this batch
            means = dict(zip(self.rewards, scores.double().mean(0).tolist(), strict=True))
            memory.multipliers = update_multipliers(
                memory.multipliers, means, config.floor_of, lr=config.floor_lr, most=config.floor_max
            )
            weights = learnt_weights(weights, list(self.rewards), memory.multipliers)
        prompts = [str(model_inputs([batch.prompt(index)])[0]) for index in kept.tolist()] if config.history else ()
        grades = grade(scores, weights, batch.group, config, gains=gains, prompts=prompts, history=memory.rewards)
        self.notes["advantage"] = grades.advantage.flatten().clone()  # copied, so that a method cannot change the record
        return grades

    def extract_features(self, batch: Batch, name: str = "thumbnails") -> Tensor:
        """Return features of each sample that is trained on, `[N, D]`, the same on every rank.

        Args:
            name: thumbnails (averaged pixels), or a function (images, prompts) -> `[N, D]` as module:name.
        """
        samples = batch.made.result()
        features = samples.thumbnails
        if name != "thumbnails":
            expected = plugins.make_call_check("images", "prompts")
            function = plugins.load(name, "features", expected, table={}, field="features")
            size, parts = self.config.samples_per_pass, []
            for i in range(0, len(samples.prompts), size):
                prompts = samples.prompts[i : i + size]
                with torch.no_grad():
                    images = decode_samples(self.job.model, samples.trajectory.final[i : i + size], model_inputs(prompts))
                # Copied, because the function may reuse one buffer.
                parts.append(torch.as_tensor(function(images, texts(prompts))).flatten(1).clone())
            features = torch.cat(parts).to(self.world.device)
        assert features is not None
        return self.world.gather_data(features.contiguous())[: batch.share.batch].cpu()[batch.kept_ids]

    # private: not for methods

    def _gather_rewards(self, batch: Batch, scoring: Scoring) -> Rewards:
        """Wait for the rewards of all samples of a batch, and return them."""
        collected = scoring.collect(self.world, batch=batch.share.batch, stop=self.stop)
        options: dict[str, Any] = {
            "group": batch.spec.group,
            "max_invalid": self.config.rollout.max_invalid,
            "world": self.world,
        }
        rewards, stopping = gather_rewards(collected, stop=self.stop(), **options)
        self.stopping |= stopping
        return rewards

    def _generate(self, spec: RolloutSpec, runners: RewardRunners) -> SampleBatch:
        """Generate samples with the network that currently generates rollouts, and start scoring them."""
        if self.config.engine.offload == "phases":
            self.engine.offload(parameters=False)
            self.networks.offload()
        self.sampler.source.push(self.engine, self.engine.updates)
        # A remote source may fail on one rank alone, outside of any collective.
        failing = self.world.agreed if self.config.rollout.source else nullcontext
        return self.sampler.generate_verified(spec, runners, self.networks.open_sampler, self.world, failing=failing)

    def _encode(self, sampling: Sampling, prompts: Sequence[Prompt]) -> Cond:
        """Return the conditioning of prompts, encoded in micro-batches of the rollout's size."""
        size = self.config.samples_per_pass
        parts = [sampling.encode(self.job.model, prompts[i : i + size]) for i in range(0, len(prompts), size)]
        cond: Cond = optree.tree_map(host_values.join, *parts)
        return cond

    def _find_flat(self, batch: Batch, floor: float) -> list[int]:
        """Return the indices of groups whose compared samples have weighted rewards that differ by at most `floor` (std)."""
        assert batch.rewards is not None
        reward = weigh_rewards(batch.rewards.scores, self.runners.weights).double()
        spread = reward.unflatten(0, (-1, batch.spec.group // batch.compared, batch.compared)).std(2).amax(1)
        flat: list[int] = torch.nonzero(spread <= floor).flatten().tolist()
        return flat

    def _batch(self, spec: RolloutSpec, **fields: Any) -> Batch:
        sampling, slots = self.config.method.sampling, len(spec.requests.ids)
        share = Share(self.world.data_rank * slots, slots, sampling.batch // sampling.group * spec.group)
        compared, prediction = sampling.window.count_compared(spec.group), self.job.model.prediction
        return Batch(spec, share, share.numbers, compared, prediction, **fields)
