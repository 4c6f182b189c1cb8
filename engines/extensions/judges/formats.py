"""Clients of reward servers in the formats of Flow-Factory, UniRL and flow_grpo."""

import io
import math
import pickle
import pickletools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.judges.batches import (
    QUALITY,
    check_positive,
    encode_jpeg,
    encode_png,
    list_frames,
    read_field,
    read_score,
    read_scores,
    score_in_batches,
    to_base64,
)
from fluvial.engines.extensions.wire.client import HttpClient, format_reply

MOST_OPCODES = 1_000_000
FORMATS = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "u1": "<B", "b1": "<?"}
OPCODES = (
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "SHORT_BINBYTES BINBYTES MARK EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "TUPLE MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"
)  # the last four make numbers of numpy


class ForbiddenPickleError(Exception):
    """Error of a pickle that is damaged or holds more than plain data."""


class _Dtype:
    """Stand-in for `numpy.dtype`, as the pickle of a number builds it."""

    def __init__(self, code: str, *flags: object) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|"):
            raise ForbiddenPickleError("the pickle holds big-endian numbers")


class _Scalar:
    """Stand-in for the function of numpy that builds a number."""

    __slots__ = ()  # a pickle cannot set attributes

    def __call__(self, dtype: Any, raw: bytes) -> Any:
        if not isinstance(dtype, _Dtype) or dtype.code not in FORMATS:
            raise ForbiddenPickleError("the pickle holds an array or an object of numpy, which is not plain data")
        (value,) = struct.unpack(FORMATS[dtype.code], raw)
        return value


NAMES: dict[str, Any] = {  # a score is often a number of numpy
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray.scalar": _Scalar(),
    "numpy._core.multiarray.scalar": _Scalar(),
}


class NullFile(io.StringIO):
    """File that discards its text."""

    def write(self, text: str) -> int:
        """Discard a text, and return its length."""
        return len(text)


class _Unpickler(pickle.Unpickler):
    """Unpickler that only knows the names of numpy's numbers and never imports."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        full = f"{module}.{name}"
        if full not in NAMES:
            raise ForbiddenPickleError(f"the pickle names {full[:80]}, which is not plain data")
        return NAMES[full]


def unpickle(data: bytes) -> Any:
    """Return the value of a pickle of plain data: None, bools, numbers (also numpy's), str, bytes, list, tuple and dict.

    `pickle.loads` calls any function that a pickle names, so a server could run code in the training process. Here only the
    opcodes of plain data are allowed, and names are looked up in a table of numpy's numbers.

    Raises:
        ForbiddenPickleError: the pickle holds anything else, or is damaged.
    """
    known = frozenset(OPCODES.split())
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number > MOST_OPCODES:
                raise ForbiddenPickleError(f"the pickle has more than {MOST_OPCODES} operations")
            if opcode.name not in known:
                raise ForbiddenPickleError(f"the pickle has the operation {opcode.name}, which plain data does not need")
            if opcode.name == "LONG_BINPUT" and (argument or 0) > number:  # a memo of this size would take gigabytes
                raise ForbiddenPickleError("the pickle is damaged")
        # `dis` raises for a stack that does not end with one value. Indented lines would be as long as the stack is deep.
        pickletools.dis(data, out=NullFile(), indentlevel=0)
        return _Unpickler(io.BytesIO(data)).load()
    except ForbiddenPickleError:
        raise
    except Exception as error:  # a damaged pickle may pop from an empty stack or append to something other than a list
        raise ForbiddenPickleError("the pickle is damaged") from error


METRICS: dict[str, Callable[[list[float]], float]] = {
    "first": lambda values: values[0],
    "mean": lambda values: sum(values) / len(values),
    "max": max,
}
# Field of a reply of flow_grpo's servers that holds the scores.
FORMS = {"verl": "scores", "unified": "outputs", "deqa": "outputs", "geneval": "scores"}


class FlowFactory:
    """Client of a Flow-Factory reward server, POST /compute; images are sent as PNG files, videos as lists of them.

    The images of the prompts' records are sent too, if all records have one.

    Source of the format: Flow-Factory, `reward_server/example_server.py`.

    Args:
        batch: largest number of samples per request.
    """

    def __init__(self, server: HttpClient, *, batch: int = 16) -> None:
        check_positive("batch", batch)
        self.server, self.batch = server, batch

    def __call__(self, images: Tensor, prompts: Sequence[str], condition_images: Sequence[Tensor] | None = None) -> Tensor:
        """Return the server's score of each sample, `[B]`; NaN for samples without one.

        Raises:
            RunError: no request succeeded.
        """

        def score_part(samples: Tensor, part: slice) -> list[float]:
            conditions = None if condition_images is None else condition_images[part]
            reply = self.server.post("/compute", self._build_payload(samples, [*map(str, prompts[part])], conditions))
            return read_scores(reply, "rewards", len(samples), where=f"{self.server.address}/compute")

        return score_in_batches(images, prompts, score_part, server=self.server, batch=self.batch)

    def _build_payload(
        self, samples: Tensor, prompts: list[str], conditions: Sequence[Tensor] | None = None
    ) -> dict[str, Any]:
        files = [[to_base64(encode_png(frame)) for frame in list_frames(sample)] for sample in samples]
        videos = samples.ndim == 5
        return {
            "prompt": prompts,
            "image": None if videos else [file for (file,) in files],
            "video": files if videos else None,
            "condition_images": None if conditions is None else [[to_base64(encode_png(image))] for image in conditions],
            "condition_videos": None,
        }


class UniRL:
    """Client of a UniRL reward service, POST /score; images are sent as JPEG files, with their prompt and its metadata.

    A reward returns several numbers per sample, which `metric` reduces to a score. A sample needs a score of every reward.

    Source of the format: UniRL, `unirl-reward-service/reward_service/schemas.py`.

    Args:
        rewards: names of rewards of the server; their scores are added.
        metric: reduction of the numbers of one reward: the first, their mean or the largest.
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
        quality: int = QUALITY,
    ) -> None:
        if not rewards or len(set(rewards)) < len(rewards) or not all(rewards):
            raise UsageError("rewards", list(rewards), "names that the server has, each once")
        if metric not in METRICS:
            raise UsageError("metric", metric, f"one of {', '.join(METRICS)}")
        if not 1 <= quality <= 100:
            raise UsageError("quality", quality, "1 to 100")
        check_positive("batch", batch)
        self.server, self.rewards, self.metric, self.batch, self.quality = server, rewards, metric, batch, quality

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Tensor | dict[str, Tensor]:
        """Return the score of each sample, `[B]`; NaN for samples without one.

        With several rewards return a mapping: their sum as `score`, and the scores of each under its name.

        Raises:
            RunError: the samples are videos, or no request succeeded.
        """
        _check_images(images)

        def score_part(samples: Tensor, part: slice) -> list[list[float]]:
            requests = [
                {
                    "history": [{"text": str(prompt), "image_b64": to_base64(encode_jpeg(sample, quality=self.quality))}],
                    "required_rewards": list(self.rewards),
                    "metadata": {name: value for name, value in record.items() if _is_json(value)},
                }
                for sample, prompt, record in zip(samples, prompts[part], metadata[part], strict=True)
            ]
            return self._read_scores(self.server.post("/score", {"requests": requests}), len(requests))

        scores = score_in_batches(images, prompts, score_part, server=self.server, batch=self.batch)
        if len(self.rewards) == 1:
            return scores[:, 0]
        return {"score": scores.sum(1), **dict(zip(self.rewards, scores.unbind(1), strict=True))}

    def _read_scores(self, reply: Any, count: int) -> list[list[float]]:
        """Return the score of each reward for each sample of a reply; NaN for missing ones."""
        where = f"{self.server.address}/score"
        results = [_as_mapping(result) for result in read_field(reply, "results", list[Any], where=where)]
        errors: list[Any] = read_field({"errors": reply.get("errors") or []}, "errors", list[Any], where=where)
        problems = [_as_mapping(problem) for problem in errors]
        if len(results) != count:
            raise RunError(f"{where}: results has {len(results)} values, expected {count}, one per sample")
        scores = [[self._reduce_metrics(_as_mapping(result.get(name))) for name in self.rewards] for result in results]
        reasons = [
            f"{name}: {format_reply(str(problem[name]))}"
            for problem in problems
            for name in self.rewards
            if problem.get(name)
        ]
        missing = any(name not in result for result in results for name in self.rewards)
        if missing and all(any(map(math.isnan, values)) for values in scores):
            raise RunError(f"{where} has no score of any sample: {reasons[0] if reasons else 'rewards are missing'}")
        return scores

    def _reduce_metrics(self, metrics: Mapping[str, Any]) -> float:
        """Return the score among the numbers of one reward, NaN if there are none."""
        values = [read_score(value) for value in metrics.values()] or [math.nan]
        # The result of max() with NaN depends on the order.
        return math.nan if any(map(math.isnan, values)) else METRICS[self.metric](values)


class FlowGrpo:
    """Client of a server of flow_grpo or verl-omni, POST /, whose requests and replies are pickles; images are JPEG files.

    Replies are read as plain data and run no code (`unpickle`). The server unpickles its requests, so its port must not be
    reachable by others.

    Source of the formats: verl-omni's HTTP scorer, and flow_grpo's `rewards.py`.

    Args:
        trust_pickle: must be True, to confirm that pickles are sent to the server.
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
                f"trust_pickle is False, and {server.address} uses pickles: set trust_pickle to True if the server is "
                "your own. Its replies are read as plain data, without running any code that they name"
            )
        if form not in FORMS:
            raise UsageError("form", form, f"one of {', '.join(FORMS)}")
        check_positive("batch", batch)
        self.server, self.form, self.field, self.batch = server, form, field or FORMS[form], batch

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the server's score of each sample, `[B]`; NaN for samples without one.

        Raises:
            RunError: the samples are videos, or no request succeeded.
        """
        _check_images(images)
        where = self.server.address

        def score_part(samples: Tensor, part: slice) -> list[float]:
            request = self._build_request(samples, [*map(str, prompts[part])], metadata[part])
            body = pickle.dumps(request, protocol=4)
            reply = self.server.post_bytes("", body, content_type="application/octet-stream")
            try:
                value = unpickle(reply)
            except ForbiddenPickleError as error:
                raise RunError(f"{where}: the reply is not a pickle of numbers ({error}): {format_reply(reply)}") from error
            return read_scores(value, self.field, len(samples), where=where)

        return score_in_batches(images, prompts, score_part, server=self.server, batch=self.batch)

    def _build_request(self, samples: Tensor, prompts: list[str], metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        files = [encode_jpeg(sample) for sample in samples]
        if self.form == "deqa":
            return {"images": files}
        if self.form == "unified":
            return {"images": files, "prompts": prompts}
        if self.form == "geneval":
            # The server requires the prompt and its kind in each record.
            records = [{"prompt": prompt, "tag": "", **record} for prompt, record in zip(prompts, metadata, strict=True)]
            return {"images": files, "meta_datas": records, "only_strict": False}
        return {"images": files, "prompts": prompts, "metadata": {}}


def _as_mapping(value: Any) -> dict[str, Any]:
    """Return a JSON object; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def _check_images(samples: Tensor) -> None:
    if samples.ndim != 4:
        raise RunError(f"the server scores images, got samples of shape {list(samples.shape[1:])}")


def _is_json(value: Any) -> bool:
    """Return whether a value of a prompt's metadata is JSON-serialisable; bytes of an image are not."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(inner) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)
