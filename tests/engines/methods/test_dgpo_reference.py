"""DGPO's preference of a group is measured against the base model, or against the old policy."""

from typing import Literal

import pytest
import torch

from fluvial.engines.methods.table import Dgpo
from fluvial.engines.sampling.items.noised import NoisedSamples


@pytest.mark.parametrize(("reference", "policy"), [("base", "ref"), ("old", "old")])
def test_the_error_of_the_reference_is_that_of_its_policy(reference: Literal["base", "old"], policy: str) -> None:
    """What an item adds to its group's sigmoid is beta A (error - error of the reference's prediction)."""
    generator = torch.Generator().manual_seed(0)
    x, v, target, ref, old = torch.randn(5, 3, 4, generator=generator)
    advantage = torch.tensor([1.0, -2.0, 0.5])
    items = NoisedSamples(
        x=x,
        level=torch.full((3,), 0.5),
        timestep=None,
        sample=torch.arange(3),
        signal=advantage,
        weight=torch.ones(3),
        x0=x,
        target=target,
        predictions={"ref": ref, "old": old},
    )
    expected = 3.0 * advantage * ((v - target).square().mean(1) - (items.predictions[policy] - target).square().mean(1))
    torch.testing.assert_close(Dgpo(beta=3.0, reference=reference).margin(v, items), expected)
