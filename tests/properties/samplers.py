"""One table over all samplers, and strategies of hypothesis for their levels: a new row inherits every test over it.

Needs hypothesis: `pip install 'fluvial[testing]'`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from fluvial.core import gaussian, transitions
from fluvial.core.transitions import Sampler

Levels = tuple[Tensor, Tensor]  # (level, level_next), float64 `[B]`

# What a Flow-SDE step at sigma = 1 takes in place of sigma; any schedule's second value would do.
SIGMA_MAX = 0.95
# Shapes of one sample: none, one element, odd sizes that fill no vector register, two axes.
EVENTS: tuple[tuple[int, ...], ...] = ((), (1,), (41,), (1271,), (3, 5))
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class SamplerRow:
    """A sampler, and what its steps must be."""

    name: str
    bind: Callable[[float], Sampler]  # eta -> the sampler with its hyper-parameters bound
    reference: Callable[[float, float, float], tuple[float, float, float]]  # (level, next, eta) -> (a, b, std)
    levels: st.SearchStrategy[Levels]  # steps between two interior levels
    grid: Callable[[int], Tensor]  # T -> a whole schedule, float32 `[T+1]`
    stochastic: bool
    path: Callable[[Tensor], Levels]  # level -> coefficients of x0 and eps in x
    output: tuple[float, float]  # coefficients of x0 and eps in the model output
    keeps_variance: bool  # whether a step keeps the path's noise power exactly, or to second order in the step
    ode_step: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (level, next, x, v) -> what eta = 0 must return


def normals(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return standard-normal numbers from torch's own generator, independent of fluvial's."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference_ode(sigma: float, sigma_next: float, eta: float) -> tuple[float, float, float]:
    """Return (a, b, std) of Euler's step of the ODE, as published."""
    return 1.0, sigma_next - sigma, 0.0


def reference_flow_sde(sigma: float, sigma_next: float, eta: float) -> tuple[float, float, float]:
    """Return (a, b, std) of Flow-SDE (arXiv 2505.05470), as published."""
    dt = sigma_next - sigma
    r = eta * math.sqrt(sigma / (1 - (SIGMA_MAX if abs(sigma - 1) <= 1e-6 else sigma)))
    return 1 + r**2 * dt / (2 * sigma), (1 + r**2 * (1 - sigma) / (2 * sigma)) * dt, r * math.sqrt(-dt)


def reference_dance_sde(sigma: float, sigma_next: float, eta: float) -> tuple[float, float, float]:
    """Return (a, b, std) of the reverse SDE of DanceGRPO (arXiv 2505.07818), as published."""
    dt = sigma_next - sigma
    return 1 + eta**2 * dt / (2 * sigma), (1 + eta**2 * (1 - sigma) / (2 * sigma)) * dt, eta * math.sqrt(-dt)


def reference_wan_sde(sigma: float, sigma_next: float, eta: float) -> tuple[float, float, float]:
    """Return (a, b, std) of Flow-GRPO's SDE for Wan, as published."""
    dt, r = sigma_next - sigma, eta * SIGMA_MAX * sigma
    return 1 + r**2 * dt / (2 * sigma), (1 + r**2 * (1 - sigma) / (2 * sigma)) * dt, r * math.sqrt(-dt)


def reference_cps(sigma: float, sigma_next: float, eta: float) -> tuple[float, float, float]:
    """Return (a, b, std) of Flow-CPS (arXiv 2509.05952), as published."""
    std = sigma_next * math.sin(eta * math.pi / 2)
    q = math.sqrt(sigma_next**2 - std**2)
    return (1 - sigma_next) + q, -sigma * (1 - sigma_next) + (1 - sigma) * q, std


def reference_ddim(ab: float, abn: float, eta: float) -> tuple[float, float, float]:
    """Return (a, b, std) of DDIM (arXiv 2010.02502), as published."""
    std = eta * math.sqrt((1 - abn) / (1 - ab)) * math.sqrt(1 - ab / abn)
    return math.sqrt(abn / ab), math.sqrt(1 - abn - std**2) - math.sqrt(abn * (1 - ab) / ab), std


def _batch(pair: st.SearchStrategy[tuple[float, float]]) -> st.SearchStrategy[Levels]:
    def columns(pairs: list[tuple[float, float]]) -> Levels:
        level, level_next = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        return level, level_next

    return st.lists(pair, min_size=1, max_size=5).map(columns)


def _falling(pair: tuple[float, float]) -> tuple[float, float]:
    sigma, fraction = pair
    return sigma, sigma * fraction


def _rising(pair: tuple[float, float]) -> tuple[float, float]:
    alpha_bar, fraction = pair
    return alpha_bar, alpha_bar + (0.999 - alpha_bar) * fraction


# Within these bounds 1 / (1 - sigma) and 1 / (1 - alpha_bar) stay below 50, and a step never vanishes.
_fractions = st.floats(0.05, 0.95)
_noise_levels = _batch(st.tuples(st.floats(0.02, 0.98) | st.just(1.0), _fractions).map(_falling))
_signal_powers = _batch(st.tuples(st.floats(0.02, 0.98), _fractions).map(_rising))


def _noise_grid(T: int) -> Tensor:
    return torch.linspace(1, 0, T + 1)


def _signal_grid(T: int) -> Tensor:
    # alpha_bar = cos^2 falls to noise; a rollout climbs it.
    return torch.cos(torch.linspace(1.4, 0.05, T + 1)) ** 2


def _linear_path(sigma: Tensor) -> Levels:
    return 1 - sigma, sigma


def _variance_preserving_path(alpha_bar: Tensor) -> Levels:
    return torch.sqrt(alpha_bar), torch.sqrt(1 - alpha_bar)


def _euler(sigma: Tensor, sigma_next: Tensor, x: Tensor, v: Tensor) -> Tensor:
    return gaussian.mean(transitions.ode(sigma, sigma_next), x, v)


def _rescaled_euler(alpha_bar: Tensor, alpha_bar_next: Tensor, x: Tensor, v: Tensor) -> Tensor:
    # In x / sqrt(alpha_bar), deterministic DDIM is Euler's step over the noise-to-signal ratio (arXiv 2010.02502, eq. 13).
    def view(scalar: Tensor) -> Tensor:
        return scalar.reshape(-1, *[1] * (x.ndim - 1))

    ratio, ratio_next = (torch.sqrt((1 - level) / level) for level in (alpha_bar, alpha_bar_next))
    return view(alpha_bar_next.sqrt()) * _euler(ratio, ratio_next, x / view(alpha_bar.sqrt()), v)


_VELOCITY, _EPSILON = (-1.0, 1.0), (0.0, 1.0)


def _flow(
    name: str,
    reference: Callable[[float, float, float], tuple[float, float, float]],
    bind: Callable[[float], Sampler],
    *,
    keeps_variance: bool = False,
) -> SamplerRow:
    """Return the row of a sampler of flows."""
    return SamplerRow(
        name=name,
        bind=bind,
        reference=reference,
        levels=_noise_levels,
        grid=_noise_grid,
        stochastic=name != "ode",
        path=_linear_path,
        output=_VELOCITY,
        keeps_variance=keeps_variance,
        ode_step=_euler,
    )


SAMPLERS = (
    _flow("ode", reference_ode, lambda eta: transitions.ode, keeps_variance=True),
    _flow("flow_sde", reference_flow_sde, lambda eta: partial(transitions.flow_sde, eta=eta, sigma_max=SIGMA_MAX)),
    _flow("dance_sde", reference_dance_sde, lambda eta: partial(transitions.dance_sde, eta=eta)),
    _flow("wan_sde", reference_wan_sde, lambda eta: partial(transitions.wan_sde, eta=eta, sigma_max=SIGMA_MAX)),
    _flow("cps", reference_cps, lambda eta: partial(transitions.cps, eta=eta), keeps_variance=True),
    SamplerRow(
        name="ddim",
        bind=lambda eta: partial(transitions.ddim, eta=eta),
        reference=reference_ddim,
        levels=_signal_powers,
        grid=_signal_grid,
        stochastic=True,
        path=_variance_preserving_path,
        output=_EPSILON,
        keeps_variance=True,
        ode_step=_rescaled_euler,
    ),
)
STOCHASTIC = tuple(row for row in SAMPLERS if row.stochastic)

# Below 0.95 neither cps nor ddim loses more than a factor 1 / (1 - 0.95^2), about 10, in the root of a difference.
etas = st.floats(0.05, 0.95)
ETA_CONDITION = 10.0


def reference_coefficients(row: SamplerRow, level: Tensor, level_next: Tensor, eta: float) -> tuple[Tensor, ...]:
    """Return (a, b, std), float64 `[B]`, from the formulas as published, one Python float at a time."""
    rows = [row.reference(*pair, eta) for pair in zip(level.tolist(), level_next.tolist(), strict=True)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
