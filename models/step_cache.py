"""Caches of a chunk on its way through a schedule: results of a pass that later ones reuse.

Caches between deterministic steps are of the later blocks of a pass, or of the unconditional half of guidance.

With k the last step that was computed whole, h_i the output of the first block at step i and y_i that of the last one, v_i
the prediction and u_i the unconditional one:

    first block    y_i = h_i + (y_k - h_k)    if mean|h_i - h_k| < threshold * mean|h_k| for every sample of the batch
    of order m     y_i = h_i + sum_{n <= m} D_n (i - k)^n / n!    with D_0 = y_k - h_k and the differences
                   D_n = (D_{n-1} - D'_{n-1}) / (k - k') to those of k', the step before k that was computed whole
    guidance       u_i = v_i - (v_k - u_k)    if i - k < every

Sources: first-block cache of ParaAttention, after TeaCache (arXiv 2411.19108), which diffusers does not have for SD3, whose
last block returns no text stream; its series is TaylorSeer's (2503.06923); the CFG cache of FasterCache (2410.19355), here
without its weights of frequencies.
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
from fluvial.models.guidance import KeptDifference, guidance_halves
from fluvial.models.prompt_layers import PromptKeys, PromptLayers, replace_forwards
from fluvial.models.protocol import DiffusionModel


@dataclass(frozen=True)
class NoCache:
    """Every step is computed whole."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class FirstBlockCache:
    """Steps leave out the blocks after the first where the output of that one has hardly changed since an earlier step.

    Samples then depend on those they are generated with.

    Args:
        threshold: Largest relative change of the first block's output, without a unit.
        order: Order of the series over steps that continues what the other blocks add; 0 repeats it.
    """

    kind: ClassVar[str] = "first_block"
    threshold: float = 0.1
    order: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "rollout.step_cache", threshold=(1e-12, 1e6), order=(0, 4))


@dataclass(frozen=True)
class GuidanceCache:
    """Steps compute the conditional half of guidance, and take its difference to the other half from an earlier step.

    With classifier-free guidance of scale g a prediction is off by (g - 1) times what the difference has changed by.

    Args:
        every: Length of a cycle of steps; its first step computes both halves, as each step that is trained on does.
    """

    kind: ClassVar[str] = "guidance"
    every: int = 2

    def __post_init__(self) -> None:
        check_fields(self, "rollout.step_cache", every=(2, 1024))


StepCacheChoice = NoCache | FirstBlockCache | GuidanceCache
Reuse = Literal["all", "outside_blocks", "none"]


class _Whole(NamedTuple):
    """Values kept of a pass that was computed whole, of its last run of blocks that return tensors of one shape."""

    step: int  # number of the prediction
    first: int  # index of the first block of the run
    last: int
    heads: list[Tensor | None]  # tensors that the first block returned
    changes: list[list[Tensor | None]]  # D_n of each tensor, by n; None where the last block returned none


class StepCache:
    """Lets the passes of a network leave out blocks, for one batch of samples on their way through a schedule.

    The samples of a batch leave out blocks together, so the bits of a sample depend on its batch. Whether they do is read
    from the device, once per pass: what follows depends on it.

    Memory: 2 + order copies of what a block returns, for each pass of a prediction.

    Args:
        model: adapter; its last blocks must return tensors of one shape, as those of a transformer do. The first of them is
            the one whose output is compared, and those before it are always computed.
        module: its network, with adapters or sharded. Of compiled blocks those that are computed run compiled.
        threshold: largest relative change of the first block's output, without a unit; about 0.1.
        order: order of the series that continues what the other blocks add, see the module.
    """

    def __init__(self, model: DiffusionModel, module: nn.Module, threshold: float, order: int = 0) -> None:
        self._threshold, self._order, self._blocks = threshold, order, list(model.blocks(module))
        self._forwards = [self._wrap_forward(place, block.forward) for place, block in enumerate(self._blocks)]
        self._known: dict[int, _Whole] = {}  # by the pass's number within a prediction
        self._step = -1
        self._begin(exact=True)

    @contextmanager
    def prediction(self, *, exact: bool) -> Iterator[None]:
        """Make the passes of one prediction leave out blocks, unless it must be exact; the bits of that one stay.

        Raises:
            ValueError: gradients are enabled, which blocks that are left out would not have; or the last block returns other
                shapes than the one before.
        """
        if torch.is_grad_enabled():
            raise ValueError("step cache: gradients are enabled, and blocks left out have none: use torch.no_grad()")
        self._begin(exact=exact)
        with replace_forwards(self._blocks, self._forwards):
            yield
            self._end_pass()

    def _begin(self, *, exact: bool) -> None:
        self._step, self._exact, self._number, self._last = self._step + 1, exact, -1, len(self._blocks)
        self._first = -1  # of the run of blocks with outputs of one shape that the pass is in
        self._head: Any = None  # what the first and the last block of that run returned
        self._tail: Any = None
        self._reused: _Whole | None = None

    def _wrap_forward(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a block, which a pass calls in order."""

        def forward_or_reuse(*args: Any, **kwargs: Any) -> Any:
            if place <= self._last:
                self._end_pass()
                self._number, self._first, self._reused = self._number + 1, -1, None
            self._last = place
            if self._reused is not None:
                return self._head if place < self._reused.last else self._extrapolate(self._reused)
            returned = forward(*args, **kwargs)
            known = None if self._exact else self._known.get(self._number)
            if known is not None and known.first == place and self._is_close(returned, known):
                self._head, self._reused = returned, known
            elif self._first < 0 or _differ(self._head, returned):
                self._first, self._head = place, returned
            self._tail = returned
            return returned

        return forward_or_reuse

    def _is_close(self, returned: Any, known: _Whole) -> bool:
        """Return whether what a block returned has hardly changed, for each sample."""
        streams = zip(_tensors(returned), known.heads, strict=True)
        pairs = [(now, before) for now, before in streams if now is not None and before is not None]
        if any(now.shape != before.shape for now, before in pairs):
            return False
        changes = [_mean(now - before) / _mean(before) for now, before in pairs]
        return bool((torch.stack(changes) < self._threshold).all())

    def _extrapolate(self, known: _Whole) -> Any:
        """Return what the last block would return."""
        (tensors, tree), ends = optree.tree_flatten(self._head, none_is_leaf=True), list[Tensor | None]()
        for head, change, *differences in zip(tensors, *known.changes, strict=True):
            for n, difference in enumerate(differences if change is not None else (), start=1):
                change = change + difference * ((self._step - known.step) ** n / factorial(n))
            ends.append(None if change is None else head + change)
        return optree.tree_unflatten(tree, ends)

    def _end_pass(self) -> None:
        """Keep what the blocks did, if they were computed."""
        if self._first < 0 or self._reused is not None:
            return
        if self._last == self._first:
            raise ValueError(
                "step cache: the last block returns other shapes than the one before, so that none can be left out: set "
                "rollout.step_cache to none or guidance for this model"
            )
        heads, before = _tensors(self._head), self._known.get(self._number)
        changes = [_subtract(_tensors(self._tail), heads)]
        if before is not None and not _differ(before.changes[0], changes[0]):
            for earlier in before.changes[: self._order]:
                difference = _subtract(changes[-1], earlier)
                changes.append([None if d is None else d / (self._step - before.step) for d in difference])
        self._known[self._number] = _Whole(self._step, self._first, self._last, heads, changes)


def _tensors(returned: Any) -> list[Any]:
    """Return the tensors of a tuple or of a tensor alone."""
    return list(optree.tree_leaves(returned, none_is_leaf=True))


def _subtract(ends: list[Any], starts: list[Any]) -> list[Any]:
    """Return the difference of each tensor, None for those that a block no longer returned."""
    return [None if end is None else end - start for end, start in zip(ends, starts, strict=True)]


def _differ(head: Any, returned: Any) -> bool:
    """Return whether a block returned other shapes than the first of its run; a stream may end."""
    before, now = _tensors(head), _tensors(returned)
    shapes = [(None if h is None else h.shape, None if n is None else n.shape) for h, n in zip(before, now, strict=False)]
    return len(before) != len(now) or any(n is not None and h != n for h, n in shapes)


def _mean(x: Tensor) -> Tensor:
    """Return the mean magnitude per sample, `[B]`."""
    return x.abs().flatten(1).mean(1)


class PassReuse:
    """The caches of a chunk.

    Args:
        model, module: adapter and network, whose weights do not change as long as the object lives.
        layers: layers that see the prompt alone whose results are kept: all, those outside of the repeated blocks, or none.
            With all, merged weights are kept, too.
        keys: whether keys and values of the prompt's tokens are kept, too.
        cache: what deterministic steps take over.
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
        self._kept = KeptDifference(cache.every) if isinstance(cache, GuidanceCache) and guided else None
        # By whether a step computes one half of guidance, which gives the layers other inputs than both do.
        kinds = 1 if self._kept is None else 2
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
        kept, near = self._kept, self._kept is not None and self._kept.is_near(exact=exact)
        with (
            nullcontext() if self._adapters is None else self._adapters.prediction(),
            self._layers[near].prediction() if self._layers else nullcontext(),
            self._keys[near].prediction() if self._keys else nullcontext(),
            nullcontext() if self._blocks is None else self._blocks.prediction(exact=exact),
        ):
            yield guidance_halves if kept is None else kept.reuse if near else kept.compute
