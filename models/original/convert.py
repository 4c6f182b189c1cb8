"""Conversion of weights and adapters between diffusers' layout and the original one of their architecture."""

import atexit
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fluvial.models.lora import find_linear_layers
from fluvial.models.lora_files import DORA_SCALE
from fluvial.models.original.layout import LAYOUTS, OriginalNames

PART_NAMES = {"lora_down": "A", "lora_A": "A", "lora_up": "B", "lora_B": "B", "alpha": "alpha", DORA_SCALE: DORA_SCALE}
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.", "unet.")  # prefixes of a network's names
LYCORIS = "lycoris_"  # prefix of diffusers' name of a layer, with underscores for dots


def to_original(original: OriginalNames, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a network by their original names.

    Args:
        original: names of the network.
        tensors: tensors by their names in diffusers' network.

    Raises:
        ValueError: a tensor has no original name.
    """
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        target = original.find_tensor(name)
        key = original.layout.prefix + target.name
        pieces.setdefault(key, {})[target.part] = swap_halves(tensor) if target.swapped else tensor
    return {
        name: torch.cat([parts[part] for part in sorted(parts)]) if len(parts) > 1 else parts[0]
        for name, parts in pieces.items()
    }


def from_original(pipeline: str, tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a network by diffusers' names, the inverse of `to_original`; tensors by these names are kept.

    Args:
        pipeline: class of diffusers' pipeline.
        tensors: tensors of a file, which may contain other networks, too; names may have one of `PREFIXES`.
        network: network, for the names and shapes of its tensors.

    Raises:
        ValueError: the architecture has no original layout, or a tensor is missing.
    """
    expected = network.state_dict()
    prefix = max((each for each in PREFIXES if any(key.startswith(each) for key in tensors)), key=len)
    source = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if expected.keys() <= source.keys():
        return {name: source[name] for name in expected}
    if pipeline not in LAYOUTS:
        raise ValueError(f"it lacks {min(expected.keys() - source.keys())}, and {pipeline} has no original layout")
    original, joined = OriginalNames(pipeline, network.config), dict[str, dict[int, str]]()
    for name in expected:
        tensor = original.find_tensor(name)
        joined.setdefault(tensor.name, {})[tensor.part] = name
    converted = {}
    for key, parts in joined.items():
        if key not in source:
            raise ValueError(f"it lacks {key}, which is {parts[min(parts)]} of diffusers' {type(network).__name__}")
        names = [parts[part] for part in sorted(parts)]
        rows = source[key].split([len(expected[name]) for name in names]) if len(names) > 1 else [source[key]]
        for name, piece in zip(names, rows, strict=True):
            converted[name] = swap_halves(piece) if original.find_tensor(name).swapped else piece.contiguous()
    return converted


def unpack_weights(file: Path, pipeline: str, network: nn.Module) -> Path:
    """Convert the weights of a network in one safetensors file to a temporary folder of diffusers, and return the folder.

    Args:
        file: weights in diffusers' or the original layout, alone or in a whole checkpoint; see `from_original`.
        pipeline, network: see `from_original`; the network may be on the meta device.

    Raises:
        ValueError: the file cannot be read, or does not contain that network; the message names the file.
    """
    folder = Path(mkdtemp(prefix="fluvial-weights-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        tensors = from_original(pipeline, load_file(file), network)
        save_file(tensors, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ValueError(f"{file} is not a file of weights of {pipeline}: {' '.join(str(error).split())}") from error
    network.save_config(folder)  # type: ignore[operator]
    return folder


def adapter_to_original(
    original: OriginalNames,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    network: nn.Module,
    *,
    alpha: float,
    lengths: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return an adapter with the keys of kohya or ComfyUI, and its scale.

    The original joins some layers, such as queries, keys and values. Their factors A are stacked and their factors B become
    diagonal blocks, so that the product stays the same; a joined layer without an adapter gets factors of zero.

    Args:
        original: names of the network.
        factors: A `[rank, in]` and B `[out, rank]` by layer, all of one rank.
        network: adapted network, for the sizes of its layers.
        alpha: scale of the adapter before it is divided by the rank.
        lengths: for a DoRA, by layer, including those of `include_joined`: the lengths `[out]` that ComfyUI divides by the
            norms of W's rows and multiplies W + s B A by (comfy/weight_adapter/base.py, `weight_decompose`).

    Raises:
        ValueError: a layer has no original name.
    """
    groups, linear, kohya = _group_layers(original, network), find_linear_layers(network), original.layout.kohya
    endings = ("lora_down.weight", "lora_up.weight") if kohya else ("lora_A.weight", "lora_B.weight")
    converted: dict[str, Tensor] = {}
    for stem in dict.fromkeys(original.find_adapter(layer).name for layer in factors):
        layers = groups[stem]
        a, b = next(factors[layer] for layer in layers if layer in factors)
        zeros = {layer: (torch.zeros_like(a), b.new_zeros(linear[layer].out_features, b.shape[1])) for layer in layers}
        pairs = [factors.get(layer, zeros[layer]) for layer in layers]
        down, up = torch.cat([a for a, _ in pairs]), torch.block_diag(*(b for _, b in pairs))
        if original.find_adapter(layers[0]).swapped:
            up = swap_halves(up)
        for ending, factor in zip(endings, (down, up), strict=True):
            converted[f"{stem}.{ending}"] = factor.contiguous()
        converted[f"{stem}.alpha"] = torch.tensor(float(alpha * len(layers)))
        if lengths is not None:
            scale = torch.cat([lengths[layer] for layer in layers])[:, None]
            converted[f"{stem}.dora_scale"] = swap_halves(scale) if original.find_adapter(layers[0]).swapped else scale
    return converted


def lokr_to_original(
    original: OriginalNames, parts: Mapping[str, Mapping[str, Tensor]], *, scale: float
) -> dict[str, Tensor]:
    """Return a LoKr with keys that ComfyUI reads, and its scale multiplied into w1.

    The Kronecker products of several layers, such as queries, keys and values, do not form one product of the layer that
    joins them. ComfyUI reads them by diffusers' names after `lycoris_` (comfy/lora.py, `model_lora_keys_unet`).

    Args:
        original: names of the network.
        parts: `lokr_w1`, `lokr_w2` and so on by layer.
        scale: alpha / rank.

    Raises:
        ValueError: a layer has no original name.
    """
    converted: dict[str, Tensor] = {}
    for layer, tensors in parts.items():
        adapter = original.find_adapter(layer)
        is_whole = adapter.parts == 1 and not adapter.swapped
        stem = adapter.name if is_whole else f"{LYCORIS}{layer.replace('.', '_')}"
        for part, tensor in tensors.items():
            converted[f"{stem}.{part}"] = (tensor * scale if part == "lokr_w1" else tensor).contiguous()
    return converted


def adapter_from_original(pipeline: str, tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return an adapter by diffusers' names of layers: `layer.lora_A.weight`, `layer.alpha`, `layer.dora_scale`.

    Args:
        pipeline: class of diffusers' pipeline.
        tensors: tensors by the keys of `adapter_to_original`, `lokr_to_original` or kohya's trainers.
        network: adapted network.

    Raises:
        ValueError: the architecture has no original layout, a key belongs to no layer, a factor is missing, or a LoKr
            adapts several layers.
    """
    if pipeline not in LAYOUTS:
        raise ValueError(f"{pipeline} has no original layout")
    config: Any = network.config
    original = OriginalNames(pipeline, config)
    groups, linear = _group_layers(original, network), find_linear_layers(network)
    stems: dict[str, dict[str, Tensor]] = {}
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        stem, _, kind = key.removesuffix(".weight").rpartition(".")
        if stem.startswith(LYCORIS):
            converted[key] = tensor
        elif stem not in groups or not (kind in PART_NAMES or kind.startswith("lokr_")):
            raise ValueError(f"{key} belongs to no layer of {pipeline}")
        else:
            stems.setdefault(stem, {})[PART_NAMES.get(kind, kind)] = tensor
    for stem, parts in stems.items():
        if any(kind.startswith("lokr_") for kind in parts):
            if len(groups[stem]) > 1 or original.find_adapter(groups[stem][0]).swapped:
                raise ValueError(f"{stem} is a LoKr of several layers, which cannot be split")
            converted |= {f"{groups[stem][0]}.{kind}": tensor for kind, tensor in parts.items()}
            continue
        if missing := {"A", "B"} - set(parts):
            raise ValueError(f"{stem} has no factor {missing.pop()}")
        layers, down = groups[stem], parts["A"]
        swap = swap_halves if original.find_adapter(layers[0]).swapped else Tensor.contiguous
        sizes = [linear[layer].out_features for layer in layers]
        rows = swap(parts["B"]).split(sizes)
        lengths = swap(parts[DORA_SCALE]).split(sizes) if DORA_SCALE in parts else ()
        separate = _are_block_diagonal(rows, len(down))
        for number, (layer, b) in enumerate(zip(layers, rows, strict=True)):
            share = len(down) // len(layers) if separate else len(down)
            columns = slice(number * share, (number + 1) * share) if separate else slice(None)
            if len(layers) > 1 and not (down[columns].any() or b[:, columns].any()):
                continue  # a layer without an adapter among joined ones
            converted[f"{layer}.lora_A.weight"], converted[f"{layer}.lora_B.weight"] = (
                down[columns],
                b[:, columns].contiguous(),
            )
            if "alpha" in parts:
                converted[f"{layer}.alpha"] = parts["alpha"] / len(layers) if separate else parts["alpha"]
            if lengths:
                converted[f"{layer}.{DORA_SCALE}"] = lengths[number]
    return converted


def include_joined(original: OriginalNames, network: nn.Module, layers: Collection[str]) -> list[str]:
    """Return the given linear layers of a network, and those that the original joins with them."""
    groups = _group_layers(original, network).values()
    return [layer for group in groups if not set(group).isdisjoint(layers) for layer in group]


def swap_halves(tensor: Tensor) -> Tensor:
    """Exchange the halves of a tensor's rows."""
    return torch.cat(tensor.chunk(2)[::-1])


def _group_layers(original: OriginalNames, network: nn.Module) -> dict[str, list[str]]:
    """Return the linear layers of each adapter by the part of its keys before the factor, in the order of joining."""
    groups: dict[str, list[str]] = {}
    for layer in find_linear_layers(network):
        groups.setdefault(original.find_adapter(layer).name, []).append(layer)
    return {stem: sorted(layers, key=lambda layer: original.find_adapter(layer).part) for stem, layers in groups.items()}


def _are_block_diagonal(rows: Sequence[Tensor], rank: int) -> bool:
    """Return whether each of several joined layers uses its own share of the rank: B is zero outside of it."""
    count = len(rows)
    if count == 1 or rank % count:
        return False
    share = torch.arange(rank) // (rank // count)
    return not any(part[:, share != number].any() for number, part in enumerate(rows))
