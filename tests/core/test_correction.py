"""Rollout correction: the weights against a loop, what bounds them, extreme log-probs, and the diagnostics."""

import math

import pytest
import torch
from helpers.tables import normals
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fluvial.core.correction import LEVELS, MODES, Level, Mode, rollout_weights

every_mode = pytest.mark.parametrize("mode", MODES)
every_level = pytest.mark.parametrize("level", LEVELS)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 4))


def reference(gap: list[list[float]], mode: Mode, threshold: float, level: Level) -> list[list[float]]:
    result = []
    for steps in gap:
        row = []
        for step in steps:
            rho = math.exp(math.fsum(steps) if level == "trajectory" else step)
            inside = 1 / threshold <= rho <= threshold
            if mode == "truncate":
                row.append(min(rho, threshold))
            elif mode == "reject":
                row.append(rho if inside else 0.0)
            else:
                row.append(1.0 if inside else 0.0)
        result.append(row)
    return result


@every_mode
@every_level
@given(shape=shapes, seed=st.integers(0, 10_000), spread=st.floats(0, 3), threshold=st.floats(1.001, 10))
def test_weights_and_diagnostics_are_those_of_the_loop_one_would_write(
    mode: Mode, level: Level, shape: tuple[int, int], seed: int, spread: float, threshold: float
) -> None:
    old, noise = normals(seed, 2, *shape)
    rollout = old - spread * noise
    learned = [each.clone().requires_grad_() for each in (old, rollout)]
    got, info = rollout_weights(*learned, mode=mode, threshold=threshold, level=level)
    assert not got.requires_grad  # a weight is a constant of the loss
    gap = (old - rollout).tolist()
    want = torch.tensor(reference(gap, mode, threshold, level), dtype=torch.float64)
    assert_close(got, want, rtol=1e-12, atol=0)

    flat = [step for steps in gap for step in steps]
    n = len(flat)
    sizes = sorted(abs(d) for d in flat)
    weights = want.flatten().tolist()
    squares = math.fsum(w * w for w in weights)
    rho = torch.tensor(flat).double() if level == "step" else torch.tensor(gap).double().sum(1, keepdim=True).expand(shape)
    bound = math.log(threshold)
    outside = rho > bound if mode == "truncate" else rho.abs() > bound
    expected = (
        math.fsum(sizes) / n,
        sizes[math.ceil(0.99 * (n - 1))],
        sizes[-1],
        math.fsum(math.exp(d) - 1 - d for d in flat) / n,
        math.fsum(math.exp(2 * d) - 1 for d in flat) / n,
        math.fsum(weights) ** 2 / (n * squares) if squares else 0.0,
        outside.double().mean().item(),
    )
    for name, value, number in zip(info._fields, info, expected, strict=True):
        assert value.shape == ()
        assert value.item() == pytest.approx(number, rel=1e-9, abs=1e-13), name


@every_mode
@every_level
def test_programs_that_agree_change_nothing(mode: Mode, level: Level) -> None:
    old = normals(0, 5, 3)
    weight, info = rollout_weights(old, old.clone(), mode=mode, threshold=1.0, level=level)
    assert torch.equal(weight, torch.ones(5, 3).double())
    assert [value.item() for value in info] == [0, 0, 0, 0, 0, 1, 0]


@every_level
def test_a_log_prob_that_is_infinite_is_bounded(level: Level) -> None:
    inf = torch.inf
    old = torch.tensor([[inf, 0.0], [0.0, -inf], [0.3, 0.0]])
    rollout = torch.tensor([[0.0, 0.1], [0.0, 0.0], [0.2, 0.0]])
    # By step: d = +inf, -0.1; 0, -inf; 0.1, 0. By trajectory +inf, -inf, 0.1.
    weight, info = rollout_weights(old, rollout, mode="truncate", threshold=2.0, level=level)
    e = math.exp
    wants = {"step": [[2, e(-0.1)], [1, 0], [e(0.1), 1]], "trajectory": [[2, 2], [0, 0], [e(0.1), e(0.1)]]}
    assert_close(weight, torch.tensor(wants[level], dtype=torch.float32))
    assert not any(value.isnan() for value in info)
    assert info.gap_p99 == info.gap_mean == info.kl == info.chi2 == inf
    for mode, inside in (("mask", [1, 1]), ("reject", [e(0.1), 1 if level == "step" else e(0.1)])):
        assert mode in ("mask", "reject")
        weight, info = rollout_weights(old, rollout, mode=mode, threshold=2.0, level=level)  # type: ignore[arg-type]
        outside = [[0, e(-0.1) if mode == "reject" else 1], [1, 0]] if level == "step" else [[0, 0], [0, 0]]
        assert_close(weight, torch.tensor([*outside, inside], dtype=torch.float32))
        assert not any(value.isnan() for value in info)


@every_mode
@every_level
@pytest.mark.parametrize("gap", [1e3, -1e3, 3e38, -3e38, torch.inf, -torch.inf, 88.8])
def test_a_gap_beyond_the_exponential_is_bounded(mode: Mode, level: Level, gap: float) -> None:
    old = torch.tensor([[gap, 0.0], [0.0, 0.0]])
    for threshold in (1.0, 2.0, 1e30):
        weight, info = rollout_weights(old, torch.zeros(2, 2), mode=mode, threshold=threshold, level=level)
        assert weight.isfinite().all()
        assert bool((weight >= 0).all())
        assert float(weight.max()) <= threshold * (1 + 1e-6)
        assert not any(value.isnan() for value in info)
        assert 0 <= info.effective.item() <= 1 + 1e-6


@every_mode
def test_what_is_rejected_altogether_is_worth_no_sample(mode: Mode) -> None:
    old, rollout = torch.full((3, 2), -200.0), torch.zeros(3, 2)
    weight, info = rollout_weights(old, rollout, mode=mode, threshold=2.0)
    assert weight.tolist() == [[0, 0]] * 3
    assert info.effective.item() == 0


@every_mode
@every_level
def test_a_difference_that_is_not_a_number_is_not_silent(mode: Mode, level: Level) -> None:
    old, rollout = torch.zeros(3, 2), torch.zeros(3, 2)
    old[1, 0] = torch.nan
    where = r"\[\[1, 0\]\]" if level == "step" else r"\[\[1, 0\], \[1, 1\]\]"
    with pytest.raises(ValueError, match=f"rollout_weights: log_prob_old - log_prob_rollout is NaN .*{where}"):
        rollout_weights(old, rollout, mode=mode, threshold=2.0, level=level)

    def unread(scale: Tensor) -> Tensor:
        return rollout_weights(scale * old, rollout, mode=mode, threshold=2.0, level=level)[0]

    got = torch.func.vmap(unread)(torch.ones(1))[0]
    want = [[False, False], [True, level == "trajectory"], [False, False]]
    assert got.isnan().tolist() == want


def test_sums_and_differences_of_extreme_log_probs() -> None:
    old = torch.tensor([[torch.inf, -torch.inf]])
    with pytest.raises(ValueError, match=r"NaN \(trajectory\) at indices \[\[0, 0\], \[0, 1\]\]"):
        rollout_weights(old, torch.zeros(1, 2), mode="truncate", threshold=2.0, level="trajectory")
    assert rollout_weights(old, torch.zeros(1, 2), mode="truncate", threshold=2.0)[0].tolist() == [[2, 0]]
    old, rollout = (t.bfloat16() for t in normals(0, 2, 41, 3) / 100 - 1.4)
    weight, info = rollout_weights(old, rollout, mode="truncate", threshold=2.0)
    assert {t.dtype for t in (weight, *info)} == {torch.float32}
    assert_close(weight.double(), torch.exp(old.double() - rollout.double()), rtol=1e-6, atol=0)


@every_mode
@every_level
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_an_empty_batch_is_answered(mode: Mode, level: Level, shape: tuple[int, int]) -> None:
    weight, info = rollout_weights(torch.empty(shape), torch.empty(shape), mode=mode, threshold=2.0, level=level)
    assert weight.shape == shape
    assert [value.item() for value in info] == [0] * len(info)
