"""Functions of a transformer's outputs that give a step's velocity: each is found from a step, and no other."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.models.replay.combinations import Combination, FittedSum, JoinedPieces, RescaledSum, _choose, find_combinations
from fluvial.models.replay.gather_maps import GatherMap, WholeInputs

SIGMA = 0.6
SHAPE = (3, 4, 8, 8)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed))


def found(
    parts: Sequence[Tensor], v: Tensor, x: Tensor, *, rescales: Sequence[float] = (0.7,), sizes: tuple[int, ...] = ()
) -> Any:
    level = torch.tensor(SIGMA).expand(len(x))
    every = find_combinations(parts, v, x, level, scales=[3.0], rescales=rescales, sizes=sizes)
    assert len(every) < 2
    return every[0] if every else None


def rescaled(w: Tensor, c: Tensor, strength: float) -> Tensor:
    dims = list(range(1, w.ndim))
    made = w * (c.std(dim=dims, keepdim=True) / w.std(dim=dims, keepdim=True))
    return strength * made + (1 - strength) * w


def of_velocities(c: Tensor, u: Tensor, x: Tensor) -> Tensor:
    return rescaled(u + 3.0 * (c - u), c, 0.7)


def of_clean_samples(c: Tensor, u: Tensor, x: Tensor) -> Tensor:
    clean, other = x - SIGMA * c, x - SIGMA * u
    return (x - rescaled(clean + 2.0 * (clean - other), clean, 0.7)) / SIGMA


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("formula", [of_velocities, of_clean_samples])
@pytest.mark.parametrize("cond", [0, 1])
def test_a_rescaled_guidance_is_found(formula: Callable[..., Tensor], cond: int, dtype: torch.dtype) -> None:
    """Its weights, its strength and the part whose deviation counts; it is another function of each sample."""
    parts, x = [drawn(1).to(dtype), drawn(2).to(dtype) * 1.5], drawn(3)
    v = formula(parts[cond].float(), parts[1 - cond].float(), x)
    one = found(parts, v, x, rescales=(0.4, 0.7))
    weights = (-2.0, 3.0) if cond else (3.0, -2.0)
    assert one == RescaledSum(weights, cond, 0.7, formula is of_clean_samples, torch.float32)
    other = drawn(5).to(dtype), drawn(6).to(dtype)
    expected = formula(other[cond].float(), other[1 - cond].float(), x[:1])[:1]
    level = torch.full((1,), SIGMA)
    torch.testing.assert_close(one([each[:1] for each in other], x[:1], level), expected, rtol=1e-5, atol=1e-5)
    alone = torch.cat([one([each[row : row + 1] for each in other], x[row : row + 1], level) for row in range(3)])
    assert torch.equal(alone, one(other, x, level.expand(3)))


def test_a_rescaled_guidance_of_another_strength_is_refused() -> None:
    """The strengths are those of the pipeline's call: a number that is fitted to a few samples would be a coincidence."""
    parts, x = [drawn(1), drawn(2)], drawn(3)
    v = of_velocities(parts[0], parts[1], x)
    assert found(parts, v, x, rescales=(0.5,)) is None
    assert found(parts, v, x, rescales=()) is None


@pytest.mark.parametrize("seed", range(10, 18))
def test_equal_outputs_share_a_weight(seed: int) -> None:
    """As without effect of the layer that LTX-2's guidance skips: the sum holds for samples whose outputs differ, too."""
    c, u, other, x = (drawn(4 * seed + place) for place in range(4))
    plain, clean = 3.0 * c - 2.0 * u - (c - other), of_clean_samples(c, u, x)
    for parts, v, rescales in (([u, c, c, other], plain, ()), ([u, c, c], clean, (0.7,))):
        one = found(parts, v, x, rescales=rescales)
        assert one is not None
        assert one.weights[1] == one.weights[2]


def test_pieces_are_rescaled_apart() -> None:
    parts, x = [drawn(1, 3, 96), drawn(2, 3, 96) * 1.5], drawn(3, 3, 96)
    (c, sound), (u, other) = (part.split([64, 32], dim=1) for part in parts)
    v = torch.cat([of_clean_samples(c, u, x[:, :64]), other + 5.0 * (sound - other)], dim=1)
    one = found(parts, v, x, sizes=(64, 32))
    first, second = RescaledSum((3.0, -2.0), 0, 0.7, True, torch.float32), FittedSum((5.0, -4.0), 0.0, torch.float32)
    assert one == JoinedPieces((64, 32), (first, second))
    torch.testing.assert_close(one(parts, x, torch.full((3,), SIGMA)), v, rtol=1e-5, atol=1e-5)


def test_guidance_of_parts_of_outputs() -> None:
    """Lumina's first channels, Ideogram 4's tokens after text, and Kandinsky 5's second frame behind a held one."""
    both = [drawn(seed, 3, 8, 4, 4) for seed in (1, 2)]
    c, u = (part.chunk(2, dim=1)[0] for part in both)
    v = -torch.cat([u[:, :3] + 3.0 * (c[:, :3] - u[:, :3]), c[:, 3:]], dim=1)
    one = found(both, v, drawn(3, 3, 4, 4, 4))
    assert one == Combination(cond=0, scale=3.0, guided=3, first_half=True, negative=True)
    long, short, x = drawn(1, 3, 9, 4), drawn(2, 3, 6, 4), drawn(3, 3, 6, 4)
    v = -(3.0 * long[:, 3:] + (1.0 - 3.0) * short)
    assert found([long, short], v, x) == FittedSum((-3.0, 2.0), 0.0, torch.float32)
    c, u = (drawn(seed, 3, 2, 4, 4, 4) for seed in (1, 2))
    v = (u + 3.0 * (c - u))[:, 1:]
    one = found([c, u], v, drawn(3, 3, 1, 4, 4, 4))
    assert one.gather_map is not None
    assert one._replace(gather_map=None) == Combination(cond=0, scale=3.0)
    # What is the first half of the channels is that, and not elements of the whole.
    c, u = (drawn(seed, 3, 8, 4, 4) for seed in (1, 2))
    assert found([c, u], (u + 3.0 * (c - u))[:, :4], drawn(3, 3, 4, 4, 4)) == Combination(cond=0, scale=3.0, first_half=True)


def test_guidance_of_larger_outputs_is_rescaled_by_the_whole() -> None:
    parts, x, level = [drawn(1, 3, 40), drawn(2, 3, 40) * 1.5], drawn(3, 3, 40), torch.full((3,), SIGMA)
    whole = WholeInputs((0, 1), (GatherMap(torch.arange(10, 30), (20,)), GatherMap(torch.arange(9, -1, -1), (10,))))
    pieces = [of_clean_samples(*(each[:, part] for each in (*parts, x))) for part in (slice(0, 30), slice(30, 40))]
    v = torch.cat([pieces[0][:, 10:], pieces[1].flip(1)], dim=1)
    (one,) = find_combinations(parts, v, v, level, scales=[3.0], rescales=(0.7,), sizes=(30, 10), whole=(whole, x))
    assert one == JoinedPieces((30, 10), (RescaledSum((3.0, -2.0), 0, 0.7, True, torch.float32),) * 2, whole)
    torch.testing.assert_close(one(parts, x, level), v, rtol=0, atol=1e-5)


def test_the_fewest_digits_count_where_noise_is_in_the_others() -> None:
    """As of a sound of 20 numbers, whose least squares are off by more than the velocity's rounding."""
    parts, x = [torch.randn(5, 20, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)], torch.zeros(5, 20)
    few, many = (FittedSum((3.0, -2.0 + off), 0.0, torch.float32) for off in (0.0, 1e-5))
    level = torch.full((5,), 0.5)
    assert _choose([few, many], parts, few(parts, x, level), x, level, None) == few
    assert _choose([many, many], parts, few(parts, x, level), x, level, None) is None
