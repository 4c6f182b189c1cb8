"""The reward server: rewards over HTTP, in the JSON of Flow-Factory and of UniRL.

GET  /health, /NAME/health         {"status": "ok", "rewards": {name: "ok"}}
GET  /rewards                      {"rewards": [name]}
POST /compute, /NAME/compute       Flow-Factory's; the name may be left out if one reward is served
POST /score                        UniRL's: several rewards at once, with metadata
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from fluvial.engines.data.records import texts
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.servers import asgi
from fluvial.engines.extensions.servers.asgi import RequestError, json_of, until_gone
from fluvial.engines.extensions.servers.batching import Batcher
from fluvial.engines.extensions.servers.formats import Compute, Limits, SampleToScore, Score, batch_of, flow_factory, unirl
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.scores import one_line, read_scores
from fluvial.engines.scoring.signature import Samples, signature_of


class Outcome(NamedTuple):
    """Result of scoring a sample: a score with further numbers, or NaN and a line that says why."""

    score: float
    parts: dict[str, float]
    problem: str = ""
    raised: bool = False  # whether the reward raised, rather than give no valid number


class RewardService:
    """The handlers of the reward server.

    Args:
        batch: largest number of samples per call of a reward.
        linger: seconds that a request waits for others to fill a batch.
        most_waiting: largest number of samples that wait for one reward.

    Raises:
        UsageError: there are no rewards, or one takes what requests do not hold: latents, or whole groups.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        *,
        limits: Limits | None = None,
        batch: int = 16,
        linger: float = 0.005,
        most_waiting: int = 1024,
    ) -> None:
        if not rewards:
            raise UsageError("there are no rewards to serve: name at least one")
        for name, reward in rewards.items():
            for asked in ("group", "latents"):
                if signature_of(reward).takes(asked):
                    raise UsageError(f"reward {name!r} takes {asked}, which requests do not hold: use it within the run")
        self.limits = limits or Limits()
        self.batchers: dict[str, Batcher[SampleToScore, Outcome]] = {
            name: Batcher(
                partial(_outcomes, name, reward),
                alike=lambda sample: sample.image.shape,
                size=batch,
                linger=linger,
                most_waiting=most_waiting,
            )
            for name, reward in rewards.items()
        }

    async def health(self, request: Request) -> JSONResponse:
        """Return that the server runs; under the path of a reward, as Flow-Factory's client asks, that this one is served.

        Raises:
            RequestError: there is no such reward.
        """
        names = [self._find_name(request.path_params["reward"])] if "reward" in request.path_params else self.batchers
        return JSONResponse({"status": "ok", "rewards": dict.fromkeys(names, "ok")})

    async def rewards(self, request: Request) -> JSONResponse:
        """Return the names of the rewards."""
        return JSONResponse({"rewards": list(self.batchers)})

    async def compute(self, request: Request) -> JSONResponse:
        """Return the scores of a request of Flow-Factory; null for a sample that has none, and then an error that says why.

        Flow-Factory's client raises that error. It could not read a null, and would train on a NaN.

        Raises:
            RequestError: the request is wrong.
            RunError: the reward raised for every sample.
        """
        name = request.path_params.get("reward") or (next(iter(self.batchers)) if len(self.batchers) == 1 else "")
        self._find_name(name)
        body = await json_of(request, Compute, most_bytes=self.limits.most_bytes)
        samples = await asyncio.to_thread(flow_factory, body, self.limits)
        outcomes = await until_gone(request, self._score(name, samples))
        if all(outcome.raised for outcome in outcomes):
            raise RunError(f"reward {name!r} {outcomes[0].problem}")
        scores = [None if math.isnan(outcome.score) else outcome.score for outcome in outcomes]
        lost = [outcome.problem for outcome in outcomes if math.isnan(outcome.score)]
        said = {"error": f"{len(lost)} of {len(scores)} samples have no score: {lost[0]}"} if lost else {}
        return JSONResponse({"rewards": scores, **said})

    async def score(self, request: Request) -> JSONResponse:
        """Return the scores of a request of UniRL, and why those that are missing are.

        Raises:
            RequestError: the request is wrong.
        """
        body = await json_of(request, Score, most_bytes=self.limits.most_bytes)
        requests = await asyncio.to_thread(unirl, body, self.limits)
        names = list(dict.fromkeys(name for each in requests for name in each.rewards))
        for name in names:
            if name not in self.batchers:
                raise RequestError(f"there is no reward {name!r}, expected one of {', '.join(self.batchers)}")
        rows = {name: [number for number, each in enumerate(requests) if name in each.rewards] for name in names}
        work = asyncio.gather(*(self._score(name, [requests[number].sample for number in rows[name]]) for name in names))
        results: list[dict[str, dict[str, float]]] = [{} for _ in requests]
        errors: list[dict[str, str]] = [{} for _ in requests]
        for name, outcomes in zip(names, await until_gone(request, work), strict=True):
            for number, outcome in zip(rows[name], outcomes, strict=True):
                if math.isnan(outcome.score):
                    errors[number][name] = outcome.problem
                else:
                    finite = {part: value for part, value in outcome.parts.items() if math.isfinite(value)}
                    results[number][name] = {"score": outcome.score, **finite}
        return JSONResponse({"results": results, "errors": errors})

    def _find_name(self, name: str) -> str:
        """Return the name of a reward; RequestError if there is no such reward."""
        if name not in self.batchers:
            raise RequestError(
                f"there is no reward {name!r}, expected /NAME/compute, one of {', '.join(self.batchers)}", 404
            )
        return name

    async def _score(self, name: str, samples: Sequence[SampleToScore]) -> list[Outcome]:
        return await asyncio.wrap_future(self.batchers[name].submit(samples))

    def close(self) -> None:
        """End the threads."""
        for batcher in self.batchers.values():
            batcher.close()


def application(service: RewardService, *, key: str = "") -> ASGIApp:
    """Return the ASGI application of a service.

    Args:
        key: API key that requests must send; empty asks for none.
    """
    routes = [
        Route("/health", service.health),
        Route("/{reward}/health", service.health),
        Route("/rewards", service.rewards),
        Route("/compute", service.compute, methods=["POST"]),
        Route("/{reward}/compute", service.compute, methods=["POST"]),
        Route("/score", service.score, methods=["POST"]),
    ]
    return asgi.application(routes, close=service.close, key=key)


def _outcomes(name: str, reward: Reward, samples: Sequence[SampleToScore]) -> list[Outcome]:
    """Return the outcomes of one call; where it raises, of a call per sample, so that one sample fails alone."""
    images, prompts = batch_of(samples)
    try:
        with torch.no_grad():
            returned = signature_of(reward).call(reward, Samples(images, prompts))
            scored = read_scores(returned, texts(prompts), label=f"reward {name!r}")
    except BaseException as error:  # also a reward that calls sys.exit: the server goes on
        if len(samples) > 1:
            return [outcome for sample in samples for outcome in _outcomes(name, reward, [sample])]
        return [Outcome(math.nan, {}, f"raised {type(error).__name__} ({one_line(error)})", raised=True)]
    problems = iter(scored.problems)  # one for each score that is NaN
    return [
        Outcome(
            score,
            {part: float(values[number]) for part, values in scored.parts.items()},
            next(problems) if math.isnan(score) else "",
        )
        for number, score in enumerate(scored.scores.tolist())
    ]
