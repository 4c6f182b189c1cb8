"""Shortcuts of a dry run: passes that are traced twice and then only counted, and updates of two micro-batches."""

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
from fluvial.engines.extensions.simulate.fake import read_value
from fluvial.engines.extensions.simulate.mode import SimulatedMode
from fluvial.models.host_values import select_rows

MICRO_BATCHES = 2  # traced per update: the first, and the last, which reduces gradients


class TracedCall(NamedTuple):
    """Costs and result of a call without gradient."""

    excess: int  # bytes at its peak beyond those held before
    counts: tuple[Counter[Any], ...]  # increments of the mode's counters
    factories: Any  # functions that rebuild the tensors of the result; the result itself would hold memory


class PassRepeater:
    """Repeater of forward passes without gradient; it traces the first of a phase, then the first of each kind.

    The first pass of a phase may gather parameters. Further passes repeat the memory, traffic, FLOPs and host reads of the
    traced pass of their kind. They do not extend the life of its caches, such as keys of the prompt.
    """

    def __init__(self, mode: SimulatedMode) -> None:
        self.mode = mode
        self._last_phase = ""
        self._traced: dict[Hashable, TracedCall] = {}  # by kind
        self._seen_conditions = WeakIdKeyDictionary()

    def wrap_predict(self, predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a model's `predict` whose passes without gradient are repeated.

        The first pass with a conditioning computes what depends on it alone, so later passes are of another kind.
        """

        def predict_traced(module: Any, x: Tensor, level: Tensor, cond: Any, **options: Any) -> Tensor:
            call = partial(predict, module, x, level, cond, **options)
            if torch.is_grad_enabled():
                return call()
            cond_leaves = [leaf for leaf in optree.tree_leaves(cond) if isinstance(leaf, Tensor)]
            is_known = bool(cond_leaves) and cond_leaves[0] in self._seen_conditions
            if cond_leaves:
                self._seen_conditions[cond_leaves[0]] = True
            shapes = tuple(tuple(leaf.shape) for leaf in cond_leaves)
            out: Tensor = self._run((self.mode.phase, id(module), tuple(x.shape), x.dtype, shapes, is_known), call)
            return out

        return predict_traced

    def wrap_text(self, text: Callable[..., Any]) -> Callable[..., Any]:
        """Return a model's `text` whose calls are repeated: all prompts have the same length (`pipelines.unfilled`)."""
        return lambda *args: self._run("text", partial(text, *args))

    def _run(self, kind: Hashable, call: Callable[[], Any]) -> Any:
        is_first, self._last_phase = self._last_phase != self.mode.phase, self.mode.phase
        traced = self._traced.get(kind)
        if is_first or traced is None:
            out, traced = self._trace(call)
            if not is_first:
                self._traced[kind] = traced
            return out
        self.mode.ledger.add_spike(traced.excess, "a network's pass, as traced before")
        for counter, increments in zip(_list_counters(self.mode), traced.counts, strict=True):
            for key, number in increments.items():
                counter[self.mode.phase if isinstance(key, str) else key._replace(phase=self.mode.phase)] += number
        return optree.tree_map(lambda make: make(), traced.factories)

    def _trace(self, call: Callable[[], Any]) -> tuple[Any, TracedCall]:
        ledger = self.mode.ledger
        before, counts_before = ledger.now, tuple(counter.copy() for counter in _list_counters(self.mode))
        with ledger.track_peak() as inner:
            out = call()
        counts = tuple(now - then for now, then in zip(_list_counters(self.mode), counts_before, strict=True))
        return out, TracedCall(inner.peak - before, counts, optree.tree_map(_make_factory, out))


def _make_factory(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes a tensor of the same shape, with the same values if they are known."""
    if not isinstance(tensor, FakeTensor):
        return tensor.clone
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    value = read_value(tensor)

    def make() -> Tensor:
        out = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        out.fluvial_value = value  # type: ignore[attr-defined]
        return out

    return make


def _list_counters(mode: SimulatedMode) -> tuple[Counter[Any], ...]:
    return mode.waits, mode.calls, mode.sent, mode.flops, mode.operations, mode.copied


class ShortUpdates:
    """Replacement of `Engine.update`: the first update runs `MICRO_BATCHES` micro-batches, later ones are only counted.

    All items stay alive, so that their memory counts.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.update = engine, engine.update
        self.micro_batches = 0  # number per update of the run
        self._last: UpdateInfo | None = None

    def __call__(self, items: Any, loss_fn: Any, weight: Tensor | None = None, **options: Any) -> UpdateInfo:
        """Run a short update, see `Engine.update`."""
        if self._last is not None:
            self.engine.updates += 1
            return self._last
        count = len(optree.tree_leaves(items)[0])
        size = options.get("micro_batch") or count
        sizes = split(max(count, options.get("pad_to") or 0), [size] if isinstance(size, int) else size)
        most, self.micro_batches = sum(sizes[:MICRO_BATCHES]), len(sizes)
        if options.get("parts") is not None:
            options["parts"] = options["parts"][:most]
        if options.get("pad_to") is not None:
            options["pad_to"] = min(options["pad_to"], most)
        few = optree.tree_map(lambda tensor: select_rows(tensor, slice(most)), items)
        self._last = self.update(few, loss_fn, None if weight is None else weight[:most], **options)
        return self._last
