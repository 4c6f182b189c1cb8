"""Rewards by a VLM judge on an OpenAI-compatible chat server (vLLM, sglang, or a hosted one).

They ask a yes-or-no question, a rating, UnifiedReward's prompts, lists of questions, or comparisons within a group.
"""

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.engines.extensions.judges.batches import (
    check_positive,
    encode_png,
    pick_frames,
    read_field,
    read_score,
    score_in_batches,
    to_base64,
)
from fluvial.engines.extensions.wire.client import HttpClient, format_reply
from fluvial.engines.extensions.wire.decode import WireError, convert
from fluvial.engines.scoring.pairwise import win_rates

TEMPLATES = Path(__file__).parent / "templates"
TOP = 20  # requested log-probabilities of tokens, the most that servers return
PROMPT = "{prompt}"  # placeholder in templates
FRAMES = 8  # largest number of frames of a video per request
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
AXES = ("alignment", "coherence", "style")
AXIS_SCORE = re.compile(r"(\w+) Score \(1-5\):\s*([0-5](?:\.\d+)?)")
FINAL_SCORE = re.compile(r"Final Score:\s*([1-5](?:\.\d+)?)")


class TopToken(Struct, frozen=True):
    """Likely token of a reply."""

    token: str
    logprob: float


class TokenLogprobs(Struct, frozen=True):
    """Likely tokens at one position of a reply."""

    top_logprobs: list[TopToken]


class Logprobs(Struct, frozen=True):
    """Likely tokens of a reply; servers without them send null."""

    content: list[TokenLogprobs] | None = None


class Message(Struct, frozen=True):
    """Message of a model."""

    content: str | None


class ChatChoice(Struct, frozen=True):
    """Reply of a model."""

    message: Message
    logprobs: Logprobs | None = None


class ListedModel(Struct, frozen=True):
    """Model of a server."""

    id: str


class RatingReply(Struct, frozen=True):
    """Rating, in the form that the model is asked for."""

    score: float


class ChatAnswer(NamedTuple):
    """Reply of the model.

    Args:
        text: text of the reply.
        first: log-probability of each likely first token; empty if the server returns none.
    """

    text: str
    first: Mapping[str, float]


class Chat:
    """Requests to a model of a chat server.

    Args:
        server: chat server; /v1 is added to an address without a path.
        model: name of the model. Empty takes the server's only one.
    """

    def __init__(self, server: HttpClient, *, model: str = "") -> None:
        self.server, self.model = server, model
        self.path = "" if server.url.path.strip("/") else "/v1"
        self._lock = threading.Lock()

    def ask(
        self,
        images: Sequence[bytes],
        text: str,
        *,
        max_tokens: int,
        logprobs: bool = False,
        schema: Mapping[str, Any] | None = None,
    ) -> ChatAnswer:
        """Return the model's reply to images and a text, at temperature 0.

        Args:
            images: PNG files.
            logprobs: whether to request the log-probabilities of the first token.
            schema: JSON schema of the reply.

        Raises:
            RunError: there is no reply, or it has another form.
        """
        urls = [f"data:image/png;base64,{to_base64(file)}" for file in images]
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        request: dict[str, Any] = {
            "model": self._find_model(),
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        if logprobs:
            request |= {"logprobs": True, "top_logprobs": TOP}
        if schema is not None:
            shape = {"name": "reply", "strict": True, "schema": schema}
            request["response_format"] = {"type": "json_schema", "json_schema": shape}
        reply = self.server.post(f"{self.path}/chat/completions", request)
        where = f"{self.server.address}{self.path}/chat/completions"
        at_least_one: Any = Annotated[list[ChatChoice], Meta(min_length=1)]
        choices: list[ChatChoice] = read_field(reply, "choices", at_least_one, where=where)
        first = choices[0].logprobs
        tokens = first.content[0].top_logprobs if first is not None and first.content else []
        # Rounding may lift the log-probability of a certain token above 0. NaN counts as impossible.
        logprob_of = {top.token: min(top.logprob, 0.0) if top.logprob == top.logprob else -math.inf for top in tokens}
        return ChatAnswer(choices[0].message.content or "", logprob_of)

    def ask_probabilities(self, images: Sequence[bytes], text: str, *answers: Sequence[str]) -> list[float]:
        """Return the probability of each answer: that the reply begins with one of its words, ignoring case and blanks.

        Raises:
            RunError: the server returned no log-probabilities.
        """
        first = self.ask(images, text, max_tokens=1, logprobs=True).first
        if not first:
            raise RunError(
                f"{self.server.address} gives no log-probabilities: use vlm_rating, which reads a number, or a server that "
                "returns them (vLLM and sglang do)"
            )
        return [
            math.fsum(math.exp(value) for token, value in first.items() if token.strip().lower() in words)
            for words in answers
        ]

    def _find_model(self) -> str:
        """Return the name of the model; the server is asked once."""
        with self._lock:
            if not self.model:
                where, reply = f"{self.server.address}{self.path}/models", self.server.get(f"{self.path}/models")
                listed: list[ListedModel] = read_field(reply, "data", list[ListedModel], where=where)
                if len(listed) != 1:
                    names = format_reply(", ".join(model.id for model in listed)) if listed else "none"
                    raise RunError(f"{where} lists {len(listed)} models ({names}): set `model` to the name of one")
                self.model = listed[0].id
            return self.model


class YesNo:
    """Probability of yes: P(yes) / (P(yes) + P(no)) over the first token of the reply, all spellings added.

    Source: VQAScore, arXiv 2404.01291, whose question is the built-in template.

    Args:
        model: name of the model. Empty takes the server's only one.
        template: file of the question, with {prompt} in place of the prompt.
    """

    def __init__(self, server: HttpClient, *, model: str = "", template: Path | None = None) -> None:
        self.chat, self.question = Chat(server, model=model), read_question(template, "yes_no")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the probability for each sample, `[B]`; NaN where neither yes nor no is likely.

        Raises:
            RunError: no request succeeded, or the server returns no log-probabilities.
        """

        def score_sample(files: list[bytes], number: int) -> float:
            text = self.question.replace(PROMPT, str(prompts[number]))
            yes, no = self.chat.ask_probabilities(files, text, ["yes"], ["no"])
            return yes / (yes + no) if yes + no > 0 else math.nan

        return _score_each(images, prompts, self.chat, score_sample)


class Rating:
    """Rating in JSON, scaled from 0 at `low` to 1 at `high`.

    The reply must be {"score": number}, which servers with guided decoding (vLLM, sglang, OpenAI) enforce. A reply in prose
    or a number outside the range gives no score.

    Args:
        server, model, template: as in `YesNo`.
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
        self.chat, self.question = Chat(server, model=model), read_question(template, "rating")
        check_positive("max_tokens", max_tokens)
        self.low, self.high, self.max_tokens = low, high, max_tokens

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the rating of each sample in [0, 1], `[B]`; NaN where the reply is not a rating.

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

        def score_sample(files: list[bytes], number: int) -> float:
            text = question.replace(PROMPT, str(prompts[number]))
            rating = _parse_rating(self.chat.ask(files, text, max_tokens=self.max_tokens, schema=schema).text)
            return (rating - self.low) / (self.high - self.low) if self.low <= rating <= self.high else math.nan

        return _score_each(images, prompts, self.chat, score_sample)


class UnifiedReward:
    """UnifiedReward's score: the number after "Final Score:", from 1 to 5, divided by 5.

    Source: arXiv 2503.05236; question, image size and pattern as in flow_grpo. A reply without a score is NaN here and 0 in
    flow_grpo.

    Args:
        server, model, template: as in `YesNo`; the model is UnifiedReward.
        size: width and height that images are resized to; 0 does not resize.
    """

    def __init__(
        self, server: HttpClient, *, model: str = "", template: Path | None = None, size: int = 512, max_tokens: int = 1024
    ) -> None:
        if size < 0:
            raise UsageError("size", size, "pixels, or 0 for no resizing")
        self.chat, self.question = Chat(server, model=model), read_question(template, "unified_reward")
        check_positive("max_tokens", max_tokens)
        self.size, self.max_tokens = size, max_tokens

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each sample in [0.2, 1], `[B]`; NaN where the reply has none.

        Raises:
            RunError: no request succeeded.
        """

        def score_sample(files: list[bytes], number: int) -> float:
            text = self.question.replace(PROMPT, str(prompts[number]))
            match = FINAL_SCORE.search(self.chat.ask(files, text, max_tokens=self.max_tokens).text)
            rating = float(match[1]) if match else math.nan
            return rating / 5 if rating <= 5 else math.nan

        return _score_each(images, prompts, self.chat, score_sample, size=self.size)


class UnifiedReward2:
    """UnifiedReward 2's scores of an image: alignment, coherence and style, from 1 to 5, divided by 5, and their mean.

    Source: UnifiedReward's prompt and pattern as in Pref-GRPO's `fastvideo/rewards` (`get_unifiedreward_image_template`,
    `unifiedreward.py`), which does not divide. A missing score is NaN here and the batch's mean there.

    Args:
        server, model, template: as in `YesNo`; the model is UnifiedReward-2.0.
        score: score to learn from: "mean", or one of the three.
    """

    def __init__(
        self,
        server: HttpClient,
        *,
        model: str = "",
        template: Path | None = None,
        score: Literal["mean", "alignment", "coherence", "style"] = "mean",
        max_tokens: int = 1024,
    ) -> None:
        if score not in ("mean", *AXES):
            raise UsageError("score", score, f"one of mean, {', '.join(AXES)}")
        self.chat, self.question = Chat(server, model=model), read_question(template, "unified_reward_2")
        check_positive("max_tokens", max_tokens)
        self.score, self.max_tokens = score, max_tokens

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return `score` and the three scores, in [0, 1], `[B]` each; NaN where the reply has none.

        Raises:
            RunError: no request succeeded.
        """

        def score_part(samples: Tensor, part: slice) -> list[list[float]]:
            files = [encode_png(frame) for frame in pick_frames(samples[0], FRAMES)]
            text = self.question.replace(PROMPT, str(prompts[part.start]))
            reply = self.chat.ask(files, text, max_tokens=self.max_tokens).text
            stated = {name.lower(): float(number) for name, number in AXIS_SCORE.findall(reply)}
            return [[stated.get(axis, math.nan) / 5 for axis in AXES]]

        scores = score_in_batches(images, prompts, score_part, server=self.chat.server, batch=1)
        columns = {axis: scores[..., i] for i, axis in enumerate(AXES)}
        return {"score": columns.get(self.score, scores.mean(-1)), **columns}


class Questions:
    """Soft-TIFA: mean probability of the expected answers to the questions of a prompt.

    Each prompt's metadata has a column of pairs such as ["How many cows are in the image?", "three"]. The probability of an
    answer is that of the first token of the reply; a count may be a word or a digit.

    Source: GenEval 2, arXiv 2512.16853. It reads the probabilities of all tokens. A server returns the 20 largest; other
    answers have probability 0 here.

    Args:
        server, model, template: as in `YesNo`; {prompt} stands for one of the questions.
        column: column of the questions in the file of prompts, by default as in GenEval 2.
        mean: arithmetic, or geometric, which is 0 if one probability is 0.
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
            raise UsageError("mean", mean, "arithmetic or geometric")
        self.chat, self.question = Chat(server, model=model), read_question(template, "question")
        self.column, self.mean = column, mean

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the mean probability for each sample, `[B]`.

        Raises:
            RunError: a prompt has no questions, no request succeeded, or the server returns no log-probabilities.
        """
        pairs = zip(metadata, prompts, strict=True)
        lists = [_read_questions(record.get(self.column), self.column, prompt) for record, prompt in pairs]

        def score_sample(files: list[bytes], number: int) -> float:
            values = []
            for question, expected in lists[number]:
                text = self.question.replace(PROMPT, question)
                (probability,) = self.chat.ask_probabilities(files, text, spell(expected))
                values.append(min(probability, 1.0))
            if self.mean == "arithmetic":
                return math.fsum(values) / len(values)
            return math.prod(value ** (1 / len(values)) for value in values)

        return _score_each(images, prompts, self.chat, score_sample)


def spell(answer: str) -> list[str]:
    """Return an answer and, if it is the word of a number up to ten, its digits."""
    word = answer.strip().lower()
    return [word, str(NUMBERS.index(word))] if word in NUMBERS else [word]


def read_question(path: Path | None, name: str) -> str:
    """Return the question in the user's file, else the built-in template of a name.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    path = path or TEMPLATES / f"{name}.txt"
    with convert_errors(UsageError, OSError, ValueError, says=f"template is {path}, which cannot be read as text"):
        text = path.read_text(encoding="utf-8").strip()
    if not text:
        raise UsageError(f"template is {path}, which is empty: write the question, with {PROMPT} in place of the prompt")
    return text


def _score_each(
    images: Tensor, prompts: Sequence[str], chat: Chat, score_sample: Callable[[list[bytes], int], float], *, size: int = 0
) -> Tensor:
    """Return `score_sample(PNG files of the sample, its number)` of each sample, `[B]`."""

    def score_part(samples: Tensor, part: slice) -> list[float]:
        files = [encode_png(frame, size=size) for frame in pick_frames(samples[0], FRAMES)]
        return [read_score(score_sample(files, part.start))]

    return score_in_batches(images, prompts, score_part, server=chat.server, batch=1)


def _parse_rating(text: str) -> float:
    """Return the number in {"score": number}; NaN for any other text."""
    inner = re.sub(r"^```(?:json)?|```$", "", text.strip()).strip()
    try:
        return read_score(msgspec.json.decode(inner, type=RatingReply).score)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return math.nan


def _read_questions(value: Any, column: str, prompt: str) -> list[tuple[str, str]]:
    """Return the (question, answer) pairs of a prompt; RunError if there are none."""
    missing = f"prompt {prompt!r} has no questions in its metadata, expected pairs of a question and an answer"
    with convert_errors(RunError, WireError, says=missing):
        return convert(value, Annotated[list[tuple[str, str]], Meta(min_length=1)], name=column)  # type: ignore[arg-type]


ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
# Name of the samples in each built-in question.
KINDS = {"pairwise": "Image", "pairwise_video": "Video", "pairwise_edit": "Edited image"}


class WinRate:
    """Win rate of a sample within its group, in [0, 1]; a tie or a reply without a verdict is half a win.

    Each two samples of a group are compared once: G (G - 1) / 2 requests for a group of G. Videos are sent as frames. If
    every prompt has an image, the samples are compared as edits of it, and it is sent first.

    Source: Pref-GRPO, arXiv 2508.20751, and its repository's `fastvideo/rewards`; the judge there is UnifiedReward-Think.

    Args:
        server, model: as in `YesNo`.
        template: file of the question, with {prompt} in place of the prompt; by default the one for images, videos or
            edits. The reply must hold "Image 1 is better" or "Image 2 is better" (Video, Edited image) in <answer> tags.
        size: width and height that images are resized to; 0 does not resize.
    """

    def __init__(
        self, server: HttpClient, *, model: str = "", template: Path | None = None, size: int = 0, max_tokens: int = 4096
    ) -> None:
        self.chat, self.size, self.max_tokens = Chat(server, model=model), size, max_tokens
        check_positive("max_tokens", max_tokens)
        self.questions = {name: read_question(template, name) for name in KINDS}

    def __call__(
        self, images: Tensor, prompts: Sequence[str], group: int, condition_images: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return the win rate of each sample, `[B]`; NaN for samples without a successful comparison.

        Args:
            images: all samples of one group.
            prompts: prompt of the group, repeated per sample.
            group: number of the group.
            condition_images: image before the edit, for edits.

        Raises:
            RunError: the group has one sample, or no request succeeded.
        """
        if len(images) < 2:
            raise RunError(
                "win_rate compares the samples of a group, and a group has one: set `sampling.group` to 2 or more"
            )
        samples, pairs = images.detach().cpu().float(), list(combinations(range(len(images)), 2))
        files = [[encode_png(frame, size=self.size) for frame in pick_frames(sample, FRAMES)] for sample in samples]
        name = "pairwise_video" if images.ndim == 5 else "pairwise" if condition_images is None else "pairwise_edit"
        before = [encode_png(condition_images[0], size=self.size)] if name == "pairwise_edit" and condition_images else []
        question = self.questions[name].replace(PROMPT, str(prompts[0]))

        def compare(_: Tensor, part: slice) -> list[float]:
            first, second = pairs[part.start]
            reply = self.chat.ask([*before, *files[first], *files[second]], question, max_tokens=self.max_tokens)
            return [parse_verdict(reply.text, KINDS[name])]

        wins = score_in_batches(torch.arange(len(pairs)), [question] * len(pairs), compare, server=self.chat.server, batch=1)
        return win_rates(wins, len(images))


def parse_verdict(text: str, kind: str) -> float:
    """Return 1 if a reply prefers the first sample, 0 for the second, and 0.5 for neither.

    Args:
        text: reply of the model.
        kind: name of the samples, see `KINDS`. Edits may be judged without <answer> tags.
    """
    match, is_edit = ANSWER.search(text), kind == KINDS["pairwise_edit"]
    for answer in ([match[1]] if match else []) + ([text] if is_edit else []):
        for number, value in ((1, 1.0), (2, 0.0)):
            if f"{kind} {number} is better".lower() in answer.lower():
                return value
    return 0.5
