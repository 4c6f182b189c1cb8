"""Names of samplers and of forms of the log-probability, here and on the wire.

    wire                              fluvial
    rollout_sde_type "sde"            sampler flow_sde
    rollout_sde_type "cps"            sampler cps
    rollout_sde_type "ode"            sampler ode
    rollout_log_prob_no_const false   form density
    rollout_log_prob_no_const true    form unscaled, the negative squared residual

fluvial's form named "no_const" is another formula: the density without its constants, which still divides by the variance.
The wire has no name for it. On the wire the log-probability of a step without noise is 0; `fluvial.core` raises for such a
step, because it has no density.
"""

from typing import Literal, get_args

from fluvial.core.gaussian import Form
from fluvial.engines.wire.decode import WireError

SdeType = Literal["sde", "cps", "ode"]
SDE_TYPES: tuple[SdeType, ...] = get_args(SdeType)
_SAMPLERS: dict[SdeType, str] = {"sde": "flow_sde", "cps": "cps", "ode": "ode"}


def sampler_of(sde_type: SdeType) -> str:
    """Return fluvial's name of a sampler of the wire."""
    return _SAMPLERS[sde_type]


def sde_type_of(sampler: str) -> SdeType:
    """Return the name on the wire of one of fluvial's samplers.

    Raises:
        WireError: the schema has no such sampler.
    """
    for sde_type, name in _SAMPLERS.items():
        if name == sampler:
            return sde_type
    raise WireError(
        f"sampler is {sampler}, and the rollout schema has {', '.join(_SAMPLERS.values())} only: use one of these, or a "
        "server of fluvial"
    )


def form_of(no_const: bool) -> Form:
    """Return the form of the log-probability for a value of `rollout_log_prob_no_const`."""
    return "unscaled" if no_const else "density"


def no_const_of(form: Form) -> bool:
    """Return the value of `rollout_log_prob_no_const` for a form of the log-probability.

    Raises:
        WireError: the schema has no such form.
    """
    if form == "no_const":
        raise WireError(
            "form is no_const, the density without its constants, and rollout_log_prob_no_const is another formula, the "
            "negative squared residual: use form density or unscaled, or a server of fluvial"
        )
    return form == "unscaled"
