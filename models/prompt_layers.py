"""Layers that see the prompt alone: projections of its embedding, and keys and values of cross-attention.

Their results are the same at every step of a rollout, whose weights do not change, so they are computed once. An adapter
names them in `prompt_layers`, as patterns of `fnmatch`, e.g. `context_embedder` and `*.attn2.to_k`. A layer whose input
depends on the noise level or the image, such as the text stream of an MM-DiT's blocks, must not be named.

Where the whole prefix of a joint sequence, prompt and images of an edit, sees neither, its keys and values in each block are
kept by the network itself (`PromptKeys`): diffusers' `kv_cache` of Qwen-Image 2.1.
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

# Networks of diffusers whose prompt sees neither the noise level nor the sample, and the class that keeps its keys.
KEY_CACHES = {"QwenImage21Transformer2DModel": "QwenImage21KVCache"}


class PromptLayers:
    """Results of the layers of a network that see the prompt alone, for one batch of prompts and fixed weights.

    Memory: the results of these layers, until the object is dropped. A network that a step leaves out, as Wan 2.2 does with
    one of its two, loses its own.

    Args:
        model: adapter, whose `prompt_layers` name the layers; it may have none.
        module: its network, with adapters or sharded.
        in_blocks: whether layers inside repeated blocks are included. In compiled blocks they must not be.
    """

    def __init__(self, model: DiffusionModel, module: nn.Module, *, in_blocks: bool = True) -> None:
        patterns = tuple(getattr(model, "prompt_layers", ()))

        def search() -> list[LayerPlace]:
            return _matching(module, patterns, left_out=set() if in_blocks else set(model.blocks(module)))

        self._layers = find_layers(module, (patterns, in_blocks), search) if patterns else []
        self._forwards = [self._remembering(place, layer.forward) for place, layer in enumerate(self._layers)]
        self._results: list[list[Any]] = [[] for _ in self._layers]  # of each layer, by its call within a prediction
        self._calls = [0] * len(self._layers)

    @contextmanager
    def prediction(self) -> Iterator[None]:
        """Make the layers return their results of the first prediction; the next ones must make the same calls.

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

    def _remembering(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's forward that computes each of the calls of a prediction once."""

        def remember(*args: Any, **kwargs: Any) -> Any:
            call, results = self._calls[place], self._results[place]
            self._calls[place] += 1
            if call == len(results):
                results.append(forward(*args, **kwargs))
            return results[call]

        return remember


class PromptKeys:
    """Keys and values of the prompt's tokens in every block of a network, for one batch of prompts and fixed weights.

    The first prediction computes the whole sequence of n prompt tokens (in an edit, those of its images among them) and m
    tokens of the sample, the next ones the m alone, whose queries see all n + m keys. So a pass is m / (n + m) of its
    products with weights. Its sums are of the same numbers in another layout, which may round otherwise.

    Memory: 2 B n d values per block and call, of B samples and width d, in the dtype of the computation, until the object is
    dropped.

    Args:
        module: network of `KEY_CACHES`, with adapters or sharded, whose sequences are not.

    Raises:
        ValueError: the network keeps none.
    """

    def __init__(self, module: nn.Module) -> None:
        if (cache := _find_cache(module)) is None:
            raise ValueError(f"prompt keys: {explain_no_keys(module)}")
        network: Any = module
        self._module, self._forward, self._make = module, module.forward, cache
        self._blocks = len(network.transformer_blocks)
        self.__signature__ = inspect.signature(module.forward)  # blocks of modular pipelines pass what it takes
        self._kept: list[tuple[Any, Tensor]] = []  # of each call of a prediction, and the prompt that it was for
        self._calls = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        layers = [layer for cache, _ in self._kept for layer in cache.layer_caches]
        return sum(leaf.nbytes for layer in layers for leaf in optree.tree_leaves([layer.k, layer.v]))

    @contextmanager
    def prediction(self) -> Iterator[None]:
        """Make the network keep keys and values in the first prediction, and read them in the next ones.

        Raises:
            ValueError: gradients are enabled, which stored keys would not have; or a call has another prompt than the first
                prediction's. On a GPU the latter is not checked.
        """
        if torch.is_grad_enabled():
            raise ValueError("prompt keys: gradients are enabled, and stored keys have none: use torch.no_grad()")
        self._calls = 0
        with replace_forwards([self._module], [self]):
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a call; in later predictions that of the sample's tokens alone, which come last."""
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
    """Return why the keys and values of a network's prompt cannot be kept, see `PromptKeys`; None where they can."""
    if _find_cache(module) is not None:
        return None
    return f"{type(module).__name__} does not keep its prompt apart from noise level and sample, as Qwen-Image 2.1 does"


def _find_cache(module: nn.Module) -> Any:
    """Return the class that keeps the keys and values of a network's prompt; None if there is none.

    Sharding puts a class of its own before the network's.
    """
    kinds = [kind for kind in type(module).__mro__ if kind.__name__ in KEY_CACHES]
    if not kinds or not getattr(module, "config", {}).get("causal_condition"):
        return None
    return getattr(sys.modules[kinds[0].__module__], KEY_CACHES[kinds[0].__name__])


@contextmanager
def replace_forwards(layers: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Give each layer another forward inside the context; afterwards it has the one from before."""
    forwards_before = [layer.__dict__.get("forward") for layer in layers]  # of a layer whose forward was replaced before
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


class LayerPlace(NamedTuple):
    """A layer, and where it is registered."""

    parent: nn.Module
    name: str
    layer: nn.Module


# The layers of a network by what they were looked up by: every chunk of a rollout asks for them, and a walk over the modules
# takes as long as a step of a small network.
_places: WeakKeyDictionary[nn.Module, dict[Hashable, list[LayerPlace]]] = WeakKeyDictionary()


def find_layers(module: nn.Module, key: Hashable, search: Callable[[], list[LayerPlace]]) -> list[nn.Module]:
    """Return the layers of a network that a search finds, looked up again if one has been replaced by another."""
    known = _places.setdefault(module, {})
    places = known.get(key)
    if places is None or not all(place.parent._modules.get(place.name) is place.layer for place in places):
        places = known[key] = search()
    return [place.layer for place in places]


def _matching(module: nn.Module, patterns: tuple[str, ...], *, left_out: set[nn.Module]) -> list[LayerPlace]:
    """Return the modules whose names match a pattern, in order, without modules within them and within `left_out`."""
    matches = re.compile("|".join(translate(pattern) for pattern in patterns)).match
    places, seen = list[LayerPlace](), set(left_out)

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, part in parent._modules.items():
            if part is None or part in seen:
                continue
            seen.add(part)
            if matches(prefix + name):
                places.append(LayerPlace(parent, name, part))
            else:
                visit(part, f"{prefix}{name}.")

    visit(module, "")
    return places
