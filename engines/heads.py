"""Heads of a network: a number per sample, from what the network's middle block returns."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import optree
import torch
from torch import Tensor, nn

from fluvial.engines.errors import UsageError
from fluvial.models.lora import HEADS, find_linear_layers


class FeatureHead(nn.Module):
    """The mean over all tokens of a small network of each of them.

        number = mean over tokens h of w . leaky_relu(norm(W h + c), 0.2) + b

    W halves the width of the features. It is the head of transformers in FastGen (NVlabs/FastGen, `Discriminator_ImageDiT`)
    with layer in place of group normalisation, and a kernel of one token in place of 4 x 4 with stride 2: a block's tokens
    need not be those of an image alone, nor in rows.

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
            streams: features `[B, *tokens, width]`, such as those of an image and of its prompt; the mean is over the
                tokens of all of them.
        """
        tokens = torch.cat([stream.reshape(len(stream), -1, self.width) for stream in streams], dim=1)
        hidden = self.norm(self.into(tokens.to(self.into.weight.dtype)))
        numbers: Tensor = self.out(nn.functional.leaky_relu(hidden, 0.2))
        return numbers.float().mean((1, 2))


def add_head(module: nn.Module, blocks: Sequence[nn.Module], name: str, *, seed: int) -> None:
    """Add a trained head to a network that is not sharded yet, in place; the network's output does not change.

    Args:
        module: the network.
        blocks: its repeated blocks in the order they run. The head reads what the one in the middle returns.
        name: name of the head, of several.
        seed: seed of its weights, which have the same values on any device.

    Raises:
        UsageError: the network has no blocks, or the one in the middle no linear layer to learn its width from.
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
    """Return the width of a block's tokens: the inputs of the first linear layer of its attention, or else of the block.

    It is 0 for a block without linear layers.
    """
    attention = [part for part in block.modules() if "attention" in type(part).__name__.lower()]
    for part in (*attention, block):
        for layer in find_linear_layers(part).values():
            return layer.in_features
    return 0


def list_head(module: nn.Module, name: str) -> list[str]:
    """Return the names of a head's parameters; none of a network without it."""
    start = f"{HEADS}.{name}."
    return [parameter for parameter, _ in module.named_parameters() if parameter.startswith(start)]


@contextmanager
def read_head(module: nn.Module, blocks: Sequence[nn.Module], name: str) -> Iterator[list[Tensor]]:
    """Yield a list to which each forward pass inside the context adds the number of a head, with gradient, `[B]`.

    The head runs within the network's own forward pass, while the parameters are gathered. Where a block is checkpointed,
    its results are read, which are there once.

    Raises:
        UsageError: no pass ran, or the middle block returns no tokens of the width of the head.
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
    """Return the block in the middle; UsageError without blocks."""
    if not blocks:
        raise UsageError(f"{type(module).__name__} takes no head: it has no repeated blocks")
    return blocks[len(blocks) // 2]
