"""How a resolved run is compared with its publication: what fluvial does for each setting, and why it may differ."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.published.extras import samples_from_another, unmatched
from fluvial.engines.train.published.runs import PublishedRun
from fluvial.engines.train.published.texts import (
    averaged_every,
    averages_reference,
    averages_rollouts,
    level_draw,
    window_draw,
)

# hardware: number of GPUs and what follows from it. precision: dtypes. reward: a package, server or data set that does not
# come with fluvial. model: no adapter for the model or its condition. method: a setting that fluvial does not have.
Kind = Literal["hardware", "precision", "reward", "model", "method"]
Ours = Callable[[TrainConfig, PublishedRun], Any]


class Deviation(NamedTuple):
    """A setting that fluvial does not run as published."""

    field: str
    published: Any
    ours: Any  # None where fluvial has no such setting
    kind: Kind
    why: str


def _sampler(config: TrainConfig, run: PublishedRun) -> str:
    rollout = config.rollout
    published: str = run.settings["sampler"]
    if rollout.after.solver == "dpmpp_2m" and published.startswith(f"{rollout.sampler_name}, then DPM-Solver++"):
        return published
    if rollout.sampler_name == "ode":
        return {"dpmpp_2m": "dpm2_ode", "euler": "euler_ode"}.get(rollout.solver, rollout.solver)
    return "ddim_eta" if rollout.sampler_name == "ddim" else rollout.sampler_name


def _ends_without_noise(config: TrainConfig) -> bool:
    """Return whether the last step has no density. DDIM's has one for Stable Diffusion, whose schedule ends below 1."""
    if config.rollout.sampler_name == "ddim" and "stable-diffusion" in config.model:
        return False
    return config.rollout.rule.last_step_is_deterministic and config.rollout.form != "unscaled"


def _places(config: TrainConfig) -> int:
    """Return the number of places of the window that branches take in turn, or 1; the published counts are per place."""
    rollout = config.rollout
    return 1 if rollout.branches is None else rollout.trunk // rollout.branches


def _trained_steps(config: TrainConfig, run: PublishedRun) -> int:
    rollout = config.rollout
    if rollout.branches is not None:
        return _places(config)
    recorded = rollout.window_size
    if _ends_without_noise(config) and rollout.window is None and rollout.window_range[1] == rollout.steps:
        recorded -= 1
    return rollout.trained_of(recorded)


def _selection(config: TrainConfig, run: PublishedRun) -> str:
    rollout, trained = config.rollout, _trained_steps(config, run)
    if rollout.branches is not None:
        return "first"
    if rollout.window is not None:
        return "window" if rollout.contiguous else "random"
    if rollout.fraction < 1:
        return rollout.pick
    return "all_but_last" if trained == rollout.steps - 1 else "all"


def _noise_level(config: TrainConfig, run: PublishedRun) -> float:
    """Return eta; the step of Flow-CPS at 2 - eta is that at eta, since it depends on sin(eta pi / 2) alone."""
    eta, published = config.rollout.eta, run.settings["noise_level"]
    return published if config.rollout.sampler_name == "cps" and abs(published - (2 - eta)) < 1e-9 else eta


def _window(config: TrainConfig, run: PublishedRun) -> int | str:
    if config.rollout.is_deterministic:
        return 0
    rollout = config.rollout
    if rollout.window is None or rollout.branches is not None:
        return "all"
    return rollout.window


def _range(config: TrainConfig, run: PublishedRun) -> list[int]:
    if any(word in run.settings.get("sde_window_draw", "") for word in ("always start", "frozen")):
        return list(run.settings["sde_window_range"])  # the source draws the same steps of its range every time
    return list(config.rollout.window_range)


def _last_step(config: TrainConfig, run: PublishedRun) -> bool:
    rollout = config.rollout
    if rollout.window_range[1] < rollout.steps:
        return False
    if rollout.fraction < 1 and rollout.pick == "first":
        return False
    return not _ends_without_noise(config)


def _fraction(config: TrainConfig, run: PublishedRun) -> Any:
    """Return the published fraction where it yields as many trained steps, or levels per sample, as fluvial trains on."""
    trained = run.settings.get("trained_steps_per_sample", run.settings.get("noise_levels_per_sample"))
    on_steps = config.objective.traits.trains_on == "steps"
    ours = _trained_steps(config, run) if on_steps else config.noising.each
    return run.settings["timestep_fraction"] if trained in (ours, None) else ours / config.rollout.steps


def _guidance_kind(config: TrainConfig, run: PublishedRun) -> str:
    """Return what fluvial does: FLUX's network takes the scale as an input, Qwen-Image's adapter keeps CFG's lengths."""
    if config.rollout.guidance.scale == 1:
        return "distilled" if "FLUX" in run.model else "none"
    return "true_cfg_renorm" if "Qwen" in run.model else "cfg"


def _guided_update(config: TrainConfig, run: PublishedRun) -> Any:
    if run.settings.get("guidance_kind") == "distilled":
        return run.settings["cfg_in_training_forward"]  # an input of the network, in rollout and update
    guidance = config.rollout.guidance
    return guidance.scale != 1 and guidance.update == "guided"


def _guidance_scale(config: TrainConfig, run: PublishedRun) -> Any:
    if run.settings.get("guidance_kind") in ("distilled", "none", None):
        return run.settings["train_guidance_scale"]  # an input of the network, or without effect
    return config.rollout.guidance.scale


def _per_rollout(interval: Callable[[TrainConfig], int]) -> Ours:
    return lambda config, run: interval(config) / config.updates_per_rollout


def _per_update(config: TrainConfig, run: PublishedRun) -> float:
    """Return the number of samples behind an optimizer step, without those that best-of-n leaves out."""
    if config.objective.traits.offline:
        return config.rollout.prompts / config.minibatches  # pairs
    samples = config.rollout.batch / _places(config)
    if config.advantage.extremes:
        samples *= 2 * config.advantage.extremes / config.rollout.compared
    return samples / config.minibatches


def _epochs(config: TrainConfig, run: PublishedRun) -> Any:
    published = run.settings["total_epochs"]
    if published == "open" or "total_updates" in run.settings:
        return published  # stopped by hand, or the other number counts
    return config.updates / config.updates_per_rollout


def _total(config: TrainConfig, run: PublishedRun) -> Any:
    published, per_rollout = run.settings["total_updates"], config.updates_per_rollout  # a run makes whole rollouts
    return published if published // per_rollout == config.updates // per_rollout else config.updates


def _ema_ramp(config: TrainConfig, run: PublishedRun) -> str:
    objective: Any = config.objective
    if averages_rollouts(run):
        return f"{objective.old_rise:g} per step up to {objective.old_cap:g} (rollout adapter)"
    return "min((1+t)/(10+t), decay)" if config.optimizer.ema_warmup else "none"  # core.ema.warmed_decay


def _ema_decay(config: TrainConfig, run: PublishedRun) -> float:
    """Return the decay of the averaged weights, which in some runs are those that make the rollouts."""
    objective: Any = config.objective
    if averages_rollouts(run):
        return float(objective.old_cap)
    return config.kl.ema_cap if averages_reference(run) else config.optimizer.ema_decay


def _ema_enabled(config: TrainConfig, run: PublishedRun) -> bool:
    if averages_rollouts(run):
        return samples_from_another(config)
    return config.kl.ema_coef > 0 if averages_reference(run) else config.optimizer.ema_decay > 0


def _text_length(config: TrainConfig, run: PublishedRun) -> dict[str, int]:
    """Return the published limits where the one that the adapter takes, the longest encoder's, is among them."""
    published: dict[str, int] = run.settings["text_max_length"]
    length = config.pipeline.text_tokens
    return published if length in (max(published.values()), None) else {"longest": length or 0}


def _evaluation_scale(config: TrainConfig, run: PublishedRun) -> Any:
    if run.settings.get("guidance_kind") == "distilled":
        return run.settings["eval_guidance_scale"]  # an input of the network
    return config.evaluation_guidance.scale


def _shift(config: TrainConfig, run: PublishedRun) -> Any:
    """Return the shift; SD3.5's own scheduler shifts by 3."""
    own = 3.0 if "stable-diffusion-3" in run.model else None
    return own if config.pipeline.shift is None else config.pipeline.shift


def _targets(config: TrainConfig, run: PublishedRun) -> Any:
    return list(config.lora.targets or ())


OURS: dict[str, Ours] = {
    "resolution_height": lambda config, run: config.pipeline.height,
    "resolution_width": lambda config, run: config.pipeline.width,
    "num_frames": lambda config, run: config.pipeline.frames,
    "train_sampling_steps": lambda config, run: config.rollout.steps,
    "eval_sampling_steps": lambda config, run: config.evaluation_steps,
    "train_guidance_scale": _guidance_scale,
    "eval_guidance_scale": _evaluation_scale,
    "guidance_kind": _guidance_kind,
    "cfg_in_training_forward": _guided_update,
    "sampler": _sampler,
    "noise_level": _noise_level,
    "sde_window_size": _window,
    "sde_window_range": _range,
    "trained_steps_per_sample": _trained_steps,
    "trained_steps_selection": _selection,
    "timestep_fraction": _fraction,
    "last_step_trained": _last_step,
    "shared_initial_noise": lambda config, run: config.rollout.shared_noise or config.rollout.branches is not None,
    "prompts_per_rollout": lambda config, run: config.rollout.prompts,
    "samples_per_prompt": lambda config, run: config.rollout.group / _places(config),
    "samples_per_rollout": lambda config, run: config.rollout.batch / _places(config),
    "samples_per_update": _per_update,
    "updates_per_rollout": lambda config, run: config.minibatches,
    "inner_epochs": lambda config, run: config.epochs,
    "micro_batch_per_gpu": lambda config, run: config.micro_batch,
    "ratio_clip_low": lambda config, run: _objective_field(config, "clip_low", "clip"),
    "ratio_clip_high": lambda config, run: _objective_field(config, "clip_high", "clip"),
    "advantage_center": lambda config, run: "group",
    "advantage_scale": lambda config, run: {"batch": "global"}.get(config.advantage.scale, config.advantage.scale),
    "advantage_std_ddof": lambda config, run: config.advantage.ddof,
    "advantage_eps": lambda config, run: config.advantage.eps,
    "advantage_clip": lambda config, run: getattr(config.objective, "adv_clip", config.advantage.clip),
    "zero_advantage_filter": lambda config, run: config.advantage.drop_zero,
    "kl_coef": lambda config, run: config.kl.coef,
    "optimizer": lambda config, run: {"adamw": "AdamW", "adafactor": "Adafactor"}[config.optimizer.name],
    "learning_rate": lambda config, run: config.optimizer.lr,
    "adam_beta1": lambda config, run: config.optimizer.betas[0],
    "adam_beta2": lambda config, run: config.optimizer.betas[1],
    "adam_eps": lambda config, run: config.optimizer.eps,
    "weight_decay": lambda config, run: config.optimizer.weight_decay,
    "max_grad_norm": lambda config, run: config.optimizer.max_grad_norm,
    "lr_warmup_steps": lambda config, run: config.optimizer.warmup,
    "ema_enabled": _ema_enabled,
    "ema_decay": _ema_decay,
    "ema_interval": lambda config, run: config.optimizer.ema_interval / averaged_every(run),
    "ema_ramp": _ema_ramp,
    "finetune": lambda config, run: config.train,
    "lora_rank": lambda config, run: config.lora.rank,
    "lora_alpha": lambda config, run: config.lora.alpha,
    "lora_targets": _targets,
    "lora_init": lambda config, run: config.lora.init,
    "text_max_length": _text_length,
    "time_shift": _shift,
    "data_seed": lambda config, run: config.seed if config.data_seed is None else config.data_seed,
    "total_epochs": _epochs,
    "total_updates": _total,
    "save_interval": _per_rollout(lambda config: config.checkpoint_every),
    "eval_interval": _per_rollout(lambda config: config.eval_every),
    "seed": lambda config, run: config.seed,
    "noise_levels_per_sample": lambda config, run: config.noising.each,
}


def _objective_field(config: TrainConfig, *names: str) -> Any:
    return next((getattr(config.objective, name) for name in names if hasattr(config.objective, name)), None)


KINDS: dict[str, tuple[Kind, str]] = {
    **{name: ("method", "has no counterpart that gives this value") for name in OURS},
    "guidance_kind": ("method", "the adapter has guidance of another kind"),
    "cfg_in_training_forward": ("method", "the update applies the guidance of the rollout"),
    "sampler": ("method", "fluvial has no such sampler"),
    "noise_level": ("method", "the sampler is another"),
    "samples_per_rollout": ("hardware", "prompts times samples per prompt; the source's number follows from its GPUs"),
    "samples_per_update": (
        "hardware",
        "a rollout's samples divided by its updates; the source's follows from its GPUs",
    ),
    "updates_per_rollout": ("hardware", "the samples of a rollout do not divide by this number"),
    "prompts_per_rollout": ("hardware", "the samples of a rollout divided by the samples per prompt"),
    "samples_per_prompt": ("method", "a sample is compared with the others of its group, which has at least two"),
    "kl_coef": ("method", "fluvial has no KL term of this kind"),
    "advantage_center": ("method", "rewards are centred in their group"),
    "advantage_scale": ("method", "fluvial has no such normalisation"),
    "ema_ramp": ("method", "the decay of the moving average rises as (1 + n) / (10 + n)"),
    "noise_levels_per_sample": ("method", "levels are distinct steps of the sampling schedule, which has fewer"),
}

# (published, config, run) -> deviation
Missing = Callable[[Any, TrainConfig, PublishedRun], Deviation | None]


def _never(field: str, kind: Kind, why: str) -> Missing:
    return lambda published, config, run: Deviation(field, published, None, kind, why)


def _unless(field: str, matched: Callable[[Any], bool], kind: Kind, why: str) -> Missing:
    """Return a rule that accepts the values which fluvial does by itself."""
    return lambda published, config, run: None if matched(published) else Deviation(field, published, None, kind, why)


def _dtype(field: str, *ours: str) -> Missing:
    return _unless(field, lambda value: value in ours, "precision", f"fluvial computes this in {' or '.join(ours)}")


MISSING: dict[str, Missing] = {
    "eval_sampler": _unless(
        "eval_sampler",
        lambda value: value in ("euler_ode", "deterministic"),
        "method",
        "evaluation solves the ODE by Euler's method or DPM-Solver++ 2M",
    ),
    "sde_window_draw": _unless(
        "sde_window_draw",
        lambda value: window_draw(value) is not None,
        "method",
        "windows are drawn per rollout, call or sample, or move with training",
    ),
    "advantage_aggregation": _unless(
        "advantage_aggregation",
        lambda value: value in ("single", "weighted_reward_sum", "gdpo", "advantage_sum"),
        "method",
        "several rewards are summed by weight, combined as in GDPO, or their advantages summed",
    ),
    "kl_kind": _unless(
        "kl_kind",
        lambda value: value in ("none", "mean_gaussian", "mean_mse", "velocity_mse", "mask by per-step KL"),
        "method",
        "fluvial has the KL of the Gaussian steps, the distance of their means and that of the predictions",
    ),
    "lr_schedule": _unless(
        "lr_schedule",
        lambda value: value.startswith(("constant", "cosine with T_max 1e10")),
        "method",
        "schedules are constant or cosine",
    ),
    "precision_compute": _dtype("precision_compute", "bf16", "fp32"),
    "precision_trainable": _dtype("precision_trainable", "fp32"),
    "precision_base": _dtype("precision_base", "bf16", "fp32"),
    "precision_vae": _dtype("precision_vae", "bf16", "fp32"),
    "precision_text_encoder": _dtype("precision_text_encoder", "bf16", "fp32"),
    "precision_logprob": _dtype("precision_logprob", "fp32"),
    "rewards": _unless(
        "rewards",
        lambda value: set(value) <= {"jpeg_compressibility"},
        "reward",
        "the reward is one of your own, as module:name",
    ),
    "dataset": _never("dataset", "reward", "prompts are a file of your own"),
    "noise_level_draw": _unless(
        "noise_level_draw",
        lambda value: level_draw(value) is not None,
        "method",
        "levels are distinct or stratified steps of the schedule, continuous, or logit-normal",
    ),
    "loss_weighting": _unless(
        "loss_weighting",
        lambda value: value.startswith(
            ("adaptive: divided by the mean absolute error", "divided by dt", "ghuber power 0.25", "1.73*std", "2.25*std")
        ),
        "method",
        "fluvial has no such weight",
    ),
}


def _extra(published: dict[str, Any], config: TrainConfig, run: PublishedRun) -> Deviation | None:
    left = unmatched(published, config)
    why = f"fluvial has no setting for {', '.join(left)}"
    return Deviation("loss_extra", left, None, "method", why) if left else None


MISSING["loss_extra"] = _extra
NOT_SETTINGS: frozenset[str] = frozenset()


def of_model(run: PublishedRun) -> Deviation | None:
    """Return the deviation of a run whose model fluvial cannot train as the source does."""
    why = next((why for name, why in MODELS.items() if run.model.startswith(name)), None)
    return None if why is None else Deviation("model", run.model, None, "model", why)


MODELS = {
    "ByteDance-Seed/BAGEL": "it is no pipeline of diffusers, and there is no adapter for it",
    "black-forest-labs/FLUX.1-Kontext": "its condition is an image per prompt, which prompts do not have yet",
    "Qwen/Qwen-Image-Edit": "its condition is an image per prompt, which prompts do not have yet",
    "tencent/HunyuanVideo": "the repository is no pipeline of diffusers, and a converted one has no adapter",
}
