"""Export of a run: of any of its checkpoints while training goes on, every so many updates, and at its end."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fluvial.engines.checkpoint import checkpoint
from fluvial.engines.checkpoint.storage import MANIFEST
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.export.card import Card, write_card
from fluvial.engines.export.folder import drafted, is_exported
from fluvial.engines.export.formats import Format, check_format, write
from fluvial.engines.fsdp.config import DTYPES
from fluvial.engines.fsdp.engine import Engine
from fluvial.engines.fsdp.export import writing
from fluvial.engines.fsdp.loading import fingerprint
from fluvial.engines.fsdp.world import World
from fluvial.engines.objectives.table import name_of
from fluvial.engines.train import job as jobs
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.jobs.weights import configuration, is_run
from fluvial.engines.train.record import CONVERTER, as_record, recorded
from fluvial.models import DiffusionModel
from fluvial.models.catalogue import KNOWN
from fluvial.models.lora import LoraConfig, add_lora, is_adapter, lora_settings
from fluvial.models.protocol import Weights

EXPORTS = "exports"  # in a run folder
EXPORT_DTYPES = {**DTYPES, "float16": torch.float16}


def export_run(
    path: Path | str,
    kind: Format | None = None,
    *,
    out: Path | None = None,
    average: bool = False,
    dtype: str | None = None,
    merge: bool = False,
    job: jobs.Job | None = None,
    world: World,
) -> tuple[Path, bool]:
    """Export a checkpoint of a run; return the folder, and whether it had been exported there before.

    One process is enough, whatever the number of ranks that wrote the checkpoint, and training may go on meanwhile.

    Memory on the host: the network in float32, the trained tensors once more, and the tensors of one file. An adapter alone
    needs only its own tensors.

    Args:
        path: folder of a run, whose newest checkpoint is exported, or folder or URL of a checkpoint.
        kind: format; by default lora where an adapter was trained, else merged.
        out: folder of the export; by default `exports/UPDATE-FORMAT` in the run folder.
        average: whether the moving average of the weights is exported.
        dtype: name of the dtype of the files; by default `export_dtype` of the run.
        merge: whether comfyui gets the weights with the adapter merged into them.
        job: job of the run, if it was built in Python; by default what the run's configuration describes.

    Raises:
        UsageError: there is no such run or checkpoint, it cannot be exported so, or something else is in `out`.
        RunError: the checkpoint is damaged or of another model, or the export cannot be written.
    """
    with world.agreed():
        place, run = _located(path)
    start = "average." if average else "weight."
    tensors, manifest = checkpoint.read(place, lambda key: key.startswith(start) and _is_trained(key), world=world)
    with world.agreed():
        config, adapter = _settings(manifest, place)
        if average and not tensors:
            raise UsageError(
                f"`ema` is set, and checkpoint {place} has no moving average, because `optimizer.ema_decay` is 0"
            )
        job = _job(config) if job is None else job
        kind = kind or ("merged" if adapter is None else "lora")
        check_format(kind, job.model, adapted=adapter is not None, merge=merge)
        update, dtype = int(manifest["update"]), dtype or config.export_dtype
        name = f"{update:06d}-{kind}{'-merged' if merge else ''}{'-ema' if average else ''}"
        out = (run or Path()) / EXPORTS / name if out is None else out
        record = {
            "format": kind,
            "update": update,
            "average": average,
            "dtype": dtype,
            "merge": merge,
            "checkpoint": manifest["seal"],
        }
        if is_exported(out, record):
            return out, True
        module = _network(config, job, adapter, alone=kind == "lora" or (kind == "comfyui" and not merge), manifest=manifest)
        _fill(module, {key.removeprefix(start): tensor for key, tensor in tensors.items()}, place)
    card = _card(config, job.model, module, kind, update=update, average=average, dtype=dtype, merge=merge)
    with drafted(out, record, world) as draft:
        write(kind, module, job.model, draft, dtype=EXPORT_DTYPES[dtype], merge=merge, world=world)
        with writing(out, world, "export"):
            if world.is_main:
                write_card(card, draft, run=run)
    return out, False


def policy_of(path: Path | str, *, average: bool, world: World) -> tuple[nn.Module, Weights | None]:
    """Return the network of a checkpoint with the policy, before sharding, and the folder of its base weights.

    Where an adapter was trained, the parameters of the network itself are on the meta device, and are to be read from that
    folder. Without one the network is whole, and there is no folder. Every rank must take part.

    Args:
        path: folder or URL of the checkpoint.
        average: whether the moving average of the weights is taken, if there is one.

    Raises:
        UsageError: there is no such checkpoint, or its model cannot be opened.
        RunError: the checkpoint is damaged or of another model.
    """
    starts = ("average.", "weight.") if average else ("weight.",)
    tensors, manifest = checkpoint.read(path, lambda key: key.startswith(starts) and _is_trained(key), world=world)
    start = starts[0] if any(key.startswith(starts[0]) for key in tensors) else "weight."
    with world.agreed():
        config, adapter = _settings(manifest, path)
        job = _job(config)
        module = _network(config, job, adapter, alone=True, manifest=manifest)
        _fill(module, {key.removeprefix(start): each for key, each in tensors.items() if key.startswith(start)}, path)
    return module.requires_grad_(False), None if adapter is None else job.model.weights


def export_now(engine: Engine, config: TrainConfig, model: DiffusionModel) -> Path:
    """Export the present weights of a run to its `exports`, and return the folder. Every rank must take part.

    Raises:
        RunError: the folder cannot be written.
    """
    kind, world, update = format_of(config), engine.world, engine.updates
    average = engine.averaged() if config.evaluation.average else {}
    out = config.out / EXPORTS / f"{update:06d}-{kind}"
    record = {"format": kind, "update": update, "average": bool(average), "dtype": config.export_dtype, "merge": False}
    card = _card(config, model, engine.module, kind, update=update, average=bool(average), dtype=config.export_dtype)
    with drafted(out, record, world) as draft:
        write(kind, engine.module, model, draft, average=average, dtype=DTYPES[config.export_dtype], world=world)
        with writing(out, world, "export"):
            if world.is_main:
                write_card(card, draft, run=config.out)
    return out


def check_exports(config: TrainConfig, model: DiffusionModel) -> None:
    """Raise UsageError if the exports that a run is asked for during training cannot be made."""
    if config.export_every:
        try:
            check_format(format_of(config), model, adapted=config.train == "lora")
        except UsageError as error:
            raise UsageError("export_as", config.export_as, hint=f"{error}") from error


def format_of(config: TrainConfig) -> Format:
    """Return the format of the exports during training."""
    if config.export_as != "auto":
        return config.export_as
    return "lora" if config.train == "lora" else "merged"


def write_cards(engine: Engine, config: TrainConfig, model: DiffusionModel) -> None:
    """Write a model card beside the weights, and the adapter, that a run leaves in its folder. Only rank 0 calls it."""
    average = bool(engine.average) and config.evaluation.average
    kinds: dict[str, Format] = {"weights": "merged", **({"lora": "lora"} if config.train == "lora" else {})}
    for folder, kind in kinds.items():
        card = _card(config, model, engine.module, kind, update=engine.updates, average=average, dtype=config.export_dtype)
        write_card(card, config.out / folder, run=config.out)


def _located(path: Path | str) -> tuple[Path | str, Path | None]:
    """Return the checkpoint that a path stands for, and the folder of its run, if it lies in one."""
    if "://" in str(path):
        return str(path), None
    folder = Path(path)
    if is_run(str(folder)):
        config = configuration(folder)
        found = checkpoint.listed(config.checkpoint_folder, recover=False)
        if not found:
            raise UsageError(
                f"{folder} is a run without a checkpoint: it writes one every {config.checkpoint_every} updates"
            )
        return found[-1], folder
    if not folder.exists():
        raise UsageError(f"{folder} is neither a run nor a checkpoint: there is no such folder")
    if not (folder / MANIFEST).is_file() and not folder.name.startswith(".partial-"):
        raise UsageError(f"{folder} is neither a run (config.json, metrics.jsonl) nor a checkpoint ({MANIFEST})")
    return folder, folder.parent.parent if is_run(str(folder.parent.parent)) else None


def _is_trained(key: str) -> bool:
    """Return whether a tensor of a checkpoint is of the policy, not of an adapter that follows it."""
    return not is_adapter(key) or key.endswith(".default.weight")


def _settings(manifest: dict[str, Any], place: Path | str) -> tuple[TrainConfig, dict[str, Any] | None]:
    """Return the configuration that a checkpoint was written with, and rank, alpha and layers of its adapter."""
    try:
        return recorded(manifest["meta"]["run"]), manifest["meta"]["lora"]
    except (KeyError, ValueError) as error:
        raise RunError(
            f"checkpoint {place} does not say which run it is of, as those of this version do: {error}"
        ) from error


def _job(config: TrainConfig) -> jobs.Job:
    """Return the job of a run, without its prompts and rewards."""
    rollout = config.rollout
    return jobs.to_sample(
        config.model, config.pipeline, steps=rollout.steps, guidance=rollout.guidance, weights=config.weights
    )


def _network(
    config: TrainConfig, job: jobs.Job, adapter: dict[str, Any] | None, *, alone: bool, manifest: dict[str, Any]
) -> nn.Module:
    """Return the network with its base weights and, where one was trained, an adapter."""
    folder = job.model.weights
    alone = alone and adapter is not None and folder is not None
    if not alone and config.init == "sharded" and folder is not None:
        known = str(manifest["fingerprint"]["base_weights"]).partition(" ")[0]
        if fingerprint(folder) != known:
            raise RunError(f"the weights of {config.model} are not those that the run started from: they were changed since")
    module = jobs.build(job, empty=alone)
    if adapter is not None:
        settings = LoraConfig(rank=adapter["rank"], alpha=adapter["alpha"])
        try:
            add_lora(module, settings, adapter["layers"])
        except ValueError as error:
            raise RunError(f"the adapter of the checkpoint does not fit {config.model}: {error}") from error
    return module


def _fill(module: nn.Module, tensors: dict[str, Tensor], place: Path | str) -> None:
    """Copy trained tensors into a network, in place."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            here = list(parameters[name].shape) if name in parameters else "nothing"
            raise RunError(
                f"checkpoint {place} is of another model: {name} has shape {list(tensor.shape)} there, {here} here; a "
                "run of a job of your own is exported in Python, with the job"
            )
        parameters[name].data.copy_(tensor)


def _card(
    config: TrainConfig,
    model: DiffusionModel,
    module: nn.Module,
    kind: Format,
    *,
    update: int,
    average: bool,
    dtype: str,
    merge: bool = False,
) -> Card:
    from diffusers import ConfigMixin

    networks = list(module.values()) if isinstance(module, nn.ModuleDict) else [module]
    first = next(kind for kind in type(networks[0]).__mro__ if not issubclass(kind, FSDPModule))
    pipeline = getattr(model, "pipeline", None)
    makes = {known.pipeline: known.makes for known in KNOWN}
    return Card(
        kind=kind,
        model=config.model,
        pipeline=pipeline,
        network=first.__name__ if issubclass(first, ConfigMixin) else None,
        parts=tuple(module) if isinstance(module, nn.ModuleDict) else (),
        video=config.pipeline.frames > 1 or makes.get(str(pipeline)) == "videos",
        folder=getattr(model, "folder", None),
        objective=name_of(config.objective),
        settings=_with_adapter(as_record(config), lora_settings(module)),
        defaults=_defaults(config),
        update=update,
        average=average,
        dtype=dtype,
        merge=merge,
    )


def _with_adapter(record: dict[str, Any], adapter: dict[str, Any] | None) -> dict[str, Any]:
    """Return a run's record with rank and alpha of the adapter that was trained, which may be those of a file."""
    if adapter is None:
        return record
    return {**record, "lora": {**record["lora"], "rank": adapter["rank"], "alpha": adapter["alpha"]}}


def _defaults(config: TrainConfig) -> dict[str, Any]:
    """Return the record of a run with the same objective and no other choice."""
    return {**as_record(TrainConfig(config.out)), "objective": dict(_objective_defaults(config.objective))}


def _objective_defaults(objective: Any) -> Iterator[tuple[str, Any]]:
    yield "name", name_of(objective)
    for field in dataclasses.fields(objective):
        if field.default is not dataclasses.MISSING:
            yield field.name, CONVERTER.unstructure(field.default)
