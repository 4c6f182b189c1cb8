"""The per-step hot path, and which implementation of it runs: an explicit argument, decided here and nowhere else.

Every function checks its arguments the same way whatever runs, then calls the fused kernel, the compiled reference or the
reference itself, which is the function of the same name in `core`.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fluvial.core import flow_matching, gaussian, nft, step
from fluvial.core.checks import (
    check_choice,
    check_number,
    check_per_sample,
    check_same_device,
    check_same_shape,
    compute_dtype,
)
from fluvial.core.gaussian import FORMS, REDUCTIONS, Form, Reduction
from fluvial.core.policy import PolicyInfo
from fluvial.core.random import Key, fold_in
from fluvial.core.step import KLWeight
from fluvial.core.transitions import Transition
from fluvial.core.types import PerSample, Samples, Scalar

Implementation = Literal["auto", "triton", "compiled", "reference"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "triton", "compiled", "reference")
ACCELERATORS: tuple[str, ...] = ("cuda", "xpu")  # torch calls ROCm cuda
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs the kernels on the CPU, slowly


def resolve(
    function: str, implementation: Implementation, samples: Sequence[Tensor], numbers: Sequence[Tensor] = ()
) -> Literal["triton", "compiled", "reference"]:
    """Return the implementation that runs.

    "auto" is Triton on CUDA, ROCm and XPU where the kernels serve the arguments, and the reference elsewhere. On two CPU
    cores the compiled reference was 0.8 to 4.0 times as fast forward and backward at 65,536 elements a sample, and 0.4 to
    1.3 times at the 256 of the built-in job (`python -P -m fluvial.bench kernels`); but its first call takes seconds for a
    new kind of argument, and what a rollout and an update compile need not round alike: a first ratio would not be 1.

    Args:
        function: for messages.
        implementation: what was asked for.
        samples: tensors `[B, *event]`.
        numbers: tensors to which the kernels give no gradient.

    Raises:
        ValueError: what was asked for does not exist or does not serve these arguments; nothing is replaced silently.
    """
    check_choice(function, "implementation", implementation, IMPLEMENTATIONS)
    if implementation == "auto":
        fused = samples[0].device.type in ACCELERATORS and _obstacle(samples, numbers) is None
        return "triton" if fused else "reference"
    if implementation == "triton" and (reason := _obstacle(samples, numbers)) is not None:
        raise ValueError(f"{function}: implementation is 'triton', but {reason}: use 'auto' or 'reference'")
    if implementation == "compiled" and _transformed():
        raise ValueError(f"{function}: implementation is 'compiled', which torch.func cannot transform: use 'reference'")
    return implementation


def step_log_prob(
    transition: Transition,
    x: Samples,
    v: Samples,
    x_next: Samples,
    *,
    v_ref: Samples | None = None,
    v_uncond: Samples | None = None,
    guidance: Scalar | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
    implementation: Implementation = "auto",
) -> tuple[PerSample, PerSample | None]:
    """Return the step's log-probability `[B]` and, if v_ref is given, its KL to the reference's step `[B]`, else None.

    Equations and arguments are those of `core.step.step_log_prob`; the result is float32, float64 if that is given.

    Args:
        implementation: see `resolve`.
    """
    name, samples = "step_log_prob", _given(x=x, v=v, x_next=x_next, v_ref=v_ref, v_uncond=v_uncond)
    scale = _check_step(name, samples, transition, v_uncond, guidance, form, reduction, density=v_ref is not None)
    chosen = resolve(name, implementation, list(samples.values()), _tensors(*transition, scale))
    options: dict[str, Any] = {"v_ref": v_ref, "v_uncond": v_uncond, "guidance": scale, "form": form, "reduction": reduction}
    if chosen == "triton":
        from fluvial.kernels.fused.step_log_prob import step_log_prob as fused

        return fused(transition, x, v, x_next, **options)
    return _reference(step.step_log_prob, chosen)(transition, x, v, x_next, **options)


def sde_step(
    transition: Transition,
    x: Samples,
    v: Samples,
    *,
    key: Key,
    v_uncond: Samples | None = None,
    guidance: Scalar | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
    implementation: Implementation = "auto",
) -> tuple[Samples, PerSample]:
    """Return a draw of the step, `[B, *event]`, and its log-probability, `[B]`, as `core.step.sde_step` does.

    The noise has the same bits in its Philox words whatever runs; the normals of the fused kernel, made in float32, differ
    from the reference's by a few units in the last place.

    Args:
        implementation: see `resolve`.
    """
    name, samples = "sde_step", _given(x=x, v=v, v_uncond=v_uncond)
    scale = _check_step(name, samples, transition, v_uncond, guidance, form, reduction, density=False)
    batch = v.shape[0]
    keys = key if isinstance(key.low, Tensor) else fold_in(key, torch.arange(batch, device=v.device))
    low, high = (
        torch.as_tensor(word) if isinstance(word, Tensor) else torch.full((), word, device=v.device) for word in keys
    )
    words = {"key.low": low, "key.high": high}
    check_per_sample(name, batch, **words)
    check_same_device(name, v=v, **words)
    for word, tensor in words.items():
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name}: {word} is {tensor.dtype}, expected torch.int64, as fluvial.core.random makes it")
    chosen = resolve(name, implementation, list(samples.values()), _tensors(*transition, scale))
    options: dict[str, Any] = {"v_uncond": v_uncond, "guidance": scale, "form": form, "reduction": reduction}
    if chosen == "triton":
        from fluvial.kernels.fused.sde_step import sde_step as fused

        return fused(transition, x, v, key=keys, **options)
    return _reference(step.sde_step, chosen)(transition, x, v, key=keys, **options)


def policy_loss(
    transition: Transition,
    x: Samples,
    v: Samples,
    x_next: Samples,
    *,
    log_prob_old: PerSample,
    advantage: PerSample,
    clip_low: float,
    clip_high: float,
    v_ref: Samples | None = None,
    kl_coef: float = 0.0,
    kl_weight: KLWeight = "rate",
    dt: Scalar | None = None,
    v_uncond: Samples | None = None,
    guidance: Scalar | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
    implementation: Implementation = "auto",
) -> tuple[PerSample, PolicyInfo]:
    """Return the clipped policy loss of stored pairs with its KL term, and diagnostics, as `core.step.policy_loss` does.

    Args:
        implementation: see `resolve`.
    """
    name, samples = "policy_loss", _given(x=x, v=v, x_next=x_next, v_ref=v_ref, v_uncond=v_uncond)
    scale = _check_step(name, samples, transition, v_uncond, guidance, form, reduction, density=v_ref is not None)
    check_number(name, "clip_low", clip_low, low=0, high=1)
    check_number(name, "clip_high", clip_high, low=0)
    pairs = {"log_prob_old": log_prob_old, "advantage": advantage}
    compute_dtype(name, **pairs)
    for which, tensor in pairs.items():
        if tensor.shape != v.shape[:1]:
            raise ValueError(f"{name}: {which} has shape {list(tensor.shape)}, expected [{v.shape[0]}]")
    kl_scale = step.kl_scale(v, v_ref=v_ref, kl_coef=kl_coef, kl_weight=kl_weight, dt=dt)
    check_same_device(name, v=v, **pairs, **({"dt": kl_scale} if isinstance(kl_scale, Tensor) else {}))
    numbers = _tensors(*transition, log_prob_old, advantage, scale, kl_scale)
    chosen = resolve(name, implementation, list(samples.values()), numbers)
    options: dict[str, Any] = {
        "log_prob_old": log_prob_old, "advantage": advantage, "clip_low": clip_low, "clip_high": clip_high,
        "v_ref": v_ref, "kl_coef": kl_coef,
        "v_uncond": v_uncond, "guidance": scale, "form": form, "reduction": reduction,
    }  # fmt: skip
    if chosen == "triton":
        from fluvial.kernels.fused.policy_loss import policy_loss as fused

        return fused(transition, x, v, x_next, kl_scale=_number(kl_scale, v), **options)
    reference = _reference(step.policy_loss, chosen)
    return reference(transition, x, v, x_next, kl_weight=kl_weight, dt=dt, **options)


def nft_loss(
    v: Samples,
    v_old: Samples,
    x0: Samples,
    xt: Samples,
    t: Scalar,
    reward_prob: PerSample,
    *,
    beta: float,
    adv_clip: float,
    weight_min: float = 1e-5,
    implementation: Implementation = "auto",
) -> PerSample:
    """Return DiffusionNFT's loss, `[B]`, as `core.nft.nft_loss` does.

    Args:
        implementation: see `resolve`.
    """
    name, samples = "nft_loss", {"v": v, "v_old": v_old, "x0": x0, "xt": xt}
    options = {"beta": beta, "adv_clip": adv_clip, "weight_min": weight_min}
    nft.check_nft_numbers(**options)
    compute_dtype(name, **samples, reward_prob=reward_prob)
    check_same_shape(name, **samples)
    _check_event(name, v)
    level = _number(t, v)
    check_per_sample(name, v.shape[0], t=level, reward_prob=reward_prob)
    check_same_device(name, **samples, t=level, reward_prob=reward_prob)
    chosen = resolve(name, implementation, list(samples.values()), [level, reward_prob])
    if chosen == "triton":
        from fluvial.kernels.fused.nft_loss import nft_loss as fused

        return fused(v, v_old, x0, xt, level, reward_prob, **options)
    return _reference(nft.nft_loss, chosen)(v, v_old, x0, xt, level, reward_prob, **options)


def velocity_error(v: Samples, target: Samples, *, implementation: Implementation = "auto") -> PerSample:
    """Return the mean squared error of a velocity, `[B]`, as `core.flow_matching.velocity_error` does.

    Args:
        implementation: see `resolve`.
    """
    compute_dtype("velocity_error", v=v, target=target)
    check_same_shape("velocity_error", v=v, target=target)
    _check_event("velocity_error", v)
    check_same_device("velocity_error", v=v, target=target)
    chosen = resolve("velocity_error", implementation, [v, target])
    if chosen == "triton":
        from fluvial.kernels.fused.velocity_error import velocity_error as fused

        return fused(v, target)
    return _reference(flow_matching.velocity_error, chosen)(v, target)


def _check_step(
    function: str,
    samples: dict[str, Tensor],
    transition: Transition,
    v_uncond: Tensor | None,
    guidance: Scalar | None,
    form: Form,
    reduction: Reduction,
    *,
    density: bool,
) -> Tensor | None:
    """Check what the functions of a step share, and return the guidance as a tensor."""
    check_choice(function, "form", form, FORMS)
    check_choice(function, "reduction", reduction, REDUCTIONS)
    coefficients = transition._asdict()
    compute_dtype(function, **samples, **coefficients)
    check_same_shape(function, **samples)
    v = samples["v"]
    _check_event(function, v)
    step.check_guidance(function, v_uncond, guidance)
    scale = None if guidance is None else _number(guidance, v)
    numbers = _given(**coefficients, guidance=scale)
    check_per_sample(function, v.shape[0], **numbers)
    check_same_device(function, **samples, **numbers)
    if density or form != "unscaled":
        gaussian.check_stochastic(function, transition.std)
    return scale


def _obstacle(samples: Sequence[Tensor], numbers: Sequence[Tensor]) -> str | None:
    """Return why the fused kernels do not serve these arguments, None if they do."""
    device = samples[0].device.type
    if not HAS_TRITON:
        return "triton is not installed"
    if device not in ACCELERATORS and not (device == "cpu" and INTERPRETED):
        return f"the tensors are on {device}, expected {' or '.join(ACCELERATORS)} (or TRITON_INTERPRET=1)"
    if any(tensor.dtype == torch.float64 for tensor in (*samples, *numbers)):
        return "a tensor is float64, and the kernels compute in float32"
    if torch.is_grad_enabled() and any(_requires_grad(tensor) for tensor in numbers):
        return "a number a sample (coefficient, advantage, ...) requires a gradient, which the kernels give to samples alone"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active, and the kernels have reverse mode alone"
    # Dynamo knows this question, and not maybe_current_level.
    functorch = torch._C._functorch
    if torch.compiler.is_compiling() and isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter):
        return "torch.compile is outside of torch.func, which it does not trace through the kernels"
    return None


def _requires_grad(tensor: Tensor) -> bool:
    """Whether a gradient may be asked of a tensor, also where torch.func has wrapped it (a batched tensor says no)."""
    if torch.compiler.is_compiling():
        return tensor.requires_grad
    functorch = torch._C._functorch
    while not tensor.requires_grad and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def _transformed() -> bool:
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None


def _reference(function: Callable[..., Any], chosen: str) -> Callable[..., Any]:
    return _compiled(function) if chosen == "compiled" and not torch.compiler.is_compiling() else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _check_event(function: str, v: Tensor) -> None:
    """Raise ValueError if a sample has no elements: there is nothing to take the mean of."""
    if 0 in v.shape[1:]:
        raise ValueError(f"{function}: v has shape {list(v.shape)}, expected at least one element a sample")


def _number(value: Scalar, v: Tensor) -> Tensor:
    """Return a number as a tensor on v's device, made there: a copy from the host would wait for the device."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float64 if v.dtype == torch.float64 else torch.float32, device=v.device)


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _tensors(*values: Tensor | float | None) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
