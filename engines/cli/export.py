"""`fluvial export RUN_OR_CHECKPOINT --as FORMAT`: write the weights of a run for diffusers or ComfyUI, at any time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fluvial.engines.cli.brief import EXPORT, asks_for_help
from fluvial.engines.cli.parse import flags_in_errors, parse_config
from fluvial.engines.errors import UsageError


@dataclass(frozen=True)
class ExportOptions:
    """Export a checkpoint of a run, with a model card, during training or afterwards.

    Args:
        format: lora (the adapter, for diffusers), merged (the network with the adapter folded in, for diffusers), full (the
            whole pipeline, for diffusers) or comfyui (the original layout, for ComfyUI and kohya's trainers). By default
            lora if an adapter was trained, else merged.
        ema: Export the moving average of the weights.
        dtype: Dtype of the files; by default export.dtype of the run.
        merge: With comfyui, merge the adapter into the weights and export them.
        out: Folder of the export; by default exports/UPDATE-FORMAT in the run folder.
    """

    format: Annotated[Literal["lora", "merged", "full", "comfyui"] | None, tyro.conf.arg(name="as")] = None
    ema: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    merge: bool = False
    out: Path | None = None


def run(args: list[str]) -> None:
    """Write an export, and print its path."""
    if asks_for_help(args):
        parse_config(ExportOptions(), "fluvial export RUN_OR_CHECKPOINT", args[:1], brief=EXPORT)
    if not args or args[0].startswith("-"):
        got = repr(args[0]) if args else "nothing"
        raise UsageError(f"export needs a run or a checkpoint, got {got}: fluvial export runs/grpo --as lora")
    config = parse_config(ExportOptions(), f"fluvial export {args[0]}", args[1:], brief=EXPORT)
    from fluvial.engines.engine.world import init_world
    from fluvial.engines.run.exports import export_run

    with flags_in_errors(config), init_world() as world:
        out, before = export_run(
            args[0], config.format, out=config.out, average=config.ema, dtype=config.dtype, merge=config.merge, world=world
        )
        if world.is_main:
            print(f"{'exported before' if before else 'exported'}: {out}")
