"""The checks of a config's fields: Literals, types and bounds, each refused with what is accepted."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from helpers.refusals import refuses

from fluvial.core.checks import check_choice, check_fields, check_number

Sampler = Literal["flow_sde", "dance_sde", "cps"]


@dataclass(frozen=True)
class RunConfig:
    sampler: Sampler = "cps"
    solver: Literal["euler", "dpmpp_2m"] | None = None
    order: Literal[1, 2] = 1
    dtype: Literal["auto"] | int = "auto"
    forms: tuple[Literal["density", "unscaled"], ...] = ()
    steps: int = 10
    eta: float = 0.5
    clip: float | None = None
    shared: bool = False
    name: str = ""


def broken(**values: Any) -> RunConfig:
    """Return a config with values that its type forbids, built past the run-time type checks of the test session."""
    config = RunConfig()
    for name, value in values.items():
        object.__setattr__(config, name, value)
    return config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sampler": "flow-sde"}, r"^run\.sampler is 'flow-sde', expected one of .* \(did you mean 'flow_sde'\?\)$"),
        ({"sampler": "CPS"}, r"did you mean 'cps'\?"),
        ({"sampler": "zzz"}, r"expected one of 'flow_sde', 'dance_sde', 'cps'$"),
        ({"sampler": None}, "run.sampler is None, expected one of"),
        ({"solver": "heun"}, r"run\.solver is 'heun', expected one of 'euler', 'dpmpp_2m', None$"),
        ({"order": True}, r"run\.order is True, expected one of 1, 2$"),
        ({"order": "1"}, r"run\.order is '1', expected one of 1, 2$"),
        ({"dtype": "auot"}, r"run\.dtype is 'auot', expected 'auto' \(did you mean 'auto'\?\) or an integer$"),
        ({"forms": ("density", "unscald")}, r"run\.forms is 'unscald', .*did you mean 'unscaled'"),
    ],
)
def test_a_value_that_is_no_literal_of_its_field_is_named_with_the_nearest(values: dict[str, Any], message: str) -> None:
    refuses(message, check_fields, broken(**values))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"steps": "10"}, TypeError, r"^run\.steps is a str, expected an integer$"),
        ({"steps": 2.0}, TypeError, r"run\.steps is a float, expected an integer"),
        ({"steps": True}, TypeError, r"run\.steps is a bool, expected an integer"),
        ({"steps": 0}, ValueError, r"run\.steps is 0, expected an integer >= 1$"),
        ({"eta": "0.5"}, TypeError, r"run\.eta is a str, expected a number"),
        ({"eta": True}, TypeError, r"run\.eta is a bool, expected a number"),
        ({"eta": None}, TypeError, r"run\.eta is a NoneType, expected a number"),
        ({"eta": math.nan}, ValueError, r"run\.eta is nan, expected a finite number in \[0, 1\]"),
        ({"eta": 1.5}, ValueError, r"run\.eta is 1.5, expected a finite number in \[0, 1\]"),
        ({"dtype": True}, TypeError, r"^run\.dtype is a bool, expected an integer$"),
        ({"dtype": 0}, ValueError, r"^run\.dtype is 0, expected an integer >= 1$"),
        ({"clip": math.inf}, ValueError, r"run\.clip is inf, expected a finite number of any size"),
        ({"shared": "no"}, TypeError, r"run\.shared is a str, expected True or False"),
        ({"shared": 1}, TypeError, r"run\.shared is an int, expected True or False"),
    ],
)
def test_a_field_of_another_type_or_out_of_bounds_is_named(
    values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_fields(broken(**values), steps=(1, math.inf), eta=(0, 1), dtype=(1, math.inf))


def test_values_of_the_fields_types_pass() -> None:
    for config in (
        RunConfig(),
        RunConfig(sampler="flow_sde", solver="euler", order=2, dtype=3, forms=("density", "unscaled"), eta=1, clip=0.1),
    ):
        check_fields(config, steps=(1, 10), eta=(0, 1), dtype=(1, 10))


def test_the_owner_of_a_value_is_named() -> None:
    refuses(r"^rollout\.sampler is 'sde'", check_fields, broken(sampler="sde"), "rollout")
    refuses("^log_prob: form is 'densty'", check_choice, "log_prob", "form", "densty", ("density", "unscaled"))
    with pytest.raises(TypeError, match=r"^shifted: shift is a bool, expected a number$"):
        check_number("shifted", "shift", True)
    refuses(r"^shifted: shift is 0, expected a finite number >= 1$", check_number, "shifted", "shift", 0, low=1)
    check_number("shifted", "shift", 1, low=1)
