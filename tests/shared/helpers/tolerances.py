"""How far two results of the same mathematics may lie apart, derived from dtypes and operation counts, not guessed."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch import Tensor, nn

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


# How far apart two ways to compute the same result may lie, in units of the noise that `rounding_tolerance` measures. The
# difference and the noise are both the largest of equally many differences between two draws of the same rounding errors, so
# their ratio is near 1 (at most 2.2 in 150 comparisons on two processors); faults are hundreds of units large.
ROUNDING = 8.0


@contextmanager
def last_bits_moved(modules: Iterable[nn.Module], seed: int) -> Iterator[None]:
    """Move every float32 parameter by one unit in the last place, up or down at random; restored afterwards."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {p: p.data for module in modules for p in module.parameters() if p.dtype == torch.float32}
    try:
        for parameter, kept in parameters.items():
            up = torch.rand(kept.shape, generator=generator) < 0.5
            parameter.data = torch.nextafter(kept, torch.where(up, torch.inf, -torch.inf))
        yield
    finally:
        for parameter, kept in parameters.items():
            parameter.data = kept


def rounding_tolerance(compute: Callable[[], Tensor], modules: Collection[nn.Module], expected: Tensor) -> Tolerance:
    """Return how far another way to compute a result may lie from it, by measuring what rounding does to the result.

    Moving every parameter by one unit in the last place changes nearly all intermediate values in their last bits. So every
    later rounding is drawn again, and the rest of the computation magnifies it as before. The same happens where another
    processor, address or batch size makes products sum in another order. Two moves are measured, and the larger counts.

    Args:
        compute: the whole computation, e.g. a pipeline's call.
        modules: the networks that it uses.
        expected: what it returns.
    """
    noise = torch.finfo(expected.dtype).eps * expected.abs().max().item()  # of the last rounding
    for seed in range(2):
        with last_bits_moved(modules, seed):
            noise = max(noise, (compute() - expected).abs().max().item())
    return {"rtol": 0.0, "atol": ROUNDING * noise}


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
