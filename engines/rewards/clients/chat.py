"""Ask a vision-language model behind an OpenAI-compatible chat server (vLLM, sglang, or a hosted one) about images."""

import math
import threading
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.rewards.clients import images as wire
from fluvial.engines.rewards.clients.replies import element, field, kind
from fluvial.engines.wire.client import HttpClient, shown

TEMPLATES = Path(__file__).parent / "templates"
TOP = 20  # tokens whose log-probabilities are asked for, the most that servers give
PLACE = "{prompt}"  # what a template holds in place of the prompt


class Answer(NamedTuple):
    """Reply of the model.

    Args:
        text: what it says.
        first: log-probability of each likely first token, if they were asked for and the server gives them.
    """

    text: str
    first: Mapping[str, float] | None


class Chat:
    """Requests to a model of a chat server.

    Args:
        server: the server; its address ends with /v1, which is added where it has no path.
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
    ) -> Answer:
        """Return the model's reply to images and a text, drawn at temperature 0.

        Args:
            images: PNG files.
            text: the question.
            max_tokens: largest number of tokens of the reply.
            logprobs: whether to ask for the log-probabilities of the first token.
            schema: JSON schema of the reply.

        Raises:
            RunError: there is no reply, or it has another form.
        """
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": wire.data_url(file)}} for file in images]
        request: dict[str, Any] = {
            "model": self._model(),
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        if logprobs:
            request |= {"logprobs": True, "top_logprobs": TOP}
        if schema is not None:
            shape = {"name": "reply", "strict": True, "schema": schema}
            request["response_format"] = {"type": "json_schema", "json_schema": shape}
        where = f"{self.server.address}{self.path}/chat/completions"
        answer = self.server.post(f"{self.path}/chat/completions", request)
        choice = element(field(answer, "choices", where=where), 0, where=f"{where}: choices")
        content = field(field(choice, "message", where=f"{where}: choices[0]"), "content", where=f"{where}: message")
        if content is not None and not isinstance(content, str):
            raise RunError(f"{where}: content is {kind(content)}, expected text")
        return Answer(content or "", _first(choice, where) if logprobs else None)

    def _model(self) -> str:
        """Return the name of the model, which is asked for once."""
        with self._lock:
            if not self.model:
                where = f"{self.server.address}{self.path}/models"
                listed = field(self.server.get(f"{self.path}/models"), "data", where=where)
                found = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
                names = [name for name in found if isinstance(name, str) and name]
                if len(names) != 1:
                    has = shown(", ".join(names)) if names else "none"
                    raise RunError(f"{where} lists {len(names)} models ({has}): set `model` to the name of one")
                self.model = names[0]
            return self.model


def template(path: Path | None, name: str) -> str:
    """Return the text of a question: that of a file, or one that comes with fluvial.

    Args:
        path: file of the user, in which {prompt} stands for the prompt.
        name: name of the built-in one.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    path = path or TEMPLATES / f"{name}.txt"
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"template is {path}, which cannot be read as text: {error}") from error
    if not text:
        raise UsageError(f"template is {path}, which is empty: write the question, with {PLACE} in place of the prompt")
    return text


def probability(answer: Answer, words: Sequence[str], *, where: str) -> float:
    """Return the probability that the reply begins with one of the words, whatever its case and its blanks.

    Raises:
        RunError: the server gave no log-probabilities.
    """
    if answer.first is None:
        raise RunError(
            f"{where} gives no log-probabilities: use vlm_rating, which reads a number, or a server that gives them "
            "(vLLM and sglang do)"
        )
    wanted = {word.strip().lower() for word in words}
    found = [value for token, value in answer.first.items() if token.strip().lower() in wanted]
    return math.fsum(map(math.exp, found))


def _first(choice: Any, where: str) -> dict[str, float] | None:
    """Return the log-probability of each likely first token; None if the server gives none.

    Raises:
        RunError: it gives something else.
    """
    given = choice.get("logprobs")
    content = given.get("content") if isinstance(given, dict) else given
    if content is None or content == []:
        return None
    first = element(content, 0, where=f"{where}: logprobs.content")
    listed = field(first, "top_logprobs", where=f"{where}: logprobs.content[0]")
    if not isinstance(listed, list):
        raise RunError(f"{where}: top_logprobs is {kind(listed)}, expected a list")
    found: dict[str, float] = {}
    for entry in listed:
        token, value = (entry.get("token"), entry.get("logprob")) if isinstance(entry, dict) else (None, None)
        if not isinstance(token, str) or not isinstance(value, Real) or isinstance(value, bool):
            raise RunError(f"{where}: top_logprobs holds {kind(entry)} that is no token with its logprob")
        try:
            # Rounding may lift a certain token above 0. A NaN counts as impossible.
            found[token] = min(float(value), 0.0) if value == value else -math.inf
        except OverflowError:
            raise RunError(f"{where}: top_logprobs holds a logprob that is no log-probability") from None
    return found or None
