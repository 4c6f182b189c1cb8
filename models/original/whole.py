"""Whole pipelines in one safetensors file, as ComfyUI and kohya's trainers save them, unpacked to diffusers' folders."""

import os
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import diffusers
import torch
from filelock import FileLock
from torch import Tensor, nn

from fluvial.models.hub import probe_hub
from fluvial.models.original.convert import from_original
from fluvial.models.original.layout import LAYOUTS
from fluvial.models.pipelines.folder import find_folder, get_first_line, is_weight_file, read_index, read_settings, silence
from fluvial.models.pipelines.open import list_adapters

SETTINGS = ("*.json", "*.txt", "*.model")  # files of a pipeline beside its weights


def find_pipeline_folder(name_or_path: str | Path, *, trust_remote_code: bool = False, settings: str | None = None) -> Path:
    """Return the folder of a pipeline given as a folder, an id, or one file; see `find_folder` and `unpack_pipeline`."""
    if is_weight_file(name_or_path):
        return unpack_pipeline(Path(name_or_path).expanduser(), settings)
    if settings is not None:
        raise ValueError("`pipeline.settings` has no effect without a safetensors file as `model`; remove it")
    return find_folder(name_or_path, trust_remote_code=trust_remote_code)


def unpack_pipeline(file: Path, settings: str | None = None) -> Path:
    """Unpack the pipeline of one safetensors file, read by diffusers' `from_single_file`, and return its folder.

    It is unpacked once into the user's cache and takes as much disk space as the file; float8 weights become bfloat16.

    Args:
        file: checkpoint with original names: SD 1.5, SDXL, SD3, FLUX, or another architecture that diffusers supports.
        settings: folder or id of a pipeline for settings, tokenizers and missing parts; by default the published one that
            diffusers infers from the names of the tensors.

    Raises:
        ValueError: the file does not contain a whole pipeline, or its settings are not available.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluvial" / "pipelines"
    state = file.stat()
    key = f"{file.absolute()} {state.st_size} {state.st_mtime_ns} {settings}"
    folder = root / f"{file.stem}-{sha256(key.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            return folder if folder.is_dir() else _unpack(file, settings, folder)
    except OSError as error:
        raise ValueError(f"{file} cannot be unpacked to {folder}: {error.strerror or error}") from error


def _unpack(file: Path, settings: str | None, folder: Path) -> Path:
    """Write the pipeline of a file to a folder, atomically; see `unpack_pipeline`."""
    from diffusers.loaders.single_file_utils import load_single_file_checkpoint

    try:
        tensors = load_single_file_checkpoint(str(file))
    except Exception as error:
        raise ValueError(f"{file} cannot be read: {get_first_line(error)}") from error
    if any(name.endswith((".scale_weight", "scaled_fp8")) for name in tensors):
        raise ValueError(f"{file} holds scaled float8 weights, which are not supported: use float16 or bfloat16")
    source = _find_settings(file, settings or _infer_published(file, tensors))
    kind = str(read_index(source)["_class_name"])
    print(f"{file}: unpacking a {kind} to {folder}, once", file=sys.stderr)
    dtype = torch.bfloat16 if any(tensor.dtype.itemsize == 1 for tensor in tensors.values()) else None
    partial = Path(mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        with silence():
            options: dict[str, Any] = {"config": str(source), "local_files_only": True, "torch_dtype": dtype}
            if kind in LAYOUTS:  # diffusers' converter of FLUX supports only the published widths
                options |= _read_network(kind, source, tensors, dtype)
            pipeline = getattr(diffusers, kind).from_single_file(str(file), **options)
            _check_filled(pipeline)
            pipeline.save_pretrained(partial)
        if "v_pred" in tensors and pipeline.scheduler.config.get("prediction_type") != "v_prediction":  # ComfyUI's marker
            raise ValueError("it predicts v, and the scheduler of its settings has another prediction_type: give others")
        partial.rename(folder)
    except OSError:
        raise
    except Exception as error:  # diffusers' converters raise any kind
        raise ValueError(
            f"{file} is not a whole {kind} with the settings of {settings or source}: {get_first_line(error)}; if it is "
            "the network alone, give the pipeline as `model`, and the file as `pipeline.weights`"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _read_network(kind: str, source: Path, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, nn.Module]:
    """Read the network of a pipeline with the settings of a folder; return it by the name of its part."""
    adapter = list_adapters()[kind]
    with torch.device("meta"):
        network = getattr(diffusers, adapter.network).from_config(read_settings(source / adapter.part / "config.json"))
    converted = from_original(kind, tensors, network)
    network.load_state_dict({name: tensor.to(dtype or tensor.dtype) for name, tensor in converted.items()}, assign=True)
    return {adapter.part: network}


def _infer_published(file: Path, tensors: Any) -> str:
    """Return the id of the published pipeline that matches a checkpoint."""
    from diffusers.loaders.single_file_utils import CHECKPOINT_KEY_NAMES, fetch_diffusers_config, infer_diffusers_model_type

    if infer_diffusers_model_type(tensors) == "v1" and CHECKPOINT_KEY_NAMES["v1"] not in tensors:  # its fallback
        raise ValueError(
            f"{file} has no names of a checkpoint that diffusers knows, expected a whole pipeline; "
            "an adapter is `lora.weights`"
        )
    return str(fetch_diffusers_config(tensors)["pretrained_model_name_or_path"])


def _find_settings(file: Path, name: str) -> Path:
    """Return the folder of a pipeline's settings; for an id they are downloaded."""
    from huggingface_hub import snapshot_download

    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    try:
        with probe_hub():
            return Path(snapshot_download(name, allow_patterns=[*SETTINGS]))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} takes settings and tokenizers from {name}, which is neither a folder nor in the Hub's cache: set "
            "`pipeline.settings` to the folder of a pipeline of the same architecture"
        ) from error


def _check_filled(pipeline: Any) -> None:
    """Raise ValueError if a tensor of a pipeline's parts was not read."""
    for name, part in pipeline.components.items():
        if not isinstance(part, nn.Module):
            continue
        if (tie := getattr(part, "tie_weights", None)) is not None:
            tie()  # T5's embedding is stored once
        if missing := [key for key, tensor in part.state_dict().items() if tensor.is_meta]:
            raise ValueError(f"it lacks {len(missing)} tensors of {name}, such as {missing[0]}")
