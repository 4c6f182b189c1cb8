"""The settings of a run's evaluations."""

from dataclasses import dataclass

from fluvial.core.checks import check_fields
from fluvial.engines.errors import UsageError
from fluvial.engines.sampling.solvers import SolverChoice


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations during a run, and how they are sampled where that differs from the rollout.

    Args:
        prompts: Files of prompts to evaluate on, as `prompts` reads them, in place of the held-out prompts. They change
            nothing about the prompts that are trained on.
        rewards: Evaluators: names of the job's rewards and evaluators, or functions (images, prompts) -> [B] as module:name.
            By default those of the job, and for a job without any the rewards of the run.
        seeds: Number of samples per prompt. The evaluations before and after the run then take every prompt, and those
            in between evenly spaced prompts, with at most `eval_samples` samples in all. None draws prompts at random.
        micro_batch: Number of samples per forward pass; None is the run's `micro_batch`. More of them fit into memory than
            in an update, because nothing is kept for a backward pass.
        steps: Number of steps of the schedule; None is that of the rollout.
        guidance: Scale of classifier-free guidance; None is that of the rollout, so that a run without guidance can be
            evaluated with it (DiffusionNFT).
        solver: Solver of the ODE: euler, dpmpp_2m (DPM-Solver++ 2M, arXiv 2211.01095), unipc (UniPC, 2302.04867), sa_solver
            (SA-Solver, 2309.05019, without noise) or auto (that the model is served with: unipc for Wan, else euler).
        height: Height of the images, in pixels; None is that of the rollout.
        width: Width of the images, in pixels; None is that of the rollout.
        average: Evaluate and export the moving average of the weights, if there is one, instead of the weights.
    """

    prompts: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    seeds: int | None = None
    micro_batch: int | None = None
    steps: int | None = None
    guidance: float | None = None
    solver: SolverChoice = "auto"
    height: int | None = None
    width: int | None = None
    average: bool = True

    def __post_init__(self) -> None:
        size, count = (1, 2**20), (1, 2**31)
        check_fields(self, steps=count, seeds=count, micro_batch=count, guidance=(0, 1e6), height=size, width=size)
        if weighted := [name for name in self.rewards if "=" in name and ":" not in name]:
            raise UsageError(
                f"`evaluation.rewards` holds {weighted[0]!r}, and evaluators have no weights, because each is reported "
                "alone: use its name alone"
            )

    def whole(self, prompts: int, samples: int) -> int:
        """Return the number of samples of an evaluation before or after a run.

        Args:
            prompts: number of prompts to evaluate on.
            samples: number of samples where prompts are drawn at random.
        """
        return samples if self.seeds is None else self.seeds * prompts
