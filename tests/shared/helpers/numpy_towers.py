"""Transformer towers in numpy, written from their papers: the independent reference of the reward models."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import erf, expit

Array = np.ndarray[Any, np.dtype[Any]]
Weights = Mapping[str, Array]


def arrays(state: Mapping[str, Any]) -> dict[str, Array]:
    return {name: value.double().numpy() for name, value in state.items()}


def below(weights: Weights, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def gelu(x: Array) -> Array:
    return x * (1 + erf(x / np.sqrt(2))) / 2


def quick_gelu(x: Array) -> Array:
    return x * expit(1.702 * x)


def tanh_gelu(x: Array) -> Array:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


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


def block(
    x: Array, weights: Weights, heads: int, act: Callable[[Array], Array], eps: float = 1e-5, allowed: Array | None = None
) -> Array:
    """Return a block with the layer norms first, named as transformers' CLIP and SigLIP name it."""
    y = norm(x, weights, "layer_norm1", eps)
    q, k, v = (linear(y, weights, f"self_attn.{letter}_proj") for letter in "qkv")
    x = x + linear(attend(q, k, v, heads, allowed), weights, "self_attn.out_proj")
    y = norm(x, weights, "layer_norm2", eps)
    return x + linear(act(linear(y, weights, "mlp.fc1")), weights, "mlp.fc2")


def patches(pixels: Array, kernel: Array) -> Array:
    """Return the embedding of each patch, `[N, patches, width]`, of pixels `[N, C, H, W]` by a kernel `[width, C, p, p]`."""
    n, c, height, _ = pixels.shape
    p = kernel.shape[-1]
    grid = height // p
    cut = pixels[:, :, : grid * p, : grid * p].reshape(n, c, grid, p, grid, p).transpose(0, 2, 4, 1, 3, 5)
    return cut.reshape(n, grid * grid, -1) @ kernel.reshape(len(kernel), -1).T


def clip_vision(pixels: Array, state: Weights, *, heads: int, layers: int, act: Callable[[Array], Array]) -> Array:
    w = below(state, "vision_model.")
    x = patches(pixels, w["embeddings.patch_embedding.weight"])
    first = np.broadcast_to(w["embeddings.class_embedding"], (len(x), 1, x.shape[-1]))
    x = np.concatenate([first, x], 1) + w["embeddings.position_embedding.weight"]
    x = norm(x, w, "pre_layrnorm")
    for i in range(layers):
        x = block(x, below(w, f"encoder.layers.{i}."), heads, act)
    return unit(norm(x[:, 0], w, "post_layernorm") @ state["visual_projection.weight"].T)


def clip_text(ids: Array, state: Weights, *, heads: int, layers: int, act: Callable[[Array], Array], end: int) -> Array:
    """Return the projected embedding of token ids `[N, L]`, of length 1; the output is taken at the first `end`."""
    w = below(state, "text_model.")
    x = w["embeddings.token_embedding.weight"][ids] + w["embeddings.position_embedding.weight"][: ids.shape[1]]
    causal = np.tril(np.ones((ids.shape[1],) * 2, dtype=bool))
    for i in range(layers):
        x = block(x, below(w, f"encoder.layers.{i}."), heads, act, allowed=causal)
    last = norm(x, w, "final_layer_norm")[np.arange(len(ids)), (ids == end).argmax(1)]
    return unit(last @ state["text_projection.weight"].T)


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
