"""Rewards of a server that speaks the JSON of UniRL's reward service: POST /score, several rewards at once."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.rewards.clients import images as wire
from fluvial.engines.rewards.clients.parallel import in_batches
from fluvial.engines.rewards.clients.replies import element, field, kind, score
from fluvial.engines.wire.client import HttpClient, shown

METRICS: dict[str, Callable[[list[float]], float]] = {
    "first": lambda values: values[0],
    "mean": lambda values: sum(values) / len(values),
    "max": max,
}


class UniRL:
    """Scores of a UniRL reward service; images travel as JPEG files, each with its prompt and its prompt's metadata.

    A reward answers with several numbers per sample. `metric` says which is the score. A sample that any of the rewards has
    no score of has none.

    Source of the format: UniRL, `unirl-reward-service/reward_service/schemas.py`.

    Args:
        server: the server.
        rewards: names of rewards that the server has; their scores are added.
        metric: how the numbers of one reward become one: the first, their mean or the largest.
        batch: largest number of samples per request.
        quality: quality of the JPEG files.
    """

    def __init__(
        self,
        server: HttpClient,
        *,
        rewards: tuple[str, ...],
        metric: Literal["first", "mean", "max"] = "first",
        batch: int = 16,
        quality: int = wire.QUALITY,
    ) -> None:
        if not rewards or len(set(rewards)) < len(rewards) or not all(rewards):
            raise UsageError("rewards", list(rewards), "names that the server has, each once")
        if metric not in METRICS:
            raise UsageError(f"metric is {metric!r}, expected one of {', '.join(METRICS)}")
        if batch < 1 or not 1 <= quality <= 100:
            raise UsageError(f"`batch` is {batch} and quality is {quality}, expected at least 1, and 1 to 100")
        self.server, self.rewards, self.metric, self.batch, self.quality = server, rewards, metric, batch, quality

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Tensor | dict[str, Tensor]:
        """Return the score of each sample, `[B]`; NaN for one that the server has no score of.

        Of several rewards it is a mapping: their sum as `score`, and each under its name.

        Raises:
            RunError: the samples are videos, or no request succeeded.
        """
        if images.ndim != 4:
            raise RunError(f"a UniRL reward service scores images here, got samples of shape {list(images.shape[1:])}")
        samples = wire.on_host(images, prompts)

        def scored(part: slice) -> list[list[float]]:
            requests = [
                {
                    "history": [{"text": str(prompt), "image_b64": wire.as_text(wire.jpeg(sample, quality=self.quality))}],
                    "required_rewards": list(self.rewards),
                    "metadata": _sendable(record),
                }
                for sample, prompt, record in zip(samples[part], prompts[part], metadata[part], strict=True)
            ]
            return self._read(self.server.post("/score", {"requests": requests}), len(requests))

        found = in_batches(scored, len(samples), batch=self.batch, at_once=self.server.in_flight)
        if len(self.rewards) == 1:
            return found[:, 0]
        return {"score": found.sum(1), **dict(zip(self.rewards, found.unbind(1), strict=True))}

    def _read(self, answer: Any, count: int) -> list[list[float]]:
        """Return the score of each reward for each sample of a reply, NaN for one that is missing.

        Raises:
            RunError: the reply has another form, or no sample has a score.
        """
        where = f"{self.server.address}/score"
        results = field(answer, "results", where=where)
        if not isinstance(results, list) or len(results) != count:
            raise RunError(f"{where}: results is {kind(results)}, expected a list of {count}, one per sample")
        problems = answer.get("errors") or [{}] * count
        found, said = [], ""
        for number, result in enumerate(results):
            if not isinstance(result, dict):
                raise RunError(f"{where}: results[{number}] is {kind(result)}, expected an object of rewards")
            values = {name: self._value(result[name], f"{where}: {name}") for name in self.rewards if name in result}
            if missing := [name for name in self.rewards if name not in values]:
                said = said or _problem(problems, number, missing[0], where)
            found.append([values.get(name, math.nan) for name in self.rewards])
        if said and all(any(map(math.isnan, values)) for values in found):
            raise RunError(f"{where} has no score of any sample: {said}")
        return found

    def _value(self, metrics: Any, where: str) -> float:
        """Return the score among the numbers of one reward."""
        if not isinstance(metrics, dict) or not metrics:
            raise RunError(f"{where} is {kind(metrics)}, expected an object of numbers")
        try:
            values = [score(value) for value in metrics.values()]
        except TypeError:
            raise RunError(f"{where} holds a value that is no number") from None
        # What max() makes of NaN depends on the order.
        return math.nan if any(map(math.isnan, values)) else float(METRICS[self.metric](values))


def _problem(problems: Any, number: int, reward: str, where: str) -> str:
    """Return what the server says of a reward that is missing."""
    try:
        said = element(problems, number, where=where)
    except RunError:
        return f"{reward} is missing"
    text = said.get(reward) if isinstance(said, dict) else None
    return f"{reward}: {shown(text)}" if isinstance(text, str) else f"{reward} is missing"


def _sendable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a prompt without what JSON does not hold, such as the bytes of an image."""
    return {name: value for name, value in record.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(inner) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)
