"""The objective of a published run, with the numbers of its loss."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fluvial.engines.objectives.protocol import Objective
from fluvial.engines.objectives.table import AlignProp, Awm, Clipped, Crd, D3po, Dgpo, Dpo, Dppo, Guard, Nft, TempFlow
from fluvial.engines.train.published.runs import PublishedRun

OBJECTIVES: dict[str, str] = {
    "Flow-GRPO": "clipped", "Flow-GRPO-Fast": "clipped", "Flow-CPS (GRPO)": "clipped", "DanceGRPO": "clipped",
    "MixGRPO": "clipped", "MixGRPO-Flash": "clipped", "MixGRPO-Flash*": "clipped", "DDPO-IS": "clipped",
    "GRPO-Guard": "guard", "FlowDPPO": "dppo", "DiffusionNFT": "nft",
    "Advantage Weighted Matching": "awm", "online Diffusion-DPO": "dpo", "Diffusion-DPO": "dpo", "DGPO": "dgpo",
    "CRD": "crd", "DanceGRPO (by name)": "clipped", "Flow-GRPO-Fast (branching)": "clipped",
    "TempFlow-GRPO": "tempflow", "D3PO": "d3po", "AlignProp": "alignprop",
}  # fmt: skip

# What the methods without an objective need that fluvial does not have.
LACKING: dict[str, str] = {
    "GARDO": "a KL of the samples alone on which the rewards disagree, a reference that is reset when that KL grows, and "
    "advantages that are scaled by the distance of image features",
    "BranchGRPO": "trees of samples that split at several steps, with advantages per depth",
    "SPO": "several candidates per step, which a preference model compares at its noise level",
    "SRPO": "the gradient of a reward at one noise level, of a sample that is noised and restored in one step",
}


def objective_of(run: PublishedRun) -> Objective:
    """Return the objective of a run's algorithm, which `OBJECTIVES` has."""
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
        "tempflow": lambda: TempFlow(**clip, scale=float(str(s.get("loss_weighting", "1.73*std")).partition("*")[0])),
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
