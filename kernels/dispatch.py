"""Operations of the per-step hot path, and the choice of the implementation that runs.

Equations and arguments match the reference, the function of the same name in `core`; results are float32, or float64
if an argument is. Each function checks its arguments once, the same way for all implementations, and raises TypeError or
ValueError for a wrong type, shape, device or value. `implementation` then chooses between the fused Triton kernel, the
compiled reference and the reference itself, see `resolve`.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

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
    per_sample,
)
from fluvial.core.gaussian import FORMS, REDUCTIONS, Form, Reduction
from fluvial.core.policy import PolicyInfo, clipped_surrogate
from fluvial.core.random import Key, normal, sample_keys
from fluvial.core.step import KLWeight
from fluvial.core.transitions import Transition
from fluvial.core.types import Level, PerSample, Samples, Scalar

Implementation = Literal["auto", "triton", "compiled", "reference"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
ACCELERATORS: tuple[str, ...] = ("cuda", "xpu")  # torch calls ROCm cuda
FUSED = {*ACCELERATORS, "simulated"}  # a simulated device computes nothing, but needs the kernels' shapes
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs the kernels on the CPU, slowly
_PREFERRED: ContextVar[Implementation] = ContextVar("implementation", default="auto")


@contextmanager
def prefer(implementation: Implementation) -> Iterator[None]:
    """Make "auto" select an implementation within the block, as `torch.nn.attention.sdpa_kernel` does for attention."""
    token = _PREFERRED.set(implementation)
    try:
        yield
    finally:
        _PREFERRED.reset(token)


def resolve(
    function: str,
    implementation: Implementation,
    samples: Sequence[Tensor],
    numbers: Sequence[Tensor] = (),
    constants: Sequence[Scalar] = (),
) -> Literal["triton", "compiled", "reference"]:
    """Return the implementation that runs.

    Within a `prefer` block, "auto" is the preferred implementation. Elsewhere it is "triton" on CUDA, ROCm and XPU if the
    kernels support the arguments, else "reference". It is never "compiled": compilation takes seconds per new argument
    signature, and separately compiled rollouts and updates may round differently, so the first ratio need not be exactly 1.

    Args:
        function: name of the operation, for messages.
        implementation: requested implementation.
        samples: tensors `[B, *event]`.
        numbers: per-sample tensors, for which the kernels have no gradient.
        constants: numbers that the kernels take as Python numbers only.

    Raises:
        ValueError: the requested implementation does not exist or does not support these arguments. It is never
            replaced silently.
    """
    check_choice(function, "implementation", implementation, IMPLEMENTATIONS)
    if implementation == "auto":
        implementation = _PREFERRED.get()
    if implementation == "auto":
        fused = samples[0].device.type in FUSED and _find_obstacle(samples, numbers, constants) is None
        return "triton" if fused else "reference"
    if implementation == "triton" and (reason := _find_obstacle(samples, numbers, constants)) is not None:
        raise ValueError(f"{function}: implementation is 'triton', but {reason}: use 'auto' or 'reference'")
    compiling = torch.compiler.is_compiling()
    if implementation == "compiled" and not compiling and torch._C._functorch.maybe_current_level() is not None:
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
    """Return the step's log-probability and its KL to the reference policy's step (None without v_ref), in nats, `[B]`.

    The reference is `core.step.step_log_prob`. A step with std 0 raises if the form needs a density, on the CPU only.
    """
    name, samples = "step_log_prob", _drop_missing(x=x, v=v, x_next=x_next, v_ref=v_ref, v_uncond=v_uncond)
    scale = _check_step(name, samples, transition, v_uncond, guidance, form, reduction)
    _check_density(name, transition, form, v_ref)
    chosen = resolve(name, implementation, list(samples.values()), _select_tensors(*transition, scale))
    if chosen == "triton":
        from fluvial.kernels.fused.step_log_prob import function

        if transition.std.ndim == 2:
            return _score_rows(transition, samples, scale, form, reduction)
        *coefficients, g = _to_float32(v, *transition, scale)
        log_prob, kl = function(*coefficients, x, v, x_next, v_ref, v_uncond, g, form, reduction)
        return log_prob, None if v_ref is None else kl
    options: dict[str, Any] = {"v_ref": v_ref, "v_uncond": v_uncond, "guidance": scale, "form": form, "reduction": reduction}
    return _run(step.step_log_prob, chosen, transition, x, v, x_next, **options)


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
    """Return a draw of the step, `[B, *event]`, and its log-probability, in nats, `[B]`, as `core.step.sde_step` does.

    All implementations draw the same Philox words. The fused kernel turns them into normals in float32, which differ from
    the reference's by a few units in the last place.

    Where std is 0, the kernels and the compiled reference return NaN for the log-probability, because with windows per
    sample some samples draw no noise at a step that is recorded for others. The reference raises.

    Rollouts call it for recorded steps if the fused kernel or the compiled reference runs. Otherwise they draw the noise of
    many steps per call, with the same bits as the reference.
    """
    name, samples = "sde_step", _drop_missing(x=x, v=v, v_uncond=v_uncond)
    scale = _check_step(name, samples, transition, v_uncond, guidance, form, reduction)
    batch = v.shape[0]
    keys = sample_keys(key, batch, device=v.device)
    low, high = (
        torch.as_tensor(word) if isinstance(word, Tensor) else torch.full((), word, device=v.device) for word in keys
    )
    words = {"key.low": low, "key.high": high}
    check_per_sample(name, batch, **words)
    check_same_device(name, v=v, **words)
    for word, tensor in words.items():
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name}: {word} is {tensor.dtype}, expected torch.int64, as fluvial.core.random makes it")
    chosen = resolve(name, implementation, list(samples.values()), _select_tensors(*transition, scale))
    if chosen == "triton":
        from fluvial.kernels.fused.sde_step import function

        if transition.std.ndim == 2:  # the kernel draws noise per sample, not per block
            guided, noise = step.apply_guidance(name, v, v_uncond, scale), normal(keys, tuple(v.shape))
            x_next = gaussian.sample(transition, x, guided, noise)
            return x_next, _score_rows(transition, samples | {"x_next": x_next.detach()}, scale, form, reduction)[0]
        *coefficients, g = _to_float32(v, *transition, scale)
        return function(*coefficients, x, v, v_uncond, g, low.expand(batch), high.expand(batch), form, reduction)
    options: dict[str, Any] = {"v_uncond": v_uncond, "guidance": scale, "form": form, "reduction": reduction}
    return _run(step.sde_step, chosen, transition, x, v, key=keys, **options)


def policy_loss(
    transition: Transition,
    x: Samples,
    v: Samples,
    x_next: Samples,
    *,
    log_prob_old: PerSample,
    advantage: PerSample,
    clip_low: Scalar,
    clip_high: Scalar,
    v_ref: Samples | None = None,
    kl_coef: Scalar = 0.0,
    kl_weight: KLWeight = "rate",
    dt: Level | None = None,
    v_uncond: Samples | None = None,
    guidance: Scalar | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
    implementation: Implementation = "auto",
) -> tuple[PerSample, PolicyInfo]:
    """Return the clipped policy loss of stored pairs, `[B]`, and diagnostics, as `core.step.policy_loss` does."""
    name, samples = "policy_loss", _drop_missing(x=x, v=v, x_next=x_next, v_ref=v_ref, v_uncond=v_uncond)
    scale = _check_step(name, samples, transition, v_uncond, guidance, form, reduction)
    _check_density(name, transition, form, v_ref)
    check_number(name, "clip_low", clip_low, low=0, high=1, batch=v.shape[0])
    check_number(name, "clip_high", clip_high, low=0, batch=v.shape[0])
    pairs = {"log_prob_old": log_prob_old, "advantage": advantage}
    compute_dtype(name, **pairs)
    for which, tensor in pairs.items():
        if tensor.shape != v.shape[:1]:
            raise ValueError(f"{name}: {which} has shape {list(tensor.shape)}, expected [{v.shape[0]}]")
    kl_scale = step.kl_scale(transition, v, v_ref=v_ref, kl_coef=kl_coef, kl_weight=kl_weight, dt=dt)
    check_same_device(name, v=v, **pairs, **({"dt": kl_scale} if isinstance(kl_scale, Tensor) else {}))
    numbers = _select_tensors(*transition, log_prob_old, advantage, scale, kl_scale)
    constants = clip_low, clip_high, kl_coef
    chosen = resolve(name, implementation, list(samples.values()), numbers, constants)
    if chosen == "triton":
        from fluvial.kernels.fused.policy_loss import function

        if transition.std.ndim == 2:
            # In float32, because the gradient of v is a sum of two terms, which would be rounded separately.
            samples = {key: tensor.float() for key, tensor in samples.items()}
            v, v_ref, v_uncond = samples["v"], samples.get("v_ref"), samples.get("v_uncond")
            log_prob, kl = _score_rows(transition, samples, scale, form, reduction)
            clipped = clipped_surrogate(log_prob, log_prob_old, advantage, clip_low=clip_low, clip_high=clip_high)
            if kl is None or v_ref is None:
                return clipped
            guided = step.apply_guidance(name, v, v_uncond, scale)
            return step.add_kl(*clipped, kl, step.weigh_kl(kl, kl_coef, kl_scale, transition, guided, v_ref, reduction))
        *coefficients, g, old, weight, factor = _to_float32(
            v, *transition, scale, log_prob_old, advantage, _as_tensor(kl_scale, v)
        )
        stored = old, weight, factor, *constants
        loss, diagnostics = function(*coefficients, x, v, x_next, v_ref, v_uncond, g, *stored, form, reduction)
        return loss, PolicyInfo(*diagnostics.detach()[:5].unbind(0))
    options: dict[str, Any] = {
        **pairs,
        "clip_low": clip_low,
        "clip_high": clip_high,
        "v_ref": v_ref,
        "kl_coef": kl_coef,
        "v_uncond": v_uncond,
        "guidance": scale,
        "form": form,
        "reduction": reduction,
    }
    return _run(step.policy_loss, chosen, transition, x, v, x_next, kl_weight=kl_weight, dt=dt, **options)


def nft_loss(
    v: Samples,
    v_old: Samples,
    x0: Samples,
    xt: Samples,
    t: Level,
    reward_prob: PerSample,
    *,
    beta: Scalar,
    adv_clip: Scalar,
    weight_min: Scalar = 1e-5,
    implementation: Implementation = "auto",
) -> PerSample:
    """Return DiffusionNFT's loss, `[B]`, as `core.nft.nft_loss` does."""
    name, samples = "nft_loss", {"v": v, "v_old": v_old, "x0": x0, "xt": xt}
    options = {"beta": beta, "adv_clip": adv_clip, "weight_min": weight_min}
    compute_dtype(name, **samples, reward_prob=reward_prob)
    check_same_shape(name, **samples)
    nft.check_nft_numbers(**options, batch=v.shape[0])
    _check_event(name, v)
    level = _as_tensor(t, v)
    check_per_sample(name, v.shape, t=level)
    check_per_sample(name, v.shape[0], reward_prob=reward_prob)
    check_same_device(name, **samples, t=level, reward_prob=reward_prob)
    chosen = resolve(name, implementation, list(samples.values()), [level, reward_prob], [*options.values()])
    if chosen == "triton":
        from fluvial.kernels.fused.nft_loss import function

        if level.ndim == 2:  # the loss depends on velocities times levels only
            by_row = per_sample(level, v)
            v, v_old, level = by_row * v, by_row * v_old, torch.ones_like(level[:, 0])
        numbers = _to_float32(v, level, reward_prob)
        return function(v, v_old.detach(), x0.detach(), xt.detach(), *numbers, beta, adv_clip, weight_min)[0]
    return _run(nft.nft_loss, chosen, v, v_old, x0, xt, level, reward_prob, **options)


def velocity_error(v: Samples, target: Samples, *, implementation: Implementation = "auto") -> PerSample:
    """Return the mean squared error of a velocity, `[B]`, as `core.flow_matching.velocity_error` does."""
    compute_dtype("velocity_error", v=v, target=target)
    check_same_shape("velocity_error", v=v, target=target)
    _check_event("velocity_error", v)
    check_same_device("velocity_error", v=v, target=target)
    chosen = resolve("velocity_error", implementation, [v, target])
    if chosen == "triton":
        from fluvial.kernels.fused.velocity_error import function

        return function(v, target)
    return _run(flow_matching.velocity_error, chosen, v, target)


def _check_step(
    function: str,
    samples: dict[str, Tensor],
    transition: Transition,
    v_uncond: Tensor | None,
    guidance: Scalar | None,
    form: Form,
    reduction: Reduction,
) -> Tensor | None:
    """Check the arguments shared by the operations of a step, and return the guidance as a tensor."""
    check_choice(function, "form", form, FORMS)
    check_choice(function, "reduction", reduction, REDUCTIONS)
    coefficients = transition._asdict()
    compute_dtype(function, **samples, **coefficients)
    check_same_shape(function, **samples)
    v = samples["v"]
    _check_event(function, v)
    step.check_guidance(function, v_uncond, guidance)
    scale = None if guidance is None else _as_tensor(guidance, v)
    numbers = _drop_missing(guidance=scale)
    check_per_sample(function, v.shape, **coefficients)
    check_per_sample(function, v.shape[0], **numbers)
    check_same_device(function, **samples, **coefficients, **numbers)
    return scale


def _score_rows(
    transition: Transition, samples: dict[str, Tensor], guidance: Tensor | None, form: Form, reduction: Reduction
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob and the KL of samples `[B, R, ...]` with coefficients per block, `[B]` each.

    Rows are passed to the kernel as samples.
    """
    size = samples["v"].shape[:2]
    rows = {name: tensor.flatten(0, 1) for name, tensor in samples.items()}
    steps = Transition(*(coefficient.expand(size).flatten() for coefficient in transition))
    scale = None if guidance is None else guidance.expand(size[0]).repeat_interleave(size[1])
    scores = step_log_prob(steps, **rows, guidance=scale, form=form, reduction=reduction, implementation="triton")
    log_prob, kl = (None if score is None else getattr(score.unflatten(0, size), reduction)(1) for score in scores)
    assert log_prob is not None
    return log_prob, kl


def _check_density(function: str, transition: Transition, form: Form, v_ref: Tensor | None) -> None:
    """Raise ValueError if the log-prob or the KL needs std > 0 and std is not positive."""
    if form != "unscaled" or v_ref is not None:
        gaussian.check_stochastic(function, transition.std)


def _find_obstacle(samples: Sequence[Tensor], numbers: Sequence[Tensor], constants: Sequence[Scalar]) -> str | None:
    """Return why the fused kernels do not support these arguments, None if they do."""
    device = samples[0].device.type
    if not HAS_TRITON:
        return "triton is not installed"
    if device not in FUSED and not (device == "cpu" and INTERPRETED):
        return f"the tensors are on {device}, expected {' or '.join(ACCELERATORS)} (or TRITON_INTERPRET=1)"
    if any(isinstance(value, Tensor) for value in constants):
        return "a hyper-parameter is a tensor, and the kernels take Python numbers"
    if any(tensor.dtype == torch.float64 for tensor in (*samples, *numbers)):
        return "a tensor is float64, and the kernels compute in float32"
    if torch.is_grad_enabled() and any(_requires_grad(tensor) for tensor in numbers):
        return (
            "a per-sample number (coefficient, advantage, ...) requires a gradient, which the kernels give to samples only"
        )
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active, and the kernels have reverse mode only"
    # Dynamo can trace this call, but not maybe_current_level.
    functorch = torch._C._functorch
    if torch.compiler.is_compiling() and isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter):
        return "torch.compile wraps a torch.func transform, which it does not trace through the kernels"
    return None


def _requires_grad(tensor: Tensor) -> bool:
    """Return whether a tensor may need a gradient, also inside torch.func, where batched tensors report none."""
    if torch.compiler.is_compiling():
        return tensor.requires_grad
    functorch = torch._C._functorch
    while not tensor.requires_grad and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def _run(function: Callable[..., Any], chosen: str, *args: Any, **options: Any) -> Any:
    """Call the reference, compiled if requested and not already inside a compiled function."""
    compiled = chosen == "compiled" and not torch.compiler.is_compiling()
    return (_compile(function) if compiled else function)(*args, **options)


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _check_event(function: str, v: Tensor) -> None:
    """Raise ValueError if samples have no elements, because their mean is undefined."""
    if 0 in v.shape[1:]:
        raise ValueError(f"{function}: v has shape {list(v.shape)}, expected at least one element per sample")


def _as_tensor(value: Level, v: Tensor) -> Tensor:
    """Return a number as a tensor created on v's device: a copy from the host would wait for the device."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float64 if v.dtype == torch.float64 else torch.float32, device=v.device)


def _to_float32(v: Tensor, *numbers: Tensor | None) -> list[Tensor | None]:
    """Return per-sample numbers as the kernels take them, float32 `[B]`, without a copy if they have that dtype."""
    return [None if number is None else number.to(torch.float32).expand(v.shape[0]) for number in numbers]


def _drop_missing(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _select_tensors(*values: Tensor | float | None) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
