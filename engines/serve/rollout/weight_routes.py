"""Endpoints that change the weights of a rollout server, with the fields of sglang-diffusion.

POST /update_weights_from_disk    {model_path, target_modules?, weight_version?, sha256?}
POST /update_weights_from_tensor  {load_format: "fluvial_shared_files", serialized_named_tensors: [JSON of a bucket], ...}
POST /v1/set_lora                 {lora_nickname, lora_path, target?, strength?, merge_mode?, lora_alpha?, weight_version?}
POST /v1/merge_lora_weights       {target?, strength?, weight_version?}
POST /v1/unmerge_lora_weights     {target?, weight_version?}
GET  /v1/list_loras
POST /get_weights_checksum        {module_names?}
POST /update_weights_from_tensor_checker  {target_module, expected_named_tensors_sha256}
POST /release_memory_occupation, /resume_memory_occupation

`weight_version` and `sha256` are fluvial's own; sglang ignores them. A change is made while no batch is sampled, so that no
sample is made by two versions of the weights.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fluvial.engines.serve.asgi import RequestError, json_of
from fluvial.engines.serve.rollout.served_weights import ServedWeights
from fluvial.engines.wire.decode import WireError, convert
from fluvial.engines.wire.weight_buckets import Text, shared_bucket
from fluvial.models.lora_layer import Product

Result = TypeVar("Result")
MOST_BYTES = 64_000_000  # of a request
Version = Annotated[int, Meta(ge=0, le=2**53)]
Digits = Annotated[str, Meta(pattern=r"^[0-9]{1,15}$")]  # as sglang's field is a text
# One adapter at a time. (A tuple of one in a union with a text that has limits crashes msgspec 0.22.)
One = Annotated[list[Text], Meta(min_length=1, max_length=1)]
Names = Annotated[tuple[str, ...], Meta(max_length=4096)]
# How an adapted layer multiplies its input. Neither writes into the base weights.
PRODUCTS: dict[str, Product] = {"auto": "factors", "dynamic": "factors", "merge": "merged"}


class Change(Struct, frozen=True):
    """A change of the weights, with the version that they will have."""

    weight_version: Version | Digits | None = None


class FromDisk(Change, frozen=True, kw_only=True):
    """All weights of networks, in a folder."""

    model_path: Text
    target_modules: Names | None = None
    sha256: dict[str, Text] = {}


class FromTensors(Change, frozen=True, kw_only=True):
    """A bucket of a push."""

    load_format: Literal["fluvial_shared_files"]  # pickles are not read
    serialized_named_tensors: tuple[str]


class ForAdapters(Change, frozen=True):
    """Networks whose adapters change."""

    target: str = "all"


class SetLora(ForAdapters, frozen=True, kw_only=True):
    """An adapter, in a file or a folder."""

    lora_nickname: Text | One
    lora_path: Text | One | None = None  # without it, an adapter that was loaded before
    strength: Annotated[float, Meta(ge=-1e3, le=1e3)] = 1.0
    lora_alpha: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    merge_mode: Literal["auto", "dynamic", "merge"] | None = None


class MergeLora(ForAdapters, frozen=True, kw_only=True):
    """Strength of the adapters that were set last."""

    strength: Annotated[float, Meta(ge=-1e3, le=1e3)] = 1.0


class Checker(Struct, frozen=True):
    """SHA-256 sums that tensors of a network should have."""

    target_module: str
    expected_named_tensors_sha256: Annotated[dict[str, str], Meta(min_length=1)]


class Checksums(Struct, frozen=True):
    """Names of networks and adapters."""

    module_names: Names | None = None


class NoFields(Struct, frozen=True):
    """A request whose fields are not read."""


Between = Callable[[Callable[[], None]], Awaitable[None]]  # runs a function while no batch is sampled


class WeightRoutes:
    """The handlers.

    Args:
        between: runs a change while no batch is sampled.
    """

    def __init__(self, weights: ServedWeights, between: Between) -> None:
        self.weights, self.between = weights, between
        self.turn = asyncio.Lock()  # changes are read one after the other, so that two do not take twice the memory

    async def from_disk(self, asked: FromDisk) -> dict[str, Any]:
        """Take the weights of a folder over: all of them, or none."""
        read = self.weights.read_folder
        staged = await asyncio.to_thread(read, asked.model_path, asked.target_modules, asked.sha256)
        return await self._changed(lambda: self.weights.exchange(staged), asked, f"the weights of {asked.model_path}")

    async def from_tensors(self, asked: FromTensors) -> dict[str, Any]:
        """Take a bucket over; the last one of a push changes the weights."""
        try:
            bucket = shared_bucket(msgspec.json.decode(asked.serialized_named_tensors[0]))
        except (msgspec.DecodeError, RecursionError):
            raise RequestError(400, "serialized_named_tensors holds a text that is not JSON") from None
        staged = await asyncio.to_thread(self.weights.stage, bucket)
        if staged is None:
            return {"success": True, "message": f"bucket {bucket.index + 1} of {bucket.count} is staged"}
        return await self._changed(lambda: self.weights.exchange(staged), asked, f"{bucket.count} buckets")

    async def set_lora(self, asked: SetLora) -> dict[str, Any]:
        """Take an adapter over, in the place of the one before."""
        named = (asked.lora_nickname, asked.lora_path)
        nickname, path = (each[0] if isinstance(each, list) else each for each in named)
        product = PRODUCTS[asked.merge_mode or "auto"]
        targets = self._targets(asked)
        several = len(self.weights.networks) > 1 and len(targets) > 1

        def read() -> dict[str, Any]:
            if path is None:
                known = self.weights.loaded_adapter
                return {name: known(name, nickname=nickname, strength=asked.strength, product=product) for name in targets}
            return {
                name: self.weights.read_adapter(
                    f"{path}/{name}" if several else path,
                    name,
                    nickname=str(nickname),
                    strength=asked.strength,
                    alpha=asked.lora_alpha,
                    product=product,
                )
                for name in targets
            }

        adapters = await asyncio.to_thread(read)
        return await self._changed(lambda: self.weights.adapt(adapters), asked, f"adapter {nickname} of {path}")

    async def merge_lora(self, asked: MergeLora) -> dict[str, Any]:
        """Set the adapters that were set last, again with another strength."""
        known = self.weights.loaded_adapter
        again = {
            name: known(name, nickname=None, strength=asked.strength, product=PRODUCTS["merge"])
            for name in self._targets(asked)
        }
        return await self._changed(lambda: self.weights.adapt(again), asked, f"adapters of strength {asked.strength:g}")

    async def unmerge_lora(self, asked: ForAdapters) -> dict[str, Any]:
        """Take adapters off, so that the base weights remain."""
        bare = dict.fromkeys(self._targets(asked))
        return await self._changed(lambda: self.weights.adapt(bare), asked, "the base weights, without adapters")

    async def list_loras(self, asked: NoFields) -> dict[str, Any]:
        """Return the adapters, one per network at most."""
        active = {
            name: [
                {
                    "nickname": each.nickname,
                    "nicknames": [each.nickname],
                    "path": each.path,
                    "merged": False,
                    "mode": "unmerged",
                    "strength": each.strength,
                    "strengths": [each.strength],
                }
            ]
            for name, each in self.weights.adapters.items()
        }
        loaded = {each.nickname: each.path for each in self.weights.loaded.values()}
        return {
            "loaded_adapters": [{"nickname": nickname, "path": path} for nickname, path in loaded.items()],
            "active": active,
        }

    async def checksums(self, asked: Checksums) -> dict[str, Any]:
        """Return the checksums of networks and adapters."""
        return await asyncio.to_thread(self.weights.checksums, asked.module_names)

    async def check(self, asked: Checker) -> dict[str, Any]:
        """Compare single tensors with checksums."""
        await asyncio.to_thread(self.weights.check_tensors, asked.target_module, asked.expected_named_tensors_sha256)
        return {"success": True, "message": f"{len(asked.expected_named_tensors_sha256)} tensors are as expected"}

    async def release(self, asked: NoFields) -> dict[str, Any]:
        """Free the device's memory until `resume`."""
        await self.between(self.weights.release)
        return {"success": True, "message": "the weights are on the host"}

    async def resume(self, asked: NoFields) -> dict[str, Any]:
        """Move the weights back to the device."""
        await self.between(self.weights.resume)
        return {"success": True, "message": "the weights are on the device"}

    async def _changed(self, change: Callable[[], None], asked: Change, what: str) -> dict[str, Any]:
        """Make a change while no batch is sampled, note the version of the weights, and return the answer."""
        weights, version = self.weights, asked.weight_version

        def make() -> None:
            change()
            weights.version = weights.version + 1 if version is None else int(version)

        await self.between(make)
        return {"success": True, "status": "ok", "message": f"serving {what}", "weight_version": weights.version}

    def _targets(self, asked: ForAdapters) -> list[str]:
        """Return the networks whose adapters change."""
        names = list(self.weights.networks)
        if asked.target not in ("all", *names):
            raise RequestError(400, f"target is {asked.target[:60]!r}, expected one of all, {', '.join(names)}")
        return names if asked.target == "all" else [asked.target]


def control_routes(routes: WeightRoutes) -> list[Route]:
    """Return the endpoints. Each wants the admin key, which their caller checks."""
    handlers: dict[str, tuple[Callable[[Any], Awaitable[dict[str, Any]]], type[Struct]]] = {
        "/update_weights_from_disk": (routes.from_disk, FromDisk),
        "/update_weights_from_tensor": (routes.from_tensors, FromTensors),
        "/v1/set_lora": (routes.set_lora, SetLora),
        "/v1/merge_lora_weights": (routes.merge_lora, MergeLora),
        "/v1/unmerge_lora_weights": (routes.unmerge_lora, ForAdapters),
        "/update_weights_from_tensor_checker": (routes.check, Checker),
        "/get_weights_checksum": (routes.checksums, Checksums),
    }
    # These also answer while the weights are released.
    always: dict[str, tuple[Callable[[Any], Awaitable[dict[str, Any]]], type[Struct]]] = {
        "/v1/list_loras": (routes.list_loras, NoFields),
        "/release_memory_occupation": (routes.release, NoFields),
        "/resume_memory_occupation": (routes.resume, NoFields),
    }

    def endpoint(path: str) -> Callable[[Request], Awaitable[JSONResponse]]:
        handler, kind = (handlers | always)[path]

        async def answered(request: Request) -> JSONResponse:
            try:
                asked = await _body(request, kind)
                async with routes.turn:
                    if path in handlers and routes.weights.released:
                        raise RequestError(400, "the weights are released: POST /resume_memory_occupation first")
                    return JSONResponse(await handler(asked))
            except (RequestError, WireError) as error:
                status, problem = (error.status, error.problem) if isinstance(error, RequestError) else (400, str(error))
            except Exception as error:  # e.g. no memory; the weights are as they were
                status, problem = 500, " ".join(f"{type(error).__name__}: {error}".split())
            # In the form of sglang.
            return JSONResponse({"success": False, "message": problem, "detail": problem}, status)

        return answered

    methods = {"/v1/list_loras": ["GET"]}
    return [Route(path, endpoint(path), methods=methods.get(path, ["POST"])) for path in handlers | always]


async def _body(request: Request, kind: type[Result]) -> Result:
    """Return the fields of a request, of which there may be none."""
    empty = not request.headers.get("content-length", "").strip("0") and "transfer-encoding" not in request.headers
    return convert({} if empty else await json_of(request, most_bytes=MOST_BYTES), kind, lenient=True)
