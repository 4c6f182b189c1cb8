"""Scores split by the sources and the tags of their prompts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fluvial.engines.data.records import Prompt

Split = dict[str, dict[str, dict[str, float]]]


def split(scores: Tensor, prompts: Sequence[Prompt], names: Sequence[str]) -> Split:
    """Return the mean scores of each source and of each tag, with the number of samples.

    The result is {"sources": {source: {name: mean, ..., "samples": n}}, "tags": {tag: ...}}. A single source is the whole,
    and is left out, and so are prompts without a tag.

    Args:
        scores: `[B, K]`, on the host.
        prompts: prompt of each sample, `[B]`.
        names: name of each score, `[K]`.
    """
    by_kind: Split = {}
    for kind, labels in (("sources", [each.source for each in prompts]), ("tags", [each.tag for each in prompts])):
        parts: dict[str, list[int]] = {}
        for place, label in enumerate(labels):
            if label is not None:
                parts.setdefault(label, []).append(place)
        if len(parts) > 1 or (parts and kind == "tags"):
            by_kind[kind] = {
                label: {**dict(zip(names, scores[torch.tensor(rows)].mean(0).tolist(), strict=True)), "samples": len(rows)}
                for label, rows in sorted(parts.items())
            }
    return by_kind
