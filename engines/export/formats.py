"""Formats of an export: an adapter, merged weights, a whole pipeline, and the original layout that ComfyUI reads."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import UsageError
from fluvial.engines.export.model_folder import convert_write_errors, export, split_by_network, write_lora
from fluvial.engines.files import save_tensors
from fluvial.engines.gathered import gather, gather_weights
from fluvial.models import DiffusionModel
from fluvial.models.lora import Dora, describe_lora, find_linear_layers, find_lora_layers, map_adapter_parts, read_form
from fluvial.models.lora_files import COMFY_DORA
from fluvial.models.lora_layer import MAGNITUDE, compute_growth, compute_row_norms, widen
from fluvial.models.original.convert import adapter_to_original, include_joined, lokr_to_original, to_original
from fluvial.models.original.layout import ARCHITECTURES, LAYOUTS, OriginalNames

Format = Literal["lora", "merged", "full", "comfyui"]
FORMATS: tuple[Format, ...] = get_args(Format)
COMFY_LORA, COMFY_WEIGHTS = "lora.safetensors", "diffusion_model.safetensors"


def check_format(kind: Format, model: DiffusionModel, *, adapted: bool, merge: bool = False) -> None:
    """Raise UsageError if a model cannot be exported in a format.

    Args:
        kind: format.
        model: trained model.
        adapted: whether an adapter was trained, not all weights.
        merge: whether to merge the adapter into the weights, with comfyui.
    """
    pipeline = str(getattr(model, "pipeline", type(model).__name__))
    if kind == "lora" and not adapted:
        raise UsageError("the run trained all weights, so there is no adapter to export as lora: use merged")
    if merge and (kind != "comfyui" or not adapted):
        raise UsageError("`merge` has no effect except with comfyui of a run with an adapter; remove it")
    if kind == "full" and not isinstance(getattr(model, "folder", None), Path):
        raise UsageError(f"{pipeline} is not a pipeline with a folder, so it cannot be exported as full: use merged")
    if kind == "comfyui" and pipeline not in LAYOUTS:
        raise UsageError(f"{pipeline} has no layout that ComfyUI reads, expected one of {ARCHITECTURES}: use lora or merged")


@collective
def write(
    kind: Format,
    module: nn.Module,
    model: DiffusionModel,
    out: Path,
    *,
    average: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    merge: bool = False,
    world: World,
) -> None:
    """Write a (sharded) module in a format.

    - lora: `pytorch_lora_weights.safetensors`, for `load_lora_weights`.
    - merged: the network with the adapter folded in, for its class's `from_pretrained`.
    - full: the pipeline's folder with the merged network, for `DiffusionPipeline.from_pretrained`. The other parts are
      copies, not links, so that the folder can be moved or pushed to the Hub.
    - comfyui: one file in the original layout, `lora.safetensors` of an adapter, or `diffusion_model.safetensors`.

    A pipeline with two networks has a folder for each of them by name.

    Memory on the host of rank 0: the tensors of one file; for comfyui all tensors.

    Args:
        kind: format.
        module: network that was trained.
        model: model of the module.
        out: folder of the export.
        average, dtype: see `gathered.gather_weights`.
        merge: whether to merge the adapter into the weights, with comfyui.
        world: process group the module is sharded over.

    Raises:
        UsageError: the model cannot be exported in this format.
        RunError: the folder cannot be written.
    """
    adapted = describe_lora(module) is not None
    check_format(kind, model, adapted=adapted, merge=merge)
    options: dict[str, Any] = {"average": average, "dtype": dtype, "world": world}
    if kind == "lora":
        write_lora(module, out, **options)
    elif kind == "merged":
        export(module, out, merge=adapted, **options)
    elif kind == "full":
        folder, part = Path(getattr(model, "folder")), str(getattr(model, "part"))  # noqa: B009
        trained = [*module] if isinstance(module, nn.ModuleDict) else [part]
        with convert_write_errors(out, world, "export"):
            if world.is_main:
                copy_parts(folder, out, without=trained)
        export(module, out if isinstance(module, nn.ModuleDict) else out / part, merge=adapted, **options)
    else:
        _write_original(module, str(getattr(model, "pipeline")), out, adapter=adapted and not merge, **options)  # noqa: B009


def copy_parts(folder: Path, out: Path, *, without: list[str]) -> None:
    """Copy a pipeline's index, licence and parts, except `without`, to `out`; links are followed."""
    from fluvial.models.pipelines.folder import find_index, read_entries

    out.mkdir(parents=True, exist_ok=True)
    for file in (find_index(folder), *sorted(folder.glob("LICENSE*"))):
        shutil.copyfile(file, out / file.name)
    for part, kind in read_entries(folder).items():
        if kind is not None and part not in without and (folder / part).is_dir():
            shutil.copytree(folder / part, out / part)


def _write_original(
    module: nn.Module,
    pipeline: str,
    out: Path,
    *,
    adapter: bool,
    average: Mapping[str, Tensor] | None,
    dtype: torch.dtype | None,
    world: World,
) -> None:
    """Write the adapter or the merged weights of each network in the original layout."""
    settings = describe_lora(module)
    chosen: dict[str, Any] = {"adapter": "default"} if adapter else {"merge": settings is not None}
    gathered = gather_weights(module, average=average, dtype=dtype, **chosen)  # by all ranks, kept by one
    tensors = {name: tensor for name, tensor in gathered if world.is_main}
    lengths = dict[str, Tensor]()
    if adapter and settings is not None and isinstance(read_form(module), Dora):
        lengths = _compute_lengths(module, pipeline, tensors, settings, world)
    with convert_write_errors(out, world, "export"):
        if not world.is_main:
            return
        scales = {name: part for name, _, part in split_by_network(module, lengths)}
        for name, network, stripped in split_by_network(module, tensors):
            original = OriginalNames(pipeline, network.config)
            if adapter:
                assert settings is not None
                converted = _adapter_to_original(original, network, stripped, settings, scales[name])
            else:
                converted = to_original(original, stripped)
            (out / name).mkdir(parents=True, exist_ok=True)
            contiguous = {key: tensor.contiguous() for key, tensor in converted.items()}
            metadata = {"format": "pt"} | ({COMFY_DORA: "true"} if lengths else {})
            save_tensors(contiguous, out / name / (COMFY_LORA if adapter else COMFY_WEIGHTS), metadata=metadata)


@collective
def _compute_lengths(
    module: nn.Module, pipeline: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], world: World
) -> dict[str, Tensor]:
    """Return the lengths to which ComfyUI scales the rows of a DoRA, on the main rank, see `adapter_to_original`.

    They include layers that are joined with adapted ones, with the norms of their rows, so that these do not change.
    """
    parts, linear, lengths_by_name = map_adapter_parts(module, "default"), find_linear_layers(module), dict[str, Tensor]()
    for name, network in module.items() if isinstance(module, nn.ModuleDict) else [("", module)]:
        prefix = f"{name}." if name else ""
        for layer in include_joined(OriginalNames(pipeline, network.config), network, find_lora_layers(network)):
            weight: Any = linear[prefix + layer].weight  # dequantised, for a quantised layer
            weight = widen(gather(weight.detach())).cpu()
            if not world.is_main:
                continue
            norms = compute_row_norms(weight)
            if keys := parts.get(prefix + layer):
                a, b, lengths = (tensors[keys[part]].to(weight.dtype) for part in ("lora_A", "lora_B", MAGNITUDE))
                scale = settings["alpha"] / settings["rank"]
                norms = norms * (1 + compute_growth(weight, a, b, lengths - norms, scale))
            lengths_by_name[prefix + layer] = norms
    return lengths_by_name


def _adapter_to_original(
    original: OriginalNames,
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    lengths: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the adapter of a network by the keys that ComfyUI reads.

    Args:
        original: names of the network in the original layout.
        network: adapted network.
        tensors: adapter by the keys of PEFT.
        settings: rank and alpha.
        lengths: lengths of rows of a DoRA, see `_compute_lengths`.
    """
    names = map_adapter_parts(network, "default")
    parts = {layer: {part: tensors[key] for part, key in keys.items()} for layer, keys in names.items()}
    if any("lokr_w1" in part for part in parts.values()):
        return lokr_to_original(original, parts, scale=settings["alpha"] / settings["rank"])
    factors = {layer: (part["lora_A"], part["lora_B"]) for layer, part in parts.items()}
    return adapter_to_original(original, factors, network, alpha=settings["alpha"], lengths=lengths or None)
