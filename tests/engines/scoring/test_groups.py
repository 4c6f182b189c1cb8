"""Whole groups for rewards that compare samples, however the samples are cut into chunks and spread over ranks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import launch
from torch import Tensor

from fluvial.engines.data.records import Prompt
from fluvial.engines.scoring.runner import GroupBuffer, RewardRunners
from fluvial.engines.scoring.signature import Samples


def samples(ids: Sequence[int], size: int) -> Samples:
    """Return samples whose image, prompt and latent say their number."""
    numbers = torch.tensor([float(i) for i in ids])
    images = numbers[:, None, None, None].expand(len(ids), 1, 2, 2)
    return Samples(images, [Prompt(f"prompt {i // size}") for i in ids], numbers[:, None])


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 12])
def test_groups_are_whole_whatever_the_chunks(chunk: int) -> None:
    """Each is started once, when its last sample is there."""
    buffer, found = GroupBuffer(4), list[Samples]()
    for start in range(0, 12, chunk):
        ids = list(range(start, min(start + chunk, 12)))
        found += buffer.add(samples(ids, 4), ids)
        assert len(found) == (ids[-1] + 1) // 4
    assert [group.group for group in found] == [0, 1, 2]
    for number, group in enumerate(found):
        assert group.images[:, 0, 0, 0].tolist() == [4 * number + i for i in range(4)]
        assert group.prompts == [Prompt(f"prompt {number}")] * 4
        assert group.latents is not None
        assert group.latents[:, 0].tolist() == group.images[:, 0, 0, 0].tolist()


def rank_in_group(images: Tensor, prompts: Sequence[str], group: int) -> dict[str, Any]:
    """Score each sample by how many of its group it is brighter than."""
    assert len({*prompts}) == 1
    bright = images.mean((1, 2, 3))
    return {"score": (bright[:, None] > bright).float().sum(1), "group": [float(group)] * len(prompts)}


def test_a_reward_of_groups_beside_one_of_samples() -> None:
    """Both columns are in the order of the samples; a group without a score is invalid as a whole."""

    def picky(images: Tensor, prompts: Sequence[str], group: int) -> Tensor:
        if group == 1:
            raise ValueError("no group of mine")
        return images.mean((1, 2, 3))

    rewards: Any = {"rank": (rank_in_group, 1.0), "bright": (lambda x, p: x.mean((1, 2, 3)), 1.0), "picky": (picky, 1.0)}
    runners = RewardRunners(rewards, group=4)
    for ids in ([0, 1, 2], [3, 4, 5], [6, 7, -1]):
        runners.submit(*samples(ids, 4)[:3], ids=ids)
    found = runners.collect()
    runners.close()
    assert found.scores[:8, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert found.scores[:8, 1].tolist() == list(range(8))
    assert found.scores[:4, 2].tolist() == [0, 1, 2, 3]
    assert found.scores[4:8, 2].isnan().all()
    assert found.problems == ["reward 'picky' raised ValueError (no group of mine) for prompt 'prompt 1'"]
    assert found.parts["rank/group"] == {i: i // 4 for i in range(8)}


@pytest.mark.parametrize(("ranks", "prompts", "group", "micro_batch"), [(2, 3, 4, 2), (3, 2, 5, 1)])
def test_groups_on_several_ranks_are_those_of_one(ranks: int, prompts: int, group: int, micro_batch: int) -> None:
    """A group that lies on several ranks is scored once, and every rank has all scores."""
    batch = prompts * group
    found = launch.on_ranks(ranks, "workers.groupwise:scores", prompts, group, micro_batch)
    for rank in found:
        assert rank["scores"] == [[i % group, i] for i in range(batch)]
        assert rank["invalid"] == {"samples": 0, "groups": 0}
        assert rank["parts"] == {"rank": {"group": pytest.approx(sum(i // group for i in range(batch)) / batch)}}
    assert sorted(number for rank in found for number in rank["called"]) == list(range(prompts))
