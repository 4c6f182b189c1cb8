"""Properties of every objective: nothing is reduced, nothing read, gradients where they belong, float32 or float64."""

from functools import partial

import pytest
import torch
from tables import DTYPES, EVENT, OBJECTIVES, STEPS, ObjectiveRow, objective_inputs
from tolerances import COMPUTE_DTYPE
from torch import Tensor
from torch.testing import assert_close

every_objective = pytest.mark.parametrize("row", OBJECTIVES, ids=lambda row: row.name)

LEARNT = tuple(row for row in OBJECTIVES if row.policy)


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
def test_vmap_over_samples_is_the_batch(row: ObjectiveRow) -> None:
    inputs = objective_inputs(row, 5)

    def one(sample: dict[str, Tensor]) -> Tensor:
        return row.call(**{name: tensor[None] for name, tensor in sample.items()})[0]

    assert_close(torch.func.vmap(one)(inputs), row.call(**inputs), rtol=1e-13, atol=1e-15)


@every_objective
def test_data_gets_no_gradient(row: ObjectiveRow) -> None:
    inputs = objective_inputs(row, 5)
    for name in row.data:
        inputs[name].requires_grad_()
    assert not row.call(**inputs).requires_grad


@pytest.mark.parametrize("row", LEARNT, ids=lambda row: row.name)
def test_gradients_reach_the_policy(row: ObjectiveRow) -> None:
    inputs = objective_inputs(row, 5)
    for name in row.policy:
        inputs[name].requires_grad_()
    weight = torch.linspace(-1, 2, 5, dtype=torch.float64)  # what comes back is not always 1
    gradients = torch.autograd.grad(row.call(**inputs), [inputs[name] for name in row.policy], weight)
    for name, gradient in zip(row.policy, gradients, strict=True):
        assert gradient.any(), name

        def weighed(tensor: Tensor, name: str = name) -> Tensor:
            return (weight * row.call(**(inputs | {name: tensor}))).sum()

        assert_close(torch.func.grad(weighed)(inputs[name].detach()), gradient, rtol=1e-12, atol=1e-15)


# What a loss holds still (nft's weights) differences do not see.
@pytest.mark.parametrize("row", [row for row in LEARNT if row.name != "nft_loss"], ids=lambda row: row.name)
def test_gradients_are_those_of_differences(row: ObjectiveRow) -> None:
    inputs = objective_inputs(row, 3)

    def loss(*tensors: Tensor) -> Tensor:
        return row.call(**(inputs | dict(zip(row.policy, tensors, strict=True))))

    assert torch.autograd.gradcheck(loss, tuple(inputs[name].clone().requires_grad_() for name in row.policy))


@every_objective
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_computed_in_float32_or_float64(row: ObjectiveRow, dtype: torch.dtype) -> None:
    inputs = objective_inputs(row, 41, dtype=dtype)
    got = row.call(**inputs)
    assert got.dtype == COMPUTE_DTYPE[dtype]
    want = row.call(**{name: tensor.double() for name, tensor in inputs.items()})
    # Inputs of size 1 over a std of 0.1, squared: 100 roundings' worth; computed in half precision it is 2^-8 or 2^-11.
    limit = 100 * 8 * torch.finfo(got.dtype).eps
    assert_close(got.double(), want, rtol=limit, atol=limit)


@every_objective
def test_no_value_is_read(row: ObjectiveRow) -> None:
    # A meta tensor has none: .item(), a branch on a value or a copy to the host would raise.
    inputs = {name: tensor.to("meta") for name, tensor in objective_inputs(row, 5).items()}
    assert row.call(**inputs).shape == expected_shape(row, 5)


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
