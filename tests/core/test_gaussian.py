"""The Gaussian of every sampler: mean, draw, log-density, KL, their gradients, dtypes and layouts."""

import math

import pytest
import torch
from helpers.refusals import refuses
from helpers.tables import (
    ETA_CONDITION,
    EVENTS,
    SAMPLERS,
    STOCHASTIC,
    SamplerRow,
    etas,
    normals,
    reference_coefficients,
)
from helpers.tolerances import log_prob_tolerance, tolerance
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from fluvial.core.gaussian import FORMS, REDUCTIONS, Form, Reduction, draw, kl, log_prob, mean, sample
from fluvial.core.transitions import Transition, dance_sde, ode

every_sampler = pytest.mark.parametrize("row", SAMPLERS, ids=lambda row: row.name)
every_stochastic_sampler = pytest.mark.parametrize("row", STOCHASTIC, ids=lambda row: row.name)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
events = st.sampled_from(EVENTS)
seeds = st.integers(0, 2**32)

STEP = dance_sde(torch.tensor([0.9, 0.5, 0.3]), torch.tensor([0.7, 0.4, 0.1]), eta=0.6)  # float32, batch of 3


def view(scalar: Tensor, like: Tensor) -> Tensor:
    return scalar.reshape(-1, *[1] * (like.ndim - 1))


def double(transition: Transition) -> Transition:
    return Transition(*(coefficient.double() for coefficient in transition))


@every_sampler
@given(data=st.data(), eta=etas, event=events, seed=seeds)
def test_mean_and_sample(row: SamplerRow, data: st.DataObject, eta: float, event: tuple[int, ...], seed: int) -> None:
    levels = data.draw(row.levels)
    x, v, noise = normals(seed, 3, len(levels[0]), *event)
    a, b, std = (view(c, x) for c in reference_coefficients(row, *levels, eta))
    transition = row.bind(eta)(*levels)
    # Coefficients below 25 = 1 / (2 (1 - level)), themselves known to ETA_CONDITION, times normal draws below 8.
    limit = tolerance("coefficients", torch.float64, condition=25 * ETA_CONDITION * 8)
    assert_close(mean(transition, x, v), a * x + b * v, **limit)
    assert_close(sample(transition, x, v, noise), a * x + b * v + std * noise, **limit)


@every_stochastic_sampler
@given(data=st.data(), eta=etas, event=events, seed=seeds)
def test_density_is_that_of_torch(
    row: SamplerRow, data: st.DataObject, eta: float, event: tuple[int, ...], seed: int
) -> None:
    levels = data.draw(row.levels)
    x, v, z = normals(seed, 3, len(levels[0]), *event)
    transition = row.bind(eta)(*levels)
    a, b, std = (view(c, x) for c in transition)
    x_next = a * x + b * v + 1.5 * std * z
    terms = Normal(a * x + b * v, std.expand_as(x)).log_prob(x_next).reshape(len(x), -1)
    magnitude = x_next.abs() + (a * x).abs() + (b * v).abs()
    wants: dict[Reduction, Tensor] = {"mean": terms.mean(1), "sum": terms.sum(1)}
    for reduction, want in wants.items():
        limit = log_prob_tolerance(
            torch.float64, residual=1.5 * std * z, std=transition.std, magnitude=magnitude, reduction=reduction
        )
        assert_close(log_prob(transition, x, v, x_next, reduction=reduction), want, **limit)
    x, v, x_next = normals(seed, 3, len(levels[0]), *event)
    n = math.prod(event)
    counts: dict[Reduction, int] = {"mean": 1, "sum": n}
    for reduction, count in counts.items():
        density, no_const, unscaled = (log_prob(transition, x, v, x_next, form=f, reduction=reduction) for f in FORMS)
        assert_close(no_const, unscaled / (2 * transition.std**2), **tolerance("log_prob", torch.float64))
        constant = count * (transition.std.log() + 0.5 * math.log(2 * math.pi))
        limit = tolerance("log_prob", torch.float64, condition=(no_const.abs() + constant.abs()).max().item())
        assert_close(density, no_const - constant, **limit)
        residual = (x_next - mean(transition, x, v)).reshape(len(x), -1)
        assert_close(unscaled, -(residual**2).mean(1) * count, **tolerance("log_prob", torch.float64, reduced=n))


@every_stochastic_sampler
@given(data=st.data(), reduction=st.sampled_from(REDUCTIONS), eta=etas, event=events, seed=seeds)
def test_the_gradient_is_the_published_one(
    row: SamplerRow, data: st.DataObject, reduction: Reduction, eta: float, event: tuple[int, ...], seed: int
) -> None:
    levels = data.draw(row.levels)
    x, v, x_next = (t.requires_grad_() for t in normals(seed, 3, len(levels[0]), *event).unbind())
    weight = normals(seed + 1, len(levels[0]))  # grad_output other than 1
    transition = row.bind(eta)(*levels)
    got = torch.autograd.grad(log_prob(transition, x, v, x_next, reduction=reduction), (x, v, x_next), weight)
    a, b, std = (view(c, x) for c in transition)
    n = math.prod(event) if reduction == "mean" else 1
    per_residual = view(weight, x) / (std**2 * n)
    pull = per_residual * (x_next - a * x - b * v).detach()
    # The residual is a difference of terms of this size.
    magnitude = (x_next.abs() + (a * x).abs() + (b * v).abs()).detach() * per_residual.abs() * (1 + a.abs() + b.abs())
    limit = tolerance("log_prob", torch.float64, condition=magnitude.max().item())
    for gradient, want in zip(got, (a * pull, b * pull, -pull), strict=True):
        assert_close(gradient, want, **limit)


@every_stochastic_sampler
@every_reduction
def test_the_gradient_of_a_drawn_log_prob_is_that_of_a_recorded_one(row: SamplerRow, reduction: Reduction) -> None:
    """The sample is a constant of the log-probability, though gradients flow through the sample itself."""
    grid = row.grid(10).double()
    transition = row.bind(0.6)(grid[2:5], grid[3:6])
    x, v, noise = (t.requires_grad_() for t in normals(3, 3, 3, 4).unbind())
    x_next, drawn = draw(transition, x, v, noise, reduction=reduction)
    scored = log_prob(transition, x, v, x_next.detach(), reduction=reduction)
    assert torch.equal(x_next, sample(transition, x, v, noise))
    for variable in (x, v):
        got, want = (torch.autograd.grad(value.sum(), variable, retain_graph=True)[0] for value in (drawn, scored))
        assert torch.equal(got, want)
        assert want.abs().max() > 0
    assert torch.autograd.grad(x_next.sum(), noise)[0].abs().min() > 0


@every_stochastic_sampler
@given(data=st.data(), eta=etas, event=events, seed=seeds)
def test_kl_is_that_of_the_two_steps(
    row: SamplerRow, data: st.DataObject, eta: float, event: tuple[int, ...], seed: int
) -> None:
    levels = data.draw(row.levels)
    v, v_ref = normals(seed, 2, len(levels[0]), *event)
    transition = row.bind(eta)(*levels)
    _, b, std = (view(c, v).expand_as(v) for c in transition)
    # The two means share a x, which therefore drops out.
    got = kl(transition, v, v_ref)
    exact = kl_divergence(Normal(b * v, std), Normal(b * v_ref, std)).reshape(len(v), -1).mean(1)
    condition = ((b / std) ** 2 * (v.abs() + v_ref.abs()) ** 2).max().item()
    assert_close(got, exact, **tolerance("log_prob", torch.float64, condition=condition, reduced=math.prod(event)))
    assert bool((got > 0).all())
    assert torch.equal(kl(transition, v, v), torch.zeros_like(got))
    n = math.prod(event)
    assert_close(kl(transition, v, v_ref, reduction="sum"), n * got, **tolerance("log_prob", torch.float64, reduced=n))


@every_reduction
@given(seed=seeds, distance=st.floats(1e-6, 10))
def test_the_gradient_of_kl_vanishes_only_at_the_reference(reduction: Reduction, seed: int, distance: float) -> None:
    transition = double(STEP)
    v_ref, offset = normals(seed, 2, 3, 5)
    v = (v_ref + distance * offset).requires_grad_()
    (gradient,) = torch.autograd.grad(kl(transition, v, v_ref, reduction=reduction).sum(), v)
    _, b, std = (view(c, v) for c in transition)
    want = (b / std) ** 2 * (v - v_ref).detach() / (5 if reduction == "mean" else 1)
    assert_close(gradient, want, rtol=1e-12, atol=0)
    assert bool((gradient != 0).all())
    (at_reference,) = torch.autograd.grad(kl(transition, v, v.detach(), reduction=reduction).sum(), v)
    assert torch.equal(at_reference, torch.zeros_like(v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_coefficients_without_a_dimension_promote_half_precision(dtype: torch.dtype) -> None:
    """A 0-d float32 coefficient does not promote a bfloat16 tensor by itself: without an upcast, the error is 2^-8."""
    step, halves = Transition(*(c[0] for c in STEP)), normals(11, 4, 3, 1271).to(dtype).unbind()
    for function in (sample, log_prob, kl):
        tensors = halves[:2] if function is kl else halves[:3]
        got, want = function(step, *tensors), function(double(step), *(tensor.double() for tensor in tensors))
        assert got.dtype == torch.float32
        assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_dtypes_of_results_and_gradients() -> None:
    x, v, x_next = normals(0, 3, 3, 5, dtype=torch.float32)
    assert log_prob(double(STEP), x, v, x_next).dtype == torch.float64
    assert log_prob(STEP, x, v.double(), x_next).dtype == torch.float64
    assert mean(STEP, x.bfloat16(), v).dtype == torch.float32
    x, v, x_next = normals(0, 3, 3, 5, dtype=torch.bfloat16)
    v.requires_grad_()
    log_prob(STEP, x, v, x_next).sum().backward()
    assert v.grad is not None
    assert v.grad.dtype == torch.bfloat16
    a, b, std = (view(c, x) for c in STEP)
    want = (x_next.float() - a * x.float() - b * v.detach().float()) * b / (std**2 * 5)
    assert_close(v.grad, want.bfloat16(), rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)


@pytest.mark.parametrize("event", [(41, 31), (1, 1), (3, 5)])
def test_a_non_contiguous_input_is_the_same_input(event: tuple[int, int]) -> None:
    x, v, x_next = (t.transpose(1, 2) for t in normals(2, 3, 3, *reversed(event), dtype=torch.float32).unbind())
    strided = [torch.stack([t, t], dim=-1)[..., 0] for t in (x, v, x_next)]
    expanded = [t[:1].expand(3, *event) for t in (x, v, x_next)]
    for tensors in ([x, v, x_next], strided, expanded):
        dense = [t.contiguous() for t in tensors]
        # The order of the sum follows the layout; nothing else may.
        limit = tolerance("log_prob", torch.float32, reduced=math.prod(event), condition=10)
        assert_close(log_prob(STEP, *tensors), log_prob(STEP, *dense), **limit)
        assert_close(kl(STEP, *tensors[:2]), kl(STEP, *dense[:2]), **limit)
        assert torch.equal(sample(STEP, *tensors), sample(STEP, *dense))


def test_extreme_values_stay_finite_or_ordered() -> None:
    x = torch.full((3, 41), 6e4, dtype=torch.float16)
    got = log_prob(STEP, x, -x, x, form="unscaled", reduction="sum")
    a, b, _ = (c.double() for c in STEP)
    value = x[0, 0].double()
    assert_close(got.double(), -41 * (value - a * value + b * value) ** 2, **tolerance("log_prob", torch.float16))
    step = Transition(*(c[0] for c in STEP))
    x = torch.zeros(4, 41)
    far = torch.tensor([0.0, 1e6, 1e15, 1e30])[:, None].expand_as(x)
    got = log_prob(step, x, x, far)
    assert not bool(got.isnan().any())
    assert bool((got[1:] < got[:-1]).all())
    assert got[3] == -torch.inf  # 1e60 is beyond float32
    assert bool(log_prob(step._replace(std=torch.tensor(1e-15)), x, x, x).isfinite().all())


@pytest.mark.parametrize("form", ["density", "no_const"])
def test_a_deterministic_step_has_no_density(form: Form) -> None:
    x = torch.zeros(3, 5)
    for step, where in (
        (ode(torch.tensor([0.9, 0.5, 0.3]), 0.1), r"samples \[0, 1, 2\]"),
        (STEP._replace(std=torch.tensor([0.1, 0.0, 0.1])), r"samples \[1\]"),
        (STEP._replace(std=torch.tensor([0.1, 0.1, torch.nan])), r"samples \[2\]"),
        (ode(torch.tensor(0.5), 0.1), "every sample"),
    ):
        refuses(f"log_prob: std is not positive for {where}.*eta > 0.*unscaled", log_prob, step, x, x, x, form=form)
        refuses(f"kl: std is not positive for {where}.*eta > 0", kl, step, x, x)
        assert log_prob(step, x, x, x, form="unscaled").tolist() == [0, 0, 0]


def test_where_values_cannot_be_read_the_answer_is_nan() -> None:
    x, v, x_next = normals(0, 3, 3, 5)
    std = torch.tensor([0.1, 0.0, 0.2], dtype=torch.float64)

    def one(std: Tensor, x: Tensor, v: Tensor, x_next: Tensor) -> tuple[Tensor, Tensor]:
        step = Transition(torch.ones_like(std), torch.ones_like(std), std)
        return log_prob(step, x[None], v[None], x_next[None])[0], kl(step, x[None], v[None])[0]

    for got in torch.func.vmap(one)(std, x, v, x_next):
        assert got.isnan().tolist() == [False, True, False]
    # At residual 0 a division alone would give NaN; away from it an infinity, which would pass as a (bad) density.
    step = Transition(torch.ones(3).double(), torch.ones(3).double(), std)
    with FlopCounterMode(display=False):
        gradient = torch.func.grad(lambda v: log_prob(step, x, v, x_next)[1])(v)
    assert bool(gradient[1].isnan().all())
