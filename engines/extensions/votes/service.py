"""Server of votes: people compare two images of a group at a time on a page, and training runs request the results.

GET  /                 the page; its address holds the key after #, which a browser does not send
POST /next             {"voter"} -> {"pair": {"group", "pair", "prompt"} or null, "progress": {...}}
POST /image            {"group", "number"} -> PNG
POST /vote             {"voter", "group", "pair", "score"} -> as /next
POST /undo             {"voter"} -> as /next
POST /groups, /votes   for training runs, see `fluvial.engines.extensions.judges.votes`
"""

import asyncio
import base64
import hashlib
import io
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Any

from msgspec import Meta, Struct
from PIL import Image
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fluvial.engines.errors import convert_errors
from fluvial.engines.extensions.servers import asgi
from fluvial.engines.extensions.servers.asgi import RequestError, read_json
from fluvial.engines.extensions.votes.records import Vote, VoteFolder, hash_group, name_image

PAGE = resources.files("fluvial.engines.extensions.votes").joinpath("page.html").read_text(encoding="utf-8")
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
POLICY = (
    f"default-src 'none'; img-src blob: data:; connect-src 'self'; style-src 'unsafe-inline'; frame-ancestors 'none'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)
FORGOTTEN = 60.0  # seconds after the last request of a run for a group, after which the group is no longer shown
LEFT = 120.0  # seconds after which a pair shown to one voter may be shown to another
MOST_MB, MOST_PIXELS = 64, 100_000_000  # limits of a group
Pair = tuple[int, int]
Voter = Annotated[str, Meta(min_length=1, max_length=60)]
Index = Annotated[int, Meta(ge=0, le=63)]


class GroupRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request of a training run for votes on a group."""

    prompt: Annotated[str, Meta(max_length=100_000)]
    images: Annotated[list[str], Meta(min_length=2, max_length=64)]


class GroupStatesRequest(Struct, frozen=True):
    """Request for the states of groups."""

    groups: Annotated[list[str], Meta(max_length=100_000)]


class VoterRequest(Struct, frozen=True):
    """Request of a voter without a vote."""

    voter: Voter


class ImageRequest(Struct, frozen=True):
    """Request for an image."""

    group: str
    number: Index


class VoteRequest(Struct, frozen=True):
    """Request that holds a vote."""

    voter: Voter
    group: str
    pair: tuple[Index, Index]
    score: float


@dataclass
class Group:
    """Group of images requested by a run.

    Args:
        prompt: prompt of the images.
        size: number of images.
        pairs: comparisons to make, in order.
        requested: time of the last request of a run for this group.
        wins: how often each image was preferred to each other one.
    """

    prompt: str
    size: int
    pairs: list[Pair]
    requested: float
    wins: list[list[float]]
    done: Counter[Pair] = field(default_factory=Counter)  # comparisons by pair, the smaller number first

    def count(self, vote: Vote, sign: int = 1) -> None:
        """Count a vote; a `sign` of -1 takes it back."""
        i, j = vote.pair
        self.wins[i][j] += sign * vote.score
        self.wins[j][i] += sign * (1 - vote.score)
        self.done[min(i, j), max(i, j)] += sign

    @property
    def left(self) -> list[Pair]:
        """Comparisons still to be made, in order."""
        done, left = Counter(self.done), []
        for pair in self.pairs:
            if done[pair] > 0:
                done[pair] -= 1
            else:
                left.append(pair)
        return left

    @property
    def made(self) -> int:
        """Number of requested comparisons that are made."""
        return len(self.pairs) - len(self.left)


class VoteService:
    """Handlers of the server of votes.

    Args:
        folder: folder of the votes.
        rounds: number of times that each image is compared with two others; a group of two is compared once per round.
        clock: function that returns the time in seconds.
    """

    def __init__(self, folder: VoteFolder, *, rounds: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.rounds, self.clock = folder, rounds, clock
        self.groups: dict[str, Group] = {}
        self.shown: dict[str, tuple[str, Pair, float]] = {}  # by voter: group and pair on the page, and since when

    async def add_group(self, request: Request) -> JSONResponse:
        """Add a group, and return its state."""
        body = await read_json(request, GroupRequest, most_bytes=MOST_MB * 1_000_000)
        images = await asyncio.to_thread(_decode_images, body.images)
        name = hash_group(body.prompt, images)
        if name not in self.groups:
            alike = len(set(images)) == 1
            pairs = [] if alike else choose_pairs(len(images), self.rounds, name)
            wins = [[0.0] * len(images) for _ in images]
            if not alike:
                self.folder.keep_images(name, images)
            self.groups[name] = group = Group(body.prompt, len(images), pairs, self.clock(), wins)
            for vote in self.folder.votes:
                if vote.group == name:
                    group.count(vote)
        self.groups[name].requested = self.clock()
        return JSONResponse(self._describe_group(name))

    async def votes(self, request: Request) -> JSONResponse:
        """Return the states of groups, null for unknown ones."""
        body = await read_json(request, GroupStatesRequest, most_bytes=MOST_MB * 1_000_000)
        now = self.clock()
        for name in body.groups:
            if name in self.groups:
                self.groups[name].requested = now
        return JSONResponse(
            {"groups": {name: self._describe_group(name) if name in self.groups else None for name in body.groups}}
        )

    async def page(self, request: Request) -> Response:
        """Return the page."""
        headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        return Response(PAGE, media_type="text/html", headers={**headers, "X-Content-Type-Options": "nosniff"})

    async def next(self, request: Request) -> JSONResponse:
        """Return the next comparison of a voter, and the progress."""
        body = await read_json(request, VoterRequest, most_bytes=100_000)
        return JSONResponse(self._choose_pair(body.voter))

    async def image(self, request: Request) -> Response:
        """Return an image of a group."""
        body = await read_json(request, ImageRequest, most_bytes=100_000)
        group = self.groups.get(body.group)
        if group is None or body.number >= group.size:
            raise RequestError("there is no such image", 404)
        return Response((self.folder.folder / name_image(body.group, body.number)).read_bytes(), media_type="image/png")

    async def vote(self, request: Request) -> JSONResponse:
        """Record a vote, and return the next comparison."""
        body = await read_json(request, VoteRequest, most_bytes=100_000)
        group = self.groups.get(body.group)
        if group is None:
            raise RequestError("no run has asked for this group", 404)
        if body.score not in (0, 0.5, 1):
            raise RequestError(f"the score is {body.score:g}, expected 1, 0 or 0.5")
        if body.pair[0] == body.pair[1] or max(body.pair) >= group.size:
            raise RequestError(f"the pair is {list(body.pair)}, expected two of {group.size} images")
        vote = Vote(body.group, group.size, body.pair, float(body.score), body.voter)
        self.folder.append(vote, group.prompt)
        group.count(vote)
        self.shown.pop(body.voter, None)
        return JSONResponse(self._choose_pair(body.voter))

    async def undo(self, request: Request) -> JSONResponse:
        """Take back the last vote of a voter, and show its comparison again."""
        body = await read_json(request, VoterRequest, most_bytes=100_000)
        vote = self.folder.undo(body.voter)
        if vote is not None and vote.group in self.groups:
            self.groups[vote.group].count(vote, -1)
            self.shown[body.voter] = vote.group, vote.pair, self.clock()
        return JSONResponse({**self._choose_pair(body.voter), "undone": vote is not None})

    def _describe_group(self, name: str) -> dict[str, Any]:
        group = self.groups[name]
        return {"group": name, "done": group.made, "wanted": len(group.pairs), "wins": group.wins}

    def _choose_pair(self, voter: str) -> dict[str, Any]:
        """Return the comparison for a voter: the one on their page, or the first that no other voter looks at."""
        now = self.clock()
        live = {name: group for name, group in self.groups.items() if now - group.requested < FORGOTTEN and group.pairs}
        others = Counter[tuple[str, Pair]]()
        for other, (name, (i, j), since) in self.shown.items():
            if other != voter and now - since < LEFT:
                others[name, (min(i, j), max(i, j))] += 1
        chosen: tuple[str, Pair] | None = None
        current = self.shown.get(voter)
        if current is not None and current[0] in live and tuple(sorted(current[1])) in live[current[0]].left:
            chosen = current[0], current[1]
        for name, group in () if chosen is not None else live.items():
            for pair in group.left:
                if others[name, pair]:
                    others[name, pair] -= 1
                elif chosen is None:
                    # Half of the pairs are mirrored, so that a preference for one side favours no image.
                    order = pair if random.Random(f"{name} {pair} {group.done[pair]}").random() < 0.5 else pair[::-1]
                    chosen = name, (order[0], order[1])
        if chosen is None:
            self.shown.pop(voter, None)
        else:
            self.shown[voter] = (*chosen, now)
        progress = {
            "made": sum(group.made for group in live.values()),
            "wanted": sum(len(group.pairs) for group in live.values()),
            "groups": len(live),
            "complete": sum(not group.left for group in live.values()),
            "own": sum(vote.voter == voter for vote in self.folder.votes),
        }
        comparison = None
        if chosen is not None:
            comparison = {"group": chosen[0], "pair": list(chosen[1]), "prompt": live[chosen[0]].prompt}
        return {"pair": comparison, "progress": progress}


def choose_pairs(size: int, rounds: int, seed: str) -> list[Pair]:
    """Return the pairs of a group to compare, the smaller index first.

    The images form a ring, whose order `seed` draws. Each round compares each image with the one at a distance that grows by
    one per round: each image is compared twice, and the first round connects all. A group of two is compared once per round.
    """
    ring = list(range(size))
    random.Random(seed).shuffle(ring)
    if size == 2:
        return [(0, 1)] * rounds
    pairs = []
    for number in range(rounds):
        distance = number % (size // 2) + 1
        for position in range(size):
            first, second = ring[position], ring[(position + distance) % size]
            pairs.append((min(first, second), max(first, second)))
    return pairs


def application(service: VoteService, *, key: str) -> ASGIApp:
    """Return the application; all requests except those for the page need the key."""
    routes = [
        Route("/", service.page, methods=["GET"]),
        Route("/next", service.next, methods=["POST"]),
        Route("/image", service.image, methods=["POST"]),
        Route("/vote", service.vote, methods=["POST"]),
        Route("/undo", service.undo, methods=["POST"]),
        Route("/groups", service.add_group, methods=["POST"]),
        Route("/votes", service.votes, methods=["POST"]),
    ]
    return asgi.build_application(routes, close=service.folder.close, key=key, page="/")


def _decode_images(texts: list[str]) -> list[bytes]:
    """Decode PNG files; RequestError if one is not a PNG, or they have several sizes or too many pixels."""
    images, sizes = [], set()
    for text in texts:
        # A damaged file raises many kinds of errors.
        with convert_errors(RequestError, Exception, says="an image is not a PNG file as base64"):
            data = base64.b64decode(text, validate=True)
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                sizes.add(image.size)
                image.verify()
        images.append(data)
    if len(sizes) > 1:
        raise RequestError(f"the images have the sizes {sorted(sizes)}, expected one size")
    width, height = sizes.pop()
    if width * height * len(texts) > MOST_PIXELS:
        raise RequestError(f"the images have more than {MOST_PIXELS // 1_000_000} million pixels", 413)
    return images
