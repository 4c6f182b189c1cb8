"""Full tensors of a (sharded) module's weights, gathered one at a time, so that no rank holds the whole model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fluvial.engines.engine.world import collective
from fluvial.models.lora import find_lora_layers, is_adapter, map_adapter_names, map_adapter_parts
from fluvial.models.lora_layer import MAGNITUDE, compute_row_norms, merge_weight, widen
from fluvial.models.quantised import QuantisedLinear, find_quantised


@collective
def gather_weights(
    module: nn.Module,
    *,
    average: Mapping[str, Tensor] | None = None,
    adapter: str | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, copy of the full tensor on the CPU), one at a time.

    Without adapters these are the module's parameters and persistent buffers, in the order of its state dict. With adapters,
    `merge` yields the tensors of the plain module, e.g. W + (alpha / rank) B A, computed in float32. Otherwise only the
    tensors of `adapter` are yielded, with the names of PEFT and diffusers. At most one layer is gathered at a time.

    Args:
        module: module, sharded or not.
        average: (sharded) tensors to use instead of the module's own, by name of the parameter.
        adapter: adapter to yield or to merge; by default `default` is merged.
        merge: merge the adapter into the weights.
        dtype: dtype of the yielded floating-point tensors; by default each keeps its own.
        names: exported names to yield, in their order, the same on all ranks; by default all.

    Raises:
        ValueError: the module has adapters and neither argument is given, it has no adapter of that name, or `average` does
            not fit it.
    """
    sources = _list_sources(module, average, adapter, merge)
    for name in sources if names is None else names:
        yield name, sources[name].full(dtype).to("cpu", copy=True, memory_format=torch.contiguous_format)


def layout(
    module: nn.Module,
    *,
    average: Mapping[str, Tensor] | None = None,
    adapter: str | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that `gather_weights` yields for the same arguments, on the meta device."""
    return {
        name: torch.empty(source.shape, dtype=source.dtype(dtype), device="meta")
        for name, source in _list_sources(module, average, adapter, merge).items()
    }


class _Source(NamedTuple):
    """Source of one exported tensor: W, W with an adapter, or the row norms of DoRA."""

    weight: Tensor | QuantisedLinear  # a quantised layer is dequantised in `full`
    parts: Mapping[str, Tensor] | None = None  # of an adapter that is merged into it
    scaling: float = 1.0
    norm_offset: Tensor | None = None  # DoRA's trained offset to the row norms of `weight`; the norms are exported

    def full(self, dtype: torch.dtype | None) -> Tensor:
        """Gather the shards, and return the full tensor on their device."""
        tensor = self.weight.weight if isinstance(self.weight, QuantisedLinear) else gather(self.weight)
        adapter = self.norm_offset if self.parts is None else next(iter(self.parts.values()))
        tensor = tensor if adapter is None else tensor.to(adapter.device)  # the weight may be offloaded to the host
        if self.norm_offset is not None:
            return (compute_row_norms(tensor) + gather(self.norm_offset)).to(self.dtype(dtype))
        if self.parts is not None:
            parts = {part: gather(factor) for part, factor in self.parts.items()}
            tensor = merge_weight(widen(tensor), parts, self.scaling)
        return tensor.to(self.dtype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        weight = self.weight
        if self.norm_offset is not None:
            return tuple(self.norm_offset.shape)
        return (weight.out_features, weight.in_features) if isinstance(weight, QuantisedLinear) else tuple(weight.shape)

    def dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of the exported tensor if floating-point tensors are cast to `dtype`."""
        if self.norm_offset is not None:
            return widen(self.norm_offset).dtype  # few numbers, whose small differences matter
        floats = isinstance(self.weight, QuantisedLinear) or self.weight.is_floating_point()
        return dtype if dtype is not None and floats else self.weight.dtype


def _list_sources(
    module: nn.Module, average: Mapping[str, Tensor] | None, adapter: str | None, merge: bool
) -> dict[str, _Source]:
    """Return the source of each exported tensor, by its exported name."""
    state: dict[str, Any] = module.state_dict()
    state.update((f"{name}.weight", layer) for name, layer in find_quantised(module).items())
    for name, tensor in (average or {}).items():
        if name not in state or state[name].shape != tensor.shape:
            here = list(state[name].shape) if name in state else "nothing"
            raise ValueError(f"export: the average of {name} has shape {list(tensor.shape)}, the module has {here} there")
        state[name] = tensor.detach()
    layers = find_lora_layers(module)
    if adapter is None and not layers:
        return {name: _Source(tensor) for name, tensor in state.items()}
    if adapter is None and not merge:
        raise ValueError("export: the module has adapters: name one with `adapter`, or set merge=True")
    chosen = adapter or "default"
    names, parts = map_adapter_names(module, chosen), map_adapter_parts(module, chosen)
    if not merge:
        bases = {each[MAGNITUDE]: f"{layer}.base_layer.weight" for layer, each in parts.items() if MAGNITUDE in each}
        return {
            short: _Source(state[bases[short]], norm_offset=state[full]) if short in bases else _Source(state[full])
            for short, full in names.items()
        }
    sources = {}
    for name, tensor in state.items():
        layer, _, leaf = name.rpartition(".base_layer.")
        if layer in layers:
            factors = {part: state[names[short]] for part, short in parts[layer].items()}
            merged = {"parts": factors, "scaling": layers[layer].scaling[chosen]} if leaf == "weight" else {}
            sources[f"{layer}.{leaf}"] = _Source(tensor, **merged)
        elif not is_adapter(name):
            sources[name] = _Source(tensor)
    return sources


@collective
def gather(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded, and return the full tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
