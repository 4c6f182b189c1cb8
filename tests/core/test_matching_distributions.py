"""Distribution matching: gradients of the published forms, renoising, and targets that need no clean sample."""

import math
from functools import partial

import pytest
import torch
from helpers.tables import normals
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fluvial.core.distill import (
    MATCH_FORMS,
    MatchForm,
    ambient_velocity,
    ambient_weight,
    consistency_loss,
    matching_loss,
    noise_weight,
    renoise,
    snr_weight,
)
from fluvial.core.flow_matching import interpolate

seeds = st.integers(0, 10_000)
levels = st.tuples(st.floats(0, 0.95), st.floats(0.01, 1)).map(lambda pair: (pair[0], pair[0] + (1 - pair[0]) * pair[1]))


@given(seed=seeds, form=st.sampled_from(MATCH_FORMS))
def test_the_gradient_is_that_of_the_published_form(seed: int, form: MatchForm) -> None:
    x0, d, reference = normals(seed, 3, 4, 3, 5)
    x0.requires_grad_()
    (gradient,) = torch.autograd.grad(matching_loss(x0, d, reference, form=form, huber=0.1).sum(), x0)
    scale = (x0 - reference).abs().mean((1, 2), keepdim=True).detach() * 15
    published = {"dmd": -d / scale, "square": -2 * d / scale, "huber": -d / torch.sqrt(d**2 + 0.01) / scale}
    assert_close(gradient, published[form])
    target = x0.detach() + (d / scale * 15 if form == "dmd" else d)
    square = ((x0.detach() - target) ** 2).mean((1, 2))
    values = {"dmd": square / 2, "square": square / scale.flatten() * 15}
    if form in values:
        assert_close(matching_loss(x0, d, reference, form=form).detach(), values[form])


@given(seed=seeds, form=st.sampled_from(MATCH_FORMS))
def test_a_student_that_matches_its_teacher_stays(seed: int, form: MatchForm) -> None:
    x0, reference = normals(seed, 2, 4, 3)
    x0.requires_grad_()
    loss = matching_loss(x0, torch.zeros_like(x0), reference, form=form)
    assert not torch.autograd.grad(loss.sum(), x0)[0].any()
    assert not matching_loss(x0, torch.zeros_like(x0), x0, form=form).any()  # nor is the scale 0 then divided by


@pytest.mark.parametrize("form", MATCH_FORMS)
def test_exact_scores_lead_to_the_teachers_mean(form: MatchForm) -> None:
    """Student N(m, c^2), teacher N(1, c^2), both known exactly: every form ends at m = 1."""
    mean, spread, size = torch.tensor(-0.5).double().requires_grad_(), 0.4, 64
    for step in range(400):
        z, e = normals(step, 2, size, 16)
        x0, t = mean + spread * z, torch.linspace(0.05, 0.95, size).double()
        xt, level = interpolate(x0.detach(), e, t), t[:, None]

        def denoise(m: float, xt: torch.Tensor = xt, level: torch.Tensor = level) -> torch.Tensor:
            gain = (1 - level) * spread**2 / ((1 - level) ** 2 * spread**2 + level**2)
            return m + gain * (xt - (1 - level) * m)

        teacher, fake = denoise(1.0), denoise(mean.item())
        slope = ((1 - level) ** 2 / level**2).flatten()  # the gradient of the diffused KL, up to this factor
        kl = (1 - t) ** 2 * (mean.item() - 1) / ((1 - t) ** 2 * spread**2 + t**2)
        assert_close((fake - teacher)[:, 0] * slope, kl)
        (gradient,) = torch.autograd.grad(matching_loss(x0, teacher - fake, teacher, form=form, huber=0.1).mean(), mean)
        mean = (mean - 0.05 * gradient).detach().requires_grad_()
    assert mean.item() == pytest.approx(1, abs=0.05)


@given(seed=seeds, pair=levels)
def test_a_renoised_sample_is_one_of_its_level(seed: int, pair: tuple[float, float]) -> None:
    s, t = pair
    x0, e, z = normals(seed, 3, 4, 3)
    alpha = (1 - t) / (1 - s)
    got = renoise(interpolate(x0, e, s), z, s, t)
    beta = math.sqrt(max(t**2 - (s * alpha) ** 2, 0))
    assert_close(got, (1 - t) * x0 + s * alpha * e + beta * z)  # noise of variance (s alpha)^2 + beta^2 = t^2
    assert torch.equal(renoise(x0, z, 0.0, t), interpolate(x0, z, t))
    assert_close(ambient_velocity(x0, z, 0.0, t), z - x0)
    assert_close(noise_weight(e, z, 0.0, t), torch.ones(4).double())


@given(pair=levels, mean=st.floats(-2, 2), spread=st.floats(0.1, 2))
def test_the_ambient_target_has_the_velocitys_regression(pair: tuple[float, float], mean: float, spread: float) -> None:
    """On Gaussians: its mean, and its covariance with x_t, are those of noise - x0."""
    s, t = pair
    unit = torch.eye(3).double()  # x_s and noise as linear functions of (1, x_s - E x_s, noise)
    const, x_s, z = unit[0], unit[1] + (1 - s) * mean * unit[0], unit[2]
    variance = torch.tensor([0.0, ((1 - s) * spread) ** 2 + s**2, 1.0], dtype=torch.float64)
    noisy, target = renoise(x_s[None], z[None], s, t)[0], ambient_velocity(x_s[None], z[None], s, t)[0]
    assert_close(target @ const, torch.tensor(-mean, dtype=torch.float64))
    assert_close(noisy @ const, torch.tensor((1 - t) * mean, dtype=torch.float64))
    assert_close((noisy * target * variance).sum(), torch.tensor(t - (1 - t) * spread**2, dtype=torch.float64))


@given(seed=seeds, pair=levels)
def test_the_weight_is_a_ratio_of_densities_per_dimension(seed: int, pair: tuple[float, float]) -> None:
    s, t = pair
    e, z = normals(seed, 2, 4, 6)
    mixed = renoise(s * e, z, s, t) / t  # the noise in x_t of a clean sample that is 0
    normal = torch.distributions.Normal(torch.zeros(()).double(), 1.0)
    expected = torch.exp((normal.log_prob(mixed) - normal.log_prob(z)).mean(1))
    assert_close(noise_weight(e, z, s, t), expected)


@given(seed=seeds, pair=levels, largest=st.floats(0.1, 100))
def test_the_ambient_weight_is_that_of_the_published_code(seed: int, pair: tuple[float, float], largest: float) -> None:
    """It multiplies both velocities by beta, and their squared distance by 1 / beta^2, bounded."""
    s, t = pair
    x, z, v = normals(seed, 3, 4, 3)
    beta, u = renoise(0 * z, torch.ones_like(z), s, t)[0, 0], ambient_velocity(x, z, s, t)
    pair_of = torch.tensor(pair, dtype=torch.float64)
    published = ((beta * v - beta * u) ** 2).mean(1) * min(1 / beta**2, largest)
    weight = ambient_weight(*pair_of, largest=largest)
    assert_close(weight * ((v - u) ** 2).mean(1), published)
    for given_levels in ((pair_of[:1].expand(4), pair_of[1]), (pair_of[0], pair_of[1:].expand(4))):  # one of them per sample
        assert_close(ambient_weight(*given_levels, largest=largest), weight.expand(4))


@given(seed=seeds)
def test_a_conditional_mean_is_consistent(seed: int) -> None:
    """Of draws around the mean h the product with another one averages to 0, of others to the means' squared distance."""
    h, gap = normals(seed, 2, 1, 3)
    noise = normals(seed + 1, 1, 2000, 3)[0]
    draws = torch.cat([noise, -noise])  # every pair of draws, whose mean is exactly h + gap
    expected = (h + gap + draws).mean(0, keepdim=True)
    products = consistency_loss(h.expand(4000, 3), h + gap + draws, expected.expand(4000, 3))
    assert_close(products.mean(), (gap**2).mean())


def test_the_signal_to_noise_ratio_is_bounded() -> None:
    assert_close(snr_weight(torch.tensor([0.5, 0.25, 0.0, 1.0]), largest=5.0), torch.tensor([1.0, 5.0, 5.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_levels_are_at_least_float32(dtype: torch.dtype) -> None:
    s, t = torch.tensor([0.1, 0.3]).to(dtype), torch.tensor([0.7, 0.9]).to(dtype)
    precise = torch.promote_types(dtype, torch.float32)
    for weigh in (partial(snr_weight, s, largest=1e3), partial(ambient_weight, s, t)):
        assert weigh().dtype == precise
    assert torch.equal(snr_weight(s, largest=1e3), snr_weight(s.to(precise), largest=1e3))


@given(seed=seeds)
def test_the_ambient_velocity_of_a_clean_sample_is_the_plain_one(seed: int) -> None:
    """At every level up to and with 0, where a noisy level may be drawn."""
    x, noise = normals(seed, 2, 4, 3)
    level = torch.tensor([0.0, 1e-6, 0.5, 1.0]).double()
    assert_close(ambient_velocity(x, noise, 0.0, level), noise - x)
