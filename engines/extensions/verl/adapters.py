"""LoRA as verl's model config describes it: which layers, from which weights, in which dtype."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from fluvial.engines.engine.config import DTYPES
from fluvial.engines.errors import UsageError
from fluvial.models import LoraConfig, add_lora
from fluvial.models.lora import LowRank
from fluvial.models.lora_files import load_lora, read_lora

ALL = "all-linear"  # PEFT's name of all linear layers


class Targets(NamedTuple):
    """Layers that are adapted, as PEFT chooses them."""

    modules: str | tuple[str, ...] = ()  # suffixes of names; a text is a regular expression of whole names, or ALL
    excluded: str | tuple[str, ...] = ()  # layers that are left out, in the same way
    parameters: tuple[str, ...] = ()  # suffixes of the names of weights, whose layers are adapted too


def find_layers(module: nn.Module, targets: Targets) -> tuple[str, ...]:
    """Return suffixes of the names of the linear layers that are adapted.

    Raises:
        UsageError: there are none, something else than a linear layer is named, or a layer that is left out cannot be told
            from one that is not by the end of its name.
    """
    if isinstance(targets.modules, tuple) and not targets.excluded and not targets.parameters:
        return targets.modules
    import peft
    from peft.tuners.tuners_utils import check_target_module_exists

    layers = dict(module.named_modules())
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    every, listed = targets.modules == ALL, targets.modules if isinstance(targets.modules, str) else [*targets.modules]
    excluded = targets.excluded if isinstance(targets.excluded, str) else [*targets.excluded]
    config = peft.LoraConfig(target_modules=".*" if every else listed, exclude_modules=excluded or None)
    names = [name for name in (linear if every else layers) if name and check_target_module_exists(config, name)]
    for each in targets.parameters:
        parameters = [name for name, _ in module.named_parameters() if f".{name}".endswith(f".{each}")]
        if not parameters:
            raise UsageError(f"model.target_parameters: no parameter's name ends in {each}")
        names += [name.removesuffix(".weight") for name in parameters]
    if wrong := next((name for name in names if name not in linear), None):
        kind = type(layers[wrong]).__name__ if wrong in layers else "parameter"
        raise UsageError(f"model.target_modules or target_parameters name {wrong}, a {kind}, expected linear layers")
    if not names:
        raise UsageError(f"model.target_modules is {targets.modules!r} without {excluded!r}: no linear layer is left")
    chosen = {*names}
    for name in linear:
        if name not in chosen and (like := next((one for one in chosen if name.endswith(f".{one}")), None)):
            raise UsageError(f"model.exclude_modules leaves out {name}, whose name ends as that of {like}: leave out both")
    return tuple(sorted(chosen))


def add_adapters(
    module: nn.Module, lora: LoraConfig, targets: Targets, *, adapters: Sequence[str], dtype: str, seed: int
) -> None:
    """Add named adapters to a network, in place, `default` from the weights of a file if there is one.

    Args:
        module: the network.
        lora: rank, scale, and the file.
        targets: layers, if there is no file.
        adapters: their names, `default` first.
        dtype: dtype that the trained adapter is held in.
        seed: seed of its first values.

    Raises:
        UsageError, ValueError: the layers or the file do not fit the network, or the file is no LoRA.
    """
    adapter = None if lora.weights is None else read_lora(lora.weights, module)
    if adapter is None:
        add_lora(module, lora, find_layers(module, targets), adapters=adapters, seed=seed)
    else:
        if not isinstance(adapter.form, LowRank):
            raise UsageError(f"model.lora_adapter_path is {lora.weights}, a {adapter.form.kind}, expected a LoRA")
        settings = replace(lora, rank=adapter.rank, alpha=adapter.alpha, weights=None)
        add_lora(module, settings, adapter.layers, adapters=adapters, seed=seed)
        for name in adapters:
            load_lora(module, adapter.tensors, name)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[dtype])
