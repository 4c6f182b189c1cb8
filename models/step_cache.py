"""Step caches: results of a chunk's forward passes that later steps of the rollout reuse.

A cache between deterministic steps holds the later blocks of a pass, or the unconditional half of guidance.

With k the last step that was computed in full, h_i and y_i the outputs of the first and the last block at step i, and v_i
and u_i the conditional and the unconditional prediction:

    first block    y_i = h_i + (y_k - h_k)    if mean|h_i - h_k| < threshold * mean|h_k| for every sample of the batch
    of order m     y_i = h_i + sum_{n <= m} D_n (i - k)^n / n!    with D_0 = y_k - h_k and the differences
                   D_n = (D_{n-1} - D'_{n-1}) / (k - k') to those of k', the step before k that was computed in full
    guidance       u_i = v_i - (v_k - u_k)    if i - k < every

Sources: first-block cache of ParaAttention, after TeaCache (arXiv 2411.19108), which diffusers lacks for SD3, because its
last block returns no text stream; the series is TaylorSeer's (2503.06923); CFG cache of FasterCache (2410.19355), here
without its frequency weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import factorial
from typing import Any, ClassVar, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core.checks import check_fields
from fluvial.models.fixed_adapters import FixedAdapters
from fluvial.models.guidance import GuidanceDifference, predict_halves
from fluvial.models.prompt_layers import PromptKeys, PromptLayers, replace_forwards
from fluvial.models.protocol import DiffusionModel


@dataclass(frozen=True)
class NoCache:
    """Every step is computed in full."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class FirstBlockCache:
    """Steps skip the blocks after the first if the first block's output has hardly changed since an earlier step.

    Samples then depend on the other samples of their batch.

    Args:
        threshold: Largest relative change of the first block's output, without a unit.
        order: Order of the series over steps that extrapolates the sum of the other blocks; 0 repeats it.
    """

    kind: ClassVar[str] = "first_block"
    threshold: float = 0.1
    order: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "rollout.step_cache", threshold=(1e-12, 1e6), order=(0, 4))


@dataclass(frozen=True)
class GuidanceCache:
    """Steps compute the conditional half of guidance, and take its difference to the other half from an earlier step.

    With classifier-free guidance of scale g, the error of a prediction is (g - 1) times the change of the difference.

    Args:
        every: Length of a cycle of steps; its first step computes both halves, and so does each step that is trained on.
    """

    kind: ClassVar[str] = "guidance"
    every: int = 2

    def __post_init__(self) -> None:
        check_fields(self, "rollout.step_cache", every=(2, 1024))


StepCacheChoice = NoCache | FirstBlockCache | GuidanceCache
Reuse = Literal["all", "outside_blocks", "none"]


class _FullPass(NamedTuple):
    """Values of a pass that was computed in full, for its last run of blocks that return tensors of one shape."""

    step: int  # number of the prediction
    first: int  # index of the first block of the run
    last: int
    heads: list[Tensor | None]  # tensors that the first block returned
    changes: list[list[Tensor | None]]  # D_n of each tensor, by n; None if the last block returned none


class StepCache:
    """Cache that lets forward passes skip blocks, for one batch of samples on their way through a schedule.

    The samples of a batch skip blocks together, so the bits of a sample depend on its batch. The decision is read from the
    device once per pass, because control flow depends on it.

    Memory: 2 + order copies of a block's output, for each pass of a prediction.

    Args:
        model: adapter; its last blocks must return tensors of one shape, as those of a transformer do. The output of the
            first of them is compared, and the blocks before it are always computed.
        module: its network, with adapters or sharded. Compiled blocks run compiled when they are computed.
        threshold: largest relative change of the first block's output, without a unit; about 0.1.
        order: order of the series that extrapolates the sum of the other blocks, see the module.
    """

    def __init__(self, model: DiffusionModel, module: nn.Module, threshold: float, order: int = 0) -> None:
        self._threshold, self._order, self._blocks = threshold, order, list(model.blocks(module))
        self._forwards = [self._wrap_forward(index, block.forward) for index, block in enumerate(self._blocks)]
        self._known: dict[int, _FullPass] = {}  # by the number of the pass within a prediction
        self._step = -1
        self._begin(exact=True)

    @contextmanager
    def prediction(self, *, exact: bool) -> Iterator[None]:
        """Allow the passes of one prediction to skip blocks, unless it must be exact.

        Raises:
            ValueError: gradients are enabled, which skipped blocks would not have; or the last block returns other shapes
                than the one before.
        """
        if torch.is_grad_enabled():
            raise ValueError("step cache: gradients are enabled, and blocks left out have none: use torch.no_grad()")
        self._begin(exact=exact)
        with replace_forwards(self._blocks, self._forwards):
            yield
            self._end_pass()

    def _begin(self, *, exact: bool) -> None:
        self._step, self._exact, self._number, self._last = self._step + 1, exact, -1, len(self._blocks)
        self._first = -1  # first block of the current run of blocks with outputs of one shape
        self._head: Any = None  # outputs of the first and the last block of that run
        self._tail: Any = None
        self._reused: _FullPass | None = None

    def _wrap_forward(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a block; a pass calls the blocks in order."""

        def forward_or_reuse(*args: Any, **kwargs: Any) -> Any:
            if index <= self._last:
                self._end_pass()
                self._number, self._first, self._reused = self._number + 1, -1, None
            self._last = index
            if self._reused is not None:
                return self._head if index < self._reused.last else self._extrapolate(self._reused)
            returned = forward(*args, **kwargs)
            known = None if self._exact else self._known.get(self._number)
            if known is not None and known.first == index and self._is_close(returned, known):
                self._head, self._reused = returned, known
            elif self._first < 0 or _differ(self._head, returned):
                self._first, self._head = index, returned
            self._tail = returned
            return returned

        return forward_or_reuse

    def _is_close(self, returned: Any, known: _FullPass) -> bool:
        """Return whether a block's output has hardly changed, for every sample."""
        streams = zip(_list_tensors(returned), known.heads, strict=True)
        pairs = [(now, before) for now, before in streams if now is not None and before is not None]
        if any(now.shape != before.shape for now, before in pairs):
            return False
        changes = [_mean_magnitude(now - before) / _mean_magnitude(before) for now, before in pairs]
        return bool((torch.stack(changes) < self._threshold).all())

    def _extrapolate(self, known: _FullPass) -> Any:
        """Return an estimate of the last block's output."""
        (tensors, tree), ends = optree.tree_flatten(self._head, none_is_leaf=True), list[Tensor | None]()
        for head, change, *differences in zip(tensors, *known.changes, strict=True):
            for n, difference in enumerate(differences if change is not None else (), start=1):
                change = change + difference * ((self._step - known.step) ** n / factorial(n))
            ends.append(None if change is None else head + change)
        return optree.tree_unflatten(tree, ends)

    def _end_pass(self) -> None:
        """Keep the values of a pass, if it was computed in full."""
        if self._first < 0 or self._reused is not None:
            return
        if self._last == self._first:
            raise ValueError(
                "step cache: the last block returns other shapes than the one before, so that none can be left out: set "
                "rollout.step_cache to none or guidance for this model"
            )
        heads, before = _list_tensors(self._head), self._known.get(self._number)
        changes = [_subtract(_list_tensors(self._tail), heads)]
        if before is not None and not _differ(before.changes[0], changes[0]):
            for earlier in before.changes[: self._order]:
                difference = _subtract(changes[-1], earlier)
                changes.append([None if d is None else d / (self._step - before.step) for d in difference])
        self._known[self._number] = _FullPass(self._step, self._first, self._last, heads, changes)


def _list_tensors(returned: Any) -> list[Any]:
    """Return the tensors of a tuple, or a single tensor."""
    return list(optree.tree_leaves(returned, none_is_leaf=True))


def _subtract(ends: list[Any], starts: list[Any]) -> list[Any]:
    """Return the difference of each tensor; None for a tensor that a block no longer returned."""
    return [None if end is None else end - start for end, start in zip(ends, starts, strict=True)]


def _differ(head: Any, returned: Any) -> bool:
    """Return whether a block returned other shapes than the first of its run; a stream may end."""
    before, now = _list_tensors(head), _list_tensors(returned)
    shapes = [(None if h is None else h.shape, None if n is None else n.shape) for h, n in zip(before, now, strict=False)]
    return len(before) != len(now) or any(n is not None and h != n for h, n in shapes)


def _mean_magnitude(x: Tensor) -> Tensor:
    """Return the mean magnitude per sample, `[B]`."""
    return x.abs().flatten(1).mean(1)


class PassReuse:
    """All caches of a chunk.

    Args:
        model, module: adapter and network, whose weights do not change as long as the object lives.
        layers: layers that see the prompt alone whose results are kept: all, those outside of the repeated blocks, or none.
            With all, merged weights are kept, too.
        keys: whether keys and values of the prompt's tokens are kept, too.
        cache: cache between deterministic steps.
        guided: whether the passes have guidance.

    Raises:
        ValueError: the network cannot keep keys.
    """

    def __init__(
        self,
        model: DiffusionModel,
        module: nn.Module,
        *,
        layers: Reuse,
        cache: StepCacheChoice,
        guided: bool,
        keys: bool = False,
    ) -> None:
        self._adapters = FixedAdapters(module) if layers == "all" else None
        self._blocks = StepCache(model, module, cache.threshold, cache.order) if isinstance(cache, FirstBlockCache) else None
        self._difference = GuidanceDifference(cache.every) if isinstance(cache, GuidanceCache) and guided else None
        # Separate caches for steps that compute one half of guidance, which gives the layers other inputs than both do.
        kinds = 1 if self._difference is None else 2
        self._layers = [
            PromptLayers(model, module, in_blocks=layers == "all") for _ in range(kinds if layers != "none" else 0)
        ]
        self._keys = [PromptKeys(module) for _ in range(kinds if keys else 0)]

    @contextmanager
    def step(self, *, exact: bool) -> Iterator[Callable[..., Any]]:
        """Reuse kept results in the passes of a step, and yield the function that computes both halves of guidance.

        Args:
            exact: compute the step in full, without `cache`.
        """
        difference = self._difference
        reuses = difference is not None and difference.advance(exact=exact)
        with (
            nullcontext() if self._adapters is None else self._adapters.prediction(),
            self._layers[reuses].prediction() if self._layers else nullcontext(),
            self._keys[reuses].prediction() if self._keys else nullcontext(),
            nullcontext() if self._blocks is None else self._blocks.prediction(exact=exact),
        ):
            yield predict_halves if difference is None else difference.reuse if reuses else difference.compute
