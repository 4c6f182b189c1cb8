"""Trying every reward on blank images before a run computes anything: what is wrong is known in the first seconds."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fluvial.engines.errors import RunError
from fluvial.engines.rewards.protocol import Reward
from fluvial.engines.rewards.runner import RewardRunner, RewardRunners
from fluvial.engines.rewards.signature import Samples


def warm_up(runners: RewardRunners, blank: Samples, *, count: int, group: int) -> None:
    """Score a blank batch with every reward; a NaN for a blank image is no failure.

    Args:
        runners: the rewards.
        blank: one blank sample, and prompts that are taken in turn.
        count: number of samples of the batch.
        group: number of samples of a group, for rewards that compare its samples.

    Raises:
        RunError: a reward raised, took too long, or returned something else than scores; in one line.
    """
    for runner in runners.runners:
        _submit(runner, blank, count=count, group=group)
    for runner in runners.runners:
        _check(runner)
        runner.tally.seconds = 0.0


def warm_up_evaluators(evaluators: Mapping[str, Reward], blank: Samples, *, count: int) -> None:
    """Score a blank batch with every evaluator, see `warm_up`.

    Raises:
        RunError: an evaluator failed.
    """
    runners = [RewardRunner(evaluator, label=f"evaluator {name!r}") for name, evaluator in evaluators.items()]
    try:
        for runner in runners:
            _submit(runner, blank, count=count, group=0)
        for runner in runners:
            _check(runner)
    finally:
        for runner in runners:
            runner.close()


def _submit(runner: RewardRunner, blank: Samples, *, count: int, group: int) -> None:
    """Start scoring a blank batch, or group."""
    groupwise = runner.signature.takes("group") and group > 0
    number = group if groupwise else count
    prompts = [blank.prompts[0 if groupwise else i % len(blank.prompts)] for i in range(number)]
    latents = None if blank.latents is None else _repeated(blank.latents, number)
    runner.submit(_repeated(blank.images, number), prompts, latents, 0 if groupwise else None)


def _check(runner: RewardRunner) -> None:
    for scored in runner.results():
        if scored.failed:
            raise RunError(f"{scored.problems[0]}; it was tried on blank images before the run")


def _repeated(tensor: Tensor, number: int) -> Tensor:
    return torch.cat([tensor] * number)
