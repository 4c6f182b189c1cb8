"""Passes of a run's network on noise, before training, to choose micro-batch sizes and to compile blocks."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import optree
import torch
from torch import Tensor, nn

from fluvial.core.random import fold_in, key, normal
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import collective
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.job import Job
from fluvial.engines.run.log.progress import RunProgress
from fluvial.engines.run.monitoring.expected import count_rows
from fluvial.engines.run.passes import micro_batch
from fluvial.engines.run.passes.micro_batch import Choice, Passes, WarmUp, warm_up
from fluvial.models import Schedule
from fluvial.models.fixed_adapters import merge_adapters
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.padding import MULTIPLE, trim, trims_padding
from fluvial.models.prompt_layers import PromptKeys, PromptLayers


class RunPasses:
    """Forward passes like those of a run, on noise and the run's first prompt; they draw from no stream of randomness.

    Args:
        schedule: schedule with its timesteps on the device.
    """

    def __init__(self, config: TrainConfig, job: Job, engine: Engine, schedule: Schedule) -> None:
        self.config, self.job, self.engine, self.schedule = config, job, engine, schedule
        self.shapes = list(dict.fromkeys(job.sizes.values())) or [job.shape]
        self.largest = max(self.shapes, key=math.prod)
        device = engine.world.device
        with torch.no_grad():
            cond = config.method.sampling.guidance.encode(job.model, list(job.prompts[:1]))
        self.row = optree.tree_map(lambda tensor: tensor.to(device), cond)

    def build(self, shape: tuple[int, ...], *, tokens: int | None = None, guided: bool = True) -> Passes:
        """Build the passes for samples of a shape.

        Args:
            shape: shape of a sample.
            tokens: length that the prompt is cut to; None is the model's default.
            guided: whether a rollout's pass has guidance, if the run has any.
        """
        model = self.job.model

        def rollout(module: nn.Module, size: int) -> Tensor:
            # Results of prompt layers are kept during a whole rollout, so they count for the memory.
            known = PromptLayers(model, module, in_blocks=not self.engine.compiles)
            reuse = self.config.rollout.reuse
            merged = merge_adapters(module) if reuse == "merged" else nullcontext()
            with nullcontext() if reuse == "none" else known.prediction(), merged:
                if reuse != "keys":
                    return self._predict(module, size, shape, tokens, guided=guided)
                keys = PromptKeys(module)  # stored by the first step, read by all others
                with keys.prediction():
                    self._predict(module, size, shape, tokens, guided=guided)
            with known.prediction(), keys.prediction():
                return self._predict(module, size, shape, tokens, guided=guided)

        def update(module: nn.Module, size: int) -> Tensor:
            return self._predict(module, size, shape, tokens, guided=self._updates_guided)

        return Passes(update, *((rollout, model.decode) if self.config.makes_samples else ()))

    @collective
    def has_same_bits(self, size: int, rows: int) -> bool:
        """Return whether an update's pass gives each row the bits of a rollout's pass.

        Rows of a rollout's pass are at one level; those of the update's pass are at the levels of size / rows steps. Means
        over a row's values, like those in log-probabilities, are compared as well.

        Args:
            size: rows of the update's pass.
            rows: rows of a rollout's pass; `size` is a multiple of them.
        """
        engine, same = self.engine, True
        for shape in self.shapes:
            predict = partial(self._predict, shape=shape, tokens=None, guided=self._updates_guided, chunk=rows)
            with engine.inference() as module:
                alone = [_add_means(predict(module, rows, first=first)) for first in range(0, size, rows)]
            engine.sharded.set_last(False)
            with engine.sharded.train():
                predicted = predict(engine.module, size)
                predicted.float().square().mean().backward()  # without it, parameters would stay gathered
            expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
            same = same and all(map(torch.equal, _add_means(predicted.detach()), expected))
        return same

    @property
    def _updates_guided(self) -> bool:
        return self.config.method.sampling.guidance.update == "guided"

    def list_variants(self) -> Iterator[Passes]:
        """Yield the passes in each form that occurs in the run: sizes of samples, lengths of prompts, evaluations."""
        for shape in self.shapes:
            yield self.build(shape)
        if trims_padding(self.job.model):
            yield self.build(self.largest, tokens=MULTIPLE)
        # Guidance doubles the batch of a pass. Evaluations may be the only ones without it.
        plain = [guidance.scale == 1 for guidance in (self.config.method.sampling.guidance, self.config.evaluation_guidance)]
        if self.config.makes_samples and plain == [False, True]:
            yield self.build(self.largest, guided=False)

    def _predict(
        self,
        module: nn.Module,
        size: int,
        shape: tuple[int, ...],
        tokens: int | None,
        *,
        guided: bool,
        first: int = 0,
        chunk: int | None = None,
    ) -> Tensor:
        """Return the prediction of `size` rows of noise from row `first` on; each `chunk` rows share a level."""
        gradient, device = self.config.method.sampling.guidance.gradient, self.engine.world.device
        cond = optree.tree_map(lambda tensor: tensor.repeat_interleave(size, 0), trim(self.job.model, self.row, tokens))
        cond = cond.cond if isinstance(cond, Guided) and not guided else cond
        rows = torch.arange(first, first + size)
        step = rows // (chunk or size) % len(self.schedule.timesteps)
        level, timestep = self.schedule.levels[step].to(device), self.schedule.timesteps[step.to(device)]
        x = normal(fold_in(key(0), rows.to(device)), (size, *shape))
        forwards = self.config.choose_forwards(size)
        return guided_velocity(
            self.job.model, module, x, level, cond, timestep=timestep, forwards=forwards, gradient=gradient
        )


def _add_means(predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Return a prediction, and the mean square of each of its rows."""
    return predicted, predicted.float().flatten(1).square().mean(1)


def choose_micro_batch(config: TrainConfig, job: Job, engine: Engine, schedule: Schedule) -> Choice:
    """Choose the micro-batch of a run from memory and speed of passes of its network on noise; the same on every rank.

    Network and streams of randomness are unchanged. All ranks call it.

    Raises:
        UsageError: the passes of a single sample do not fit into the memory.
    """
    passes = RunPasses(config, job, engine, schedule)
    sampling = config.method.sampling
    batch = sampling.batch if config.makes_samples or job.data is not None else 2 * sampling.prompts
    samples = -(-batch // engine.world.data_size)
    with micro_batch.open_trials(engine, passes.build(passes.largest)) as measure:
        budget = _compute_budget(config, passes, samples)
        return micro_batch.choose_size(micro_batch.list_sizes(samples), measure, budget=budget)


def choose_pairs(config: TrainConfig, job: Job, engine: Engine, schedule: Schedule) -> Choice:
    """Choose the number of (sample, step) pairs per pass of an update from memory and speed of passes on noise.

    Multiples of the rollout's rows are tried. A size is accepted only if each of its rows has the same bits as in a pass of
    the rollout, so that first ratios stay exactly 1; adapters that are still 0 are filled with noise for this. Compiled
    blocks have other bits in updates at any size, so there only memory and speed count, and `rollout.max_log_ratio` bounds
    the first ratio. Network and streams of randomness are unchanged. All ranks call it, and get the same.
    """
    passes, rows = RunPasses(config, job, engine, schedule), config.samples_per_pass
    batch, each = count_rows(config)
    samples = -(-batch // engine.world.data_size)
    pairs = samples * each // config.method.passes.minibatches
    update = passes.build(passes.largest).update
    trial_passes = Passes(update, same=None if engine.compiles else lambda size: passes.has_same_bits(size, rows))
    with micro_batch.open_trials(engine, trial_passes) as measure:
        sizes = [rows * times for times in micro_batch.list_sizes(max(pairs // rows, 1))]
        budget, most = _compute_budget(config, passes, samples) // config.method.needs.graphs, micro_batch.SLOWER
        return micro_batch.choose_size(sizes, measure, budget=budget, most=most, again=True, name="update_micro_batch")


def explain_fixed_pairs(config: TrainConfig) -> str | None:
    """Return why an update has as many pairs per pass as a rollout has rows; None if the number can be chosen.

    A reward's gradient uses memory that trial passes of the network do not show.
    """
    return "a reward's gradient is followed" if config.method.needs.rewards == "gradients" else None


def _compute_budget(config: TrainConfig, passes: RunPasses, samples: int) -> int:
    """Return the bytes that a pass may use beside a trajectory and the update's copy of it."""
    world, steps = passes.engine.world, 0
    if (recorded := config.method.recorded) is not None:
        sampling = config.method.sampling
        steps = sampling.window.count(sampling.steps) * (3 if recorded.velocity else 2)
    row_bytes = sum(tensor.nbytes for tensor in optree.tree_leaves(passes.row))
    stored = samples * (row_bytes + 2 * (1 + steps) * 4 * math.prod(passes.largest))
    free = min(world.gather_items(micro_batch.measure_free_memory(world.device)))
    return max(int(micro_batch.USABLE * free) - stored, 0)


@collective
def compile_blocks(
    config: TrainConfig,
    job: Job,
    engine: Engine,
    schedule: Schedule,
    pairs: Sequence[int] = (),
    *,
    progress: RunProgress | None = None,
) -> WarmUp:
    """Compile the blocks of a run before its first rollout, for each form of its passes.

    Args:
        pairs: chosen numbers of pairs per pass of an update.

    Raises:
        UsageError: the blocks cannot be compiled, and `engine.compile` is True.
    """
    passes = list(RunPasses(config, job, engine, schedule).list_variants())
    warmed = warm_up(engine, passes, config.samples_per_pass, progress=progress)
    fixed = config.engine.update_micro_batch
    for size in pairs if isinstance(fixed, str) else (fixed,):
        if size != config.samples_per_pass and warmed.failure is None:
            more = warm_up(engine, [Passes(each.update) for each in passes], size, progress=progress)
            warmed = more._replace(programs=warmed.programs + more.programs, seconds=warmed.seconds + more.seconds)
    return warmed
