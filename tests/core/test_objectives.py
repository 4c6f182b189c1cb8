"""Properties of every objective: nothing is reduced, data gets no gradient; `test_composes.py` has the transforms."""

from functools import partial

import pytest
import torch
from tables import EVENT, OBJECTIVES, STEPS, ObjectiveRow, objective_inputs
from torch.testing import assert_close

every_objective = pytest.mark.parametrize("row", OBJECTIVES, ids=lambda row: row.name)


def expected_shape(row: ObjectiveRow, batch: int) -> tuple[int, ...]:
    return (batch, STEPS) if row.name.startswith("rollout_weights") else (batch,)


@every_objective
@pytest.mark.parametrize("batch", [0, 1, 41])
def test_one_value_per_sample_that_depends_on_it_alone(row: ObjectiveRow, batch: int) -> None:
    inputs = objective_inputs(row, batch)
    got = row.call(**inputs)
    assert got.shape == expected_shape(row, batch)
    assert got.isfinite().all()
    for i in range(min(batch, 3)):
        one = row.call(**{name: tensor[i : i + 1] for name, tensor in inputs.items()})
        assert_close(one[0], got[i], rtol=1e-13, atol=1e-15)


@every_objective
def test_data_gets_no_gradient(row: ObjectiveRow) -> None:
    inputs = objective_inputs(row, 5)
    for name in row.data:
        inputs[name].requires_grad_()
    assert not row.call(**inputs).requires_grad


@every_objective
def test_a_non_contiguous_input_is_the_same_input(row: ObjectiveRow) -> None:
    inputs = objective_inputs(row, 5)
    strided = {name: torch.stack([tensor, tensor], dim=-1)[..., 0] for name, tensor in inputs.items()}
    assert all(not tensor.is_contiguous() for tensor in strided.values())
    assert_close(row.call(**strided), row.call(**inputs), rtol=1e-13, atol=1e-15)


def test_the_table_draws_samples_of_an_event() -> None:
    drawn = partial(objective_inputs, next(row for row in OBJECTIVES if row.name == "nft_loss"))
    assert drawn(5)["v"].shape == (5, *EVENT)
    assert drawn(5)["t"].shape == (5,)
    assert not torch.equal(drawn(5)["v"], drawn(5)["v_old"])
