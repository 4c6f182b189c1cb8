"""LoRA of verl's model config: adapted layers, weights and dtype."""

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
    """Selection of adapted layers, as in PEFT."""

    modules: str | tuple[str, ...] = ()  # suffixes of names; a text is a regular expression of full names, or ALL
    excluded: str | tuple[str, ...] = ()  # excluded layers, in the same form
    parameters: tuple[str, ...] = ()  # suffixes of the names of weights whose layers are adapted too


def find_layers(module: nn.Module, targets: Targets) -> tuple[str, ...]:
    """Return suffixes of the names of the adapted linear layers.

    Raises:
        UsageError: no layer is left, a target is not a linear layer, or the name of an excluded layer ends with that of an
            adapted one.
    """
    if isinstance(targets.modules, tuple) and not targets.excluded and not targets.parameters:
        return targets.modules
    import peft
    from peft.tuners.tuners_utils import check_target_module_exists

    layers = dict(module.named_modules())
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    is_all = targets.modules == ALL
    modules = targets.modules if isinstance(targets.modules, str) else [*targets.modules]
    excluded = targets.excluded if isinstance(targets.excluded, str) else [*targets.excluded]
    config = peft.LoraConfig(target_modules=".*" if is_all else modules, exclude_modules=excluded or None)
    names = [name for name in (linear if is_all else layers) if name and check_target_module_exists(config, name)]
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
            raise UsageError(f"model.exclude_modules excludes {name}, whose name ends with {like}: exclude both")
    return tuple(sorted(chosen))


def add_adapters(
    module: nn.Module, lora: LoraConfig, targets: Targets, *, adapters: Sequence[str], dtype: str, seed: int
) -> None:
    """Add adapters to a network, in place, initialised from a file if `lora` names one.

    Args:
        module: the network.
        lora: rank, scale, and optional file of weights.
        targets: adapted layers; no effect with a file.
        adapters: names of the adapters, `default` first.
        dtype: dtype of the trained adapter's parameters.
        seed: seed of the initial values.

    Raises:
        UsageError, ValueError: the layers or the file do not fit the network, or the file is not a LoRA.
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
