"""Functions that the kernels share on the device: a sum in a fixed order, guidance, and the noise of `core.random`."""

import triton
import triton.language as tl


@triton.jit
def tree_sum(values, LEVELS: tl.constexpr):
    """Return the sum of 2^LEVELS values, added in neighbouring pairs, then in pairs of pairs, and so on.

    The order of a plain `tl.sum` follows the compiler's layout, which changes with dtypes, alignment and versions. Here the
    order follows from the index, so a sample's bits depend on its values alone.
    """
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, [1 << (LEVELS - level - 1), 2]), 1)
    return tl.sum(values, 0)  # of one value


@triton.jit
def sum_chunks(sums_ptr, chunks, LEVELS: tl.constexpr):
    """Return the sum of a row's partial sums, in an order that depends on their number alone."""
    total = tl.zeros([1 << LEVELS], tl.float32)
    for first in range(0, chunks, 1 << LEVELS):
        offset = first + tl.arange(0, 1 << LEVELS)
        # Other programs of the same launch may have stored them: past the first-level cache, which sees only its own.
        total += tl.load(sums_ptr + offset, mask=offset < chunks, other=0.0, cache_modifier=".cg")
    return tree_sum(total, LEVELS)


@triton.jit
def is_last(counter_ptr, chunks):
    """Count a program of a row, and return whether all others of the row have stored their partial sums before it."""
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == chunks - 1


@triton.jit
def load(ptr, start, offset, mask):
    """Return a block of a row in float32, with 0 past its end."""
    return tl.load(ptr + start + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def velocity(v_ptr, start, uncond_ptr, uncond_start, g, offset, mask):
    """Return a block of the velocity, v_uncond + g (v - v_uncond) with guidance, in float32.

    It is rounded after each operation, so that it has the bits of `core.guidance.classifier_free`: a rollout that combines
    the halves first and an update that leaves it to the kernel have an on-policy ratio of exactly 1.
    """
    v = load(v_ptr, start, offset, mask)
    if uncond_ptr is not None:
        uncond = load(uncond_ptr, uncond_start, offset, mask)
        v = uncond + g * (v - uncond)
    return v


@triton.jit
def step_mean(a, x, b, v):
    """Return a x + b v. Multiply-adds are explicit here and in sums, so that all kernels round alike."""
    return tl.fma(a, x, b * v)


@triton.jit
def words(low, high, first, COUNT: tl.constexpr):
    """Return the four words of COUNT / 4 counters: from element `first` (a multiple of 4, int64) of `random.bits`."""
    counter = first // 4 + tl.arange(0, COUNT // 4)
    zero = tl.zeros([COUNT // 4], tl.uint32)
    return tl.philox_impl(
        (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32), zero, zero, low + zero, high + zero
    )


@triton.jit
def normals(low, high, first, COUNT: tl.constexpr):
    """Return COUNT standard-normal numbers of a key's stream, from element `first` (a multiple of 4, int64).

    They equal those of `core.random.normal` to a few units in the last place: that function computes in float64, this one
    in float32 from the same integers.
    """
    w0, w1, w2, w3 = words(low, high, first, COUNT)
    z0, z1 = _box_muller(w0, w1)
    z2, z3 = _box_muller(w2, w3)
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))


@triton.jit
def _box_muller(first, second):
    """Return two normal numbers from two words: radius sqrt(-2 log((first + 1) / 2^32)), angle 2 pi second / 2^32."""
    radius = tl.sqrt_rn(2.0 * _minus_log(first))
    cosine, sine = _cos_sin(second)
    return radius * cosine, radius * sine


@triton.jit
def _minus_log(word):
    """Return -log((word + 1) / 2^32), accurate also near 0, where the argument is near 1."""
    near_one = word >= 0x80000000
    # Above one half, from the distance to one, which is an integer: log1p(-d) = log(t) d / (1 - t) with t = fl(1 - d).
    d = (word ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32
    t = 1.0 - d
    exact = t == 1.0
    above = tl.where(exact, d, tl.log(t) * d / tl.where(exact, 1.0, t - 1.0))
    below = -tl.log((tl.where(near_one, 0, word) + 1).to(tl.float32) * 2.0**-32)
    return tl.where(near_one, above, below)


@triton.jit
def _cos_sin(word):
    """Return cos and sin of 2 pi word / 2^32: integers remove the nearest quarter turn, polynomials evaluate the rest.

    They are the minimax polynomials of the Cephes library's sinf and cosf for [-pi/4, pi/4].
    """
    quarter = tl.add(word, 0x20000000, sanitize_overflow=False) >> 30
    rest = tl.sub(word, quarter << 30, sanitize_overflow=False).to(tl.int32, bitcast=True)
    angle = rest.to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    z = angle * angle
    sine = angle + angle * z * ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1)
    cosine = 1.0 - 0.5 * z + z * z * ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2)
    swap = (quarter & 1) == 1
    c, s = tl.where(swap, sine, cosine), tl.where(swap, cosine, sine)
    return tl.where((quarter == 1) | (quarter == 2), -c, c), tl.where(quarter >= 2, -s, s)
