"""Numbers that belong to one loss only: how each is compared with the configuration."""

from collections.abc import Callable
from typing import Any

from fluvial.engines.train.config import TrainConfig

# (config, value) -> whether fluvial runs the value.
Matches = Callable[[TrainConfig, Any], bool]


def _of(field: str) -> Matches:
    """Return the comparison with a field of the objective."""
    return lambda config, value: getattr(config.objective, field, None) == value


def _says(value: Any) -> Matches:
    """Return the comparison with what fluvial does in any case."""
    return lambda config, found: bool(found == value)


def _old_decay(config: TrainConfig, text: str) -> bool:
    """Return whether the numbers of a described decay of the old policy are those of the objective."""
    o: Any = config.objective
    every = 2 if "every 2 rollouts" in text else 1
    parts = [f"{o.old_rise:g}", f"{o.old_cap:g}", *([str(o.old_delay)] if o.old == "delayed" else [])]
    return all(part in text for part in parts) and o.old_every == every


def _kl_decay(config: TrainConfig, text: str) -> bool:
    return text == f"min({config.kl.ema_cap:g}, {config.kl.ema_rise:g}*step)"


def samples_from_another(config: TrainConfig) -> bool:
    """Return whether a policy that lags behind makes the rollouts from the start."""
    return any(follower.samples_from == 0 for follower in config.followers)


def _ema_schedule(config: TrainConfig, text: str) -> bool:
    """Return whether the decay has the described form: that of the weights' average is constant, the others rise."""
    if config.optimizer.ema_decay:
        return text == "constant" and not config.optimizer.ema_warmup
    return text == ("piecewise_linear" if samples_from_another(config) else "linear")


def _truncation(config: TrainConfig, text: str) -> bool:
    o: Any = config.objective
    return text == f"gaussian, mean {config.rollout.steps - o.last}, std {o.spread:g}"


def _stays(config: TrainConfig) -> bool:
    """Return whether the window has one place."""
    low, high = config.rollout.window_range
    return config.rollout.window == high - low


EXTRAS: dict[str, Matches] = {
    "nft_beta": _of("beta"),
    "nft_mix_beta": _of("beta"),
    "dpo_beta": _of("beta"),
    "beta": _of("beta"),
    "crd_beta": _of("beta"),
    "d3po_beta": _of("beta"),
    "eps": _of("eps"),
    "loss_coeff": _of("scale"),
    "aesthetic_target": _of("target"),
    "truncation": _truncation,
    "adaptive_weight_floor": _of("weight_min"),
    "kl_mask_threshold": _of("kl_threshold"),
    "add_kl_coefficient": _says(True),  # the KL of a step is divided by twice its variance
    "awm_weighting": _of("weighting"),
    "ghuber_power": _of("power"),
    "old_policy_decay": _old_decay,
    "flat_steps": _of("old_delay"),
    "ramp_rate": _of("old_rise"),
    "ema_decay_schedule": _ema_schedule,
    "off_policy": lambda config, value: samples_from_another(config) == value,
    "warmup_steps": lambda config, value: config.kl.ema_rise == config.kl.ema_cap / value,
    "ema_kl_coef": lambda config, value: config.kl.ema_coef == value,
    "ema_kl_beta": lambda config, value: config.kl.ema_coef == value,
    "ema_kl_decay": _kl_decay,
    "kl_weight": _says("Uniform"),
    "advantage_rescale_max": lambda config, value: config.advantage.rescale == value,
    "sa_solver_orders": lambda config, value: config.rollout.solver == "sa_solver" and value == [2, 2],
    "stat_buffer_size": lambda config, value: config.advantage.history == value,
    "stat_min_count": lambda config, value: config.advantage.history_min == value,
    "iters_per_group": lambda config, value: config.rollout.moves.every == value or _stays(config),
    "iters_per_window": lambda config, value: config.rollout.moves.every == value,
    # In MixGRPO's code this is the stride; 0 keeps the window where it is.
    "overlap_step": lambda config, value: config.rollout.moves.stride == value if value else _stays(config),
    "compress_ratio": lambda config, value: config.rollout.after.fraction == value,
    "dpm_apply": lambda config, value: value == "post" and config.rollout.after.solver == "dpmpp_2m",
    "dpm_order": _says(2),
    "overlap_size": lambda config, value: config.rollout.window_size - config.rollout.moves.stride == value,
    "max_timesteps": lambda config, value: config.rollout.window_range[1] == value,
    "pairs_per_batch": lambda config, value: config.rollout.prompts == value,
    "pairs_per_update": lambda config, value: config.rollout.prompts == value * config.minibatches,
    "weighting_scheme": lambda config, value: config.noising.levels == value,
    "loss_factor": _says("0.5*beta"),  # core.dpo.dpo_loss
    "trunc_steps": lambda config, value: config.noising.highest == value + 1,
    "switch_ema_ref": _of("old_samples_from"),
    "use_shared_noise": lambda config, value: config.noising.shared == value,
    "crd_loss_type": _of("match"),
    "adaptive_logp": _of("adaptive"),
    "reward_adaptive_kl": _of("adaptive_kl"),
    "train_num_steps": lambda config, value: config.rollout.window == value,
    "clip_kl": _says(False),
    "use_ema_ref": _says(False),
    "kl_cfg": lambda config, value: value == (config.kl.guidance or 1.0),
    # Of a prompt's images as many as fill whole calls are made, 2 of 9 for 24 (an older Flow-GRPO-Fast).
    "images_per_branch": lambda config, value: config.rollout.group % value == 0,
    "num_image_per_prompt": lambda config, value: 0 <= value - config.rollout.group < config.samples_per_pass,
    "kl_ratio": _says(0.01),  # of DPOK, whose script shares the file; that of D3PO does not read it
    "weight_temp": _says(-1.0),
}
# Read by `resolve` from text, or what the objective does by its definition.
BY_DEFINITION = {
    "clip_dsm", "ema_ref_max_decay", "ema_ref_ramp_rate", "old_model_decay", "sampling_model_decay", "use_old_for_loss"
}  # fmt: skip


def unmatched(published: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Return the numbers that fluvial does not run as published."""
    return {
        name: value
        for name, value in published.items()
        if name not in BY_DEFINITION and (name not in EXTRAS or not EXTRAS[name](config, value))
    }
