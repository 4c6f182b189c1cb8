"""Layers that see the prompt alone: projections of its embedding, and keys and values of cross-attention.

Their results are the same at every step of a rollout, whose weights do not change, so they are computed once. An adapter
names them in `prompt_layers`, as patterns of `fnmatch`, e.g. `context_embedder` and `*.attn2.to_k`. A layer whose input
depends on the noise level or the image, such as the text stream of an MM-DiT's blocks, must not be named.

If the whole prefix of a joint sequence, the prompt and the images of an edit, depends on neither, the network itself can
keep its keys and values in each block (`PromptKeys`): diffusers' `kv_cache` of Qwen-Image 2.1.
"""

import inspect
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import translate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import optree
import torch
from torch import Tensor, nn

from fluvial.core.checks import can_look
from fluvial.models.protocol import DiffusionModel

# Networks of diffusers whose prompt attends to neither the noise level nor the sample, and the class that keeps its keys.
KEY_CACHES = {"QwenImage21Transformer2DModel": "QwenImage21KVCache"}


class PromptLayers:
    """Results of the layers of a network that see the prompt alone, for one batch of prompts and fixed weights.

    Memory: the results of these layers, until the object is dropped. If a step does not call one of two networks, as in
    Wan 2.2, the results of that network are dropped.

    Args:
        model: adapter, whose optional `prompt_layers` name the layers.
        module: its network, with adapters or sharded.
        in_blocks: whether to include layers inside repeated blocks; set False for compiled blocks.
    """

    def __init__(self, model: DiffusionModel, module: nn.Module, *, in_blocks: bool = True) -> None:
        patterns = tuple(getattr(model, "prompt_layers", ()))

        def search() -> list[RegisteredLayer]:
            return _match_layers(module, patterns, excluded=set() if in_blocks else set(model.blocks(module)))

        self._layers = find_layers(module, (patterns, in_blocks), search) if patterns else []
        self._forwards = [self._wrap_forward(index, layer.forward) for index, layer in enumerate(self._layers)]
        self._results: list[list[Any]] = [[] for _ in self._layers]  # per layer, by call within a prediction
        self._calls = [0] * len(self._layers)

    @contextmanager
    def prediction(self) -> Iterator[None]:
        """Make the layers return their results of the first prediction; later predictions must make the same calls.

        Raises:
            ValueError: gradients are enabled, which a stored result would not have.
        """
        if self._layers and torch.is_grad_enabled():
            raise ValueError("prompt layers: gradients are enabled, and stored results have none: use torch.no_grad()")
        self._calls = [0] * len(self._layers)
        try:
            with replace_forwards(self._layers, self._forwards):
                yield
        finally:
            for results, calls in zip(self._results, self._calls, strict=True):
                if not calls:
                    results.clear()

    def _wrap_forward(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's forward that computes each call of a prediction once."""

        def forward_or_reuse(*args: Any, **kwargs: Any) -> Any:
            call, results = self._calls[index], self._results[index]
            self._calls[index] += 1
            if call == len(results):
                results.append(forward(*args, **kwargs))
            return results[call]

        return forward_or_reuse


class PromptKeys:
    """Keys and values of the prompt's tokens in every block of a network, for one batch of prompts and fixed weights.

    The first prediction computes the whole sequence of n prompt tokens (in an edit, with those of its images) and m tokens
    of the sample. Later predictions compute the m tokens alone, whose queries attend to all n + m keys, so that a pass takes
    m / (n + m) of the products with weights. The sums have another layout, which may round differently.

    Memory: 2 B n d values per block and call, of B samples and width d, in the dtype of the computation, until the object is
    dropped.

    Args:
        module: network of `KEY_CACHES`, with adapters or sharded; its sequences must not be sharded.

    Raises:
        ValueError: the network cannot keep keys.
    """

    def __init__(self, module: nn.Module) -> None:
        if (cache := _find_cache(module)) is None:
            raise ValueError(f"prompt keys: {explain_no_keys(module)}")
        network: Any = module
        self._module, self._forward, self._make = module, module.forward, cache
        self._blocks = len(network.transformer_blocks)
        self.__signature__ = inspect.signature(module.forward)  # blocks of modular pipelines choose arguments by it
        self._kept: list[tuple[Any, Tensor]] = []  # cache and prompt of each call of a prediction
        self._calls = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the kept keys and values."""
        layers = [layer for cache, _ in self._kept for layer in cache.layer_caches]
        return sum(leaf.nbytes for layer in layers for leaf in optree.tree_leaves([layer.k, layer.v]))

    @contextmanager
    def prediction(self) -> Iterator[None]:
        """Make the network keep keys and values in the first prediction, and read them in later ones.

        Raises:
            ValueError: gradients are enabled, which stored keys would not have; or a call has another prompt than the first
                prediction. On a GPU the latter is not checked.
        """
        if torch.is_grad_enabled():
            raise ValueError("prompt keys: gradients are enabled, and stored keys have none: use torch.no_grad()")
        self._calls = 0
        with replace_forwards([self._module], [self]):
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a call; in later predictions only for the sample's tokens, which come last."""
        call, text = self._calls, kwargs["encoder_hidden_states"]
        self._calls += 1
        first = call == len(self._kept)
        if first:
            self._kept.append((self._make(self._blocks), text))
        cache, text_before = self._kept[call]
        if text.shape != text_before.shape or (can_look(text) and not torch.equal(text, text_before)):
            raise ValueError("prompt keys: a call has another prompt than the first prediction's, whose keys are kept")
        return self._forward(*args, **{**kwargs, "kv_cache": cache, "kv_cache_mode": "extract" if first else "cached"})


def explain_no_keys(module: nn.Module) -> str | None:
    """Return why the keys and values of a network's prompt cannot be kept, see `PromptKeys`; None if they can."""
    if _find_cache(module) is not None:
        return None
    return f"{type(module).__name__} does not keep its prompt apart from noise level and sample, as Qwen-Image 2.1 does"


def _find_cache(module: nn.Module) -> Any:
    """Return the class that keeps the keys and values of a network's prompt; None if there is none.

    Sharding inserts a class before the network's in the MRO.
    """
    kinds = [kind for kind in type(module).__mro__ if kind.__name__ in KEY_CACHES]
    if not kinds or not getattr(module, "config", {}).get("causal_condition"):
        return None
    return getattr(sys.modules[kinds[0].__module__], KEY_CACHES[kinds[0].__name__])


@contextmanager
def replace_forwards(layers: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward of each layer inside the context, and restore it afterwards."""
    forwards_before = [layer.__dict__.get("forward") for layer in layers]  # contexts may be nested
    for layer, forward in zip(layers, forwards, strict=True):
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for layer, before in zip(layers, forwards_before, strict=True):
            if before is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = before


class RegisteredLayer(NamedTuple):
    """A layer, with the module and the name that it is registered under."""

    parent: nn.Module
    name: str
    layer: nn.Module


# Layers of each network by the key of their search. Every chunk of a rollout needs them, and walking the modules takes as
# long as a step of a small network.
_layers: WeakKeyDictionary[nn.Module, dict[Hashable, list[RegisteredLayer]]] = WeakKeyDictionary()


def find_layers(module: nn.Module, key: Hashable, search: Callable[[], list[RegisteredLayer]]) -> list[nn.Module]:
    """Return the layers that a search finds, cached by `key`; the search is repeated if a layer has been replaced."""
    searches = _layers.setdefault(module, {})
    layers = searches.get(key)
    if layers is None or not all(each.parent._modules.get(each.name) is each.layer for each in layers):
        layers = searches[key] = search()
    return [each.layer for each in layers]


def _match_layers(module: nn.Module, patterns: tuple[str, ...], *, excluded: set[nn.Module]) -> list[RegisteredLayer]:
    """Return the modules whose names match a pattern, in order, without modules within them or within `excluded`."""
    matches = re.compile("|".join(translate(pattern) for pattern in patterns)).match
    layers, seen = list[RegisteredLayer](), set(excluded)

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, part in parent._modules.items():
            if part is None or part in seen:
                continue
            seen.add(part)
            if matches(prefix + name):
                layers.append(RegisteredLayer(parent, name, part))
            else:
                visit(part, f"{prefix}{name}.")

    visit(module, "")
    return layers
