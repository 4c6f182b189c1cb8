"""Training runs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fluvial.engines.run.config import TrainConfig
    from fluvial.engines.run.job import Job


def train(config: "TrainConfig", job: "Job | None" = None, *, console: "Console | None" = None) -> dict[str, Any]:
    """Run a training job to its end, or until it is asked to stop, and return its summary (empty if stopped early).

    The run folder `config.out` receives metrics, images, checkpoints, the trained weights and the summary.

    Args:
        job: what is trained; by default what `config.model` names.
        console: where progress is shown; None is silent.

    Raises:
        UsageError: the run cannot be done as configured.
        RunError: it cannot go on.
    """
    from fluvial.engines.run.training import run  # imports torch, which a command's help need not wait for

    return run(config, job, console=console)
