"""Files of adapters: read one by the keys of diffusers, PEFT or kohya/ComfyUI, with its form, rank and alpha."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fluvial.models.lora import Dora, Form, Lokr, LowRank, adapter_parameters, linear_layers
from fluvial.models.lora_layer import MAGNITUDE, row_norms
from fluvial.models.quantised import QuantisedLinear

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")  # of diffusers and of PEFT
# What files put before the name of a layer, the longest first.
PREFIXES = ("base_model.model.", "lora_transformer_", "diffusion_model.", "lora_unet_", "transformer.", "unet.", "model.")
# Endings of the two factors and of the scale, as the three programs spell them.
FACTORS = re.compile(
    r"[._](?:lora_(?P<a>A|down)|lora_(?P<b>B|up)|lora\.(?P<down>down)|lora\.(?P<up>up)|"
    r"lora_linear_layer\.(?P<ldown>down)|lora_linear_layer\.(?P<lup>up))(?:\.default)?\.weight$|\.(?P<alpha>alpha)$"
)
# Endings of the parts that DoRA and LoKr have beside these, as PEFT and diffusers spell them.
FURTHER = re.compile(rf"\.(?P<part>{MAGNITUDE}|lokr_w1|lokr_w2|lokr_w2_a|lokr_w2_b)(?:\.default)?(?:\.weight)?$")
METADATA = "lora_adapter_metadata"  # key of diffusers' settings in a file's header
SHOWN = 3  # keys in a message


class LoraFile(NamedTuple):
    """An adapter as a file holds it."""

    rank: int
    alpha: float
    layers: tuple[str, ...]  # names of the adapted layers in the module
    tensors: dict[str, Tensor]  # float32, by the names of `adapter_parameters`: `layer.lora_A.weight`, `layer.lokr_w1`
    form: Form = LowRank()


Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def read_lora(path: Path, module: nn.Module, *, convert: Convert | None = None) -> LoraFile:
    """Return the adapter of a file for a module.

    Layers of a LoRA may have different ranks and scales: smaller factors are filled up with zeros, and scales are multiplied
    into B. DoRA and LoKr are read as PEFT and diffusers write them, with one rank and scale. An nn.ModuleDict of models has
    a folder per model, by name, as an export writes it.

    Args:
        path: safetensors file, or a folder with one.
        module: module that the adapter is for; its weights are not read, and adapters that it has are left alone.
        convert: function from the tensors of a file with the original, non-diffusers names of layers to diffusers' keys.

    Raises:
        ValueError: there is no file, it cannot be read, a key matches no linear layer of the module, a factor is missing or
            has another shape; the message names the keys.
    """
    if isinstance(module, nn.ModuleDict):
        parts = {name: read_lora(path / name, network, convert=convert) for name, network in module.items()}
        return _joined({f"{name}.": part for name, part in parts.items()})
    file = _file(path)
    tensors, settings = _read(file)
    linear = linear_layers(module)
    found, alphas, unknown = _matched(tensors, linear)
    if unknown and convert is not None:
        try:
            again = _matched(dict(convert(dict(tensors))), linear)
        except Exception:  # the converter of another layout may fail in any way
            again = found, alphas, unknown
        if len(again[2]) < len(unknown):
            found, alphas, unknown = again
    if unknown or not found:
        shown = ", ".join(sorted(unknown)[:SHOWN]) or "it holds none"
        more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
        raise ValueError(f"{file} has keys that match no linear layer of the {type(module).__name__}: {shown}{more}")
    if any("lokr_w1" in parts for parts in found.values()):
        return _kronecker(found, linear, settings, file)
    _check(found, linear, file)
    ranks = {name: len(factors["A"]) for name, factors in found.items()}
    given = settings.get("lora_alpha")
    scales = {
        name: (float(alphas[name]) if name in alphas else float(rank if given is None else given)) / rank
        for name, rank in ranks.items()
    }
    if settings.get("use_rslora"):
        raise ValueError(f"{file} is scaled by the root of its rank (rsLoRA), expected alpha / rank")
    if not any(MAGNITUDE in parts for parts in found.values()):
        return _equal(found, ranks, scales)
    if len({*ranks.values()}) > 1 or len({*scales.values()}) > 1 or not all(MAGNITUDE in parts for parts in found.values()):
        raise ValueError(f"{file} has layers of different ranks, scales or forms, expected those of one DoRA")
    lengths = {f"{name}.{MAGNITUDE}.weight": held[MAGNITUDE].flatten() for name, held in found.items()}
    for name, held in found.items():
        count, wanted = held[MAGNITUDE].numel(), len(held["B"])
        if count != wanted:
            raise ValueError(f"{file} is of another architecture: {name} has {count} lengths of rows, expected {wanted}")
    factors = _equal(found, ranks, scales)
    return factors._replace(tensors={**factors.tensors, **lengths}, form=Dora())


def load_lora(module: nn.Module, tensors: Mapping[str, Tensor], adapter: str) -> None:
    """Copy the parts of a file into an adapter of a module, in place.

    Raises:
        ValueError: the lengths of a DoRA's rows need the weights of the module, which are on the meta device.
    """
    with torch.no_grad():
        for name, parameter in adapter_parameters(module, adapter).items():
            layer, _, rest = name.partition(f".{MAGNITUDE}")
            value = tensors[name]
            parameter.copy_(value - row_norms(_weight(module, layer)).to(value.device) if rest else value)


def _weight(module: nn.Module, layer: str) -> Tensor:
    """Return the frozen weight of an adapted layer."""
    base: Any = module.get_submodule(layer).base_layer
    if not isinstance(base, QuantisedLinear) and base.weight.is_meta:
        raise ValueError("a DoRA is read beside the weights that it adapts, which are not there yet: set init to whole")
    weight: Tensor = base.weight
    return weight


def _file(path: Path) -> Path:
    """Return the file of an adapter."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder, expected an adapter")
    known = next((path / name for name in FILES if (path / name).is_file()), None)
    others = sorted(path.glob("*.safetensors"))
    if known is None and len(others) != 1:
        raise ValueError(f"{path} holds {len(others)} safetensors files, expected {FILES[0]}, {FILES[1]} or a single one")
    return known or others[0]


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file, and what it, or the file beside it, says of its rank and scale."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            header = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
        beside = file.parent / "adapter_config.json"
        settings = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() and file.name == FILES[1] else {}
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as an adapter: {' '.join(str(error).split())}") from error
    plain = {name.partition(".")[2]: value for name, value in header.items()}
    settings = {**settings, **plain}
    if patterns := [name for name in ("rank_pattern", "alpha_pattern") if settings.get(name)]:
        raise ValueError(f"{file} has the setting {patterns[0]}, expected one alpha, or one per layer among the tensors")
    return tensors, settings


def _matched(
    tensors: Mapping[str, Tensor], linear: Mapping[str, nn.Module]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], list[str]]:
    """Return the factors by layer, the alphas by layer, and the keys that belong to no layer."""
    flat = {name.replace(".", "_"): name for name in linear}
    found: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, Tensor] = {}
    unknown = []
    for key, tensor in tensors.items():
        ending = FACTORS.search(key) or FURTHER.search(key)
        layer = None if ending is None else _layer(key[: ending.start()], linear, flat)
        if ending is None or layer is None:
            unknown.append(key)
        elif ending.re is FURTHER:
            found.setdefault(layer, {})[ending["part"]] = tensor.float()
        elif ending["alpha"]:
            alphas[layer] = tensor
        else:
            factor = "A" if ending["a"] or ending["down"] or ending["ldown"] else "B"
            matrix = tensor.flatten(2).squeeze(2) if tensor.ndim == 4 and tensor.shape[2:] == (1, 1) else tensor
            found.setdefault(layer, {})[factor] = matrix.float()
    return found, alphas, unknown


def _layer(name: str, linear: Mapping[str, nn.Module], flat: Mapping[str, str]) -> str | None:
    """Return the layer that a file's name stands for, with or without prefixes, with dots or underscores."""
    while True:
        if name in linear:
            return name
        if name in flat:
            return flat[name]
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            return None
        name = name.removeprefix(prefix)


def _check(found: Mapping[str, Mapping[str, Tensor]], linear: Mapping[str, nn.Module], file: Path) -> None:
    """Raise ValueError unless each layer has both factors, of its own shape."""
    for name, factors in found.items():
        layer: Any = linear[name]
        if missing := {"A", "B"} - set(factors):
            raise ValueError(f"{file} is incomplete: {name} has no factor {missing.pop()}")
        a, b = factors["A"], factors["B"]
        shapes = [list(a.shape), list(b.shape)]
        if a.ndim != 2 or shapes != [[len(a), layer.in_features], [layer.out_features, len(a)]]:
            raise ValueError(
                f"{file} is of another architecture: {name} has factors of {shapes[0]} and {shapes[1]}, expected "
                f"[rank, {layer.in_features}] and [{layer.out_features}, rank]"
            )


def _kronecker(
    found: Mapping[str, Mapping[str, Tensor]], linear: Mapping[str, nn.Module], settings: Mapping[str, Any], file: Path
) -> LoraFile:
    """Return the LoKr of a file, whose shapes are those that PEFT gives to one rank and factor."""
    from peft.tuners.lokr.layer import factorization

    ranks = {len(parts["lokr_w2_b"]) for parts in found.values() if "lokr_w2_b" in parts}
    firsts = [tuple(parts["lokr_w1"].shape) for parts in found.values() if "lokr_w1" in parts]
    whole = [max(parts["lokr_w2"].shape) for parts in found.values() if "lokr_w2" in parts]
    rank = int(settings.get("r") or max([*ranks] or whole or [1]))
    known = settings.get("decompose_factor")
    for factor in [int(known)] if known is not None else [-1, *sorted({rows for rows, _ in firsts})]:
        expected = {}
        for name in found:
            layer: Any = linear[name]
            (rows, long), (columns, wide) = (factorization(n, factor) for n in (layer.out_features, layer.in_features))
            second = (
                {"lokr_w2": (long, wide)}
                if rank >= max(long, wide) / 2
                else {"lokr_w2_a": (long, rank), "lokr_w2_b": (rank, wide)}
            )
            expected[name] = {"lokr_w1": (rows, columns), **second}
        if expected == {name: {part: tuple(t.shape) for part, t in parts.items()} for name, parts in found.items()}:
            tensors = {f"{name}.{part}": tensor for name, parts in found.items() for part, tensor in parts.items()}
            form = Lokr(None if factor == -1 else factor)
            return LoraFile(rank, float(settings.get("alpha", rank)), tuple(sorted(found)), tensors, form)
    raise ValueError(f"{file} is no LoKr of one rank and factor for this architecture")


def _equal(found: Mapping[str, Mapping[str, Tensor]], ranks: Mapping[str, int], scales: Mapping[str, float]) -> LoraFile:
    """Return factors of one rank and one scale."""
    rank, scale = max(ranks.values()), next(iter(scales.values()))
    tensors = {}
    for name, factors in found.items():
        fill = rank - ranks[name]
        b = factors["B"] if scales[name] == scale else factors["B"] * (scales[name] / scale)
        tensors[f"{name}.lora_A.weight"] = nn.functional.pad(factors["A"], (0, 0, 0, fill))
        tensors[f"{name}.lora_B.weight"] = nn.functional.pad(b, (0, fill))
    return LoraFile(rank, rank * scale, tuple(sorted(found)), tensors)


def _joined(parts: Mapping[str, LoraFile]) -> LoraFile:
    """Return the adapters of several networks as one, their layers with a prefix."""
    first = next(iter(parts.values()))
    if not all(isinstance(part.form, LowRank) for part in parts.values()):
        if len({(part.rank, part.alpha, part.form) for part in parts.values()}) > 1:
            raise ValueError("the adapters of the networks have different forms, ranks or scales")
        layers = sorted(prefix + layer for prefix, part in parts.items() for layer in part.layers)
        tensors = {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.tensors.items()}
        return first._replace(layers=tuple(layers), tensors=tensors)
    factors: dict[str, dict[str, Tensor]] = {}
    scales: dict[str, float] = {}
    for prefix, part in parts.items():
        for layer in part.layers:
            both = {kind: part.tensors[f"{layer}.lora_{kind}.weight"] for kind in "AB"}
            factors[prefix + layer], scales[prefix + layer] = both, part.alpha / part.rank
    return _equal(factors, {name: len(both["A"]) for name, both in factors.items()}, scales)
