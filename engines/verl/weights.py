"""The weights that a rollout engine of verl gets: full tensors one at a time, with the names that it knows."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fluvial.engines.fsdp import export
from fluvial.models.lora import adapter_names, is_adapter

PREFIX = "transformer."  # name of the network in the rollout's pipeline


def stream(
    module: nn.Module,
    onloaded: Callable[[], AbstractContextManager[None]],
    *,
    adapter: str | None,
    base: bool,
    merge: bool,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, copy of the full tensor), one at a time; every rank must take part, and take all of them.

    At most one tensor is gathered at a time. Base weights are on the device of the parameters. Adapters and merged weights
    are on the CPU, so that they stay valid while the parameters are moved to the host.

    Args:
        module: sharded module.
        onloaded: context in which the parameters are on the device.
        adapter: adapter to send or to merge; None if the module has none.
        base: whether the base weights are sent, without the adapter.
        merge: whether the adapter is folded into the base weights.
        dtype: dtype of base weights and merged weights. Adapters keep float32.
    """
    with onloaded():
        if merge and adapter is not None:
            for name, tensor in export.weights(module, adapter=adapter, merge=True, dtype=dtype):
                yield PREFIX + name, tensor
            return
        state = module.state_dict()
        if adapter is not None and not base:
            for short, full in adapter_names(module, adapter).items():
                yield PREFIX + short, _full(state[full]).to("cpu", copy=True)
            return
        for name, tensor in state.items():
            if not is_adapter(name):
                cast = dtype if tensor.is_floating_point() else tensor.dtype
                yield PREFIX + name.replace(".base_layer.", "."), _full(tensor).to(cast, copy=True)


def peft_config(module: Any, adapter: str) -> dict[str, Any]:
    """Return an adapter's settings as PEFT holds them, with the names of its layers as a list."""
    settings: dict[str, Any] = module.peft_config[adapter].to_dict()
    return {**settings, "target_modules": sorted(settings["target_modules"])}


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
