"""The samplers' coefficients, every sampler at once: formulas, limits, the path they keep, the marginals they carry."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from helpers.tables import DTYPES, ETA_CONDITION, SAMPLERS, SIGMA_MAX, SamplerRow, etas, normals, reference_coefficients
from helpers.tolerances import COMPUTE_DTYPE, EXACT, tolerance
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fluvial.core import gaussian, transitions
from fluvial.core.random import fold_in, key, normal
from fluvial.core.rollout import rollout
from fluvial.core.transitions import Sampler, Transition, cps, dance_sde, ddim, flow_sde, ode

every_sampler = pytest.mark.parametrize("row", SAMPLERS, ids=lambda row: row.name)


@every_sampler
@given(data=st.data(), dtype=st.sampled_from(DTYPES), eta=etas)
def test_coefficients_are_the_formulas(row: SamplerRow, data: st.DataObject, dtype: torch.dtype, eta: float) -> None:
    level, level_next = (level.to(dtype) for level in data.draw(row.levels))
    if row.name == "ddim":
        # In half precision the upper levels round to 1, or to one another, where no step is left.
        level_next = level_next.clamp(max=0.99)
        level = torch.minimum(level, 0.9 * level_next)
    expected = reference_coefficients(row, level, level_next, eta)
    result = row.bind(eta)(level, level_next)
    for got, want in zip(result, expected, strict=True):
        assert got.dtype == COMPUTE_DTYPE[dtype]
        # A rounded level is an exact input all the same.
        assert_close(got.double(), want, **tolerance("coefficients", dtype, condition=ETA_CONDITION))


@every_sampler
@pytest.mark.parametrize("T", [1, 2, 7])
def test_coefficients_on_a_whole_schedule(row: SamplerRow, T: int) -> None:
    grid = row.grid(T).double()
    expected = reference_coefficients(row, grid[:-1], grid[1:], 0.7)
    for got, want in zip(row.bind(0.7)(grid[:-1], grid[1:]), expected, strict=True):
        assert_close(got, want, **tolerance("coefficients", torch.float64, condition=1 / (1 - SIGMA_MAX)))


@every_sampler
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_eta_zero_is_the_ode(row: SamplerRow, data: st.DataObject, seed: int) -> None:
    level, level_next = data.draw(row.levels)
    transition = row.bind(0.0)(level, level_next)
    x, v, noise = normals(seed, 3, len(level), 41)
    want = row.ode_step(level, level_next, x, v)
    assert torch.equal(transition.std, torch.zeros_like(level))
    # To the bit where the ODE is core's own; elsewhere dividing by the level magnifies a rounding.
    exact = row.ode_step is SAMPLERS[0].ode_step
    limit = EXACT if exact else tolerance("coefficients", torch.float64, condition=1 + 1 / level.min().item())
    for got in (gaussian.mean(transition, x, v), gaussian.sample(transition, x, v, noise)):
        assert_close(got, want, **limit)


@every_sampler
@given(data=st.data(), eta=etas)
def test_a_float_a_scalar_and_a_batch_agree(row: SamplerRow, data: st.DataObject, eta: float) -> None:
    level, level_next = data.draw(row.levels)
    sampler = row.bind(eta)
    batch = sampler(level, level_next)
    assert all(coefficient.shape == level.shape for coefficient in batch)
    assert all(coefficient.shape == (0,) for coefficient in sampler(level[:0], level_next[:0]))
    scalars = sampler(level[0], level_next[0])
    assert all(coefficient.shape == () for coefficient in scalars)
    floats = sampler(level[0].item(), level_next[0].item())  # type: ignore[arg-type]
    mixed = sampler(level[0], level_next[:1])
    learned = row.bind(torch.tensor(eta, dtype=level.dtype))(level, level_next)  # type: ignore[arg-type]
    for got, want in zip(learned, batch, strict=True):
        assert_close(got, want, rtol=1e-9, atol=1e-9)
    for one, of_batch, of_floats, of_mixed in zip(scalars, batch, floats, mixed, strict=True):
        assert_close(one, of_batch[0], rtol=0, atol=0)
        assert of_floats.dtype == torch.float32  # Python floats are float32 numbers, as everywhere in torch
        assert of_mixed.shape == (1,)
        assert_close(of_mixed[0], one, rtol=0, atol=0)


def _variance_defect(row: SamplerRow, transition: Transition, level: torch.Tensor, level_next: torch.Tensor) -> torch.Tensor:
    (_, noise), (_, noise_next) = row.path(level), row.path(level_next)
    from_eps = transition.a * noise + transition.b * row.output[1]
    return from_eps**2 + transition.std**2 - noise_next**2


@every_sampler
@given(data=st.data(), eta=etas)
def test_a_step_keeps_the_signal_and_the_noise_power(row: SamplerRow, data: st.DataObject, eta: float) -> None:
    # For x = signal x0 + noise eps and the exact model output, x_next = signal' x0 + (noise of power noise'^2).
    level, level_next = data.draw(row.levels)
    transition = row.bind(eta)(level, level_next)
    (signal, _), (signal_next, _) = row.path(level), row.path(level_next)
    limit = tolerance("coefficients", torch.float64, condition=50 * ETA_CONDITION)
    assert_close(transition.a * signal + transition.b * row.output[0], signal_next, **limit)
    if row.keeps_variance:
        assert_close(_variance_defect(row, transition, level, level_next), torch.zeros_like(level), **limit)


def _final_moments(sampler: Sampler, T: int, *, start: float, end: float, m: float, c: float) -> tuple[float, float]:
    """Carry N(m, c^2)'s noised marginal through T steps exactly: v = E[eps - x0 | x] is affine, so all stays Gaussian."""
    sigmas = torch.linspace(start, end, T + 1, dtype=torch.float64)
    mean, variance = (1 - start) * m, ((1 - start) * c) ** 2 + start**2
    for sigma, sigma_next in pairwise(sigmas):
        a, b, std = (coefficient.item() for coefficient in sampler(sigma, sigma_next))
        s = sigma.item()
        slope = (s - (1 - s) * c**2) / (((1 - s) * c) ** 2 + s**2)
        mean = a * mean + b * (-m + slope * (mean - (1 - s) * m))
        variance = (a + b * slope) ** 2 * variance + std**2
    return mean, variance


@pytest.mark.parametrize(
    "sampler",
    [ode, partial(flow_sde, eta=0.7, sigma_max=SIGMA_MAX), partial(dance_sde, eta=0.5)],
    ids=["ode", "flow", "dance"],
)
@pytest.mark.parametrize("end", [0.0, 0.2])
def test_marginals_are_carried_to_first_order(sampler: Sampler, end: float) -> None:
    # Not from sigma = 1: there Flow-SDE's rate is cut off at a level that depends on T, which has no order in dt.
    start, m, c = 0.9, 1.5, 0.6
    want = ((1 - end) * m, ((1 - end) * c) ** 2 + end**2)
    errors = []
    for T in (100, 200, 400):
        got = _final_moments(sampler, T, start=start, end=end, m=m, c=c)
        errors.append([abs(g - w) for g, w in zip(got, want, strict=True)])
    # The mean moves on a straight line, which every step follows exactly; the variance bends, and its error halves.
    assert all(mean_error < 1e-12 for mean_error, _ in errors)
    assert 1e-4 < errors[0][1] < 0.02
    for (_, coarse), (_, fine) in pairwise(errors):
        assert coarse / fine == pytest.approx(2, rel=0.05)


def test_sigma_max_counts_at_one_alone_and_may_differ_by_sample() -> None:
    sigma = torch.tensor([1.0, 1 - 5e-7, 1 - 1e-5, 0.9], dtype=torch.float64)
    first = flow_sde(sigma, 0.5, eta=0.7, sigma_max=0.8)
    second = flow_sde(sigma, 0.5, eta=0.7, sigma_max=0.9)
    assert (first.std != second.std).tolist() == [True, True, False, False]
    levels = torch.tensor([0.8, 0.9], dtype=torch.float64)
    batch = flow_sde(torch.ones(2).double(), 0.5, eta=0.7, sigma_max=levels)
    for sample, level in enumerate(levels):
        one = flow_sde(torch.tensor(1.0).double(), 0.5, eta=0.7, sigma_max=level)
        assert [c[sample].item() for c in batch] == [c.item() for c in one]


def test_cps_at_its_ends() -> None:
    sigma = torch.tensor([1.0, 0.6, 0.05], dtype=torch.float64)
    transition = cps(sigma, sigma / 2, eta=1)
    limit = tolerance("coefficients", torch.float64)
    assert_close(transition.std, sigma / 2, **limit)
    assert_close(transition.a, 1 - sigma / 2, **limit)
    assert_close(transition.a * sigma + transition.b, torch.zeros_like(sigma), **limit)  # nothing of eps is left
    transition = cps(torch.tensor(0.3), 0.0, eta=0.7)
    assert (transition.a.item(), transition.std.item()) == (1, 0)
    assert transition.b.item() == -torch.tensor(0.3).item()


def test_ddim_with_eta_one_is_the_ancestral_step_of_ddpm() -> None:
    ab, abn = torch.tensor([0.05, 0.4, 0.9], dtype=torch.float64), torch.tensor([0.1, 0.45, 0.99], dtype=torch.float64)
    x, eps = normals(0, 2, 3)
    alpha = ab / abn
    beta = 1 - alpha
    x0 = (x - (1 - ab).sqrt() * eps) / ab.sqrt()
    want = (abn.sqrt() * beta * x0 + alpha.sqrt() * (1 - abn) * x) / (1 - ab)
    transition = ddim(ab, abn, eta=1)
    limit = tolerance("coefficients", torch.float64, condition=20)
    assert_close(gaussian.mean(transition, x, eps), want, **limit)
    assert_close(transition.std**2, beta * (1 - abn) / (1 - ab), **limit)
    ab = 1 - torch.logspace(-6, -1, 200)
    assert not bool(ddim(ab[:-1].flip(0), ab[1:].flip(0) * 0 + ab[0], eta=1).b.isnan().any())


LEVELS = torch.tensor([1.0, 0.8, 0.3, 0.0])
DIRECT: dict[str, Any] = {
    "flow_sde": partial(transitions.flow_sde, eta=0.7, sigma_max=LEVELS[1]),
    "dance_sde": partial(transitions.dance_sde, eta=0.7),
    "cps": partial(transitions.cps, eta=0.7),
    "ddim": partial(transitions.ddim, eta=0.7),
    "ode": transitions.ode,
    "wan_sde": partial(transitions.wan_sde, eta=0.7, sigma_max=LEVELS[1]),
}


@pytest.mark.parametrize("name", transitions.SAMPLERS)
def test_a_bound_name_is_the_function_with_its_hyper_parameters(name: str) -> None:
    levels = LEVELS.flip(0) * 0.9 + 0.05 if name == "ddim" else LEVELS
    bound = transitions.bind(name, 0.0 if name == "ode" else 0.7, levels)
    got, want = bound(levels[:-1], levels[1:]), DIRECT[name](levels[:-1], levels[1:])
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert transitions.sampler_name(bound) == name
    assert set(transitions.SAMPLERS) == set(transitions.MAX_ETA) == {row.name for row in SAMPLERS}


@pytest.mark.parametrize(
    ("name", "eta", "message"),
    [
        ("flow-sde", 0.7, r"bind: sampler is 'flow-sde', expected one of .* \(did you mean 'flow_sde'\?\)"),
        ("sde", 0.7, "bind: sampler is 'sde', expected one of 'flow_sde', 'dance_sde', 'cps', 'ddim', 'ode'"),
        ("cps", 1.5, r"bind: eta is 1.5, expected a finite number in \[0, 1\]"),
        ("ddim", 1.5, r"bind: eta is 1.5, expected a finite number in \[0, 1\]"),
        ("dance_sde", -0.1, "bind: eta is -0.1, expected a finite number >= 0"),
        ("ode", 0.7, "bind: eta is 0.7, and ode draws no noise: use eta 0"),
    ],
)
def test_a_name_or_an_eta_that_is_none_is_named(name: str, eta: float, message: str) -> None:
    refuses(message, transitions.bind, name, eta, LEVELS)


def constant(level: Tensor, level_next: Tensor) -> transitions.Transition:
    return transitions.ode(level, level_next)._replace(std=torch.full_like(level, 0.1))


def test_a_custom_sampler_is_bound_as_it_is_and_rolls_out() -> None:
    bound = transitions.bind(constant, 0.7, LEVELS)
    assert bound is constant
    assert transitions.sampler_name(constant) == "constant"
    trajectory = rollout(lambda x, level, step: -x, torch.zeros(2, 3), LEVELS, transition=bound, key=key(0))
    assert trajectory.steps[0].tolist() == [0, 1, 2]
    assert torch.equal(trajectory.x_next[:, 0], 0.1 * normal(fold_in(fold_in(key(0), torch.arange(2)), 0), (2, 3)))


def test_a_custom_sampler_that_cannot_be_used_is_refused_in_one_line() -> None:
    step = transitions.ode(LEVELS[:-1], LEVELS[1:])
    broken: dict[str, Callable[..., object]] = {
        "fails when called as <lambda>(level, level_next)": lambda level: step,
        "fails when called": lambda level, level_next: level.reshape(7),
        "returns a tuple, expected a Transition": lambda level, level_next: tuple(step),
        "std is torch.int64, expected float16": lambda level, level_next: step._replace(
            std=torch.zeros(3, dtype=torch.int64)
        ),
        r"b has shape [2], expected [] or [3]": lambda level, level_next: step._replace(b=step.b[:2]),
    }
    for message, sampler in broken.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            transitions.bind(sampler, 0.7, LEVELS)  # type: ignore[arg-type]
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
