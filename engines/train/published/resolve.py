"""Published runs as configurations of fluvial: each setting matched, or listed with the reason why it is not."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fluvial.core.transitions import MAX_ETA
from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.config import OptimizerConfig
from fluvial.engines.objectives.advantages import AdvantageConfig
from fluvial.engines.objectives.losses import KLConfig
from fluvial.engines.objectives.protocol import Objective
from fluvial.engines.objectives.table import AlignProp, Awm, Clipped, Crd, D3po, Dgpo, Dpo, Dppo, Guard, Nft, TempFlow
from fluvial.engines.rollout.config import RolloutConfig
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.rollout.noising import NoisingConfig
from fluvial.engines.rollout.solvers import Solver
from fluvial.engines.rollout.window import WindowMoves
from fluvial.engines.train.config import EvaluationConfig, PipelineConfig, TrainConfig
from fluvial.engines.train.published.deviations import KINDS, MISSING, NOT_SETTINGS, OURS, Deviation, of_model
from fluvial.engines.train.published.runs import PublishedRun
from fluvial.engines.train.published.texts import (
    averages_reference,
    averages_rollouts,
    fraction_of_steps,
    level_draw,
    noisy_steps,
    window_draw,
)
from fluvial.models import LoraConfig

OBJECTIVES: dict[str, str] = {
    "Flow-GRPO": "clipped", "Flow-GRPO-Fast": "clipped", "Flow-CPS (GRPO)": "clipped", "DanceGRPO": "clipped",
    "MixGRPO": "clipped", "DDPO-IS": "clipped", "GRPO-Guard": "guard", "FlowDPPO": "dppo", "DiffusionNFT": "nft",
    "Advantage Weighted Matching": "awm", "online Diffusion-DPO": "dpo", "Diffusion-DPO": "dpo", "DGPO": "dgpo",
    "CRD": "crd", "DanceGRPO (by name)": "clipped", "Flow-GRPO-Fast (branching)": "clipped",
    "TempFlow-GRPO": "tempflow", "D3PO": "d3po", "AlignProp": "alignprop",
}  # fmt: skip
SAMPLERS = {"flow_sde": "flow_sde", "dance_sde": "dance_sde", "cps": "cps", "ddim_eta": "ddim"}
SOLVERS: dict[str, Solver] = {"dpm2_ode": "dpmpp_2m", "sa_solver": "sa_solver"}
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
            f"{run.name} is a run of {run.algorithm}, and fluvial has no such objective: its settings are listed by "
            f"fluvial runs {run.name}"
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
    objective, rollout = _objective(run), _rollout(run)
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
        advantage=_advantage(s) if objective.traits.rewards == "advantages" else AdvantageConfig(),
        noising=NoisingConfig() if on_steps else _noising(run, rollout),
        kl=_kl(run) if objective.traits.takes_kl else KLConfig(),
        optimizer=_optimizer(run),
        lora=_lora(s),
        pipeline=_pipeline(run),
        evaluation=_evaluation(s),
    )


def _objective(run: PublishedRun) -> Objective:
    s, extra = run.settings, run.settings.get("loss_extra", {})
    clip = {
        field: s[name] for field, name in (("clip_low", "ratio_clip_low"), ("clip_high", "ratio_clip_high")) if name in s
    }
    beta = extra.get("dpo_beta", extra.get("beta"))
    builders: Mapping[str, Callable[[], Objective]] = {
        "clipped": lambda: Clipped(**clip),
        "guard": lambda: Guard(clip=s["ratio_clip_low"]) if "ratio_clip_low" in s else Guard(),
        "dppo": lambda: Dppo(kl_threshold=extra.get("kl_mask_threshold", Dppo.kl_threshold)),
        "nft": lambda: _nft(s, extra),
        "awm": lambda: Awm(**clip, power=extra.get("ghuber_power", Awm.power)),
        "dpo": lambda: Dpo(
            beta=Dpo.beta if beta is None else float(beta),
            preferences=None if "online" in run.algorithm else Path("preferences"),
        ),
        "dgpo": lambda: Dgpo(**clip, beta=float(extra["dpo_beta"]), old_samples_from=extra["switch_ema_ref"]),
        "crd": lambda: _crd(s, extra),
        "alignprop": lambda: _alignprop(run),
        "tempflow": lambda: TempFlow(**clip),
        "d3po": lambda: D3po(beta=extra["d3po_beta"], eps=extra["eps"]),
    }
    return builders[OBJECTIVES[run.algorithm]]()


def _alignprop(run: PublishedRun) -> AlignProp:
    """Return the objective; the loss of the HPS run is 1 minus the score, and both truncate as the shared base file says."""
    extra, steps = run.settings["loss_extra"], run.settings["train_sampling_steps"]
    found = re.fullmatch(r"gaussian, mean (\d+), std (\d+)", extra.get("truncation", "gaussian, mean 42, std 5"))
    assert found is not None
    return AlignProp(
        last=steps - int(found[1]), spread=float(found[2]), target=float(extra.get("aesthetic_target", 1)),
        scale=extra["loss_coeff"],
    )  # fmt: skip


def _crd(s: Mapping[str, Any], extra: Mapping[str, Any]) -> Crd:
    """Return the objective; the decays are texts start-value-rise-cap."""
    decays: dict[str, Any] = {}
    for name in ("old", "sampling"):
        delay, value, rise, cap = extra[f"{name}_model_decay"].split("-")
        decays |= {f"{name}_delay": int(delay), f"{name}_value": float(value)}
        decays |= {f"{name}_rise": float(rise), f"{name}_cap": float(cap)}
    return Crd(
        beta=extra["crd_beta"], adv_clip=s["advantage_clip"], match=extra["crd_loss_type"], adaptive=extra["adaptive_logp"],
        adaptive_kl=extra["reward_adaptive_kl"], **decays,
    )  # fmt: skip


def _nft(s: Mapping[str, Any], extra: Mapping[str, Any]) -> Nft:
    """Return the objective with the decay of the old policy that the run's text describes."""
    values: dict[str, Any] = {
        "beta": extra.get("nft_beta", extra.get("nft_mix_beta", 1.0)),
        "weight_min": extra.get("adaptive_weight_floor", 1e-5), "adv_clip": s.get("advantage_clip", 5.0),
    }  # fmt: skip
    if "ramp_rate" in extra:
        return Nft(**values, old="linear", old_rise=extra["ramp_rate"], old_cap=s["ema_decay"])
    if sloped := re.match(r"([\d.]+) per step up to ([\d.]+)", str(s.get("ema_ramp", ""))):
        return Nft(**values, old="linear", old_rise=float(sloped[1]), old_cap=float(sloped[2]))
    text = str(extra.get("old_policy_decay", "min(0.001*step, 0.5)"))
    if linear := re.fullmatch(r"min\(([\d.]+)\*step, ([\d.]+)\)", text):
        return Nft(**values, old="linear", old_rise=float(linear[1]), old_cap=float(linear[2]), old_unit="updates")
    if delayed := re.match(r"0 until step (\d+), then ([\d.]+)\*\(step-\d+\), cap ([\d.]+)", text):
        return Nft(
            **values, old="delayed", old_delay=int(delayed[1]), old_rise=float(delayed[2]), old_cap=float(delayed[3]),
            old_unit="updates",
        )  # fmt: skip
    if flat := re.match(r"flat (\d+), rate ([\d.]+), cap ([\d.]+)", text):
        return Nft(
            **values, old="delayed", old_delay=int(flat[1]), old_rise=float(flat[2]), old_cap=float(flat[3]),
            old_every=2 if "every 2 rollouts" in text else 1,
        )  # fmt: skip
    return Nft(**values)


def _rollout(run: PublishedRun) -> RolloutConfig:
    s = run.settings
    if run.algorithm == "TempFlow-GRPO":
        return _branching(s)
    steps, group = s.get("train_sampling_steps", 10), s.get("samples_per_prompt", 16)
    if run.algorithm == "D3PO":
        group = 2  # two samples per prompt, from the same noise
    pairs, least = s.get("loss_extra", {}).get("pairs_per_batch"), 2
    if "stat_buffer_size" in s.get("loss_extra", {}) or run.algorithm == "AlignProp":
        # Statistics per prompt over past rollouts take the place of a group's; AlignProp compares no samples.
        group, least = 1, 1
    samples = s.get("samples_per_rollout", s.get("samples_per_update", 1) if run.algorithm == "AlignProp" else group)
    prompts = s.get("prompts_per_rollout") or pairs or max(samples // group, 1)
    without = not s.get("cfg_in_training_forward", True)
    conditional = _scale(s) != 1 and OBJECTIVES[run.algorithm] == "dgpo"
    guidance = Guidance(
        scale=_scale(s), gradient="conditional" if without and not conditional else "both",
        update="conditional" if conditional else "guided",
    )  # fmt: skip
    common: dict[str, Any] = {"prompts": prompts, "group": max(group, least), "steps": steps, "guidance": guidance}
    sampler = SAMPLERS.get(s.get("sampler", ""))
    trains_on_steps = OBJECTIVES[run.algorithm] in ("clipped", "guard", "dppo", "tempflow", "d3po", "alignprop")
    if sampler is None and trains_on_steps:
        sampler = "flow_sde"
    if sampler is None or not trains_on_steps:
        solver = SOLVERS.get(s.get("sampler", ""), "euler")
        eta = s.get("noise_level", 0.0) if solver == "sa_solver" else 0.0
        return RolloutConfig(**common, sampler="ode", eta=eta, solver=solver)
    config = RolloutConfig(
        **common,
        sampler=sampler,
        eta=_eta(s.get("noise_level") or 0.7, sampler),
        shared_noise=s.get("shared_initial_noise", run.algorithm == "D3PO"),
        form="unscaled" if sampler == "cps" else "density",
    )
    return _steps(config, s)


def _eta(published: float, sampler: str) -> float:
    """Return eta; above 1, the step of Flow-CPS is that of 2 - eta."""
    if sampler == "cps" and published > 1:
        return round(2 - published, 9)
    return min(published, MAX_ETA[sampler])


def _branching(s: Mapping[str, Any]) -> RolloutConfig:
    """Return the rollout of TempFlow-GRPO: 6 branches of each initial noise, which differ in the noise of a single step.

    That step is the next one in each rollout, where the source branches at every step of one.
    """
    return RolloutConfig(
        prompts=s.get("samples_per_rollout", 1152) // 6, group=6, steps=s["train_sampling_steps"], shared_noise=True,
        eta=s.get("noise_level", 0.7), window=1, window_high=s["trained_steps_per_sample"], moves=WindowMoves(every=1),
        guidance=Guidance(scale=_scale(s)),
    )  # fmt: skip


def _steps(config: RolloutConfig, s: Mapping[str, Any]) -> RolloutConfig:
    """Return the rollout with its stochastic and its trained steps."""
    size, (low, high) = s.get("sde_window_size", "all"), s.get("sde_window_range", (0, config.steps))
    if isinstance(size, int) and size > 0:
        drawn = {"window_low": low, "window_high": high, **(window_draw(s.get("sde_window_draw", "none")) or {})}
        return replace(config, window=size, **{**drawn, "window_high": min(drawn["window_high"], config.steps)})
    trained, fraction = s.get("trained_steps_per_sample"), s.get("timestep_fraction", 1.0)
    if s.get("trained_steps_selection") == "all_but_last" or config.sampler == "dance_sde":
        # The last step is left out and the clean estimate decoded, which is an ODE step to the end.
        config = replace(config, window_high=config.steps - 1)
    recorded = config.window_range[1] - config.window_low
    if trained is None or trained >= recorded:
        return config
    pick: Literal["first", "random"] = "random" if s.get("trained_steps_selection") == "random" else "first"
    exact = replace(config, fraction=fraction, pick=pick) if fraction < 1 else config
    if fraction < 1 and exact.trained_of(recorded) == trained:
        return exact
    return replace(config, fraction=trained / recorded, pick=pick)


def _scale(s: Mapping[str, Any]) -> float:
    """Return the scale of classifier-free guidance; 1 where there is none, or the network takes the scale as an input."""
    return float(s.get("train_guidance_scale", 1.0)) if s.get("guidance_kind") in ("cfg", "true_cfg_renorm") else 1.0


def _interval(s: Mapping[str, Any], name: str) -> int:
    value = s.get(name, 0)
    return value if isinstance(value, int) else 0


def _kl(run: PublishedRun) -> KLConfig:
    """Return the KL terms; a second one is to a moving average of the policy (AWM)."""
    s, extra = run.settings, run.settings.get("loss_extra", {})
    coef = float(s.get("kl_coef", 0.0)) if s.get("kl_kind", "none") in ("mean_gaussian", "velocity_mse") else 0.0
    found = re.fullmatch(r"min\(([\d.]+), ([\d.]+)\*step\)", str(extra.get("ema_kl_decay", "")))
    if run.algorithm == "TempFlow-GRPO":  # divides by the whole step's std
        return KLConfig(coef=s.get("kl_coef", 0.0), weight="exact")
    if averages_reference(run):
        cap = s["ema_decay"]
        return KLConfig(coef=coef, ema_coef=extra["ema_kl_beta"], ema_cap=cap, ema_rise=cap / extra["warmup_steps"])
    if found is None:
        return KLConfig(coef=coef)
    return KLConfig(coef=coef, ema_coef=extra["ema_kl_coef"], ema_cap=float(found[1]), ema_rise=float(found[2]))


def _advantage(s: Mapping[str, Any]) -> AdvantageConfig:
    extra = s.get("loss_extra", {})
    return AdvantageConfig(
        scale={"group": "group", "global": "batch"}.get(s.get("advantage_scale", "group"), "group"),  # type: ignore[arg-type]
        eps=s.get("advantage_eps", 1e-4),
        clip=s.get("advantage_clip"),
        combine={"gdpo": "gdpo", "advantage_sum": "advantages"}.get(s.get("advantage_aggregation", ""), "sum"),  # type: ignore[arg-type]
        rescale=extra.get("advantage_rescale_max"),
        history=extra.get("stat_buffer_size", 0),
        history_min=extra.get("stat_min_count", 16),
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
    return OptimizerConfig(
        name="adafactor" if adafactor else "adamw",
        lr=s.get("learning_rate", 1e-4),
        weight_decay=s.get("weight_decay", 0.0),
        warmup=s.get("lr_warmup_steps", 0),
        max_grad_norm=s.get("max_grad_norm", 1.0),
        ema_decay=decay,
        ema_interval=s.get("ema_interval", 1) if decay else 1,
        ema_warmup=not (decay and s.get("ema_ramp") == "none"),
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
    return EvaluationConfig(steps=s.get("eval_sampling_steps"), guidance=s.get("eval_guidance_scale") if guided else None)
