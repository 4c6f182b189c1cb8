"""How far two results of the same mathematics may lie apart, derived from dtypes and operation counts, not guessed."""

import math
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

# Half- and single-precision inputs are computed in float32, float64 in float64.
COMPUTE_DTYPE = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}

# Roundings on the longest path to one result, each of half an eps; both sides round, which makes it one eps each.
OPERATIONS = {
    "coefficients": 16,  # ddim's b: four factors, a root and a difference, over a quotient of two products
    "mean": 4,  # two products, a sum, and the noise term
    "log_prob": 12,  # mean, difference, square, quotient, logarithm and sum; the reduction is `reduction` below
    "advantage": 12,  # two centrings, a square, a root and a quotient
}


class Tolerance(TypedDict):
    """What `torch.testing.assert_close` is given."""

    rtol: float
    atol: float


EXACT: Tolerance = {"rtol": 0.0, "atol": 0.0}


def tolerance(operation: str, dtype: torch.dtype, *, condition: float = 1.0, reduced: int = 1) -> Tolerance:
    """Return rtol and atol for `torch.testing.assert_close`: eps of the dtype that computes * roundings * condition.

    Args:
        operation: a key of OPERATIONS.
        dtype: of the inputs.
        condition: how much an input's relative error is magnified, bounded by the caller from the values it draws.
        reduced: elements summed into one result; torch sums pairwise or better, so it adds log2 of them in roundings.
    """
    eps = torch.finfo(COMPUTE_DTYPE[dtype]).eps
    bound = eps * (OPERATIONS[operation] + math.ceil(math.log2(max(reduced, 1)))) * max(condition, 1.0)
    return {"rtol": bound, "atol": bound}


def log_prob_tolerance(dtype: torch.dtype, *, residual: Tensor, std: Tensor, magnitude: Tensor, reduction: str) -> Tolerance:
    """Return rtol and atol for a log-probability.

    The residual r = x_next - mean is a difference of terms as large as `magnitude`, known to eps * magnitude; r^2 / 2 std^2
    turns that into eps * (magnitude / std) * (|r| / std), on top of the rounding of r^2 / 2 std^2 itself.
    """
    if residual.numel() == 0:
        return EXACT
    per_sample_std = std.reshape(-1, *[1] * (residual.ndim - 1))
    z = (residual.abs() / per_sample_std).max().item()
    condition = (magnitude / per_sample_std).max().item() * z + z**2 + std.log().abs().max().item()
    elements = residual[0].numel()
    return tolerance(
        "log_prob", dtype, condition=condition * (elements if reduction == "sum" else 1), reduced=max(elements, 1)
    )


# Kolmogorov's limit: sqrt(n) D exceeds this once in a thousand fixed keys.
KOLMOGOROV = 1.95
# A standardised mean exceeds this once in sixteen thousand fixed keys.
NORMAL_LIMIT = 4.0


def kolmogorov(values: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """Return sqrt(n) times the Kolmogorov-Smirnov distance of the values from a continuous distribution."""
    ordered = cdf(values.to(torch.float64).flatten().sort().values)
    n = ordered.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())
    return math.sqrt(n) * distance.item()
