"""Flow matching: the straight path, its velocity, and the supervised error."""

import pytest
import torch
from helpers.tables import DTYPES, EVENTS, normals
from helpers.tolerances import COMPUTE_DTYPE, tolerance
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fluvial.core.flow_matching import interpolate, velocity_error

events = st.sampled_from(EVENTS)
seeds = st.integers(0, 2**32)


@given(levels=st.lists(st.floats(0, 1), max_size=5), event=events, seed=seeds)
def test_interpolate_is_the_straight_path(levels: list[float], event: tuple[int, ...], seed: int) -> None:
    x0, noise = normals(seed, 2, len(levels), *event)
    got = interpolate(x0, noise, torch.tensor(levels, dtype=torch.float64))
    assert got.shape == x0.shape
    for sample, level in enumerate(levels):
        want = (1 - level) * x0[sample] + level * noise[sample]
        assert_close(got[sample], want, **tolerance("mean", torch.float64, condition=5))


def test_the_ends_of_the_path_are_exact() -> None:
    x0, noise = normals(0, 2, 3, 41)
    assert torch.equal(interpolate(x0, noise, 0.0), x0)
    assert torch.equal(interpolate(x0, noise, 1.0), noise)
    assert torch.equal(interpolate(x0, noise, torch.tensor([0.0, 1.0, 0.0]).double())[1], noise[1])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, as in test_gaussian
def test_the_velocity_of_the_path_is_noise_less_x0() -> None:
    x0, noise = normals(0, 2, 3, 41)
    sigma = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    _, velocity = torch.func.jvp(lambda s: interpolate(x0, noise, s), (sigma,), (torch.ones_like(sigma),))  # type: ignore[misc]
    assert_close(velocity, noise - x0, **tolerance("mean", torch.float64))


def test_a_scalar_level_is_one_for_all() -> None:
    x0, noise = normals(0, 2, 3, 41, dtype=torch.float32)
    want = interpolate(x0, noise, torch.full((3,), 0.3))
    for sigma in (0.3, torch.tensor(0.3)):
        assert torch.equal(interpolate(x0, noise, sigma), want)


@given(event=events, batch=st.integers(0, 4), seed=seeds)
def test_velocity_error_is_a_mean_square(event: tuple[int, ...], batch: int, seed: int) -> None:
    v, target = normals(seed, 2, batch, *event)
    got = velocity_error(v, target)
    assert got.shape == (batch,)
    for sample in range(batch):
        squares = [
            (a - b) ** 2 for a, b in zip(v[sample].flatten().tolist(), target[sample].flatten().tolist(), strict=True)
        ]
        assert got[sample].item() == pytest.approx(sum(squares) / len(squares), rel=1e-12)
    assert torch.equal(velocity_error(v, v), torch.zeros(batch, dtype=torch.float64))


def test_the_gradient_of_the_error() -> None:
    v, target = (t.requires_grad_() for t in normals(0, 2, 3, 7).unbind())
    weight = normals(1, 3)
    (gradient,) = torch.autograd.grad(velocity_error(v, target), v, weight)
    assert_close(gradient, weight[:, None] * 2 * (v - target).detach() / 7, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x0, noise = (t.to(dtype) for t in normals(0, 2, 3, 1271).unbind())
    compute = COMPUTE_DTYPE[dtype]
    got, error = interpolate(x0, noise, torch.tensor(0.3)), velocity_error(x0, noise)
    assert got.dtype == error.dtype == compute
    level = torch.tensor(0.3, dtype=torch.float32).double()
    want = (1 - level) * x0.double() + level * noise.double()
    assert_close(got.double(), want, **tolerance("mean", dtype, condition=5))
    want = ((x0.double() - noise.double()) ** 2).mean(1)
    assert_close(error.double(), want, **tolerance("log_prob", dtype, reduced=1271))


def test_float16_does_not_overflow() -> None:
    v = torch.full((2, 41), 6e4, dtype=torch.float16)
    assert_close(velocity_error(v, -v).double(), (2 * v[:, 0].double()) ** 2, **tolerance("log_prob", torch.float16))


def test_non_contiguous_inputs() -> None:
    v, target = (t.transpose(1, 2) for t in normals(0, 2, 3, 5, 7).unbind())
    limit = tolerance("log_prob", torch.float64, reduced=35)
    assert_close(velocity_error(v, target), velocity_error(v.contiguous(), target.contiguous()), **limit)
