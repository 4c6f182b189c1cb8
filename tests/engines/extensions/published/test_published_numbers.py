"""Every number that was published equals the configuration of its run, or is a named deviation.

`helpers/published_settings.py` says what was read in the sources of the 104 runs.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest
from helpers.published_settings import stated

from fluvial.engines.extensions.published.resolve import resolve
from fluvial.engines.extensions.published.runs import PublishedRun, as_flag, flatten, load_published
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.record import as_record
from fluvial.engines.sampling.samplers import sampler_rule

RUNS = load_published()
Leaves = Mapping[str, Any]
OPTIMIZERS = {"adamw": "AdamW", "adafactor": "Adafactor"}
SAMPLERS = {"ddim_eta": "ddim", "dpm2_ode": "ode", "euler_ode": "ode"}


def leaves_of(run: PublishedRun) -> dict[str, Any]:
    """Return the values of a run's configuration."""
    leaves = flatten(as_record(resolve(run)))
    return {**{as_flag(name): value for name, value in leaves.items()}, **run.fixed}


LEAVES = {name: leaves_of(run) for name, run in RUNS.items()}


def per_rollout(leaves: Leaves) -> int:
    return int(leaves.get("passes.minibatches", 1) * leaves.get("passes.epochs", 1))


def window(leaves: Leaves) -> tuple[int, int]:
    """Return the first step that may take noise, and the one after the last."""
    high = leaves.get("sampling.window.high")
    return leaves.get("sampling.window.low") or 0, leaves["sampling.steps"] if high is None else high


def places(leaves: Leaves) -> int:
    """Return at how many steps a trunk branches; the published counts are per step."""
    low, high = window(leaves)
    return high - low if leaves.get("sampling.window.kind") == "branches" else 1


def trained(leaves: Leaves) -> int:
    low, high = window(leaves)
    kind, sampler = leaves["sampling.window.kind"], leaves["sampling.sampler.kind"]
    # The schedule of Stable Diffusion ends below an alpha_bar of 1, so that its last DDIM step takes noise.
    ends_clean = sampler != "ddim" and sampler_rule(sampler).last_step_is_deterministic and leaves["form"] != "unscaled"
    if kind == "branches":
        return places(leaves)
    recorded: int = leaves.get("sampling.window.size") or high - low
    recorded -= int(kind == "all" and high == leaves["sampling.steps"] and ends_clean)
    return math.floor(leaves.get("trained.fraction", 1) * recorded + 1e-9)


def samples_per_rollout(leaves: Leaves) -> float:
    """Return the number of samples of a rollout; of a trunk that branches, per step."""
    return float(leaves["sampling.prompts"] * leaves["sampling.group"] / places(leaves))


def samples_per_update(leaves: Leaves) -> float:
    """Return the number of samples, or of given pairs, behind an optimizer step."""
    if leaves.get("preferences"):
        return float(leaves["sampling.prompts"] / leaves["passes.minibatches"])
    kept = 2 * leaves.get("advantage.extremes", 0) / leaves["sampling.group"] or 1
    return float(samples_per_rollout(leaves) * kept / leaves["passes.minibatches"])


def shares_noise(leaves: Leaves) -> bool:
    return bool(leaves["sampling.shared_noise"] or leaves.get("sampling.window.kind") in ("branches", "splits"))


def first_of(*names: str) -> Callable[[Leaves], Any]:
    return lambda leaves: next((leaves[name] for name in names if leaves.get(name) is not None), None)


def decay(leaves: Leaves) -> Any:
    """Return the largest decay of the averaged weights: of the evaluated ones, of a KL's, or of those that sample."""
    if leaves.get("optimizer.ema_decay"):
        return leaves["optimizer.ema_decay"]
    return leaves["kl.ema_cap"] if leaves.get("kl.ema_coef") else leaves.get("old.cap", leaves.get("old_cap"))


# Field -> the setting that has its value.
PLACES = {
    "adam_eps": "optimizer.eps",
    "advantage_eps": "advantage.eps",
    "advantage_std_ddof": "advantage.ddof",
    "data_seed": "data.seed",
    "eval_sampling_steps": "evaluation.steps",
    "finetune": "train",
    "inner_epochs": "passes.epochs",
    "kl_coef": "kl.coef",
    "learning_rate": "optimizer.lr",
    "lora_alpha": "lora.alpha",
    "lora_init": "lora.form.init",
    "lora_rank": "lora.rank",
    "lr_warmup_steps": "optimizer.warmup",
    "max_grad_norm": "optimizer.max_grad_norm",
    "micro_batch_per_gpu": "engine.micro_batch",
    "noise_levels_per_sample": "noising.each",
    "num_frames": "pipeline.frames",
    "prompts_per_rollout": "sampling.prompts",
    "resolution_height": "pipeline.height",
    "resolution_width": "pipeline.width",
    "sampler": "sampling.sampler.kind",
    "seed": "seed",
    "text_max_length": "pipeline.text_tokens",
    "time_shift": "pipeline.shift",
    "total_updates": "updates",
    "train_sampling_steps": "sampling.steps",
    "updates_per_rollout": "passes.minibatches",
    "weight_decay": "optimizer.weight_decay",
    "zero_advantage_filter": "advantage.drop_zero",
}
# Field -> (setting, its value in the published unit).
READ: dict[str, tuple[str, Callable[[Leaves], Any]]] = {
    **{field: (setting, first_of(setting)) for field, setting in PLACES.items()},
    "adam_beta1": ("optimizer.betas", lambda leaves: leaves["optimizer.betas"][0]),
    "adam_beta2": ("optimizer.betas", lambda leaves: leaves["optimizer.betas"][1]),
    "advantage_clip": ("advantage.clip", first_of("adv_clip", "advantage.clip")),
    # Of pairs only the order within a group counts, so that DPO has no scale.
    "advantage_scale": ("advantage.scale", lambda leaves: leaves.get("advantage.scale", "group").replace("batch", "global")),
    "ema_decay": ("optimizer.ema_decay", decay),
    "eval_interval": ("evaluation.every", lambda leaves: leaves["evaluation.every"] / per_rollout(leaves)),
    "lora_targets": ("lora.targets", lambda leaves: set(leaves["lora.targets"])),
    "noise_level": ("sampling.sampler.eta", lambda leaves: leaves.get("sampling.sampler.eta", 0.0)),
    "optimizer": ("optimizer.name", lambda leaves: OPTIMIZERS[leaves["optimizer.name"]]),
    "ratio_clip_high": ("clip_high", first_of("clip_high", "clip")),
    "ratio_clip_low": ("clip_low", first_of("clip_low", "clip")),
    "samples_per_prompt": ("sampling.group", lambda leaves: leaves["sampling.group"] / places(leaves)),
    "samples_per_rollout": ("sampling.prompts", samples_per_rollout),
    "samples_per_update": ("passes.minibatches", samples_per_update),
    "save_interval": ("checkpoint.every", lambda leaves: leaves["checkpoint.every"] / per_rollout(leaves)),
    "shared_initial_noise": ("sampling.shared_noise", shares_noise),
    "total_epochs": ("updates", lambda leaves: leaves["updates"] / per_rollout(leaves)),
    "trained_steps_per_sample": ("trained", trained),
}
# Number of a single loss -> the setting that has its value; the others are told in words.
EXTRAS = {
    "aesthetic_target": "target",
    "advantage_rescale_max": "advantage.rescale",
    "beta": "beta",
    "compress_ratio": "sampling.window.tail.fraction",
    "crd_beta": "beta",
    "divert_start_step": "sampling.window.low",
    "crd_loss_type": "match",
    "d3po_beta": "beta",
    "dpo_beta": "beta",
    "ema_kl_beta": "kl.ema_coef",
    "ema_kl_coef": "kl.ema_coef",
    "ema_ref_max_decay": "old_cap",
    "ema_ref_ramp_rate": "old_rise",
    "eps": "eps",
    "fake_lr": "fake.lr",
    "ghuber_power": "power",
    "iters_per_group": "sampling.window.every",
    "iters_per_window": "sampling.window.every",
    "kl_mask_threshold": "kl_threshold",
    "loss_coeff": "scale",
    "lowest": "surrogate.lowest",
    "nft_beta": "beta",
    "nft_mix_beta": "beta",
    "overlap_step": "sampling.window.stride",
    "preference_threshold": "margin.size",
    "adaptive_weight_floor": "weight_min",
    "ramp_rate": "old.rise",
    "read_from": "surrogate.read_from",
    "rl_cfg": "surrogate.guidance",
    "split_steps": "sampling.window.splits",
    "stat_buffer_size": "advantage.history",
    "stat_min_count": "advantage.history_min",
    "surrogate_beta": "surrogate.beta",
    "surrogate_clip": "surrogate.clip",
    "switch_ema_ref": "old_samples_from",
}
# In the source's own words or unit alone, under these settings; what they mean is compared in other fields, or by hand.
WORDS: dict[str, tuple[str, ...]] = {
    "dataset": ("prompts", "preferences"),
    "ema_interval": ("optimizer.ema_interval",),
    "loss_weighting": ("method", "scale", "weight_min", "weighting"),
    "noise_level_draw": ("noising",),
    "timestep_fraction": ("trained", "sampling.window", "noising", "noising.levels"),
}


def same(ours: Any, value: Any) -> bool:
    """Return whether two values are the same up to the last bits of a number."""
    if isinstance(value, bool | str | list | dict | set) or isinstance(ours, bool) or ours is None:
        return bool(ours == value)
    return isinstance(ours, int | float) and math.isclose(ours, value, rel_tol=1e-9)


def told(run: PublishedRun, value: Any, settings: tuple[str, ...] = ()) -> bool:
    """Return whether a run states a value in its own words: a text as it is, a number among others."""
    texts = [run.published[name] for name in settings or run.published if name in run.published]
    texts += [found.published for name, found in run.deviations.items() if not settings or name in settings]
    if not isinstance(value, int | float) or isinstance(value, bool):
        wanted = value if isinstance(value, str) else json.dumps(value)
        return any(wanted in (text if isinstance(text, str) else json.dumps(text)) for text in texts)
    found = (float(each) for text in texts for each in re.findall(r"(?<![\w.])-?\d+\.?\d*(?:e-?\d+)?", str(text)))
    return any(math.isclose(each, value, rel_tol=1e-9) for each in found)


def is_said(name: str, field: str, value: Any) -> bool:
    run, leaves = RUNS[name], LEAVES[name]
    if field in READ:
        return _is_run(run, leaves, field, value)
    if field in SPECIAL:
        return SPECIAL[field](run, leaves, value)
    if field.startswith("loss_extra."):
        setting = EXTRAS.get(field.removeprefix("loss_extra."))
        moves = leaves.get("sampling.window.kind") != "random"  # a window that stays has no number of rollouts per place
        if setting is not None and (moves or not setting.startswith("sampling.window.")):
            return same(leaves.get(setting), value)
        of_run = {each.name for each in fields(TrainConfig)}
        inside = [ours for other, ours in leaves.items() if other.partition(".")[0] not in of_run]
        return any(same(ours, value) for ours in inside) or told(run, value)
    return told(run, value, WORDS[field]) if field in WORDS else True  # the others are texts without a number


def _is_run(run: PublishedRun, leaves: Leaves, field: str, value: Any) -> bool:
    """Return whether the value of a setting is the published one, or a deviation names it."""
    setting, read = READ[field]
    if field == "lora_targets":
        value = set(value)
    if field == "sampler":
        value = SAMPLERS.get(value.partition(", then")[0], value.partition(", then")[0])
    if field == "text_max_length":
        value = max(value.values())
    if value == "open" or (field == "total_epochs" and "steps" in str(run.published[setting])):
        return told(run, value, (setting,))  # stopped by hand, or after a number of steps
    if same(read(leaves), value):
        return True
    if field == "total_updates":  # of trainer steps, each of several updates
        return same(leaves["updates"] / per_rollout(leaves), value) and told(run, value, (setting,))
    if field == "noise_level" and leaves["sampling.sampler.kind"] == "cps":
        return math.isclose(math.sin(read(leaves) * math.pi / 2), math.sin(value * math.pi / 2), abs_tol=1e-9)
    return any(setting == other or other.startswith(f"{setting}.") for other in run.deviations)


def _has_average(run: PublishedRun, leaves: Leaves, value: Any) -> bool:
    return bool(decay(leaves)) if value else not leaves["optimizer.ema_decay"]


def _has_interval(run: PublishedRun, leaves: Leaves, value: Any) -> bool:
    """Return whether the moving average follows as often as published: per so many updates, or epochs where it says so."""
    interval = leaves["optimizer.ema_interval"] if leaves["optimizer.ema_decay"] else 1
    per_epoch = "epoch" in str(run.published.get("optimizer.ema_interval", ""))
    return same(interval / (per_rollout(leaves) if per_epoch else 1), value)


def _has_range(run: PublishedRun, leaves: Leaves, value: Any) -> bool:
    return list(window(leaves)) == value or told(run, value, ("sampling.window",))


def _has_window(run: PublishedRun, leaves: Leaves, value: Any) -> bool:
    if value == 0:
        return leaves["sampling.sampler.kind"] in ("ode", "sa_solver")
    kind = leaves["sampling.window.kind"]
    return kind in ("all", "branches") if value == "all" else same(leaves.get("sampling.window.size"), value)


def _has_guidance(setting: str) -> Callable[[PublishedRun, Leaves, Any], bool]:
    """Return whether the scale is that of two passes, or the one that a distilled network gets."""
    words = ("guidance.embedded", "sampling.guidance.scale")
    return lambda run, leaves, value: same(leaves[setting], value) or told(run, value, words)


SPECIAL: dict[str, Callable[[PublishedRun, Leaves, Any], bool]] = {
    "ema_enabled": _has_average,
    "ema_interval": _has_interval,
    "eval_guidance_scale": _has_guidance("evaluation.guidance"),
    "sde_window_range": _has_range,
    "sde_window_size": _has_window,
    "train_guidance_scale": _has_guidance("sampling.guidance.scale"),
}


FOUND = sorted({name for name, _, _ in stated()})


def test_the_list_has_all_runs() -> None:
    """104 runs, and everything that was read of them: 76 fields and the numbers of single losses."""
    assert set(FOUND) == set(RUNS)
    assert len(RUNS) == 104
    assert len({field.partition(".")[0] for _, field, _ in stated()}) == 76
    assert len(list(stated())) > 4700


@pytest.mark.parametrize("name", FOUND)
def test_every_published_number_is_run_or_named(name: str) -> None:
    unsaid = [(field, value) for run, field, value in stated() if run == name and not is_said(name, field, value)]
    assert not unsaid
