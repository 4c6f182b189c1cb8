"""Checkpoints that two ranks save are loaded on one, two and four."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.saved_checkpoints import FINGERPRINT
from torch.distributed.tensor import Shard, distribute_tensor
from workers.saving import whole

from fluvial.engines.engine.world import World
from fluvial.engines.run.checkpoint import checkpoint


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder that two ranks saved checkpoints to, and what these and the four that loaded them say."""
    folder = tmp_path_factory.mktemp("ranks") / "checkpoints"
    return folder, launch.call("workers.saving:save", folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("000001", 1.0), ("000002", 2.0)])
def test_two_ranks_save_and_one_process_loads(
    ranks: tuple[Path, dict[str, Any]], one: World, name: str, value: float
) -> None:
    """The same bits, sharded and not, of a save that was waited for and of one in the background."""
    path = ranks[0] / name
    assert len([*path.glob("*.safetensors")]) == 2
    plain = {key: torch.zeros_like(tensor) for key, tensor in whole(value).items()}
    checkpoint.load(path, plain, fingerprint=FINGERPRINT, world=one)
    sharded = {key: distribute_tensor(torch.zeros_like(t), one.mesh, [Shard(0)]) for key, t in whole(value).items()}
    checkpoint.load(path, {**sharded}, fingerprint=FINGERPRINT, world=one)
    for key, tensor in whole(value).items():
        assert torch.equal(plain[key], tensor)
        assert torch.equal(sharded[key].full_tensor(), tensor)


@pytest.mark.slow
def test_two_ranks_save_and_four_load(ranks: tuple[Path, dict[str, Any]]) -> None:
    """Each fills its own shards, some of them empty."""
    assert ranks[1]["wrong on four"] == [[]] * 4
    assert ranks[1]["wrong on two"] == [[]] * 2


@pytest.mark.slow
def test_damage_is_refused_on_all_ranks(ranks: tuple[Path, dict[str, Any]]) -> None:
    """By the rank that saw it, with the newest whole one."""
    messages = ranks[1]["damaged"]
    named = [message for message in messages if "is damaged" in message]
    assert len(named) == 1
    assert f"set checkpoint.resume_from to {ranks[0] / '000002'}" in named[0]
    assert sum(message.startswith("ElsewhereError") for message in messages) == 3


@pytest.mark.slow
@pytest.mark.parametrize("where", ["foreground", "background"])
def test_a_failure_of_one_rank_is_reported_on_both(ranks: tuple[Path, dict[str, Any]], where: str) -> None:
    """As a RunError on each, and without a trace in the folder."""
    messages = ranks[1][f"failed in the {where}"]
    reason = f"checkpoint {ranks[0] / '000003'} could not be saved: the disk is full; earlier checkpoints are unchanged"
    assert sum(reason in message for message in messages) >= 1
    assert all(reason in message or "failed; its own message says why" in message for message in messages)
    assert len(messages) == 2
    assert ranks[1]["found"] == ["000001", "000002"]


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_background_leaves_the_earlier_ones(ranks: tuple[Path, dict[str, Any]]) -> None:
    """The other rank is told that it is alone, and the next save clears up."""
    killed = ranks[1]["killed"]
    assert killed["survivor"].startswith("LostProcessError")
    assert killed["listed"] == ["000001", "000002"]
    assert killed["wrong"] == []
    assert killed["found after the next"] == ["000001", "000002", "000004"]
