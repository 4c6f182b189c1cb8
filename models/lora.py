"""LoRA through PEFT: low-rank adapters on the linear layers of any module."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter: W + (alpha / rank) B A, with A and B trained and W frozen (arXiv 2106.09685).

    Args:
        rank: of the two factors.
        alpha: the adapter's output is scaled by alpha / rank.
    """

    rank: int = 16
    alpha: float = 32.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}, expected at least 1")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha is {self.alpha}, expected above 0")


def add_lora(module: nn.Module, config: LoraConfig, targets: Sequence[str], *, seed: int = 0) -> None:
    """Freeze `module` and put a trainable adapter `default` on the linear layers named by `targets`, in place.

    B starts at 0, so the module computes what it did before. A is drawn from `seed`.

    Raises:
        ValueError: no layer's name ends in one of `targets`.
    """
    import peft  # takes seconds, and only LoRA needs it

    module.requires_grad_(False)
    adapter = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(targets), lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(adapter, module, adapter_name="default")


@contextmanager
def without_lora(module: nn.Module) -> Iterator[None]:
    """Let the module compute what it did before its adapters were added: the reference policy."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge_lora(module: nn.Module) -> None:
    """Fold every adapter into the weights it adapts and remove it, in place: the module is then a plain one again."""
    from peft.tuners.lora import LoraLayer

    for name, layer in [(name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLayer)]:
        layer.merge()
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, layer.get_base_layer())
