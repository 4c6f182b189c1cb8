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
from fluvial.core.transitions import Sampler
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


def _built_in(name: transitions.SamplerName, **options: Any) -> SamplerRule:
    return SamplerRule(partial(transitions.bind, name), transitions.MAX_ETA[name], **options)


SAMPLERS: dict[str, SamplerRule] = {
    "flow_sde": _built_in("flow_sde", std_is_a_rate=True),
    "dance_sde": _built_in("dance_sde", std_is_a_rate=True),
    "cps": _built_in("cps", last_step_is_deterministic=True),
    "ddim": _built_in("ddim", last_step_is_deterministic=True, prediction="epsilon"),
    "ode": _built_in("ode", last_step_is_deterministic=True, prediction=None),
    "wan_sde": _built_in("wan_sde", std_is_a_rate=True),
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

    def bind(eta: float, levels: Tensor) -> Sampler:
        try:
            return transitions.bind(partial(found, eta=eta), eta, levels)
        except (TypeError, ValueError) as error:
            raise UsageError(f"rollout.sampler {name!r} cannot be used: {error}") from error

    return SamplerRule(bind)


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
