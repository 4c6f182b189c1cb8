"""The reward of votes: scores are the strengths by the votes, and who does not vote holds up no run for ever."""

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import asgi
from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.judges import votes
from fluvial.engines.extensions.judges.votes import Votes
from fluvial.engines.extensions.votes.records import VoteFolder
from fluvial.engines.extensions.votes.service import VoteService, application
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.scoring.pairwise import bradley_terry

IMAGES = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 4, 4) / 4
PROMPTS = ["a fox"] * 4
KEY = "a-key"


class People:
    """A server of votes, and people who prefer the brighter image; a client asks it without a network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open()

    def open(self) -> None:
        self.service = VoteService(VoteFolder(self.folder))
        self.app = application(self.service, key=KEY)

    def ask(self, path: str, **value: Any) -> Any:
        return asyncio.run(asgi.call(self.app, path, value, headers={"authorization": f"Bearer {KEY}"})).value

    def vote(self, most: int = 1000) -> int:
        for number in range(most):
            shown = self.ask("/next", voter="ann")["pair"]
            if shown is None:
                return number
            i, j = shown["pair"]  # their numbers within a group are in the order of their brightness
            self.ask("/vote", voter="ann", score=float(i > j), **{name: shown[name] for name in ("group", "pair")})
        return most

    def reward(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Votes:
        monkeypatch.setattr(votes, "EVERY", 0.005)
        monkeypatch.setattr(votes, "LINE_AFTER", 0.0)
        monkeypatch.setenv("VOTES_KEY", KEY)

        class Route(asgi.Transport):
            def handle_request(transport, request: Any) -> Any:
                transport.app = self.app
                return super().handle_request(request)

        return Votes(HttpClient("http://localhost:1", transport=Route(None), key_env="VOTES_KEY"), **options)


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path / "votes")


def values(scores: "Future[list[float]]") -> Tensor:
    return torch.tensor(scores.result(20), dtype=torch.float64)


def test_scores_are_the_strengths_by_the_votes(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = people.reward(monkeypatch, prior=0.25)
    one, other = reward(IMAGES, PROMPTS, 0), reward(IMAGES, ["an ox"] * 4, 1)
    assert not one.done()
    assert people.vote() == 8
    assert values(reward(torch.zeros(4, 1, 4, 4), PROMPTS, 0)).tolist() == [0, 0, 0, 0]  # equal ones need no vote
    for scores, (name, group) in zip((one, other), [*people.service.groups.items()][:2], strict=True):
        expected = bradley_terry(torch.tensor(group.wins), prior=0.25)
        assert torch.equal(values(scores), expected), name
        assert expected[0] < expected[3]


def test_the_same_images_are_not_voted_on_twice(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after a restart of the run or of the server either, which the waiting groups outlive."""
    reward = people.reward(monkeypatch)
    one, other = reward(IMAGES, PROMPTS, 0), reward(IMAGES, ["an ox"] * 4, 1)
    people.vote(3)
    people.service.folder.close()
    people.open()
    found = list[int]()
    while not (one.done() and other.done()):
        found.append(people.vote())
    assert sum(found) == 5
    assert torch.equal(values(people.reward(monkeypatch)(IMAGES, PROMPTS, 7)), values(one))


def test_groups_without_votes_are_given_up(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `wait` seconds without a vote; their votes stay, and the next group is asked for again."""
    reward = people.reward(monkeypatch, wait=0.2)
    scores = reward(IMAGES, PROMPTS, 0)
    people.vote(2)
    with pytest.raises(RunError, match=r"no vote within `wait` 0.2 s|no vote within wait 0.2 s"):
        scores.result(20)
    again = people.reward(monkeypatch)(IMAGES, PROMPTS, 0)
    assert people.vote() == 2
    assert values(again).shape == (4,)


def test_what_is_waited_for_is_one_line(
    people: People, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = people.reward(monkeypatch)
    scores, said = reward(IMAGES, PROMPTS, 0), ""
    while "\n" not in said:
        time.sleep(0.01)
        said += capsys.readouterr().err
    people.vote()
    values(scores)
    assert said + capsys.readouterr().err == "waiting for votes: 0 of 4 comparisons of 1 groups; http://localhost:1\n"


def test_a_server_that_fails_is_an_error_of_the_group(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = people.reward(monkeypatch)
    scores = reward(IMAGES, PROMPTS, 0)
    monkeypatch.setattr(people.service, "_describe_group", lambda name: {"group": name, "done": "many"})
    with pytest.raises(RunError, match="the server of votes http://localhost:1 answered with another form"):
        scores.result(20)
    with pytest.raises(RunError, match="answered with another form"):
        reward(IMAGES, PROMPTS, 0)


def test_wrong_options_are_refused(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wait", "prior"):
        with pytest.raises(UsageError, match=f"{name} is 0"):
            people.reward(monkeypatch, **{name: 0})
    with pytest.raises(UsageError, match=r"^it takes images, got videos"):
        people.reward(monkeypatch)(torch.zeros(4, 3, 2, 4, 4), PROMPTS, 0)
