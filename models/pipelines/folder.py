"""Folders of pipelines as diffusers saves them: download, parts, and missing files."""

import atexit
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from fluvial.core.checks import type_of
from fluvial.models.device import find_default_device, has_values
from fluvial.models.hub import probe_hub

INDEX = "model_index.json"  # lists the parts of a pipeline
MODULAR = "modular_model_index.json"  # lists the parts of a modular pipeline
# Files of weights, and indices of weights in several files, with the names of diffusers and of transformers.
WEIGHTS = ("diffusion_pytorch_model.safetensors", "model.safetensors")
INDICES = ("diffusion_pytorch_model.safetensors.index.json", "model.safetensors.index.json")
# Variant that is used if there is no other. Its index names files without the variant.
VARIANT = ".fp16"
CONFIGURATIONS = Path(__file__).parents[1] / "configurations"  # settings of published models, without weights


def get_first_line(error: Exception) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_weight_file(name_or_path: str | Path) -> bool:
    """Return whether a model's name is the path of a file of weights."""
    path = Path(name_or_path).expanduser()
    return path.suffix == ".safetensors" and path.is_file()


def find_folder(name_or_path: str | Path, *, trust_remote_code: bool = False) -> Path:
    """Return the folder of a pipeline; an id on the Hugging Face Hub is downloaded into the Hub's cache.

    If parts have weights in float16 alone, return a temporary folder of links whose names lack the variant.

    Raises:
        ValueError: the folder does not exist, and the download fails.
    """
    if Path(name_or_path).expanduser().is_dir():
        return _link_default_variants(Path(name_or_path).expanduser())
    if not has_values(find_default_device()) and (folder := find_config(str(name_or_path))) is not None:
        return folder
    from diffusers import DiffusionPipeline
    from huggingface_hub.utils import validate_repo_id

    options = {"use_safetensors": True, "trust_remote_code": trust_remote_code}
    try:
        validate_repo_id(str(name_or_path))  # the Hub is not asked for a path
        with probe_hub() as reachable, nullcontext() if reachable else silence():
            try:
                folder = DiffusionPipeline.download(str(name_or_path), **options)
            except OSError as error:
                if "Could not find the necessary" not in str(error):
                    raise
                folder = DiffusionPipeline.download(str(name_or_path), variant=VARIANT[1:], **options)
        return _link_default_variants(Path(folder))
    except (OSError, ValueError) as error:
        reason = get_first_line(error).partition(" (")[0]
        raise ValueError(f"{name_or_path} is not a folder, and cannot be downloaded from the Hub: {reason}") from error


def _link_default_variants(folder: Path) -> Path:
    """Return a pipeline's folder, or one of links to it if parts have their weights in float16 alone."""
    parts = read_entries(folder) if (folder / INDEX).is_file() else {}
    float16_parts = [name for name in parts if _has_float16_alone(folder / name)]
    return _link_without_variants(folder.absolute(), tuple(float16_parts)) if float16_parts else folder


def _has_float16_alone(part: Path) -> bool:
    names = (*WEIGHTS, *INDICES)
    has_float16 = any((part / _name_in_float16(name)).is_file() for name in names)
    return has_float16 and not any((part / name).is_file() for name in names)


def _name_in_float16(name: str) -> str:
    """Return the name of a file of weights, or of an index, in float16."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}{VARIANT}{dot}{suffix}"


@cache
def _link_without_variants(folder: Path, float16_parts: tuple[str, ...]) -> Path:
    """Return a temporary folder of links to a pipeline, in which the float16 files of some parts have plain names."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{folder}: {', '.join(float16_parts)} have weights in float16 alone, which are read", file=sys.stderr)
    links = Path(tempfile.mkdtemp(prefix="fluvial-float16-"))
    atexit.register(shutil.rmtree, links, ignore_errors=True)
    plain = {_name_in_float16(name): name for name in (*WEIGHTS, *INDICES)}
    for path in folder.iterdir():
        if path.name not in float16_parts:
            (links / path.name).symlink_to(path)
            continue
        (links / path.name).mkdir()
        for file in path.iterdir():
            (links / path.name / plain.get(file.name, file.name)).symlink_to(file)
    return links


def check_known(name: str) -> None:
    """Raise ValueError if a name is not a folder, and neither the Hub nor its cache has a pipeline with that id."""
    if Path(name).expanduser().is_dir() or is_weight_file(name) or find_config(name) is not None:
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        with probe_hub():
            hf_hub_download(name, INDEX)
    except (OSError, ValueError) as error:
        reason = get_first_line(error).partition(" (")[0]
        raise ValueError(f"it is not a folder, and the Hub gives no pipeline of that id: {reason}") from error


def find_config(name: str) -> Path | None:
    """Return the folder of a published model's settings that fluvial ships; None if it does not ship them."""
    folder = CONFIGURATIONS / name.rpartition("/")[2]
    return folder if folder.is_dir() else None


def is_modular(folder: Path) -> bool:
    """Return whether a folder contains a modular pipeline and no other."""
    return (folder / MODULAR).is_file() and not (folder / INDEX).is_file()


def find_index(folder: Path) -> Path:
    """Return the index file of a pipeline's folder, modular or not; ValueError if the folder has none."""
    if is_modular(folder):
        return folder / MODULAR
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} holds no pipeline: {INDEX} is missing; expected a folder as diffusers saves one")
    return folder / INDEX


def read_index(folder: Path) -> dict[str, Any]:
    """Return the contents of a pipeline's index; ValueError if the folder has none."""
    return read_settings(find_index(folder))


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a JSON file; ValueError if it cannot be read or does not contain an object."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{file} cannot be read: {reason}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds {type_of(settings)}, expected a JSON object of settings")
    return settings


def load_network(kind: Any, folder: Path) -> Any:
    """Load a network of a diffusers class with the weights of a folder; ValueError if tensors are missing."""
    module = kind.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    if missing := [name for name, tensor in module.state_dict().items() if tensor.is_meta]:
        raise ValueError(f"{folder} is incomplete: {missing[0]} and {len(missing) - 1} more tensors are missing")
    return module


def read_entries(folder: Path) -> dict[str, str | None]:
    """Return the class of each part of a pipeline by name; None for a part that it was saved without."""
    if is_modular(folder):  # parts of other repositories and of other tasks may be absent
        specs = {name: entry[2] for name, entry in read_index(folder).items() if isinstance(entry, list) and len(entry) == 3}
        return {name: spec["type_hint"][1] for name, spec in specs.items() if (folder / name).is_dir()}
    # The other entries of the index are settings; some are lists of numbers.
    pairs = {name: entry for name, entry in read_index(folder).items() if isinstance(entry, list) and len(entry) == 2}
    return {name: entry[1] for name, entry in pairs.items() if all(isinstance(one, str | None) for one in entry)}


def list_parts(
    folder: Path, pipeline: str, network: str, *, weights: bool = True, others: Sequence[str] = ("vae", "scheduler")
) -> dict[str, str]:
    """Return the class of each part in a pipeline's folder by name.

    Args:
        folder: folder of the pipeline.
        pipeline: expected class of the pipeline.
        network: name of the trained part.
        weights: whether tokenizers and files of weights are required, not only settings.
        others: names of further required parts.

    Raises:
        ValueError: the folder holds another pipeline, or a part or file is missing.
    """
    if (class_name := read_index(folder).get("_class_name")) != pipeline:
        raise ValueError(f"{folder} holds a {class_name}, expected a {pipeline}")
    parts = {name: kind for name, kind in read_entries(folder).items() if kind is not None}
    for name in (network, *others):
        if name not in parts:
            raise ValueError(f"{find_index(folder)} names no {name}: save or download the whole pipeline")
    for name in parts if weights else ():
        has_weights = name.startswith((network, "vae", "text_encoder", "image_encoder"))
        if missing := _find_missing(folder / name, weights=has_weights):
            raise ValueError(f"{folder / name} is incomplete: there is no {missing}; save or download the pipeline again")
    return parts


def _find_missing(part: Path, *, weights: bool) -> str | None:
    """Return the first file that is missing in a part's folder, or None if it is complete."""
    if not part.is_dir():
        return "such folder"
    if not weights:
        return None if any(part.iterdir()) else "file in it"
    if not (part / "config.json").is_file():
        return "config.json"
    for name in INDICES:  # indices of other variants may exist without their files
        if (part / name).is_file():
            files = {str(file) for file in read_settings(part / name).get("weight_map", {}).values()}
            return next((file for file in sorted(files) if not (part / file).is_file()), None)
    if any((part / name).is_file() for name in WEIGHTS):
        return None
    others = ", ".join(sorted(file.name for file in part.glob("*.safetensors")))  # e.g. a variant in float16
    return f"{' or '.join(WEIGHTS)}" + (f", only {others}" if others else "")


@contextmanager
def silence() -> Iterator[None]:
    """Silence warnings and progress bars of diffusers and transformers inside the context; errors are still logged.

    Errors of modular pipelines' blocks are not logged, because the blocks raise them as well.
    """
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    loggers: list[Any] = [diffusers_logging, transformers_logging]
    before = [(each.get_verbosity(), each.is_progress_bar_enabled()) for each in loggers]
    blocks = logging.getLogger("diffusers.modular_pipelines")
    level_before = blocks.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Cannot (dis|en)able progress bars")  # set by the environment
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated")  # older versions have no other name for it
        try:
            for each in loggers:
                each.set_verbosity_error()
                each.disable_progress_bar()
            blocks.setLevel(logging.CRITICAL)
            yield
        finally:
            blocks.setLevel(level_before)
            for each, (level, bars) in zip(loggers, before, strict=True):
                each.set_verbosity(level)
                if bars:
                    each.enable_progress_bar()
