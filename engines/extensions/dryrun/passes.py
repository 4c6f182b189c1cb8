"""Calls that are traced twice and then repeated on paper, and updates of two micro-batches."""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from fluvial.engines.engine.engine import Engine, UpdateInfo
from fluvial.engines.engine.items import split
from fluvial.engines.extensions.simulate.fake import value_of
from fluvial.engines.extensions.simulate.mode import SimulatedMode
from fluvial.models.host_values import select_rows

MICRO_BATCHES = 2  # of an update that are traced: the first, and the last, which reduces gradients


class Traced(NamedTuple):
    """A call without gradient."""

    excess: int  # bytes at its peak beyond those that were held before
    counts: tuple[Counter[Any], ...]  # what the mode counted
    again: Any  # functions that make what it returned again; the result itself would hold memory


class Repeated:
    """Passes of networks without gradient; few are traced: the first of a phase, then the first of each kind.

    The first one of a phase may gather parameters. Further passes add what the traced one of their kind did to memory,
    traffic, FLOPs and host reads. What the traced one keeps for the next, such as keys of the prompt, is not kept longer.
    """

    def __init__(self, mode: SimulatedMode) -> None:
        self.mode = mode
        self._phase = ""  # of the last call
        self._usual: dict[Hashable, Traced] = {}  # by kind
        self._conditions = WeakIdKeyDictionary()  # that a network has seen

    def predict(self, predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a model's `predict`, repeated where there is no gradient.

        A further pass with the same conditioning is of another kind than the first, which computes what depends on it alone.
        """

        def predict_traced(module: Any, x: Tensor, level: Tensor, cond: Any, **options: Any) -> Tensor:
            call = partial(predict, module, x, level, cond, **options)
            if torch.is_grad_enabled():
                return call()
            cond_leaves = [leaf for leaf in optree.tree_leaves(cond) if isinstance(leaf, Tensor)]
            again = bool(cond_leaves) and cond_leaves[0] in self._conditions
            if cond_leaves:
                self._conditions[cond_leaves[0]] = True
            shapes = tuple(tuple(leaf.shape) for leaf in cond_leaves)
            traced: Tensor = self._of((self.mode.phase, id(module), tuple(x.shape), x.dtype, shapes, again), call)
            return traced

        return predict_traced

    def text(self, text: Callable[..., Any]) -> Callable[..., Any]:
        """Return a model's `text`, repeated: every prompt has as many tokens, see `models.pipelines.unfilled.Tokens`."""
        return lambda *args: self._of("text", partial(text, *args))

    def _of(self, kind: Hashable, call: Callable[[], Any]) -> Any:
        first, self._phase = self._phase != self.mode.phase, self.mode.phase
        usual = self._usual.get(kind)
        if first or usual is None:
            out, traced = self._trace(call)
            if not first:
                self._usual[kind] = traced
            return out
        self.mode.ledger.spike(usual.excess, "a network's pass, as traced before")
        for counter, more in zip(_counters(self.mode), usual.counts, strict=True):
            for key, number in more.items():
                counter[self.mode.phase if isinstance(key, str) else key._replace(phase=self.mode.phase)] += number
        return optree.tree_map(lambda made: made(), usual.again)

    def _trace(self, call: Callable[[], Any]) -> tuple[Any, Traced]:
        ledger = self.mode.ledger
        before, counted = ledger.now, tuple(counter.copy() for counter in _counters(self.mode))
        with ledger.inner_peak() as inner:
            out = call()
        counts = tuple(now - then for now, then in zip(_counters(self.mode), counted, strict=True))
        return out, Traced(inner.peak - before, counts, optree.tree_map(_again, out))


def _again(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes a tensor of the same shape, with the same values where they are known."""
    if not isinstance(tensor, FakeTensor):
        return tensor.clone
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    value = value_of(tensor)

    def make() -> Tensor:
        out = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        out.fluvial_value = value  # type: ignore[attr-defined]
        return out

    return make


def _counters(mode: SimulatedMode) -> tuple[Counter[Any], ...]:
    return mode.waits, mode.calls, mode.sent, mode.flops, mode.operations, mode.copied


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
        sizes = split(max(held, options.get("pad_to") or 0), [size] if isinstance(size, int) else size)
        most, self.micro_batches = sum(sizes[:MICRO_BATCHES]), len(sizes)
        if options.get("parts") is not None:
            options["parts"] = options["parts"][:most]
        if options.get("pad_to") is not None:
            options["pad_to"] = min(options["pad_to"], most)
        few = optree.tree_map(lambda tensor: select_rows(tensor, slice(most)), items)
        self._last = self.update(few, loss_fn, None if weight is None else weight[:most], **options)
        return self._last
