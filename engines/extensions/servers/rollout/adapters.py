"""Adapters of a served network: single ones as files hold them, and several that act together."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.models.lora_files import LoraFile
from fluvial.models.lora_layer import Product

MOST_LOADED = 16  # adapters that are kept for requests that name them again, and that act together at most


class Adapter(NamedTuple):
    """An adapter of one network."""

    nickname: str
    path: str
    strength: float
    file: LoraFile

    @property
    def scaling(self) -> float:
        """Factor of the product of its two matrices."""
        return self.file.alpha * self.strength / self.file.rank


class Applied(NamedTuple):
    """The adapters that act on a network, as one.

    Args:
        scaling: factor of the product of the two matrices of `file`.
    """

    adapters: tuple[Adapter, ...]
    file: LoraFile
    scaling: float
    product: Product


def merge_adapters(adapters: Sequence[Adapter], product: Product) -> Applied | None:
    """Return adapters as one whose rank is the sum of theirs; None if there is none.

        sum_i s_i B_i A_i = [s_1 B_1, s_2 B_2, ...] [A_1; A_2; ...]

    A single adapter keeps the bits of its factors, and so its checksum.

    Raises:
        RequestError: the scale of one is no number, or 0.
    """
    for each in adapters:
        if not math.isfinite(each.scaling) or each.scaling == 0:
            scale = each.scaling * each.file.rank
            raise RequestError(f"alpha times strength is {scale:g}, expected another finite number than 0")
    if len(adapters) <= 1:
        return Applied(tuple(adapters), adapters[0].file, adapters[0].scaling, product) if adapters else None
    rank = sum(each.file.rank for each in adapters)
    layers = tuple(sorted({layer for each in adapters for layer in each.file.layers}))
    tensors = dict[str, Tensor]()
    for layer in layers:
        a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        shape = next(
            (each.file.tensors[a].shape[1], len(each.file.tensors[b])) for each in adapters if a in each.file.tensors
        )
        downs, ups = [], []
        for each in adapters:
            held = a in each.file.tensors
            downs.append(each.file.tensors[a] if held else torch.zeros(each.file.rank, shape[0]))
            ups.append(each.scaling * each.file.tensors[b] if held else torch.zeros(shape[1], each.file.rank))
        tensors[a], tensors[b] = torch.cat(downs), torch.cat(ups, 1)
    return Applied(tuple(adapters), LoraFile(rank, float(rank), layers, tensors), 1.0, product)
