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
        # Bypass the first-level cache: other programs of the same launch may have stored these sums.
        total += tl.load(sums_ptr + offset, mask=offset < chunks, other=0.0, cache_modifier=".cg")
    return tree_sum(total, LEVELS)


@triton.jit
def is_last(counter_ptr, chunks):
    """Count this program, and return whether all others of its row have already stored their partial sums."""
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
    """Return the four words of COUNT / 4 counters: from element `first` (a multiple of 4, int64) of `random.bits`.

    This is `core.random.philox`. A round multiplies two words to 64 bits each, in one instruction, where `tl.philox_impl`
    takes two.
    """
    counter = first // 4 + tl.arange(0, COUNT // 4)
    c0, c1 = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = tl.zeros([COUNT // 4], tl.uint32), tl.zeros([COUNT // 4], tl.uint32)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ low, (p0 >> 32).to(tl.uint32) ^ c3 ^ high
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        low = tl.add(low, 0x9E3779B9, sanitize_overflow=False)
        high = tl.add(high, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


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
    radius = tl.sqrt(_minus_two_log(first))
    cosine, sine = _cos_sin(second)
    return radius * cosine, radius * sine


@triton.jit
def _minus_two_log(word):
    """Return -2 log((word + 1) / 2^32) = -2 (exponent log 2 + log(1 + rest)), accurate near 0, too.

    The argument is 2^exponent (1 + rest), with 1 + rest from sqrt(1/2) to sqrt(2), and log(1 + rest) is the polynomial of
    the Cephes library's logf. Where the exponent is 0, `rest` is exact: minus the distance to one, which is an integer.
    """
    argument = word.to(tl.float32) + 1.0
    pattern = argument.to(tl.int32, bitcast=True)
    exponent = (pattern - 0x4F3504F3) >> 23  # the bits of sqrt(1/2) 2^32
    rest = tl.fma((pattern - (exponent << 23)).to(tl.float32, bitcast=True), 2.0**-32, -1.0)
    rest = tl.where(exponent == 0, (word ^ 0xFFFFFFFF).to(tl.float32) * -(2.0**-32), rest)
    square = rest * rest
    tail = tl.fma(rest, -2 * 7.0376836292e-2, 2 * 1.1514610310e-1)
    tail = tl.fma(rest, tail, -2 * 1.1676998740e-1)
    tail = tl.fma(rest, tail, 2 * 1.2420140846e-1)
    tail = tl.fma(rest, tail, -2 * 1.4249322787e-1)
    tail = tl.fma(rest, tail, 2 * 1.6668057665e-1)
    tail = tl.fma(rest, tail, -2 * 2.0000714765e-1)
    tail = tl.fma(rest, tail, 2 * 2.4999993993e-1)
    tail = tl.fma(rest, tail, -2 * 3.3333331174e-1)
    return tl.fma(exponent.to(tl.float32), -1.3862943611198906, tl.fma(square * rest, tail, tl.fma(rest, -2.0, square)))


@triton.jit
def _cos_sin(word):
    """Return cos and sin of 2 pi word / 2^32: integers remove the nearest quarter turn, polynomials evaluate the rest.

    They are the minimax polynomials of the Cephes library's sinf and cosf for [-pi/4, pi/4].
    """
    # Without its two leading bits a word is the distance to the nearest quarter turn; rounded, they are that quarter.
    angle = (word << 2).to(tl.int32, bitcast=True).to(tl.float32) * 3.6572951981e-10  # 2 pi / 2^34
    quarter = tl.add(word, 0x20000000, sanitize_overflow=False)
    z = angle * angle
    sine = tl.fma(tl.fma(tl.fma(z, -1.9515295891e-4, 8.3321608736e-3), z, -1.6666654611e-1), angle * z, angle)
    cosine = tl.fma(tl.fma(z, 2.443315711809948e-5, -1.388731625493765e-3), z, 4.166664568298827e-2)
    cosine = tl.fma(cosine, z * z, tl.fma(z, -0.5, 1.0))
    swap = (quarter & 0x40000000) != 0
    c, s = tl.where(swap, sine, cosine), tl.where(swap, cosine, sine)
    # The cosine is negative in the second and third quarters, the sine in the last two.
    return _flip_sign(c, quarter ^ (quarter << 1)), _flip_sign(s, quarter)


@triton.jit
def _flip_sign(value, word):
    """Return a value, negated where the word's leading bit is set."""
    return (value.to(tl.uint32, bitcast=True) ^ (word & 0x80000000)).to(tl.float32, bitcast=True)
