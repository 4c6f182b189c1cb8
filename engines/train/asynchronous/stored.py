"""Rollouts in a checkpoint: whole tensors of all samples, so that a run goes on with them on any number of ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluvial.core.rollout import Trajectory
from fluvial.engines.fsdp.world import World
from fluvial.engines.rewards.runner import Collected
from fluvial.engines.rollout.generate import SampleBatch, joined
from fluvial.engines.train.rollouts import RolloutPlan
from fluvial.models import DiffusionModel

PREFIX = "ahead."  # of the names of their tensors
FIELDS = ("x", "x_next", "steps", "log_prob", "velocity", "final")  # of a trajectory, each `[B, ...]`


def packed(batch: SampleBatch, found: Collected, samples: int, world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a rollout as tensors, and as values that JSON can hold; every rank must take part.

    Conditioning is left out: prompts are encoded again.

    Memory on the host, per rank: the samples of all ranks.

    Args:
        batch: samples of this rank.
        found: what its rewards say of them.
        samples: number of samples of all ranks.
    """
    rows: dict[str, Tensor | None] = {name: getattr(batch.trajectory, name) for name in FIELDS}
    rows["thumbnails"] = batch.thumbnails
    # A sample's score is 0 on all ranks but one. The ranks of a group have the same samples.
    scores = world.gather(found.scores[None].to(world.device))[:: world.sequence].sum(0)
    tensors = {
        name: world.gather_data(tensor.contiguous())[:samples].cpu() for name, tensor in rows.items() if tensor is not None
    }
    tensors["scores"] = scores.cpu()
    said = world.gather_items((found.parts, found.problems))[:: world.sequence]
    parts: dict[str, dict[str, float]] = {}
    for own, _ in said:
        for name, values in own.items():
            parts.setdefault(name, {}).update({str(place): value for place, value in values.items()})
    # A file holds no tensor without values, so its shape stands here.
    empty = {name: [*tensor.shape] for name, tensor in tensors.items() if not tensor.numel()}
    meta = {
        "parts": parts,
        "problems": [line for _, lines in said for line in lines],
        "computed": found.computed,
        "waited": found.waited,
        "empty": empty,
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor.numel()}, meta


def unpacked(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    plan: RolloutPlan,
    model: DiffusionModel,
    micro_batch: int,
    world: World,
) -> tuple[SampleBatch, Collected]:
    """Return this rank's samples of a rollout as `packed` returned it, and what its rewards say of them.

    Args:
        tensors, meta: what `packed` returned, perhaps on another number of ranks.
        model: model that prompts are encoded with.
        micro_batch: number of samples per chunk.
    """
    device, ids, texts = world.device, torch.tensor([*plan.requests.ids]), plan.requests.prompts
    whole = {**tensors, **{name: torch.empty(shape) for name, shape in meta["empty"].items()}}
    parts = list[SampleBatch]()
    for start in range(0, len(ids), micro_batch):
        rows, prompts = ids[start : start + micro_batch], texts[start : start + micro_batch]
        own = {name: whole[name][rows].to(device) for name in (*FIELDS, "thumbnails") if name in whole}
        cond = plan.sampling.encode(model, prompts)
        trajectory = Trajectory(
            own["x"], own["x_next"], own["steps"].long(), own["log_prob"], own.get("velocity"), own["final"], None
        )
        parts.append(SampleBatch(prompts, cond, trajectory, own.get("thumbnails")))
    batch = joined(parts)
    if not world.is_main:  # one rank has the scores of all samples
        return batch, Collected(torch.zeros_like(whole["scores"]), {}, [], meta["computed"], meta["waited"])
    said = {name: {int(place): value for place, value in values.items()} for name, values in meta["parts"].items()}
    return batch, Collected(whole["scores"], said, list(meta["problems"]), meta["computed"], meta["waited"])
