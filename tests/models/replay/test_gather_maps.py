"""Gather maps: the sample is found in inputs of every layout, in low precision too, and not where it is not."""

import pytest
import torch
from torch import Tensor

from fluvial.models.replay import gather_maps as maps


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
    build = LAYOUTS[layout]
    x, c, other = samples(4, 8, 8), samples(4, 8, 8, seed=1)[:1].expand(3, -1, -1, -1), samples(4, 8, 8, seed=2)
    found = maps.find_in_input(build(x, c).to(dtype), x)
    assert found is not None
    places, numbers = found
    rows = torch.cat([other.to(dtype).flatten(1)[:, None].expand(-1, numbers.shape[1], -1), numbers], dim=-1)
    assert torch.equal(places.gather(rows).transpose(0, 1).flatten(0, 1), build(other, c).to(dtype))


def test_elements_are_told_apart() -> None:
    """By the order of their neighbours; a number that one sample has by coincidence stands alone."""
    have = torch.tensor([[1.0, 2, 3, 2, 5, 2]])
    assert maps.locate_elements(have, have).tolist() == [0, 1, 2, 3, 4, 5]
    assert maps.locate_elements(have[:, 2:], have).tolist() == [2, 3, 4, 5]
    assert maps.locate_elements(torch.tensor([[3.0, 7]]), have).tolist() == [2, -1]
    assert maps.drop_coincidences(torch.tensor([-1, 2, -1, 0, 1, 2, 3])).tolist() == [-1, -1, -1, 0, 1, 2, 3]
    assert maps.drop_coincidences(torch.tensor([-1, 2, -1, 0, 1])).tolist() == [-1, 2, -1, 0, 1]  # its only place
    assert maps.drop_coincidences(torch.tensor([0, -1, 0, -1])).tolist() == [0, -1, 0, -1]  # every second channel


def test_inputs_without_the_sample_are_not_taken_for_it() -> None:
    x = samples(4, 8, 8)
    differing = torch.cat([x, x.roll(1, dims=1)])
    for leaf in (samples(4, 8, 8, seed=3), 2 * x, x[:, :1], differing, torch.arange(3), "text", x[:2]):
        assert maps.find_in_input(leaf, x) is None


def test_known_places_are_verified() -> None:
    """One sample of low precision has equal elements; places that several have shown are taken, and wrong ones refused."""
    x, c = samples(4, 8, 8).bfloat16(), samples(4, 8, 8, seed=1).bfloat16()
    build = LAYOUTS["masked"]
    found = maps.find_in_input(build(x, c), x)
    assert found is not None
    known, (one, held) = found[0], (x[:1], build(x, c)[:1])
    again = maps.find_in_input(held, one, [known])
    assert again is not None
    assert again[0] == known
    assert torch.equal(again[1], found[1][:1])
    rows = torch.cat([one.flatten(1)[:, None], again[1]], dim=-1)
    assert torch.equal(known.gather(rows)[:, 0], held)
    assert maps.find_in_input(held, one, [maps.GatherMap(known.index.roll(1), known.shape)]) is None
    changed = held.clone()
    changed[..., -1] += 1  # an element of the sample
    assert maps.find_in_input(changed, one, [known]) is None
    assert (
        maps.find_in_input(held, one, [maps.GatherMap(known.index[:64], (1, 8, 8))]) is not None
    )  # of another input: searched for


def test_a_velocity_is_a_part_of_the_output() -> None:
    output = samples(6, 4)
    found = maps.find_in_output(output[:, :2], output)
    assert found is not None
    assert torch.equal(found.gather(output.flatten(1)), output[:, :2])
    assert maps.find_in_output(output[:, :2] + 1, output) is None
    assert maps.find_in_output(output[:, :2].double(), output) is None
    assert found == maps.find_in_output(output[:, :2], output) != maps.find_in_output(output[:, 1:3], output)
    own = [maps.GatherMap(torch.arange(6), (3, 2))]
    assert maps.find_whole_inputs(own, [samples(3, 2)], 6) is None
    assert maps.find_whole_inputs(own, [samples(4, 2)], 6) is None
    assert maps.find_whole_inputs([maps.GatherMap(torch.tensor([0, 1, 3, 6]), (2, 2))], [samples(2, 2)], 3) is None  # a gap


def test_a_sample_behind_a_held_frame_is_found_in_larger_outputs() -> None:
    """A video whose first tokens are an image's, packed in another order, and its sound, which the network takes first."""
    x = torch.cat([samples(12), samples(6, seed=1)], dim=1)  # a video of 4 channels and 3 frames, and a sound
    held = samples(4, seed=2)[:1].expand(3, -1)
    video = torch.cat([held[:, None], x[:, :12].unflatten(1, (4, 3)).transpose(1, 2)], dim=1)  # [3, 4 frames, 4]
    sound = x[:, 12:].unflatten(1, (3, 2))
    found = [maps.find_in_input(given, x) for given in (sound, video)]
    whole = maps.find_whole_inputs([pair[0] for pair in found if pair is not None], (video, sound), 18)
    assert whole is not None
    assert whole.inputs == (1, 0)
    assert torch.equal(whole.join((sound, video)), torch.cat([video.flatten(1), sound.flatten(1)], dim=1))
    made = [places.gather(part.flatten(1)) for places, part in zip(whole.maps, (video, sound), strict=True)]
    assert torch.equal(torch.cat(made, dim=1), x)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 2, 5])
def test_one_sample_in_low_precision_is_found_as_a_block(axis: int, first: int) -> None:
    x = samples(4, 3, 6)[:1].bfloat16()
    shape = [4, 3, 6]
    shape[axis] = 5
    before, after = samples(*shape, seed=1)[0].bfloat16().split([first, 5 - first], dim=axis)
    leaf = torch.cat([before, x[0], after], dim=axis)[None]
    known = list(maps.list_block_maps(leaf.shape[1:], x.shape[1:]))
    assert len(known) == 6
    found = maps.find_in_input(leaf, x, known)
    assert found is not None
    places, numbers = found
    assert torch.equal(places.gather(torch.cat([x.flatten(1)[:, None], numbers], dim=-1))[:, 0], leaf)
    leaf[0].narrow(axis, first, 1).add_(1)
    assert maps.find_in_input(leaf, x, known) is None
    assert list(maps.list_block_maps((9, 9), (4, 3, 6))) == list(maps.list_block_maps((9, 9, 9), (4, 3, 6))) == []
