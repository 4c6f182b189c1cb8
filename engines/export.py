"""Export: the trained network as one plain model folder, as diffusers writes and reads it."""

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from fluvial.engines.distributed import World
from fluvial.engines.errors import RunError
from fluvial.engines.fsdp import Engine
from fluvial.models.lora import merge_lora


def export(engine: Engine, out: Path, *, build: Callable[[], nn.Module], merge: bool, world: World) -> None:
    """Write config.json and safetensors of the engine's (averaged) weights; every rank must take part.

    Memory: rank 0 holds one full copy of the module on the host.

    Args:
        engine: holds the weights.
        out: folder.
        build: returns an unsharded module with the same parameter names, a diffusers model.
        merge: fold LoRA adapters into the weights.
        world: of the processes.

    Raises:
        RunError: the folder cannot be written.
    """
    weights = {name: tensor for name, tensor in engine.weights(average=True) if world.is_main}
    with world.agreed():
        if world.is_main:
            module = build()
            module.load_state_dict(weights)
            if merge:
                merge_lora(module)
            try:
                out.mkdir(parents=True, exist_ok=True)  # diffusers only logs it if a file is in the way
                module.save_pretrained(out, safe_serialization=True)  # type: ignore[operator]
            except (OSError, SafetensorError) as error:
                raise RunError(f"weights cannot be written to {out}: {error}") from error
