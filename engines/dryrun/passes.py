"""Forward passes that are traced twice and then repeated on paper, and updates of two micro-batches."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fluvial.engines.fsdp.engine import Engine, UpdateInfo
from fluvial.engines.simulate.mode import SimulatedMode

TRACED = 2  # passes of a kind that are traced: the first, which gathers parameters, and one like all others
MICRO_BATCHES = 2  # of an update that are traced: the first, and the last, which reduces gradients


class Pass(NamedTuple):
    """A forward pass without gradient."""

    excess: int  # bytes at its peak beyond those that were held before
    counts: tuple[Counter[Any], ...]  # what the mode counted
    out: Tensor


class RepeatedPasses:
    """Predictions of a model; those without gradient are traced `TRACED` times per phase and kind of input.

    Further ones add what the last traced one did to memory, traffic, FLOPs and host reads.
    """

    def __init__(self, predict: Callable[..., Tensor], mode: SimulatedMode) -> None:
        self.predict, self.mode = predict, mode
        self._known: dict[Hashable, list[Pass]] = {}

    def __call__(self, module: Any, x: Tensor, level: Tensor, cond: Any, **options: Any) -> Tensor:
        """Return the prediction."""
        if torch.is_grad_enabled():
            return self.predict(module, x, level, cond, **options)
        shapes = tuple(tuple(leaf.shape) for leaf in optree.tree_leaves(cond) if isinstance(leaf, Tensor))
        kind = (self.mode.phase, id(module), tuple(x.shape), x.dtype, shapes)
        known = self._known.setdefault(kind, [])
        if len(known) < TRACED:
            known.append(self._traced(module, x, level, cond, options))
            return known[-1].out
        last = known[-1]
        self.mode.ledger.spike(last.excess, "a network's pass, as traced before")
        for counter, more in zip(_counters(self.mode), last.counts, strict=True):
            counter.update(more)
        return torch.empty_like(last.out)

    def _traced(self, module: Any, x: Tensor, level: Tensor, cond: Any, options: dict[str, Any]) -> Pass:
        ledger = self.mode.ledger
        before, counted = ledger.now, tuple(counter.copy() for counter in _counters(self.mode))
        with ledger.inner_peak() as inner:
            out = self.predict(module, x, level, cond, **options)
        counts = tuple(now - then for now, then in zip(_counters(self.mode), counted, strict=True))
        return Pass(inner.peak - before, counts, out)


def _counters(mode: SimulatedMode) -> tuple[Counter[Any], ...]:
    return mode.waits, mode.calls, mode.sent, mode.flops, mode.operations


class ShortUpdates:
    """Updates of an engine: the first of `MICRO_BATCHES` micro-batches, the others on paper.

    The items that are not computed stay, so that the memory is theirs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.update = engine, engine.update
        self.micro_batches = 0  # of an update of the run
        self._last: UpdateInfo | None = None

    def __call__(self, items: Any, loss_fn: Any, weight: Tensor | None = None, **options: Any) -> UpdateInfo:
        """Take an update, see `Engine.update`."""
        if self._last is not None:
            self.engine.updates += 1
            return self._last
        held = len(optree.tree_leaves(items)[0])
        size = options.get("micro_batch") or held
        most = size * MICRO_BATCHES
        self.micro_batches = -(-max(held, options.get("pad_to") or 0) // size)
        if options.get("parts") is not None:
            options["parts"] = options["parts"][:most]
        if options.get("pad_to") is not None:
            options["pad_to"] = min(options["pad_to"], most)
        few = optree.tree_map(lambda tensor: tensor[:most], items)
        self._last = self.update(few, loss_fn, None if weight is None else weight[:most], **options)
        return self._last
