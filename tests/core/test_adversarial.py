"""Adversarial losses: what a discriminator and a generator that know nothing, or all, have to pay."""

import math

import pytest
import torch
from helpers.tables import normals
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fluvial.core.adversarial import discriminator_loss, generator_loss

seeds = st.integers(0, 10_000)


@given(seed=seeds)
def test_they_are_cross_entropies(seed: int) -> None:
    """Of the two answers, in nats; the gradient of the generator is that of a probability that it has not reached."""
    logit, real = 3 * normals(seed, 2, 5)
    chance, chance_real = (1 / (1 + torch.exp(-each)) for each in (logit, real))
    assert_close(generator_loss(logit), -torch.log(chance))
    assert_close(discriminator_loss(logit, real), -torch.log(1 - chance) - torch.log(chance_real))
    slope = torch.func.grad(lambda each: generator_loss(each).sum())(logit)
    assert_close(slope, chance - 1)


def test_at_no_opinion_they_are_log_2_each() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert_close(generator_loss(zero), zero + math.log(2))
    assert_close(discriminator_loss(zero, zero), zero + 2 * math.log(2))


def test_sure_logits_stay_finite() -> None:
    """A generator that is seen through pays linearly; what is right costs nothing."""
    sure = torch.tensor([1e4])
    assert float(generator_loss(-sure)) == 1e4
    assert float(generator_loss(sure)) == float(discriminator_loss(-sure, sure)) == 0


@pytest.mark.long
@given(seed=seeds, p=st.floats(0.05, 0.95), q=st.floats(0.05, 0.95))
def test_the_best_discriminator_is_the_log_ratio_of_the_densities(seed: int, p: float, q: float) -> None:
    """Of samples with two values, of which the generated ones take the first with probability q, real ones with p."""
    best = torch.tensor([p / q, (1 - p) / (1 - q)], dtype=torch.float64).log()

    def mean(logit: torch.Tensor) -> torch.Tensor:
        generated, real = torch.tensor([q, 1 - q]), torch.tensor([p, 1 - p])
        zero = discriminator_loss(0 * logit, 0 * logit) / 2  # what the other half of the pair adds where it is left out
        of_generated, of_real = discriminator_loss(logit, 0 * logit) - zero, discriminator_loss(0 * logit, logit) - zero
        return (generated * of_generated + real * of_real).sum()

    assert_close(torch.func.grad(mean)(best), torch.zeros_like(best), rtol=0, atol=1e-7)
    assert float(mean(best)) <= float(mean(best + 0.1 * normals(seed, 2))) + 1e-12


def test_half_precision_is_computed_in_float32() -> None:
    assert generator_loss(torch.zeros(2, dtype=torch.bfloat16)).dtype == torch.float32
    both = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64)
    assert discriminator_loss(*both).dtype == torch.float64
