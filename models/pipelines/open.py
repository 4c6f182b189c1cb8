"""Opening of pipelines with the adapter of their class: built in, declared by an installed package, or passed."""

import importlib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from fluvial.models.pipelines.base import Pipeline
from fluvial.models.pipelines.folder import find_folder, read_index
from fluvial.models.protocol import DiffusionModel, PipelineModel, check_model

GROUP = "fluvial.models"  # entry points: class of diffusers' pipeline -> class of the adapter

Adapter = Callable[..., PipelineModel]  # (folder, **options) -> model


def open_model(
    name_or_path: str | Path, *, adapter: Adapter | str | None = None, trust_remote_code: bool = False, **options: Any
) -> Any:
    """Return the adapter of a pipeline, chosen by the class that its model_index.json names.

    Built-in adapters come first, then those that installed packages declare as entry points of the group `fluvial.models`.

    Args:
        name_or_path: folder as diffusers saves a pipeline, or an id on the Hugging Face Hub, which is downloaded.
        adapter: adapter to use instead, as a class or as `module:name`.
        trust_remote_code: whether to run code that the folder contains.
        options: options of the adapter.

    Raises:
        ValueError: the model does not exist or has no adapter, the folder is incomplete, or the adapter cannot be imported
            or is not a `PipelineModel`.
    """
    folder = find_folder(name_or_path, trust_remote_code=trust_remote_code)
    kind = str(read_index(folder).get("_class_name"))
    if adapter is not None:
        name = adapter if isinstance(adapter, str) else getattr(adapter, "__name__", repr(adapter))
        factory = _import(adapter, adapter) if isinstance(adapter, str) else adapter
    elif kind in (known := list_adapters()):
        return known[kind](folder, trust_remote_code=trust_remote_code, **options)
    elif kind in (declared := _list_declared()):
        name = f"entry point {kind} = {declared[kind].value}"
        factory = _import(declared[kind].value, name)
    else:
        raise ValueError(f"{folder} holds a {kind}, which has no adapter, expected one of {', '.join([*known, *declared])}")
    model = _call(factory, name, folder, trust_remote_code=trust_remote_code, **options)
    check_model(model, name, pipeline=True)
    return model


def list_call_options(folder: Path) -> tuple[str, ...]:
    """Return the arguments of the pipeline's call that are options of its built-in adapter; none without an adapter."""
    adapter = list_adapters().get(str(read_index(folder).get("_class_name")))
    return (*getattr(adapter, "calls", ()), *getattr(adapter, "sized", ()))


def has_adapter(folder: Path) -> bool:
    """Return whether `open_model` has an adapter for the pipeline in a folder; ValueError if it contains no pipeline."""
    kind = read_index(folder).get("_class_name")
    return kind in list_adapters() or kind in _list_declared()


def load_adapter(spec: str) -> DiffusionModel:
    """Return the model named by `module:name`.

    Args:
        spec: name of an object of `DiffusionModel`, or of a class or function that returns one when called without
            arguments.

    Raises:
        ValueError: the module cannot be imported or lacks the name, the call fails, or the result is not a
            `DiffusionModel`; in one line.
    """
    loaded = _import(spec, spec)
    model = _call(loaded, spec) if isinstance(loaded, type) or not hasattr(loaded, "predict") else loaded
    check_model(model, spec)
    return model


def list_adapters() -> dict[str, type[Pipeline]]:
    """Return the built-in adapters by the class of diffusers' pipeline."""
    from fluvial.models.pipelines.dit import DiT
    from fluvial.models.pipelines.flux import Flux
    from fluvial.models.pipelines.qwen_image import QwenImage
    from fluvial.models.pipelines.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
    from fluvial.models.pipelines.sd3 import SD3
    from fluvial.models.pipelines.unet import StableDiffusion, StableDiffusionXL
    from fluvial.models.pipelines.unet_edits import (
        StableDiffusionImageToImage,
        StableDiffusionInpaint,
        StableDiffusionXLImageToImage,
        StableDiffusionXLInpaint,
    )
    from fluvial.models.pipelines.wan import Wan, WanImageToVideo
    from fluvial.models.pipelines.z_image import ZImage

    adapters: tuple[type[Pipeline], ...] = (
        *(SD3, Flux, StableDiffusion, StableDiffusionXL, Wan, WanImageToVideo, QwenImage, ZImage),
        *(QwenImageEdit, QwenImageEditPlus, DiT),
        *(StableDiffusionImageToImage, StableDiffusionInpaint, StableDiffusionXLImageToImage, StableDiffusionXLInpaint),
    )
    return {adapter.pipeline: adapter for adapter in adapters}


def _list_declared() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _import(spec: str, label: str) -> Any:
    """Return the attribute of `module:name`, or raise ValueError in one line."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ValueError(f"adapter {label!r}: expected module:name")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # the module is user-defined: it may raise anything
        raise ValueError(f"adapter {label!r} cannot be imported: {format_error(error)}") from error
    return target


def _call(entry: Any, label: str, *args: Any, **options: Any) -> Any:
    """Return the result of an adapter's class or function, or raise ValueError in one line."""
    if not callable(entry):
        raise ValueError(
            f"adapter {label!r} is of type {type(entry).__name__}, expected a DiffusionModel, or a class or function of one"
        )
    try:
        return entry(*args, **options)
    except Exception as error:  # user-defined, too
        raise ValueError(f"adapter {label!r} cannot be opened: {format_error(error)}") from error


def format_error(error: BaseException) -> str:
    """Return an exception's type and text in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
