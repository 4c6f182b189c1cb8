"""Checks of a pipeline without an adapter, and its exceptions in one line."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from fluvial.models.pipelines.open import one_line

# A statistic of the initial noise may be this many standard errors off. With fixed keys the outcome is the same every time.
STANDARD_ERRORS = 6.0


# Packages that diffusers imports only if they are installed, and uses without a check, by the names it has for them.
OPTIONAL = {"ftfy": "ftfy", "transforms": "torchvision", "torchvision": "torchvision"}


class ReplayError(ValueError):
    """A pipeline cannot be replayed faithfully; the message names the pipeline and what differs."""


def refusal(pipeline: str, reason: str, *, step: int | None = None) -> ReplayError:
    """Return the error that refuses a pipeline for a reason, which may hold at one step of the schedule."""
    where = "" if step is None else f" at step {step}"
    return ReplayError(f"{pipeline} cannot be trained without an adapter:{where} {reason}")


@contextmanager
def foreign(pipeline: str, doing: str) -> Iterator[None]:
    """Turn any exception of a pipeline's own code into a ValueError of one line that says what fails: "decode samples"."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("fluvial."):  # of the network's own refusals, such as that of split tokens
            raise
        missing = OPTIONAL.get(str(error.name)) if isinstance(error, NameError) else None
        if missing is not None and find_spec(missing) is None:
            raise ValueError(f"{pipeline} needs {missing}, which is not installed: pip install {missing}") from error
        raise ValueError(f"{pipeline} cannot {doing}: {one_line(error)}") from error


def check_chain(pipeline: str, step: int, x: Tensor, output: Tensor) -> None:
    """Check that the sample of a step is the output of the step before, which the rollout relies on.

    Raises:
        ReplayError: they differ, as in pipelines that inpaint or edit.
    """
    if x.shape != output.shape:
        raise refusal(
            pipeline, f"the sample has shape {tuple(x.shape)}, and the step before returned {tuple(output.shape)}", step=step
        )
    expected = output.to(x.dtype)  # the pipeline may keep its samples in another dtype than its model's
    if not torch.equal(x, expected):
        difference = float((x.float() - expected.float()).norm() / expected.float().norm())
        raise refusal(
            pipeline,
            f"the sample differs from the output of the step before by {difference:.2g} of its norm: the pipeline changes "
            "samples between steps, as for inpainting",
            step=step,
        )


def check_tail(pipeline: str, taken: Sequence[int], steps: int, asked: int) -> int:
    """Return the first step of those that were taken, which must be the last `asked` ones of a schedule, in order.

    Raises:
        ReplayError: they are not.
    """
    first = steps - asked
    if first < 0 or list(taken) != list(range(first, steps)):
        shown = ", ".join(map(str, taken)) or "none"
        raise refusal(pipeline, f"it takes the steps {shown} of a schedule of {steps}, expected the last {asked}")
    return first


def check_initial_noise(pipeline: str, x: Tensor) -> None:
    """Check that initial samples are standard normal noise, drawn per sample, because a rollout starts from such noise.

    Mean, variance and fourth moment of samples `[B, *event]` of different generators are compared with those of the normal
    distribution, and the variance of the sum over the batch with that of independent samples, which shows anything that all
    samples share.

    Raises:
        ReplayError: a statistic is more than six standard errors off.
    """
    z = x.detach().to("cpu", torch.float64).flatten(1)
    count, shared = z.numel(), z.sum(0) / math.sqrt(len(z))
    mean, variance, fourth, together = z.mean(), z.square().mean(), z.pow(4).mean(), shared.square().mean()
    errors = [
        mean * math.sqrt(count),
        (variance - 1) * math.sqrt(count / 2),
        (fourth - 3) * math.sqrt(count / 96),
        (together - 1) * math.sqrt(len(shared) / 2),
    ]
    if not all(abs(float(error)) <= STANDARD_ERRORS for error in errors):
        raise refusal(
            pipeline,
            f"its initial samples are not standard normal noise: mean {float(mean):.2g}, variance {float(variance):.2g}, "
            f"fourth moment {float(fourth):.2g}, variance of their sum {float(together):.2g} times the batch, "
            "expected 0, 1, 3 and 1",
        )


def check_images(pipeline: str, decoded: Tensor, images: Tensor, *, tolerance: float, what: str = "images") -> float:
    """Return the relative error, in root mean square, of decoded samples against the pipeline's own images, or sounds.

    Raises:
        ReplayError: the shapes differ, or the error is above the tolerance.
    """
    if decoded.shape != images.shape:
        raise refusal(
            pipeline, f"its {what} have shape {tuple(images.shape)}, and its samples are decoded to {tuple(decoded.shape)}"
        )
    differ, why = f"its last samples, decoded, differ from its own {what}", "it may change the samples after the last step"
    return _check_error(pipeline, decoded, images.to(decoded), tolerance, differ, why)


def check_together(pipeline: str, together: Tensor, apart: Tensor, *, tolerance: float) -> float:
    """Return the relative error, in root mean square, of samples that are decoded together against the same ones apart.

    Raises:
        ReplayError: it is above the tolerance.
    """
    differ = "samples that it decodes together differ from the same ones decoded apart"
    return _check_error(pipeline, together, apart, tolerance, differ, "its decoding mixes the samples of a batch")


def _check_error(pipeline: str, made: Tensor, expected: Tensor, tolerance: float, differ: str, why: str) -> float:
    """Return the relative error in root mean square; ReplayError, of what differs and why, if it is above the tolerance."""
    error = float((made - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise refusal(pipeline, f"{differ} by {error:.2g} of their norm, expected at most {tolerance:g}: {why}")
    return error
