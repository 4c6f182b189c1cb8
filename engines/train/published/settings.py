"""Settings that recipes start from: a published run's for large models, and those that were found on the built-in ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fluvial.engines.evaluation.config import EvaluationConfig
from fluvial.engines.fsdp.config import EngineConfig, OptimizerConfig
from fluvial.engines.named_models import MODELS
from fluvial.engines.objectives.protocol import Objective
from fluvial.engines.rollout.config import RolloutConfig
from fluvial.engines.train.config import PipelineConfig, TrainConfig
from fluvial.engines.train.published.resolve import resolve
from fluvial.engines.train.published.runs import find
from fluvial.engines.train.validate import fixed_micro_batch
from fluvial.models import LoraConfig

OUT = Path("runs") / "x"


def of_published(run: str, model: str, **tuned: Any) -> TrainConfig:
    """Return a run with the settings of the published run of a name, or, for the built-in models, with those in `tuned`.

    Large models keep their own LoRA targets, image size, length of prompts, dtypes, micro-batch, and the rollout's steps in
    evaluations. Rewards are the job's. Prompts come in epochs, so that files of prompts may have weights. The moving average
    follows every update, so that a short run, too, exports what it has learnt.
    """
    if model in MODELS:
        return of_built_in(model, **tuned)
    config = resolve(find(run))
    return replace(
        config,
        out=OUT,
        model=model,
        seed=0,
        data_seed=None,
        updates=100 * config.updates_per_rollout,
        rewards=(),
        lora=replace(config.lora, targets=None),
        optimizer=replace(config.optimizer, ema_interval=1, ema_repeats=1),
        prompt_order="epochs",
        engine=EngineConfig(),
        pipeline=PipelineConfig(),
        evaluation=EvaluationConfig(),
        micro_batch="auto" if fixed_micro_batch(config) is None else config.micro_batch,
    )


def of_model(
    model: str, objective: Objective, rollout: RolloutConfig, *, tuned: dict[str, Any] | None = None, **settings: Any
) -> TrainConfig:
    """Return a run of an objective that has no published run of its own here.

    Args:
        model: what is trained.
        objective: objective, of large models and, if `tuned` has no other, of the built-in ones.
        rollout: rollout, likewise.
        tuned: settings of the built-in models, where they differ.
        settings: further settings; large models train LoRA of rank 32 at learning rate 3e-4.
    """
    settings = {"objective": objective, "rollout": rollout, **settings}
    if model in MODELS:
        return of_built_in(model, **{**settings, **(tuned or {})})
    optimizer, lora = OptimizerConfig(lr=3e-4, weight_decay=1e-4, ema_decay=0.9), LoraConfig(rank=32, alpha=64.0)
    shared: dict[str, Any] = {"train": "lora", "lora": lora, "micro_batch": "auto", "eval_samples": 32, "final_samples": 64}
    return TrainConfig(OUT, model=model, optimizer=optimizer, **shared, **settings)


def of_built_in(model: str, **settings: Any) -> TrainConfig:
    """Return a run of a built-in model."""
    optimizer = OptimizerConfig(lr=5e-4, schedule="cosine", ema_decay=0.9)
    run = {"train": "lora", "prompt_order": "draws", "updates": 100, "minibatches": 2, "micro_batch": 128}
    evaluation = {"eval_every": 20, "eval_samples": 200, "final_samples": 1000}
    return TrainConfig(OUT, model=model, **{"optimizer": optimizer, **run, **evaluation, **settings})
