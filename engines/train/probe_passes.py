"""Passes of a run's network on noise, before training: they choose the micro-batch, and let blocks compile."""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import optree
import torch
from torch import Tensor, nn

from fluvial.engines.fsdp.engine import Engine
from fluvial.engines.plan import micro_batch
from fluvial.engines.plan.micro_batch import Choice, Passes
from fluvial.engines.plan.warm_up import WarmUp, warm_up
from fluvial.engines.report.progress import RunProgress
from fluvial.engines.rollout.generate import samples_per_rank
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.job import Job
from fluvial.models import Schedule
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.padding import MULTIPLE, trimmed, trims_padding
from fluvial.models.prompt_layers import PromptLayers


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
            cond = config.rollout.guidance.encode(job.model, list(job.prompts[:1]))
        self.row = optree.tree_map(lambda tensor: tensor.to(device), cond)

    def of(self, shape: tuple[int, ...], *, tokens: int | None = None, guided: bool = True) -> Passes:
        """Return the passes of samples of a shape.

        Args:
            shape: shape of a sample.
            tokens: length that the prompt is cut to; None is the model's own.
            guided: whether a rollout's pass has guidance, if the run has any.
        """
        guidance, model = self.config.rollout.guidance, self.job.model

        def rollout(module: nn.Module, size: int) -> Tensor:
            # Results of prompt layers are kept for a whole rollout, so that they count for the memory.
            known = PromptLayers(model, module, in_blocks=not self.engine.compiles)
            with known.prediction() if self.config.rollout.reuse_prompt else nullcontext():
                return self._predicted(module, size, shape, tokens, guided=guided)

        def update(module: nn.Module, size: int) -> Tensor:
            return self._predicted(module, size, shape, tokens, guided=guidance.update == "guided")

        return Passes(update, *((rollout, model.decode) if self.config.makes_samples else ()))

    def variants(self) -> Iterator[Passes]:
        """Yield passes in each form that a run may take: sizes of samples, lengths of prompts, evaluations."""
        for shape in self.shapes:
            yield self.of(shape)
        if trims_padding(self.job.model):
            yield self.of(self.largest, tokens=MULTIPLE)
        # Guidance doubles the batch of a pass. Evaluations may be the only ones without it.
        plain = [guidance.scale == 1 for guidance in (self.config.rollout.guidance, self.config.evaluation_guidance)]
        if self.config.makes_samples and plain == [False, True]:
            yield self.of(self.largest, guided=False)

    def _predicted(
        self, module: nn.Module, size: int, shape: tuple[int, ...], tokens: int | None, *, guided: bool
    ) -> Tensor:
        guidance, device = self.config.rollout.guidance, self.engine.world.device
        cond = optree.tree_map(lambda tensor: tensor.repeat_interleave(size, 0), trimmed(self.job.model, self.row, tokens))
        cond = cond.cond if isinstance(cond, Guided) and not guided else cond
        level, timestep = self.schedule.levels[:1].to(device).expand(size), self.schedule.timesteps[:1].expand(size)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device).expand(size, *shape).contiguous()
        return guided_velocity(
            self.job.model, module, x, level, cond, timestep=timestep, forwards=guidance.forwards, gradient=guidance.gradient
        )


def choose_micro_batch(config: TrainConfig, job: Job, engine: Engine, schedule: Schedule) -> Choice:
    """Return a micro-batch for a run, from the memory and the speed of passes of its own network on noise.

    Every rank must take part, and gets the same. Neither the network nor any stream of randomness is changed.

    Raises:
        UsageError: the passes of a single sample do not fit into the memory.
    """
    passes, world = RunPasses(config, job, engine, schedule), engine.world
    batch = config.rollout.batch if config.makes_samples or job.data is not None else 2 * config.rollout.prompts
    samples, steps = -(-batch // world.data_size), 0
    if config.objective.traits.trains_on == "steps":
        latents = 3 if "old" in config.objective.traits.compares_with else 2
        steps = config.rollout.window.count(config.rollout.steps) * latents
    row_bytes = sum(tensor.nbytes for tensor in optree.tree_leaves(passes.row))
    # A trajectory, and the copy of it that an update makes.
    stored = samples * (row_bytes + 2 * (1 + steps) * 4 * math.prod(passes.largest))
    with micro_batch.trials(engine, passes.of(passes.largest)) as measure:
        free = min(world.gather_items(micro_batch.free_memory(world.device)))
        budget = max(int(micro_batch.USABLE * free) - stored, 0)
        return micro_batch.choose(micro_batch.sizes(samples), measure, budget=budget)


def notes(config: TrainConfig, engine: Engine) -> Iterator[str]:
    """Yield what a person should know of how a run is spread over several ranks."""
    world, batch, size = engine.world, config.rollout.batch, config.samples_per_pass
    if world.size > 1 and engine.sharded.is_whole:
        yield f"each of the {world.size} ranks holds all weights (engine.replicas {config.engine.replicas})"
    ranks = world.data_size
    computed = {other: ranks * samples_per_rank(batch, micro_batch=other, ranks=ranks) for other in range(1, size + 1)}
    better = min(computed, key=lambda other: (computed[other], -other))
    repeats, fewer = computed[size] - batch, computed[better] - batch
    if config.makes_samples and fewer < repeats:
        yield (
            f"{repeats} of the {computed[size]} samples that {ranks} ranks compute per rollout are repeats, because "
            f"micro_batch is {size} and there are {batch} samples: micro_batch {better} has {fewer}"
        )


def compile_blocks(
    config: TrainConfig, job: Job, engine: Engine, schedule: Schedule, *, progress: RunProgress | None = None
) -> WarmUp:
    """Compile the blocks of a run before its first rollout, for each form of its passes; every rank must take part.

    Raises:
        UsageError: they cannot be compiled, and engine.compile is True.
    """
    passes = list(RunPasses(config, job, engine, schedule).variants())
    found = warm_up(engine, passes, config.samples_per_pass, progress=progress)
    pairs = config.update_micro_batch
    if pairs in (None, config.samples_per_pass) or found.failure is not None:
        return found
    more = warm_up(engine, [Passes(each.update) for each in passes], pairs, progress=progress)
    return more._replace(programs=found.programs + more.programs, seconds=found.seconds + more.seconds)
