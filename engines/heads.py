"""Heads of a network: a number per sample from the output of the network's middle block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import optree
import torch
from torch import Tensor, nn

from fluvial.engines.errors import UsageError
from fluvial.models.lora import HEADS, find_linear_layers


class FeatureHead(nn.Module):
    """A small network applied to each token, averaged over the tokens.

        number = mean over tokens h of w . leaky_relu(norm(W h + c), 0.2) + b

    W halves the width of the features. It is FastGen's head for transformers (NVlabs/FastGen, `Discriminator_ImageDiT`) with
    layer instead of group normalisation, and a kernel of one token instead of 4 x 4 with stride 2, because a block's tokens
    need not form an image.

    Args:
        width: width of the features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        inner, self.width = max(width // 2, 1), width
        self.into, self.norm, self.out = nn.Linear(width, inner), nn.LayerNorm(inner), nn.Linear(inner, 1)

    def forward(self, streams: Sequence[Tensor]) -> Tensor:
        """Return a number per sample, float32 `[B]`.

        Args:
            streams: features `[B, *tokens, width]`, e.g. of an image and of its prompt; the mean is over all their tokens.
        """
        tokens = torch.cat([stream.reshape(len(stream), -1, self.width) for stream in streams], dim=1)
        hidden = self.norm(self.into(tokens.to(self.into.weight.dtype)))
        numbers: Tensor = self.out(nn.functional.leaky_relu(hidden, 0.2))
        return numbers.float().mean((1, 2))


def add_head(module: nn.Module, blocks: Sequence[nn.Module], name: str, *, seed: int) -> None:
    """Add a trained head to a network that is not sharded yet, in place; the network's output does not change.

    Args:
        module: the network.
        blocks: repeated blocks in the order they run. The head reads the output of the middle one.
        name: name of the head.
        seed: seed of its weights, which have the same values on any device.

    Raises:
        UsageError: the network has no blocks, or the middle block has no linear layer, which determines the width.
    """
    block = _find_middle(module, blocks)
    width = find_width(block)
    if not width:
        raise UsageError(f"{type(module).__name__} takes no head: its {type(block).__name__} has no linear layer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = FeatureHead(width)
    if not hasattr(module, HEADS):
        setattr(module, HEADS, nn.ModuleDict())
    module.get_submodule(HEADS).add_module(name, head)


def find_width(block: nn.Module) -> int:
    """Return the width of a block's tokens: the inputs of the first linear layer of its attention, else of the block.

    It is 0 for a block without linear layers.
    """
    attention = [part for part in block.modules() if "attention" in type(part).__name__.lower()]
    for part in (*attention, block):
        for layer in find_linear_layers(part).values():
            return layer.in_features
    return 0


def list_head_parameters(module: nn.Module, name: str) -> list[str]:
    """Return the names of a head's parameters; empty for a network without the head."""
    start = f"{HEADS}.{name}."
    return [parameter for parameter, _ in module.named_parameters() if parameter.startswith(start)]


@contextmanager
def read_head(module: nn.Module, blocks: Sequence[nn.Module], name: str) -> Iterator[list[Tensor]]:
    """Yield a list to which each forward pass inside the context adds the head's number, with gradient, `[B]`.

    The head runs inside the network's forward pass, while the parameters are gathered. A checkpointed block's output is read
    once, not again in its recomputation.

    Raises:
        UsageError: no forward pass ran, or the middle block returns no tokens of the head's width.
    """
    block, head, numbers = _find_middle(module, blocks), module.get_submodule(f"{HEADS}.{name}"), list[Tensor]()
    assert isinstance(head, FeatureHead)

    def read(block: nn.Module, args: tuple, returned: object) -> None:
        tensors = [leaf for leaf in optree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        if streams := [each for each in tensors if each.ndim > 1 and each.shape[-1] == head.width]:
            numbers.append(head(streams))

    hook = block.register_forward_hook(read)
    try:
        yield numbers
    finally:
        hook.remove()
    if not numbers:
        expected = f"[B, tokens, {head.width}]"
        raise UsageError(f"{type(module).__name__} takes no head: its {type(block).__name__} returned no tensor {expected}")


def _find_middle(module: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    """Return the middle block; UsageError without blocks."""
    if not blocks:
        raise UsageError(f"{type(module).__name__} takes no head: it has no repeated blocks")
    return blocks[len(blocks) // 2]
