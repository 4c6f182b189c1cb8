"""Records of a run's updates and evaluations, lines for the console, and the summary."""

import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from fluvial.engines.data.records import split_scores
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.engine.items import PartNumbers
from fluvial.engines.run.evaluation.evaluate import Evaluation
from fluvial.engines.run.evaluation.table import average_over_tags
from fluvial.engines.run.log.progress import table
from fluvial.engines.run.run import Run
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.items.noised import TENTHS
from fluvial.engines.scoring.advantages import learnt_weights, weigh_rewards
from fluvial.models.device import is_accelerator

# Bytes/s of 16 lanes of PCI Express, one way: 16 and 32 GT/s per lane, 128 bits of data in 130.
PCIE4, PCIE5 = 31.5e9, 63.0e9


class Peak(NamedTuple):
    """FLOP/s of a device at its highest clock, dense (without 2:4 sparsity), and bytes/s of its link to the host."""

    bfloat16: float  # on its matrix units, accumulated in float32
    float32: float  # in full precision: no TF32
    link: float = PCIE5  # assumed: 16 lanes of the generation of its cards; half of NVLink-C2C's 900 GB/s


# By words of the device name that CUDA or ROCm reports; the matching key with the most words counts.
# Source: the vendors' data sheets. NVIDIA: A100, A10, A40, RTX A6000, L4, L40, L40S, H100, H200, GH200 and HGX B200 product
# data sheets (which print most bfloat16 numbers with sparsity: twice these), and the architecture white papers of Ampere
# GA102, Ada and RTX Blackwell for GeForce. AMD: Instinct MI300X and MI325X data sheets.
PEAKS: dict[str, Peak] = {
    "A10": Peak(125e12, 31.2e12, PCIE4),
    "A40": Peak(149.7e12, 37.4e12, PCIE4),
    "RTX A6000": Peak(154.8e12, 38.7e12, PCIE4),
    "A100": Peak(312e12, 19.5e12, PCIE4),
    "A800": Peak(312e12, 19.5e12, PCIE4),
    "L4": Peak(121e12, 30.3e12, PCIE4),
    "L40": Peak(181.05e12, 90.5e12, PCIE4),
    "L40S": Peak(362.05e12, 91.6e12, PCIE4),
    "H100": Peak(989.4e12, 66.9e12),
    "H100 PCIe": Peak(756e12, 51e12),
    "H100 NVL": Peak(835.5e12, 60e12),
    "H800": Peak(989.4e12, 66.9e12),
    "H200": Peak(989.4e12, 66.9e12),
    "H200 NVL": Peak(835.5e12, 60e12),
    "GH200": Peak(989.4e12, 66.9e12, 450e9),
    "B200": Peak(2250e12, 75e12),
    "RTX 3090": Peak(71e12, 35.6e12, PCIE4),
    "RTX 4090": Peak(165.2e12, 82.6e12, PCIE4),
    "RTX 5090": Peak(209.5e12, 104.8e12),
    "MI300X": Peak(1307.4e12, 163.4e12),
    "MI325X": Peak(1307.4e12, 163.4e12),
}
# Words that mark a partition of a GPU, or another GPU of a similar name; their peaks are unknown.
VARIANTS = {"MIG", "Laptop", "D", "Ti", "Max-Q"}


def find_peaks(name: str) -> Peak | None:
    """Return the peaks of a device by its name; None if unknown."""
    words = set(re.split(r"[\s-]+", name))
    matches = [key for key in PEAKS if set(key.split()) <= words]
    if not matches or words & VARIANTS:
        return None
    return PEAKS[max(matches, key=lambda key: len(key.split()))]


def look_up_peak(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of a device, by its name, in a dtype; None if unknown."""
    peaks = find_peaks(name)
    if peaks is None:
        return None
    return {torch.bfloat16: peaks.bfloat16, torch.float16: peaks.bfloat16, torch.float32: peaks.float32}.get(dtype)


def find_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of a device in a dtype; None if unknown, e.g. for a CPU."""
    return look_up_peak(torch.get_device_module(device).get_device_name(device), dtype) if is_accelerator(device) else None


def compute_mfu(flops: float, seconds: float, *, peak: float, ranks: int) -> float:
    """Return model FLOPs utilisation: flops / (seconds * peak * ranks) (Chowdhery et al., arXiv 2204.02311, appendix B).

    Args:
        flops: operations of the model on all ranks, without recomputed ones.
        peak: FLOP/s of one rank's device.

    Raises:
        ValueError: seconds, peak or ranks are not above 0.
    """
    for name, number in {"seconds": seconds, "peak": peak, "ranks": ranks}.items():
        if not number > 0:
            raise ValueError(f"compute_mfu: {name} is {number}, expected above 0")
    return flops / (seconds * peak * ranks)


PHASES = ("rollout", "reward", "update")
# Edges of the histogram of advantages; the outer bins have no end.
EDGES = (-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
# Diagnostics that are not split: the log-ratio has the same information.
WHOLE = {"ratio", "log_ratio"}


def summarize_update(
    run: Run,
    batch: Batch,
    updates: Sequence[UpdateInfo],
    seconds: Mapping[str, float],
    *,
    samples: int,
    compiled: int | None,
    peak: float | None,
) -> dict[str, Any]:
    """Return the record of a batch and its optimizer updates; most numbers are those of the last update.

    Args:
        run: run whose notes go into the record: advantages, correction, padding, and values logged by the method.
        updates: diagnostics of each optimizer update.
        seconds: seconds of each phase.
        samples: number of samples so far.
        compiled: number of programs compiled during the update; None without compilation.
        peak: peak FLOP/s of this rank's device; None if unknown.
    """
    engine, method, notes = run.engine, run.config.method, dict(run.notes)
    advantage, correction = notes.pop("advantage", None), notes.pop("correction", None)
    padding = notes.pop("padding", batch.spec.padding)  # None if prompts are not trimmed
    first, last, size = updates[0], updates[-1], batch.spec.size
    kinds = ("allocated", "reserved") if len(last.memory) == 2 else ("resident",)
    record = {
        "update": engine.updates,
        "samples": samples,
        "loss": last.loss,
        "grad_norm": last.grad_norm,
        "lr": last.lr,
        "objective": last.mean,
        "pairs": sum(update.items for update in updates),
        "first_pass_max_abs_log_ratio": first.max_abs.get("log_ratio"),
        "correction": correction and dict(zip(correction._fields, torch.stack(list(correction)).tolist(), strict=True)),
        "size": size and size._asdict(),
        "text": padding and {"tokens": padding.tokens, "padding_waste": padding.waste, "saved": padding.saved},
        **summarize_parts(last.parts, steps=method.recorded is not None),
        **summarize_rewards(run, batch),
        **(summarize_advantages(advantage) if run.rewards else {}),
        **{name: value for name, value in notes.items() if name != "diversity"},
        **({"multipliers": dict(run.memory.multipliers)} if run.memory.multipliers else {}),
        "speed": measure_speed(run, batch, updates, seconds, peak),
        # The peak since the start, largest of the ranks, in GiB: allocated and reserved on GPUs, else resident.
        "memory": {name: size / 2**30 for name, size in zip(kinds, last.memory, strict=True)},
        "skipped_steps": engine.skipped,
        "loss_scale": engine.scale if run.config.engine.compute == "float16" else None,
        "seconds": dict(seconds),
        "compiled_programs": compiled,
        "diversity": notes.get("diversity"),
    }
    return {name: value for name, value in record.items() if value is not None}


def summarize_rewards(run: Run, batch: Batch) -> dict[str, Any]:
    """Return the record of a rollout's rewards, over the samples that are trained on; empty without rewards.

    Their mean, without rewards that have a floor, is also given per tag and per source of the prompts.
    """
    names, scored, requested = list(run.rewards), batch.rewards, batch.spec.asked
    if not names or scored is None:
        return {}
    rewards = scored.scores[scored.kept]
    weights = learnt_weights(run.runners.weights, names, dict.fromkeys(run.memory.multipliers, 0.0))
    kept: list[int] = torch.nonzero(scored.kept).flatten().tolist()
    prompts = [requested[i * len(requested) // len(scored.scores)] for i in kept] if requested else []
    total = weigh_rewards(rewards, weights)
    record: dict[str, Any] = {"reward": {"mean": total.mean().item(), "std": total.std().item()}}
    if len(names) > 1:
        record["rewards"] = dict(zip(names, rewards.mean(0).tolist(), strict=True))
    if scored.parts:
        record["reward_parts"] = scored.parts
    record |= {"invalid": scored.invalid, **split_scores(total[:, None], prompts, ["reward"])}
    return record | summarize_groups(rewards, weights, batch.spec.group)


def summarize_groups(rewards: Tensor, weights: Tensor, group: int) -> dict[str, Any]:
    """Return the spread of rewards `[B, K]` within groups of consecutive samples; empty without rewards or groups.

    `reward_std` is the mean over the groups of the standard deviation of the weighted sum. `without_signal` is the share of
    groups whose samples all have the same rewards, and so equal advantages.
    """
    if group < 2 or not rewards.numel():
        return {}
    by_group = rewards.unflatten(0, (-1, group))
    equal = (by_group.amax(1) == by_group.amin(1)).all(1)
    return {
        "groups": {
            "reward_std": weigh_rewards(by_group, weights).std(1).mean().item(),
            "without_signal": equal.to(rewards.dtype).mean().item(),
        }
    }


def summarize_advantages(advantage: Tensor | None) -> dict[str, Any]:
    """Return the distribution of advantages `[B]`: share of zeros, standard deviation, largest size, and a histogram.

    The histogram is the share of samples per bin, keyed by the bin's lower edge (inclusive).
    """
    if advantage is None or not len(advantage):
        return {}
    bins = torch.bucketize(advantage, torch.tensor(EDGES, dtype=advantage.dtype), right=True)
    shares = (torch.bincount(bins, minlength=len(EDGES) + 1) / len(advantage)).tolist()
    return {
        "advantage": {
            "zero": (advantage == 0).float().mean().item(),
            "std": advantage.std(correction=0).item(),
            "max_abs": advantage.abs().max().item(),
            "histogram": dict(zip(["below", *(f"{edge:g}" for edge in EDGES)], shares, strict=True)),
        }
    }


def summarize_parts(parts: PartNumbers | None, *, steps: bool) -> dict[str, Any]:
    """Return the diagnostics per recorded step, or per tenth of the noise levels; empty parts are left out.

    Args:
        parts: diagnostics of an update, split by the `parts` of its items.
        steps: whether the parts are steps, not noise levels.
    """
    if parts is None:
        return {}
    filled = {str(i) if steps else f"{i / TENTHS:g}": i for i, count in enumerate(parts.items) if count}
    means = {name: numbers for name, numbers in parts.mean.items() if name not in WHOLE}
    if "log_ratio" in parts.mean_abs:
        means["abs_log_ratio"] = parts.mean_abs["log_ratio"]
    split = {name: {part: numbers[i] for part, i in filled.items()} for name, numbers in means.items()}
    return {"by_step" if steps else "by_level": split} if filled else {}


def measure_speed(
    run: Run, batch: Batch, updates: Sequence[UpdateInfo], seconds: Mapping[str, float], peak: float | None
) -> dict[str, float]:
    """Return samples per second of rollout and updates, and model FLOP/s of the updates.

    FLOPs are this rank's, also as a fraction of the device's peak (`mfu`) if that is known. `trainer_idle` is the share of
    time outside the phase update. Seconds of reward computation are split into those that overlapped with the rollout
    (`reward_hidden`) and those that this rank waited for (`reward_waited`).

    Args:
        updates: diagnostics of the updates on the batch.
        seconds: seconds of each phase.
        peak: peak FLOP/s of the device; None if unknown.
    """
    flops, rewards = sum(update.flops for update in updates), batch.rewards
    total = sum(seconds.values())
    numbers = {
        "samples_per_second": batch.samples / total,
        "update_flops": flops / seconds["update"],
        "trainer_idle": 1 - seconds["update"] / total,
    }
    if peak is not None:
        numbers["mfu"] = compute_mfu(flops, seconds["update"], peak=peak, ranks=1)
    if run.rewards and rewards is not None:
        numbers |= {"reward_hidden": max(rewards.computed - rewards.waited, 0.0), "reward_waited": rewards.waited}
    return numbers


def select_shown(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record for the progress line."""
    reward = {"reward": record["reward"]["mean"]} if "reward" in record else {}
    names = {"ratio": "ratio", "kl_ref": "KL", "clipped": "clipped", "error": "error", "accuracy": "accuracy"}
    return reward | {label: record["objective"][name] for name, label in names.items() if name in record["objective"]}


def summarize_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    """Return the record of an evaluation: per evaluator, per source and per tag."""
    numbers: dict[str, Any] = {
        "score": evaluation.score,
        "exact": evaluation.exact,
        "drift": evaluation.velocity_drift,
        **evaluation.split,
    }
    if evaluation.invalid:
        numbers["invalid"] = {"samples": evaluation.invalid}
    summary = average_over_tags(evaluation.scores)
    return {**numbers, "overall": summary} if summary else numbers


def format_evaluation(when: str, evaluation: Evaluation) -> str:
    """Format an evaluation as a line for the console."""
    if not evaluation.score:
        return f"{when}: held-out samples, not scored: set `evaluation.rewards` to score them"
    exactly = any(evaluation.exact.values())
    numbers = evaluation.exact if exactly else evaluation.score
    parts = (f"{number:.3f} by the {evaluator} evaluator" for evaluator, number in numbers.items())
    return f"{when}: {'exactly right' if exactly else 'score'} on held-out prompts {', '.join(parts)}"


def format_title(name: str, evaluation: Evaluation) -> str:
    """Format the title of an evaluation's images, with the last evaluator's score of all samples."""
    if not evaluation.exact:
        return name
    evaluator, right = list(evaluation.exact.items())[-1]
    score = (
        f"{right:.0%} of held-out prompts exactly right" if right else f"{evaluation.score[evaluator]:.3f} by {evaluator}"
    )
    return f"{name}: {score}"


def tabulate_before_after(before: Mapping[str, Mapping[str, float]], after: Evaluation) -> Table:
    """Return the table of an evaluation before and after training."""
    final = {"exact": after.exact, "score": after.score}
    rows = {
        f"{label}, by the {evaluator} evaluator": (f"{before[part][evaluator]:.3f}", f"{final[part][evaluator]:.3f}")
        for part, label in (("exact", "exactly right"), ("score", "score"))
        for evaluator in final[part]
        if evaluator in before[part]  # a resumed run may have other evaluators
        and (part == "score" or after.exact[evaluator] or before["exact"][evaluator])
    }
    return table(f"held-out prompts, {after.samples} samples", ("before", "after"), rows)


def flatten_before_after(before: Mapping[str, Mapping[str, float]], after: Evaluation) -> dict[str, float]:
    """Return an evaluation before and after training as the flat fields of a summary."""
    return {
        **{f"{evaluator}_exact_before": right for evaluator, right in before["exact"].items()},
        **{f"{evaluator}_exact_after": right for evaluator, right in after.exact.items()},
        **{f"{evaluator}_score_before": score for evaluator, score in before["score"].items()},
        **{f"{evaluator}_score_after": score for evaluator, score in after.score.items()},
        "eval_samples": after.samples,
    }


def list_versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on."""
    packages = ("fluvial", "torch", "diffusers", "peft", "scikit-learn")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
