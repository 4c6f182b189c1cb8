"""The folder of votes: what is voted is on the disk, what a crash cut short is not counted, and dpo reads it as it is."""

import json
import os
from pathlib import Path

import pytest
import torch

from fluvial.engines.data.preferences import read_preferences
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.judges.batches import encode_png
from fluvial.engines.extensions.votes.records import Vote, VoteFolder, hash_group, name_image

IMAGES = [encode_png(torch.full((1, 4, 4), level), colour=False) for level in (0.0, 0.4, 0.8)]
GROUP = hash_group("a fox", IMAGES)
VOTES = [Vote(GROUP, 3, (0, 1), 1.0, "ann"), Vote(GROUP, 3, (2, 1), 0.0, "bob"), Vote(GROUP, 3, (0, 2), 0.5, "ann")]


def voted(folder: Path) -> VoteFolder:
    found = VoteFolder(folder)
    found.keep_images(GROUP, IMAGES)
    for vote in VOTES:
        found.append(vote, "a fox")
    return found


def test_votes_are_there_after_a_restart(tmp_path: Path) -> None:
    """As preferences, too. A group is its prompt and its images; a folder has one server."""
    voted(tmp_path).close()
    again = VoteFolder(tmp_path)
    assert again.votes == VOTES
    assert [(tmp_path / name_image(GROUP, number)).read_bytes() for number in range(3)] == IMAGES
    with pytest.raises(UsageError, match="another server writes votes to"):
        VoteFolder(tmp_path)
    again.close()
    pairs = read_preferences(tmp_path, encode=lambda images: images, shape=(1, 4, 4), check=lambda text: None)
    levels = [[round(float(sample.mean()), 1) for sample in (pair.win, pair.lose)] for pair in pairs]
    assert levels == [[0.0, 0.4], [0.4, 0.8]]
    assert {pair.prompt.text for pair in pairs} == {"a fox"}
    assert len({GROUP, hash_group("a fo", IMAGES), hash_group("a fox", IMAGES[::-1]), hash_group("a fox", IMAGES[:2])}) == 4
    assert hash_group("a fox", list(IMAGES)) == GROUP


def test_a_voter_takes_back_their_own_votes(tmp_path: Path) -> None:
    folder = voted(tmp_path)
    assert folder.undo("ann") == VOTES[2]
    assert folder.undo("ann") == VOTES[0]
    assert folder.undo("ann") is None
    folder.append(VOTES[2], "a fox")
    folder.close()
    assert VoteFolder(tmp_path).votes == [VOTES[1], VOTES[2]]


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_a_crash_cut_short_does_not_count(tmp_path: Path, cut: int) -> None:
    voted(tmp_path).close()
    file = tmp_path / "preferences.jsonl"
    os.truncate(file, file.stat().st_size - cut)
    folder = VoteFolder(tmp_path)
    assert folder.votes == VOTES[:2]
    folder.append(VOTES[0], "a fox")
    folder.close()
    assert VoteFolder(tmp_path).votes == [*VOTES[:2], VOTES[0]]


def test_a_vote_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be written leaves no trace, on the disk or in memory."""
    folder, synced = voted(tmp_path), list[int]()
    before = (tmp_path / "preferences.jsonl").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(len(folder.votes)))
    folder.append(VOTES[0], "a fox")
    assert synced == [3]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="cannot be written: No space left"):
        folder.append(VOTES[1], "a fox")
    assert len(folder.votes) == 4
    assert (tmp_path / "preferences.jsonl").read_bytes().count(b"\n") == 4
    assert (tmp_path / "preferences.jsonl").read_bytes().startswith(before)


def test_preferences_that_are_no_votes_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "preferences.jsonl"
    file.write_text(json.dumps({"prompt": "a", "win": "a.png", "lose": "b.png"}) + "\n")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"preferences.jsonl, line 1 is not a vote: choose a folder of votes"):
            VoteFolder(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="votes cannot be written to"):
        VoteFolder(tmp_path / "file")
