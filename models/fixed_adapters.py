"""Adapted layers while weights stay as they are, as in a rollout: what depends on the weights alone is computed once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.models.lora import lora_layers
from fluvial.models.lora_layer import (
    PARTS,
    _active,
    adapted_linear,
    is_merged,
    is_transformed,
    light_factors,
    merge_weight,
    rows_linear,
)
from fluvial.models.prompt_layers import LayerPlace, find_layers, replace_forwards

# Bytes of a merged weight that is kept. Merging larger ones takes a small share of the time of a product with them.
LARGEST = 2**20


@contextmanager
def merge_adapters(module: nn.Module) -> Iterator[None]:
    """Put W + (alpha / rank) B A in place of each frozen W inside the context; afterwards every W has its own bits.

    The sum of the active adapter, of any form, is rounded once to the dtype of W, so that small adapters fade in bfloat16.
    Memory: another copy of the weights of the adapted layers.

    Args:
        module: network with adapters and whole weights, neither sharded nor quantised.
    """
    held = list[tuple[Any, Tensor]]()
    try:
        for layer in lora_layers(module).values():
            active = {part: _active(layer, part) for part in PARTS if part in layer._modules}
            parts = {part: getattr(each, "weight", each) for part, each in active.items() if each is not None}
            if parts:
                name, weight = layer._active_adapter[0], layer._modules["base_layer"].weight
                held.append((layer, weight.data))
                held_parts = {part: each.detach() for part, each in parts.items()}
                weight.data = merge_weight(weight.data, held_parts, layer.scaling[name])
                layer.merged_adapters.append(name)
        yield
    finally:
        for layer, weight_before in held:
            layer._modules["base_layer"].weight.data = weight_before
            layer.merged_adapters.clear()


class FixedAdapters:
    """The layers of a network with low-rank adapters, whose weights do not change as long as the object lives.

    A layer that multiplies by W + (alpha / rank) B A keeps that sum, up to 1 MiB of it; any other keeps what it has found
    out about its adapter. The results have the same bits as without. Compiled blocks do not see it, so they need none.
    """

    def __init__(self, module: nn.Module) -> None:

        def search() -> list[LayerPlace]:
            return [
                LayerPlace(parent, name, part)
                for parent in module.modules()
                for name, part in parent._modules.items()
                if part is not None and hasattr(type(part), "light_product")
            ]

        adapted = any(hasattr(part, "peft_config") for part in (module, *module.children()))  # experts are children
        self._layers = find_layers(module, "light_product", search) if adapted else []
        self._forwards = [_Fixed(layer) for layer in self._layers]

    @contextmanager
    def prediction(self) -> Iterator[None]:
        """Make the layers use what they have kept; with gradients enabled they compute as always."""
        with replace_forwards(self._layers, self._forwards):
            yield


class _Fixed:
    """The forward pass of an adapted layer whose weights do not change.

    What is kept holds for inputs of one number of tokens, and for one active adapter; other calls go to the layer itself.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self._own = layer, layer.forward
        self._known: tuple[Any, ...] | None = None  # what a call must have in common with the first one
        self._product: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return x (W + scale B A)^T + bias, `[..., out]`."""
        layer = self._layer
        seen = (x.shape[1:-1], x.dtype, layer._active_adapter, layer._disable_adapters)
        if self._known is None and not (args or kwargs or torch.is_grad_enabled()):
            self._known, self._product = seen, _product(layer, x)
        if self._product is None or seen != self._known or args or kwargs or torch.is_grad_enabled():
            return self._own(x, *args, **kwargs)
        return self._product(x)


def _product(layer: Any, x: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return the product of an adapted layer for inputs like x, None where the layer has no light pass for them."""
    # The layer dequantises the weights of another base layer in its own way.
    plain = type(layer._modules["base_layer"]) is nn.Linear and not is_transformed(x)
    factors = light_factors(layer, x) if plain else None
    if factors is None:
        return None
    weight, _, a, b, scale = factors
    base, name = layer._modules["base_layer"], layer._active_adapter[0]
    down, up = (layer._modules[part]._modules[name] for part in ("lora_A", "lora_B"))
    # Parameters are looked up at each call: sharded weights are other tensors after each gathering.
    if not is_merged(layer.light_product, x, weight):
        return lambda x: adapted_linear(x, base.weight, base.bias, down.weight, up.weight, scale)
    if weight.numel() * weight.element_size() > LARGEST:
        return None
    merged = torch.addmm(weight, b, a, alpha=scale)
    return lambda x: rows_linear(x.reshape(-1, x.shape[-1]), merged, base.bias).view(*x.shape[:-1], -1)
