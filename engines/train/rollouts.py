"""Samples of a run: rollouts of the policy, from any source, and clean samples of the job's data."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Literal, NamedTuple

import optree
import torch
from torch import Tensor

from fluvial.core.random import Key, fold_in, key
from fluvial.core.rollout import unrecorded
from fluvial.engines.data.buckets import BatchOrder, distinct_batch, drawn_batch, size_of_batch
from fluvial.engines.data.captions import Captions
from fluvial.engines.data.order import order_key
from fluvial.engines.data.preferences import EncodedPreferences, Preference
from fluvial.engines.data.records import as_prompt
from fluvial.engines.data.sizes import Size
from fluvial.engines.fsdp.engine import Engine
from fluvial.engines.fsdp.world import World
from fluvial.engines.rewards.runner import RewardRunners
from fluvial.engines.rollout.generate import (
    Chunk,
    Requests,
    SampleBatch,
    Sampling,
    SharedPrefix,
    StochasticSteps,
    joined,
    slots,
)
from fluvial.engines.rollout.schedules import Schedules
from fluvial.engines.rollout.streams import Stream
from fluvial.engines.rollout.text import Padding, TextLengths
from fluvial.engines.rollout.window import windows
from fluvial.engines.sources.copied import Copy, held
from fluvial.engines.sources.handshake import Handshake, check
from fluvial.engines.sources.protocol import RolloutSource
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.job import Job
from fluvial.engines.train.monitoring.diagnostics import thumbnails
from fluvial.engines.train.policies import Policies

FIRST = 0  # updates before the first rollout
GREETING = 0  # seed of the samples by which servers are compared with the trainer


class Plan(NamedTuple):
    """A rollout that can be asked for: which samples, and how they are made."""

    requests: Requests  # of this rank
    sampling: Sampling
    numbers: list[int]  # index of each sample in the rollout, -1 for a repeat
    size: Size | None  # of the samples, where there are several sizes
    padding: Padding | None  # of the prompts, where it is trimmed


class Rollouts:
    """Asks for this rank's samples of each rollout.

    Args:
        config: the run.
        job: model and prompts.
        world: process group.
        engine: engine whose module is the policy.
        policies: the other policies, which are offloaded while samples are made.
        source: maker of the samples.
        schedules: schedule, and sampler of the stochastic steps, by the shape of a sample.
        texts: lengths that prompts are padded to.
        copy: network whose weights are pushed, where rollouts are made ahead of the updates.

    Raises:
        UsageError: images of one caption are compared, and no caption has two.
    """

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        world: World,
        *,
        engine: Engine,
        policies: Policies,
        source: RolloutSource,
        schedules: Schedules,
        texts: TextLengths,
        copy: Copy | None = None,
    ) -> None:
        self.config, self.job, self.world = config, job, world
        self.engine, self.policies, self.source, self.schedules, self.texts = engine, policies, source, schedules, texts
        self.copy = copy
        self.size: Size | None = None  # of the last samples, where there are several sizes
        self._order: BatchOrder | None = None
        self._has_met = False
        self._captions = Captions(job.prompts) if config.objective.traits.groups == "caption" else None

    def prompts(self, root: Key, updates: int) -> list[str]:
        """Return the prompt of each group of a rollout, the same on every rank.

        Where the samples of a group are different images, it is the prompt of each sample.

        Args:
            root: key of the rollout.
            updates: number of updates before those on this rollout.
        """
        known, rollout = self.job.prompts, self.config.rollout
        if self._captions is not None:
            keys, groups = (
                fold_in(root, Stream.CAPTIONS),
                enumerate(self._places(root, self._captions.firsts, rollout.prompts, updates)),
            )
            drawn = (self._captions.drawn(caption, fold_in(keys, group), rollout.group) for group, caption in groups)
            return [known[place] for places in drawn for place in places]
        count = rollout.batch if self.config.objective.traits.groups == "data" else rollout.prompts
        return [known[place] for place in self._places(root, known, count, updates)]

    def samples(self, root: Key, asked: list[str], rewards: RewardRunners) -> SampleBatch:
        """Return this rank's samples, from a rollout or from the job's data; every rank must take part.

        Args:
            root: key of the rollout.
            asked: prompt of each group, or of each sample.
            rewards: scorers of the images; scoring starts while the next chunk is generated.
        """
        plan = self.plan(root, asked, self.engine.updates)
        if not self.config.makes_samples:
            return self._data(plan, rewards)
        if self.config.engine.offload == "phases":
            self.engine.offload(parameters=False)
            self.policies.offload()
        self.source.push(self.engine, self.engine.updates)
        if not self.config.rollout.source:
            return self.made(plan, rewards)
        with self.world.agreed():  # one rank may fail where no collective tells the others
            return self.made(plan, rewards)

    def greet(self) -> Handshake | None:
        """Compare what servers make of one prompt with the trainer's own numbers, once; every rank must take part.

        Returns:
            The comparison; None where it was made before, or where no servers make the samples.

        Raises:
            RunError: they are too far apart.
        """
        rollout, root = self.config.rollout, fold_in(key(GREETING), FIRST)
        if self._has_met or not rollout.is_served:
            return None
        self._has_met = True
        plan = self.plan(root, [self.job.prompts[0]] * rollout.prompts, self.engine.updates)
        asked, size = plan.requests, self.config.samples_per_pass
        same = None if asked.initial_ids is None else asked.initial_ids[:size]
        if self.copy is None:
            self.source.push(self.engine, self.engine.updates)
        else:
            self.copy.load(held(self.engine), self.engine.updates)
            with self.world.agreed():  # the other ranks ask when rank 0 has pushed
                self.source.push(self.copy, self.engine.updates)
        found = self.source.greet(Requests(asked.prompts[:size], asked.ids[:size], asked.key, same), plan.sampling)
        if found is not None:
            corrected = self.config.correction.mode != "none"
            check(found, tolerance=rollout.servers.tolerance, corrected=corrected, world=self.world)
        return found

    def plan(self, root: Key, asked: list[str], updates: int) -> Plan:
        """Return what to ask of the source for a rollout; every rank must take part.

        Args:
            root: key of the rollout.
            asked: prompt of each group, or of each sample.
            updates: number of updates before those on this rollout.
        """
        rollout = self.config.rollout
        ids, real = slots(rollout.batch, micro_batch=self.config.samples_per_pass, world=self.world)
        numbers = [number if counts else -1 for number, counts in zip(ids, real, strict=True)]
        prompts, shape = [asked[i * len(asked) // rollout.batch] for i in ids], self._shape(root, asked)
        negative = [] if self.config.kl.guidance is None else [rollout.guidance.negative]
        tokens = self.texts.of([*rollout.guidance.texts(self.job.model, prompts), *negative])
        alike = rollout.shared_noise or rollout.share_prefix or rollout.branches is not None
        initial_ids = [i // rollout.trunk for i in ids] if alike else None
        requests = Requests(prompts, ids, fold_in(root, Stream.SAMPLES), initial_ids)
        return Plan(requests, self._sampling(root, tokens, shape, updates), numbers, self.size, self.texts.padding)

    def made(self, plan: Plan, rewards: RewardRunners, *, seen: Callable[[Chunk], None] | None = None) -> SampleBatch:
        """Return the samples of a rollout as the source makes them with the weights that it has.

        Args:
            plan: the rollout.
            rewards: scorers of the images.
            seen: function of each chunk, called before it is scored.
        """
        size, parts = self.config.samples_per_pass, list[SampleBatch]()
        with closing(self.source.generate(plan.requests, plan.sampling, micro_batch=size)) as chunks:
            for chunk in chunks:
                if seen is not None:
                    seen(chunk)
                own = plan.numbers[size * len(parts) :][: len(chunk.prompts)]
                rewards.submit(chunk.images, chunk.prompts, chunk.trajectory.final, own)  # the images are not kept
                parts.append(SampleBatch(chunk.prompts, chunk.cond, chunk.trajectory, thumbnails(chunk.images)))
        return joined(parts)

    def preferences(self, root: Key, given: tuple[Preference, ...] | EncodedPreferences) -> list[Preference]:
        """Return the given preferences that an update learns from, the same on every rank."""
        prompts = given.prompts if isinstance(given, EncodedPreferences) else [preference.prompt for preference in given]
        places = self._places(root, prompts, self.config.rollout.prompts, self.engine.updates)
        self.size = as_prompt(prompts[places[0]]).size
        return [given[place] for place in places]

    def _places(self, root: Key, of: Sequence[str], count: int, done: int) -> list[int]:
        """Return the indices of the `count` prompts that the rollout after `done` updates takes."""
        config = self.config
        if config.prompt_order != "epochs":
            drawn = root if config.data_seed is None else fold_in(key(config.data_seed), done)
            batch = drawn_batch if config.prompt_order == "draws" else distinct_batch
            return batch(of, fold_in(drawn, Stream.PROMPTS), count)
        if self._order is None:
            seed = config.seed if config.data_seed is None else config.data_seed
            self._order = BatchOrder(of, order_key(seed), self.job.source_weights)
        return self._order.batch(done // config.updates_per_rollout, count)

    def _shape(self, root: Key, asked: Sequence[str]) -> tuple[int, ...]:
        """Return the shape of the samples of a rollout, the same on every rank: of its prompts' size, or of one drawn."""
        sizes = self.job.sizes
        if not sizes:
            return self.job.shape
        self.size = size_of_batch(asked, fold_in(root, Stream.SIZE), list(sizes))
        return sizes[self.size]

    def _sampling(self, root: Key, tokens: int | None, shape: tuple[int, ...], updates: int) -> Sampling:
        """Return how the samples of a rollout are made, with its windows of noise and the length of its prompts."""
        config, rollout, on_steps = self.config, self.config.rollout, self.config.objective.traits.trains_on == "steps"
        stochastic, done = None, updates // config.updates_per_rollout
        first = fold_in(key(config.seed), FIRST)  # key of the first rollout
        schedule, sampler = self.schedules.of(shape)
        if on_steps or not rollout.is_deterministic:
            stochastic = StochasticSteps(
                sampler,
                windows(
                    fold_in(first if rollout.window_draw == "run" else root, Stream.WINDOW),
                    done,
                    rollout.steps,
                    rollout.window_size,
                    *rollout.window_range,
                    draw=rollout.window_draw,
                    contiguous=rollout.contiguous,
                    moves=rollout.moves,
                    group=rollout.group,
                    branches=rollout.branches,
                ),
                record=on_steps,
                form=config.recorded_form,
                reduction=rollout.reduction,
                keep_velocity=on_steps and "old" in config.objective.traits.compares_with,
                implementation=config.implementation,
            )
        return Sampling(
            shape, schedule, rollout.guidance, rollout.solver,
            rollout.eta if rollout.is_deterministic else 0.0, stochastic, autocast=rollout.autocast,
            prefix=self._prefix(stochastic) if rollout.share_prefix else None, text_tokens=tokens, after=rollout.after,
            reuse=self._reuse(), step_cache=rollout.step_cache,
        )  # fmt: skip

    def _reuse(self) -> Literal["all", "outside_blocks", "none"]:
        """Return which layers that see the prompt alone are computed once.

        A compiled block is one program, and a block that is left out calls no layers.
        """
        if not self.config.rollout.reuse_prompt:
            return "none"
        return "outside_blocks" if self.engine.compiles or self.config.rollout.step_cache else "all"

    def _prefix(self, stochastic: StochasticSteps | None) -> SharedPrefix:
        """Return the steps that the samples of a group share: those before every window of the rollout."""
        rollout = self.config.rollout
        assert stochastic is not None
        same = rollout.window_draw == "rollout"
        return SharedPrefix(min(stochastic.steps_of([0])) if same else rollout.window_low, rollout.group)

    def _data(self, plan: Plan, rewards: RewardRunners) -> SampleBatch:
        """Return clean samples of the job's data; rewards score their images, where the objective compares them."""
        assert self.job.data is not None
        size, device, parts = self.config.samples_per_pass, self.world.device, []
        prompts, ids, tokens = plan.requests.prompts, plan.requests.ids, plan.sampling.text_tokens
        for start in range(0, len(ids), size):
            part = list(prompts[start : start + size])
            # One key per chunk, of the id of its first sample, so that a sample does not depend on the number of ranks.
            x0: Tensor = self.job.data(fold_in(plan.requests.key, ids[start]), part).to(device)
            if self.config.scores_samples:
                with torch.no_grad():
                    rewards.submit(self.job.model.decode(x0), part, x0, plan.numbers[start : start + size])
            cond = optree.tree_map(
                lambda tensor: tensor.to(device), self.config.rollout.guidance.encode(self.job.model, part, tokens)
            )
            parts.append(SampleBatch(part, cond, unrecorded(x0), None))
        return joined(parts)
