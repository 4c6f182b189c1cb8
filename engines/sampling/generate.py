"""Generation of samples: in chunks of one size, spread over the ranks.

The noise of a sample depends on the key and its id (or the one that it shares) alone, and every chunk has the same size. So
the bits of a sample depend neither on the number of ranks nor on the rank that makes it.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core import gaussian
from fluvial.core.checks import SCALE, check_fields
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import DrawAndScore, Step, Trajectory, Velocity, scan, stack, unroll, wrap_samples
from fluvial.core.table import Record, StepPlan, plan
from fluvial.core.transitions import Sampler, Transition
from fluvial.engines.choices import refuse_unused
from fluvial.engines.data.records import Prompt, list_negatives, model_inputs
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.sampling.graphed import GraphedPass
from fluvial.engines.sampling.items.steps import concatenate
from fluvial.engines.sampling.solvers import Estimate, Solver, deterministic_step, sa_schedule, solve
from fluvial.engines.sampling.tail import NO_TAIL, Tail, after_schedule
from fluvial.engines.sampling.window import NoiseOf, Steps
from fluvial.engines.streams import Stream
from fluvial.engines.waits import count_parts
from fluvial.kernels import Implementation, sde_step
from fluvial.kernels.dispatch import resolve
from fluvial.models import Cond, DiffusionModel, Prediction, Schedule, decode_samples, host_values, is_recorded
from fluvial.models.guidance import Guided, guided_velocity, join_halves
from fluvial.models.host_values import fresh_copy, to_device
from fluvial.models.padding import trim
from fluvial.models.step_cache import NoCache, PassReuse, Reuse, StepCacheChoice

SIDE = 32  # pixels of a thumbnail


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance of every step, arXiv 2207.12598.

    Args:
        scale: Scale g in v_uncond + g (v - v_uncond); 1 is no guidance, and skips the unconditional half.
        negative: Negative prompt, which the samples are guided away from; for most models the empty one.
        forwards: Number of forward passes for the two halves: one, or two, which take less memory.
        gradient: Halves that the gradient flows through in training, both or the conditional one. With conditional, the
            other half has no gradient; in passes of more pairs than `micro_batch` it is computed apart, without a graph.
        update: Prediction of the update: guided, as that of the rollout, or conditional, without guidance, for objectives
            that train on clean samples (DGPO).
    """

    scale: float = 1.0
    negative: str = ""
    forwards: Literal["one", "two"] = "one"
    gradient: Literal["both", "conditional"] = "both"
    update: Literal["guided", "conditional"] = "guided"

    def __post_init__(self) -> None:
        check_fields(self, "sampling.guidance", scale=SCALE)
        refuse_unused(self, "sampling.guidance.")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        if self.scale == 1:
            yield "update", "with `sampling.guidance.scale` 1, which is no guidance"
        if self.update == "conditional":
            yield "gradient", "with `sampling.guidance.update` conditional"

    def encode(self, model: DiffusionModel, prompts: Sequence[Prompt], tokens: int | None = None) -> Cond:
        """Return the conditioning of a batch of prompts, with that of the negative prompt where there is guidance.

        A prompt's own negative prompt takes precedence. The conditioning of a recorded pipeline holds its guidance already.

        `tokens` is the length that prompts are padded to, by default the model's own.
        """
        cond = trim(model, model.encode(model_inputs(prompts)), tokens)
        if not self.is_guided(model):
            return cond
        unconditional = trim(model, model.encode(self._list_negatives(prompts)), tokens)
        return Guided(cond, unconditional, torch.full((len(prompts),), self.scale))

    def list_texts(self, model: DiffusionModel, prompts: Sequence[Prompt]) -> list[Any]:
        """Return the texts that `encode` encodes: prompts, and with guidance each one's negative prompt, with images."""
        return [*model_inputs(prompts), *(self._list_negatives(prompts) if self.is_guided(model) else ())]

    def _list_negatives(self, prompts: Sequence[Prompt]) -> list[Any]:
        """Return the negative prompt of each prompt, with that prompt's images."""
        opposed = zip(prompts, list_negatives(prompts, self.negative), strict=True)
        return model_inputs(replace(prompt, text=text) for prompt, text in opposed)

    def is_guided(self, model: DiffusionModel) -> bool:
        """Return whether samples of a model are given the conditioning of a negative prompt."""
        return self.scale != 1 and not is_recorded(model)


NO_GUIDANCE = Guidance()


class Slots(NamedTuple):
    """One rank's part of a batch: sample ids in whole chunks; a slot past the end of the batch repeats a sample."""

    ids: list[int]
    real: list[bool]


def assign_slots(samples: int, *, micro_batch: int, world: World) -> Slots:
    """Return this rank's slots of a batch, equally many on every rank.

    Gathered over the ranks, the ids are 0, 1, ..., followed by the repeats.
    """
    share = count_samples_per_rank(samples, micro_batch=micro_batch, ranks=world.data_size)
    mine = range(world.data_rank * share, (world.data_rank + 1) * share)
    return Slots([slot % samples for slot in mine], [slot < samples for slot in mine])


def count_samples_per_rank(samples: int, *, micro_batch: int, ranks: int) -> int:
    """Return the number of samples that each of `ranks` ranks computes for a batch: whole chunks, repeats included."""
    return -(-samples // (micro_batch * ranks)) * micro_batch


@dataclass(frozen=True)
class StochasticSteps:
    """The steps of a rollout that take noise, and what is recorded of them.

    Args:
        transition: sampler of the steps in the window.
        window: indices of the steps, or a function that returns those of the samples with the given ids; the other steps
            are deterministic.
        record: store the steps of the window and their log-probabilities.
        form: form of the log-probability.
        reduction: reduction of the log-probability over the dimensions.
        keep_velocity: also store the model's prediction at each recorded step.
        implementation: implementation of the log-probability, see `fluvial.kernels.dispatch`.
        noise: whose noise each sample takes at a step; by default its own.
    """

    transition: Sampler
    window: Collection[int] | Callable[[Sequence[int]], Steps]
    record: bool = True
    form: Form = "density"
    reduction: Reduction = "mean"
    keep_velocity: bool = False
    implementation: Implementation = "auto"
    noise: NoiseOf | None = None

    def choose_steps(self, ids: Sequence[int]) -> Steps:
        """Return the stochastic steps of the samples that are generated together."""
        return self.window(ids) if callable(self.window) else self.window

    def choose_kernel(self, x: Tensor) -> DrawAndScore | None:
        """Return the kernel that draws and scores a recorded step of samples like x; None for the reference."""
        if resolve("rollout", self.implementation, [x]) == "reference":
            return None

        def draw(transition: Transition, x: Tensor, v: Tensor, key: Key) -> tuple[Tensor, Tensor]:
            return sde_step(
                transition, x, v, key=key, form=self.form, reduction=self.reduction, implementation=self.implementation
            )

        return draw


class SharedPrefix(NamedTuple):
    """The first steps of a schedule, deterministic, computed once for each group of samples."""

    steps: int
    group: int  # samples per group


@dataclass(frozen=True)
class Sampling:
    """How samples are made: the same for all samples of a rollout or an evaluation.

    Args:
        shape: shape of one sample.
        schedule: noise levels, and timesteps on the model's device.
        guidance: guidance of every step.
        solver: solver of the deterministic steps; anything but euler takes no stochastic steps.
        eta: noise of a solver that adds some.
        stochastic: the steps that take noise; None makes every step deterministic and records none.
        autocast: let the model compute in bfloat16 under torch's autocast.
        prefix: the first steps, where groups of `Requests.initial_ids` share them; None shares none.
        text_tokens: length that prompts are padded to; by default the model's own.
        after: how the deterministic steps after the window are taken, if there is one window for all samples.
        reuse: layers that see the prompt alone whose results are computed once per chunk, see `models.prompt_layers`: all,
            those outside of the repeated blocks, or none. With all, merged weights are computed once, too, see
            `models.fixed_adapters`.
        keep_keys: keep keys and values of the prompt's tokens per chunk, of a network that can, see `models.prompt_layers`.
        step_cache: what deterministic steps take over from earlier ones, see `models.step_cache`.
        graphs: launch each pass as a CUDA graph, see `sampling.graphed`; without `reuse`, `keep_keys`, `step_cache` and
            `autocast`.
        observe: function that is called with every Euler step, except for shared ones and those after the window.
        final: whether the final latents are needed. If False, `Trajectory.final` is `[B, 0]`, and servers do not send them.
    """

    shape: tuple[int, ...]
    schedule: Schedule
    guidance: Guidance = NO_GUIDANCE
    solver: Solver = "euler"
    eta: float = 0.0
    stochastic: StochasticSteps | None = None
    autocast: bool = False
    prefix: SharedPrefix | None = None
    text_tokens: int | None = None
    after: Tail = NO_TAIL
    reuse: Reuse = "none"
    keep_keys: bool = False
    step_cache: StepCacheChoice = field(default_factory=NoCache)
    graphs: bool = False
    observe: Callable[[Step], None] | None = None
    final: bool = True

    def __post_init__(self) -> None:
        if self.solver != "euler" and self.stochastic is not None and self.stochastic.record:
            raise UsageError(f"sampling: solver is {self.solver}, which records no steps, expected solver euler")

    def encode(self, model: DiffusionModel, prompts: Sequence[Prompt]) -> Cond:
        """Return the conditioning of a chunk, laid out as the rows that an update gathers, so that both round alike."""
        return fresh_copy(self.guidance.encode(model, prompts, self.text_tokens), self.schedule.timesteps.device)


class Requests(NamedTuple):
    """The samples to make, on one rank, in whole chunks."""

    prompts: Sequence[Prompt]
    ids: Sequence[int]  # the noise of a sample depends on the key and its id alone
    key: Key
    initial_ids: Sequence[int] | None = None  # ids of the initial noise; samples that share one start from the same noise


class Chunk(NamedTuple):
    """A chunk of generated samples."""

    prompts: Sequence[Prompt]
    cond: Cond
    trajectory: Trajectory
    images: Tensor  # [b, C, H, W], of videos [b, C, F, H, W], in [0, 1]
    version: int = 0  # number of updates of the weights that made them
    servers: Sequence[str] = ()  # address of the server that made each, where servers did


class SampleBatch(NamedTuple):
    """All samples of one rank, of a rollout or from given data."""

    prompts: Sequence[Prompt]
    cond: Cond
    trajectory: Trajectory
    thumbnails: Tensor | None  # [B, D] small flattened images, to compare samples with; None for given data


def shrink_images(images: Tensor) -> Tensor:
    """Return images `[B, C, H, W]` averaged to at most 32 pixels a side and flattened, `[B, D]`."""
    height, width = (min(side, SIDE) for side in images.shape[-2:])
    return torch.nn.functional.adaptive_avg_pool2d(images.flatten(1, -3).float(), (height, width)).flatten(1)


def measure_diversity(thumbnails: Tensor, group: int) -> float:
    """Return the mean over all groups of the root-mean-square distance between two samples of a group.

    It falls when a policy draws the same image again and again, as under reward hacking. Compare it within a run, where the
    sampler is the same.

    Args:
        thumbnails: `[B, D]`, ordered by group.
        group: samples per group, at least 2.
    """
    by_group = thumbnails.double().unflatten(0, (-1, group))
    distance = torch.cdist(by_group, by_group) / thumbnails.shape[1] ** 0.5
    return float(distance.sum((1, 2)).mean() / (group * (group - 1)))


def join_batches(parts: Sequence[SampleBatch]) -> SampleBatch:
    """Return parts of a batch as one."""
    thumbnails = [part.thumbnails for part in parts if part.thumbnails is not None]
    return SampleBatch(
        [prompt for part in parts for prompt in part.prompts],
        optree.tree_map(host_values.join, *(part.cond for part in parts)),
        concatenate([part.trajectory for part in parts]),
        torch.cat(thumbnails) if thumbnails else None,
    )


def move_schedule(schedule: Schedule, device: torch.device) -> Schedule:
    """Return a schedule with its timesteps on a device; the levels stay on the host."""
    return Schedule(schedule.levels.cpu(), to_device(schedule.timesteps, device))


def generate(
    model: DiffusionModel, module: nn.Module, requests: Requests, sampling: Sampling, *, micro_batch: int
) -> Iterator[Chunk]:
    """Yield the requested samples in chunks, made without gradient.

    Args:
        model: adapter of the architecture.
        module: network to sample from.
        requests: prompts and ids of the samples.
        sampling: how they are made.
        micro_batch: samples per chunk.
    """
    device, key = sampling.schedule.timesteps.device, requests.key
    if sampling.solver == "sa_solver":  # the model's timesteps follow the levels that the solver visits
        sampling = replace(sampling, schedule=sa_schedule(sampling.schedule))
    graph = GraphedPass() if sampling.graphs else None
    prefix_ends = (
        _sample_prefixes(model, module, requests, sampling, micro_batch=micro_batch) if sampling.prefix is not None else None
    )
    for start in count_parts("sampling", range(0, len(requests.ids), micro_batch), micro_batch, len(requests.ids)):
        part = slice(start, start + micro_batch)
        prompts, ids = requests.prompts[part], requests.ids[part]
        keys = fold_in(key, to_device(torch.tensor(list(ids)), device))
        cond = sampling.encode(model, prompts)
        with torch.no_grad():
            if prefix_ends is None:
                initial_keys = keys
                if requests.initial_ids is not None:
                    initial_keys = fold_in(key, to_device(torch.tensor(list(requests.initial_ids[part])), device))
                x = _draw_initial(initial_keys, sampling)
            else:
                assert requests.initial_ids is not None
                x = torch.stack([prefix_ends[group] for group in requests.initial_ids[part]])
            window = () if sampling.stochastic is None else sampling.stochastic.choose_steps(ids)
            velocity = build_velocity(model, module, cond, sampling, exact=window, graph=graph)
            step_keys = fold_in(keys, Stream.STEPS)
            if sampling.solver == "euler":
                trajectory, tail_estimate = _unroll(velocity, x, step_keys, sampling, model.prediction, window, (key, ids))
            else:
                solver = partial(solve, sampling.solver, prediction=model.prediction, eta=sampling.eta, keys=step_keys)
                trajectory, tail_estimate = wrap_samples(solver(velocity, x, sampling.schedule)), None
            if tail_estimate is not None:  # steps after the window remain
                tail = sampling.after
                rest = after_schedule(sampling.schedule, tail_estimate.step + 1, tail.fraction, tail.least)
                velocity = build_velocity(model, module, cond, replace(sampling, schedule=rest), graph=graph)
                x = solve(tail.solver, velocity, trajectory.final, rest, prediction=model.prediction, before=tail_estimate)
                trajectory = trajectory._replace(final=x)
            images = decode_samples(model, trajectory.final, model_inputs(prompts))
            if not sampling.final:
                trajectory = trajectory._replace(final=trajectory.final.flatten(1)[:, :0])
        yield Chunk(prompts, cond, trajectory, images)


def finish(
    model: DiffusionModel,
    module: nn.Module,
    made: SampleBatch,
    requests: Requests,
    sampling: Sampling,
    x: Tensor,
    step: int,
    *,
    micro_batch: int,
    jump: bool = False,
) -> Iterator[Chunk]:
    """Continue intermediate samples to the end with deterministic steps, and yield the results in the rollout's chunks.

    Args:
        made: samples of the rollout that `x` comes from.
        requests, sampling, micro_batch: settings of that rollout.
        x: samples before a step, `[B, *event]`.
        step: index of that step in the schedule.
        jump: take one step to the end of the schedule in place of all that are left.
    """
    levels, timesteps = sampling.schedule
    if jump and step < len(timesteps):
        one = host_values.compute_known(lambda table: table[step : step + 1], timesteps)
        sampling, step = replace(sampling, schedule=Schedule(torch.stack([levels[step], levels[-1]]), one)), 0
    sampling = replace(sampling, stochastic=None)
    left = range(step, len(sampling.schedule.timesteps))
    for start in range(0, len(x), micro_batch):
        part = slice(start, start + micro_batch)
        index = to_device(torch.arange(len(x))[part], x.device)
        cond = optree.tree_map(lambda table, index=index: host_values.select_rows(table, index), made.cond)
        with torch.no_grad():
            velocity = build_velocity(model, module, cond, sampling)
            table = _plan_steps(x[part], sampling, model.prediction, (), left)
            trajectory = scan(velocity, x[part], table, requests.key)
            images = decode_samples(model, trajectory.final, model_inputs(made.prompts[part]))
        yield Chunk(made.prompts[part], cond, trajectory, images)


def _draw_initial(keys: Key, sampling: Sampling) -> Tensor:
    """Return the initial noise of samples from a key of each, `[B, *shape]`."""
    assert isinstance(keys.low, Tensor)
    return normal(fold_in(keys, Stream.INITIAL), (len(keys.low), *sampling.shape))


def _sample_prefixes(
    model: DiffusionModel, module: nn.Module, requests: Requests, sampling: Sampling, *, micro_batch: int
) -> dict[int, Tensor]:
    """Return each group's sample before the window, by the id of its initial noise.

    Every forward pass has one row per group of a chunk; the last pass is padded with repeats. So the bits of a group
    depend neither on the other groups of this rank nor on the number of ranks.
    """
    assert requests.initial_ids is not None
    assert sampling.prefix is not None
    prompt_of = dict(zip(requests.initial_ids, requests.prompts, strict=True))
    groups, width = list(prompt_of), -(-micro_batch // sampling.prefix.group)
    device, steps = sampling.schedule.timesteps.device, range(sampling.prefix.steps)
    starts: dict[int, Tensor] = {}
    for start in range(0, len(groups), width):
        part = groups[start : start + width]
        filled = part + part[:1] * (width - len(part))
        cond = sampling.encode(model, [prompt_of[group] for group in filled])
        keys = fold_in(requests.key, to_device(torch.tensor(filled), device))
        with torch.no_grad():
            x, velocity = _draw_initial(keys, sampling), build_velocity(model, module, cond, sampling)
            step_plan = _plan_steps(x, sampling, model.prediction, (), steps)
            trajectory = scan(velocity, x, step_plan, fold_in(keys, Stream.STEPS))
        starts.update(zip(part, trajectory.final, strict=False))
    return starts


def build_velocity(
    model: DiffusionModel,
    module: nn.Module,
    cond: Cond,
    sampling: Sampling,
    *,
    exact: Steps = (),
    graph: GraphedPass | None = None,
) -> Velocity:
    """Return the guided prediction of the network for a chunk, as a function of (x, level, step).

    Steps in `exact` are computed in full, without a step cache; `graph` launches all passes of this network and sampling.
    """
    timesteps, guidance, autocast = sampling.schedule.timesteps, sampling.guidance, sampling.autocast
    of_step, on_host = timesteps.unbind(0), host_values.recall(timesteps)
    is_guided = isinstance(cond, Guided)
    both = join_halves(cond) if is_guided and guidance.forwards == "one" and graph is None else None
    kept: dict[str, Any] = {"layers": sampling.reuse, "keys": sampling.keep_keys, "cache": sampling.step_cache}
    reuse = PassReuse(model, module, **kept, guided=is_guided)
    exact_steps = frozenset(exact.flatten().tolist() if isinstance(exact, Tensor) else exact)

    def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
        timestep = of_step[step].expand(len(x))
        if on_host is not None:
            host_values.remember(timestep, on_host[step].expand(len(x)))
        # Entering autocast costs as much as several operations, also where it switches nothing.
        device_type = timesteps.device.type
        switched = autocast or torch.is_autocast_enabled(device_type)
        with (
            torch.autocast(device_type, torch.bfloat16, enabled=autocast) if switched else nullcontext(),
            reuse.step(exact=step in exact_steps) as halves,
        ):
            predict = partial(guided_velocity, model, module, forwards=guidance.forwards, both=both, halves=halves)
            v = (predict if graph is None else partial(graph, predict))(x, level, cond, timestep=timestep)
        return v.float() if autocast else v

    return velocity


def _plan_steps(x: Tensor, sampling: Sampling, prediction: Prediction, window: Steps, steps: range) -> StepPlan:
    """Return the table of a part of the schedule, stochastic at the steps of the window."""
    deterministic, stochastic = deterministic_step(prediction), sampling.stochastic
    transition, record = deterministic, Record(steps=())
    if stochastic is not None:
        transition = stochastic.transition
        recorded = None if len(window) and stochastic.record else ()  # None: every step of the window that has a density
        record = Record(recorded, stochastic.form, stochastic.reduction, velocity=stochastic.keep_velocity)
    options: dict[str, Any] = {"window": window, "deterministic": deterministic, "record": record, "steps": steps}
    return plan(sampling.schedule.levels, transition, batch=len(x), device=x.device, **options)


def _unroll(
    velocity: Velocity,
    x: Tensor,
    keys: Key,
    sampling: Sampling,
    prediction: Prediction,
    window: Steps,
    noised: tuple[Key, Sequence[int]],
) -> tuple[Trajectory, Estimate | None]:
    """Return the trajectory up to the tail, and the clean estimate of its last step; None without a tail.

    Args:
        keys: key of each sample's steps.
        noised: key of the rollout and ids of the samples, for samples that share noise.
    """
    end = len(sampling.schedule.timesteps)
    stop = end if sampling.after == NO_TAIL else max(window) + 1
    if stop != end and sampling.schedule.levels.ndim == 2:
        hint = "the pieces of a sample have noise levels of their own"
        raise UsageError("sampling.window.tail", sampling.after.solver, "a tail as all other steps", hint)
    first = 0 if sampling.prefix is None else sampling.prefix.steps
    step_plan = _plan_steps(x, sampling, prediction, window, range(first, stop))
    draw = None if sampling.stochastic is None else sampling.stochastic.choose_kernel(x)
    if sampling.stochastic is None or sampling.stochastic.noise is None:
        steps = unroll(velocity, x, step_plan, keys, draw=draw)
    else:
        steps = _unroll_tree(velocity, x, step_plan, *noised, sampling.stochastic.noise, draw)
    latest = deque[Step](maxlen=1)

    def watch_steps() -> Iterator[Step]:
        for step in steps:
            latest.append(step)
            if sampling.observe is not None:
                sampling.observe(step)
            yield step

    trajectory = stack(step_plan, watch_steps(), x)
    host_values.remember(trajectory.steps, torch.tensor(step_plan.recorded, dtype=torch.int64).expand(len(x), -1))
    if stop == end:
        return trajectory, None
    step, level = latest[0], float(sampling.schedule.levels[stop - 1])
    return trajectory, Estimate(step.t, level, step.x - level * step.v)


def _unroll_tree(
    velocity: Velocity,
    x: Tensor,
    step_plan: StepPlan,
    key: Key,
    ids: Sequence[int],
    noise: NoiseOf,
    draw: DrawAndScore | None,
) -> Iterator[Step]:
    """Yield the steps of samples that share noise; consecutive steps with the same noise ids are taken together.

    If the recorded candidate is not the one that sampling continues from (SPO), x_next is drawn again for that one.
    """

    def fold_keys(ids: Sequence[int]) -> Key:
        return fold_in(fold_in(key, to_device(torch.tensor(list(ids)), x.device)), Stream.STEPS)

    for taken, part in groupby(step_plan.steps, key=lambda step: noise(ids, step)):
        steps = [*part]
        is_candidate = taken.recorded != taken.leading
        for group in [[step] for step in steps] if is_candidate else [steps]:
            some_steps = step_plan._replace(steps=range(group[0], group[-1] + 1))
            # Without the fused kernel, so that the candidate that goes on equals its recorded copy bit for bit.
            kernel = None if is_candidate else draw
            for step in unroll(velocity, x, some_steps, fold_keys(taken.recorded), draw=kernel):
                yield step
                x = step.x_next
            if is_candidate:
                z = normal(fold_in(fold_keys(taken.leading), step.t), tuple(step.x.shape), dtype=step.x.dtype)
                x = gaussian.sample(step_plan.transition(step.t), step.x, step.v, z)
