"""Combinations of the transformer's outputs into a step's velocity, and the search for the one that a recorded step used."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from fluvial.core.checks import per_sample
from fluvial.models.replay.gather_maps import GatherMap, WholeInputs, find_in_output

Norm = Literal["own", "kept", "capped"]
GUIDED = 3  # number of channels that Lumina guides; the others keep the conditional output
MOST_PARTS = 4  # outputs of a weighted sum
DIGITS = range(2, 8)  # significant digits of weights
LEAST_WEIGHT = 1e-6  # smaller weights are rounding
OPERATIONS = 4  # roundings that add up in a weighted sum
# Largest relative error of a weighted sum.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


class Combination(NamedTuple):
    """A step's velocity as a function of one part, or of two with classifier-free guidance: c + g (c - u) or u + g (c - u).

    A part is the transformer's output for one copy of the batch; the parts of all calls are numbered in order.
    """

    cond: int | None = None  # index of c among two parts; None if there is one part
    scale: float = 1.0  # g
    from_cond: bool = False  # starts from c, as in Z-Image
    norm: Norm = "own"  # over the last dimension; "kept": that of c, as in Lumina 2; "capped": at most, as in LongCat-Image
    guided: int | None = None  # number of guided channels, the others are c's; None if all are guided
    first_half: bool = False  # takes the first half of the channels; the other half is a learned variance
    negative: bool = False  # the transformer predicts x0 - eps
    dtype: torch.dtype | None = None  # dtype that the parts are cast to first
    gather_map: GatherMap | None = None  # elements of the output that the velocity consists of; None for all of them

    def __call__(self, parts: Sequence[Tensor], x: Tensor, level: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`, at samples x of noise levels `[B]`."""
        if self.dtype is not None:
            parts = [part.to(self.dtype) for part in parts]
        v = parts[0]
        if self.cond is not None:
            c, u = parts[self.cond], parts[1 - self.cond]
            v = (c if self.from_cond else u) + self.scale * (c - u)
            norm_c, norm_v = (torch.norm(part, dim=-1, keepdim=True) for part in (c, v))
            if self.norm == "kept":
                v = v * (norm_c / norm_v)
            elif self.norm == "capped":
                v = v * (norm_c / (norm_v + 1e-8)).clamp(max=1.0)
            if self.guided is not None:
                v = torch.cat([v[:, : self.guided], c[:, self.guided :]], dim=1)
        if self.first_half:
            v = v.chunk(2, dim=1)[0]
        if self.gather_map is not None:
            v = self.gather_map.gather(v.flatten(1))
        return -v if self.negative else v


class FittedSum(NamedTuple):
    """A step's velocity as a weighted sum of parts and of the sample, fitted if no formula of `Combination` gives it."""

    weights: tuple[float, ...]  # of the parts
    of_sample: float
    dtype: torch.dtype  # of the velocity

    def __call__(self, parts: Sequence[Tensor], x: Tensor, level: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`, at samples x of noise levels `[B]`; the sum is in float64."""
        return (_sum_weighted(self.weights, parts) + self.of_sample * x.double()).to(self.dtype)


class RescaledSum(NamedTuple):
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
        w, c, x = _sum_weighted(self.weights, parts), parts[self.cond].double(), x.double()
        sigma = per_sample(level.double(), x)
        if self.clean:
            w, c = x - sigma * w, x - sigma * c
        std_c, std_w = (per_sample(each.flatten(1).std(dim=1), x) for each in (c, w))
        v = w * (self.strength * (std_c / std_w) + 1 - self.strength)
        return ((x - v) / sigma if self.clean else v).to(self.dtype)


class JoinedPieces(NamedTuple):
    """A step's velocity of flat samples of several pieces, e.g. a video and its sound, each with separate weights."""

    sizes: tuple[int, ...]  # elements of each piece
    sums: tuple[FittedSum | RescaledSum, ...]
    whole: WholeInputs | None = None  # given if parts and x hold more than the sample

    def __call__(self, parts: Sequence[Tensor], x: Tensor, level: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, n]`, at samples x of noise levels `[B]`."""
        pieces = zip(*(tensor.split(self.sizes, dim=1) for tensor in (*parts, x)), strict=True)
        velocities = [weighted(each[:-1], each[-1], level) for weighted, each in zip(self.sums, pieces, strict=True)]
        if self.whole is not None:
            velocities = [gather_map.gather(v) for gather_map, v in zip(self.whole.maps, velocities, strict=True)]
        return torch.cat(velocities, dim=1)


Combined = Combination | FittedSum | RescaledSum | JoinedPieces
T = TypeVar("T", FittedSum, RescaledSum)


def find_combinations(
    parts: Sequence[Tensor],
    v: Tensor,
    x: Tensor,
    level: Tensor,
    *,
    scales: Sequence[float],
    rescales: Sequence[float],
    sizes: tuple[int, ...],
    whole: tuple[WholeInputs, Tensor] | None = None,
) -> list[Combined]:
    """Return the functions of parts and samples that give a step's velocity: all known ones that match, or one fitted sum.

    Args:
        parts: outputs of the transformer, each `[B, ...]`.
        v: velocity `[B, *event]`.
        x: samples `[B, *event]`.
        level: their noise level, `[B]`.
        scales: guidance scales of the pipeline's call.
        rescales: strengths of rescaled guidance.
        sizes: elements of each piece of flat samples and parts; empty for samples of one piece.
        whole: for parts larger than flat samples: the sample's elements in them, and inputs in place of x, `[B, m]`.
    """

    def match(combination: Combination, outputs: Sequence[Tensor]) -> Combination | None:
        return _match(combination, outputs, v, x, level)

    cut = cut_leading_tokens(parts, v)
    combinations = [matched for known in _list_known(parts, v, scales) if (matched := match(known, parts))]
    if not combinations or any(len(part.shape) == 3 and part.shape != v.shape for part in parts):
        of_cut = [known for known in _list_known(cut, v, scales) if known(cut, x, level).shape == v.shape]
        combinations = [known for known in of_cut if match(known, cut)] or combinations
    if combinations:  # the first half of the channels may also match as selected elements
        return [matched for matched in combinations if matched.first_half] or [*combinations]
    if not sizes:
        one = _fit_rescaled(cut, v, x, level, rescales) or _fit(cut, v, x, level)
        return [] if one is None else [one]
    whole_inputs, whole_x = (None, x) if whole is None else whole
    if sum(sizes) != whole_x.shape[1] or any(part.shape != whole_x.shape for part in parts):
        return []
    maps = (None,) * len(sizes) if whole_inputs is None else whole_inputs.maps
    velocities = v.split([size if each is None else len(each.index) for size, each in zip(sizes, maps, strict=True)], dim=1)
    pieces = zip(*(tensor.split(sizes, dim=1) for tensor in (*parts, whole_x)), strict=True)
    sums = list[FittedSum | RescaledSum]()
    for (*outputs, sample), velocity, gather_map in zip(pieces, velocities, maps, strict=True):
        rescaled = _fit_rescaled(outputs, velocity, sample, level, rescales, gather_map)
        fitted = rescaled or _fit(outputs, velocity, sample, level, gather_map)
        if fitted is None:
            return []
        sums.append(fitted)
    return [JoinedPieces(sizes, tuple(sums), whole_inputs)]


def cut_leading_tokens(parts: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Return parts with the last N tokens of samples `[B, N, C]`, without those before, such as text in one sequence."""
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
        combination = partial(Combination, first_half=half, negative=negative, dtype=dtype)
        if len(parts) == 1:
            yield combination()
            continue
        for scale, cond, from_cond, norm in product(scales, (1, 0), (False, True), get_args(Norm)):
            for channels in guided if norm == "own" else (None,):
                yield combination(cond=cond, scale=scale, from_cond=from_cond, norm=norm, guided=channels)


def _match(combination: Combination, parts: Sequence[Tensor], v: Tensor, x: Tensor, level: Tensor) -> Combination | None:
    """Return a combination that gives v to the bit, possibly as selected elements of its result; None if it does not."""
    result = combination(parts, x, level)
    if result.shape == v.shape:
        return combination if result.dtype == v.dtype and torch.equal(result, v) else None
    gather_map = find_in_output(-v if combination.negative else v, combination._replace(negative=False)(parts, x, level))
    return None if gather_map is None else combination._replace(gather_map=gather_map)


def _fit(
    parts: Sequence[Tensor], v: Tensor, x: Tensor, level: Tensor, gather_map: GatherMap | None = None
) -> FittedSum | None:
    """Return the weighted sum of parts and sample that equals v up to rounding; None if there is none.

    With `gather_map`, the velocity is known only at these elements of parts and sample.

    The weights are least squares in float64, rounded to at most seven digits, so that two prompts give the same.
    A single part must have the weight 1, because no guidance scales one output.
    """
    if not _can_be_fitted(_gather_all(gather_map, parts), v):
        return None
    solved = _solve_least_squares([tensor.flatten() for tensor in _gather_all(gather_map, (*parts, x))], v.flatten())
    rounded = (_round_weights(solved, digits) for digits in DIGITS)
    each = [FittedSum(weights[:-1], weights[-1], v.dtype) for weights in rounded]
    best = _choose(each, parts, v, x, level, gather_map)
    return None if best is None or (len(parts) == 1 and (best.weights[0] != 1 or best.of_sample != 0)) else best


def _fit_rescaled(
    parts: Sequence[Tensor],
    v: Tensor,
    x: Tensor,
    level: Tensor,
    strengths: Sequence[float],
    gather_map: GatherMap | None = None,
) -> RescaledSum | None:
    """Return the rescaled sum of parts that equals v up to rounding; None if there is none.

    Call it before `_fit`: for one sample a rescaled sum is also a weighted sum, with weights r a of the parts, where the sum
    of a is 1, and (1 - r) / sigma of the sample for estimates of clean samples. If parts are equal, as without the layer
    that guidance skips, c is the first that fits. A strength of 0 rescales nothing.
    """
    if len(parts) < 2 or not any(strengths) or not _can_be_fitted(_gather_all(gather_map, parts), v):
        return None
    samples = zip(*_gather_all(gather_map, (*parts, x)), v, strict=True)
    fits = [_solve_least_squares([tensor.flatten() for tensor in each[:-1]], each[-1].flatten()) for each in samples]
    weights = torch.tensor([[weight / sum(fit[:-1]) for weight in fit[:-1]] for fit in fits]).mean(0).tolist()
    for strength, cond, clean in product(filter(None, strengths), range(len(parts)), (True, False)):
        each = [RescaledSum(_round_weights(weights, digits), cond, strength, clean, v.dtype) for digits in DIGITS]
        if (best := _choose(each, parts, v, x, level, gather_map)) is not None:
            return best
    return None


def _gather_all(gather_map: GatherMap | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the elements of tensors `[B, m]` that a map selects; all of them without a map."""
    return [*tensors] if gather_map is None else [gather_map.gather(tensor) for tensor in tensors]


def _can_be_fitted(parts: Sequence[Tensor], v: Tensor) -> bool:
    return len(parts) <= MOST_PARTS and v.dtype in ROUNDING and all(part.shape == v.shape for part in parts)


def _solve_least_squares(columns: Sequence[Tensor], wanted: Tensor) -> list[float]:
    """Return the weights of columns `[n]` whose sum is nearest to `wanted`, in float64; the smallest for equal columns.

    Columns are equal if guidance skips a layer without effect; LAPACK's default driver, gelsy, then misses the sum.
    """
    table, target = (each.detach().double().cpu() for each in (torch.stack([*columns], dim=1), wanted[:, None]))
    return torch.linalg.lstsq(table, target, driver="gelsd").solution[:, 0].tolist()


def _choose(
    candidates: Sequence[T], parts: Sequence[Tensor], v: Tensor, x: Tensor, level: Tensor, gather_map: GatherMap | None
) -> T | None:
    """Return the first candidate whose error is at most twice the least; None if the least exceeds rounding.

    The pipeline rounds each term of its sum, and for estimates of the clean sample also the terms divided by sigma.
    """
    size = float(v.double().norm())
    results = _gather_all(gather_map, [each(parts, x, level) for each in candidates])
    errors = [float((each.double() - v.double()).norm()) / size for each in results]
    # The fewest digits that fit as well, because scales have few, and rounding moves the last ones from prompt to prompt.
    best = next(each for each, error in zip(candidates, errors, strict=True) if error <= 2 * min(errors))
    terms = sum(abs(weight) * float(part.double().norm()) for weight, part in zip(best.weights, parts, strict=True))
    rounding = OPERATIONS * torch.finfo(v.dtype).eps * (terms + float((x.double() / per_sample(level.double(), x)).norm()))
    return best if min(errors) <= min(ROUNDING[v.dtype], rounding / size) else None


def _round_weights(weights: Sequence[float], digits: int) -> tuple[float, ...]:
    """Round weights to a number of significant digits."""
    return tuple(0.0 if abs(weight) < LEAST_WEIGHT else float(f"{weight:.{digits}g}") for weight in weights)


def _sum_weighted(weights: Sequence[float], parts: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of parts in float64."""
    first, *rest = (weight * part.double() for weight, part in zip(weights, parts, strict=True))
    return sum(rest, first)
