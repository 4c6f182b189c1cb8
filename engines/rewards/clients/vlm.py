"""Rewards by a VLM judge behind a chat server: a yes-or-no question, a rating, UnifiedReward, and lists of questions."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.rewards.clients import images as wire
from fluvial.engines.rewards.clients.chat import PLACE, Chat, probability
from fluvial.engines.rewards.clients.chat import template as question_of
from fluvial.engines.rewards.clients.parallel import in_batches
from fluvial.engines.rewards.clients.replies import kind, score
from fluvial.engines.wire.client import HttpClient

FRAMES = 8  # frames of a video that a model is shown
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FINAL_SCORE = re.compile(r"Final Score:\s*([1-5](?:\.\d+)?)")


class YesNo:
    """Probability of yes: P(yes) / (P(yes) + P(no)) over the first token of the reply, all spellings added.

    Source: VQAScore, arXiv 2404.01291, whose question is the built-in template.

    Args:
        server: chat server.
        model: name of the model. Empty takes the server's only one.
        template: file of the question, in which {prompt} stands for the prompt.
    """

    def __init__(self, server: HttpClient, *, model: str = "", template: Path | None = None) -> None:
        self.chat, self.question = Chat(server, model=model), question_of(template, "yes_no")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the probability for each sample, `[B]`; NaN where neither yes nor no is likely.

        Raises:
            RunError: no request succeeded, or the server gives no log-probabilities.
        """

        def asked(files: list[bytes], number: int) -> float:
            answer = self.chat.ask(files, self.question.replace(PLACE, str(prompts[number])), max_tokens=1, logprobs=True)
            yes, no = (probability(answer, [word], where=self.chat.server.address) for word in ("yes", "no"))
            return yes / (yes + no) if yes + no > 0 else math.nan

        return _each_sample(images, prompts, self.chat, asked)


class Rating:
    """Number that a model gives in JSON, from 0 at `low` to 1 at `high`.

    The reply must be {"score": number}, which servers with guided decoding (vLLM, sglang, OpenAI) hold to. A reply in
    prose, or a number out of the range, is no score.

    Args:
        server: chat server.
        model: name of the model. Empty takes the server's only one.
        template: file of the question, in which {prompt} stands for the prompt.
        low: least rating.
        high: largest rating.
        max_tokens: largest number of tokens of the reply.
    """

    def __init__(
        self,
        server: HttpClient,
        *,
        model: str = "",
        template: Path | None = None,
        low: float = 1.0,
        high: float = 10.0,
        max_tokens: int = 64,
    ) -> None:
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UsageError(f"low is {low:g} and high is {high:g}, expected numbers, the first below the second")
        self.chat, self.question = Chat(server, model=model), question_of(template, "rating")
        self.low, self.high, self.max_tokens = low, high, _positive(max_tokens=max_tokens)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the rating of each sample in [0, 1], `[B]`; NaN where the reply is no rating.

        Raises:
            RunError: no request succeeded.
        """
        number_type = {"type": "number", "minimum": self.low, "maximum": self.high}
        schema = {
            "type": "object",
            "properties": {"score": number_type},
            "required": ["score"],
            "additionalProperties": False,
        }
        question = self.question.replace("{low}", f"{self.low:g}").replace("{high}", f"{self.high:g}")

        def asked(files: list[bytes], number: int) -> float:
            text = question.replace(PLACE, str(prompts[number]))
            rating = _rating(self.chat.ask(files, text, max_tokens=self.max_tokens, schema=schema).text)
            return (rating - self.low) / (self.high - self.low) if self.low <= rating <= self.high else math.nan

        return _each_sample(images, prompts, self.chat, asked)


class UnifiedReward:
    """UnifiedReward's score: the number after "Final Score:", from 1 to 5, divided by 5.

    Source: arXiv 2503.05236; question, image size and pattern as flow_grpo uses them. A reply without a score is NaN here,
    where flow_grpo takes it for 0.

    Args:
        server: chat server of a UnifiedReward model.
        model: name of the model. Empty takes the server's only one.
        template: file of the question, in which {prompt} stands for the prompt.
        size: width and height that images are resized to; 0 leaves them as they are.
        max_tokens: largest number of tokens of the reply.
    """

    def __init__(
        self, server: HttpClient, *, model: str = "", template: Path | None = None, size: int = 512, max_tokens: int = 1024
    ) -> None:
        if size < 0:
            raise UsageError(f"size is {size}, expected pixels, or 0 for images as they are")
        self.chat, self.question = Chat(server, model=model), question_of(template, "unified_reward")
        self.size, self.max_tokens = size, _positive(max_tokens=max_tokens)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each sample in [0.2, 1], `[B]`; NaN where the reply has none.

        Raises:
            RunError: no request succeeded.
        """

        def asked(files: list[bytes], number: int) -> float:
            text = self.question.replace(PLACE, str(prompts[number]))
            found = FINAL_SCORE.search(self.chat.ask(files, text, max_tokens=self.max_tokens).text)
            rating = float(found[1]) if found else math.nan
            return rating / 5 if rating <= 5 else math.nan

        return _each_sample(images, prompts, self.chat, asked, size=self.size)


class Questions:
    """Soft-TIFA: the mean probability of the expected answers to a prompt's own list of questions.

    Each prompt's metadata has a column of pairs such as ["How many cows are in the image?", "three"]. The probability of an
    answer is that of the first token of the reply; a count may be a word or a digit.

    Source: GenEval 2, arXiv 2512.16853. It reads the probabilities of all tokens; a server gives the 20 largest, and an
    answer that is not among them has probability 0.

    Args:
        server: chat server.
        model: name of the model. Empty takes the server's only one.
        template: file of the text that a question is put into, in which {prompt} stands for the question.
        column: column of the prompts' file that holds the questions, as in GenEval 2's.
        mean: arithmetic mean, or geometric, which is 0 where one answer is.
    """

    def __init__(
        self,
        server: HttpClient,
        *,
        model: str = "",
        template: Path | None = None,
        column: str = "vqa_list",
        mean: Literal["arithmetic", "geometric"] = "arithmetic",
    ) -> None:
        if mean not in ("arithmetic", "geometric"):
            raise UsageError(f"mean is {mean!r}, expected arithmetic or geometric")
        self.chat, self.question = Chat(server, model=model), question_of(template, "question")
        self.column, self.mean = column, mean

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the mean probability for each sample, `[B]`.

        Raises:
            RunError: a prompt has no questions, no request succeeded, or the server gives no log-probabilities.
        """
        lists = [
            _pairs(record.get(self.column), self.column, prompt) for record, prompt in zip(metadata, prompts, strict=True)
        ]

        def asked(files: list[bytes], number: int) -> float:
            values = [self._probability(files, question, expected) for question, expected in lists[number]]
            if self.mean == "arithmetic":
                return math.fsum(values) / len(values)
            return math.prod(value ** (1 / len(values)) for value in values)

        return _each_sample(images, prompts, self.chat, asked)

    def _probability(self, files: list[bytes], question: str, expected: str) -> float:
        answer = self.chat.ask(files, self.question.replace(PLACE, question), max_tokens=1, logprobs=True)
        return min(probability(answer, spellings(expected), where=self.chat.server.address), 1.0)


def spellings(answer: str) -> list[str]:
    """Return an answer and, if it is a number up to ten in words, its digits."""
    word = answer.strip().lower()
    return [word, str(NUMBERS.index(word))] if word in NUMBERS else [word]


def _each_sample(
    images: Tensor, prompts: Sequence[str], chat: Chat, asked: Callable[[list[bytes], int], float], *, size: int = 0
) -> Tensor:
    """Return `asked(PNG files of a sample, its number)` for each sample, `[B]`."""
    samples = wire.on_host(images, prompts)

    def scored(part: slice) -> list[float]:
        files = [wire.png(frame, size=size) for frame in wire.spread(samples[part.start], FRAMES)]
        return [score(asked(files, part.start))]

    return in_batches(scored, len(samples), batch=1, at_once=chat.server.in_flight)


def _positive(*, max_tokens: int) -> int:
    if max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}, expected at least 1")
    return max_tokens


def _rating(text: str) -> float:
    """Return the number in {"score": number}, NaN for any other text."""
    inner = re.sub(r"^```(?:json)?|```$", "", text.strip()).strip()
    try:
        value = json.loads(inner)
        return score(value["score"]) if isinstance(value, dict) and not isinstance(value.get("score"), bool) else math.nan
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.nan


def _pairs(value: Any, column: str, prompt: str) -> list[tuple[str, str]]:
    """Return the questions of a prompt with their answers.

    Raises:
        RunError: there is none, or one is no pair of texts.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise RunError(
            f"prompt {prompt!r} has no questions: its metadata's {column} is {kind(value)}, expected pairs of a question "
            "and an answer"
        )
    for pair in value:
        texts = isinstance(pair, Sequence) and not isinstance(pair, str) and all(isinstance(text, str) for text in pair)
        if not texts or len(pair) != 2:
            raise RunError(f"prompt {prompt!r} has {kind(pair)} in {column}, expected a question and an answer")
    return [(question, answer) for question, answer in value]
