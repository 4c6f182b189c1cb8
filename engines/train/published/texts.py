"""What sources say in words, as settings: how windows of stochastic steps and noise levels are drawn."""

import math
import re
from typing import Any, Literal

from fluvial.engines.rollout.window import WindowMoves
from fluvial.engines.train.published.runs import PublishedRun

# Draws that amount to one per rollout, to all steps, each in turn or not, or to the same steps in every call.
PER_ROLLOUT = (
    "none",
    "range equals",
    "random start per trainer step",
    "random.seed(0)",
    "fixed",
    "window size 0: all steps but",
    "each step in turn",
)

# Projects with Flow-GRPO's sampler: each call draws its prompts without a repeat, and independently of the others.
K_REPEATED = frozenset(
    ("flow_grpo", "grpo_guard", "flow_cps", "tempflow_grpo", "gardo", "diffusion_nft", "awm", "dgpo", "flow_factory")
)


def window_draw(text: str) -> dict[str, Any] | None:
    """Return the settings of `RolloutConfig` for a draw of the stochastic steps; None if fluvial has no such draw."""
    if "once per pipeline call" in text:
        return {"window_draw": "call"}
    if ("once in" in text and "per rank" in text) or "constant per rank" in text:
        return {"window_draw": "run"}
    if "per request" in text:
        return {"window_draw": "sample"}
    if moved := re.match(r"progressive: start moves by (\d+) every (\d+) iterations(, with roll-back)?", text):
        return {"moves": WindowMoves(every=int(moved[2]), stride=int(moved[1]), repeat=moved[3] is not None)}
    if moved := re.match(r"progressive, (\d+) rollouts per position, stride (\d+)", text):
        return {"moves": WindowMoves(every=int(moved[1]), stride=int(moved[2]))}
    if "need not be adjacent" in text:
        return {"contiguous": False}
    if text.startswith("frozen: overlap 0, steps 0-3"):
        return {"window_low": 0, "window_high": 4}
    if text.startswith("random.seed(0)") and "always start 3" in text:
        return {"window_low": 3, "window_high": 5}
    return {} if text.startswith(PER_ROLLOUT) else None


def level_draw(text: str) -> dict[str, Any] | None:
    """Return the settings of `NoisingConfig` for a draw of the noise levels; None if fluvial has no such draw.

    The end of the range is `timestep_fraction` of the schedule, which `resolve` adds to levels "stratified" and "slice".
    """
    if text == "logit_normal":
        return {"levels": "logit_normal"}
    if "shared by ranks and micro-batches" in text:
        return {"shared": True}
    if text.startswith("stratified over sampler indices 1") or text == "discrete_wo_init":
        return {"levels": "stratified", "skip": 1, "draw": "call"}
    if text.startswith("stratified over sampler indices from 0") or text == "discrete":
        return {"levels": "stratified", "draw": "call"}
    if sliced := re.match(r"slice: the first (\d+) levels", text):
        return {"highest": int(sliced[1])}
    return {} if text.startswith(("random", "all ")) else None


def averaged_every(run: PublishedRun) -> int:
    """Return how many updates the unit of the average's interval has: a rollout's, where it is stepped per epoch, else 1."""
    per_epoch = any(line.startswith(("EMA is stepped per epoch", "EMA is stepped once per")) for line in run.unusual)
    return max(run.settings.get("updates_per_rollout", 1), 1) if per_epoch else 1


def averaged_times(run: PublishedRun) -> int:
    """Return how often the average takes in the same weights: per micro-batch of a GPU, where the source calls it there."""
    s = run.settings
    per_micro_batch = any(line.startswith("EMA is called after every micro-batch") for line in run.unusual)
    if not per_micro_batch or run.gpus is None or "samples_per_update" not in s:
        return 1
    return max(int(s["samples_per_update"]) // (run.gpus * int(s["micro_batch_per_gpu"])), 1)


def averages_rollouts(run: PublishedRun) -> bool:
    """Return whether the averaged weights of a run are those that make its rollouts, fluvial's old policy."""
    extra = run.settings.get("loss_extra", {})
    return "rollout adapter" in run.settings.get("ema_ramp", "") or extra.get("off_policy") is True


def averages_reference(run: PublishedRun) -> bool:
    """Return whether the averaged weights of a run are those that its second KL term is to."""
    return "ema_kl_beta" in run.settings.get("loss_extra", {})


def extremes(run: PublishedRun) -> int:
    """Return how many of the best, and of the worst, samples of a group are trained on; 0 is all."""
    found = (re.match(r"Best-of-n: of \d+ samples per prompt the (\d+) best and \1 worst", line) for line in run.unusual)
    return next((int(match[1]) for match in found if match), 0)


def prompt_order(run: PublishedRun) -> Literal["epochs", "draws", "distinct"]:
    """Return how a project draws its prompts: by Flow-GRPO's sampler, by a function at random, or in epochs."""
    if run.project in K_REPEATED:
        return "distinct"
    return "draws" if run.project in ("ddpo", "d3po", "alignprop") else "epochs"


def fraction_of_steps(run: PublishedRun) -> int:
    """Return the number of steps whose levels are drawn, a fraction of the schedule's, rounded down (AWM)."""
    return math.floor(run.settings["timestep_fraction"] * run.settings["train_sampling_steps"] + 1e-9)


def noisy_steps(run: PublishedRun) -> int:
    """Return the number of steps whose levels Flow-Factory draws: those of sigma >= 1 - timestep_fraction, but the last.

    sigma is that of diffusers' scheduler: SD3.5 shifts by 3, twice; FLUX by exp(mu) for its number of tokens.
    """
    s, steps = run.settings, run.settings["train_sampling_steps"]
    if "stable-diffusion-3" in run.model:
        shift, least = 3.0, 0.003 / 1.002  # that of timestep 1 of 1000, shifted
    else:
        tokens = s["resolution_height"] * s["resolution_width"] / 16**2
        shift, least = math.exp(0.5 + (tokens - 256) * 0.65 / 3840), 1 / steps
    even = (1 + (least - 1) * i / (steps - 1) for i in range(steps))
    levels = [shift * level / (1 + (shift - 1) * level) for level in even]
    return max(sum(level >= 1 - s["timestep_fraction"] for level in levels) - 1, 1)
