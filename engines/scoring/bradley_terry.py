"""Bradley-Terry strengths: one number per item out of comparisons of two."""

import numpy as np
import torch
from torch import Tensor

from fluvial.core.checks import check_number

TOLERANCE = 1e-10  # relative change of a strength at which the iteration has converged
MOST_ITERATIONS = 100_000


def bradley_terry(wins: Tensor, *, prior: float = 0.5) -> Tensor:
    """Return the log-strength of each item of a group, float64 `[n]`.

        P(i beats j) = p_i / (p_i + p_j),   theta_i = log p_i

    The strengths maximise sum_ij w_ij log P(i beats j) + a sum_i [log P(i beats 0) + log P(0 beats i)], where item 0 has the
    strength 1: each item has a wins and a losses against it. This keeps the strengths finite where an item won or lost all
    its comparisons, or has none, whose theta is 0; the maximum is unique, because the sum is strictly concave in theta. Each
    iteration is that of the MM algorithm,

        p_i <- (sum_j w_ij + a) / (sum_j (w_ij + w_ji) / (p_i + p_j) + 2 a / (p_i + 1))

    Args:
        wins: w_ij, how often item i was preferred to item j, `[n, n]`; a tie is half a win of each. The diagonal is 0.
        prior: a > 0, wins and losses of each item against one of strength 1.

    Raises:
        ValueError: `wins` is no square matrix of finite numbers >= 0 with a diagonal of 0, or `prior` is not above 0.

    Source: Bradley and Terry 1952, Biometrika 39 (model); Hunter 2004, Annals of Statistics 32 (MM algorithm); Caron and
    Doucet 2012, J. Comput. Graph. Stat. 21 (virtual comparisons as a prior).
    """
    check_number("bradley_terry", "prior", prior, low=1e-3)
    w = wins.detach().double().cpu().numpy()
    if w.ndim != 2 or w.shape[0] != w.shape[1]:
        raise ValueError(f"bradley_terry: wins has shape {list(w.shape)}, expected [n, n]")
    if not (np.isfinite(w).all() and (w >= 0).all() and (w.diagonal() == 0).all()):
        raise ValueError("bradley_terry: wins holds other than finite numbers >= 0 with a diagonal of 0")
    won, compared, p = w.sum(1) + prior, w + w.T, np.ones(len(w))
    for _ in range(MOST_ITERATIONS):
        new = won / ((compared / np.add.outer(p, p)).sum(1) + 2 * prior / (p + 1))
        change, p = np.abs(new / p - 1).max(initial=0.0), new
        if change < TOLERANCE:
            break
    return torch.from_numpy(np.log(p))
