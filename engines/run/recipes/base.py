"""What recipes have in common: runs with the settings of published ones, and of the built-in models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluvial.engines import plugins
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.config import TrainConfig, explain_fixed_micro_batch, with_values
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.settings import DataConfig, MachineConfig, PipelineConfig
from fluvial.engines.run.method import Method, PassesConfig
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import RandomWindow
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.models import LoraConfig

HANDWRITING, UNET, WORDS, EDIT_WORDS = MODELS
# On the built-in models every recipe makes 50 rollouts of 128 samples; these make one update per rollout, the others two.
ONE_UPDATE = {"updates": 50, "evaluation.every": 10}
TWO = PassesConfig(minibatches=2)
# For policy gradients on handwriting: a random window of 5 steps within the six noisiest, which decide what is written.
NOISIEST = SamplingConfig(prompts=16, group=8, window=RandomWindow(5, high=6))
BATCH = AdvantageConfig(scale="batch")
# For methods that need no log-probabilities.
ODE = SamplingConfig(prompts=16, group=8, sampler=Ode())
CONSISTENCY = Stochastic("cps", eta=1.0)

OUT = Path("runs") / "x"


def of_published(run: str, model: str, **tuned: Any) -> TrainConfig:
    """Return a run with the settings of the published run of a name, or, for the built-in models, with those in `tuned`.

    Large models keep their own LoRA targets, image size, length of prompts, dtypes, micro-batch, and the rollout's steps in
    evaluations. Prompts are your own, and rewards the job's. Prompts come in epochs, so that files of prompts may have
    weights. The moving average follows every update, so that a short run, too, exports what it has learnt.
    """
    if model in MODELS:
        return of_built_in(model, **tuned)
    config: TrainConfig = plugins.load("published", "extensions")(run)
    evaluation, fixed = config.evaluation, explain_fixed_micro_batch(config.method) is not None
    return replace(
        config,
        out=OUT,
        model=model,
        seed=0,
        updates=100 * config.updates_per_rollout,
        prompts=(),
        rewards=(),
        lora=replace(config.lora, targets=None),
        optimizer=replace(config.optimizer, ema_interval=1, ema_repeats=1),
        data=DataConfig(),
        engine=MachineConfig(micro_batch=config.engine.micro_batch if fixed else "auto"),
        pipeline=PipelineConfig(),
        evaluation=EvaluationConfig(
            every=evaluation.every, samples=evaluation.samples, final_samples=evaluation.final_samples
        ),
    )


def of_model(model: str, method: Method, *, tuned: dict[str, Any] | None = None, **settings: Any) -> TrainConfig:
    """Return a run of a method that has no published run of its own here.

    Args:
        method: method, of large models and, if `tuned` has no other, of the built-in ones.
        tuned: settings of the built-in models, where they differ.
        settings: further settings; large models train LoRA of rank 32 at learning rate 3e-4.
    """
    if model in MODELS:
        return of_built_in(model, **{"method": method, **settings, **(tuned or {})})
    config = TrainConfig(
        OUT,
        method,
        model=model,
        train="lora",
        optimizer=OptimizerConfig(lr=3e-4, weight_decay=1e-4, ema_decay=0.9),
        lora=LoraConfig(rank=32, alpha=64.0),
        engine=MachineConfig(micro_batch="auto" if explain_fixed_micro_batch(method) is None else 1),
        evaluation=EvaluationConfig(samples=32, final_samples=64),
    )
    return with_values(config, settings)


def recipe_of(kind: type[Method]) -> Callable[..., TrainConfig]:
    """Return a recipe of a method of the user's, with its own defaults and those of `of_model`."""

    def recipe(model: str = HANDWRITING) -> TrainConfig:
        return replace(of_model(model, kind(), tuned=ONE_UPDATE), out=Path("runs") / kind.__name__.lower())

    recipe.__doc__ = kind.__doc__
    return recipe


def of_built_in(model: str, *, method: Method, **settings: Any) -> TrainConfig:
    """Return a run of a built-in model, with settings by their dotted names."""
    config = TrainConfig(
        OUT,
        method,
        model=model,
        updates=100,
        train="lora",
        data=DataConfig(order="draws"),
        optimizer=OptimizerConfig(lr=5e-4, schedule="cosine", ema_decay=0.9),
        engine=MachineConfig(micro_batch=128, update_micro_batch="rollout"),  # fixed, so that results are reproduced
        evaluation=EvaluationConfig(every=20, samples=200, final_samples=1000),
    )
    return with_values(config, settings)
