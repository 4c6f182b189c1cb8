"""Random numbers: known answers, layout, distribution, and independence of everything but key and element."""

import itertools
import math
from collections import Counter

import pytest
import torch
from helpers.marks import Patch
from helpers.tables import DTYPES
from helpers.tolerances import KOLMOGOROV, NORMAL_LIMIT, kolmogorov
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fluvial.core import random
from fluvial.core.random import Key, bits, fold_in, key, normal, permute, philox, uniform

# kat_vectors of Random123 (Salmon et al., SC 2011), philox4x32-10: counter, key, result.
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
words = st.integers(0, 2**32 - 1)
ODD = (1, 2, 3, 41, 1271)


@pytest.mark.parametrize(("counter", "words", "want"), KNOWN_ANSWERS)
def test_known_answers_of_integers(
    counter: tuple[int, int, int, int], words: tuple[int, int], want: tuple[int, ...]
) -> None:
    assert philox(counter, Key(*words)) == want


def test_known_answers_of_tensors() -> None:
    counters, keys, want = (torch.tensor(column, dtype=torch.int64) for column in zip(*KNOWN_ANSWERS, strict=True))
    got = philox(tuple(counters.unbind(1)), Key(*keys.unbind(1)))  # type: ignore[arg-type]
    assert torch.equal(torch.stack(got, dim=1), want)  # type: ignore[arg-type]


@given(counter=st.tuples(words, words, words, words), pair=st.tuples(words, words))
def test_integers_and_tensors_agree(counter: tuple[int, int, int, int], pair: tuple[int, int]) -> None:
    want = philox(counter, Key(*pair))
    tensors = [torch.tensor([word]) for word in counter]
    got = philox(tuple(tensors), Key(*(torch.tensor([word]) for word in pair)))  # type: ignore[arg-type]
    assert [int(word) for word in got] == list(want)
    mixed = philox((tensors[0], *counter[1:]), Key(*pair))
    assert [int(word) for word in mixed] == list(want)


@given(seed=st.integers(0, 2**64 - 1), count=st.integers(0, 43))
def test_layout_of_the_words(seed: int, count: int) -> None:
    # Element 4 i + j is word j of counter i.
    want = [word for i in range((count + 3) // 4) for word in philox((i, 0, 0, 0), key(seed))][:count]
    assert bits(key(seed), (count,)).tolist() == want


@given(seed=st.integers(0, 2**64 - 1), data=st.integers(0, 2**63 - 1))
def test_folding_uses_a_stream_of_its_own(seed: int, data: int) -> None:
    low, high, _, _ = philox((data & 0xFFFFFFFF, data >> 32, 0, 1), key(seed))
    assert fold_in(key(seed), data) == Key(low, high)
    batched = fold_in(key(seed), torch.tensor([data, 0]))
    assert (int(batched.low[0]), int(batched.high[0])) == (low, high)  # type: ignore[index]


def test_keys_tell_everything_apart() -> None:
    assert key(5) == Key(5, 0)
    assert key(2**64 - 1) == Key(2**32 - 1, 2**32 - 1)
    assert key(7 * 2**32 + 3) == Key(3, 7)
    keys = {
        fold_in(fold_in(fold_in(key(seed), epoch), sample), step)
        for seed, epoch, sample, step in itertools.product(range(4), range(4), range(8), range(8))
    }
    assert len(keys) == 4 * 4 * 8 * 8
    assert fold_in(fold_in(key(0), 1), 2) != fold_in(fold_in(key(0), 2), 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    low, high = fold_in(key(0), torch.tensor([3, 100], dtype=dtype))
    assert isinstance(low, Tensor)
    assert isinstance(high, Tensor)
    assert list(zip(low.tolist(), high.tolist(), strict=True)) == [fold_in(key(0), 3), fold_in(key(0), 100)]


@given(event=st.sampled_from([(), (1,), (41,), (1271,), (3, 5), (0,)]), data=st.data())
def test_noise_belongs_to_the_sample(event: tuple[int, ...], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 2**62), min_size=1, max_size=6, unique=True))
    order = data.draw(st.permutations(range(len(ids))))
    cut = data.draw(st.integers(0, len(ids)))
    base = fold_in(key(3), 1)
    for draw in (bits, uniform, normal):
        whole = draw(fold_in(base, torch.tensor(ids)), (len(ids), *event))
        permuted = draw(fold_in(base, torch.tensor([ids[i] for i in order])), (len(ids), *event))
        assert torch.equal(permuted, whole[list(order)])
        split = [
            draw(fold_in(base, torch.tensor(part, dtype=torch.int64)), (len(part), *event))
            for part in (ids[:cut], ids[cut:])
        ]
        assert torch.equal(torch.cat(split), whole)
        for place, sample_id in enumerate(ids):
            assert torch.equal(draw(fold_in(base, sample_id), event), whole[place])


@pytest.mark.parametrize("count", ODD)
def test_an_element_depends_on_its_index_and_not_on_the_size(count: int) -> None:
    keys = fold_in(key(1), torch.arange(3))
    for draw in (bits, uniform, normal):
        assert torch.equal(draw(keys, (3, count)), draw(keys, (3, 2000))[:, :count])
        assert torch.equal(draw(keys, (3, count)).flatten(), draw(keys, (3, 1, count, 1)).flatten())


def test_keys_of_views_and_of_nothing() -> None:
    whole, every_other = torch.arange(8), torch.arange(16)[::2]
    want = normal(fold_in(key(0), whole * 2), (8, 5))
    assert torch.equal(normal(fold_in(key(0), every_other), (8, 5)), want)
    keys = fold_in(key(0), torch.empty(0, dtype=torch.int64))
    assert normal(keys, (0, 41)).shape == (0, 41)
    assert uniform(keys, (0,)).shape == (0,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_does_not_depend_on_the_device() -> None:
    ids = torch.arange(5)
    here, there = fold_in(key(9), ids), fold_in(key(9), ids.cuda())
    assert torch.equal(bits(here, (5, 1271)), bits(there, (5, 1271)).cpu())
    assert torch.equal(uniform(here, (5, 1271)), uniform(there, (5, 1271)).cpu())
    on_device = normal(there, (5, 1271)).cpu()
    torch.testing.assert_close(normal(here, (5, 1271)), on_device, rtol=torch.finfo(torch.float32).eps, atol=0)


def test_uniform_numbers_are_the_upper_bits() -> None:
    drawn = uniform(key(4), (1001,))
    assert torch.equal(drawn.double() * 2**24, (bits(key(4), (1001,)) >> 8).double())
    assert bool(((drawn >= 0) & (drawn < 1)).all())
    assert random.host_uniforms(key(4), 1001) == drawn.tolist()


def test_normal_numbers_are_box_and_mullers() -> None:
    drawn, word = normal(key(6), (41,)).tolist(), bits(key(6), (42,)).tolist()
    for i in range(0, 40, 2):
        radius = math.sqrt(-2 * math.log((word[i] + 1) / 2**32))
        angle = 2 * math.pi * word[i + 1] / 2**32
        eps = torch.finfo(torch.float32).eps
        assert drawn[i] == pytest.approx(radius * math.cos(angle), rel=eps)
        assert drawn[i + 1] == pytest.approx(radius * math.sin(angle), rel=eps)


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_the_extreme_words_are_in_range(word: int, monkeypatch: Patch) -> None:
    # Each comes once in 2^32 words, which no fixed key of a test will meet: log(0) and a uniform number of 1 would.
    monkeypatch.setattr(random, "philox", lambda counter, key: (torch.full_like(counter[0], word),) * 4)
    assert bool((uniform(key(0), (4,)) < 1).all())
    z = normal(key(0), (4,))
    assert bool(z.isfinite().all())
    assert z.abs().max().item() == pytest.approx(math.sqrt(64 * math.log(2)) if word == 0 else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_draw_in_another_dtype_is_the_float32_draw_rounded(dtype: torch.dtype) -> None:
    for draw in (uniform, normal):
        assert draw(key(2), (41,), dtype=dtype).dtype == dtype
        assert torch.equal(draw(key(2), (41,), dtype=dtype), draw(key(2), (41,)).to(dtype))


SIZE = 200_001


def test_uniform_numbers_are_uniform() -> None:
    drawn = uniform(key(11), (SIZE,), dtype=torch.float64)
    assert kolmogorov(drawn, lambda u: u) < KOLMOGOROV
    assert abs((drawn - 0.5).mean()) < NORMAL_LIMIT * math.sqrt(1 / 12 / SIZE)


def test_normal_numbers_are_normal_and_neighbours_uncorrelated() -> None:
    z = normal(key(12), (SIZE,), dtype=torch.float64)
    assert bool(z.isfinite().all())
    assert kolmogorov(z, torch.special.ndtr) < KOLMOGOROV
    # E z^k of a standard normal, and the variance of z^k, which sets how far a mean may be off.
    for k, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**k).mean() - moment) < NORMAL_LIMIT * math.sqrt(variance / SIZE), k
    z = normal(key(13), (SIZE,), dtype=torch.float64)
    for lag in (1, 2, 3, 4):
        for power in (1, 2):
            centred = z**power - (z**power).mean()
            correlation = (centred[:-lag] * centred[lag:]).mean() / centred.var()
            assert abs(correlation) < NORMAL_LIMIT / math.sqrt(SIZE), (lag, power)


def test_samples_and_steps_are_uncorrelated() -> None:
    samples = fold_in(key(14), torch.arange(2000))
    first, second = (normal(fold_in(samples, step), (2000, 50), dtype=torch.float64) for step in (0, 1))
    for one, other in ((first, second), (first[:-1], first[1:])):
        assert abs((one * other).mean()) < NORMAL_LIMIT / math.sqrt(one.numel())
    # The first number of every sample is itself a standard normal sequence.
    assert kolmogorov(first[:, 0], torch.special.ndtr) < KOLMOGOROV


def test_one_key_of_tensors_is_that_of_integers() -> None:
    one, words = key(2**40 + 5), Key(*(torch.tensor(word) for word in key(2**40 + 5)))
    for data in (7, torch.tensor(7)):
        assert tuple(map(int, fold_in(words, data))) == tuple(fold_in(one, 7))
    ids = torch.arange(3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(map(torch.as_tensor, fold_in(words, ids)), map(torch.as_tensor, fold_in(one, ids)), strict=True)
    )
    assert torch.equal(normal(words, (3, 5)), normal(one, (3, 5)))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**64 - 1), size=st.integers(1, 40))
def test_every_size_and_key_have_a_permutation(seed: int, size: int) -> None:
    assert sorted(permute(key(seed), place, size) for place in range(size)) == [*range(size)]


def test_permutations_of_keys_are_uniform() -> None:
    """Pairs of images of places 0 and 1, by a chi-squared test; its limit is exceeded with probability 1e-6."""
    size, times, pairs = 5, 250, 20
    found = Counter((permute(key(seed), 0, size), permute(key(seed), 1, size)) for seed in range(times))
    chi_squared = sum((found[pair] - times / pairs) ** 2 for pair in itertools.permutations(range(size), 2)) / (
        times / pairs
    )
    assert chi_squared < 63.7  # of 19 degrees of freedom
    wide = {permute(key(1), place, 2**40) for place in range(64)}
    assert len(wide) == 64
    assert max(wide) > 2**38


def test_a_permutation_refuses_what_it_cannot_map() -> None:
    with pytest.raises(TypeError, match="permute: key holds tensors"):
        permute(fold_in(key(0), torch.arange(2)), 0, 2)
    for place, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"permute: place is {place}, expected 0 <= place < {size}"):
            permute(key(0), place, size)
