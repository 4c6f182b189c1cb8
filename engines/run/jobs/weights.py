"""Weights that a run starts from: the export of another run, other base weights, or an adapter."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.files import read_weights
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.jobs.base import Job
from fluvial.models import LoraConfig
from fluvial.models.digests import digest_tensors, join_digests
from fluvial.models.lora import add_lora
from fluvial.models.lora_files import LoraFile, count_rows, load_lora, read_lora
from fluvial.models.original.convert import adapter_from_original

RECORD, WEIGHTS = "config.json", "weights"  # in a run folder
DAMAGED = (OSError, ValueError, TypeError, AttributeError, KeyError)  # errors of a file that is not the record of a run


def is_run(name: str) -> bool:
    """Return whether a model's name is the folder of a run."""
    folder = Path(name)
    return (folder / "metrics.jsonl").is_file() and (folder / RECORD).is_file()


def read_configuration(folder: Path) -> TrainConfig:
    """Read the configuration of the run in a folder, which may have been moved.

    Raises:
        UsageError: the record is of another version, or damaged.
    """
    from fluvial.engines.run.record import locate_paths, read_record

    file = folder / RECORD
    with convert_errors(UsageError, *DAMAGED, says=f"{file} is not the record of a run of this version"):
        run = locate_paths(read_record(json.loads(file.read_text(encoding="utf-8"))), folder)
        return with_values(run, {"out": folder, "resume": False, "checkpoint.resume_from": None})


def find_base_model(name: str) -> str:
    """Return the model that a run trained; a name that is not a run's folder is returned unchanged.

    Raises:
        UsageError: the record of the run cannot be read.
    """
    from fluvial.engines.run.record import PathFinder

    if not is_run(name):
        return name
    try:
        record = json.loads((Path(name) / RECORD).read_text(encoding="utf-8"))
        return PathFinder(Path(record.get("out", name)), Path(name)).locate_model(str(record["model"]))
    except DAMAGED as error:
        raise UsageError(f"`model` is {name}, whose {RECORD} is not the record of a run") from error


def from_run(config: TrainConfig) -> TrainConfig:
    """Replace a model that is the folder of another run by that run's model with its exported weights.

    Raises:
        UsageError: the other run has exported no weights, or `pipeline.weights` is set as well.
    """
    if not is_run(config.model):
        return config
    weights = Path(config.model) / WEIGHTS
    if config.pipeline.weights not in (None, weights):
        hint = f"model {config.model} is a run with its own weights; remove one of the two"
        raise UsageError("pipeline.weights", config.pipeline.weights, hint=hint)
    if not weights.is_dir():
        advice = f"let it end (--resume), or export a checkpoint: fluvial export {config.model} --as merged --out {weights}"
        raise UsageError(f"`model` is {config.model}, a run that has exported no weights: {advice}")
    return with_values(config, {"model": find_base_model(config.model), "pipeline.weights": weights})


class OtherWeights:
    """A user-defined model with the weights of a folder, such as `weights` of a run.

    Args:
        model: the model.
        folder: weights with the names of the network's parameters; `build` reads them all.
    """

    weights = None  # no folder to fill an empty network from

    def __init__(self, model: Any, folder: Path) -> None:
        self._model, self._folder = model, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def build(self, *, empty: bool = False) -> nn.Module:
        """Build the network with the weights of the folder; with `empty`, with parameters on the meta device."""
        module: nn.Module = self._model.build(empty=empty)
        if not empty:
            with convert_errors(UsageError, RuntimeError, says=f"{self._folder} holds another network"):
                module.load_state_dict(dict(read_weights(self._folder)))
        return module


def with_base(job: Job, weights: Path | None) -> Job:
    """Return the job of a pipeline with the base weights of another folder, or of a safetensors file.

    Raises:
        UsageError: there are no such weights, or they are of another network.
    """
    if weights is None:
        return job
    if not weights.exists():
        hint = "there is no such folder, expected a network as diffusers saves one, or a safetensors file"
        if is_run(str(weights.parent)):
            run = weights.parent
            hint = f"the run has no export yet; export a checkpoint: fluvial export {run} --as merged --out {weights}"
        raise UsageError("weights", weights, hint=hint)
    expected, file = getattr(job.model, "network", None), weights / RECORD
    if file.is_file() and expected is not None:
        class_name = json.loads(file.read_text(encoding="utf-8")).get("_class_name")
        if class_name not in (None, expected):
            raise UsageError(f"`weights` is {weights}, which holds a {class_name}, expected a {expected}")
    with convert_errors(UsageError, ValueError, says="`weights`"):
        return job.with_weights(weights)


def add_adapter(module: nn.Module, job: Job, path: Path, *, field: str) -> None:
    """Add the adapter of a file or a folder to a network, in place, for forward passes.

    Args:
        module: network without adapters.
        job: job of the network.
        path: the file or folder.
        field: setting that names it, for messages.

    Raises:
        UsageError: it cannot be read, or does not fit the network.
    """
    adapter = read_adapter(path, job, module, field)
    add_lora(module, LoraConfig(rank=adapter.rank, alpha=adapter.alpha, form=adapter.form), adapter.layers)
    load_lora(module, adapter.tensors, "default")


def read_adapter(path: Path, job: Job, module: nn.Module, field: str) -> LoraFile:
    """Return the adapter of a file or a folder; UsageError if it cannot be read, or does not fit the network."""
    kind: Any = getattr(job.model, "pipeline", None)
    with convert_errors(UsageError, ValueError, says=f"`{field}`"):
        return read_lora(path, module, convert=None if kind is None else make_converter(kind, module))


def digest_adapter(adapter: LoraFile) -> str:
    """Return a fingerprint of an adapter."""
    return join_digests({**digest_tensors(adapter.tensors.items()), "": f"{adapter.rank} {adapter.alpha} {adapter.form}"})


def make_converter(pipeline: str, module: nn.Module | None = None) -> Any:
    """Return a function that converts an adapter's keys from other programs to those of diffusers.

    It converts the original layout that `fluvial export` writes, and all layouts of the diffusers pipeline.

    Args:
        pipeline: class of the diffusers pipeline.
        module: network that is adapted; without it only diffusers converts.
    """

    def convert(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        import diffusers

        from fluvial.models.pipelines.folder import silence

        network = next(iter(module.values())) if isinstance(module, nn.ModuleDict) else module
        if network is not None:
            with suppress(ValueError):  # another layout, for diffusers
                return adapter_from_original(pipeline, tensors, network)
        with silence():
            converted: Any = getattr(diffusers, pipeline).lora_state_dict(tensors, return_alphas=True)
        state, *rest = converted if isinstance(converted, tuple) else (converted,)
        if count_rows(state) != count_rows(tensors):
            raise ValueError(f"diffusers leaves out layers of an adapter of {pipeline}")
        alphas = rest[0] if rest and rest[0] else {}
        return {**state, **{name: torch.as_tensor(value) for name, value in alphas.items()}}

    return convert
