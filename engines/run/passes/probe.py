"""Passes of a run's network on noise, before training: they choose the micro-batch, and let blocks compile."""

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
    """Forward passes like those of a run, on noise and the run's first prompt; no stream of randomness is drawn from.

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

    def of(self, shape: tuple[int, ...], *, tokens: int | None = None, guided: bool = True) -> Passes:
        """Return the passes of samples of a shape.

        Args:
            shape: shape of a sample.
            tokens: length that the prompt is cut to; None is the model's own.
            guided: whether a rollout's pass has guidance, if the run has any.
        """
        model = self.job.model

        def rollout(module: nn.Module, size: int) -> Tensor:
            # Results of prompt layers are kept for a whole rollout, so that they count for the memory.
            known = PromptLayers(model, module, in_blocks=not self.engine.compiles)
            reuse = self.config.rollout.reuse
            merged = merge_adapters(module) if reuse == "merged" else nullcontext()
            with nullcontext() if reuse == "none" else known.prediction(), merged:
                if reuse != "keys":
                    return self._predict(module, size, shape, tokens, guided=guided)
                keys = PromptKeys(module)  # which the first step keeps, and all others read
                with keys.prediction():
                    self._predict(module, size, shape, tokens, guided=guided)
            with known.prediction(), keys.prediction():
                return self._predict(module, size, shape, tokens, guided=guided)

        def update(module: nn.Module, size: int) -> Tensor:
            return self._predict(module, size, shape, tokens, guided=self._updates_guided)

        return Passes(update, *((rollout, model.decode) if self.config.makes_samples else ()))

    @collective
    def same_bits(self, size: int, rows: int) -> bool:
        """Return whether an update's pass gives each row the bits of a rollout's pass.

        Rows of a pass of the rollout are at one level, those of the update's at the levels of as many steps as it takes
        passes of the rollout. Means over a row's values are compared as well, which log-probabilities are.

        Args:
            size: rows of the update's pass.
            rows: rows of a rollout's pass; `size` is a multiple of them.
        """
        engine, same = self.engine, True
        for shape in self.shapes:
            predict = partial(self._predict, shape=shape, tokens=None, guided=self._updates_guided, chunk=rows)
            with engine.inference() as module:
                alone = [_rows(predict(module, rows, first=first)) for first in range(0, size, rows)]
            engine.sharded.set_last(False)
            with engine.sharded.train():
                predicted = predict(engine.module, size)
                predicted.float().square().mean().backward()  # a forward pass alone would leave parameters gathered
            expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
            same = same and all(map(torch.equal, _rows(predicted.detach()), expected))
        return same

    @property
    def _updates_guided(self) -> bool:
        return self.config.method.sampling.guidance.update == "guided"

    def variants(self) -> Iterator[Passes]:
        """Yield passes in each form that a run may take: sizes of samples, lengths of prompts, evaluations."""
        for shape in self.shapes:
            yield self.of(shape)
        if trims_padding(self.job.model):
            yield self.of(self.largest, tokens=MULTIPLE)
        # Guidance doubles the batch of a pass. Evaluations may be the only ones without it.
        plain = [guidance.scale == 1 for guidance in (self.config.method.sampling.guidance, self.config.evaluation_guidance)]
        if self.config.makes_samples and plain == [False, True]:
            yield self.of(self.largest, guided=False)

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
        """Return the prediction of `size` rows of noise from row `first` on; each `chunk` of them is at a step's level."""
        gradient, device = self.config.method.sampling.guidance.gradient, self.engine.world.device
        cond = optree.tree_map(lambda tensor: tensor.repeat_interleave(size, 0), trim(self.job.model, self.row, tokens))
        cond = cond.cond if isinstance(cond, Guided) and not guided else cond
        rows = torch.arange(first, first + size)
        step = rows // (chunk or size) % len(self.schedule.timesteps)
        level, timestep = self.schedule.levels[step].to(device), self.schedule.timesteps[step.to(device)]
        x = normal(fold_in(key(0), rows.to(device)), (size, *shape))
        forwards = self.config.update_forwards(size)
        return guided_velocity(
            self.job.model, module, x, level, cond, timestep=timestep, forwards=forwards, gradient=gradient
        )


def _rows(predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a prediction, and the mean square of each."""
    return predicted, predicted.float().flatten(1).square().mean(1)


def choose_micro_batch(config: TrainConfig, job: Job, engine: Engine, schedule: Schedule) -> Choice:
    """Return a micro-batch for a run, from the memory and the speed of passes of its own network on noise.

    Every rank must take part, and gets the same. Neither the network nor any stream of randomness is changed.

    Raises:
        UsageError: the passes of a single sample do not fit into the memory.
    """
    passes = RunPasses(config, job, engine, schedule)
    sampling = config.method.sampling
    batch = sampling.batch if config.makes_samples or job.data is not None else 2 * sampling.prompts
    samples = -(-batch // engine.world.data_size)
    with micro_batch.trials(engine, passes.of(passes.largest)) as measure:
        budget = _budget(config, passes, samples)
        return micro_batch.choose(micro_batch.sizes(samples), measure, budget=budget)


def choose_pairs(config: TrainConfig, job: Job, engine: Engine, schedule: Schedule) -> Choice:
    """Return the number of (sample, step) pairs per pass of an update, from the memory and the speed of passes on noise.

    Multiples of the rollout's rows are tried; the next one counts only if each of its rows has the bits that a pass
    of the rollout gives it: then first ratios stay exactly 1. Adapters that are still 0 are filled for that. Compiled blocks
    have other bits in an update whatever its rows, so there memory and speed decide, and `rollout.max_log_ratio` bounds the
    first ratio. Every rank must take part, and gets the same. Neither the network nor any stream of randomness is changed.
    """
    passes, rows = RunPasses(config, job, engine, schedule), config.samples_per_pass
    batch, each = count_rows(config)
    samples = -(-batch // engine.world.data_size)
    pairs = samples * each // config.method.passes.minibatches
    tried = passes.of(passes.largest)
    trial_passes = Passes(tried.update, same=None if engine.compiles else lambda size: passes.same_bits(size, rows))
    with micro_batch.trials(engine, trial_passes) as measure:
        sizes = [rows * times for times in micro_batch.sizes(max(pairs // rows, 1))]
        budget, most = _budget(config, passes, samples) // config.method.needs.graphs, micro_batch.SLOWER
        return micro_batch.choose(sizes, measure, budget=budget, most=most, again=True, name="update_micro_batch")


def explain_fixed_pairs(config: TrainConfig) -> str | None:
    """Return why an update takes as many pairs per pass as a rollout has rows; None where the number can be chosen.

    A reward's gradient takes memory that no pass of the network shows.
    """
    return "a reward's gradient is followed" if config.method.needs.rewards == "gradients" else None


def _budget(config: TrainConfig, passes: RunPasses, samples: int) -> int:
    """Return the bytes that a pass may take, beside a trajectory, and the copy of it that an update makes."""
    world, steps = passes.engine.world, 0
    if (recorded := config.method.recorded) is not None:
        sampling = config.method.sampling
        steps = sampling.window.count(sampling.steps) * (3 if recorded.velocity else 2)
    row_bytes = sum(tensor.nbytes for tensor in optree.tree_leaves(passes.row))
    stored = samples * (row_bytes + 2 * (1 + steps) * 4 * math.prod(passes.largest))
    free = min(world.gather_items(micro_batch.free_memory(world.device)))
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
        pairs: numbers of pairs per pass of an update that were chosen.

    Raises:
        UsageError: they cannot be compiled, and engine.compile is True.
    """
    passes = list(RunPasses(config, job, engine, schedule).variants())
    warmed = warm_up(engine, passes, config.samples_per_pass, progress=progress)
    fixed = config.engine.update_micro_batch
    for size in pairs if isinstance(fixed, str) else (fixed,):
        if size != config.samples_per_pass and warmed.failure is None:
            more = warm_up(engine, [Passes(each.update) for each in passes], size, progress=progress)
            warmed = more._replace(programs=warmed.programs + more.programs, seconds=warmed.seconds + more.seconds)
    return warmed
