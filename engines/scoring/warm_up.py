"""Trial of every reward on blank images at the start of a run, so that errors appear in the first seconds."""

from collections.abc import Mapping, Sequence

import torch

from fluvial.engines.errors import RunError
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.runner import RewardRunner
from fluvial.engines.scoring.signature import Samples


def warm_up(runners: Sequence[RewardRunner], blank: Samples, *, count: int, group: int = 0) -> None:
    """Score a blank batch with every reward; NaN is not a failure, and pending scores are not awaited.

    Args:
        blank: one blank sample, and prompts that are used in turn.
        group: samples per group, for rewards that compare them.

    Raises:
        RunError: a reward raised, took too long, or did not return scores; in one line.
    """
    for runner in runners:
        groupwise = runner.signature.takes("group") and group > 0
        number = group if groupwise else count
        prompts = [blank.prompts[0 if groupwise else i % len(blank.prompts)] for i in range(number)]
        latents = None if blank.latents is None else torch.cat([blank.latents] * number)
        runner.submit(torch.cat([blank.images] * number), prompts, latents, 0 if groupwise else None)
    for runner in runners:
        (scored,) = runner.results(stop=lambda: True)
        if scored.failed and not scored.abandoned:
            raise RunError(f"{scored.problems[0]}; it was tried on blank images before the run")
        runner.tally.seconds = 0.0


def warm_up_evaluators(evaluators: Mapping[str, Reward], blank: Samples, *, count: int) -> None:
    """Score a blank batch with every evaluator, see `warm_up`."""
    runners = [RewardRunner(evaluator, label=f"evaluator {name!r}") for name, evaluator in evaluators.items()]
    try:
        warm_up(runners, blank, count=count)
    finally:
        for runner in runners:
            runner.close()
