"""Endpoints that change the weights of a rollout server, with the fields of sglang-diffusion.

POST /update_weights_from_disk    {model_path, target_modules?, weight_version?, sha256?}
POST /update_weights_from_tensor  {load_format: "fluvial_shared_files", serialized_named_tensors: [JSON of a bucket], ...}
POST /v1/set_lora                 {lora_nickname, lora_path, target?, strength?, merge_mode?, lora_alpha?, weight_version?}
POST /v1/unmerge_lora_weights     {target?, weight_version?}
GET  /v1/list_loras
POST /get_weights_checksum        {module_names?}
POST /release_memory_occupation, /resume_memory_occupation

`weight_version` and `sha256` are fluvial's own; sglang ignores them. A change is made while no batch is sampled, so that no
sample is made by two versions of the weights.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fluvial.engines.serve.asgi import RequestError, json_of
from fluvial.engines.serve.rollout.weights import ServedWeights, Staged
from fluvial.engines.wire.errors import WireError
from fluvial.engines.wire.fields import Fields, shown
from fluvial.engines.wire.weights import SHARED_FILES, shared_bucket
from fluvial.models.lora_layer import Product

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Result = TypeVar("Result")
MOST_BYTES = 64_000_000  # of a request
MOST_VERSION = 2**53
# How an adapted layer multiplies its input. Neither writes into the base weights.
PRODUCTS: dict[str, Product] = {"auto": "factors", "dynamic": "factors", "merge": "merged"}


class Between(Protocol):
    """Runs a function while no batch is sampled, and returns its result."""

    def __call__(self, function: Callable[[], Result], /) -> Awaitable[Result]:
        """Wait for the batch that is sampled, and run the function before the next."""
        ...


class WeightRoutes:
    """The handlers.

    Args:
        weights: weights of the served network.
        between: runs a change while no batch is sampled.
    """

    def __init__(self, weights: ServedWeights, between: Between) -> None:
        self.weights, self.between = weights, between
        self._one = asyncio.Lock()  # changes are read one after the other, so that two do not take twice the memory

    async def from_disk(self, request: "Request") -> dict[str, Any]:
        """Take the weights of a folder over: all of them, or none."""
        fields = await _fields(request)
        path, targets, version = _text(fields, "model_path"), fields.texts("target_modules"), _version(fields)
        sha256 = _sha256(fields)
        async with self._one:
            self._check_resumed()
            staged = await asyncio.to_thread(self.weights.read_folder, path, targets, sha256)
            return await self._exchanged(staged, version, f"the weights of {path}")

    async def from_tensors(self, request: "Request") -> dict[str, Any]:
        """Take a bucket over; the last one of a push changes the weights."""
        fields = await _fields(request)
        if fields.value.get("load_format") != SHARED_FILES:
            raise RequestError(
                400,
                f"load_format is {shown(fields.value.get('load_format'))}, expected {SHARED_FILES}: pickles are not read",
            )
        texts, version = fields.texts("serialized_named_tensors"), _version(fields)
        if texts is None or len(texts) != 1:
            raise RequestError(400, "serialized_named_tensors holds no bucket, or several, expected one")
        bucket = shared_bucket(_json(texts[0]))
        async with self._one:
            self._check_resumed()
            staged = await asyncio.to_thread(self.weights.stage, bucket)
            if staged is None:
                return {"success": True, "message": f"bucket {bucket.index + 1} of {bucket.count} is staged"}
            return await self._exchanged(staged, version, f"{bucket.count} buckets")

    async def set_lora(self, request: "Request") -> dict[str, Any]:
        """Take an adapter over, in the place of the one before."""
        fields = await _fields(request)
        nickname, path, version = _one_text(fields, "lora_nickname"), _one_text(fields, "lora_path"), _version(fields)
        strength, alpha = fields.number("strength", 1.0, low=-1e3, high=1e3), fields.number("lora_alpha", low=1e-6)
        product = PRODUCTS[fields.choice("merge_mode", "auto", tuple(PRODUCTS))]
        assert strength is not None
        async with self._one:
            self._check_resumed()
            targets = self._targets(fields)
            several = len(self.weights.networks) > 1 and len(targets) > 1

            def read() -> dict[str, Any]:
                return {
                    name: self.weights.read_adapter(
                        f"{path}/{name}" if several else path, name, nickname=nickname, strength=strength, alpha=alpha,
                        product=product,
                    )
                    for name in targets
                }  # fmt: skip

            adapters = await asyncio.to_thread(read)
            await self._changed(lambda: self.weights.adapt(adapters), version)
        return self._done(f"adapter {nickname} of {path}")

    async def unmerge_lora(self, request: "Request") -> dict[str, Any]:
        """Take adapters off, so that the base weights remain."""
        fields = await _fields(request)
        version = _version(fields)
        async with self._one:
            self._check_resumed()
            targets = self._targets(fields)
            await self._changed(lambda: self.weights.adapt(dict.fromkeys(targets)), version)
        return self._done("the base weights, without adapters")

    async def list_loras(self, request: "Request") -> dict[str, Any]:
        """Return the adapters, one per network at most."""
        active = {
            name: [{"nickname": each.nickname, "path": each.path, "merged": False, "strength": each.strength}]
            for name, each in self.weights.adapters.items()
        }
        loaded = {each.nickname: each.path for each in self.weights.adapters.values()}
        return {
            "loaded_adapters": [{"nickname": nickname, "path": path} for nickname, path in loaded.items()],
            "active": active,
        }

    async def checksums(self, request: "Request") -> dict[str, Any]:
        """Return the checksums of networks and adapters."""
        fields = await _fields(request)
        names = fields.texts("module_names")
        async with self._one:
            self._check_resumed()
            return await asyncio.to_thread(self.weights.checksums, names)

    async def release(self, request: "Request") -> dict[str, Any]:
        """Free the device's memory until `resume`."""
        async with self._one:
            await self.between(self.weights.release)
        return {"success": True, "message": "the weights are on the host"}

    async def resume(self, request: "Request") -> dict[str, Any]:
        """Move the weights back to the device."""
        async with self._one:
            await self.between(self.weights.resume)
        return {"success": True, "message": "the weights are on the device"}

    async def _exchanged(self, staged: Staged, version: int | None, what: str) -> dict[str, Any]:
        await self._changed(lambda: self.weights.exchange(staged), version)
        return self._done(what)

    async def _changed(self, change: Callable[[], None], version: int | None) -> None:
        """Make a change while no batch is sampled, and note the version of the weights."""

        def make() -> None:
            change()
            self.weights.version = self.weights.version + 1 if version is None else version

        await self.between(make)

    def _done(self, what: str) -> dict[str, Any]:
        version = self.weights.version
        return {"success": True, "status": "ok", "message": f"serving {what}", "weight_version": version}

    def _targets(self, fields: Fields) -> list[str]:
        """Return the networks of a field `target`."""
        target = fields.choice("target", "all", ("all", *self.weights.networks))
        return list(self.weights.networks) if target == "all" else [target]

    def _check_resumed(self) -> None:
        if self.weights.released:
            raise RequestError(400, "the weights are released: POST /resume_memory_occupation first")


def table(routes: WeightRoutes) -> dict[tuple[str, str], "Callable[[Request], Awaitable[Response]]"]:
    """Return the endpoints by method and path. Each wants the admin key, which their caller checks."""
    handlers = {
        ("POST", "/update_weights_from_disk"): routes.from_disk,
        ("POST", "/update_weights_from_tensor"): routes.from_tensors,
        ("POST", "/v1/set_lora"): routes.set_lora,
        ("POST", "/v1/unmerge_lora_weights"): routes.unmerge_lora,
        ("GET", "/v1/list_loras"): routes.list_loras,
        ("POST", "/get_weights_checksum"): routes.checksums,
        ("POST", "/release_memory_occupation"): routes.release,
        ("POST", "/resume_memory_occupation"): routes.resume,
    }
    return {key: _answered(handler) for key, handler in handlers.items()}


def _answered(handler: "Callable[[Request], Awaitable[dict[str, Any]]]") -> "Callable[[Request], Awaitable[Response]]":
    """Return a handler's dict as JSON, and what it raises as sglang's {"success": false, "message": one line}."""

    async def endpoint(request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        try:
            return JSONResponse(await handler(request))
        except (RequestError, WireError) as error:
            status, problem = (error.status, error.problem) if isinstance(error, RequestError) else (400, str(error))
        except Exception as error:  # e.g. no memory; the weights are as they were
            status, problem = 500, " ".join(f"{type(error).__name__}: {error}".split())
        return JSONResponse({"success": False, "message": problem, "detail": problem}, status)

    return endpoint


async def _fields(request: "Request") -> Fields:
    """Return the fields of a request, of which there may be none."""
    if not request.headers.get("content-length", "").strip("0") and "transfer-encoding" not in request.headers:
        return Fields({})
    return Fields(await json_of(request, most_bytes=MOST_BYTES))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(400, "serialized_named_tensors holds no JSON") from None


def _text(fields: Fields, name: str) -> str:
    text = fields.text(name, most=4096)
    if not text:
        raise RequestError(400, f"{name} is missing")
    return text


def _one_text(fields: Fields, name: str) -> str:
    """Return a text that may stand in a list of one."""
    value = fields.value.get(name)
    if isinstance(value, list):
        if len(value) != 1:
            raise RequestError(400, f"{name} holds {len(value)} adapters, expected one: this server has one at a time")
        return _text(Fields({name: value[0]}), name)
    return _text(fields, name)


def _version(fields: Fields) -> int | None:
    """Return the version that weights will have; a number or its digits, as sglang's field is a text."""
    value = fields.value.get("weight_version")
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return Fields({"weight_version": int(value)}).integer("weight_version", high=MOST_VERSION)
    return fields.integer("weight_version", high=MOST_VERSION)


def _sha256(fields: Fields) -> dict[str, str]:
    """Return the checksum of each network's files."""
    inner = fields.inner("sha256")
    return {} if inner is None else {str(name): _text(inner, name) for name in inner.value}
