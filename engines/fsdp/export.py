"""Export: weights one full tensor at a time, and the files that diffusers' from_pretrained and load_lora_weights open."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fluvial.engines.errors import RunError
from fluvial.engines.fsdp.files import LORA, MODEL, sync
from fluvial.engines.fsdp.world import World
from fluvial.models.lora import adapter_names, lora_layers


def export(
    module: nn.Module,
    out: Path,
    *,
    average: Mapping[str, Tensor] | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    world: World,
) -> None:
    """Write a (sharded) module as a model folder that `from_pretrained` opens; every rank must take part.

    An nn.ModuleDict of models is written as a folder each, within `out`, by their names.

    Memory: rank 0 holds one file's tensors on the host, the others one tensor.

    Args:
        module: a diffusers model, which gets its config.json, or any other, of which the weights alone are written.
        out: folder. What it holds besides weights and config.json stays.
        average: parameters to write in place of the module's own, by name.
        merge: fold the adapter `default` into the weights.
        dtype: of what is written; by default that of the parameters.
        max_shard_size: bytes of a file, or text such as "5GB".
        world: of the world.

    Raises:
        RunError: the folder cannot be written. The weights it had stay as they were until all files are written.
    """
    tensors = weights(module, average=average, merge=merge, dtype=dtype)
    for name, network, like in _networks(module, layout(module, average=average, merge=merge, dtype=dtype)):
        named = zip(like, (tensor for _, tensor in islice(tensors, len(like))), strict=True)
        write_model(named, out / name, like=like, config=_config(network), max_shard_size=max_shard_size, world=world)


def weights(
    module: nn.Module,
    *,
    average: Mapping[str, Tensor] | None = None,
    adapter: str | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, copy of the full tensor on the CPU), one at a time; every rank must take part.

    Without adapters on the module: its parameters and persistent buffers, as its state dict names and orders them. With
    adapters, `merge` gives the tensors of the plain module, W + (alpha / rank) B A computed in float32; else `adapter` gives
    those of that adapter alone, named as PEFT and diffusers do in files. At most one layer is gathered at a time.

    Args:
        average: (sharded) tensors in place of the module's own, by the names of its parameters.
        adapter: which one is given, or merged; `default` is merged if none is named.
        dtype: floating-point tensors are cast to it at the end.

    Raises:
        ValueError: the module has adapters and neither was chosen, it has none of that name, or `average` does not fit it.
    """
    for name, source in _sources(module, average, adapter, merge).items():
        yield name, source.full(dtype).to("cpu", copy=True, memory_format=torch.contiguous_format)


def layout(
    module: nn.Module,
    *,
    average: Mapping[str, Tensor] | None = None,
    adapter: str | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return what `weights` yields for the same arguments, as tensors on the meta device."""
    return {
        name: torch.empty(source.weight.shape, dtype=_dtype(source.weight, dtype), device="meta")
        for name, source in _sources(module, average, adapter, merge).items()
    }


def write_model(
    weights: Iterable[tuple[str, Tensor]],
    out: Path,
    *,
    like: Mapping[str, Tensor],
    config: str | None,
    max_shard_size: int | str = "5GB",
    world: World,
) -> None:
    """Write weights to safetensors as diffusers names and splits them, a file as soon as its last tensor is there.

    Args:
        weights: (name, full tensor), the same names on every rank; rank 0 writes.
        out: folder.
        like: tensors on the meta device with the names, shapes and dtypes of the weights.
        config: text of config.json; None writes none.
        max_shard_size: bytes of a file, or text such as "5GB".
        world: of the world.

    Raises:
        RunError: the folder cannot be written. The weights it had stay as they were until all files are written.
    """
    plan = split_torch_state_dict_into_shards(
        {**like}, filename_pattern=f"{MODEL}{{suffix}}.safetensors", max_shard_size=max_shard_size
    )
    missing = {file: len(names) for file, names in plan.filename_to_tensors.items()}
    held: dict[str, dict[str, Tensor]] = {file: {} for file in missing}
    pattern = re.compile(rf"{MODEL}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    with _replacing(pattern, out, world) as folder:
        for name, tensor in weights:
            file = plan.tensor_to_filename[name]
            if world.is_main:
                held[file][name] = tensor
            missing[file] -= 1
            if not missing[file]:
                with _writing(out, world):
                    if world.is_main:
                        save_file(held.pop(file), folder / file, metadata={"format": "pt"})
        with _writing(out, world):
            if world.is_main and plan.is_sharded:
                index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (folder / f"{MODEL}.safetensors.index.json").write_text(text)
            if world.is_main and config is not None:
                (folder / "config.json").write_text(config)


def write_lora(
    module: nn.Module,
    out: Path,
    *,
    adapter: str = "default",
    average: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    world: World,
) -> None:
    """Write one adapter as a file that the `load_lora_weights` of a diffusers pipeline opens; every rank must take part.

    Rank and alpha are written too, so that loading scales the adapter as training did. Of an nn.ModuleDict of models each
    has its file in a folder within `out`, by their names.

    Args:
        module: with adapters, sharded or not.
        out: folder.
        adapter: its name.
        average: parameters to write in place of the module's own, by name.
        dtype: of what is written; by default that of the parameters.
        world: of the world.

    Raises:
        RunError: the folder cannot be written. The adapter it had stays as it was.
        ValueError: the module has no adapter of that name.
    """
    from diffusers import UNet2DConditionModel
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY

    like = layout(module, average=average, adapter=adapter, dtype=dtype)
    configs: Any = module.peft_config
    settings = configs[adapter]
    # No more than it takes, so that other versions of PEFT find nothing that they do not know.
    scale = {"r": settings.r, "lora_alpha": settings.lora_alpha, "target_modules": sorted(settings.target_modules)}
    tensors = weights(module, average=average, adapter=adapter, dtype=dtype)
    for name, network, own in _networks(module, like):
        part = "unet" if isinstance(network, UNet2DConditionModel) else "transformer"  # what diffusers' pipelines call it
        text = json.dumps({f"{part}.{key}": value for key, value in scale.items()}, indent=2, sort_keys=True)
        named = {f"{part}.{each}": tensor for each, (_, tensor) in zip(own, islice(tensors, len(own)), strict=True)}
        place = out / name
        with _replacing(re.compile(re.escape(LORA)), place, world) as folder, _writing(place, world):
            if world.is_main:
                save_file(named, folder / LORA, metadata={"format": "pt", LORA_ADAPTER_METADATA_KEY: text})


def _networks(module: nn.Module, like: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield each model of a module, with its name and those of `like`, by their names in it; a model alone has no name."""
    if not isinstance(module, nn.ModuleDict):
        yield "", module, dict(like)
        return
    for name, network in module.items():
        prefix = f"{name}."
        yield name, network, {each.removeprefix(prefix): tensor for each, tensor in like.items() if each.startswith(prefix)}


class _Source(NamedTuple):
    """Where one exported tensor comes from: W, or W + scaling B A."""

    weight: Tensor
    factors: tuple[Tensor, Tensor] | None = None  # A [rank, in], B [out, rank]
    scaling: float = 1.0

    def full(self, dtype: torch.dtype | None) -> Tensor:
        """Gather what it takes, and return the full tensor, on the device of its shards."""
        tensor = _gathered(self.weight)
        if self.factors is not None:
            a, b = (_gathered(factor).float() for factor in self.factors)
            tensor = tensor.float() + (b @ a) * self.scaling
        return tensor.to(_dtype(self.weight, dtype))


def _sources(
    module: nn.Module, average: Mapping[str, Tensor] | None, adapter: str | None, merge: bool
) -> dict[str, _Source]:
    """Return where each exported tensor comes from, by its exported name."""
    state: dict[str, Tensor] = module.state_dict()
    for name, tensor in (average or {}).items():
        if name not in state or state[name].shape != tensor.shape:
            here = list(state[name].shape) if name in state else "nothing"
            raise ValueError(f"export: the average of {name} has shape {list(tensor.shape)}, the module has {here} there")
        state[name] = tensor.detach()
    layers = lora_layers(module)
    if adapter is None and not layers:
        return {name: _Source(tensor) for name, tensor in state.items()}
    if adapter is None and not merge:
        raise ValueError("export: the module has adapters, so choose one of them or merge=True")
    names = adapter_names(module, adapter or "default")
    if not merge:
        return {short: _Source(state[full]) for short, full in names.items()}
    sources = {}
    for name, tensor in state.items():
        layer, _, leaf = name.rpartition(".base_layer.")
        if layer in layers:
            a, b = (state[names[f"{layer}.lora_{factor}.weight"]] for factor in "AB")
            update = {"factors": (a, b), "scaling": layers[layer].scaling[adapter or "default"]} if leaf == "weight" else {}
            sources[f"{layer}.{leaf}"] = _Source(tensor, **update)
        elif name.partition(".lora_")[0] not in layers:
            sources[name] = _Source(tensor)
    return sources


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _config(module: nn.Module) -> str | None:
    """Return the text of config.json as diffusers writes it, if the module is one of its models."""
    from diffusers import ConfigMixin

    if not isinstance(module, ConfigMixin):
        return None
    settings = json.loads(module.to_json_string())
    # FSDP made the class of a sharded module up.
    settings["_class_name"] = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule)).__name__
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


@contextmanager
def _replacing(pattern: re.Pattern[str], out: Path, world: World) -> Iterator[Path]:
    """Give a folder to write to, whose files are moved to `out` when all are there and on disk.

    Files of `out` that match the pattern and were not written again are removed. An index goes before the files that it
    lists are replaced, so that who opens the folder between two moves finds an error and never two exports in one.
    """
    folder = out / ".partial"  # within, because that is the same disk even if `out` is a link
    try:
        with _writing(out, world):
            if world.is_main:
                shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed
                folder.mkdir(parents=True)
        yield folder
        with _writing(out, world):
            if world.is_main:
                files = sorted(folder.iterdir(), key=lambda file: (file.suffix == ".json", file.name))
                for path in [*files, folder]:
                    sync(path)
                old = {path.name for path in out.iterdir() if pattern.fullmatch(path.name)}
                for name in old:
                    if name.endswith(".json"):
                        (out / name).unlink()
                for file in files:
                    os.replace(file, out / file.name)
                for name in old - {file.name for file in files}:
                    (out / name).unlink(missing_ok=True)
                sync(out)
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _writing(out: Path, world: World) -> Iterator[None]:
    """Turn what goes wrong in writing into a RunError of one line, on every rank if on one."""
    with world.agreed():
        try:
            yield
        except (OSError, SafetensorError) as error:
            full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
            raise RunError(f"weights cannot be written to {out}: {'the disk is full' if full else error}") from error
