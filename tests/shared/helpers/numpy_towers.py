"""Transformer towers in numpy, written from their papers: the independent reference of the reward models."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import erf

Array = np.ndarray[Any, np.dtype[Any]]
Weights = Mapping[str, Array]


def arrays(state: Mapping[str, Any]) -> dict[str, Array]:
    return {name: value.double().numpy() for name, value in state.items()}


def below(weights: Weights, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def gelu(x: Array) -> Array:
    return x * (1 + erf(x / np.sqrt(2))) / 2


def linear(x: Array, weights: Weights, name: str) -> Array:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.zeros(1))


def norm(x: Array, weights: Weights, name: str, eps: float = 1e-5) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attend(q: Array, k: Array, v: Array, heads: int, allowed: Array | None = None) -> Array:
    """Return softmax(q k^T / sqrt(d)) v by head; `allowed` `[..., queries, keys]` is false where nothing is seen."""
    q, k, v = (x.reshape(*x.shape[:-1], heads, -1).swapaxes(-2, -3) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ v
    return mixed.swapaxes(-2, -3).reshape(*mixed.shape[:-3], mixed.shape[-2], -1)


def patches(pixels: Array, kernel: Array) -> Array:
    """Return the embedding of each patch, `[N, patches, width]`, of pixels `[N, C, H, W]` by a kernel `[width, C, p, p]`."""
    n, c, height, _ = pixels.shape
    p = kernel.shape[-1]
    grid = height // p
    cut = pixels[:, :, : grid * p, : grid * p].reshape(n, c, grid, p, grid, p).transpose(0, 2, 4, 1, 3, 5)
    return cut.reshape(n, grid * grid, -1) @ kernel.reshape(len(kernel), -1).T


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
