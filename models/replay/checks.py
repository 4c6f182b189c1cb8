"""Checks of pipelines without an adapter, and errors of their code in one line."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from fluvial.models.pipelines.open import format_error

# Largest deviation of a statistic of the initial noise. With fixed keys the outcome is the same every time.
STANDARD_ERRORS = 6.0


# Packages that diffusers imports only if they are installed, and uses without a check, by the names in its code.
OPTIONAL = {"ftfy": "ftfy", "transforms": "torchvision", "torchvision": "torchvision"}


class ReplayError(ValueError):
    """A pipeline cannot be replayed faithfully; the message names the pipeline and what differs."""


def build_error(pipeline: str, reason: str, *, step: int | None = None) -> ReplayError:
    """Return the error of a pipeline that cannot be replayed, for a reason, possibly at one step of the schedule."""
    where = "" if step is None else f" at step {step}"
    return ReplayError(f"{pipeline} cannot be trained without an adapter:{where} {reason}")


@contextmanager
def wrap_errors(pipeline: str, doing: str) -> Iterator[None]:
    """Turn any exception of a pipeline's own code into a one-line ValueError: "PIPELINE cannot DOING: ERROR"."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("fluvial."):  # already in one line
            raise
        missing = OPTIONAL.get(str(error.name)) if isinstance(error, NameError) else None
        if missing is not None and find_spec(missing) is None:
            raise ValueError(f"{pipeline} needs {missing}, which is not installed: pip install {missing}") from error
        raise ValueError(f"{pipeline} cannot {doing}: {format_error(error)}") from error


def check_chain(pipeline: str, step: int, x: Tensor, output: Tensor) -> None:
    """Check that the sample of a step is the output of the step before, which a rollout relies on.

    Raises:
        ReplayError: they differ, as in pipelines for inpainting.
    """
    if x.shape != output.shape:
        raise build_error(
            pipeline, f"the sample has shape {tuple(x.shape)}, and the step before returned {tuple(output.shape)}", step=step
        )
    expected = output.to(x.dtype)  # the pipeline may keep its samples in another dtype than its model's
    if not torch.equal(x, expected):
        difference = float((x.float() - expected.float()).norm() / expected.float().norm())
        raise build_error(
            pipeline,
            f"the sample differs from the output of the step before by {difference:.2g} of its norm: the pipeline changes "
            "samples between steps, as for inpainting",
            step=step,
        )


def check_tail(pipeline: str, taken: Sequence[int], steps: int, expected: int) -> int:
    """Check that the steps taken are the last `expected` of a schedule of `steps`, in order, and return the first of them.

    Raises:
        ReplayError: the pipeline takes other steps.
    """
    first = steps - expected
    if first < 0 or list(taken) != list(range(first, steps)):
        listed = ", ".join(map(str, taken)) or "none"
        raise build_error(pipeline, f"it takes the steps {listed} of a schedule of {steps}, expected the last {expected}")
    return first


def check_initial_noise(pipeline: str, x: Tensor) -> None:
    """Check that initial samples are standard normal noise, drawn per sample, because a rollout starts from such noise.

    Mean, variance and fourth moment of samples `[B, *event]` of different generators are compared with those of the normal
    distribution. The variance of the sum over the batch is compared with that of independent samples, which detects noise
    that samples share.

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
        raise build_error(
            pipeline,
            f"its initial samples are not standard normal noise: mean {float(mean):.2g}, variance {float(variance):.2g}, "
            f"fourth moment {float(fourth):.2g}, variance of their sum {float(together):.2g} times the batch, "
            "expected 0, 1, 3 and 1",
        )


def check_images(pipeline: str, decoded: Tensor, images: Tensor, *, tolerance: float, what: str = "images") -> float:
    """Return the relative RMS error of decoded samples against the pipeline's own images, or sounds (`what`).

    Raises:
        ReplayError: the shapes differ, or the error is above the tolerance.
    """
    if decoded.shape != images.shape:
        raise build_error(
            pipeline, f"its {what} have shape {tuple(images.shape)}, and its samples are decoded to {tuple(decoded.shape)}"
        )
    differ, why = f"its last samples, decoded, differ from its own {what}", "it may change the samples after the last step"
    return _check_error(pipeline, decoded, images.to(decoded), tolerance, differ, why)


def check_together(pipeline: str, together: Tensor, apart: Tensor, *, tolerance: float) -> float:
    """Return the relative RMS error of samples decoded together against the same samples decoded apart.

    Raises:
        ReplayError: the error is above the tolerance.
    """
    differ = "samples that it decodes together differ from the same ones decoded apart"
    return _check_error(pipeline, together, apart, tolerance, differ, "its decoding mixes the samples of a batch")


def _check_error(pipeline: str, actual: Tensor, expected: Tensor, tolerance: float, differ: str, why: str) -> float:
    """Return the relative RMS error; if it is above the tolerance, raise a ReplayError with `differ` and `why`."""
    error = float((actual - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise build_error(pipeline, f"{differ} by {error:.2g} of their norm, expected at most {tolerance:g}: {why}")
    return error
