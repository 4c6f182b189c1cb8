"""Samples of a run: rollouts of the policy from any source, and clean samples of the job's data."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fluvial.core.random import Key, fold_in, key
from fluvial.core.rollout import wrap_samples
from fluvial.core.table import step_coefficients
from fluvial.engines.data.order import BatchOrder, Captions, PromptPool, derive_order_key, draw_size
from fluvial.engines.data.preferences import EncodedPreferences, Preference
from fluvial.engines.data.records import Prompt, copy_prompts, model_inputs
from fluvial.engines.data.sizes import Size
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World, collective
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.jobs.base import Job
from fluvial.engines.run.method import Images
from fluvial.engines.sampling.batch import Batch, RolloutSpec, make_batch
from fluvial.engines.sampling.config import ReadingConfig, Schedules
from fluvial.engines.sampling.generate import (
    Chunk,
    Requests,
    SampleBatch,
    Sampling,
    SharedPrefix,
    StochasticSteps,
    assign_slots,
    join_batches,
    shrink_images,
)
from fluvial.engines.sampling.handshake import Handshake, ServedStep, check, differences, pick_served_steps
from fluvial.engines.sampling.items import Share
from fluvial.engines.sampling.source import Behaviour, Copy, RolloutSource, snapshot_weights
from fluvial.engines.sampling.text import TextLengths
from fluvial.engines.scoring.runner import RewardRunners
from fluvial.engines.streams import Stream
from fluvial.models import decode_samples
from fluvial.models.host_values import to_device
from fluvial.models.step_cache import FirstBlockCache

FIRST_ROLLOUT = 0  # number of updates before the first rollout
HANDSHAKE_SEED = 0  # seed of the samples by which servers are compared with the trainer


class RolloutSampler:
    """Choice of the prompts of each batch, and requests for this rank's samples.

    Args:
        engine: engine of the policy, on the ranks that share the samples.
        source: generates the samples.
        schedules: schedule, and sampler of the stochastic steps, by the shape of a sample.
        copy: network that pushes weights to the source, if rollouts are generated ahead of the updates.
        pairs: preference dataset, trained on instead of rollouts.
        sends_final: whether servers also send the final latents.

    Raises:
        UsageError: the method compares images of one caption, and no caption has two.
    """

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        engine: Engine,
        source: RolloutSource,
        schedules: Schedules,
        *,
        copy: Copy | None = None,
        pairs: tuple[Preference, ...] | EncodedPreferences = (),
        sends_final: bool = True,
    ) -> None:
        self.config, self.job, self.world, self.engine = config, job, engine.world, engine
        self.source, self.schedules, self.method = source, schedules, config.method
        self.texts = TextLengths(job.model, self.world)
        self.copy, self.pairs, self._compared = copy, pairs, False
        self._sends_final = sends_final
        # The negative prompt is also needed by a reference or teacher with its own guidance scale.
        guides = any(scale != 1 for scale in config.own_guidance.values())
        self._negative = [config.method.sampling.guidance.negative] if guides else []
        source_of = self.method.source
        self._compare = source_of.compare if isinstance(source_of, Images) else None  # which dataset images are compared
        self._captions = Captions(job.prompts) if self._compare == "caption" else None
        self._known: Sequence[Prompt] = job.prompts if self._captions is None else self._captions.firsts
        if pairs:
            self._known = pairs.prompts if isinstance(pairs, EncodedPreferences) else [pair.prompt for pair in pairs]
        seed = config.seed if config.data.seed is None else config.data.seed
        by_epoch = config.data.order == "epochs"
        keys = derive_order_key(seed), fold_in(derive_order_key(seed), Stream.FURTHER)  # of the prompts, and of replacements
        orders = [BatchOrder(self._known, key, job.source_weights) if by_epoch else None for key in keys]
        self._order, self._further = orders
        pool = PromptPool(self._known)
        self._draw = pool.draw if config.data.order == "draws" else pool.draw_distinct
        self._schedules = {self.method.sampling.steps: schedules}  # by number of steps: drafts may have another

    def choose_prompts(self, root: Key, updates: int) -> list[Prompt]:
        """Return the prompt of each group of a rollout, the same on every rank.

        If the samples of a group are different images of a dataset, return the prompt of each sample.

        Args:
            updates: number of updates before those on this rollout.
        """
        prompts, sampling = self.job.prompts, self.method.sampling
        if self._captions is None:
            count = sampling.batch if self._compare == "data" else sampling.prompts
            return [prompts[index] for index in self._choose_indices(root, count, updates)]
        chosen, keys = list[Prompt](), fold_in(root, Stream.CAPTIONS)
        for group, caption in enumerate(self._choose_indices(root, sampling.prompts, updates)):
            chosen += [prompts[index] for index in self._captions.draw(caption, fold_in(keys, group), sampling.group)]
        return chosen

    def generate_verified(
        self,
        spec: RolloutSpec,
        rewards: RewardRunners,
        network: Behaviour,
        world: World,
        *,
        seen: Callable[[Chunk], None] = lambda chunk: None,
        failing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> SampleBatch:
        """Generate a rollout; servers whose log-probs differ are dropped and it is repeated. All ranks of `world` call it.

        One step of each server is compared with the network's log-probability. A server above the tolerance is dropped with
        a warning, and the remaining servers generate the rollout again.

        Args:
            network: opens the network with the weights that were pushed to the source.
            world: ranks that compare their servers together.
            seen: called with each chunk before it is scored.
            failing: context in which the samples are generated.

        Raises:
            RunError: generation failed, or no server has the policy.
        """
        if not self.config.rollout.is_served:
            with failing():
                return self.generate(spec, rewards, seen=seen)
        while True:
            served: dict[str, ServedStep] = {}

            def note_served(chunk: Chunk, served: dict[str, ServedStep] = served) -> None:
                seen(chunk)
                served.update(pick_served_steps(chunk) | served)

            with failing():
                samples = self.generate(spec, rewards, seen=note_served)
            if not self._drop_mismatched_servers(spec, served, network, world):
                return samples
            rewards.discard()

    def _drop_mismatched_servers(
        self, spec: RolloutSpec, served: Mapping[str, ServedStep], network: Behaviour, world: World
    ) -> bool:
        """Drop the servers whose log-probs of a rollout differ from the policy's; return whether any was dropped.

        Raises:
            RunError: none is left.
        """
        # All ranks compare the same steps, because context parallelism may share a forward pass.
        all_served = {address: step for by_address in world.gather_items(served) for address, step in by_address.items()}
        if not all_served:
            return False
        with network() as module:
            gaps = world.gather_items(differences(self.job.model, module, all_served, spec.sampling))[0]
        tolerance = self.config.rollout.servers.tolerance
        wrong = {address: gap for address, gap in gaps.items() if not gap <= tolerance}  # NaN too
        if wrong and not self.source.leave_out(wrong):
            check(max(wrong.values()), tolerance=tolerance, world=world)
        for address, gap in wrong.items():
            warnings.warn(
                f"{address} is left out: its log-probabilities are up to {gap:.2g} from the trainer's own, above "
                f"`rollout.servers.tolerance` {tolerance:g}",
                RuntimeWarning,
                stacklevel=2,
            )
        return bool(wrong)

    @collective
    def compare_with_servers(self) -> Handshake | None:
        """Compare log-probs of the servers with the trainer's for one prompt, once per run.

        Returns:
            The comparison; None after the first call, or without servers.

        Raises:
            RunError: they are too far apart.
        """
        rollout, root = self.config.rollout, fold_in(key(HANDSHAKE_SEED), FIRST_ROLLOUT)
        if self._compared or not rollout.is_served:
            return None
        self._compared = True
        spec = self.specify(root, [self.job.prompts[0]] * self.method.sampling.prompts, self.engine.updates)
        all_requests, size = spec.requests, self.config.samples_per_pass
        initial_ids = None if all_requests.initial_ids is None else all_requests.initial_ids[:size]
        if self.copy is None:
            self.source.push(self.engine, self.engine.updates)
        else:
            self.copy.load(snapshot_weights(self.engine), self.engine.updates)
            with self.world.agreed():  # the other ranks wait until rank 0 has pushed
                self.source.push(self.copy, self.engine.updates)
        requests = Requests(all_requests.prompts[:size], all_requests.ids[:size], all_requests.key, initial_ids)
        handshake = self.source.compare_with_servers(requests, spec.sampling)
        if handshake is None:
            return None
        check(handshake.largest, tolerance=rollout.servers.tolerance, world=self.world)
        binding = self.source.probe(self.copy or self.engine, requests, spec.sampling)
        return replace(handshake, binding={address: str(each) for address, each in binding.items()})

    @collective
    def specify(
        self,
        root: Key,
        asked: list[Prompt],
        updates: int,
        *,
        draft: ReadingConfig | None = None,
        starts: Sequence[int] | None = None,
    ) -> RolloutSpec:
        """Specify a rollout: the samples to request from the source, and how they are generated.

        Args:
            asked: prompt of each group, or of each sample.
            updates: number of updates before those on this rollout.
            draft: sampling of samples that are scored but not trained on; by default the method's.
            starts: index of each sample's initial noise, by default the sample's or its group's.
        """
        settings, sizes = self.method.sampling if draft is None else draft, self.job.sizes
        ids, real = assign_slots(settings.batch, micro_batch=self.config.samples_per_pass, world=self.world)
        numbers = [number if counts else -1 for number, counts in zip(ids, real, strict=True)]
        prompts = [asked[i * len(asked) // settings.batch] for i in ids]
        size = draw_size(asked, fold_in(root, Stream.SIZE), list(sizes)) if sizes else None
        padding = self.texts.padding([*settings.guidance.list_texts(self.job.model, prompts), *self._negative])
        trunk = settings.window.trunk(settings.steps, settings.group)
        initial_ids = [i // trunk for i in ids] if settings.shared_noise or settings.window.shares_start else None
        initial_ids = initial_ids if starts is None else [starts[i] for i in ids]
        requests = Requests(prompts, ids, fold_in(root, Stream.SAMPLES), initial_ids)
        shape = self.job.shape if size is None else sizes[size]
        sampling = self._make_sampling(root, None if padding is None else padding.tokens, shape, updates, draft)
        levels, stochastic = to_device(sampling.schedule.levels, self.world.device), sampling.stochastic
        records = stochastic is not None and stochastic.record
        transitions = step_coefficients(stochastic.transition, levels) if stochastic is not None and records else None
        per_pass = self.config.samples_per_pass
        return RolloutSpec(asked, requests, sampling, numbers, size, padding, settings.group, per_pass, transitions)

    @collective
    def respecify(self, spec: RolloutSpec, groups: Sequence[int], root: Key, updates: int, number: int) -> RolloutSpec:
        """Specify replacements, with other prompts, of some groups of a rollout.

        Each rank requests its own samples, padded with repeats to the largest number on any rank.

        Args:
            spec: the rollout, whose windows of stochastic steps are kept.
            groups: indices of the groups.
            root: key of the rollout.
            updates: number of updates before those on this rollout.
            number: number of the round of replacement, from 1.
        """
        size, group = self.config.samples_per_pass, spec.group
        root = fold_in(fold_in(root, Stream.REFILL), number)
        asked = list(spec.asked)
        prompts = self._choose_replacements(root, asked[0].size, len(groups), updates, number)
        for index, prompt in zip(groups, prompts, strict=True):
            asked[index] = prompt
        all_ids = [index * group + i for index in groups for i in range(group)]
        slots, rank = len(spec.numbers), self.world.data_rank
        by_rank = [[i for i in all_ids if i // slots == each] for each in range(self.world.data_size)]
        count = -(-max(map(len, by_rank)) // size) * size
        ids = [*by_rank[rank], *all_ids[:1] * (count - len(by_rank[rank]))]
        rank_prompts = [asked[i // group] for i in ids]
        initial_ids = None
        if spec.requests.initial_ids is not None:
            trunk = self.method.sampling.window.trunk(self.method.sampling.steps, group)
            initial_ids = [i // trunk for i in ids]
        requests = Requests(rank_prompts, ids, fold_in(root, Stream.SAMPLES), initial_ids)
        padding, sampling = spec.padding, spec.sampling
        if padding is not None:
            wider = self.texts.padding(
                [*self.method.sampling.guidance.list_texts(self.job.model, rank_prompts), *self._negative]
            )
            assert wider is not None
            padding = max(padding, wider, key=lambda each: each.tokens)
            sampling = replace(sampling, text_tokens=padding.tokens)
        numbers = [*by_rank[rank], *[-1] * (count - len(by_rank[rank]))]
        return spec._replace(asked=asked, requests=requests, sampling=sampling, numbers=numbers, padding=padding)

    def generate(
        self, spec: RolloutSpec, rewards: RewardRunners, *, seen: Callable[[Chunk], None] = lambda chunk: None
    ) -> SampleBatch:
        """Generate the samples of a rollout with the weights that were pushed last.

        Args:
            seen: called with each chunk before it is scored.
        """
        size, parts = self.config.samples_per_pass, list[SampleBatch]()
        with closing(self.source.generate(spec.requests, spec.sampling, micro_batch=size)) as chunks:
            for chunk in chunks:
                seen(chunk)
                numbers = spec.numbers[size * len(parts) :][: len(chunk.prompts)]
                rewards.submit(chunk.images, chunk.prompts, chunk.trajectory.final, numbers)  # frees the images
                parts.append(SampleBatch(chunk.prompts, chunk.cond, chunk.trajectory, shrink_images(chunk.images)))
        return join_batches(parts)

    def read_pairs(self, root: Key, updates: int) -> tuple[list[Preference], Size | None]:
        """Return the preferences of the next batch, the same on every rank, and their size."""
        indices = self._choose_indices(root, self.method.sampling.prompts, updates)
        return [self.pairs[index] for index in indices], self._known[indices[0]].size

    def pair_up(
        self,
        chosen: Sequence[Preference],
        numbers: Sequence[int],
        sampling: Sampling,
        size: Size | None,
    ) -> Batch:
        """Return preferences as a batch of pairs, spread over the ranks; without any, one pair of weight 0.

        Args:
            chosen: the preferences, the same on every rank.
            numbers: index of each in its stream of noise.
            sampling: sampling that generated the samples, or that of a rollout.
            size: size of the samples; None if all have one size.
        """
        real, ranks, device = len(chosen), self.world.data_size, self.world.device
        if not real:
            zeros = torch.zeros(sampling.shape)
            chosen, numbers = [Preference(self.job.prompts[0], zeros, zeros)], [0]
        slots = -(-len(chosen) // ranks)
        share = Share(self.world.data_rank * slots, slots, real)
        indices = [(share.first + slot) % len(chosen) for slot in range(slots)]
        prompts, ids = [chosen[index].prompt for index in indices], [numbers[index] for index in indices]
        padding = self.texts.padding(sampling.guidance.list_texts(self.job.model, prompts))
        padded = replace(sampling, text_tokens=None if padding is None else padding.tokens)
        both = [
            to_device(torch.stack([getattr(chosen[index], side) for index in indices]), device) for side in ("win", "lose")
        ]
        samples = SampleBatch(prompts, padded.encode(self.job.model, prompts), wrap_samples(torch.stack(both, dim=1)), None)
        asked = [each.prompt for each in chosen]
        spec = RolloutSpec(
            asked,
            Requests(prompts, ids, key(0)),
            sampling,
            ids,
            size,
            padding,
            1,
            self.config.samples_per_pass,
        )
        return Batch(spec, share, ids, 1, self.job.model.prediction, make_batch(samples), paired=True)

    def _choose_indices(self, root: Key, count: int, updates: int) -> list[int]:
        """Return the indices of the next `count` prompts, or preferences, after a number of updates."""
        config = self.config
        if self._order is not None:
            return self._order.take_batch(updates // config.updates_per_rollout, count)
        drawn = root if config.data.seed is None else fold_in(key(config.data.seed), updates)
        return self._draw(fold_in(drawn, Stream.PROMPTS), count)

    def _choose_replacements(self, root: Key, size: Size | None, count: int, updates: int, number: int) -> list[Prompt]:
        """Return replacement prompts of a size, the same on every rank; arguments as in `respecify`."""
        config, sampling = self.config, self.method.sampling
        if self._further is not None:
            rounds = updates // config.updates_per_rollout * getattr(sampling.groups, "rounds", 1) + number - 1
            return [self._known[place] for place in self._further.take_size(size, rounds * sampling.prompts, count)]
        drawn = root
        if config.data.seed is not None:
            drawn = fold_in(fold_in(fold_in(key(config.data.seed), updates), Stream.REFILL), number)
        return [self._known[place] for place in self._draw(fold_in(drawn, Stream.PROMPTS), count, size)]

    def _make_sampling(
        self, root: Key, tokens: int | None, shape: tuple[int, ...], updates: int, draft: ReadingConfig | None = None
    ) -> Sampling:
        """Return the sampling of a rollout, with its windows of stochastic steps and the padded length of its prompts."""
        config, rollout, record = self.config, self.config.rollout, self.method.recorded if draft is None else None
        settings, group = self.method.sampling if draft is None else draft, self.method.sampling.group
        stochastic, prefix, done = None, None, updates // config.updates_per_rollout
        first = fold_in(key(config.seed), FIRST_ROLLOUT)  # key of the first rollout
        if settings.steps not in self._schedules:
            self._schedules[settings.steps] = Schedules(self.job.model, settings, self.world.device)
        schedule, sampler = self._schedules[settings.steps].of(shape)
        if record is not None or not settings.sampler.is_deterministic:
            keys = fold_in(root, Stream.WINDOW), fold_in(first, Stream.WINDOW)
            stochastic = StochasticSteps(
                sampler,
                settings.window.choose_steps(*keys, done=done, steps=settings.steps, group=settings.group),
                record=record is not None,
                form="density" if record is None else record.form,
                reduction="mean" if record is None else record.reduction,
                keep_velocity=record is not None and record.velocity,
                implementation=config.engine.implementation,
                noise=settings.window.noise_of(),
            )
            if settings.window.share_prefix:  # the samples of a group share the steps before every window of the rollout
                prefix = SharedPrefix(settings.window.count_shared_steps(stochastic.choose_steps([0])), group)
        graphs = config.engine.compile == "reduce-overhead"  # a graph holds no results of earlier passes
        # Layers inside compiled or skipped blocks cannot be replaced.
        whole_blocks = self.engine.compiles or isinstance(rollout.step_cache, FirstBlockCache)
        return Sampling(
            shape,
            schedule,
            settings.guidance,
            settings.sampler.solver,
            settings.sampler.eta if settings.sampler.is_deterministic else 0.0,
            stochastic,
            autocast=rollout.autocast,
            prefix=prefix,
            text_tokens=tokens,
            after=settings.window.tail,
            reuse="none" if graphs or rollout.reuse == "none" else "outside_blocks" if whole_blocks else "all",
            keep_keys=rollout.reuse == "keys",
            step_cache=rollout.step_cache,
            graphs=graphs,
            final=self._sends_final,
        )

    def read_images(self, requests: Requests) -> Tensor:
        """Return a clean sample of the job's data for each requested prompt, `[slots, *event]`."""
        starts = range(0, len(requests.ids), self.config.samples_per_pass)
        return torch.cat([self._read_chunk(requests, start) for start in starts])

    def _read_chunk(self, requests: Requests, start: int) -> Tensor:
        """Return the clean samples of the micro-batch that begins at slot `start`."""
        assert self.job.data is not None
        prompts = copy_prompts(requests.prompts[start : start + self.config.samples_per_pass])
        # One key per micro-batch, from its first sample's id, so that samples do not depend on the number of ranks.
        x0: Tensor = to_device(self.job.data(fold_in(requests.key, requests.ids[start]), prompts).clone(), self.world.device)
        return x0

    def read_data(self, spec: RolloutSpec, rewards: RewardRunners | None) -> SampleBatch:
        """Return clean samples of the job's data, and start scoring their images if rewards are passed."""
        size, prompts, parts = self.config.samples_per_pass, spec.requests.prompts, []
        for start in range(0, len(prompts), size):
            part = list(prompts[start : start + size])
            x0 = self._read_chunk(spec.requests, start)
            if rewards is not None:
                with torch.no_grad():
                    images = decode_samples(self.job.model, x0, model_inputs(part))
                    rewards.submit(images, part, x0, spec.numbers[start : start + size])
            parts.append(SampleBatch(part, spec.sampling.encode(self.job.model, part), wrap_samples(x0), None))
        return join_batches(parts)
