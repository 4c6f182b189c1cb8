"""Endpoints that change the weights of a rollout server, with the fields of sglang-diffusion.

POST /update_weights_from_disk    {model_path, target_modules?, weight_version?, sha256?}
POST /update_weights_from_tensor  {load_format: "fluvial_shared_files", serialized_named_tensors: [JSON of a bucket], ...}
POST /init_weights_update_group   {master_address, master_port, rank_offset, world_size, group_name, backend: "gloo"}; then
                                  load_format "fluvial_broadcast" takes buckets, of weights or adapters, from that group
POST /destroy_weights_update_group  {group_name}
POST /v1/set_lora                 {lora_nickname, lora_path?, target?, strength?, merge_mode?, product?, lora_alpha?, ...}
POST /v1/merge_lora_weights       {target?, strength?, weight_version?}
POST /v1/unmerge_lora_weights     {target?, weight_version?}
POST /unload_lora_adapter         {lora_name, weight_version?}, as sglang's server of language models has it
GET  /v1/list_loras
POST /get_weights_checksum        {module_names?}
POST /update_weights_from_tensor_checker  {target_module, expected_named_tensors_sha256}
POST /release_memory_occupation, /resume_memory_occupation

`weight_version`, `sha256` and `product` are fluvial's own; sglang ignores them. A change is made while no batch is sampled,
so that no sample is made by two versions of the weights.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from fluvial.engines.errors import RunError, convert_errors
from fluvial.engines.extensions.servers.asgi import RequestError, json_of
from fluvial.engines.extensions.servers.rollout.served_weights import (
    MOST_LOADED,
    Adapter,
    Applied,
    ServedWeights,
    merge_adapters,
)
from fluvial.engines.extensions.wire.decode import WireError, convert
from fluvial.engines.extensions.wire.weight_buckets import (
    BROADCAST,
    FACTORS,
    SHARED_FILES,
    BroadcastGroup,
    SharedBucket,
    Text,
    find_local_address,
    open_store,
    parse_bucket,
)
from fluvial.models.lora_layer import Product

Result = TypeVar("Result")
MOST_BYTES = 64_000_000  # of a request
Version = Annotated[int, Meta(ge=0, le=2**53)]
Digits = Annotated[str, Meta(pattern=r"^[0-9]{1,15}$")]  # as sglang's field is a text
# One value for all adapters, or one per adapter. (A tuple in a union with a text that has limits crashes msgspec 0.22.)
Several = Meta(min_length=1, max_length=MOST_LOADED)
Strength = Annotated[float, Meta(ge=-1e3, le=1e3)]
Alpha = Annotated[float, Meta(ge=1e-6, le=1e6)]
Names = Annotated[tuple[str, ...], Meta(max_length=4096)]
# How an adapted layer multiplies its input. Neither writes into the base weights.
PRODUCTS: dict[str, Product] = {"auto": "auto", "dynamic": "factors", "merge": "merged"}


class Change(Struct, frozen=True, forbid_unknown_fields=True):
    """A change of the weights, with the version that they will have."""

    weight_version: Version | Digits | None = None


class FromDisk(Change, frozen=True, kw_only=True):
    """All weights of networks, in a folder."""

    model_path: Text
    target_modules: Names | None = None
    sha256: dict[str, Text] = {}
    flush_cache: bool = True  # sglang's; nothing here outlives the weights


class FromTensors(Change, frozen=True, kw_only=True):
    """A bucket of a push; sglang's payloads are pickles, which are not read, nor are the fields that belong to them."""

    load_format: str | None = None
    serialized_named_tensors: Annotated[list[str], Meta(min_length=1)]
    payload_gpu_uuids: Any = None
    target_modules: Any = None
    weight_update_mode: Any = None
    lora_alpha: Alpha | None = None  # of an adapter's factors
    lora_rank: Any = None
    product: Product | None = None


class InitGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """A group to join, in which a trainer broadcasts weights; it takes the place of the one before."""

    master_address: Annotated[str, Meta(max_length=256)]
    master_port: Annotated[int, Meta(ge=1, lt=65536)]
    rank_offset: Annotated[int, Meta(ge=1, lt=65536)]
    world_size: Annotated[int, Meta(ge=2, le=65536)]
    group_name: Text
    backend: str = "gloo"


class DestroyGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """A group that is left."""

    group_name: Text


class ForAdapters(Change, frozen=True):
    """Networks whose adapters change."""

    target: str = "all"


class SetLora(Change, frozen=True, kw_only=True):
    """Adapters, in files or folders, that act together on their networks in place of those before."""

    lora_nickname: Text | Annotated[list[Text], Several]
    lora_path: Text | Annotated[list[Text | None], Several] | None = None  # without it, an adapter that was loaded before
    target: str | Annotated[list[str], Several] = "all"
    strength: Strength | Annotated[list[Strength], Several] = 1.0
    lora_alpha: Alpha | Annotated[list[Alpha | None], Several] | None = None
    merge_mode: Literal["auto", "dynamic", "merge"] | None = None
    product: Product | None = None  # in place of merge_mode, from a trainer that multiplies so


class NamedAdapter(NamedTuple):
    """One adapter of a request."""

    nickname: str
    path: str | None
    target: str
    strength: float
    alpha: float | None


class UnloadLora(Change, frozen=True, kw_only=True):
    """Name of an adapter that is not needed any more."""

    lora_name: Text
    lora_id: Any = None  # sglang's own, of its adapters in memory


class MergeLora(ForAdapters, frozen=True, kw_only=True):
    """Strength of the adapters that were set last."""

    strength: Strength = 1.0


class Checker(Struct, frozen=True, forbid_unknown_fields=True):
    """SHA-256 sums that tensors of a network should have."""

    target_module: str
    expected_named_tensors_sha256: Annotated[dict[str, str], Meta(min_length=1)]


class Checksums(Struct, frozen=True, forbid_unknown_fields=True):
    """Names of networks and adapters."""

    module_names: Names | None = None


class NoFields(Struct, frozen=True):
    """A request whose fields are not read, and which is answered while the weights are released, too."""


PICKLES = (
    "serialized_named_tensors are pickles, and this server unpickles nothing: write safetensors to a folder that it reads "
    "(--weights-root), and POST that to /update_weights_from_disk as model_path, or to /v1/set_lora as lora_path"
)
Between = Callable[[Callable[[], None]], Awaitable[None]]  # runs a function while no batch is sampled


class WeightRoutes:
    """The handlers.

    Args:
        between: runs a change while no batch is sampled.
    """

    def __init__(self, weights: ServedWeights, between: Between) -> None:
        self.weights, self.between = weights, between
        self.group: BroadcastGroup | None = None
        self.turn = asyncio.Lock()  # changes are read one after the other, so that two do not take twice the memory

    async def from_disk(self, asked: FromDisk) -> dict[str, Any]:
        """Take the weights of a folder over: all of them, or none."""
        read = self.weights.read_folder
        staged = await asyncio.to_thread(read, asked.model_path, asked.target_modules, asked.sha256)
        what = f"the weights of {asked.model_path}"
        return await self._change(lambda: self.weights.exchange(staged, asked.sha256), asked, what)

    async def from_tensors(self, asked: FromTensors) -> dict[str, Any]:
        """Take a bucket over; the last one of a push changes the weights, or the adapters, of all its networks at once."""
        if asked.load_format not in (SHARED_FILES, BROADCAST):
            raise RequestError(PICKLES)
        if len(asked.serialized_named_tensors) != 1:
            raise RequestError(f"serialized_named_tensors holds {len(asked.serialized_named_tensors)}, expected one bucket")
        try:
            bucket = parse_bucket(msgspec.json.decode(asked.serialized_named_tensors[0]))
        except (msgspec.DecodeError, RecursionError):
            raise RequestError("serialized_named_tensors holds a text that is not JSON") from None
        flat = await asyncio.to_thread(self._receive, bucket) if asked.load_format == BROADCAST else None
        staged = await asyncio.to_thread(self.weights.stage, bucket, flat)
        if staged is None:
            return {"success": True, "message": f"bucket {bucket.index + 1} of {bucket.count} is staged"}
        factors = {name.removesuffix(FACTORS): held for name, held in staged.items() if name.endswith(FACTORS)}
        what, product = f"{bucket.count} buckets", asked.product or "auto"
        if not factors:
            sums = await asyncio.to_thread(self.weights.sum_staged)
            return await self._change(lambda: self.weights.exchange(staged, sums), asked, what)
        alpha, path = asked.lora_alpha, f"push {bucket.push}"
        if len(factors) < len(staged) or alpha is None:
            raise RequestError("a push holds adapters, with their lora_alpha, or all weights")
        opened = {name: self.weights.open_adapter(name, held, alpha=alpha, path=path) for name, held in factors.items()}
        adapters = {name: merge_adapters([adapter], product) for name, adapter in opened.items()}
        return await self._change(lambda: self.weights.adapt(adapters), asked, what)

    def _receive(self, bucket: SharedBucket) -> Tensor:
        """Return the bytes of a bucket that the group broadcasts, uint8."""
        size = bucket.places[-1].end_idx
        if self.group is None or self.group.name != bucket.file:
            raise RequestError(f"there is no group {bucket.file!r}: POST /init_weights_update_group first", 409)
        if size > self.weights.most_bytes():
            raise RequestError(f"the bucket has {size} bytes, more than all weights")
        flat = torch.empty(size, dtype=torch.uint8)
        try:
            self.group.broadcast(flat)
        except RunError as error:
            self.group = None
            raise RequestError(str(error), 409) from None
        return flat

    async def init_group(self, asked: InitGroup) -> dict[str, Any]:
        """Join a group; the trainer and all servers of it have to come."""
        if asked.backend != "gloo":
            raise RequestError(f"backend is {asked.backend[:40]!r}, expected gloo")
        self.group = None

        def join() -> BroadcastGroup:
            store = open_store(asked.master_address, asked.master_port, is_master=False)
            address = find_local_address(asked.master_address, asked.master_port)
            return BroadcastGroup(store, address, rank=asked.rank_offset, size=asked.world_size, name=asked.group_name)

        with convert_errors(RequestError, RunError, OSError):
            self.group = await asyncio.to_thread(join)
        return {"success": True, "message": f"rank {asked.rank_offset} of {asked.world_size} of group {asked.group_name}"}

    async def destroy_group(self, asked: DestroyGroup) -> dict[str, Any]:
        """Leave a group, if this server is in it."""
        if self.group is not None and self.group.name == asked.group_name:
            self.group = None
        return {"success": True, "message": f"not in group {asked.group_name}"}

    async def set_lora(self, asked: SetLora) -> dict[str, Any]:
        """Take adapters over, in the place of those before."""
        named, product = _adapters_of(asked), asked.product or PRODUCTS[asked.merge_mode or "auto"]
        chosen = {each: self._targets(each.target) for each in named}
        several = len(self.weights.networks) > 1

        def read(each: NamedAdapter, network: str) -> Adapter:
            options: dict[str, Any] = {"nickname": each.nickname, "strength": each.strength, "alpha": each.alpha}
            if each.path is None:
                return self.weights.find_adapter(network, **options)
            path = f"{each.path}/{network}" if several and len(chosen[each]) > 1 else each.path
            return self.weights.read_adapter(path, network, **options)

        def merge_wanted() -> dict[str, Applied | None]:
            applied = dict[str, Applied | None]()
            for network in self.weights.networks:
                adapters = [each for each in named if network in chosen[each]]
                if len({each.nickname for each in adapters}) < len(adapters):
                    raise RequestError(f"lora_nickname names an adapter of {network} twice, expected different ones")
                if adapters:
                    applied[network] = merge_adapters([read(each, network) for each in adapters], product)
            return applied

        adapters = await asyncio.to_thread(merge_wanted)
        what = ", ".join(f"{each.nickname} of {each.path or 'an earlier request'}" for each in named)
        return await self._change(lambda: self.weights.adapt(adapters), asked, f"adapter {what}")

    async def merge_lora(self, asked: MergeLora) -> dict[str, Any]:
        """Set the adapters that were set last, again with another strength."""
        last = self.weights.set_last
        again = {
            name: last(name, strength=asked.strength, product=PRODUCTS["merge"]) for name in self._targets(asked.target)
        }
        return await self._change(lambda: self.weights.adapt(again), asked, f"adapters of strength {asked.strength:g}")

    async def unmerge_lora(self, asked: ForAdapters) -> dict[str, Any]:
        """Take adapters off, so that the base weights remain."""
        bare = dict.fromkeys(self._targets(asked.target))
        return await self._change(lambda: self.weights.adapt(bare), asked, "the base weights, without adapters")

    async def unload_lora(self, asked: UnloadLora) -> dict[str, Any]:
        """Take an adapter off, and forget it."""
        name, left = asked.lora_name, self.weights.without(asked.lora_name)
        answer: dict[str, Any] = {"success": True, "status": "ok", "message": f"adapter {name} is unloaded"}
        if left:
            answer = await self._change(lambda: self.weights.adapt(left), asked, f"the weights without adapter {name}")
        self.weights.forget(name)
        return {
            **answer,
            "error_message": None,
            "loaded_adapters": self._list_loaded(),
            "weight_version": self.weights.version,
        }

    async def list_loras(self, asked: NoFields) -> dict[str, Any]:
        """Return the adapters that are loaded, and those that act on each network."""
        active = {
            name: [
                {
                    "nickname": ",".join(part.nickname for part in each.adapters),
                    "nicknames": [part.nickname for part in each.adapters],
                    "path": ",".join(part.path for part in each.adapters),
                    "merged": False,
                    "mode": "unmerged",
                    "strength": each.adapters[0].strength,
                    "strengths": [part.strength for part in each.adapters],
                }
            ]
            for name, each in self.weights.adapters.items()
        }
        loaded = [{"nickname": nickname, "path": path} for nickname, path in self._list_loaded().items()]
        return {"loaded_adapters": loaded, "active": active}

    def _list_loaded(self) -> dict[str, str]:
        """Return the paths of the loaded adapters by nickname."""
        return {each.nickname: each.path for each in self.weights.loaded.values()}

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

    async def _change(self, change: Callable[[], None], asked: Change, what: str) -> dict[str, Any]:
        """Make a change while no batch is sampled, note the version of the weights, and return the answer."""
        weights, version = self.weights, asked.weight_version

        def make() -> None:
            change()
            weights.version = weights.version + 1 if version is None else int(version)

        await self.between(make)
        return {"success": True, "status": "ok", "message": f"serving {what}", "weight_version": weights.version}

    def _targets(self, target: str) -> list[str]:
        """Return the networks whose adapters change."""
        names = list(self.weights.networks)
        if target not in ("all", *names):
            raise RequestError(f"target is {target[:60]!r}, expected one of all, {', '.join(names)}")
        return names if target == "all" else [target]


def _adapters_of(asked: SetLora) -> list[NamedAdapter]:
    """Return the adapters of a request, where one value stands for all; raise RequestError for other numbers of them."""
    nicknames = asked.lora_nickname if isinstance(asked.lora_nickname, list) else [asked.lora_nickname]
    columns: list[Sequence[Any]] = [nicknames]
    for field in ("lora_path", "target", "strength", "lora_alpha"):
        value = getattr(asked, field)
        if isinstance(value, list) and len(value) != len(nicknames):
            raise RequestError(f"{field} has {len(value)} items, expected {len(nicknames)}, one per lora_nickname")
        columns.append(value if isinstance(value, list) else [value] * len(nicknames))
    if isinstance(asked.lora_path, str) and len(nicknames) > 1:
        raise RequestError(f"lora_path is one for {len(nicknames)} adapters, expected one each, or null")
    return [NamedAdapter(*row) for row in zip(*columns, strict=True)]


def control_routes(routes: WeightRoutes) -> list[Route]:
    """Return the endpoints. Each wants the admin key, which their caller checks."""
    handlers: dict[str, tuple[Callable[[Any], Awaitable[dict[str, Any]]], type[Struct]]] = {
        "/update_weights_from_disk": (routes.from_disk, FromDisk),
        "/update_weights_from_tensor": (routes.from_tensors, FromTensors),
        "/init_weights_update_group": (routes.init_group, InitGroup),
        "/destroy_weights_update_group": (routes.destroy_group, DestroyGroup),
        "/v1/set_lora": (routes.set_lora, SetLora),
        "/v1/merge_lora_weights": (routes.merge_lora, MergeLora),
        "/v1/unmerge_lora_weights": (routes.unmerge_lora, ForAdapters),
        "/unload_lora_adapter": (routes.unload_lora, UnloadLora),
        "/update_weights_from_tensor_checker": (routes.check, Checker),
        "/get_weights_checksum": (routes.checksums, Checksums),
        "/v1/list_loras": (routes.list_loras, NoFields),
        "/release_memory_occupation": (routes.release, NoFields),
        "/resume_memory_occupation": (routes.resume, NoFields),
    }

    def endpoint(path: str) -> Callable[[Request], Awaitable[JSONResponse]]:
        handler, kind = handlers[path]

        async def answer(request: Request) -> JSONResponse:
            try:
                asked = await _body(request, kind)
                async with routes.turn:
                    if kind is not NoFields and routes.weights.released:
                        raise RequestError("the weights are released: POST /resume_memory_occupation first")
                    return JSONResponse(await handler(asked))
            except (RequestError, WireError) as error:
                status, problem = (error.status, error.problem) if isinstance(error, RequestError) else (400, str(error))
            except Exception as error:  # e.g. no memory; the weights are as they were
                status, problem = 500, " ".join(f"{type(error).__name__}: {error}".split())
            # In the form of sglang.
            return JSONResponse({"success": False, "message": problem, "detail": problem}, status)

        return answer

    methods = {"/v1/list_loras": ["GET"]}
    return [Route(path, endpoint(path), methods=methods.get(path, ["POST"])) for path in handlers]


async def _body(request: Request, kind: type[Result]) -> Result:
    """Return the fields of a request, which may be empty."""
    empty = not request.headers.get("content-length", "").strip("0") and "transfer-encoding" not in request.headers
    return convert({}, kind) if empty else await json_of(request, kind, most_bytes=MOST_BYTES, lenient=True)
