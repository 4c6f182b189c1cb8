"""Distillation: the KL between two steps, its gradient, and its form for steps without noise."""

import pytest
import torch
from helpers.refusals import refuses
from helpers.tables import STOCHASTIC, SamplerRow, etas, normals
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from fluvial.core.distill import mean_kl, scaled_mse, velocity_mse
from fluvial.core.transitions import ode


@pytest.mark.parametrize("row", STOCHASTIC, ids=lambda row: row.name)
@given(data=st.data(), eta=etas, seed=st.integers(0, 10_000))
def test_it_is_the_kl_of_two_gaussians_in_both_directions(
    row: SamplerRow, data: st.DataObject, eta: float, seed: int
) -> None:
    levels = data.draw(row.levels)
    step = row.bind(eta)(*levels)
    x, v, teacher = normals(seed, 3, len(levels[0]), 3, 4)
    a, b, std = (c[:, None, None] for c in step)
    student_step, teacher_step = (Normal(a * x + b * u, std.expand_as(x)) for u in (v, teacher))
    got = mean_kl(step, v, teacher)
    # The means share a x, whose rounding torch's form divides by std.
    for want in (kl_divergence(student_step, teacher_step), kl_divergence(teacher_step, student_step)):
        assert_close(got, want.mean((1, 2)), rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 10_000), batch=st.integers(0, 4))
def test_the_mean_square_is_the_formula(seed: int, batch: int) -> None:
    v, teacher = normals(seed, 2, batch, 3, 4)
    got = velocity_mse(v, teacher)
    assert got.shape == (batch,)
    for i in range(batch):
        squares = [(p - q) ** 2 for p, q in zip(v[i].flatten().tolist(), teacher[i].flatten().tolist(), strict=True)]
        assert got[i].item() == pytest.approx(sum(squares) / 12, rel=1e-13)


@given(seed=st.integers(0, 10_000), level=st.floats(0.1, 1.0), change=st.floats(0.01, 0.1), relative=st.booleans())
def test_distances_of_samples_are_those_of_predictions(seed: int, level: float, change: float, relative: bool) -> None:
    """MSE(x_next) = dt^2 MSE(v), MSE(x0) = s^2 MSE(v); relative ones have the factor once, and a gradient of its size."""
    x, v, teacher = normals(seed, 3, 2, 3, 4)
    next_samples = [x - change * u for u in (v, teacher)]
    clean = [x - level * u for u in (v, teacher)]
    for (one, other), scale in ((next_samples, change), (clean, level)):
        got = scaled_mse(v, teacher, torch.full((2,), scale, dtype=v.dtype), relative=relative)
        d = one - other
        expected = (d**2).mean((1, 2)) / ((d.abs().mean((1, 2)) + 1e-8) if relative else 1)
        assert_close(got, expected, rtol=1e-9, atol=1e-12)
        gradient = torch.func.grad(lambda u, s=scale: scaled_mse(u, teacher, s, relative=relative).sum())(v)
        size = d.abs().mean((1, 2), keepdim=True) + 1e-8 if relative else 1
        assert_close(gradient, 2 * scale**2 * (v - teacher) / size / 12, rtol=1e-9, atol=1e-12)
    assert scaled_mse(v, v, 0.5, relative=relative).eq(0).all()


def test_a_deterministic_step_has_no_kl_but_a_distance() -> None:
    v, teacher = normals(0, 2, 3, 4, dtype=torch.float32)
    step = ode(torch.tensor([0.9, 0.5, 0.3]), 0.1)
    refuses(r"std is not positive for samples \[0, 1, 2\]", mean_kl, step, v, teacher)

    with FlopCounterMode(display=False):  # under a dispatch mode no value is read
        assert torch.func.grad(lambda v: mean_kl(step, v, teacher).sum())(v).isnan().all()
    assert velocity_mse(v, teacher).isfinite().all()
