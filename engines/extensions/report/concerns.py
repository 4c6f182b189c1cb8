"""Warnings about a run, from its records."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

Record = Mapping[str, Any]
WITHOUT_SIGNAL = 0.5  # share of groups
LESS_DIVERSE = 0.5  # of the diversity at the start
SAME_POLICY = 1e-6  # |log ratio| of a first pass


def concerns(config: Record, records: Sequence[Record], summary: Record) -> Iterator[str]:
    """Yield what is worth a look in a run, a sentence each; the summary is empty if it has not ended."""
    updates = [record for record in records if "grad_norm" in record]
    if not summary:
        done = max((record["update"] for record in records), default=0)
        yield f"The run has not ended: {done} of {config.get('updates')} updates are recorded."
    if not updates:
        return
    if skipped := updates[-1].get("skipped_steps"):
        yield f"{skipped} steps were skipped, because their gradient was not finite."
    ratio = max((record.get("first_pass_max_abs_log_ratio") or 0.0 for record in updates), default=0.0)
    if ratio > SAME_POLICY:
        yield f"The largest |log ratio| of a first pass is {ratio:.2g}: rollout and update computed different policies."
    late = updates[-max(len(updates) // 4, 1) :]
    empty = [record["groups"]["without_signal"] for record in late if "groups" in record]
    if empty and fmean(empty) > WITHOUT_SIGNAL:
        yield (
            f"{fmean(empty):.0%} of the groups in the last quarter have samples of equal reward, and teach nothing: harder "
            "prompts or a finer reward would."
        )
    spread = [record["diversity"] for record in updates if isinstance(record.get("diversity"), float)]
    if len(spread) > 1 and spread[-1] < LESS_DIVERSE * spread[0]:
        yield f"Samples of a group became more alike: their distance fell from {spread[0]:.3g} to {spread[-1]:.3g}."
    yield from _hacking(updates, [record for record in records if "exact" in record])


def _hacking(updates: Sequence[Record], evaluations: Sequence[Record]) -> Iterator[str]:
    """Yield the evaluators whose score fell while the reward rose."""
    rewards = [record["reward"]["mean"] for record in updates if (record.get("reward") or {}).get("mean") is not None]
    quarter = max(len(rewards) // 4, 1)
    if len(evaluations) < 2 or len(rewards) < 2 or fmean(rewards[-quarter:]) <= fmean(rewards[:quarter]):
        return
    for name, before in evaluations[0]["score"].items():
        after = evaluations[-1]["score"].get(name)
        if None not in (before, after) and after < before:
            yield (
                f"The reward rose while the {name} evaluator's score fell from {before:.3f} to {after:.3f}, as in reward "
                "hacking."
            )
