"""Flow matching: the straight path, its velocity, and the supervised error."""

import pytest
import torch
from helpers.tables import EVENTS, normals
from helpers.tolerances import tolerance
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fluvial.core.flow_matching import interpolate, recover, velocity_error

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


@given(levels=st.tuples(st.floats(0, 1), st.floats(0, 0.95)), event=events, seed=seeds)
def test_a_step_of_known_noise_recovers_the_clean_sample(
    levels: tuple[float, float], event: tuple[int, ...], seed: int
) -> None:
    """Exactly with the true velocity, whatever the levels; an error e of the velocity moves it by e (s' - s) / (1 - s')."""
    (x0, noise, error), (s, s_next) = normals(seed, 3, 2, *event), levels
    x, limit = interpolate(x0, noise, s), tolerance("mean", torch.float64, condition=1000)
    assert_close(recover(x, noise - x0, noise, s, s_next), x0, **limit)
    moved = recover(x, noise - x0 + error, noise, s, s_next)
    assert_close(moved, x0 + error * (s_next - s) / (1 - s_next), **limit)
    assert_close(recover(x, noise - x0 + error, noise, s, 0.0), x - s * (noise - x0 + error), **limit)


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


def test_the_error_of_extreme_and_of_strided_inputs() -> None:
    v = torch.full((2, 41), 6e4, dtype=torch.float16)
    assert_close(velocity_error(v, -v).double(), (2 * v[:, 0].double()) ** 2, **tolerance("log_prob", torch.float16))
    v, target = (t.transpose(1, 2) for t in normals(0, 2, 3, 5, 7).unbind())
    limit = tolerance("log_prob", torch.float64, reduced=35)
    assert_close(velocity_error(v, target), velocity_error(v.contiguous(), target.contiguous()), **limit)
