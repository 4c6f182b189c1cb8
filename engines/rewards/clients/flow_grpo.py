"""Rewards of the servers of flow_grpo and verl-omni, which speak in pickles: POST /."""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.rewards.clients import images as wire
from fluvial.engines.rewards.clients.parallel import in_batches
from fluvial.engines.rewards.clients.replies import field, scores
from fluvial.engines.rewards.clients.unpickle import ForbiddenPickleError, loads
from fluvial.engines.wire.client import HttpClient, shown

FORMS = {
    "verl": "scores",
    "unified": "outputs",
    "deqa": "outputs",
    "geneval": "scores",
}  # field of the reply that holds the scores


class FlowGrpo:
    """Scores of a server whose requests and replies are pickles; images travel as JPEG files.

    A reply is read by an interpreter that knows numbers, texts, lists and dicts alone, and calls nothing (`unpickle`). The
    server itself unpickles what it receives, so its port must be closed to others.

    Source of the formats: verl-omni's HTTP scorer, and flow_grpo's `rewards.py`.

    Args:
        server: the server.
        trust_pickle: must be True, as a sign that the format is known to be one of pickles.
        form: fields of a request: verl (images, prompts, metadata), unified (images, prompts), deqa (images), or geneval
            (images, meta_datas, only_strict).
        field: field of the reply that holds the scores; by default that of the form. A GenEval server also has
            strict_rewards.
        batch: largest number of samples per request.
    """

    def __init__(
        self,
        server: HttpClient,
        *,
        trust_pickle: bool = False,
        form: Literal["verl", "unified", "deqa", "geneval"] = "verl",
        field: str = "",
        batch: int = 64,
    ) -> None:
        if not trust_pickle:
            raise UsageError(
                f"trust_pickle is False, and {server.address} speaks in pickles: set trust_pickle to True if the server is "
                "your own. Its replies are read as plain data, without running any code that they name"
            )
        if form not in FORMS:
            raise UsageError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
        if batch < 1:
            raise UsageError("batch", batch, "at least 1")
        self.server, self.form, self.field, self.batch = server, form, field or FORMS[form], batch

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the server's score of each sample, `[B]`; NaN for one that it has none of.

        Raises:
            RunError: the samples are videos, or no request succeeded.
        """
        if images.ndim != 4:
            raise RunError(f"a server of flow_grpo scores images, got samples of shape {list(images.shape[1:])}")
        samples = wire.on_host(images, prompts)

        def scored(part: slice) -> list[float]:
            request = self._request(samples[part], [*map(str, prompts[part])], [*metadata[part]])
            body = pickle.dumps(request, protocol=4)
            where = self.server.address
            answer = self.server.post_bytes("", body, content_type="application/octet-stream")
            try:
                value = loads(answer)
            except ForbiddenPickleError as error:
                raise RunError(f"{where} answered with what is no pickle of numbers ({error}): {shown(answer)}") from error
            return scores(field(value, self.field, where=where), len(samples[part]), where=f"{where}: {self.field}")

        return in_batches(scored, len(samples), batch=self.batch, at_once=self.server.in_flight)

    def _request(self, samples: Tensor, prompts: list[str], metadata: list[Mapping[str, Any]]) -> dict[str, Any]:
        files = [wire.jpeg(sample) for sample in samples]
        if self.form == "deqa":
            return {"images": files}
        if self.form == "unified":
            return {"images": files, "prompts": prompts}
        if self.form == "geneval":
            # The server asks for the prompt and its kind in each record.
            records = [{"prompt": prompt, "tag": "", **record} for prompt, record in zip(prompts, metadata, strict=True)]
            return {"images": files, "meta_datas": records, "only_strict": False}
        return {"images": files, "prompts": prompts, "metadata": {}}
