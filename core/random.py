"""Explicit random keys, as in JAX, over the counter-based generator Philox4x32-10.

A draw depends on the key and on the element's index within its sample only. It does not depend on the batch, the rank,
the number of ranks or the device. Fold in everything that should make a difference:

    keys = fold_in(fold_in(key(seed), epoch), sample_ids)    # one key per sample
    noise = normal(fold_in(keys, step), x.shape)             # [B, *event]

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Integer
from torch import Tensor

from fluvial.core.checks import type_of
from fluvial.core.types import Ids, to_device

Word = int | Tensor  # a 32-bit word: a Python integer, or an int64 tensor of values in [0, 2^32)

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
# Words 2 and 3 of the counter separate the streams of drawing, folding and permuting.
DRAW, FOLD, PERMUTE = 0, 1, 2

# Largest number of elements that one call draws. The generator's intermediate tensors take about 50 bytes per element.
DRAWN_AT_ONCE = 2**20


class Key(NamedTuple):
    """Two 32-bit words: Python integers or 0-d int64 tensors for one key, int64 tensors `[B]` for one key per sample."""

    low: Word
    high: Word

    @property
    def batch(self) -> tuple[int, ...]:
        """`(B,)` for one key per sample, `()` for one key."""
        return tuple(self.low.shape) if isinstance(self.low, Tensor) else ()


def key(seed: int) -> Key:
    """Return the key of a seed, an integer in [0, 2^64)."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"key: seed is a {type(seed).__name__}, expected an int")
    if not 0 <= seed < 2**64:
        raise ValueError(f"key: seed is {seed}, expected 0 <= seed < 2^64")
    return Key(seed & MASK, seed >> 32)


def fold_in(key: Key, data: int | Ids | Integer[Tensor, ""]) -> Key:
    """Return a new key, statistically independent for every pair of key and data.

    Args:
        key: one key, or one key per sample, `[B]`.
        data: non-negative integer below 2^63, or an integer tensor, 0-d or `[B]`, which gives one key per sample.

    Raises:
        TypeError: key is not a `Key`, or data not an integer.
        ValueError: data is out of range, or has another length than the keys.
    """
    check_key("fold_in", key)
    if isinstance(data, Tensor):
        if data.dtype.is_floating_point or data.dtype == torch.bool:
            raise TypeError(f"fold_in: data is {data.dtype}, expected an integer dtype")
        if data.ndim > 1 or (data.ndim == 1 and key.batch not in ((), tuple(data.shape))):
            raise ValueError(f"fold_in: data has shape {list(data.shape)}, expected [] or {list(key.batch) or '[B]'}")
        data = data.to(torch.int64)
    elif isinstance(data, bool) or not isinstance(data, int):
        raise TypeError(f"fold_in: data is a {type(data).__name__}, expected an int or an integer tensor")
    elif not 0 <= data < 2**63:
        raise ValueError(f"fold_in: data is {data}, expected 0 <= data < 2^63")
    low, high, _, _ = philox((data & MASK, (data >> 32) & MASK, 0, FOLD), key)
    return Key(low, high)


def sample_keys(key: Key, batch: int, *, device: torch.device | str | None = None) -> Key:
    """Return one key per sample, `[B]`; a single key is folded with each sample's index."""
    check_key("sample_keys", key)
    return key if key.batch else fold_in(key, torch.arange(batch, device=device))


def check_key(function: str, key: Key) -> None:
    """Raise TypeError unless `key` is a `Key`."""
    if not isinstance(key, Key):
        raise TypeError(f"{function}: key is {type_of(key)}, expected a Key: make one of a seed, fluvial.core.key(seed)")


def philox(counter: tuple[Word, Word, Word, Word], key: Key) -> tuple[Word, Word, Word, Word]:
    """Return the four words of Philox4x32-10 for a counter of four words; integers and int64 tensors mix freely."""
    c0, c1, c2, c3 = counter
    for k0, k1 in zip(*(_round_keys(word, weyl) for word, weyl in zip(key, WEYL, strict=True)), strict=True):
        # A product of two words fills 64 bits; an int64 tensor wraps, but both words are still correct.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
    return c0, c1, c2, c3


def _round_keys(word: Word, weyl: int) -> Sequence[Word]:
    """Return a word of the key in each of the ten rounds: word + i weyl, modulo 2^32."""
    if not isinstance(word, Tensor):
        return [(word + i * weyl) & MASK for i in range(10)]
    steps = torch.arange(0, 10 * weyl, weyl, device=word.device)
    return ((word + steps.reshape(-1, *[1] * word.ndim)) & MASK).unbind(0)


def bits(key: Key, shape: tuple[int, ...], *, device: torch.device | str | None = None) -> Tensor:
    """Return uniform 32-bit words as int64 in [0, 2^32): element 4 i + j of a sample is word j of counter i.

    Args:
        key: one key, or one key per sample, `[B]`.
        shape: shape of the result; `[B, *event]` with one key per sample.
        device: device of the draw with one key; keys per sample draw on their own device.
    """
    batch, event = _split_shape(key, shape)
    return _draw_words(key, math.prod(event), device=device).reshape((*batch, *event))


def uniform(
    key: Key, shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Return uniform numbers in [0, 1), multiples of 2^-24; arguments as in `bits`."""
    return ((bits(key, shape, device=device) >> 8).to(torch.float32) * 2.0**-24).to(dtype)


def host_uniforms(key: Key, count: int) -> list[float]:
    """Return the numbers of `uniform(key, (count,))` as Python floats, from a key of integers, without a tensor."""
    check_key("host_uniforms", key)
    if isinstance(key.low, Tensor) or isinstance(key.high, Tensor):
        raise TypeError("host_uniforms: key holds tensors, expected one key on the host, made from integers alone")
    counters = range((count + 3) // 4)
    words = [int(word) for i in counters for word in philox((i & MASK, i >> 32, 0, DRAW), key)]
    return [(word >> 8) * 2.0**-24 for word in words[:count]]


def permute(key: Key, place: int, size: int) -> int:
    """Return the image of `place` under a pseudo-random permutation of range(size), in O(1) time and memory.

    A Feistel network of eight rounds on pairs (a, b) with a, b < side = ceil(sqrt(size)):

        a, b = b, (a + F_i(b)) mod side

    F_i is a word of Philox. An image outside the range is permuted again until it lies in it (cycle walking), which happens
    for at most 2 sqrt(size) + 1 of the pairs.

    Args:
        key: one key of Python integers.

    Raises:
        TypeError: the key contains tensors.
        ValueError: place is not in range(size).

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 5.
    """
    check_key("permute", key)
    if isinstance(key.low, Tensor) or isinstance(key.high, Tensor):
        raise TypeError("permute: key holds tensors, expected one key on the host, made from integers alone")
    if not 0 <= place < size:
        raise ValueError(f"permute: place is {place}, expected 0 <= place < {size}")
    side = math.isqrt(size - 1) + 1
    while True:
        a, b = divmod(place, side)
        for i in range(8):
            word = philox((b & MASK, b >> 32, i, PERMUTE), key)[0]
            a, b = b, (a + int(word)) % side
        place = a * side + b
        if place < size:
            return place


def normal(
    key: Key, shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Return standard-normal numbers: the Box-Muller transform of each pair of words.

        radius = sqrt(-2 log u1), angle = 2 pi u2, u1 = (w1 + 1) / 2^32, u2 = w2 / 2^32
        z1 = radius cos(angle), z2 = radius sin(angle)

    It is evaluated in float64 and rounded once to float32, whatever `dtype` is. So the bits do not depend on an element's
    position in a vector register, and a float64 draw equals the float32 draw. Arguments as in `bits`.
    """
    batch, event = _split_shape(key, shape)
    count = math.prod(event)
    first, second = _draw_words(key, count + count % 2, device=device).unflatten(-1, (-1, 2)).unbind(-1)
    radius = torch.sqrt(-2 * torch.log((first + 1).to(torch.float64) * 2.0**-32))
    angle = second.to(torch.float64) * (2 * math.pi * 2.0**-32)
    pairs = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)
    return pairs.flatten(-2)[..., :count].reshape((*batch, *event)).to(torch.float32).to(dtype)


def step_noises(keys: Key, steps: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the noise of each step, `[B, *event]`: normal(fold_in(keys, step), shape), drawn for many steps per call.

    A draw depends only on the key and the element's index, so the bits are those of one call per step.
    """
    batch, event = shape[0], tuple(shape[1:])
    steps_per_call = max(DRAWN_AT_ONCE // max(math.prod(shape), 1), 1)
    for first in range(0, len(steps), steps_per_call):
        part = steps[first : first + steps_per_call]
        part_keys = _fold_steps(keys, part, batch)
        yield from normal(part_keys, (len(part) * batch, *event), dtype=dtype).unflatten(0, (len(part), batch)).unbind(0)


def step_keys(keys: Key, steps: Sequence[int], batch: int) -> Iterator[Key]:
    """Yield the keys of each step, fold_in(keys, step), folded in one call."""
    if steps:
        folded = _fold_steps(keys, steps, batch)
        words = (torch.as_tensor(word).unflatten(0, (len(steps), batch)).unbind(0) for word in folded)
        yield from map(Key, *words)


def _fold_steps(keys: Key, steps: Sequence[int], batch: int) -> Key:
    """Return fold_in(keys, step) for every step, ordered by step, `[steps * batch]`."""
    low = torch.as_tensor(keys.low)
    high = to_device(torch.as_tensor(keys.high), low.device).expand_as(low)
    data = to_device(torch.tensor(steps), low.device).repeat_interleave(batch)
    return fold_in(Key(low.repeat(len(steps)), high.repeat(len(steps))), data)


def _split_shape(key: Key, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a shape into (batch, event): batch is () for one key, (B,) for one key per sample."""
    check_key("random", key)
    batch = key.batch
    if tuple(shape[: len(batch)]) != batch:
        raise ValueError(f"random: shape is {list(shape)}, expected to begin with the keys' {list(batch)}")
    return batch, tuple(shape[len(batch) :])


def _draw_words(key: Key, count: int, *, device: torch.device | str | None) -> Tensor:
    """Return the first `count` words of every key's stream, `[count]` or `[B, count]`."""
    if isinstance(key.low, Tensor):
        device = key.low.device
        key = Key(key.low[..., None], torch.as_tensor(key.high)[..., None])
    index = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    words = philox((index & MASK, index >> 32, 0, DRAW), key)
    return torch.stack([torch.as_tensor(word) for word in words], dim=-1).flatten(-2)[..., :count]
