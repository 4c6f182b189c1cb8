"""Files for diffusers' from_pretrained and load_lora_weights, in a folder that is complete or absent."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fluvial.engines.engine.shards import plain_name
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.files import LORA, MODEL, save_tensors, sync
from fluvial.engines.gathered import gather_weights, layout
from fluvial.models.lora import Dora, is_adapter, read_form
from fluvial.models.quantised import find_quantised


@collective
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
    """Write a (sharded) module as a model folder that `from_pretrained` opens.

    The models of an nn.ModuleDict are written to one folder per model, by name, within `out`.

    Memory: rank 0 holds the tensors of one file on the host, the others one tensor.

    Args:
        module: diffusers model, written with its config.json, or any other module, written without one.
        out: folder. Its other files stay.
        average, merge, dtype: see `gather_weights`.
        max_shard_size: bytes per file, or text such as "5GB".
        world: process group the module is sharded over.

    Raises:
        RunError: the folder cannot be written. Its earlier weights stay until all files are written.
    """
    tensors = gather_weights(module, average=average, merge=merge, dtype=dtype)
    for name, network, like in split_by_network(module, layout(module, average=average, merge=merge, dtype=dtype)):
        named = zip(like, (tensor for _, tensor in islice(tensors, len(like))), strict=True)
        write_model(named, out / name, like=like, config=_format_config(network), max_shard_size=max_shard_size, world=world)


def write_model(
    weights: Iterable[tuple[str, Tensor]],
    out: Path,
    *,
    like: Mapping[str, Tensor],
    config: str | None,
    max_shard_size: int | str = "5GB",
    world: World,
) -> None:
    """Write weights to safetensors, named and split as by diffusers; each file once its last tensor has arrived.

    Args:
        weights: (name, full tensor), with the same names on every rank. Rank 0 writes them.
        out: folder.
        like: tensors on the meta device with the names, shapes and dtypes of the weights.
        config: text of config.json; None writes no such file.
        max_shard_size: bytes per file, or text such as "5GB".
        world: process group that exports.

    Raises:
        RunError: the folder cannot be written. Its earlier weights stay until all files are written.
    """
    plan = split_torch_state_dict_into_shards(
        {**like}, filename_pattern=f"{MODEL}{{suffix}}.safetensors", max_shard_size=max_shard_size
    )
    missing = {file: len(names) for file, names in plan.filename_to_tensors.items()}
    pending: dict[str, dict[str, Tensor]] = {file: {} for file in missing}
    pattern = re.compile(rf"{MODEL}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    with _replace_files(pattern, out, world) as folder:
        for name, tensor in weights:
            file = plan.tensor_to_filename[name]
            if world.is_main:
                pending[file][name] = tensor
            missing[file] -= 1
            if not missing[file]:
                with convert_write_errors(out, world):
                    if world.is_main:
                        save_tensors(pending.pop(file), folder / file, metadata={"format": "pt"})
        with convert_write_errors(out, world):
            if world.is_main and plan.is_sharded:
                index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (folder / f"{MODEL}.safetensors.index.json").write_text(text, encoding="utf-8")
            if world.is_main and config is not None:
                (folder / "config.json").write_text(config, encoding="utf-8")


@collective
def write_lora(
    module: nn.Module,
    out: Path,
    *,
    adapter: str = "default",
    average: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    world: World,
) -> None:
    """Write one adapter as a file that a diffusers pipeline's `load_lora_weights` opens.

    Pipelines cannot load LoKr, but their networks can, with `load_lora_adapter`. Rank and alpha are stored too, so that
    loading scales the adapter as training did. The adapters of an nn.ModuleDict are written to one folder per model, by
    name, within `out`.

    Args:
        module: module with adapters, sharded or not.
        out: folder.
        adapter: name of the adapter.
        average, dtype: see `gather_weights`.
        world: process group the module is sharded over.

    Raises:
        RunError: the folder cannot be written. Its earlier adapter stays.
        ValueError: the module has no adapter of that name.
    """
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY

    like = layout(module, average=average, adapter=adapter, dtype=dtype)
    configs: Any = module.peft_config
    settings = configs[adapter]
    form = read_form(module)
    # Only the settings that loading needs, so that other versions of PEFT find no unknown one.
    scale: dict[str, Any] = {"r": settings.r, "target_modules": sorted(settings.target_modules)}
    if hasattr(settings, "lora_alpha"):
        # diffusers 0.38 fails without rank_pattern.
        scale |= {"lora_alpha": settings.lora_alpha, "rank_pattern": {}}
        scale |= {"use_dora": True} if isinstance(form, Dora) else {}
    else:
        scale |= {"alpha": settings.alpha, "decompose_factor": settings.decompose_factor}
    tensors = gather_weights(module, average=average, adapter=adapter, dtype=dtype)
    for name, network, names in split_by_network(module, like):
        part = name_component(network)
        text = json.dumps({f"{part}.{key}": value for key, value in scale.items()}, indent=2, sort_keys=True)
        named = {f"{part}.{each}": tensor for each, (_, tensor) in zip(names, islice(tensors, len(names)), strict=True)}
        target = out / name
        with _replace_files(re.compile(re.escape(LORA)), target, world) as folder, convert_write_errors(target, world):
            if world.is_main:
                save_tensors(named, folder / LORA, metadata={"format": "pt", LORA_ADAPTER_METADATA_KEY: text})


def name_component(network: nn.Module) -> str:
    """Return the name of a network in diffusers' pipelines."""
    from diffusers import UNet2DConditionModel

    return "unet" if isinstance(network, UNet2DConditionModel) else "transformer"


def list_components(module: nn.Module) -> dict[str, nn.Module]:
    """Return the networks of a module by their names in diffusers' pipelines; an nn.ModuleDict has these names as keys."""
    return dict(module.items()) if isinstance(module, nn.ModuleDict) else {name_component(module): module}


def list_base_tensors(network: nn.Module, *, parameters: bool = False) -> dict[str, Tensor]:
    """Return a network's tensors without adapters, and with `parameters` also without buffers.

    They share the network's storage, except the weights of quantised layers, which are dequantised copies.
    """
    tensors: dict[str, Tensor] = dict(network.named_parameters()) if parameters else network.state_dict()
    tensors.update((f"{name}.weight", layer.weight) for name, layer in find_quantised(network).items())
    return {plain_name(name): tensor.detach() for name, tensor in tensors.items() if not is_adapter(name)}


def split_by_network(module: nn.Module, named: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield the name of each model of a module, the model, and its part of the tensors. A single model has no name."""
    for name, network in module.items() if isinstance(module, nn.ModuleDict) else [("", module)]:
        prefix = f"{name}." if name else ""
        yield name, network, {key.removeprefix(prefix): tensor for key, tensor in named.items() if key.startswith(prefix)}


def _format_config(module: nn.Module) -> str | None:
    """Return the text of config.json as diffusers writes it; None if the module is not a diffusers model."""
    from diffusers import ConfigMixin

    if not isinstance(module, ConfigMixin):
        return None
    settings = json.loads(module.to_json_string())
    # FSDP2 gives a sharded module a class of its own.
    settings["_class_name"] = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule)).__name__
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


@contextmanager
def _replace_files(pattern: re.Pattern[str], out: Path, world: World) -> Iterator[Path]:
    """Yield a temporary folder, whose files are moved to `out` when all of them are on disk.

    Files of `out` that match the pattern and were not written again are removed. An index is removed before its files are
    replaced, so that opening the folder between two moves fails instead of mixing two exports.
    """
    with _open_temporary(
        out / ".partial", out, world
    ) as folder:  # within `out`, so on the same disk even if `out` is a link
        yield folder
        with convert_write_errors(out, world):
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


@contextmanager
def _open_temporary(folder: Path, out: Path, world: World, what: str = "weights") -> Iterator[Path]:
    """Yield a new folder in which rank 0 prepares `out`; it is removed afterwards."""
    try:
        with convert_write_errors(out, world, what):
            if world.is_main:
                shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed
                folder.mkdir(parents=True)
        yield folder
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def convert_write_errors(out: Path, world: World, what: str = "weights") -> Iterator[None]:
    """Convert errors of writing to a RunError, raised on every rank if one rank fails. No rank may communicate inside."""
    with world.agreed():
        try:
            yield
        except (OSError, SafetensorError) as error:
            full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
            raise RunError(f"{what} cannot be written to {out}: {'the disk is full' if full else error}") from error


RECORD = "fluvial.json"  # description of an export, within its folder


def is_exported(out: Path, record: dict[str, Any]) -> bool:
    """Return whether a folder already holds an export; False if it is empty or absent.

    Args:
        out: folder.
        record: description of the export, as JSON.

    Raises:
        UsageError: the folder holds something else.
    """
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        stored = json.loads((out / RECORD).read_text(encoding="utf-8"))
        files = stored.pop("files")
        is_complete = all((out / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, AttributeError, KeyError):
        stored, is_complete = None, False
    if stored != record or not is_complete:
        other = "another export" if stored is not None else "other files"
        raise UsageError(f"`out` is {out}, which holds {other}: name another folder, or remove it")
    return True


@collective
@contextmanager
def open_draft(out: Path, record: dict[str, Any], world: World) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `out` when the context ends without an error.

    Args:
        out: folder of the export; an earlier one there is replaced.
        record: description of the export, as JSON; it is written to the folder with the size of each file.
        world: process group that exports.

    Raises:
        RunError: the folder cannot be written; `out` is unchanged.
    """
    with _open_temporary(out.with_name(f".{out.name}.partial"), out, world, "export") as draft:
        yield draft
        with convert_write_errors(out, world, "export"):
            if world.is_main:
                files = sorted(path for path in draft.rglob("*") if path.is_file())
                sizes = {path.relative_to(draft).as_posix(): path.stat().st_size for path in files}
                (draft / RECORD).write_text(json.dumps({**record, "files": sizes}, indent=1) + "\n", encoding="utf-8")
                for path in (*files, draft / RECORD, draft):
                    sync(path)
                if out.exists():
                    shutil.rmtree(out)
                os.rename(draft, out)
                sync(out.parent)
