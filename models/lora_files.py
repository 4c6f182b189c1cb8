"""Files of adapters, read by the keys of diffusers, PEFT, kohya/ComfyUI or LyCORIS, with form, rank and scale."""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fluvial.models.lora import Dora, Form, Lokr, LowRank, find_adapter_parameters, find_linear_layers, find_lora_layers
from fluvial.models.lora_layer import MAGNITUDE, compute_row_norms, widen
from fluvial.models.quantised import QuantisedLinear

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")  # of diffusers and of PEFT
SETTINGS = "adapter_config.json"  # of PEFT, beside its file
# Prefixes of layers' names in files, the longest first.
PREFIXES = (
    *("base_model.model.", "lora_transformer_", "diffusion_model.", "lora_unet_", "transformer.", "lycoris_"),
    *("unet.", "model."),
)
TEXT_ENCODERS = ("lora_te", "text_encoder")  # prefixes of the keys of text encoders' layers
# Endings of the two factors and of alpha in each program's spelling.
FACTORS = re.compile(
    r"[._](?:lora_(?P<a>A|down)|lora_(?P<b>B|up)|lora\.(?P<down>down)|lora\.(?P<up>up)|"
    r"lora_linear_layer\.(?P<ldown>down)|lora_linear_layer\.(?P<lup>up))(?:\.default)?\.weight$|\.(?P<alpha>alpha)$"
)
DORA_SCALE = "dora_scale"  # name of the lengths of a DoRA's rows in kohya and LyCORIS
# Endings of further parts of DoRA and LoKr.
FURTHER = re.compile(
    rf"\.(?P<part>{MAGNITUDE}|{DORA_SCALE}|lokr_w1|lokr_w1_a|lokr_w1_b|lokr_w2|lokr_w2_a|lokr_w2_b)"
    r"(?:\.default)?(?:\.weight)?$"
)
UP = re.compile(r"(?:up|lora_B)(?:\.default)?\.weight$")
DOWN = re.compile(r"(?:down|lora_A)(?:\.default)?\.weight$")
HEADERS = ("lora_adapter_metadata", "lora_config")  # keys of PEFT's settings in a file's header
PATTERNS = "rank_pattern", "alpha_pattern"  # settings of PEFT that are mappings from names of layers
ALPHAS = ("lora_alpha", "alpha", "ss_network_alpha")  # keys of one alpha in a header
# Header key of a DoRA for ComfyUI, which divides `dora_scale` by the norms of W; other programs by those of W + s B A.
COMFY_DORA = "dora_scale_of_frozen_norms"
# Settings of PEFT under which a layer is not W + s B A, and initialisations that change the base weights.
VARIANTS = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("use_bdlora", "use_qalora"),
)
CHANGED_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
SHOWN = 3  # number of keys in a message


class LoraFile(NamedTuple):
    """Contents of an adapter's file."""

    rank: int
    alpha: float
    layers: tuple[str, ...]  # names of the adapted layers in the module
    tensors: dict[str, Tensor]  # float32, or float64 as in the file, by the names of `find_adapter_parameters`
    form: Form = LowRank()


Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def is_lora(path: Path) -> bool:
    """Return whether a path is a file, or the folder of an adapter rather than a model, by the names of its files."""
    folders = (path, *path.iterdir()) if path.is_dir() else ()
    return path.is_file() or any((folder / name).is_file() for folder in folders for name in FILES)


def read_lora(path: Path, module: nn.Module, *, convert: Convert | None = None) -> LoraFile:
    """Read the adapter of a file for a module.

    The scale of a layer is, in this order: its alpha among the tensors divided by its rank, the scale of PEFT's settings in
    the header or beside the file, an alpha in the header, or 1. Layers may have different ranks and scales: smaller factors
    are padded with zeros, and scales are multiplied into B or w1. For an nn.ModuleDict there is a folder per module, by
    name, as an export writes it.

    Args:
        path: safetensors file, or a folder with one.
        module: module to adapt; its weights are not read, and its adapters are not changed.
        convert: function from the tensors of a file with original, non-diffusers names of layers to diffusers' keys.

    Raises:
        ValueError: the file does not exist or cannot be read, a key matches no linear layer of the module, a factor is
            missing, has another shape or is not finite, or the scale is unknown or not above 0; the message names the keys.
    """
    if isinstance(module, nn.ModuleDict):
        parts = {name: read_lora(path / name, network, convert=convert) for name, network in module.items()}
        return _join({f"{name}.": part for name, part in parts.items()})
    file = _find_file(path)
    tensors, settings, header = _read_file(file)
    linear = find_linear_layers(module)
    layers, unknown = _match(tensors, linear, file)
    if unknown and convert is not None and all(_has_known_ending(key) for key in tensors):
        try:
            converted = _match(dict(convert(dict(tensors))), linear, file)
        except Exception:  # the converter of another layout may fail in any way
            converted = layers, unknown
        further = {part for key in tensors for part in FURTHER.findall(key)}  # a converter may silently drop them
        if len(converted[1]) < len(unknown) and (not further or _list_kinds(converted[0]) & {MAGNITUDE, "lokr"}):
            layers, unknown = converted
    if unknown or not layers:
        unknown.sort(key=lambda key: (_has_known_ending(key), key))
        listed = ", ".join(unknown[:SHOWN]) or "it holds none"
        more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
        raise ValueError(f"{file} has keys that match no linear layer of the {type(module).__name__}: {listed}{more}")
    scales = {layer: _find_scale(layer, parts, settings, file) for layer, parts in layers.items()}
    kinds = _list_kinds(layers)
    if "lokr" in kinds:
        return _build_lokr(layers, scales, linear, settings, file)
    _check_factors(layers, linear, file)
    factors = _unify_factors(layers, scales)
    if MAGNITUDE not in kinds:
        return factors
    name = DORA_SCALE if COMFY_DORA in header else f"{MAGNITUDE}.weight"
    lengths = {f"{layer}.{name}": parts[MAGNITUDE].flatten() for layer, parts in layers.items()}
    return factors._replace(tensors={**factors.tensors, **lengths}, form=Dora())


def load_lora(module: nn.Module, tensors: Mapping[str, Tensor], adapter: str) -> None:
    """Copy the tensors of a file into an adapter of a module, in place.

    Raises:
        ValueError: the lengths of a DoRA's rows need the weights of the module, which are on the meta device.
    """
    layers = find_lora_layers(module)
    with torch.no_grad():
        for name, parameter in find_adapter_parameters(module, adapter).items():
            layer, _, rest = name.partition(f".{MAGNITUDE}")
            if not rest:
                parameter.copy_(tensors[name])
                continue
            weight = _get_frozen_weight(module, layer)
            norms = compute_row_norms(weight)
            if name in tensors:
                lengths = tensors[name].to(norms.device)
            else:
                a, b = (tensors[f"{layer}.lora_{factor}.weight"].to(norms) for factor in "AB")
                total = torch.addmm(widen(weight), b, a, alpha=layers[layer].scaling[adapter])
                lengths = tensors[f"{layer}.{DORA_SCALE}"].to(norms) * compute_row_norms(total) / norms
            parameter.copy_(lengths - norms)


def _get_frozen_weight(module: nn.Module, layer: str) -> Tensor:
    """Return the frozen weight of an adapted layer."""
    base: Any = module.get_submodule(layer).base_layer
    if not isinstance(base, QuantisedLinear) and base.weight.is_meta:
        raise ValueError("a DoRA needs the weights that it adapts, which are not loaded yet: set init to whole")
    return base.weight


def _find_file(path: Path) -> Path:
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


def _read_file(file: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """Return the tensors of a file, PEFT's settings in its header or beside it, and the header."""
    try:
        with safe_open(file, framework="pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
            header = reader.metadata() or {}
        beside = file.parent / SETTINGS
        text = next((header[key] for key in HEADERS if key in header), None)
        if text is None and beside.is_file():
            text = beside.read_text(encoding="utf-8-sig")
        if others := [key for key in tensors if key.startswith(TEXT_ENCODERS)]:
            tensors = {key: tensor for key, tensor in tensors.items() if key not in others}
            print(
                f"{file}: {len(others)} tensors of text encoders are left out, which are not adapted here", file=sys.stderr
            )
        settings = json.loads(text or "{}")
        if not isinstance(settings, dict):
            raise ValueError(f"its settings are a {type(settings).__name__}")
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as an adapter: {' '.join(str(error).split())}") from error
    settings = {name.removeprefix("transformer.").removeprefix("unet."): value for name, value in settings.items()}
    if wrong := [name for name in PATTERNS if not isinstance(settings.get(name) or {}, dict)]:
        raise ValueError(f"{file} has the setting {wrong[0]}, expected a mapping from names of layers")
    if settings.get("use_dora") and not any(MAGNITUDE in key or DORA_SCALE in key for key in tensors):
        raise ValueError(f"{file} is incomplete: its settings say use_dora, and no layer has lengths of rows ({MAGNITUDE})")
    if variant := next((name for name in VARIANTS if settings.get(name)), None):
        raise ValueError(f"{file} has the setting {variant}, with which a layer is not W + s B A: merge it with PEFT")
    if str(settings.get("init_lora_weights")).startswith(CHANGED_BASE):
        raise ValueError(
            f"{file} is initialised by {settings['init_lora_weights']}, which changes the base weights: convert it to a "
            "LoRA by PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if "r" not in settings and not any(key.endswith(".alpha") for key in tensors):
        tensors.update(_read_header_alphas(tensors, header, file))
    return tensors, settings, header


def _read_header_alphas(tensors: Mapping[str, Tensor], header: Mapping[str, str], file: Path) -> dict[str, Tensor]:
    """Return the alpha of the header for each layer, by key; none if the header has no alpha."""
    name = next((name for name in ALPHAS if name in header), None)
    if name is None:
        return {}
    try:
        alpha = float(header[name])
    except ValueError as error:
        raise ValueError(f"{file} has the {name} {header[name]} in its header, expected a number") from error
    alphas = {}
    for key, tensor in tensors.items():
        ending = FACTORS.search(key) or FURTHER.search(key)
        if ending is None or UP.search(key):
            continue
        alphas[f"{key[: ending.start()]}.alpha"] = torch.tensor(alpha)
        # Converters to these keys multiply the factors by the scale, and keep the header.
        if name.startswith("ss_") and "lora_A" in key and len(tensor) != alpha:
            raise ValueError(
                f"{file} has rank {len(tensor)} and the {name} {alpha:g} in its header, which its factors may hold already: "
                "add an alpha per layer, or remove it from the header"
            )
    return alphas


def _has_known_ending(key: str) -> bool:
    """Return whether a key belongs to a LoRA, DoRA or LoKr of any layer."""
    return any(ending.search(key) for ending in (FACTORS, FURTHER, UP, DOWN))


def count_rows(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of rows of all factors B, which a conversion of names must keep."""
    return sum(len(tensor) for key, tensor in tensors.items() if UP.search(key))


def _match(
    tensors: Mapping[str, Tensor], linear: Mapping[str, nn.Module], file: Path
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return the parts of each layer, and the keys that belong to no layer.

    Raises:
        ValueError: a part is not finite, or two keys name the same part.
    """
    flat = {name.replace(".", "_"): name for name in linear}
    layers: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        ending = FACTORS.search(key) or FURTHER.search(key)
        layer = None if ending is None else _find_layer(key[: ending.start()], linear, flat)
        if ending is None or layer is None:
            unknown.append(key)
            continue
        if ending.re is FURTHER:
            part = MAGNITUDE if ending["part"] == DORA_SCALE else ending["part"]
        elif ending["alpha"]:
            part = "alpha"
        else:
            part = "A" if ending["a"] or ending["down"] or ending["ldown"] else "B"
            tensor = tensor.flatten(2).squeeze(2) if tensor.ndim == 4 and tensor.shape[2:] == (1, 1) else tensor
        if part in layers.setdefault(layer, {}):
            raise ValueError(f"{file} has several keys for one part of {layer}: {key}")
        if part != "alpha" and not tensor.is_floating_point():
            raise ValueError(f"{file} has numbers of {tensor.dtype}, expected real ones: {key}")
        layers[layer][part] = widen(tensor)
        if not layers[layer][part].isfinite().all():
            raise ValueError(f"{file} has numbers that are not finite: {key}")
    return layers, unknown


def _list_kinds(layers: Mapping[str, Mapping[str, Tensor]]) -> set[str]:
    """Return the kinds of parts in a file; all parts of a LoKr are one kind."""
    kinds = {part for parts in layers.values() for part in parts}
    return {"lokr" if kind.startswith("lokr") else kind for kind in kinds} - {"alpha"}


def _find_scale(layer: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any], file: Path) -> float:
    """Return the factor of a layer's product.

    Raises:
        ValueError: the factor is not finite and above 0, or ranks differ from those of the settings.
    """
    rank = next((len(parts[part]) for part in ("A", "lokr_w2_b", "lokr_w1_b") if part in parts), None)
    alpha: Any = parts.get("alpha")
    divisor: Any = rank  # None for a LoKr without low-rank factors, whose scale is 1 in LyCORIS for any alpha
    if alpha is not None:
        alpha = alpha.item() if alpha.numel() == 1 else list(alpha.shape)
    elif {"r", *ALPHAS} & {*settings}:
        from peft.utils.other import get_pattern_key

        ranks, alphas = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
        divisor = ranks.get(get_pattern_key(ranks, layer), settings.get("r", rank))
        alpha = alphas.get(get_pattern_key(alphas, layer), settings.get("lora_alpha", settings.get("alpha", divisor)))
        if rank not in (None, divisor):
            raise ValueError(f"{file} has rank {rank} at {layer}, and its settings (header or {SETTINGS}) say {divisor}")
    else:
        alpha = rank
    if alpha is None and divisor is None:
        return 1.0
    for each in (rank, divisor):
        if each is not None and not (isinstance(each, int) and each > 0):
            raise ValueError(f"{file} has the rank {each} at {layer}, expected at least 1")
    if not (isinstance(alpha, int | float) and 0 < alpha < math.inf):
        raise ValueError(f"{file} has the alpha {alpha} at {layer}, expected a finite number above 0")
    if divisor is None:
        return 1.0
    return float(alpha / (math.sqrt(divisor) if settings.get("use_rslora") and "alpha" not in parts else divisor))


def _find_layer(name: str, linear: Mapping[str, nn.Module], flat: Mapping[str, str]) -> str | None:
    """Return the layer of a name in a file, with or without prefixes, with dots or underscores."""
    while True:
        if name in linear:
            return name
        if name in flat:
            return flat[name]
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            return None
        name = name.removeprefix(prefix)


def _check_factors(layers: Mapping[str, Mapping[str, Tensor]], linear: Mapping[str, nn.Module], file: Path) -> None:
    """Raise ValueError unless each layer has both factors, with fitting shapes, and all or none have lengths of rows."""
    is_dora = MAGNITUDE in _list_kinds(layers)
    for name, parts in layers.items():
        layer: Any = linear[name]
        if missing := {"A", "B"} - set(parts):
            raise ValueError(f"{file} is incomplete: {name} has no factor {min(missing)}")
        a, b = parts["A"], parts["B"]
        shapes = [list(a.shape), list(b.shape)]
        if a.ndim != 2 or shapes != [[len(a), layer.in_features], [layer.out_features, len(a)]]:
            raise ValueError(
                f"{file} is of another architecture: {name} has factors of {shapes[0]} and {shapes[1]}, expected "
                f"[rank, {layer.in_features}] and [{layer.out_features}, rank]"
            )
        if not is_dora:
            continue
        if MAGNITUDE not in parts:
            raise ValueError(f"{file} is incomplete: {name} has no lengths of rows, which other layers have")
        lengths = list(parts[MAGNITUDE].shape)
        if lengths not in ([layer.out_features], [layer.out_features, 1]):
            raise ValueError(f"{file} has lengths of {lengths} at {name}, expected one per row, [{layer.out_features}]")


def _build_lokr(
    layers: Mapping[str, Mapping[str, Tensor]],
    scales: Mapping[str, float],
    linear: Mapping[str, nn.Module],
    settings: Mapping[str, Any],
    file: Path,
) -> LoraFile:
    """Return the LoKr of a file with the rank and factor that PEFT chooses for its shapes.

    Smaller factors are padded with zeros, and multiplied if a layer of that rank is not factored.
    """
    from peft.tuners.lokr.layer import factorization

    for name, parts in layers.items():
        whole = {part.removesuffix("_a").removesuffix("_b") for part in parts} - {"alpha"}
        split = all(f"{part}_a" in parts and f"{part}_b" in parts for part in whole - set(parts))
        if whole != {"lokr_w1", "lokr_w2"} or not split:
            raise ValueError(f"{file} is incomplete, or not only a LoKr: {name} has {', '.join(sorted(parts))}")
    first = {name: _multiply_out("lokr_w1", parts) for name, parts in layers.items()}
    second = {name: _multiply_out("lokr_w2", parts) for name, parts in layers.items()}
    ranks = [len(parts["lokr_w2_b"]) for parts in layers.values() if "lokr_w2_b" in parts]
    halves = [math.ceil(max(parts["lokr_w2"].shape) / 2) for parts in layers.values() if "lokr_w2" in parts]
    known = settings.get("decompose_factor")
    # PEFT does not factor a w2 of at most twice the rank.
    rank, scale = max([int(settings.get("r") or 1), *ranks, *halves]), next(iter(scales.values()))
    for factor in [int(known)] if known is not None else [-1, *sorted({len(w1) for w1 in first.values()})]:
        expected = {}
        for name in layers:
            layer: Any = linear[name]
            expected[name] = [factorization(size, factor) for size in (layer.out_features, layer.in_features)]
        if expected != {name: [*zip(first[name].shape, second[name].shape, strict=True)] for name in layers}:
            continue
        tensors = {}
        for name, parts in layers.items():
            tensors[f"{name}.lokr_w1"] = first[name] * (scales[name] / scale)
            if rank >= max(second[name].shape) / 2:
                tensors[f"{name}.lokr_w2"] = second[name]
                continue
            fill = rank - len(parts["lokr_w2_b"])
            tensors[f"{name}.lokr_w2_a"] = nn.functional.pad(parts["lokr_w2_a"], (0, fill))
            tensors[f"{name}.lokr_w2_b"] = nn.functional.pad(parts["lokr_w2_b"], (0, 0, 0, fill))
        return LoraFile(rank, rank * scale, tuple(sorted(layers)), tensors, Lokr(None if factor == -1 else factor))
    raise ValueError(f"{file} is not a LoKr with one factor for this architecture")


def _multiply_out(part: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a factor of a LoKr, multiplied out."""
    return parts[part] if part in parts else parts[f"{part}_a"] @ parts[f"{part}_b"]


def _unify_factors(layers: Mapping[str, Mapping[str, Tensor]], scales: Mapping[str, float]) -> LoraFile:
    """Return the factors with one rank and one scale."""
    rank, scale = max(len(parts["A"]) for parts in layers.values()), next(iter(scales.values()))
    tensors = {}
    for name, factors in layers.items():
        fill = rank - len(factors["A"])
        b = factors["B"] if scales[name] == scale else factors["B"] * (scales[name] / scale)
        tensors[f"{name}.lora_A.weight"] = nn.functional.pad(factors["A"], (0, 0, 0, fill))
        tensors[f"{name}.lora_B.weight"] = nn.functional.pad(b, (0, fill))
    return LoraFile(rank, rank * scale, tuple(sorted(layers)), tensors)


def _join(parts: Mapping[str, LoraFile]) -> LoraFile:
    """Join the adapters of several networks, with a prefix for the layers of each."""
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
    return _unify_factors(factors, scales)
