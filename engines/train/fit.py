"""`engine.fit`: settings of a run chosen for a GPU's memory, by the closed form of `fluvial plan`."""

import math
from dataclasses import replace
from typing import Any

import torch

from fluvial.engines.errors import UsageError
from fluvial.engines.named_models import MODELS
from fluvial.engines.plan.fit import saved_by, steps_to_fit
from fluvial.engines.plan.plan import ENGINE_KNOBS, PlanConfig, known
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.jobs.weights import base_model
from fluvial.models.shapes import FRAMES

SIDE = 16  # pixels that a plan's resolution is a multiple of


def fitted(config: TrainConfig, *, ranks: int, device: torch.device) -> tuple[TrainConfig, Any]:
    """Return a run with the settings that fit into `engine.fit`, and a table of what each saves; None without `fit`.

    Text encoders run once and go, into a cache in the run's folder, unless a cache is named. Settings of the engine and the
    micro-batch are turned as `fluvial plan --fit` turns them, with its reserve for the VAE, rewards and the CUDA context.

    Args:
        config: run.
        ranks: number of GPUs.
        device: device of the computation, which decides compute="auto".

    Raises:
        UsageError: the network's inputs are not known.
        RunError: nothing fits.
    """
    if config.engine.fit is None:
        return config, None
    name = base_model(config.model)
    asked = _plan(config, name, ranks, device)
    steps = steps_to_fit(name, asked, ENGINE_KNOBS)
    found = steps[-1][1].config
    micro_batch = config.micro_batch if found.micro_batch == asked.micro_batch else found.micro_batch
    pipeline = config.pipeline
    if name not in MODELS and pipeline.text_cache is None:
        pipeline = replace(pipeline, text_cache=config.out / "encoded" / "texts")
    changes: dict[str, Any] = {"micro_batch": micro_batch, "pipeline": pipeline}
    if found.micro_batch != asked.micro_batch:
        changes["update_micro_batch"] = "rollout"
    engine = replace(found.engine, compute=config.engine.compute)
    return replace(config, engine=engine, **changes), saved_by(name, steps)


def _plan(config: TrainConfig, name: str, ranks: int, device: torch.device) -> PlanConfig:
    """Return the plan of a run, whose micro-batch is one sample where the run finds it by trial."""
    if config.pipeline.frames > FRAMES:
        raise UsageError("engine.fit", config.engine.fit, hint=f"videos are planned with up to {FRAMES} frames; remove it")
    size, half = config.pipeline.size, config.engine.compute_dtype(device) == torch.bfloat16
    side = math.ceil(math.sqrt(size.height * size.width) / SIDE) * SIDE
    numbers = [size for size in (config.micro_batch, config.update_micro_batch) if isinstance(size, int)]
    return PlanConfig(
        gpus=ranks,
        train=config.train,
        resolution=None if known(name).resolution is None else side,
        micro_batch=max(numbers, default=1),
        micro_batches=2,
        reference=config.train == "full" and config.kl.is_on,
        guidance=config.is_guided,
        samples=math.ceil(config.rollout.batch / ranks),
        steps=max(1, config.rollout.window.count(config.rollout.steps)),
        fit=config.engine.fit,
        lora=replace(config.lora, weights=None),
        optimizer=config.optimizer,
        engine=replace(config.engine, fit=None, compute="bfloat16" if half else "float32"),
    )
