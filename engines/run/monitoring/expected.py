"""Description of a run before its first update: trained parameters, samples, and estimated time."""

from collections.abc import Iterator

from fluvial.engines.engine.engine import Engine
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.method import RecordedRows
from fluvial.engines.sampling.generate import count_samples_per_rank

BACKWARD = 3  # time of a forward and a backward pass, in forward passes


def describe_run(config: TrainConfig, engine: Engine, *, done: int) -> Iterator[str]:
    """Yield lines on the trained parameters, and on the samples of batches and optimizer updates.

    Args:
        done: number of updates at the start.
    """
    world, sampling, rank = engine.world, config.method.sampling, config.lora.rank
    trained = sum(parameter.numel() for parameter in engine.trainable.values())
    whole = sum(parameter.numel() for name, parameter in engine.module.named_parameters())
    how = f"lora of rank {rank}" if config.train == "lora" else "full"
    ranks = f"{world.size} processes" if world.size > 1 else "1 process"
    yield (
        f"{config.model} with {config.method.method_name}: {_format_count(trained)} of {_format_count(whole)} parameters "
        f"trained ({how}), {ranks} on {world.device.type}"
    )
    left = max(config.updates - done, 0)
    rollouts = left // config.updates_per_rollout
    per_update = sampling.batch // config.method.passes.minibatches
    source = f"{sampling.prompts} prompts x {sampling.group} samples, {sampling.steps} steps"
    source = source if config.makes_samples else "given data"
    batches = f"{rollouts} batch{'' if rollouts == 1 else 'es'} of {sampling.batch} ({source})"
    yield f"{left} update{'' if left == 1 else 's'} on {per_update} samples each: {batches}"


def estimate_seconds(config: TrainConfig, seconds: float, *, samples: int) -> float:
    """Estimate the seconds of all rollouts and updates from those of an evaluation.

    Rewards and networks beside the policy are left out. A forward and a backward pass count as three forward passes.

    Args:
        seconds: seconds of the evaluation.
        samples: number of samples of the evaluation.
    """
    sampling, guided = config.method.sampling, 1 + (config.evaluation_guidance.scale != 1)
    forward = seconds / (samples * config.evaluation_steps * guided)  # seconds per row
    rollout = sampling.batch * sampling.steps * (1 + (sampling.guidance.scale != 1)) if config.makes_samples else 0
    batch, rows = count_rows(config)
    learnt = batch * rows * (1 + (sampling.guidance.scale != 1 and sampling.guidance.update == "guided"))
    each = rollout + BACKWARD * learnt * config.method.passes.epochs
    return forward * each * (config.updates // config.updates_per_rollout)


def count_rows(config: TrainConfig) -> tuple[int, int]:
    """Return the samples per batch and the rows per sample; a row is a (sample, step) or (sample, noise level) pair."""
    rows, sampling = config.method.rows, config.method.sampling
    batch = 2 * sampling.prompts if config.method.is_paired else sampling.batch
    if isinstance(rows, RecordedRows):
        return batch, rows.trained.count(sampling.window.count(sampling.steps))
    return batch, rows.noising.each


def describe_spread(config: TrainConfig, engine: Engine) -> Iterator[str]:
    """Yield notes on how a run is spread over several ranks."""
    world, batch, size = engine.world, config.method.sampling.batch, config.samples_per_pass
    if world.size > 1 and engine.sharded.is_whole:
        yield f"each of the {world.size} ranks holds all weights (engine.replicas {config.engine.replicas})"
    ranks = world.data_size
    computed = {other: ranks * count_samples_per_rank(batch, micro_batch=other, ranks=ranks) for other in range(1, size + 1)}
    better = min(computed, key=lambda other: (computed[other], -other))
    repeats, fewer = computed[size] - batch, computed[better] - batch
    if config.makes_samples and fewer < repeats:
        yield (
            f"{repeats} of the {computed[size]} samples that {ranks} ranks compute per rollout are repeats, because "
            f"engine.micro_batch is {size} and there are {batch} samples: micro_batch {better} has {fewer}"
        )


def _format_count(number: int) -> str:
    """Format a number of parameters, e.g. 1.2 billion."""
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
