"""Samplers of a run: the built-in ones by name, and a person's own.

An own sampler is a function `(level, level_next, *, eta) -> Transition`. It is named `module:function`, declared as an entry
point of `fluvial.samplers`, or passed as `RolloutConfig(sampler=function)`. One with more to say is a `SamplerRule`.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fluvial.core import transitions
from fluvial.core.transitions import Sampler, Transition
from fluvial.engines import plugins
from fluvial.engines.errors import UsageError
from fluvial.models import Prediction


@dataclass(frozen=True)
class SamplerRule:
    """What a run must know of a sampler.

    Args:
        bind: `(eta, levels) -> sampler`, which binds the hyper-parameters for a schedule of T+1 noise levels.
        max_eta: largest eta that the sampler is defined for; 0 for a sampler that takes no noise.
        last_step_is_deterministic: the step to the schedule's end has std 0, and so no log-probability.
        std_is_a_rate: std is a rate times sqrt(|dt|), which GRPO-Guard's loss assumes.
        prediction: what the models predict that it samples from; None for any.
    """

    bind: Callable[[float, Tensor], Sampler]
    max_eta: float = math.inf
    last_step_is_deterministic: bool = False
    std_is_a_rate: bool = False
    prediction: Prediction | None = "velocity"


SAMPLERS: dict[str, SamplerRule] = {
    "flow_sde": SamplerRule(
        lambda eta, levels: partial(transitions.flow_sde, eta=eta, sigma_max=levels[1]), std_is_a_rate=True
    ),
    "dance_sde": SamplerRule(lambda eta, levels: partial(transitions.dance_sde, eta=eta), std_is_a_rate=True),
    "cps": SamplerRule(lambda eta, levels: partial(transitions.cps, eta=eta), 1.0, last_step_is_deterministic=True),
    "ddim": SamplerRule(
        lambda eta, levels: partial(transitions.ddim, eta=eta), 1.0, last_step_is_deterministic=True, prediction="epsilon"
    ),
    "ode": SamplerRule(lambda eta, levels: transitions.ode, 0.0, last_step_is_deterministic=True, prediction=None),
}


def sampler_rule(sampler: Any) -> SamplerRule:
    """Return the rule of a sampler: of its name, its function, or the rule itself.

    Raises:
        UsageError: it is none of these, or the function cannot be called with (level, level_next, eta=...).
    """
    if isinstance(sampler, str):
        found = plugins.load(sampler, "samplers", _problem, table=SAMPLERS, field="rollout.sampler")
    else:
        found = sampler
        if (problem := _problem(found)) is not None:
            raise UsageError(f"rollout.sampler {problem}")
    if isinstance(found, SamplerRule):
        return found
    name = sampler_name(sampler)
    return SamplerRule(lambda eta, levels: _watched(partial(found, eta=eta), name))


def sampler_name(sampler: Any) -> str:
    """Return the name under which a sampler is recorded: as it was given, or the `module:function` of a function."""
    if isinstance(sampler, str):
        return sampler
    of = sampler.bind if isinstance(sampler, SamplerRule) else sampler
    return next((name for name, rule in SAMPLERS.items() if rule is sampler), None) or plugins.spec_of(of)


def _problem(found: Any) -> str | None:
    """Return what is wrong with a sampler."""
    if isinstance(found, SamplerRule):
        return None
    expected = "a function of (level, level_next, *, eta), or a SamplerRule"
    if not callable(found) or inspect.isclass(found):
        return f"is {'a class' if inspect.isclass(found) else f'of type {type(found).__name__}'}, expected {expected}"
    try:
        inspect.signature(found).bind(0.0, 0.0, eta=0.0)
    except TypeError as error:
        return f"has the signature {inspect.signature(found)}, expected {expected}: {error}"
    return None


def _watched(sampler: Sampler, name: str) -> Sampler:
    """Return a sampler whose results are checked: a wrong shape would broadcast silently."""

    def step(level: Tensor, level_next: Tensor) -> Transition:
        found = sampler(level, level_next)
        if not isinstance(found, tuple) or len(found) != 3:
            raise UsageError(f"rollout.sampler {name} returned a {type(found).__name__}, expected Transition(a, b, std)")
        for part, tensor in zip(Transition._fields, found, strict=True):
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            if shape not in ([], list(level.shape)):
                raise UsageError(
                    f"rollout.sampler {name} returned {part} of shape {shape}, expected a tensor {list(level.shape)} or []"
                )
        return Transition(*found)

    step.__name__ = name
    return step
