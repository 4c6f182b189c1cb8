"""Export of a run: of any of its checkpoints, at intervals during training, and at its end."""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fluvial.engines.choices import find_default
from fluvial.engines.engine.config import DTYPES
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.engines.export.card import Card, write_card
from fluvial.engines.export.formats import Format, check_format, write
from fluvial.engines.export.model_folder import convert_write_errors, is_exported, open_draft
from fluvial.engines.files import digest_weights
from fluvial.engines.run import job as jobs
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.checkpoint.storage import MANIFEST
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.jobs.weights import is_run, read_configuration
from fluvial.engines.run.record import CONVERTER, as_record, locate_paths, read_record
from fluvial.models import DiffusionModel
from fluvial.models.catalogue import KNOWN
from fluvial.models.digests import join_digests
from fluvial.models.lora import Dora, add_lora, describe_lora, is_adapter, restore_lora
from fluvial.models.protocol import Weights

EXPORTS = "exports"  # in a run folder
EXPORT_DTYPES = {**DTYPES, "float16": torch.float16}


class ExportRecord(NamedTuple):
    """Record of an export."""

    format: Format
    update: int  # number of updates that the weights have seen
    average: bool  # whether they are the moving average
    dtype: str  # dtype of the files
    merge: bool = False  # whether the format comfyui has the adapter merged into the weights
    checkpoint: str | None = None  # seal of the exported checkpoint


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

    One process is enough, whatever the number of ranks that wrote the checkpoint. The run may still be training.

    Host memory: the network in float32, the trained tensors once more, and the tensors of one file; for an adapter without
    the network only its tensors.

    Args:
        path: folder of a run, whose newest checkpoint is exported, or folder or URL of a checkpoint.
        kind: format; by default lora if an adapter was trained, else merged.
        out: folder of the export; by default `exports/UPDATE-FORMAT` in the run folder.
        average: export the moving average of the weights.
        dtype: name of the dtype of the files; by default `export.dtype` of the run.
        merge: merge the adapter into the weights, for the format comfyui.
        job: job of a run that was built in Python; by default that of the run's configuration.

    Raises:
        UsageError: there is no such run or checkpoint, it does not support the format, or `out` holds another export.
        RunError: the checkpoint is damaged or of another model, or the export cannot be written.
    """
    with world.agreed():
        path, run = _locate(path)
    tensors, manifest = _read_trained(path, ("average.",) if average else ("weight.",), world)
    with world.agreed():
        config, adapter = _read_run(manifest, path, run)
        if average and not tensors:
            raise UsageError(
                f"`ema` has no effect with checkpoint {path}, without an average (`optimizer.ema_decay` is 0); remove it"
            )
        job = _open_job(config) if job is None else job
        kind = kind or ("merged" if adapter is None else "lora")
        check_format(kind, job.model, adapted=adapter is not None, merge=merge)
        exported = ExportRecord(
            kind, int(manifest["update"]), average, dtype or config.export.dtype, merge, manifest["seal"]
        )
        name = f"{exported.update:06d}-{kind}{'-merged' if merge else ''}{'-ema' if average else ''}"
        out = (run or Path()) / EXPORTS / name if out is None else out
        if is_exported(out, exported._asdict()):
            return out, True
        # DoRA divides by norms of the base weights' rows.
        needs_base = adapter is not None and isinstance(restore_lora(adapter).form, Dora)
        alone = not needs_base and (kind == "lora" or (kind == "comfyui" and not merge))
        module = _build_network(config, job, adapter, tensors, manifest, path, alone=alone)
    _write(exported, config, job.model, module, out, run=run, world=world)
    return out, False


@collective
def build_policy(path: Path | str, *, average: bool, world: World) -> tuple[nn.Module, Weights | None]:
    """Build the policy's network from a checkpoint, before sharding; return it and the folder of its base weights.

    If an adapter was trained, the base parameters are on the meta device, to be read from that folder. Otherwise the network
    has all weights, and the folder is None.

    Args:
        path: folder or URL of the checkpoint.
        average: use the moving average of the weights, if the checkpoint has one.

    Raises:
        UsageError: there is no such checkpoint, or its model cannot be opened.
        RunError: the checkpoint is damaged or of another model.
    """
    tensors, manifest = _read_trained(path, ("average.", "weight.") if average else ("weight.",), world)
    with world.agreed():
        config, adapter = _read_run(manifest, path, _locate(path)[1])
        job = _open_job(config)
        module = _build_network(config, job, adapter, tensors, manifest, path, alone=True)
    return module.requires_grad_(False), None if adapter is None else job.model.weights


@collective
def export_current(engine: Engine, config: TrainConfig, model: DiffusionModel) -> Path:
    """Export the current weights of a run to its folder `exports`, and return the folder of the export.

    Raises:
        RunError: the folder cannot be written.
    """
    average = engine.read_average() if config.evaluation.average else {}
    exported = ExportRecord(choose_format(config), engine.updates, bool(average), config.export.dtype)
    out = config.out / EXPORTS / f"{exported.update:06d}-{exported.format}"
    _write(exported, config, model, engine.module, out, run=config.out, world=engine.world, weights=average)
    return out


@collective
def _write(
    exported: ExportRecord,
    config: TrainConfig,
    model: DiffusionModel,
    module: nn.Module,
    out: Path,
    *,
    run: Path | None,
    world: World,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an export with its model card."""
    card = _make_card(config, model, module, exported)
    with open_draft(out, exported._asdict(), world) as draft:
        dtype = EXPORT_DTYPES[exported.dtype]
        write(exported.format, module, model, draft, average=weights, dtype=dtype, merge=exported.merge, world=world)
        with convert_write_errors(out, world, "export"):
            if world.is_main:
                write_card(card, draft, run=run)


def check_exports(config: TrainConfig, model: DiffusionModel) -> None:
    """Raise UsageError if the model does not support the run's exports during training."""
    if config.export.every:
        try:
            check_format(choose_format(config), model, adapted=config.train == "lora")
        except UsageError as error:
            raise UsageError("export.format", config.export.format, hint=f"{error}") from error


def choose_format(config: TrainConfig) -> Format:
    """Choose the format of the exports during training."""
    if config.export.format != "auto":
        return config.export.format
    return "lora" if config.train == "lora" else "merged"


def write_cards(engine: Engine, config: TrainConfig, model: DiffusionModel) -> None:
    """Write model cards beside the weights and the adapter in a run folder. Only rank 0 calls it."""
    average = bool(engine.average) and config.evaluation.average
    kinds: dict[str, Format] = {"weights": "merged", **({"lora": "lora"} if config.train == "lora" else {})}
    for folder, kind in kinds.items():
        exported = ExportRecord(kind, engine.updates, average, config.export.dtype)
        write_card(_make_card(config, model, engine.module, exported), config.out / folder, run=config.out)


def _locate(path: Path | str) -> tuple[Path | str, Path | None]:
    """Find the checkpoint of a path, and the folder of its run, if it is in one."""
    if "://" in str(path):
        return str(path), None
    folder = Path(path)
    if is_run(str(folder)):
        config = read_configuration(folder)
        paths = checkpoint.list_newest_first(config.checkpoint_folders, recover=False)
        if not paths:
            raise UsageError(
                f"{folder} is a run without a checkpoint: it writes one every {config.checkpoint.every} updates"
            )
        return paths[0], folder
    if not folder.exists():
        raise UsageError(f"{folder} is neither a run nor a checkpoint: there is no such folder")
    if not (folder / MANIFEST).is_file() and not folder.name.startswith(".partial-"):
        raise UsageError(f"{folder} is neither a run (config.json, metrics.jsonl) nor a checkpoint ({MANIFEST})")
    return folder, folder.parent.parent if is_run(str(folder.parent.parent)) else None


def _read_trained(path: Path | str, starts: tuple[str, ...], world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the policy's tensors in a checkpoint, by name, and the manifest.

    The tensors are read under the first of the prefixes `starts` that occurs.
    """

    def is_trained(key: str) -> bool:  # adapters of followers are not
        return key.startswith(starts) and (not is_adapter(key) or key.removesuffix(".weight").endswith(".default"))

    tensors, manifest = checkpoint.read(path, is_trained, world=world)
    start = next((each for each in starts if any(key.startswith(each) for key in tensors)), "")
    return {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}, manifest


def _read_run(manifest: dict[str, Any], path: Path | str, folder: Path | None) -> tuple[TrainConfig, dict[str, Any] | None]:
    """Read the configuration of a checkpoint's run, and the settings of its adapter (rank, alpha, layers)."""
    missing = f"checkpoint {path} lacks the configuration of its run; it was written by another version"
    with convert_errors(RunError, KeyError, ValueError, says=missing):
        run = read_record(manifest["meta"]["run"])
        return locate_paths(run, folder or run.out), manifest["meta"]["lora"]


def _open_job(config: TrainConfig) -> jobs.Job:
    """Open the job of a run, without its prompts and rewards."""
    sampling, pipeline = config.method.sampling, replace(config.pipeline, weights=None)
    return jobs.open_to_sample(
        config.model, pipeline, steps=sampling.steps, guidance=sampling.guidance, weights=config.pipeline.weights
    )


def _build_network(
    config: TrainConfig,
    job: jobs.Job,
    adapter: dict[str, Any] | None,
    tensors: dict[str, Tensor],
    manifest: dict[str, Any],
    path: Path | str,
    *,
    alone: bool,
) -> nn.Module:
    """Build the network with the tensors of a checkpoint; `alone` leaves out the base weights of a network with adapter."""
    folder = job.model.weights
    alone = alone and adapter is not None and folder is not None
    if not alone and config.engine.init == "sharded" and folder is not None:
        known = str(manifest["fingerprint"]["base_weights"]).partition(" ")[0]
        if join_digests(digest_weights(folder)) != known:
            raise RunError(f"the weights of {config.model} have changed since the run started from them")
    module = jobs.build(job, empty=alone)
    if adapter is not None:
        with convert_errors(RunError, ValueError, says=f"the adapter of the checkpoint does not fit {config.model}"):
            add_lora(module, restore_lora(adapter), adapter["layers"])
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            here = list(parameters[name].shape) if name in parameters else "nothing"
            raise RunError(
                f"checkpoint {path} is of another model: {name} has shape {list(tensor.shape)} there, {here} here; "
                "export a run of your own job in Python, and pass the job"
            )
        parameters[name].data.copy_(tensor)
    return module


def _list_defaults(settings: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields, as values of JSON; fields without a default are left out."""
    defaults = {field.name: find_default(field) for field in dataclasses.fields(settings)}
    return {name: CONVERTER.unstructure(value) for name, value in defaults.items() if value is not dataclasses.MISSING}


def _make_card(config: TrainConfig, model: DiffusionModel, module: nn.Module, exported: ExportRecord) -> Card:
    """Build the model card of an export."""
    from diffusers import ConfigMixin

    networks = list(module.values()) if isinstance(module, nn.ModuleDict) else [module]
    first = next(kind for kind in type(networks[0]).__mro__ if not issubclass(kind, FSDPModule))
    pipeline = getattr(model, "pipeline", None)
    makes = {known.pipeline: known.makes for known in KNOWN}
    settings, adapter = as_record(config), describe_lora(module)
    if adapter is not None:  # its rank and alpha may come from a file
        settings["lora"] |= {name: adapter[name] for name in ("rank", "alpha")}
        settings["lora"]["form"] |= adapter["form"]
    method: Any = config.method
    return Card(
        kind=exported.format,
        model=config.model,
        pipeline=pipeline,
        network=first.__name__ if issubclass(first, ConfigMixin) else None,
        parts=tuple(module) if isinstance(module, nn.ModuleDict) else (),
        video=config.pipeline.frames > 1 or makes.get(str(pipeline)) == "videos",
        folder=getattr(model, "folder", None),
        method=method.method_name,
        settings=settings,
        defaults=_list_defaults(config) | {"method": {"name": method.method_name, **_list_defaults(method)}},
        update=exported.update,
        average=exported.average,
        dtype=exported.dtype,
        merge=exported.merge,
    )
