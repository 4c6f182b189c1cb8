"""Settings of evaluations."""

from dataclasses import dataclass

from fluvial.core.checks import BATCH, INDEX, PIXELS, SCALE, STEPS, check_fields
from fluvial.engines.errors import UsageError
from fluvial.engines.sampling.solvers import SolverChoice


@dataclass(frozen=True)
class SuiteConfig:
    """Prompts and evaluators of an evaluation, and its sampling where that differs from the rollout.

    Args:
        prompts: Files of prompts to evaluate on, in the formats of `prompts`, in place of the held-out prompts. Training
            prompts are unchanged.
        rewards: Evaluators: names of the job's rewards and evaluators, or functions (images, prompts) -> [B] as module:name.
            By default those of the job, and for a job without any the rewards of the run.
        seeds: Number of samples per prompt. The evaluations before and after the run then take every prompt, and those
            in between evenly spaced prompts, with at most `samples` samples in all. None draws prompts at random.
        micro_batch: Number of samples per forward pass; None is the run's `engine.micro_batch`. More fit into memory than in
            an update, because no activations are kept for a backward pass.
        steps: Number of steps of the schedule; None is that of the rollout.
        guidance: Scale of classifier-free guidance; None is that of the rollout, so that a run without guidance can be
            evaluated with it (DiffusionNFT).
        solver: Solver of the ODE: euler, dpmpp_2m (DPM-Solver++ 2M, arXiv 2211.01095), unipc (UniPC, 2302.04867), sa_solver
            (SA-Solver, 2309.05019, without noise), consistency (each step to the clean sample and back with new noise) or
            auto (consistency after DMD2, else that the model is served with: unipc for Wan, else euler).
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
        counts = {"steps": STEPS, "seeds": BATCH, "micro_batch": BATCH}
        check_fields(self, "evaluation", **counts, guidance=SCALE, height=PIXELS, width=PIXELS)
        if weighted := [name for name in self.rewards if "=" in name and ":" not in name]:
            raise UsageError(
                f"`evaluation.rewards` holds {weighted[0]!r}, and evaluators have no weights, because each is reported "
                "separately: remove the weight"
            )

    def count_samples(self, prompts: int, samples: int) -> int:
        """Return the number of samples of an evaluation before or after a run.

        Args:
            prompts: number of prompts to evaluate on.
            samples: number of samples where prompts are drawn at random.
        """
        return samples if self.seeds is None else self.seeds * prompts


@dataclass(frozen=True)
class EvaluationConfig(SuiteConfig):
    """Evaluations of a run: interval, number of samples, and sampling where it differs from the rollout.

    Args:
        every: Number of updates between evaluations on held-out prompts; 0 evaluates only before and after.
        samples: Number of samples per evaluation during the run.
        final_samples: Number of samples of the evaluations before and after the run; with `seeds` they take every prompt
            instead.
        stop_when_gamed: End the run early after this many evaluations in a row at which the score of the unseen evaluator
            falls while the reward rises; the checkpoint of the best evaluation is kept. 0 never ends it. The unseen
            evaluator is the one named heldout, or else the last.
    """

    every: int = 20
    samples: int = 200
    final_samples: int = 1000
    stop_when_gamed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, samples=BATCH, final_samples=BATCH, every=INDEX, stop_when_gamed=INDEX)
