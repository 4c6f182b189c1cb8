"""LoRA through PEFT: low-rank adapters on the linear layers of any module, and which of them computes."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fluvial.core import ema


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter: W + (alpha / rank) B A, with A and B trained and W frozen (arXiv 2106.09685).

    Args:
        rank: of the two factors.
        alpha: the adapter's output is scaled by alpha / rank.
        targets: ends of the names of the linear layers that are adapted, e.g. to_q; by default the model's own choice.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}, expected at least 1")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha is {self.alpha}, expected above 0")
        if self.targets == ():
            raise ValueError("lora.targets is empty, expected at least one name")


def add_lora(
    module: nn.Module,
    config: LoraConfig,
    targets: Sequence[str],
    *,
    adapters: Sequence[str] = ("default",),
    seed: int = 0,
) -> None:
    """Freeze `module` and put adapters on its linear layers, in place; `default` is trained and computes.

    B starts at 0, so the module computes what it did before. A is drawn from `seed`, the same on any device. The other
    adapters are frozen and start equal to `default`. Weights may be on the meta device; the adapters then are on the CPU.

    Args:
        targets: ends of the names of the layers, unless `config` has its own.
        adapters: names; `default` is the first.

    Raises:
        ValueError: a target names no layer or one that is not linear, or the first adapter is not `default`.
    """
    import peft  # takes seconds, and only LoRA needs it

    targets = targets if config.targets is None else config.targets
    _check_targets(module, targets)
    if not adapters or adapters[0] != "default" or len(set(adapters)) < len(adapters):
        raise ValueError(f"add_lora: adapters are {tuple(adapters)}, expected default and then others")
    module.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), _stand_ins(module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")  # several adapters are meant
        torch.manual_seed(seed)
        for name in adapters:
            adapter = peft.LoraConfig(
                r=config.rank, lora_alpha=config.alpha, target_modules=list(targets), lora_dropout=0.0, bias="none"
            )
            peft.inject_adapter_in_model(adapter, module, adapter_name=name)
    for layer in lora_layers(module).values():
        layer.set_adapter("default")  # freezes the others
    for name in adapters[1:]:
        copy_adapter(module, "default", name)


@contextmanager
def use_adapter(module: nn.Module, name: str | None) -> Iterator[None]:
    """Let the module compute with one of its adapters, or without any: as before they were added, the reference policy.

    What is trained does not change. Contexts may be nested. If activations are checkpointed, a backward pass must end in
    the context of its forward pass, because it computes the activations again.

    Raises:
        ValueError: the module has no adapter of that name.
    """
    layers = list(lora_layers(module).values()) if name is None else list(_layers_with(module, name).values())
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:  # PEFT's own switch would freeze and unfreeze
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = [name]
        yield
    finally:
        for layer, (active, disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled


def without_lora(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the module computes what it did before its adapters were added: the reference policy."""
    return use_adapter(module, None)


def adapter_parameters(module: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return an adapter's parameters by their names without the adapter's, which are the same for every adapter.

    In a sharded module these are the shards; what FSDP holds gathered is freed, so that a later forward pass sees what is
    written to them.

    Raises:
        ValueError: the module has no adapter of that name.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    parameters = dict(module.named_parameters())
    return {short: parameters[full] for short, full in adapter_names(module, name).items()}


def adapter_names(module: nn.Module, name: str) -> dict[str, str]:
    """Return the full name of each of an adapter's parameters, by its name without the adapter's.

    The latter is how PEFT and diffusers spell it in a file: `block.to_q.lora_A.weight` for `block.to_q.lora_A.old.weight`.

    Raises:
        ValueError: the module has no adapter of that name.
    """
    factors = [f"{layer}.lora_{factor}" for layer in _layers_with(module, name) for factor in "AB"]
    return {f"{factor}.weight": f"{factor}.{name}.weight" for factor in factors}


def copy_adapter(module: nn.Module, source: str, into: str) -> None:
    """Overwrite one adapter with another, in place: into <- source. Each rank copies its own shards.

    Raises:
        ValueError: the module has no adapter of one of the names.
    """
    values, targets = _shards(module, source), _shards(module, into)
    for name, target in targets.items():
        target.copy_(values[name])


def blend_adapter(module: nn.Module, source: str, into: str, decay: float) -> None:
    """Move one adapter towards another, in place: into <- decay into + (1 - decay) source.

    This is how the old policy of DiffusionNFT (arXiv 2509.16117) follows the trained one. Each rank blends its own shards.

    Raises:
        ValueError: the module has no adapter of one of the names, or the decay is not in [0, 1].
    """
    targets = _shards(module, into)
    for name, blended in ema.update(targets, _shards(module, source), decay).items():
        targets[name].copy_(blended)


def merge_lora(module: nn.Module, adapter: str = "default") -> None:
    """Fold an adapter into the weights it adapts and remove all adapters, in place: the module is a plain one again.

    Raises:
        ValueError: the module has no adapter of that name.
    """
    for name, layer in _layers_with(module, adapter).items():
        layer.merge(adapter_names=[adapter])
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, layer.get_base_layer())
    del module.peft_config


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's factor, trained or not."""
    return ".lora_" in name


def lora_layers(module: nn.Module) -> dict[str, Any]:
    """Return the adapted layers, each PEFT's LoraLayer around the linear one, by name."""
    if "peft" not in sys.modules:  # then there is none, and the import would take seconds
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


def _layers_with(module: nn.Module, adapter: str) -> dict[str, Any]:
    """Return the adapted layers, or raise ValueError if they do not have that adapter."""
    layers = lora_layers(module)
    held = list(next(iter(layers.values())).lora_A) if layers else []  # all layers have the same
    if adapter not in held:
        raise ValueError(f"there is no adapter {adapter}: the module has {', '.join(held) or 'none'}")
    return layers


def _shards(module: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Return this rank's part of an adapter, to be written to."""
    return {
        name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in adapter_parameters(module, adapter).items()
    }


def _check_targets(module: nn.Module, targets: Sequence[str]) -> None:
    for target in targets:
        found = {name: layer for name, layer in module.named_modules() if f".{name}".endswith(f".{target}")}
        if not found:
            raise ValueError(f"lora.targets: no layer's name ends in {target}")
        for name, layer in found.items():
            if not isinstance(layer, nn.Linear):
                raise ValueError(f"lora.targets: {target} names {name}, a {type(layer).__name__}, expected a linear layer")


@contextmanager
def _stand_ins(module: nn.Module) -> Iterator[None]:
    """Put one number that looks like a weight in the place of each weight on the meta device, for a while.

    PEFT moves a new adapter to its layer's device, which on meta would lose its values.
    """
    meta = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    try:
        for owner, name, parameter in meta:
            number = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            setattr(owner, name, nn.Parameter(number, requires_grad=False))
        yield
    finally:
        for owner, name, parameter in meta:
            setattr(owner, name, parameter)
