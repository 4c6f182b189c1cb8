"""Reward by votes of people: groups of images are sent to `fluvial rewards vote`, and the votes become their scores.

POST /groups   {"prompt", "images": [PNG as base64]}   ->  state of the group
POST /votes    {"groups": [id]}                        ->  {"groups": {id: state, or null if unknown}}

A state is {"group": id, "done", "wanted", "wins": [[number]]}: comparisons so far, comparisons requested, and how often
each image was preferred to each other one.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.engines.errors import FluvialError, RunError, UsageError
from fluvial.engines.extensions.judges.batches import encode_png, read_field, to_base64
from fluvial.engines.extensions.wire.client import HttpClient
from fluvial.engines.scoring.pairwise import bradley_terry

EVERY = 1.0  # polling interval of the server, in seconds
LINE_AFTER, LINE_EVERY = 2.0, 60.0  # seconds until the first progress line, and between two


class WaitingGroup(NamedTuple):
    """Group that waits for votes."""

    body: dict[str, Any]
    scores: Future[list[float]]


class Votes:
    """Bradley-Terry log-strengths of the images of a group, by the votes of people.

    A group is identified by its prompt and its images. Earlier votes count, so a resumed run that generates the same images
    requests none of them twice. Images that are all equal have the score 0 without votes.

    Args:
        server: server of `fluvial rewards vote`.
        wait: seconds without a vote for any waiting group, after which these groups get no score and are dropped from the
            update. Their votes stay, and count if the same images are generated again.
        prior: strength of the prior that draws scores to 0, see `bradley_terry`.

    Raises:
        UsageError: an option is invalid.
    """

    def __init__(self, server: HttpClient, *, wait: float = 3600.0, prior: float = 0.5, clock: Any = time) -> None:
        if not wait > 0:
            raise UsageError(f"wait is {wait:g}, expected seconds above 0")
        if not 1e-3 <= prior < float("inf"):
            raise UsageError(f"prior is {prior:g}, expected a number of at least 0.001")
        self.server, self.waits_for_people, self.prior, self.clock = server, wait, prior, clock
        self._waiting: dict[str, WaitingGroup] = {}  # by the id of the group
        self._lock = threading.Lock()
        self._polling = False  # whether a thread polls the server

    def __call__(self, images: Tensor, prompts: Sequence[str], group: int) -> "Future[list[float]]":
        """Send a group, and return a future of its scores.

        Raises:
            RunError: the server cannot be reached, or rejects the group.
            UsageError: the samples are videos.
        """
        if images.ndim != 4:
            raise UsageError(f"it takes images, got videos {list(images.shape[1:])}")
        body = {
            "prompt": prompts[0],
            "images": [to_base64(encode_png(image, colour=False)) for image in images.detach().cpu().float()],
        }
        state, waiting_group = self.server.post("/groups", body), WaitingGroup(body, Future())
        name = read_field(state, "group", str, where=self._where)
        if not self._settle(state, waiting_group):
            with self._lock:
                self._waiting[name] = waiting_group
                if not self._polling:
                    self._polling = True
                    threading.Thread(target=self._poll, name="votes", daemon=True).start()
        return waiting_group.scores

    @property
    def _where(self) -> str:
        return f"the server of votes {self.server.address}"

    def _read_counts(self, state: Any) -> tuple[int, int]:
        """Return the numbers of comparisons done and wanted of a group."""
        return read_field(state, "done", int, where=self._where), read_field(state, "wanted", int, where=self._where)

    def _settle(self, state: Any, group: WaitingGroup) -> bool:
        """Set the scores of a group that has all its votes, and return whether it has them."""
        done, wanted = self._read_counts(state)
        if done < wanted:
            return False
        count = len(group.body["images"])
        wins = torch.tensor(read_field(state, "wins", list[list[float]], where=self._where), dtype=torch.float64)
        if wins.shape != (count, count):
            raise RunError(f"{self._where}: wins has the shape {list(wins.shape)}, expected [{count}, {count}]")
        group.scores.set_result(bradley_terry(wins, prior=self.prior).tolist())
        return True

    def _poll(self) -> None:
        """Poll the server until no group waits."""
        known, since = -1, self.clock.monotonic()
        printed = since + LINE_AFTER - LINE_EVERY
        while True:
            with self._lock:
                waiting = dict(self._waiting)
                if not waiting:
                    self._polling = False
                    return
            try:
                done, wanted, settled = self._read_votes(waiting)
            except Exception as error:  # after any reply, the groups must not wait for ever
                self._fail(waiting, error if isinstance(error, FluvialError) else RunError(f"{self._where}: {error}"))
                continue
            now = self.clock.monotonic()
            if settled or done != known:
                known, since = -1 if settled else done, now
            if now - since > self.waits_for_people:
                self._fail(waiting, RunError(f"{self._where}: no vote within `wait` {self.waits_for_people:g} s"))
                continue
            if now - printed > LINE_EVERY and os.environ.get("RANK", "0") == "0" and not settled:
                printed = now
                line = f"waiting for votes: {done} of {wanted} comparisons of {len(waiting)} groups; {self.server.address}"
                print(line, file=sys.stderr, flush=True)
            self.clock.sleep(EVERY)

    def _read_votes(self, waiting: dict[str, WaitingGroup]) -> tuple[int, int, int]:
        """Read the states of groups, and return the numbers of comparisons done and wanted, and of settled groups."""
        states = read_field(self.server.post("/votes", {"groups": [*waiting]}), "groups", dict[str, Any], where=self._where)
        done = wanted = settled = 0
        for name, group in waiting.items():
            state = states.get(name)
            if state is None:  # a restarted server has the votes but not the groups
                state = self.server.post("/groups", group.body)
            done_of_group, wanted_of_group = self._read_counts(state)
            done, wanted = done + done_of_group, wanted + wanted_of_group
            if self._settle(state, group):
                settled += 1
                with self._lock:
                    del self._waiting[name]
        return done, wanted, settled

    def _fail(self, waiting: dict[str, WaitingGroup], error: Exception) -> None:
        """End the wait of groups with an error."""
        for name, group in waiting.items():
            with self._lock:
                self._waiting.pop(name, None)
            if not group.scores.done():
                group.scores.set_exception(error)
