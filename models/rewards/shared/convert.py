"""Published weights that no class of transformers loads by itself: renamed, filled in, and the heads on top of them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.models.rewards.shared.loading import LoadingError, check_complete


def rename(name: str, beginnings: Mapping[str, str]) -> str:
    """Return the name of a tensor with its beginning replaced by the first entry that fits."""
    return next((new + name.removeprefix(old) for old, new in beginnings.items() if name.startswith(old)), name)


def count_layers(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """Return the number of layers that names of tensors show; the pattern has the layer's number as its group."""
    return 1 + max((int(match[1]) for name in tensors if (match := re.match(pattern, name))), default=-1)


def fill(model: Any, tensors: Mapping[str, Tensor], source: Path, *, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with the tensors of a file in place of its own, which may be on the meta device.

    Args:
        kind: names the model with its article, for messages.
        dtype: dtype of the tensors then.

    Raises:
        LoadingError: the tensors are not exactly those of the model.
    """
    try:
        cast = {name: value.to(dtype) for name, value in tensors.items()}
        report = model.load_state_dict(cast, strict=False, assign=True)
    except RuntimeError as error:  # a tensor of another shape
        raise LoadingError(f"the weights {source} do not fit together: {str(error).splitlines()[-1].strip()}") from error
    check_complete(source, missing=report.missing_keys)
    if report.unexpected_keys:
        raise LoadingError(f"the weights {source} hold {report.unexpected_keys[0]}, which {kind} does not have")
    return model


class LinearHead:
    """y = W_n (... (W_1 x + b_1) ...) + b_n, one number per row: linear layers without activations.

    Args:
        tensors: `layers.<i>.weight` and `layers.<i>.bias`; the layers are applied by rising i.
        inputs: expected length of x.
        source: file that the tensors come from, for messages.

    Raises:
        LoadingError: the tensors are others, or do not fit together.
    """

    def __init__(self, tensors: Mapping[str, Tensor], inputs: int, source: Path) -> None:
        numbers = sorted({int(match[1]) for name in tensors if (match := re.fullmatch(r"layers\.(\d+)\.\w+", name))})
        if not numbers or {f"layers.{i}.{part}" for i in numbers for part in ("weight", "bias")} != set(tensors):
            raise LoadingError(
                f"the head {source} holds {', '.join(sorted(tensors)[:3])} ..., expected layers.0.weight, layers.0.bias "
                "and so on"
            )
        self.layers = [(tensors[f"layers.{i}.weight"].float(), tensors[f"layers.{i}.bias"].float()) for i in numbers]
        sizes = [(weight.shape[1], weight.shape[0]) for weight, _ in self.layers]
        ends = [inputs, *(last for _, last in sizes)]
        if [first for first, _ in sizes] != ends[:-1] or ends[-1] != 1:
            raise LoadingError(
                f"the layers of the head {source} map {' -> '.join(map(str, (sizes[0][0], *ends[1:])))}, expected "
                f"{inputs} -> ... -> 1: take the head of this model"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[...]` in float32 from `[..., inputs]`."""
        for weight, bias in self.layers:
            x = functional.linear(x, weight.to(x.device), bias.to(x.device))
        return x.squeeze(-1)
