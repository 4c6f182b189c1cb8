"""Samplers of a run: built-in and custom stochastic samplers, and ODE solvers.

A custom sampler is a function `(level, level_next, *, eta) -> Transition`. It is named `module:function`, declared as an
entry point of `fluvial.samplers`, or passed as `Stochastic(function)`. With further properties it is a `SamplerRule`.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

from torch import Tensor

from fluvial.core import transitions
from fluvial.core.checks import ETA, check_fields
from fluvial.core.step import KLWeight
from fluvial.core.transitions import Sampler
from fluvial.engines import plugins
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.models import Prediction


@dataclass(frozen=True)
class SamplerRule:
    """A sampler, and the properties that a run depends on.

    Args:
        bind: `(eta, levels) -> sampler`, which binds the hyper-parameters for a schedule of T+1 noise levels.
        max_eta: largest eta that the sampler is defined for; 0 for a deterministic sampler.
        last_step_is_deterministic: the last step of the schedule has std 0, and so no log-probability.
        std_is_a_rate: std is a rate times sqrt(|dt|), as GRPO-Guard's loss assumes.
        kl_weight: weight of a step's KL in the sampler's published loss, see `core.step.policy_loss`: rate if its code
            computes the KL with the rate std / sqrt(|dt|), which makes it |dt| times the exact one.
        prediction: required prediction of the model; None accepts any.
    """

    bind: Callable[[float, Tensor], Sampler]
    max_eta: float = math.inf
    last_step_is_deterministic: bool = False
    std_is_a_rate: bool = False
    kl_weight: KLWeight = "exact"
    prediction: Prediction | None = "velocity"


def _built_in(name: transitions.SamplerName, **options: Any) -> SamplerRule:
    return SamplerRule(partial(transitions.bind, name), transitions.MAX_ETA[name], **options)


SAMPLERS: dict[str, SamplerRule] = {
    "flow_sde": _built_in("flow_sde", std_is_a_rate=True, kl_weight="rate"),
    "dance_sde": _built_in("dance_sde", std_is_a_rate=True),
    "cps": _built_in("cps", last_step_is_deterministic=True),
    "ddim": _built_in("ddim", last_step_is_deterministic=True, prediction="epsilon"),
    "ode": _built_in("ode", last_step_is_deterministic=True, prediction=None),
    "wan_sde": _built_in("wan_sde", std_is_a_rate=True),
}


def sampler_rule(sampler: Any) -> SamplerRule:
    """Return the rule of a sampler, which is a name, a function or a rule.

    Raises:
        UsageError: it is not one of these, or the function cannot be called with (level, level_next, eta=...).
    """
    if isinstance(sampler, str):
        rule = plugins.load(sampler, "samplers", _problem, table=SAMPLERS, field="sampling.sampler")
    else:
        rule = sampler
        if (problem := _problem(rule)) is not None:
            raise UsageError(f"`sampling.sampler` {problem}")
    if isinstance(rule, SamplerRule):
        return rule
    name = sampler_name(sampler)

    def bind(eta: float, levels: Tensor) -> Sampler:
        with convert_errors(UsageError, TypeError, ValueError, says=f"`sampling.sampler` {name!r} cannot be used"):
            return transitions.bind(partial(rule, eta=eta), eta, levels)

    return SamplerRule(bind)


def isolate(sampler: Sampler) -> Sampler:
    """Wrap a custom sampler to share no tensor with the run, so that it may store and modify its own."""

    def step(level: Tensor, level_next: Tensor, /) -> transitions.Transition:
        a, b, std = sampler(level.clone(), level_next.clone())
        return transitions.Transition(a.clone(), b.clone(), std.clone())

    step.__name__ = transitions.sampler_name(sampler)
    return step


def sampler_name(sampler: Any) -> str:
    """Return a sampler's name in records: its name in the configuration, or the `module:function` of a function."""
    if isinstance(sampler, str):
        return sampler
    function = sampler.bind if isinstance(sampler, SamplerRule) else sampler
    return next((name for name, rule in SAMPLERS.items() if rule is sampler), None) or plugins.spec_of(function)


def _problem(rule: Any) -> str | None:
    """Return why an object is not a sampler; None if it is one."""
    if isinstance(rule, SamplerRule):
        return None
    expected = "a function of (level, level_next, *, eta), or a SamplerRule"
    if not callable(rule) or inspect.isclass(rule):
        return f"is {'a class' if inspect.isclass(rule) else f'of type {type(rule).__name__}'}, expected {expected}"
    try:
        inspect.signature(rule).bind(0.0, 0.0, eta=0.0)
    except TypeError as error:
        return f"has the signature {inspect.signature(rule)}, expected {expected}: {error}"
    return None


@dataclass(frozen=True)
class Stochastic:
    """Steps with noise, and so with a density.

    Args:
        name: Sampler: flow_sde (Flow-GRPO, arXiv 2505.05470), dance_sde (DanceGRPO, 2505.07818), cps (Flow-CPS, 2509.05952),
            ddim (DDPO, 2305.13301, for models that predict epsilon), wan_sde (Flow-GRPO for Wan, with eta 1), or your own
            function `(level, level_next, *, eta) -> Transition` (the object, or module:name).
        eta: Scale of the noise, above 0, without a unit.
    """

    is_deterministic: ClassVar[bool] = False
    solver: ClassVar[Literal["euler"]] = "euler"
    name: Any = "flow_sde"
    eta: float = 0.8

    def __post_init__(self) -> None:
        check_fields(self, "sampling.sampler", eta=ETA)
        if self.eta == 0:
            hint = f"every step of {self.kind} would be deterministic, without a density, as with sampler ode"
            raise UsageError("sampling.sampler.eta", 0, "a number above 0", hint)
        if self.eta > self.rule.max_eta:
            raise UsageError("sampling.sampler.eta", self.eta, f"at most {self.rule.max_eta:g} for {self.kind}")

    @staticmethod
    def list_kinds() -> list[str]:
        """Return the names of the built-in and the installed samplers."""
        return [name for name in plugins.list_names("samplers", SAMPLERS) if name != "ode"]

    @property
    def kind(self) -> str:
        """Name of the sampler in records."""
        return sampler_name(self.name)

    @cached_property
    def rule(self) -> SamplerRule:
        """Rule of the sampler."""
        return sampler_rule(self.name)


@dataclass(frozen=True)
class Ode:
    """Steps without noise: a flow's ODE, or DDIM with eta 0 for models that predict epsilon.

    Args:
        solver: Solver of the ODE: euler, dpmpp_2m (DPM-Solver++ 2M, arXiv 2211.01095) or unipc (UniPC, 2302.04867).
    """

    kind: ClassVar[str] = "ode"
    is_deterministic: ClassVar[bool] = True
    eta: ClassVar[float] = 0.0
    rule: ClassVar[SamplerRule] = SAMPLERS["ode"]
    solver: Literal["euler", "dpmpp_2m", "unipc"] = "euler"

    def __post_init__(self) -> None:
        check_fields(self, "sampling.sampler")


@dataclass(frozen=True)
class SaSolver:
    """SA-Solver (arXiv 2309.05019) for flows, with noise at levels from 0.3 to 0.9, as in AWM's code, and no density.

    Args:
        eta: Scale of the noise, without a unit.
    """

    kind: ClassVar[str] = "sa_solver"
    is_deterministic: ClassVar[bool] = True
    solver: ClassVar[Literal["sa_solver"]] = "sa_solver"
    rule: ClassVar[SamplerRule] = replace(SAMPLERS["ode"], prediction="velocity")
    eta: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "sampling.sampler", eta=ETA)


SamplerChoice = Stochastic | Ode | SaSolver
