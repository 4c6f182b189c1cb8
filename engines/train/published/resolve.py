"""Published runs as configurations of fluvial: each setting matched, or listed with the reason why it is not."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.engines.errors import UsageError
from fluvial.engines.evaluation.config import EvaluationConfig
from fluvial.engines.fsdp.config import OptimizerConfig
from fluvial.engines.objectives.advantages import AdvantageConfig
from fluvial.engines.objectives.losses import KLConfig
from fluvial.engines.rollout.config import RolloutConfig
from fluvial.engines.rollout.noising import NoisingConfig
from fluvial.engines.train.config import PipelineConfig, TrainConfig
from fluvial.engines.train.published.deviations import KINDS, MISSING, NOT_SETTINGS, OURS, Deviation, of_model
from fluvial.engines.train.published.objectives import LACKING, OBJECTIVES, objective_of
from fluvial.engines.train.published.runs import PublishedRun
from fluvial.engines.train.published.sampling import rollout_of, scale_of
from fluvial.engines.train.published.texts import (
    averaged_every,
    averaged_times,
    averages_reference,
    averages_rollouts,
    extremes,
    fraction_of_steps,
    level_draw,
    noisy_steps,
    prompt_order,
)
from fluvial.models import LoraConfig

OPEN_ROLLOUTS = 1000  # of a run that was stopped by hand, or whose length is not stated


class Resolved(NamedTuple):
    """A published run as fluvial runs it."""

    config: TrainConfig
    deviations: tuple[Deviation, ...]


def resolve(run: PublishedRun) -> Resolved:
    """Return the configuration of a published run, and in what it differs from what was published.

    A setting that the source does not state keeps the default of fluvial.

    Raises:
        UsageError: fluvial has no objective for the run's algorithm.
    """
    if run.algorithm not in OBJECTIVES:
        raise UsageError(
            f"{run.name} is a run of {run.algorithm}, and fluvial has no such objective, which needs "
            f"{LACKING[run.algorithm]}: its settings are listed by fluvial runs {run.name}"
        )
    config = _config(run)
    return Resolved(config, tuple(_deviations(run, config)))


def _deviations(run: PublishedRun, config: TrainConfig) -> list[Deviation]:
    found = [] if (of_run := of_model(run)) is None else [of_run]
    for name, published in run.settings.items():
        if name in NOT_SETTINGS:
            continue
        if name in MISSING:
            if (deviation := MISSING[name](published, config, run)) is not None:
                found.append(deviation)
        elif not _same(ours := OURS[name](config, run), published):
            kind, why = KINDS[name]
            found.append(Deviation(name, published, ours, kind, why))
    return found


def _same(ours: Any, published: Any) -> bool:
    if isinstance(published, float) and isinstance(ours, int | float):
        return abs(ours - published) <= 1e-12 * abs(published)
    return bool(ours == published)


def _config(run: PublishedRun) -> TrainConfig:
    s = run.settings
    objective, rollout = objective_of(run), rollout_of(run)
    on_steps = objective.traits.trains_on == "steps"
    per_rollout = max(s.get("updates_per_rollout", 1), 1)
    if pairs := s.get("loss_extra", {}).get("pairs_per_update"):
        per_rollout = max(rollout.prompts // pairs, 1)
    minibatches = per_rollout if rollout.batch % per_rollout == 0 else 1
    epochs = s.get("inner_epochs", 1)
    rollouts = s.get("total_epochs")
    updates = s.get("total_updates") or (rollouts if isinstance(rollouts, int) else OPEN_ROLLOUTS) * minibatches * epochs
    updates = max(updates // (minibatches * epochs), 1) * minibatches * epochs
    return TrainConfig(
        Path("runs") / run.name,
        model=run.model,
        seed=s.get("seed", 0),
        data_seed=s.get("data_seed"),
        prompt_order=prompt_order(run),
        updates=updates,
        epochs=epochs,
        minibatches=minibatches,
        train=s.get("finetune", "lora"),
        micro_batch=s.get("micro_batch_per_gpu", 8),
        eval_every=_interval(s, "eval_interval") * minibatches * epochs,
        eval_samples=32,
        final_samples=64,
        checkpoint_every=max(_interval(s, "save_interval") * minibatches * epochs, 1),
        objective=objective,
        rollout=rollout,
        advantage=_advantage(run) if objective.traits.rewards == "advantages" else AdvantageConfig(),
        noising=NoisingConfig() if on_steps else _noising(run, rollout),
        kl=_kl(run) if objective.traits.takes_kl else KLConfig(),
        optimizer=_optimizer(run),
        lora=_lora(s),
        pipeline=_pipeline(run),
        evaluation=_evaluation(s),
    )


def _interval(s: Mapping[str, Any], name: str) -> int:
    value = s.get(name, 0)
    return value if isinstance(value, int) else 0


def _kl(run: PublishedRun) -> KLConfig:
    """Return the KL terms; a second one is to a moving average of the policy (AWM)."""
    s, extra = run.settings, run.settings.get("loss_extra", {})
    kind = s.get("kl_kind", "none")
    coef = float(s.get("kl_coef", 0.0)) if kind in ("mean_gaussian", "mean_mse", "velocity_mse") else 0.0
    found = re.fullmatch(r"min\(([\d.]+), ([\d.]+)\*step\)", str(extra.get("ema_kl_decay", "")))
    if run.algorithm == "TempFlow-GRPO":  # divides by the whole step's std
        return KLConfig(coef=s.get("kl_coef", 0.0), weight="exact")
    if kind == "mean_mse":
        return KLConfig(coef=coef, weight="mse")
    of_update = 1.0 if OBJECTIVES[run.algorithm] == "dgpo" else scale_of(s)
    if extra.get("kl_cfg", of_update) != of_update:
        return KLConfig(coef=coef, guidance=extra["kl_cfg"])
    if averages_reference(run):
        cap = s["ema_decay"]
        return KLConfig(coef=coef, ema_coef=extra["ema_kl_beta"], ema_cap=cap, ema_rise=cap / extra["warmup_steps"])
    if found is None:
        return KLConfig(coef=coef)
    return KLConfig(coef=coef, ema_coef=extra["ema_kl_coef"], ema_cap=float(found[1]), ema_rise=float(found[2]))


def _advantage(run: PublishedRun) -> AdvantageConfig:
    s, extra = run.settings, run.settings.get("loss_extra", {})
    return AdvantageConfig(
        scale={"group": "group", "global": "batch"}.get(s.get("advantage_scale", "group"), "group"),  # type: ignore[arg-type]
        eps=s.get("advantage_eps", 1e-4),
        clip=s.get("advantage_clip"),
        combine={"gdpo": "gdpo", "advantage_sum": "advantages"}.get(s.get("advantage_aggregation", ""), "sum"),  # type: ignore[arg-type]
        rescale=extra.get("advantage_rescale_max"),
        history=extra.get("stat_buffer_size", 0),
        history_min=extra.get("stat_min_count", 16),
        extremes=extremes(run),
        ddof=s.get("advantage_std_ddof", 1),
        drop_zero=s.get("zero_advantage_filter", False),
    )


def _noising(run: PublishedRun, rollout: RolloutConfig) -> NoisingConfig:
    s = run.settings
    each = s.get("noise_levels_per_sample", 1)
    drawn = level_draw(s.get("noise_level_draw", "random")) or {}
    if drawn.get("levels") == "logit_normal":
        return NoisingConfig(each=each, levels="logit_normal")
    if (truncated := s.get("loss_extra", {}).get("trunc_steps")) is not None:
        return NoisingConfig(each=each, highest=truncated + 1, shared=True)
    if s.get("loss_extra", {}).get("use_shared_noise"):
        drawn = {"levels": "stratified", "shared": True}
    if drawn.get("levels") == "stratified":
        ends = noisy_steps if run.project == "flow_factory" else fraction_of_steps
        return NoisingConfig(each=each, highest=ends(run), **drawn)
    return NoisingConfig(each=min(each, rollout.steps), **drawn)


def _optimizer(run: PublishedRun) -> OptimizerConfig:
    s, elsewhere = run.settings, averages_rollouts(run) or averages_reference(run)
    adafactor = s.get("optimizer") == "Adafactor"
    adam: dict[str, Any] = {
        "betas": (s.get("adam_beta1", 0.9), s.get("adam_beta2", 0.999)), "eps": s.get("adam_eps", 1e-8)
    }  # fmt: skip
    decay = s.get("ema_decay", 0.0) if s.get("ema_enabled") and not elsewhere else 0.0
    is_constant = s.get("ema_ramp") == "none" or s.get("loss_extra", {}).get("ema_decay_schedule") == "constant"
    return OptimizerConfig(
        name="adafactor" if adafactor else "adamw",
        lr=s.get("learning_rate", 1e-4),
        weight_decay=s.get("weight_decay", 0.0),
        warmup=s.get("lr_warmup_steps", 0),
        max_grad_norm=s.get("max_grad_norm", 1.0),
        ema_decay=decay,
        ema_interval=s.get("ema_interval", 1) * averaged_every(run) if decay else 1,
        ema_repeats=averaged_times(run) if decay else 1,
        ema_warmup=not (decay and is_constant),
        **({} if adafactor else adam),
    )


def _lora(s: Mapping[str, Any]) -> LoraConfig:
    targets = s.get("lora_targets")
    return LoraConfig(
        rank=s.get("lora_rank", 32),
        alpha=float(s.get("lora_alpha", 64)),
        targets=tuple(targets) if isinstance(targets, list) else None,
        init=s.get("lora_init", "default"),
    )


def _pipeline(run: PublishedRun) -> PipelineConfig:
    s = run.settings
    lengths = s.get("text_max_length")
    return PipelineConfig(
        height=s.get("resolution_height", 512),
        width=s.get("resolution_width", 512),
        frames=s.get("num_frames", 1),
        text_tokens=max(lengths.values()) if lengths else None,
        shift=None if "stable-diffusion-3" in run.model else s.get("time_shift"),  # SD3.5's scheduler has it
    )


def _evaluation(s: Mapping[str, Any]) -> EvaluationConfig:
    guided = s.get("guidance_kind") in ("cfg", "true_cfg_renorm", "none")
    return EvaluationConfig(
        steps=s.get("eval_sampling_steps"),
        guidance=s.get("eval_guidance_scale") if guided else None,
        solver="euler" if s.get("eval_sampler") in ("euler_ode", "deterministic") else "auto",
    )
