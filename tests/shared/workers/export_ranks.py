"""Exports from sharded modules, and copies and blends adapters there, for test_export.py."""

import errno
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.lora_model import MODEL, adapted, inputs, loss_of, perturb, run
from torch import Tensor, nn

import fluvial.engines.export.model_folder as exporting
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.export.model_folder import export, write_lora
from fluvial.engines.gathered import gather
from fluvial.models.lora import blend_adapter, copy_adapter, find_adapter_parameters, use_adapter


def full(module: nn.Module, adapter: str) -> list[Tensor]:
    return [gather(parameter).detach().clone() for parameter in find_adapter_parameters(module, adapter).values()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def adapters(module: nn.Module, engine: Engine, world: World) -> dict[str, Any]:
    start = {name: full(module, name) for name in ("default", "old", "ref")}
    mine = {name: tensor[2 * world.rank :][:2] for name, tensor in inputs(4).items()}
    engine.update(mine, loss_of(module, ("old", None)), torch.ones(2), count=4, micro_batch=1, pad_to=2)
    trained = full(module, "default")
    result: dict[str, Any] = {
        "default changed": not equal(trained, start["default"]),
        "others stayed": all(equal(full(module, name), start[name]) for name in ("old", "ref")),
    }
    first = run(module)  # and the parameters stay gathered
    copy_adapter(module, "default", "ref")
    with use_adapter(module, "ref"):
        result["copy computes alike"] = torch.equal(run(module), first)
    result["copied"] = equal(full(module, "ref"), trained)
    blend_adapter(module, "default", "old", 0.75)
    result["blended"] = all(
        torch.allclose(blended, 0.75 * old + 0.25 * new)
        for blended, old, new in zip(full(module, "old"), start["old"], trained, strict=True)
    )
    result["default stayed"] = equal(full(module, "default"), trained)
    return result


def full_disk(module: nn.Module, out: Path, world: World) -> list[Any]:
    save, calls = exporting.save_tensors, []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args, **kwargs)

    exporting.save_tensors, message = failing, ""
    try:
        export(module, out, max_shard_size="1MB", world=world)
    except RunError as error:
        message = f"{type(error).__name__}: {error}"
    exporting.save_tensors = save
    messages: list[Any] = [None] * world.size
    dist.all_gather_object(messages, message)
    return messages


def exports(world: World, folder: str) -> dict[str, Any]:
    """Export a plain and an adapted module to the folder, and return {adapters, full disk}."""
    out = Path(folder)
    plain = MODEL.build()
    Engine(plain, MODEL.blocks(plain), OptimizerConfig(), world, updates=1)
    export(plain, out / "plain", world=world)
    export(plain, out / "sharded", max_shard_size="1MB", world=world)
    module = adapted("default", "old", "ref")
    perturb(module, "default", seed=0)
    perturb(module, "old", seed=1)
    engine = Engine(module, MODEL.blocks(module), OptimizerConfig(lr=0.01), world, updates=1)
    average = {name: parameter.detach() * 0.5 for name, parameter in engine.trainable.items()}
    export(module, out / "merged", average=average, merge=True, dtype=torch.bfloat16, world=world)
    write_lora(module, out / "lora", adapter="old", world=world)
    run(module)  # parameters that stay gathered are exported all the same
    write_lora(module, out / "averaged", average=average, world=world)
    result = {"adapters": adapters(module, engine, world), "full disk": full_disk(plain, out / "plain", world)}
    return result
