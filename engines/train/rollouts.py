"""Samples of a run: rollouts of the policy, from any source, and clean samples of the job's data."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Literal, NamedTuple

import optree
import torch
from torch import Tensor

from fluvial.core.random import Key, fold_in, key
from fluvial.core.rollout import unrecorded
from fluvial.core.transitions import Transition
from fluvial.engines.data.order import BatchOrder, Captions, distinct_batch, drawn_batch, order_key, size_of_batch
from fluvial.engines.data.preferences import EncodedPreferences, Preference
from fluvial.engines.data.records import Prompt, copied, model_inputs
from fluvial.engines.data.sizes import Size
from fluvial.engines.fsdp.engine import Engine
from fluvial.engines.fsdp.world import World
from fluvial.engines.rewards.runner import RewardRunners
from fluvial.engines.rollout.config import Schedules
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
from fluvial.engines.rollout.text import Padding, TextLengths
from fluvial.engines.sources.handshake import Handshake, ServedStep, check, differences, served_steps
from fluvial.engines.sources.protocol import Behaviour, RolloutSource
from fluvial.engines.sources.sampler_copy import Copy, held
from fluvial.engines.streams import Stream
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.job import Job
from fluvial.engines.train.monitoring.diagnostics import thumbnails
from fluvial.engines.train.policies import Policies
from fluvial.models import Schedule, decoded
from fluvial.models.host_values import to_device

FIRST_ROLLOUT = 0  # updates before the first rollout
HANDSHAKE_SEED = 0  # seed of the samples by which servers are compared with the trainer


class RolloutPlan(NamedTuple):
    """A rollout that can be asked for: which samples, and how they are made."""

    asked: list[Prompt]  # prompt of each group, or of each sample; the same on every rank
    requests: Requests  # of this rank
    sampling: Sampling
    numbers: list[int]  # index of each sample in the rollout, -1 for a repeat
    size: Size | None  # of the samples, where there are several sizes
    padding: Padding | None  # of the prompts, where it is trimmed
    transitions: Transition | None = None  # coefficients of each step of the schedule, `[T]`, where steps are recorded


class Rollout(NamedTuple):
    """This rank's samples of a rollout, or of the job's data."""

    plan: RolloutPlan
    samples: SampleBatch
    trained: Tensor  # [B, S], 1 for the recorded steps of each sample of all ranks that are trained on, else 0


class GivenPairs(NamedTuple):
    """Preferences that a rollout's updates learn from, the same on every rank."""

    preferences: list[Preference]
    numbers: list[int]  # index of each in its stream of noise
    shape: tuple[int, ...]  # of a sample
    schedule: Schedule
    size: Size | None  # of the samples, where there are several sizes


class Rollouts:
    """Asks for this rank's samples of each rollout.

    Args:
        engine: engine whose module is the policy, on the ranks that samples are spread over.
        policies: the other policies, which are offloaded while samples are made.
        source: maker of the samples.
        schedules: schedule, and sampler of the stochastic steps, by the shape of a sample.
        texts: lengths that prompts are padded to.
        copy: network whose weights are pushed, where rollouts are made ahead of the updates.
        given: given preferences, which are learnt from in place of rollouts.
        takes_latents: whether a reward takes the final latents.

    Raises:
        UsageError: images of one caption are compared, and no caption has two.
    """

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        engine: Engine,
        policies: Policies,
        source: RolloutSource,
        schedules: Schedules,
        texts: TextLengths,
        *,
        copy: Copy | None = None,
        given: tuple[Preference, ...] | EncodedPreferences = (),
        takes_latents: bool = False,
    ) -> None:
        self.config, self.job, self.world = config, job, engine.world
        self.engine, self.policies, self.source, self.schedules, self.texts = engine, policies, source, schedules, texts
        self.copy, self.given, self._compared = copy, given, False
        # A server sends the final latents only to those who need them; in process they cost nothing.
        alone = config.objective.traits.trains_on == "steps" and config.objective.traits.through is None
        self._final = takes_latents or not (alone and config.rollout.is_served and config.rollout.store is None)
        self._captions = Captions(job.prompts) if config.objective.traits.groups == "caption" else None
        self._known: Sequence[Prompt] = job.prompts if self._captions is None else self._captions.firsts
        if given:
            self._known = given.prompts if isinstance(given, EncodedPreferences) else [pair.prompt for pair in given]
        seed = config.seed if config.data_seed is None else config.data_seed
        by_epoch = config.prompt_order == "epochs"
        self._order = BatchOrder(self._known, order_key(seed), job.source_weights) if by_epoch else None

    def prompts(self, root: Key, updates: int) -> list[Prompt]:
        """Return the prompt of each group of a rollout, the same on every rank.

        Where the samples of a group are different images, it is the prompt of each sample.

        Args:
            updates: number of updates before those on this rollout.
        """
        known, rollout = self.job.prompts, self.config.rollout
        if self._captions is None:
            count = rollout.batch if self.config.objective.traits.groups == "data" else rollout.prompts
            return [known[place] for place in self._places(root, count, updates)]
        asked, keys = list[Prompt](), fold_in(root, Stream.CAPTIONS)
        for group, caption in enumerate(self._places(root, rollout.prompts, updates)):
            asked += [known[place] for place in self._captions.drawn(caption, fold_in(keys, group), rollout.group)]
        return asked

    def next(self, root: Key, rewards: RewardRunners) -> Rollout:
        """Return this rank's samples, from a rollout or from the job's data; every rank must take part.

        Args:
            rewards: scorers of the images; scoring starts while the next chunk is generated.
        """
        plan = self.plan(root, self.prompts(root, self.engine.updates), self.engine.updates)
        if not self.config.makes_samples:
            return self.rollout(root, plan, self._data(plan, rewards))
        if self.config.engine.offload == "phases":
            self.engine.offload(parameters=False)
            self.policies.offload()
        self.source.push(self.engine, self.engine.updates)
        network = partial(self.policies.behaviour, self.engine)
        # From elsewhere one rank may fail where no collective tells the others.
        failing = self.world.agreed if self.config.rollout.source else nullcontext
        return self.rollout(root, plan, self.proved(plan, rewards, network, self.world, failing=failing))

    def proved(
        self,
        plan: RolloutPlan,
        rewards: RewardRunners,
        network: Behaviour,
        world: World,
        *,
        seen: Callable[[Chunk], None] = lambda chunk: None,
        failing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> SampleBatch:
        """Return the samples of a rollout, of servers that have the policy; every rank of `world` must take part.

        One step of each server is compared with the network's log-probability. A server that is too far off is left out
        with a warning, and the others make the rollout again.

        Args:
            network: opens the network with the weights that the source was given.
            world: ranks that compare their servers together.
            seen: function of each chunk, called before it is scored.
            failing: context in which the samples are made.

        Raises:
            RunError: the samples cannot be made, or no server has the policy.
        """
        while True:
            served: dict[str, ServedStep] = {}

            def noted(chunk: Chunk, served: dict[str, ServedStep] = served) -> None:
                seen(chunk)
                served.update(served_steps(chunk) | served)

            with failing():
                samples = self.made(plan, rewards, seen=noted)
            if not (self.config.rollout.is_served and self._leave_out_wrong(plan, served, network, world)):
                return samples
            rewards.discard()

    def _leave_out_wrong(
        self, plan: RolloutPlan, served: Mapping[str, ServedStep], network: Behaviour, world: World
    ) -> bool:
        """Leave out the servers of a rollout that have another policy; return whether there were any.

        Raises:
            RunError: none is left.
        """
        # The same steps on all ranks, which may share a forward pass.
        everyone = {address: step for own in world.gather_items(served) for address, step in own.items()}
        if not everyone:
            return False
        with network() as module:
            found = world.gather_items(differences(self.job.model, module, everyone, plan.sampling))[0]
        tolerance = self.config.rollout.servers.tolerance
        wrong = {address: far for address, far in found.items() if not far <= tolerance}  # NaN too
        if wrong and not self.source.leave_out(wrong):
            check(max(wrong.values()), tolerance=tolerance, world=world)
        for address, far in wrong.items():
            warnings.warn(
                f"{address} is left out: its log-probabilities are up to {far:.2g} from the trainer's own, above "
                f"`rollout.servers.tolerance` {tolerance:g}",
                RuntimeWarning,
                stacklevel=2,
            )
        return bool(wrong)

    def rollout(self, root: Key, plan: RolloutPlan, samples: SampleBatch) -> Rollout:
        """Return a rollout whose samples are made, with a draw of the recorded steps that are trained on.

        Args:
            plan: how its samples were made.
        """
        batch, recorded = self.config.rollout.batch, samples.trajectory.log_prob.shape[1]
        if plan.transitions is None:
            return Rollout(plan, samples, torch.ones(batch, recorded))
        return Rollout(plan, samples, self.config.rollout.trained.mask(fold_in(root, Stream.FRACTION), batch, recorded))

    def compare_with_servers(self) -> Handshake | None:
        """Compare what servers make of one prompt with the trainer's own numbers, once; every rank must take part.

        Returns:
            The comparison; None where it was made before, or where no servers make the samples.

        Raises:
            RunError: they are too far apart.
        """
        rollout, root = self.config.rollout, fold_in(key(HANDSHAKE_SEED), FIRST_ROLLOUT)
        if self._compared or not rollout.is_served:
            return None
        self._compared = True
        plan = self.plan(root, [self.job.prompts[0]] * rollout.prompts, self.engine.updates)
        asked, size = plan.requests, self.config.samples_per_pass
        same = None if asked.initial_ids is None else asked.initial_ids[:size]
        if self.copy is None:
            self.source.push(self.engine, self.engine.updates)
        else:
            self.copy.load(held(self.engine), self.engine.updates)
            with self.world.agreed():  # the other ranks ask when rank 0 has pushed
                self.source.push(self.copy, self.engine.updates)
        found = self.source.compare_with_servers(
            Requests(asked.prompts[:size], asked.ids[:size], asked.key, same), plan.sampling
        )
        if found is not None:
            check(found.largest, tolerance=rollout.servers.tolerance, world=self.world)
        return found

    def plan(self, root: Key, asked: list[Prompt], updates: int) -> RolloutPlan:
        """Return what to ask of the source for a rollout; every rank must take part.

        Args:
            asked: prompt of each group, or of each sample.
            updates: number of updates before those on this rollout.
        """
        rollout, sizes = self.config.rollout, self.job.sizes
        ids, real = slots(rollout.batch, micro_batch=self.config.samples_per_pass, world=self.world)
        numbers = [number if counts else -1 for number, counts in zip(ids, real, strict=True)]
        prompts = [asked[i * len(asked) // rollout.batch] for i in ids]
        size = size_of_batch(asked, fold_in(root, Stream.SIZE), list(sizes)) if sizes else None
        negative = [] if self.config.kl.guidance is None else [rollout.guidance.negative]
        padding = self.texts.padding([*rollout.guidance.texts(self.job.model, prompts), *negative])
        trunk = rollout.window.trunk(rollout.steps, rollout.group)
        initial_ids = [i // trunk for i in ids] if rollout.shared_noise or rollout.window.shares_start else None
        requests = Requests(prompts, ids, fold_in(root, Stream.SAMPLES), initial_ids)
        shape = self.job.shape if size is None else sizes[size]
        sampling = self._sampling(root, None if padding is None else padding.tokens, shape, updates)
        levels, stochastic = to_device(sampling.schedule.levels, self.world.device), sampling.stochastic
        records = stochastic is not None and stochastic.record
        transitions = stochastic.transition(levels[:-1], levels[1:]) if stochastic is not None and records else None
        return RolloutPlan(asked, requests, sampling, numbers, size, padding, transitions)

    def made(
        self, plan: RolloutPlan, rewards: RewardRunners, *, seen: Callable[[Chunk], None] = lambda chunk: None
    ) -> SampleBatch:
        """Return the samples of a rollout as the source makes them with the weights that it has.

        Args:
            seen: function of each chunk, called before it is scored.
        """
        size, parts = self.config.samples_per_pass, list[SampleBatch]()
        with closing(self.source.generate(plan.requests, plan.sampling, micro_batch=size)) as chunks:
            for chunk in chunks:
                seen(chunk)
                own = plan.numbers[size * len(parts) :][: len(chunk.prompts)]
                rewards.submit(chunk.images, chunk.prompts, chunk.trajectory.final, own)  # the images are not kept
                parts.append(SampleBatch(chunk.prompts, chunk.cond, chunk.trajectory, thumbnails(chunk.images)))
        return joined(parts)

    def preferences(self, root: Key) -> GivenPairs:
        """Return the given preferences that an update learns from, the same on every rank."""
        places = self._places(root, self.config.rollout.prompts, self.engine.updates)
        chosen, size = [self.given[place] for place in places], self._known[places[0]].size
        shape = tuple(chosen[0].win.shape)
        return GivenPairs(chosen, list(range(len(chosen))), shape, self.schedules.of(shape)[0], size)

    def _places(self, root: Key, count: int, updates: int) -> list[int]:
        """Return the indices of the `count` prompts, or preferences, of the rollout after a number of updates."""
        config = self.config
        if self._order is not None:
            return self._order.batch(updates // config.updates_per_rollout, count)
        drawn = root if config.data_seed is None else fold_in(key(config.data_seed), updates)
        batch = drawn_batch if config.prompt_order == "draws" else distinct_batch
        return batch(self._known, fold_in(drawn, Stream.PROMPTS), count)

    def _sampling(self, root: Key, tokens: int | None, shape: tuple[int, ...], updates: int) -> Sampling:
        """Return how the samples of a rollout are made, with its windows of noise and the length of its prompts."""
        config, rollout, on_steps = self.config, self.config.rollout, self.config.objective.traits.trains_on == "steps"
        stochastic, done = None, updates // config.updates_per_rollout
        first = fold_in(key(config.seed), FIRST_ROLLOUT)  # key of the first rollout
        schedule, sampler = self.schedules.of(shape)
        if on_steps or not rollout.sampler.is_deterministic:
            keys = fold_in(root, Stream.WINDOW), fold_in(first, Stream.WINDOW)
            stochastic = StochasticSteps(
                sampler,
                rollout.window.steps_of(*keys, done=done, steps=rollout.steps, group=rollout.group),
                record=on_steps,
                form=config.recorded_form,
                reduction=rollout.reduction,
                keep_velocity=on_steps and "old" in config.objective.traits.compares_with,
                implementation=config.implementation,
            )
        return Sampling(
            shape,
            schedule,
            rollout.guidance,
            rollout.sampler.solver,
            rollout.sampler.eta if rollout.sampler.is_deterministic else 0.0,
            stochastic,
            autocast=rollout.autocast,
            prefix=self._prefix(stochastic),
            text_tokens=tokens,
            after=rollout.window.tail,
            reuse=self._reuse(),
            step_cache=rollout.step_cache,
            final=self._final,
        )

    def _reuse(self) -> Literal["all", "outside_blocks", "none"]:
        """Return which layers that see the prompt alone are computed once."""
        if not self.config.rollout.reuse_prompt:
            return "none"
        # A compiled block is one program, and a block that is left out calls no layers.
        return "outside_blocks" if self.engine.compiles or self.config.rollout.step_cache else "all"

    def _prefix(self, stochastic: StochasticSteps | None) -> SharedPrefix | None:
        """Return the steps that the samples of a group share: those before every window of the rollout."""
        rollout = self.config.rollout
        if stochastic is None or not rollout.window.share_prefix:
            return None
        return SharedPrefix(rollout.window.shared_steps(stochastic.steps_of([0])), rollout.group)

    def _data(self, plan: RolloutPlan, rewards: RewardRunners) -> SampleBatch:
        """Return clean samples of the job's data; rewards score their images, where the objective compares them."""
        assert self.job.data is not None
        size, device, parts = self.config.samples_per_pass, self.world.device, []
        prompts, ids, tokens = plan.requests.prompts, plan.requests.ids, plan.sampling.text_tokens
        for start in range(0, len(ids), size):
            part = list(prompts[start : start + size])
            # One key per chunk, of the id of its first sample, so that a sample does not depend on the number of ranks.
            x0: Tensor = to_device(self.job.data(fold_in(plan.requests.key, ids[start]), copied(part)).clone(), device)
            if self.config.scores_samples:
                with torch.no_grad():
                    images = decoded(self.job.model, x0, model_inputs(part))
                    rewards.submit(images, part, x0, plan.numbers[start : start + size])
            cond = optree.tree_map(
                lambda tensor: to_device(tensor, device), self.config.rollout.guidance.encode(self.job.model, part, tokens)
            )
            parts.append(SampleBatch(part, cond, unrecorded(x0), None))
        return joined(parts)
