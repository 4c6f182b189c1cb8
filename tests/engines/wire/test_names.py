"""The names on the wire and here, both ways."""

import pytest

from fluvial.core.gaussian import FORMS
from fluvial.engines.rollout.samplers import SAMPLERS
from fluvial.engines.wire.decode import WireError
from fluvial.engines.wire.names import SDE_TYPES, form_of, no_const_of, sampler_of, sde_type_of

TABLE = {"sde": "flow_sde", "cps": "cps", "ode": "ode"}


def test_samplers_have_the_same_names_both_ways() -> None:
    assert {sde_type: sampler_of(sde_type) for sde_type in SDE_TYPES} == TABLE
    assert {sde_type_of(sampler): sampler for sampler in TABLE.values()} == TABLE


@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - set(TABLE.values())))
def test_a_sampler_that_the_schema_lacks_is_an_error(sampler: str) -> None:
    with pytest.raises(WireError, match=f"sampler is {sampler}, and the rollout schema has flow_sde, cps, ode only"):
        sde_type_of(sampler)


def test_no_const_of_the_wire_is_unscaled_here() -> None:
    """The form of that name here is another formula, and has no name on the wire."""
    assert [form_of(False), form_of(True)] == ["density", "unscaled"]
    assert {form: no_const_of(form) for form in FORMS if form != "no_const"} == {"density": False, "unscaled": True}
    with pytest.raises(WireError, match="rollout_log_prob_no_const is another formula"):
        no_const_of("no_const")
