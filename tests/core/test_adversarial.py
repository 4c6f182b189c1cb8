"""Adversarial losses: what a discriminator and a generator that know nothing, or all, have to pay."""

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


def test_sure_logits_stay_finite() -> None:
    """A generator that is seen through pays linearly; what is right costs nothing."""
    sure = torch.tensor([1e4])
    assert float(generator_loss(-sure)) == 1e4
    assert float(generator_loss(sure)) == float(discriminator_loss(-sure, sure)) == 0
