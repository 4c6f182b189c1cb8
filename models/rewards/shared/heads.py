"""Heads of linear layers without activations, which the aesthetic predictor and ImageReward end with."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.nn import functional

from fluvial.models.rewards.shared.loading import LoadingError


class LinearHead:
    """y = W_n (... (W_1 x + b_1) ...) + b_n, one number per row.

    Args:
        reward: name of the reward, for messages.
        tensors: `layers.<i>.weight` and `layers.<i>.bias`; the layers are applied by rising i.
        inputs: expected length of x.
        source: file that the tensors come from, for messages.

    Raises:
        LoadingError: the tensors are others, or do not fit together.
    """

    def __init__(self, reward: str, tensors: Mapping[str, Tensor], inputs: int, source: str | Path) -> None:
        numbers = sorted({int(name.split(".")[1]) for name in tensors if _is_layer(name)})
        if not numbers or {f"layers.{i}.{part}" for i in numbers for part in ("weight", "bias")} != set(tensors):
            raise LoadingError(
                f"{reward}: the head {source} holds {', '.join(sorted(tensors)[:3])} ..., expected layers.0.weight, "
                "layers.0.bias and so on"
            )
        self.layers = [(tensors[f"layers.{i}.weight"].float(), tensors[f"layers.{i}.bias"].float()) for i in numbers]
        sizes = [(weight.shape[1], weight.shape[0]) for weight, _ in self.layers]
        ends = [inputs, *(last for _, last in sizes)]
        if [first for first, _ in sizes] != ends[:-1] or ends[-1] != 1:
            raise LoadingError(
                f"{reward}: the layers of the head {source} map {' -> '.join(map(str, (sizes[0][0], *ends[1:])))}, expected "
                f"{inputs} -> ... -> 1: take the head of this model"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[...]` in float32 from `[..., inputs]`."""
        for weight, bias in self.layers:
            x = functional.linear(x, weight.to(x.device), bias.to(x.device))
        return x.squeeze(-1)


def _is_layer(name: str) -> bool:
    """Return whether a tensor's name is `layers.<i>.<part>`."""
    parts = name.split(".")
    return len(parts) == 3 and parts[0] == "layers" and parts[1].isdigit()
