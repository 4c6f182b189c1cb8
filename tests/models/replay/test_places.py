"""Gather maps: the sample is found in inputs of every layout, in low precision too, and not where it is not."""

import pytest
import torch
from torch import Tensor

from fluvial.models.replay.places import locate, places_in_input, places_in_output


def samples(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS = {
    "channels after": lambda x, c: torch.cat([x, c], dim=1),
    "channels before": lambda x, c: torch.cat([c, x], dim=1),
    "tokens": lambda x, c: torch.cat([x.flatten(2).transpose(1, 2), c.flatten(2).transpose(1, 2)], dim=1),
    "guided": lambda x, c: torch.cat([x, c], dim=1).repeat(2, 1, 1, 1),
    "masked": lambda x, c: torch.where(torch.arange(8) < 3, c, x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_is_rebuilt_for_other_samples(layout: str, dtype: torch.dtype) -> None:
    """From the places and the other numbers, to the bit."""
    build = LAYOUTS[layout]
    x, c, other = samples(4, 8, 8), samples(4, 8, 8, seed=1)[:1].expand(3, -1, -1, -1), samples(4, 8, 8, seed=2)
    found = places_in_input(build(x, c).to(dtype), x)
    assert found is not None
    places, numbers = found
    rows = torch.cat([other.to(dtype).flatten(1)[:, None].expand(-1, numbers.shape[1], -1), numbers], dim=-1)
    assert torch.equal(places.gather(rows).transpose(0, 1).flatten(0, 1), build(other, c).to(dtype))


def test_equal_elements_are_told_apart_by_their_neighbours() -> None:
    """Elements of low precision may be equal in every sample; the order of the others decides."""
    have = torch.tensor([[1.0, 2, 3, 2, 5, 2]])
    assert locate(have, have).tolist() == [0, 1, 2, 3, 4, 5]
    assert locate(have[:, 2:], have).tolist() == [2, 3, 4, 5]
    assert locate(torch.tensor([[3.0, 7]]), have).tolist() == [2, -1]


def test_inputs_without_the_sample_are_not_taken_for_it() -> None:
    """Other noise, a scaled sample, less than half of it, and copies that differ."""
    x = samples(4, 8, 8)
    differing = torch.cat([x, x.roll(1, dims=1)])
    for leaf in (samples(4, 8, 8, seed=3), 2 * x, x[:, :1], differing, torch.arange(3), "text", x[:2]):
        assert places_in_input(leaf, x) is None


def test_a_velocity_is_a_part_of_the_output() -> None:
    output = samples(6, 4)
    found = places_in_output(output[:, :2], output)
    assert found is not None
    assert torch.equal(found.gather(output.flatten(1)), output[:, :2])
    assert places_in_output(output[:, :2] + 1, output) is None
    assert places_in_output(output[:, :2].double(), output) is None
    assert found == places_in_output(output[:, :2], output) != places_in_output(output[:, 1:3], output)
