"""The samplers. Each is the same Gaussian, affine in the sample and in the model output:

    x_next ~ N(a x + b v, std^2 I)

A sampler is a function that returns the three coefficients of a step between two noise levels, and `core.gaussian` serves
all samplers. `std` is the standard deviation of the full step, sqrt(|dt|) included: std = g sqrt(|dt|), not the diffusion
coefficient g.

"Level" is the general word for an entry of a schedule. `sigma` is the noise level of a flow (x = (1 - sigma) x0 + sigma eps,
falling to 0), `alpha_bar` the cumulative signal power of a variance-preserving model (in (0, 1), rising). Each sampler takes
the levels before and after the step, `[B]`, 0-d or float, and dt = sigma_next - sigma. Samples `[B, R, ...]` with a
level per block take levels `[B, R]` and get coefficients `[B, R]`. `eta` is a float, or a differentiable tensor, `[B]` or
0-d. The stochastic samplers raise a ValueError for levels that are out of range or rise (fall, for `ddim`). Levels are
checked where their values are known: on the CPU, outside compilation and tracing (`checks.can_look`).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from fluvial.core.checks import can_look, check_choice, check_number, check_per_sample, compute_dtype
from fluvial.core.types import Grid, Level, Scalar, to_device

SamplerName = Literal["flow_sde", "dance_sde", "cps", "ddim", "ode", "wan_sde"]
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
Bound = Float[Tensor, "..."] | float  # a schedule's second level, shared or per block `[R]`
# Largest eta of each sampler. Above it, cps and ddim would replace more noise than there is. ode draws none.
MAX_ETA: dict[str, float] = {**dict.fromkeys(SAMPLERS, math.inf), "cps": 1.0, "ddim": 1.0, "ode": 0.0}


class Transition(NamedTuple):
    """The coefficients of one step, x_next ~ N(a x + b v, std^2 I): floating-point tensors `[B]`, or 0-d for all samples.

    With a noise level per block, samples are `[B, R, ...]` and coefficients `[B, R]`.
    """

    a: Tensor
    b: Tensor
    std: Tensor


@runtime_checkable
class Sampler(Protocol):
    """A sampler with its hyper-parameters bound: `sampler(level, level_next)` returns the step's `Transition`.

    Levels are floating-point tensors, `[B]` (one step per sample), `[B, R]` (one per block) or 0-d; the coefficients have
    the same shape, dtype and device. The coefficients must depend on the levels alone: rollout and update call
    the sampler separately, on different batches, and must get the same numbers.
    """

    def __call__(self, level: Tensor, level_next: Tensor, /) -> Transition:
        """Return the coefficients of the step from `level` to `level_next`."""
        ...


def bind(sampler: str | Callable[..., Transition], eta: Scalar, levels: Grid) -> Sampler:
    """Return a named sampler with its hyper-parameters bound for a schedule; a custom sampler is returned unchanged.

    Args:
        sampler: one of `SAMPLERS`, or a callable that follows the `Sampler` protocol.
        eta: scale of the sampler's noise, from 0 to the sampler's `MAX_ETA`, `[B]`, 0-d or float. It is not passed to a
            custom sampler, whose hyper-parameters are already bound.
        levels: T+1 levels of the schedule, `[T+1]`, or per block, `[T+1, R]`. The second one is the `sigma_max` of flow_sde
            and wan_sde, named as in Flow-GRPO's code.

    Raises:
        ValueError: the name is unknown, eta is out of range, or a custom sampler returns coefficients of the wrong shape.
        TypeError: a custom sampler cannot be called with two levels, or does not return a `Transition` of floating-point
            tensors.
    """
    if not isinstance(sampler, str):
        return _check_custom(sampler, levels)
    check_eta("bind", sampler, eta)
    if sampler == "ode":
        return ode
    if sampler == "flow_sde":
        return partial(flow_sde, eta=eta, sigma_max=levels[1])
    if sampler == "wan_sde":
        return partial(wan_sde, eta=eta, sigma_max=levels[1])
    return partial({"dance_sde": dance_sde, "cps": cps, "ddim": ddim}[sampler], eta=eta)


def check_eta(function: str, sampler: str, eta: Scalar) -> None:
    """Raise ValueError unless `sampler` is one of `SAMPLERS` and eta is in its range."""
    check_choice(function, "sampler", sampler, SAMPLERS)
    if sampler == "ode" and (isinstance(eta, Tensor) or eta != 0):
        raise ValueError(f"{function}: eta is {eta}, and ode draws no noise: use eta 0, or another sampler")
    batch = len(eta) if isinstance(eta, Tensor) and eta.ndim > 0 else 0
    check_number(function, "eta", eta, low=0, high=MAX_ETA[sampler], batch=batch)


def sampler_name(sampler: Sampler) -> str:
    """Return the name of a sampler, with or without bound hyper-parameters, for messages."""
    function = sampler.func if isinstance(sampler, partial) else sampler
    return getattr(function, "__name__", type(function).__name__)


def ode(sigma: Level, sigma_next: Level) -> Transition:
    """Return the Euler step of the probability-flow ODE: a = 1, b = dt, std = 0, for any levels in any order."""
    (sigma, sigma_next), _ = _scalars("ode", sigma=sigma, sigma_next=sigma_next)
    return Transition(a=torch.ones_like(sigma), b=sigma_next - sigma, std=torch.zeros_like(sigma))


def flow_sde(sigma: Level, sigma_next: Level, *, eta: Scalar, sigma_max: Bound) -> Transition:
    """Return the Euler-Maruyama step of Flow-GRPO's SDE (arXiv 2505.05470), which keeps the ODE's marginals.

        r = eta sqrt(sigma / (1 - s)),  s = sigma_max where sigma = 1 (to 1e-6), else sigma
        a = 1 + r^2 dt / (2 sigma),  b = (1 + r^2 (1 - sigma) / (2 sigma)) dt,  std = r sqrt(-dt)

    The rate r diverges at sigma = 1, so the step from there uses 1 - sigma_max in place of 1 - sigma. If that step ends at
    sigma_max, its std is eta, however short it is: x' = (1 - eta^2/2) x + dt v + eta noise. Unlike the other steps it does
    not keep the marginal as dt -> 0. The power of the remaining noise exceeds the ODE's, (1 + dt)^2, by
    eta^4/4 + eta^2 |dt|: with eta = 0.7, by 6 % as dt -> 0 and by 13 % at dt = -0.1. A window that begins at step 1 avoids
    this.

    Args:
        eta: scale of the noise rate, >= 0; 0 is the ODE.
        sigma_max: second level of the schedule; it bounds the rate of the first step.
    """
    (sigma, sigma_next, sigma_max), eta = _scalars("flow_sde", eta, sigma=sigma, sigma_next=sigma_next, sigma_max=sigma_max)
    _check_levels("flow_sde", sigma=sigma, sigma_next=sigma_next, sigma_max=sigma_max)
    clamped = torch.where((sigma - 1).abs() <= 1e-6, sigma_max, sigma)
    return _reverse_sde(sigma, sigma_next, rate=eta * torch.sqrt(sigma / (1 - clamped)))


def dance_sde(sigma: Level, sigma_next: Level, *, eta: Scalar) -> Transition:
    """Return the Euler-Maruyama step of DanceGRPO's SDE (arXiv 2505.07818): Flow-SDE's with the constant rate eta.

        a = 1 + eta^2 dt / (2 sigma),  b = (1 + eta^2 (1 - sigma) / (2 sigma)) dt,  std = eta sqrt(-dt)

    Args:
        eta: the noise rate, >= 0; 0 is the ODE.
    """
    (sigma, sigma_next), eta = _scalars("dance_sde", eta, sigma=sigma, sigma_next=sigma_next)
    _check_levels("dance_sde", sigma=sigma, sigma_next=sigma_next)
    return _reverse_sde(sigma, sigma_next, rate=eta * torch.ones_like(sigma))


def wan_sde(sigma: Level, sigma_next: Level, *, eta: Scalar, sigma_max: Bound) -> Transition:
    """Return the Euler-Maruyama step of Flow-GRPO's SDE for Wan: Flow-SDE's with the rate eta sigma_max sigma.

        a = 1 + r^2 dt / (2 sigma),  b = (1 + r^2 (1 - sigma) / (2 sigma)) dt,  std = r sqrt(-dt),  r = eta sigma_max sigma

    Args:
        eta: scale of the noise rate, >= 0; 0 is the ODE, the published code uses 1.
        sigma_max: second level of the schedule.

    Source: the code of Flow-GRPO (arXiv 2505.05470) for Wan 2.1, whose rate eta sigma_max sigma falls to 0 with sigma.
    """
    (sigma, sigma_next, sigma_max), eta = _scalars("wan_sde", eta, sigma=sigma, sigma_next=sigma_next, sigma_max=sigma_max)
    _check_levels("wan_sde", sigma=sigma, sigma_next=sigma_next, sigma_max=sigma_max)
    return _reverse_sde(sigma, sigma_next, rate=eta * sigma_max * sigma)


def cps(sigma: Level, sigma_next: Level, *, eta: Scalar) -> Transition:
    """Return the coefficients-preserving step of Flow-CPS (arXiv 2509.05952): predict x0 and eps, mix eps with fresh noise.

        std = sigma_next sin(eta pi / 2),  q = sqrt(sigma_next^2 - std^2)
        a = (1 - sigma_next) + q,  b = -sigma (1 - sigma_next) + (1 - sigma) q

    It is evaluated as the ODE step minus the dropped part of the old noise, drop = sigma_next - q: a = 1 - drop,
    b = dt - (1 - sigma) drop. Both forms are equal, but this one is bit-identical to the ODE at eta = 0. At sigma_next = 0,
    std is 0, so the last step of a schedule has no density.

    Args:
        eta: share of fresh noise, from 0 (the ODE) to 1 (all noise is fresh).
    """
    (sigma, sigma_next), eta = _scalars("cps", eta, sigma=sigma, sigma_next=sigma_next, max_eta=1)
    _check_levels("cps", sigma=sigma, sigma_next=sigma_next)
    if isinstance(eta, Tensor):  # in float64, where 1 - cos of a small angle keeps its digits
        angle = eta.to(torch.float64) * math.pi / 2
        drop = sigma_next * (1 - torch.cos(angle).abs()).to(sigma.dtype)
        std = sigma_next * torch.sin(angle).to(sigma.dtype)
    else:
        drop = sigma_next * (1 - abs(math.cos(eta * math.pi / 2)))
        std = sigma_next * math.sin(eta * math.pi / 2)
    return Transition(a=1 - drop, b=(sigma_next - sigma) - (1 - sigma) * drop, std=std)


def ddim(alpha_bar: Level, alpha_bar_next: Level, *, eta: Scalar) -> Transition:
    """Return the DDIM step (arXiv 2010.02502) of an epsilon-prediction model; v is the predicted epsilon.

        std = eta sqrt((1 - abn) / (1 - ab)) sqrt(1 - ab / abn)
        a = sqrt(abn / ab),  b = sqrt(1 - abn - std^2) - sqrt(abn (1 - ab) / ab)

    with ab = alpha_bar and abn = alpha_bar_next. The root's argument is evaluated as
    (1 - abn) (1 - eta^2 + eta^2 ab (1 - abn) / (abn (1 - ab))), which is equal and does not round below zero.

    Args:
        eta: 0 is deterministic DDIM, 1 is DDPM's ancestral step. Above 1 the variance can exceed the noise to
            be replaced, and b is NaN.
    """
    (ab, abn), eta = _scalars("ddim", eta, alpha_bar=alpha_bar, alpha_bar_next=alpha_bar_next)
    if can_look(ab, abn) and (wrong := ~((ab > 0) & (ab < 1) & (ab <= abn) & (abn <= 1))).any():
        place, (level, level_next) = _locate_first(wrong, ab, abn)
        raise ValueError(
            f"ddim: alpha_bar goes from {level:g} to {level_next:g}{place}, expected rising signal powers in (0, 1]: pass "
            "alphas_cumprod at the timesteps, from noise to data, not the timesteps or the noise levels of a flow"
        )
    ratio = ab * (1 - abn) / (abn * (1 - ab))
    if isinstance(eta, Tensor):  # two roots, because at abn = 1 the gradient of one would be 0 / 0
        noise_left = torch.sqrt(1 - abn) * torch.sqrt(1 - eta**2 + eta**2 * ratio)
    else:
        noise_left = torch.sqrt((1 - abn) * (1 - eta**2 + eta**2 * ratio))
    return Transition(
        a=torch.sqrt(abn / ab),
        b=noise_left - torch.sqrt(abn * (1 - ab) / ab),
        std=eta * torch.sqrt((1 - abn) / (1 - ab)) * torch.sqrt(1 - ab / abn),
    )


def _reverse_sde(sigma: Tensor, sigma_next: Tensor, *, rate: Tensor) -> Transition:
    """Return the Euler-Maruyama step of dx = (v + rate^2 / (2 sigma) (x + (1 - sigma) v)) dt + rate dw."""
    dt = sigma_next - sigma
    half_rate_sq = rate**2 / 2
    return Transition(
        a=1 + half_rate_sq * dt / sigma, b=(1 + half_rate_sq * (1 - sigma) / sigma) * dt, std=rate * torch.sqrt(-dt)
    )


def _check_custom(sampler: Callable[..., Transition], levels: Tensor) -> Sampler:
    """Return a custom sampler after one call on all steps of a schedule, whose coefficients are checked."""
    name = sampler_name(sampler)
    try:
        step = sampler(levels[:-1], levels[1:])
    except Exception as error:
        reason = " ".join(str(error).split())
        raise TypeError(f"bind: sampler {name} fails when called as {name}(level, level_next): {reason}") from error
    if not isinstance(step, Transition):
        raise TypeError(f"bind: sampler {name} returns a {type(step).__name__}, expected a Transition of a, b and std")
    compute_dtype(f"bind: sampler {name}", **step._asdict())
    check_per_sample(f"bind: sampler {name}", levels[1:].shape, **step._asdict())
    return sampler


def _check_levels(function: str, **levels: Tensor) -> None:
    """Raise ValueError unless known noise levels are in [0, 1], do not rise and do not begin at 0."""
    if not can_look(*levels.values()):
        return
    for name, level in levels.items():
        if (wrong := ~((level >= 0) & (level <= 1))).any():
            place, (value,) = _locate_first(wrong, level)
            raise ValueError(
                f"{function}: {name} is {value:g}{place}, expected a noise level in [0, 1]: divide timesteps of 0 to "
                "1000 by 1000, or take the scheduler's sigmas"
            )
    sigma, sigma_next = levels["sigma"], levels["sigma_next"]
    if (wrong := ~((sigma_next <= sigma) & (sigma > 0))).any():
        place, values = _locate_first(wrong, sigma, sigma_next)
        raise ValueError(
            f"{function}: the noise level goes from {values[0]:g} to {values[1]:g}{place}, expected falling levels, from "
            "noise to data: flip the schedule; DDPM's alpha_bar, which rises, goes with ddim"
        )


def _locate_first(wrong: Tensor, *levels: Tensor) -> tuple[str, list[float]]:
    """Return the position of the first wrong level, worded for a message, and the levels at it."""
    if wrong.ndim == 0:
        return "", [level.item() for level in levels]
    index = tuple(torch.nonzero(wrong)[0].tolist())
    return f" at index {', '.join(map(str, index))}", [level[index].item() for level in levels]


def _scalars(
    function: str, eta: Scalar = 0.0, *, max_eta: float = math.inf, **scalars: Bound
) -> tuple[tuple[Tensor, ...], Scalar]:
    """Return levels and eta as tensors of one shape (`[B]`, `[B, R]` or 0-d), dtype and device, or a float eta.

    The dtype is float32 or float64. With levels `[B, R]`, sigma_max may be `[R]`.

    Raises:
        TypeError, ValueError: a dtype or shape is wrong, or eta is not in [0, max_eta].
    """
    if isinstance(eta, Tensor):
        scalars["eta"] = eta
    tensor_args = {name: value for name, value in scalars.items() if isinstance(value, Tensor)}
    dtype = compute_dtype(function, **tensor_args)
    batched = [value for value in tensor_args.values() if value.ndim > 0]
    device = next((value.device for value in [*batched, *tensor_args.values()]), torch.device("cpu"))
    tensors = {name: to_device(torch.as_tensor(value, dtype=dtype), device) for name, value in scalars.items()}
    shape = batched[0].shape if batched else torch.Size([1])
    for value in batched:
        shape = value.shape if value.ndim > len(shape) else shape
    if len(shape) == 2 and "sigma_max" in tensors and tensors["sigma_max"].shape == shape[1:]:
        tensors["sigma_max"] = tensors["sigma_max"].expand(shape)
    batch = shape[0]
    check_per_sample(function, shape, **tensors)
    check_number(function, "eta", tensors.get("eta", eta), low=0, high=max_eta, batch=batch)
    broadcast = torch.broadcast_tensors(*tensors.values())
    return (broadcast[:-1], broadcast[-1]) if "eta" in tensors else (broadcast, eta)
