"""Conversion of published weights that no transformers class loads directly, and linear heads on features."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.models.rewards.shared.loading import LoadingError, check_complete


def rename_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return the name of a tensor with its prefix replaced by the first entry that matches."""
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)


def count_layers(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """Return the number of layers in the names of tensors; the group of the pattern is the layer's number."""
    return 1 + max((int(match[1]) for name in tensors if (match := re.match(pattern, name))), default=-1)


def fill_model(
    model: Any, tensors: Mapping[str, Tensor], source: Path, *, kind: str, dtype: torch.dtype = torch.float32
) -> Any:
    """Fill a model, which may be on the meta device, with the tensors of a file, and return it.

    Args:
        model, tensors, source: the model, tensors by its names, and their file for messages.
        kind: name of the model with its article, for messages.
        dtype: dtype of the filled model.

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
    """Linear layers without activations, y = W_n (... (W_1 x + b_1) ...) + b_n, one number per row.

    Args:
        tensors: `layers.<i>.weight` and `layers.<i>.bias`; the layers are applied in the order of i.
        inputs: expected length of x.
        source: file of the tensors, for messages.

    Raises:
        LoadingError: the names of the tensors differ, or their shapes do not fit together.
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
