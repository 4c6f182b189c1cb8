"""Adapted layers with fixed weights, as in a rollout: values that depend on the weights alone are computed once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.models.lora import find_lora_layers
from fluvial.models.lora_layer import (
    PARTS,
    _get_active,
    adapted_linear,
    is_merged,
    is_transformed,
    light_factors,
    merge_weight,
    rows_linear,
)
from fluvial.models.prompt_layers import RegisteredLayer, find_layers, replace_forwards

# Largest merged weight that is kept, in bytes. Merging larger ones takes a small share of the time of a product with them.
LARGEST = 2**20


@contextmanager
def merge_adapters(module: nn.Module) -> Iterator[None]:
    """Replace each frozen W by W + (alpha / rank) B A inside the context; afterwards every W has its bits from before.

    The sum with the active adapter, of any form, is rounded once to the dtype of W, so small adapters fade in bfloat16.
    Memory: another copy of the weights of the adapted layers.

    Args:
        module: network with adapters and whole weights, neither sharded nor quantised.
    """
    weights_before = list[tuple[Any, Tensor]]()
    try:
        for layer in find_lora_layers(module).values():
            active = {part: _get_active(layer, part) for part in PARTS if part in layer._modules}
            parts = {part: getattr(each, "weight", each) for part, each in active.items() if each is not None}
            if parts:
                name, weight = layer._active_adapter[0], layer._modules["base_layer"].weight
                weights_before.append((layer, weight.data))
                detached = {part: each.detach() for part, each in parts.items()}
                weight.data = merge_weight(weight.data, detached, layer.scaling[name])
                layer.merged_adapters.append(name)
        yield
    finally:
        for layer, weight_before in weights_before:
            layer._modules["base_layer"].weight.data = weight_before
            layer.merged_adapters.clear()


class FixedAdapters:
    """Layers of a network with low-rank adapters, whose weights do not change as long as the object lives.

    A layer that multiplies by W + (alpha / rank) B A keeps that sum if it takes at most 1 MiB; any other keeps its choice of
    a product. The results have the same bits as without. Compiled blocks ignore the replaced forwards.
    """

    def __init__(self, module: nn.Module) -> None:

        def search() -> list[RegisteredLayer]:
            return [
                RegisteredLayer(parent, name, part)
                for parent in module.modules()
                for name, part in parent._modules.items()
                if part is not None and hasattr(type(part), "light_product")
            ]

        adapted = any(hasattr(part, "peft_config") for part in (module, *module.children()))  # experts are children
        self._layers = find_layers(module, "light_product", search) if adapted else []
        self._forwards = [_FixedForward(layer) for layer in self._layers]

    @contextmanager
    def prediction(self) -> Iterator[None]:
        """Make the layers use the kept values; with gradients enabled they compute as usual."""
        with replace_forwards(self._layers, self._forwards):
            yield


class _FixedForward:
    """Forward pass of an adapted layer whose weights do not change.

    The kept product holds for inputs of one number of tokens and for one active adapter; other calls go to the layer itself.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self._forward = layer, layer.forward
        self._signature: tuple[Any, ...] | None = None  # properties of the calls that the kept product holds for
        self._product: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return x (W + scale B A)^T + bias, `[..., out]`."""
        layer = self._layer
        signature = (x.shape[1:-1], x.dtype, layer._active_adapter, layer._disable_adapters)
        if self._signature is None and not (args or kwargs or torch.is_grad_enabled()):
            self._signature, self._product = signature, _choose_product(layer, x)
        if self._product is None or signature != self._signature or args or kwargs or torch.is_grad_enabled():
            return self._forward(x, *args, **kwargs)
        return self._product(x)


def _choose_product(layer: Any, x: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return the product of an adapted layer for inputs like x; None if the light pass does not apply to them."""
    # The layer dequantises the weights of another base layer in its own way.
    plain = type(layer._modules["base_layer"]) is nn.Linear and not is_transformed(x)
    factors = light_factors(layer, x) if plain else None
    if factors is None:
        return None
    weight, _, a, b, scale = factors
    base, name = layer._modules["base_layer"], layer._active_adapter[0]
    down, up = (layer._modules[part]._modules[name] for part in ("lora_A", "lora_B"))
    # Parameters are looked up at each call, because each gathering makes new tensors of sharded weights.
    if not is_merged(layer.light_product, x, weight):
        return lambda x: adapted_linear(x, base.weight, base.bias, down.weight, up.weight, scale)
    if weight.numel() * weight.element_size() > LARGEST:
        return None
    merged = torch.addmm(weight, b, a, alpha=scale)
    return lambda x: rows_linear(x.reshape(-1, x.shape[-1]), merged, base.bias).view(*x.shape[:-1], -1)
