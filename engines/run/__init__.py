"""Training runs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fluvial.engines.run.config import TrainConfig
    from fluvial.engines.run.job import Job


def train(config: "TrainConfig", job: "Job | None" = None, *, console: "Console | None" = None) -> dict[str, Any]:
    """Run a training job to its end or a request to stop, and return its summary (empty if stopped early).

    Metrics, images, checkpoints, trained weights and the summary are written to the run folder `config.out`.

    Args:
        job: job to train; by default that of `config.model`.
        console: console for progress; None is silent.

    Raises:
        UsageError: the configuration does not fit the job or the machine.
        RunError: the run cannot continue.
    """
    from fluvial.engines.run.training import run  # imports torch, which the help of a command avoids

    return run(config, job, console=console)
