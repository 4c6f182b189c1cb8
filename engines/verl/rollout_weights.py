"""The weights that a rollout engine of verl gets: full tensors one at a time, with the names that it knows."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.engines.fsdp import export

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
        if adapter is not None and (merge or not base):
            found = export.weights(module, adapter=adapter, merge=merge, dtype=dtype if merge else None)
            yield from ((PREFIX + name, tensor) for name, tensor in found)
            return
        for name, tensor in export.base_tensors(module).items():
            cast = dtype if tensor.is_floating_point() else tensor.dtype
            yield PREFIX + name, export.gathered(tensor).to(cast, copy=True)


def peft_config(module: Any, adapter: str) -> dict[str, Any]:
    """Return an adapter's settings as PEFT holds them, with the names of its layers as a list."""
    settings: dict[str, Any] = module.peft_config[adapter].to_dict()
    return {**settings, "target_modules": sorted(settings["target_modules"])}
