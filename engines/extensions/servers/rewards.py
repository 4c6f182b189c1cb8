"""Reward server: rewards over HTTP, in the JSON formats of Flow-Factory and UniRL.

GET  /health, /NAME/health         {"status": "ok", "rewards": {name: "ok"}}
GET  /rewards                      {"rewards": [name]}
POST /compute, /NAME/compute       Flow-Factory's format; the name may be left out if one reward is served
POST /score                        UniRL's format: several rewards at once, with metadata
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
from fluvial.engines.extensions.servers.asgi import RequestError, read_json, run_until_disconnect
from fluvial.engines.extensions.servers.batching import Batcher
from fluvial.engines.extensions.servers.formats import (
    ComputeBody,
    SampleToScore,
    ScoreBody,
    ScoringLimits,
    read_flow_factory,
    read_unirl,
    stack_samples,
)
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.scores import one_line, read_scores
from fluvial.engines.scoring.signature import Samples, signature_of


class Outcome(NamedTuple):
    """Result of scoring a sample: a score with further numbers, or NaN and a problem."""

    score: float
    parts: dict[str, float]
    problem: str = ""
    raised: bool = False  # whether the reward raised, instead of returning an invalid number


class RewardService:
    """Handlers of the reward server.

    Args:
        batch: largest number of samples per call of a reward.
        linger: seconds that a request waits for others to fill a batch.
        most_waiting: largest number of samples that wait for one reward.

    Raises:
        UsageError: there are no rewards, or one takes latents, sounds or complete groups, which requests do not hold.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        *,
        limits: ScoringLimits | None = None,
        batch: int = 16,
        linger: float = 0.005,
        most_waiting: int = 1024,
    ) -> None:
        if not rewards:
            raise UsageError("there are no rewards to serve: name at least one")
        for name, reward in rewards.items():
            for argument in ("group", "latents", "audios"):
                if signature_of(reward).takes(argument):
                    raise UsageError(f"reward {name!r} takes {argument}, which requests do not hold: use it within the run")
        self.limits = limits or ScoringLimits()
        self.batchers: dict[str, Batcher[SampleToScore, Outcome]] = {
            name: Batcher(
                partial(_score_samples, name, reward),
                alike=lambda sample: sample.image.shape,
                size=batch,
                linger=linger,
                most_waiting=most_waiting,
            )
            for name, reward in rewards.items()
        }

    async def report_health(self, request: Request) -> JSONResponse:
        """Report that the server runs; under the path of a reward, for Flow-Factory's client, that it serves this one.

        Raises:
            RequestError: the reward is unknown.
        """
        names = [self._find_name(request.path_params["reward"])] if "reward" in request.path_params else self.batchers
        return JSONResponse({"status": "ok", "rewards": dict.fromkeys(names, "ok")})

    async def list_rewards(self, request: Request) -> JSONResponse:
        """Return the names of the rewards."""
        return JSONResponse({"rewards": list(self.batchers)})

    async def compute(self, request: Request) -> JSONResponse:
        """Return the scores of a request of Flow-Factory. A sample without a score has null, and the reply has an error.

        Flow-Factory's client raises that error. It cannot read a null, and would train on a NaN.

        Raises:
            RequestError: the request is wrong.
            RunError: the reward raised for every sample.
        """
        name = request.path_params.get("reward") or (next(iter(self.batchers)) if len(self.batchers) == 1 else "")
        self._find_name(name)
        body = await read_json(request, ComputeBody, most_bytes=self.limits.most_bytes)
        samples = await asyncio.to_thread(read_flow_factory, body, self.limits)
        outcomes = await run_until_disconnect(request, self._score(name, samples))
        if all(outcome.raised for outcome in outcomes):
            raise RunError(f"reward {name!r} {outcomes[0].problem}")
        scores = [None if math.isnan(outcome.score) else outcome.score for outcome in outcomes]
        problems = [outcome.problem for outcome in outcomes if math.isnan(outcome.score)]
        error = {"error": f"{len(problems)} of {len(scores)} samples have no score: {problems[0]}"} if problems else {}
        return JSONResponse({"rewards": scores, **error})

    async def score(self, request: Request) -> JSONResponse:
        """Return the scores of a request of UniRL, with an error for each missing one.

        Raises:
            RequestError: the request is wrong.
        """
        body = await read_json(request, ScoreBody, most_bytes=self.limits.most_bytes)
        requests = await asyncio.to_thread(read_unirl, body, self.limits)
        names = list(dict.fromkeys(name for each in requests for name in each.rewards))
        for name in names:
            if name not in self.batchers:
                raise RequestError(f"there is no reward {name!r}, expected one of {', '.join(self.batchers)}")
        indices = {name: [index for index, each in enumerate(requests) if name in each.rewards] for name in names}
        work = asyncio.gather(*(self._score(name, [requests[index].sample for index in indices[name]]) for name in names))
        results: list[dict[str, dict[str, float]]] = [{} for _ in requests]
        errors: list[dict[str, str]] = [{} for _ in requests]
        for name, outcomes in zip(names, await run_until_disconnect(request, work), strict=True):
            for index, outcome in zip(indices[name], outcomes, strict=True):
                if math.isnan(outcome.score):
                    errors[index][name] = outcome.problem
                else:
                    finite = {part: value for part, value in outcome.parts.items() if math.isfinite(value)}
                    results[index][name] = {"score": outcome.score, **finite}
        return JSONResponse({"results": results, "errors": errors})

    def _find_name(self, name: str) -> str:
        """Return the name of a reward; RequestError if it is unknown."""
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


def build_application(service: RewardService, *, key: str = "") -> ASGIApp:
    """Build the ASGI application of a service.

    Args:
        key: API key that requests must send; empty requires none.
    """
    routes = [
        Route("/health", service.report_health),
        Route("/{reward}/health", service.report_health),
        Route("/rewards", service.list_rewards),
        Route("/compute", service.compute, methods=["POST"]),
        Route("/{reward}/compute", service.compute, methods=["POST"]),
        Route("/score", service.score, methods=["POST"]),
    ]
    return asgi.build_application(routes, close=service.close, key=key)


def _score_samples(name: str, reward: Reward, samples: Sequence[SampleToScore]) -> list[Outcome]:
    """Score a batch; if the reward raises, score each sample alone, so that only faulty samples fail."""
    images, prompts = stack_samples(samples)
    try:
        with torch.no_grad():
            returned = signature_of(reward).call(reward, Samples(images, prompts))
            scored = read_scores(returned, texts(prompts), label=f"reward {name!r}")
    except BaseException as error:  # also a reward that calls sys.exit: the server continues
        if len(samples) > 1:
            return [outcome for sample in samples for outcome in _score_samples(name, reward, [sample])]
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
