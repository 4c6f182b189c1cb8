"""How the samples of a published run are made: its rollout."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from fluvial.core.transitions import MAX_ETA
from fluvial.engines.rollout.after import AfterWindow
from fluvial.engines.rollout.config import RolloutConfig
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.rollout.solvers import Solver
from fluvial.engines.train.published.objectives import OBJECTIVES
from fluvial.engines.train.published.runs import PublishedRun
from fluvial.engines.train.published.texts import window_draw

SAMPLERS = {"flow_sde": "flow_sde", "dance_sde": "dance_sde", "cps": "cps", "ddim_eta": "ddim", "wan_sde": "wan_sde"}
SOLVERS: dict[str, Solver] = {"dpm2_ode": "dpmpp_2m", "sa_solver": "sa_solver"}


def rollout_of(run: PublishedRun) -> RolloutConfig:
    """Return how the samples of a run are made."""
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
    if run.algorithm == "Diffusion-DPO":
        pairs = pairs or s["samples_per_update"]  # given ones
    samples = s.get("samples_per_rollout", s.get("samples_per_update", 1) if run.algorithm == "AlignProp" else None)
    if samples is None:  # not stated; D3PO makes an update per pair
        samples = group * (1 if run.algorithm == "D3PO" else RolloutConfig.prompts)
    prompts = s.get("prompts_per_rollout") or pairs or max(samples // group, 1)
    without = not s.get("cfg_in_training_forward", True)
    conditional = scale_of(s) != 1 and OBJECTIVES[run.algorithm] == "dgpo"
    guidance = Guidance(
        scale=scale_of(s), gradient="conditional" if without and not conditional else "both",
        update="conditional" if conditional else "guided",
    )  # fmt: skip
    common: dict[str, Any] = {"prompts": prompts, "group": max(group, least), "steps": steps, "guidance": guidance}
    sampler = SAMPLERS.get(s.get("sampler", "").partition(", then")[0])
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
        eta=_eta(s.get("noise_level") or (1.0 if sampler == "wan_sde" else 0.7), sampler),
        shared_noise=s.get("shared_initial_noise", run.algorithm == "D3PO"),
        form="unscaled" if sampler == "cps" else "density",
        after=_after(s),
    )
    return _steps(config, s)


def _eta(published: float, sampler: str) -> float:
    """Return eta; above 1, the step of Flow-CPS is that of 2 - eta."""
    if sampler == "cps" and published > 1:
        return round(2 - published, 9)
    return min(published, MAX_ETA[sampler])


def _after(s: Mapping[str, Any]) -> AfterWindow:
    """Return how the steps after the window are taken (MixGRPO-Flash)."""
    ratio = s.get("loss_extra", {}).get("compress_ratio")
    return AfterWindow() if ratio is None else AfterWindow("dpmpp_2m", ratio, least=0)


def _branching(s: Mapping[str, Any]) -> RolloutConfig:
    """Return the rollout of TempFlow-GRPO: 6 branches of each initial noise at every trained step.

    The published counts are per step, and 4 initial noises share a prompt.
    """
    places = s["trained_steps_per_sample"]
    return RolloutConfig(
        prompts=s["prompts_per_rollout"], group=s.get("samples_per_prompt", 24) * places, branches=6,
        steps=s["train_sampling_steps"], eta=s.get("noise_level", 0.7), window=1, window_high=places,
        guidance=Guidance(scale=scale_of(s)),
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


def scale_of(s: Mapping[str, Any]) -> float:
    """Return the scale of classifier-free guidance; 1 where there is none, or the network takes the scale as an input."""
    return float(s.get("train_guidance_scale", 1.0)) if s.get("guidance_kind") in ("cfg", "true_cfg_renorm") else 1.0
