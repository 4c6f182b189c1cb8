"""`fluvial eval MODEL`: score weights on held-out prompts."""

from dataclasses import dataclass
from pathlib import Path

from fluvial.engines.cli.listing import BUILT_IN
from fluvial.engines.cli.parse import at_least_one, console, flags_in_errors, named, parsed


@dataclass(frozen=True)
class EvalConfig:
    """Score weights on held-out prompts, sampled with the ODE.

    Args:
        weights: Folder of the weights, such as the `weights` of a run folder. By default the shipped base weights.
        samples: Number of samples to score.
        steps: Number of steps of the sampling schedule.
        micro_batch: Number of samples per forward pass.
    """

    weights: Path | None = None
    samples: int = 400
    steps: int = 10
    micro_batch: int = 64

    def __post_init__(self) -> None:
        at_least_one(samples=self.samples, steps=self.steps, micro_batch=self.micro_batch)


def run(args: list[str]) -> None:
    """Print the share of samples that each evaluator finds exactly right.

    Raises:
        UsageError: the arguments are wrong.
    """
    name = named("eval", args, tuple(BUILT_IN), "a model")
    config = parsed(EvalConfig, EvalConfig, f"fluvial eval {name}", args[1:])
    with flags_in_errors(config):
        score(name, config)


def score(name: str, config: EvalConfig) -> None:
    """Draw samples of the held-out prompts with a built-in model, and print what each evaluator says of them."""
    from fluvial.engines.fsdp.world import init_world
    from fluvial.engines.report.progress import table
    from fluvial.engines.rollout.generate import on_device
    from fluvial.engines.train import job as jobs
    from fluvial.engines.train.evaluate import evaluate

    job = jobs.named(name, weights=config.weights)
    with init_world() as world:
        module = jobs.build(job).to(world.device).eval()
        schedule = on_device(job.model.schedule(config.steps, job.shape), world.device)
        result = evaluate(
            job, module, schedule=schedule, samples=config.samples, micro_batch=config.micro_batch, world=world
        )
        if world.is_main:
            rows = {
                evaluator: (f"{result.exact[evaluator]:.4f}", f"{result.score[evaluator]:.4f}")
                for evaluator in job.evaluators
            }
            title = f"held-out prompts, {result.samples} samples of {config.weights or 'the shipped base'}"
            console().print(table(title, ("exactly right", "characters right"), rows), highlight=False)
