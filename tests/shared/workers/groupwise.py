"""Scores groups of samples that are spread over ranks, for test_runner.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fluvial.engines.data.records import as_prompts
from fluvial.engines.engine.world import World
from fluvial.engines.sampling.generate import assign_slots
from fluvial.engines.scoring.gather import gather_rewards
from fluvial.engines.scoring.runner import RewardRunners


def scores(world: World, prompts: int, group: int, micro_batch: int) -> dict[str, Any]:
    """Return the rewards of a rollout whose sample `i` has images and latents of value i, and the groups scored here."""
    called: list[int] = []

    def rank(images: Tensor, prompts: Sequence[str], group: int, latents: Tensor) -> dict[str, Any]:
        assert len(images) == len({*latents[:, 0].tolist()}) == len(prompts)
        assert {*prompts} == {f"prompt {group}"}
        called.append(group)
        bright = images.mean((1, 2, 3))
        assert torch.equal(bright, latents[:, 0])
        return {"score": (bright[:, None] > bright).float().sum(1), "group": [float(group)] * len(prompts)}

    def bright(images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.mean((1, 2, 3))

    batch = prompts * group
    ids, real = assign_slots(batch, micro_batch=micro_batch, world=world)
    numbers = [number if counts else -1 for number, counts in zip(ids, real, strict=True)]
    runners = RewardRunners({"rank": (rank, 1.0), "bright": (bright, 1.0)}, group=group)
    for start in range(0, len(ids), micro_batch):
        part = slice(start, start + micro_batch)
        values = torch.tensor([float(i) for i in ids[part]])
        texts = [f"prompt {i // group}" for i in ids[part]]
        runners.submit(values[:, None, None, None].expand(-1, 1, 2, 2), as_prompts(texts), values[:, None], numbers[part])
    runners.exchange(world)
    own = runners.collect(batch=batch)
    runners.close()
    found, _ = gather_rewards(own, stop=False, group=group, max_invalid=0.0, world=world)
    return {"scores": found.scores.tolist(), "invalid": found.invalid, "parts": found.parts, "called": called}
