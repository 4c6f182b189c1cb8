"""The server of votes: who is shown which comparison, what a vote counts for, and who is let in."""

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import asgi

from fluvial.engines.extensions.judges.batches import encode_png, to_base64
from fluvial.engines.extensions.votes.records import VoteFolder
from fluvial.engines.extensions.votes.service import PAGE, POLICY, VoteService, application, choose_pairs

KEY = "a-key"
BEARER = {"authorization": f"Bearer {KEY}"}


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.clock = Clock()
        self.service = VoteService(VoteFolder(folder), clock=self.clock, **options)
        self.app = application(self.service, key=KEY)

    def answer(self, path: str, value: Any = None, **headers: str) -> asgi.Answer:
        return asyncio.run(asgi.call(self.app, path, value, headers={**BEARER, **headers}))

    def ask(self, path: str, **value: Any) -> Any:
        found = self.answer(path, value)
        assert found.status == 200, found
        return found.value

    def group(self, count: int = 3, prompt: str = "a fox", first: int = 0) -> Any:
        return self.ask("/groups", prompt=prompt, images=images(count, first))

    def vote(self, voter: str, score: float, shown: Any = None) -> Any:
        pair = shown or self.ask("/next", voter=voter)["pair"]
        return self.ask("/vote", voter=voter, group=pair["group"], pair=pair["pair"], score=score)


def images(count: int, first: int = 0) -> list[str]:
    return [to_base64(encode_png(torch.full((1, 4, 4), (first + level) / 20), colour=False)) for level in range(count)]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_every_image_is_compared_and_none_with_itself(tmp_path: Path) -> None:
    """Twice per round, or once in a group of two; the first round connects all images; the order depends on the group."""
    for size, rounds in ((2, 1), (2, 3), (3, 1), (4, 2), (8, 1), (8, 4), (9, 3)):
        pairs = choose_pairs(size, rounds, "a")
        assert all(0 <= i < j < size for i, j in pairs)
        counts = Counter(itertools.chain(*pairs))
        assert set(counts.values()) == {rounds * (1 if size == 2 else 2)}
        reached = {0}
        for _ in range(size):
            reached |= {number for pair in pairs[:size] for number in pair if reached & set(pair)}
        assert len(reached) == size
    assert choose_pairs(9, 1, "a") != choose_pairs(9, 1, "b")
    assert Server(tmp_path, rounds=3).group(4)["wanted"] == 12


def test_votes_are_counted(server: Server) -> None:
    """The first image of a pair is preferred with 1, the second with 0; a tie is half a win of both."""
    state = server.group()
    assert (state["done"], state["wanted"]) == (0, 3)
    wins = [[0.0] * 3 for _ in range(3)]
    for score in (1, 0, 0.5):
        shown = server.ask("/next", voter="ann")["pair"]
        assert shown["prompt"] == "a fox"
        (i, j), found = shown["pair"], server.vote("ann", score)
        wins[i][j], wins[j][i] = score, 1 - score
    assert found["pair"] is None
    assert found["progress"] == {"made": 3, "wanted": 3, "groups": 1, "complete": 1, "own": 3}
    (state,) = server.ask("/votes", groups=[state["group"]])["groups"].values()
    assert (state["done"], state["wins"]) == (3, wins)
    assert server.ask("/votes", groups=["unknown"]) == {"groups": {"unknown": None}}


def test_several_voters_share_the_work(server: Server) -> None:
    """Nobody sees the pair that another looks at, until the other has been away for two minutes; a reload shows the same."""
    server.group(4)
    shown = [server.ask("/next", voter=voter)["pair"] for voter in ("ann", "bob", "cid", "dan")]
    assert len({frozenset(pair["pair"]) for pair in shown}) == 4
    assert server.ask("/next", voter="ann")["pair"] == shown[0]
    assert server.ask("/next", voter="eve")["pair"] is None
    server.clock.now = 59
    server.group(4)
    server.clock.now = 121
    server.group(4)
    assert server.ask("/next", voter="eve")["pair"] is not None


def test_which_side_an_image_is_on_is_even(server: Server) -> None:
    flipped = 0
    for number in range(100):
        server.group(2, prompt=f"prompt {number}")
        pair = server.ask("/next", voter="ann")["pair"]["pair"]
        flipped += pair == [1, 0]
        server.vote("ann", 1)
    assert 25 < flipped < 75  # outside with a probability below 1e-6


def test_undo_shows_the_comparison_again(server: Server) -> None:
    server.group()
    first, other = (server.ask("/next", voter=voter)["pair"] for voter in ("ann", "bob"))
    server.vote("ann", 1)
    server.vote("bob", 1)
    found = server.ask("/undo", voter="ann")
    assert found["undone"]
    assert found["pair"] == first
    assert found["progress"]["made"] == 1
    assert server.vote("ann", 0)["progress"]["made"] == 2
    i, j = first["pair"]
    wins = server.group()["wins"]
    assert (wins[i][j], wins[j][i]) == (0, 1)
    i, j = other["pair"]
    assert (wins[i][j], wins[j][i]) == (1, 0)
    assert not server.ask("/undo", voter="cid")["undone"]


def test_votes_count_after_a_restart(server: Server, tmp_path: Path) -> None:
    """Of the same images for the same prompt; who asks again is told what is known."""
    server.group()
    server.vote("ann", 1)
    before = server.group()
    server.service.folder.close()
    again = Server(tmp_path)
    assert again.ask("/votes", groups=[before["group"]])["groups"] == {before["group"]: None}
    assert again.group() == before
    assert again.group(prompt="an ox")["done"] == 0


def test_a_group_that_no_run_asks_for_is_not_shown(server: Server) -> None:
    name = server.group()["group"]
    server.vote("ann", 1)
    server.clock.now = 61
    assert server.ask("/next", voter="ann")["pair"] is None
    server.ask("/votes", groups=[name])
    assert server.ask("/next", voter="ann")["pair"] is not None
    assert server.ask("/next", voter="ann")["progress"]["made"] == 1


def test_images_are_sent_as_they_came_and_equal_ones_need_no_vote(server: Server, tmp_path: Path) -> None:
    """As those that a reward is tried on before a run; nothing of them is kept."""
    state = server.ask("/groups", prompt="a", images=images(1) * 4)
    assert (state["done"], state["wanted"]) == (0, 0)
    nothing = {"made": 0, "wanted": 0, "groups": 0, "complete": 0, "own": 0}
    assert server.ask("/next", voter="ann") == {"pair": None, "progress": nothing}
    assert not list((tmp_path / "images").iterdir())
    name = server.group()["group"]
    found = server.answer("/image", {"group": name, "number": 2})
    assert found.headers["content-type"] == "image/png"
    assert to_base64(found.value) == images(3)[2]
    for wrong in ({"group": name, "number": 3}, {"group": "../preferences", "number": 0}):
        assert server.answer("/image", wrong).status == 404


def test_what_is_no_request_is_one_line(server: Server) -> None:
    """And what is no vote is not counted."""
    name, vote = server.group()["group"], {"voter": "ann", "pair": [0, 1], "score": 1}
    wrong: list[tuple[str, Any, int, str]] = [
        ("/groups", {"prompt": "a", "images": ["AAAA", "AAAA"]}, 400, "an image is not a PNG file"),
        ("/groups", {"prompt": "a", "images": ["no base64", ""]}, 400, "an image is not a PNG file"),
        ("/groups", {"prompt": "a", "images": images(1)}, 400, "images"),
        ("/next", {"voter": ""}, 400, "voter"),
        ("/next", {"voter": "a" * 61}, 400, "voter"),
        ("/vote", {**vote, "group": "none"}, 404, "no run has asked for this group"),
        ("/vote", [], 400, "the body"),
        ("/vote", {**vote, "group": name, "score": 0.7}, 400, "0.7, expected 1, 0 or 0.5"),
        ("/vote", {**vote, "group": name, "pair": [1, 1]}, 400, "expected two of 3"),
        ("/vote", {**vote, "group": name, "pair": [0, 3]}, 400, "two of 3"),
    ]
    for path, value, status, says in wrong:
        found = server.answer(path, value)
        assert (found.status, says in found.value["detail"]) == (status, True), found.value
        assert "\n" not in found.value["detail"]
    assert server.group()["done"] == 0
    assert server.service.folder.votes == []


def test_who_has_the_key_is_let_in(server: Server) -> None:
    """The page itself needs none, and holds nothing; a page elsewhere gets no answer even with the key."""
    for path in ("/next", "/vote", "/undo", "/image", "/groups", "/votes"):
        assert asyncio.run(asgi.call(server.app, path, {"voter": "ann"})).status == 401
        assert server.answer(path, {}, authorization="Bearer another").status == 401
        assert server.answer(path, {}, origin="http://evil.example").status == 403
    assert server.answer("/next", {"voter": "ann"}, origin="http://127.0.0.1:1").status == 200
    assert server.answer("/next", {"voter": "ann"}, **{"content-type": "text/plain"}).status == 415
    found = asyncio.run(asgi.call(server.app, "/"))
    assert (found.status, found.value.decode()) == (200, PAGE)
    assert found.headers["content-security-policy"] == POLICY
    assert "'unsafe-inline'" not in POLICY.partition("script-src")[2]
    assert KEY not in PAGE
