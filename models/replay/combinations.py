"""How a step's velocity is made of the transformer's outputs: functions, and the search for the one that a step shows."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from fluvial.core.checks import per_sample
from fluvial.models.replay.places import Places, Whole, find_in_output

Norm = Literal["own", "kept", "capped"]
GUIDED = 3  # Lumina guides the first channels of the sample alone
MOST_PARTS = 4  # outputs that a velocity may be a weighted sum of
DIGITS = range(2, 8)  # of weights
LEAST_WEIGHT = 1e-6  # weights below are rounding
OPERATIONS = 4  # whose rounding adds up in a weighted sum
ROUNDING = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-3,
}  # at most, of a weighted sum


class Combination(NamedTuple):
    """A step's velocity as a function of one part, or of two with classifier-free guidance: c + g (c - u) or u + g (c - u).

    A part is the transformer's output for one copy of the batch; the parts of all calls are numbered in order.
    """

    cond: int | None = None  # index of c among two parts; None if there is one part
    scale: float = 1.0  # g
    from_cond: bool = False  # starts from c, as in Z-Image
    norm: Norm = "own"  # over the last dimension: that of c, as in Lumina 2; or at most that of c, as in LongCat-Image
    guided: int | None = None  # first channels that are guided, the others are c's; None if all are
    first_half: bool = False  # takes the first half of the channels; the other half is a learned variance
    negative: bool = False  # the transformer predicts x0 - eps
    dtype: torch.dtype | None = None  # dtype that the parts are cast to first
    places: Places | None = None  # elements of the output that the velocity consists of; None if it is the whole

    def __call__(self, parts: Sequence[Tensor], x: Tensor, level: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`, at samples x of noise levels `[B]`."""
        if self.dtype is not None:
            parts = [part.to(self.dtype) for part in parts]
        v = parts[0]
        if self.cond is not None:
            c, u = parts[self.cond], parts[1 - self.cond]
            v = (c if self.from_cond else u) + self.scale * (c - u)
            wanted, made = (torch.norm(part, dim=-1, keepdim=True) for part in (c, v))
            if self.norm == "kept":
                v = v * (wanted / made)
            elif self.norm == "capped":
                v = v * (wanted / (made + 1e-8)).clamp(max=1.0)
            if self.guided is not None:
                v = torch.cat([v[:, : self.guided], c[:, self.guided :]], dim=1)
        if self.first_half:
            v = v.chunk(2, dim=1)[0]
        if self.places is not None:
            v = self.places.gather(v.flatten(1))
        return -v if self.negative else v


class Fitted(NamedTuple):
    """A step's velocity as a weighted sum of parts and of the sample, fitted where no formula of `Combination` gives it."""

    weights: tuple[float, ...]  # of the parts
    of_sample: float
    dtype: torch.dtype  # of the velocity

    def __call__(self, parts: Sequence[Tensor], x: Tensor, level: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`, at samples x of noise levels `[B]`; the sum is in float64."""
        return (_sum(self.weights, parts) + self.of_sample * x.double()).to(self.dtype)


class Rescaled(NamedTuple):
    """A guided velocity that is rescaled towards the standard deviation of one part (arXiv 2305.08891, section 3.4).

    With w = sum a_i part_i and the standard deviations over each sample, v = r w with r = phi std(c) / std(w) + 1 - phi.
    LTX-2 rescales estimates of the clean sample: x - sigma v = r (x - sigma w) with r of x - sigma c and x - sigma w.
    """

    weights: tuple[float, ...]  # a, of the parts
    cond: int  # index of c among the parts
    strength: float  # phi
    clean: bool  # whether estimates of the clean sample are rescaled
    dtype: torch.dtype  # of the velocity

    def __call__(self, parts: Sequence[Tensor], x: Tensor, level: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`, at samples x of noise levels `[B]`; computed in float64."""
        w, c, x = _sum(self.weights, parts), parts[self.cond].double(), x.double()
        sigma = per_sample(level.double(), x)
        if self.clean:
            w, c = x - sigma * w, x - sigma * c
        deviation, made = (per_sample(each.flatten(1).std(dim=1), x) for each in (c, w))
        v = w * (self.strength * (deviation / made) + 1 - self.strength)
        return ((x - v) / sigma if self.clean else v).to(self.dtype)


class Joined(NamedTuple):
    """A step's velocity of flat samples of several pieces, e.g. a video and its sound, each with weights of its own."""

    sizes: tuple[int, ...]  # numbers of each piece
    sums: tuple[Fitted | Rescaled, ...]
    whole: Whole | None = None  # of what parts and x are, where that is more than the sample

    def __call__(self, parts: Sequence[Tensor], x: Tensor, level: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, n]`, at samples x of noise levels `[B]`."""
        pieces = zip(*(tensor.split(self.sizes, dim=1) for tensor in (*parts, x)), strict=True)
        velocities = [made(each[:-1], each[-1], level) for made, each in zip(self.sums, pieces, strict=True)]
        if self.whole is not None:
            velocities = [places.gather(v) for places, v in zip(self.whole.at, velocities, strict=True)]
        return torch.cat(velocities, dim=1)


Combined = Combination | Fitted | Rescaled | Joined
T = TypeVar("T", Fitted, Rescaled)


def find_combinations(
    parts: Sequence[Tensor],
    v: Tensor,
    x: Tensor,
    level: Tensor,
    *,
    scales: Sequence[float],
    rescales: Sequence[float],
    sizes: tuple[int, ...],
    whole: tuple[Whole, Tensor] | None = None,
) -> list[Combined]:
    """Return the functions of parts and samples that give a step's velocity, all known ones or else one that is fitted.

    Args:
        parts: outputs of the transformer, each `[B, ...]`.
        v: velocity `[B, *event]`.
        x: samples `[B, *event]`.
        level: their noise level, `[B]`.
        scales: scales of guidance that the pipeline was asked for.
        rescales: strengths of rescaled guidance.
        sizes: numbers of each piece of flat samples, as of the parts; empty for samples of one piece.
        whole: where parts are larger than flat samples, what of them is the sample, and the inputs in place of x, `[B, m]`.
    """

    def same(made: Combination, of: Sequence[Tensor]) -> Combination | None:
        return _fitting(made, of, v, x, level)

    cut = tails(parts, v)
    combinations = [known for made in _list_known(parts, v, scales) if (known := same(made, parts))]
    if not combinations or any(len(part.shape) == 3 and part.shape != v.shape for part in parts):
        of_cut = [made for made in _list_known(cut, v, scales) if made(cut, x, level).shape == v.shape]
        combinations = [made for made in of_cut if same(made, cut)] or combinations
    if combinations:  # the first half of the channels may be found as elements of the whole, too
        return [made for made in combinations if made.first_half] or [*combinations]
    if not sizes:
        one = _fit_rescaled(cut, v, x, level, rescales) or _fit(cut, v, x, level)
        return [] if one is None else [one]
    held, whole_x = (None, x) if whole is None else whole
    if sum(sizes) != whole_x.shape[1] or any(part.shape != whole_x.shape for part in parts):
        return []
    place_parts = (None,) * len(sizes) if held is None else held.at
    velocities = v.split(sizes if held is None else [len(places.index) for places in held.at], dim=1)
    sums = list[Fitted | Rescaled]()
    for (*made, sample), velocity, at in zip(
        zip(*(tensor.split(sizes, dim=1) for tensor in (*parts, whole_x)), strict=True), velocities, place_parts, strict=True
    ):
        one = _fit_rescaled(made, velocity, sample, level, rescales, at) or _fit(made, velocity, sample, level, at)
        if one is None:
            return []
        sums.append(one)
    return [Joined(sizes, tuple(sums), held)]


def tails(parts: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Return parts of more tokens than the samples `[B, N, C]` without those that come first, as text in one sequence."""
    longer = (part.ndim == x.ndim == 3 and part.shape[2] == x.shape[2] and part.shape[1] > x.shape[1] for part in parts)
    return [part[:, -x.shape[1] :] if cut else part for part, cut in zip(parts, longer, strict=True)]


def _list_known(parts: Sequence[Tensor], v: Tensor, scales: Sequence[float]) -> Iterator[Combination]:
    """Yield the combinations of parts that have the shape of v, simple ones first."""
    if len(parts) > 2 or any(part.shape != parts[0].shape for part in parts):
        return
    dtype = None if parts[0].dtype == v.dtype else v.dtype
    # Half of the channels, or by coincidence half of something else, e.g. two frames with the first one fixed.
    halves = (True, False) if parts[0].shape[1:] == (2 * v.shape[1], *v.shape[2:]) else (False,)
    guided = (None, GUIDED) if v.ndim == 4 and v.shape[1] > GUIDED else (None,)
    for half, negative in product(halves, (False, True)):
        made = partial(Combination, first_half=half, negative=negative, dtype=dtype)
        if len(parts) == 1:
            yield made()
            continue
        for scale, cond, from_cond, norm in product(scales, (1, 0), (False, True), get_args(Norm)):
            for channels in guided if norm == "own" else (None,):
                yield made(cond=cond, scale=scale, from_cond=from_cond, norm=norm, guided=channels)


def _fitting(combination: Combination, parts: Sequence[Tensor], v: Tensor, x: Tensor, level: Tensor) -> Combination | None:
    """Return a combination that gives v to the bit, as it is or by some elements of it; None if it does not."""
    made = combination(parts, x, level)
    if made.shape == v.shape:
        return combination if made.dtype == v.dtype and torch.equal(made, v) else None
    places = find_in_output(-v if combination.negative else v, combination._replace(negative=False)(parts, x, level))
    return None if places is None else combination._replace(places=places)


def _fit(parts: Sequence[Tensor], v: Tensor, x: Tensor, level: Tensor, at: Places | None = None) -> Fitted | None:
    """Return the weighted sum of parts and sample that v is up to rounding; None if it is not one.

    With `at`, the velocity is known at these elements of parts and sample only.

    The weights are least squares in float64, rounded to at most seven digits, so that two prompts give the same.
    One part has the weight 1: another would be a scale that no guidance has.
    """
    if not _can_be_fitted(_all_at(at, parts), v):
        return None
    solved = _least_squares([tensor.flatten() for tensor in _all_at(at, (*parts, x))], v.flatten())
    each = [Fitted(_round(solved[:-1], digits), _round(solved[-1:], digits)[0], v.dtype) for digits in DIGITS]
    best = _best(each, parts, v, x, level, at)
    return None if best is None or (len(parts) == 1 and (best.weights[0] != 1 or best.of_sample != 0)) else best


def _fit_rescaled(
    parts: Sequence[Tensor], v: Tensor, x: Tensor, level: Tensor, strengths: Sequence[float], at: Places | None = None
) -> Rescaled | None:
    """Return the rescaled sum of parts that v is up to rounding; None if it is not one.

    For one sample it is a weighted sum, too, so this is looked for first: r a of the parts, where the sum of a is 1, and
    (1 - r) / sigma of the sample for estimates of clean ones. Where parts are equal, as without a layer that guidance skips,
    c is the first that fits. A strength of 0 rescales nothing.
    """
    if len(parts) < 2 or not any(strengths) or not _can_be_fitted(_all_at(at, parts), v):
        return None
    samples = zip(*_all_at(at, (*parts, x)), v, strict=True)
    fits = [_least_squares([tensor.flatten() for tensor in each[:-1]], each[-1].flatten()) for each in samples]
    weights = torch.tensor([[weight / sum(fit[:-1]) for weight in fit[:-1]] for fit in fits]).mean(0).tolist()
    for strength, cond, clean in product(filter(None, strengths), range(len(parts)), (True, False)):
        each = [Rescaled(_round(weights, digits), cond, strength, clean, v.dtype) for digits in DIGITS]
        if (best := _best(each, parts, v, x, level, at)) is not None:
            return best
    return None


def _all_at(at: Places | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the elements of tensors `[B, m]` at some places, or all of them."""
    return [*tensors] if at is None else [at.gather(tensor) for tensor in tensors]


def _can_be_fitted(parts: Sequence[Tensor], v: Tensor) -> bool:
    return len(parts) <= MOST_PARTS and v.dtype in ROUNDING and all(part.shape == v.shape for part in parts)


def _least_squares(columns: Sequence[Tensor], wanted: Tensor) -> list[float]:
    """Return the weights of columns `[n]` whose sum is nearest to what is wanted, in float64, the least of equal columns.

    Columns are equal where guidance skips a layer that has no effect; LAPACK's default driver, gelsy, then misses the sum.
    """
    table, target = (each.detach().double().cpu() for each in (torch.stack([*columns], dim=1), wanted[:, None]))
    return torch.linalg.lstsq(table, target, driver="gelsd").solution[:, 0].tolist()


def _best(
    candidates: Sequence[T], parts: Sequence[Tensor], v: Tensor, x: Tensor, level: Tensor, at: Places | None
) -> T | None:
    """Return the function of the fewest digits that gives v as well as any; None if all miss it.

    The pipeline rounds each term of its sum, and those of estimates of the clean sample, which it divides by sigma.
    """
    size = float(v.double().norm())
    made = _all_at(at, [each(parts, x, level) for each in candidates])
    errors = [float((each.double() - v.double()).norm()) / size for each in made]
    # The fewest digits that fit as well, because scales have few, and rounding moves the last ones from prompt to prompt.
    best = next(each for each, error in zip(candidates, errors, strict=True) if error <= 2 * min(errors))
    terms = sum(abs(weight) * float(part.double().norm()) for weight, part in zip(best.weights, parts, strict=True))
    rounding = OPERATIONS * torch.finfo(v.dtype).eps * (terms + float((x.double() / per_sample(level.double(), x)).norm()))
    return best if min(errors) <= min(ROUNDING[v.dtype], rounding / size) else None


def _round(weights: Sequence[float], digits: int) -> tuple[float, ...]:
    """Return weights rounded to a number of digits."""
    return tuple(0.0 if abs(weight) < LEAST_WEIGHT else float(f"{weight:.{digits}g}") for weight in weights)


def _sum(weights: Sequence[float], parts: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of parts in float64."""
    first, *rest = (weight * part.double() for weight, part in zip(weights, parts, strict=True))
    return sum(rest, first)
