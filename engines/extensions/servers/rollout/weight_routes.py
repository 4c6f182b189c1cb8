"""Endpoints for the weights of a rollout server, with the fields of sglang-diffusion.

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

`weight_version`, `sha256` and `product` are fluvial's own; sglang ignores them. Weights change between two batches, so every
sample has one version of the weights.
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
from fluvial.engines.extensions.servers.asgi import RequestError, read_json
from fluvial.engines.extensions.servers.rollout.served_weights import (
    MOST_LOADED,
    Adapter,
    AppliedAdapters,
    ServedWeights,
    stack_adapters,
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
MOST_BYTES = 64_000_000  # largest body of a request
Version = Annotated[int, Meta(ge=0, le=2**53)]
Digits = Annotated[str, Meta(pattern=r"^[0-9]{1,15}$")]  # sglang's field is a text
# One value for all adapters, or one per adapter. (A tuple in a union with a constrained text crashes msgspec 0.22.)
Several = Meta(min_length=1, max_length=MOST_LOADED)
Strength = Annotated[float, Meta(ge=-1e3, le=1e3)]
Alpha = Annotated[float, Meta(ge=1e-6, le=1e6)]
Names = Annotated[tuple[str, ...], Meta(max_length=4096)]
# How adapted layers multiply their input, by sglang's merge_mode. No mode writes to the base weights.
PRODUCTS: dict[str, Product] = {"auto": "auto", "dynamic": "factors", "merge": "merged"}


class WeightChange(Struct, frozen=True, forbid_unknown_fields=True):
    """Change of the weights, with their new version."""

    weight_version: Version | Digits | None = None


class UpdateFromDisk(WeightChange, frozen=True, kw_only=True):
    """Change to all weights of networks, in a folder."""

    model_path: Text
    target_modules: Names | None = None
    sha256: dict[str, Text] = {}
    flush_cache: bool = True  # sglang's; no effect, because nothing is cached across weights


class UpdateFromTensor(WeightChange, frozen=True, kw_only=True):
    """Bucket of a push. sglang's payloads are pickles, which are not read, so their fields have no effect."""

    load_format: str | None = None
    serialized_named_tensors: Annotated[list[str], Meta(min_length=1)]
    payload_gpu_uuids: Any = None
    target_modules: Any = None
    weight_update_mode: Any = None
    lora_alpha: Alpha | None = None  # of an adapter's factors
    lora_rank: Any = None
    product: Product | None = None


class InitGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Group in which a trainer broadcasts weights; joining it leaves the last one."""

    master_address: Annotated[str, Meta(max_length=256)]
    master_port: Annotated[int, Meta(ge=1, lt=65536)]
    rank_offset: Annotated[int, Meta(ge=1, lt=65536)]
    world_size: Annotated[int, Meta(ge=2, le=65536)]
    group_name: Text
    backend: str = "gloo"


class DestroyGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Group to leave."""

    group_name: Text


class UnmergeLora(WeightChange, frozen=True):
    """Removal of the adapters of networks."""

    target: str = "all"


class SetLora(WeightChange, frozen=True, kw_only=True):
    """Adapters, in files or folders, that replace those of their networks and act together."""

    lora_nickname: Text | Annotated[list[Text], Several]
    lora_path: Text | Annotated[list[Text | None], Several] | None = None  # None takes an adapter that was loaded before
    target: str | Annotated[list[str], Several] = "all"
    strength: Strength | Annotated[list[Strength], Several] = 1.0
    lora_alpha: Alpha | Annotated[list[Alpha | None], Several] | None = None
    merge_mode: Literal["auto", "dynamic", "merge"] | None = None
    product: Product | None = None  # overrides merge_mode with the trainer's


class NamedAdapter(NamedTuple):
    """Single adapter of a request."""

    nickname: str
    path: str | None
    target: str
    strength: float
    alpha: float | None


class UnloadLora(WeightChange, frozen=True, kw_only=True):
    """Removal of an adapter from all networks and from memory."""

    lora_name: Text
    lora_id: Any = None  # sglang's; no effect


class MergeLora(UnmergeLora, frozen=True, kw_only=True):
    """New strength of the adapters that were set last."""

    strength: Strength = 1.0


class CheckTensors(Struct, frozen=True, forbid_unknown_fields=True):
    """Expected SHA-256 sums of a network's tensors."""

    target_module: str
    expected_named_tensors_sha256: Annotated[dict[str, str], Meta(min_length=1)]


class ListChecksums(Struct, frozen=True, forbid_unknown_fields=True):
    """Names of networks and adapters."""

    module_names: Names | None = None


class NoFields(Struct, frozen=True):
    """Request whose fields are ignored, and which is also answered while the weights are released."""


PICKLES = (
    "serialized_named_tensors are pickles, and this server unpickles nothing: write safetensors to a folder that it reads "
    "(--weights-root), and POST that to /update_weights_from_disk as model_path, or to /v1/set_lora as lora_path"
)


class WeightRoutes:
    """Handlers of the endpoints.

    Args:
        run_between: runs a function between two batches.
    """

    def __init__(self, weights: ServedWeights, run_between: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self.weights, self.run_between = weights, run_between
        self.group: BroadcastGroup | None = None
        self.turn = asyncio.Lock()  # one change is read at a time, to limit the memory

    async def update_from_disk(self, body: UpdateFromDisk) -> dict[str, Any]:
        """Load all weights of networks from a folder, completely or not at all."""
        read = self.weights.read_folder
        staged = await asyncio.to_thread(read, body.model_path, body.target_modules, body.sha256)
        return await self._change(
            lambda: self.weights.exchange(staged, body.sha256), body, f"the weights of {body.model_path}"
        )

    async def update_from_tensor(self, body: UpdateFromTensor) -> dict[str, Any]:
        """Stage a bucket; the last one of a push changes the weights, or the adapters, of all its networks at once."""
        if body.load_format not in (SHARED_FILES, BROADCAST):
            raise RequestError(PICKLES)
        if len(body.serialized_named_tensors) != 1:
            raise RequestError(f"serialized_named_tensors holds {len(body.serialized_named_tensors)}, expected one bucket")
        try:
            bucket = parse_bucket(msgspec.json.decode(body.serialized_named_tensors[0]))
        except (msgspec.DecodeError, RecursionError):
            raise RequestError("serialized_named_tensors holds a text that is not JSON") from None
        flat = await asyncio.to_thread(self._receive, bucket) if body.load_format == BROADCAST else None
        staged = await asyncio.to_thread(self.weights.stage, bucket, flat)
        if staged is None:
            return {"success": True, "message": f"bucket {bucket.index + 1} of {bucket.count} is staged"}
        factors = {name.removesuffix(FACTORS): tensors for name, tensors in staged.items() if name.endswith(FACTORS)}
        source, product = f"{bucket.count} buckets", body.product or "auto"
        if not factors:
            sums = await asyncio.to_thread(self.weights.sum_staged)
            return await self._change(lambda: self.weights.exchange(staged, sums), body, source)
        alpha, path = body.lora_alpha, f"push {bucket.push}"
        if len(factors) < len(staged) or alpha is None:
            raise RequestError("a push must hold either adapters, with their lora_alpha, or all weights")
        adapters = {
            name: stack_adapters([self.weights.open_adapter(name, tensors, alpha=alpha, path=path)], product)
            for name, tensors in factors.items()
        }
        return await self._change(lambda: self.weights.adapt(adapters), body, source)

    def _receive(self, bucket: SharedBucket) -> Tensor:
        """Receive the bytes of a bucket that the group broadcasts, uint8."""
        size = bucket.places[-1].end_idx
        if self.group is None or self.group.name != bucket.file:
            raise RequestError(f"there is no group {bucket.file!r}: POST /init_weights_update_group first", 409)
        if size > self.weights.count_most_bytes():
            raise RequestError(f"the bucket has {size} bytes, more than all weights")
        flat = torch.empty(size, dtype=torch.uint8)
        try:
            self.group.broadcast(flat)
        except RunError as error:
            self.group = None
            raise RequestError(str(error), 409) from None
        return flat

    async def init_group(self, body: InitGroup) -> dict[str, Any]:
        """Join a group, which needs the trainer and all of its servers."""
        if body.backend != "gloo":
            raise RequestError(f"backend is {body.backend[:40]!r}, expected gloo")
        self.group = None

        def join() -> BroadcastGroup:
            store = open_store(body.master_address, body.master_port, is_master=False)
            address = find_local_address(body.master_address, body.master_port)
            return BroadcastGroup(store, address, rank=body.rank_offset, size=body.world_size, name=body.group_name)

        with convert_errors(RequestError, RunError, OSError):
            self.group = await asyncio.to_thread(join)
        return {"success": True, "message": f"rank {body.rank_offset} of {body.world_size} of group {body.group_name}"}

    async def destroy_group(self, body: DestroyGroup) -> dict[str, Any]:
        """Leave a group, if this server is in it."""
        if self.group is not None and self.group.name == body.group_name:
            self.group = None
        return {"success": True, "message": f"not in group {body.group_name}"}

    async def set_lora(self, body: SetLora) -> dict[str, Any]:
        """Replace the adapters of networks."""
        named, product = _list_adapters(body), body.product or PRODUCTS[body.merge_mode or "auto"]
        networks_of = {each: self._list_networks(each.target) for each in named}

        def read(each: NamedAdapter, network: str) -> Adapter:
            options: dict[str, Any] = {"nickname": each.nickname, "strength": each.strength, "alpha": each.alpha}
            if each.path is None:
                return self.weights.find_adapter(network, **options)
            path = f"{each.path}/{network}" if len(networks_of[each]) > 1 else each.path
            return self.weights.read_adapter(path, network, **options)

        def read_all() -> dict[str, AppliedAdapters | None]:
            applied = dict[str, AppliedAdapters | None]()
            for network in self.weights.networks:
                adapters = [each for each in named if network in networks_of[each]]
                if len({each.nickname for each in adapters}) < len(adapters):
                    raise RequestError(f"lora_nickname names an adapter of {network} twice, expected different ones")
                if adapters:
                    applied[network] = stack_adapters([read(each, network) for each in adapters], product)
            return applied

        adapters = await asyncio.to_thread(read_all)
        sources = ", ".join(f"{each.nickname} of {each.path or 'an earlier request'}" for each in named)
        return await self._change(lambda: self.weights.adapt(adapters), body, f"adapter {sources}")

    async def merge_lora(self, body: MergeLora) -> dict[str, Any]:
        """Activate the adapters that were set last, with another strength."""
        adapters = {
            name: self.weights.rescale_last(name, strength=body.strength, product=PRODUCTS["merge"])
            for name in self._list_networks(body.target)
        }
        return await self._change(lambda: self.weights.adapt(adapters), body, f"adapters of strength {body.strength:g}")

    async def unmerge_lora(self, body: UnmergeLora) -> dict[str, Any]:
        """Remove adapters, so that the base weights remain."""
        adapters = dict.fromkeys(self._list_networks(body.target))
        return await self._change(lambda: self.weights.adapt(adapters), body, "the base weights, without adapters")

    async def unload_lora(self, body: UnloadLora) -> dict[str, Any]:
        """Remove an adapter, and free its memory."""
        name, remaining = body.lora_name, self.weights.plan_removal(body.lora_name)
        answer: dict[str, Any] = {"success": True, "status": "ok", "message": f"adapter {name} is unloaded"}
        if remaining:
            answer = await self._change(lambda: self.weights.adapt(remaining), body, f"the weights without adapter {name}")
        self.weights.forget(name)
        return {
            **answer,
            "error_message": None,
            "loaded_adapters": self._list_loaded(),
            "weight_version": self.weights.version,
        }

    async def list_loras(self, body: NoFields) -> dict[str, Any]:
        """Return the loaded adapters, and the active ones by network."""
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

    async def list_checksums(self, body: ListChecksums) -> dict[str, Any]:
        """Return the checksums of networks and adapters."""
        return await asyncio.to_thread(self.weights.list_checksums, body.module_names)

    async def check(self, body: CheckTensors) -> dict[str, Any]:
        """Compare single tensors with checksums."""
        await asyncio.to_thread(self.weights.check_tensors, body.target_module, body.expected_named_tensors_sha256)
        return {"success": True, "message": f"{len(body.expected_named_tensors_sha256)} tensors are as expected"}

    async def release(self, body: NoFields) -> dict[str, Any]:
        """Free the device's memory until `resume`."""
        await self.run_between(self.weights.release)
        return {"success": True, "message": "the weights are on the host"}

    async def resume(self, body: NoFields) -> dict[str, Any]:
        """Move the weights back to the device."""
        await self.run_between(self.weights.resume)
        return {"success": True, "message": "the weights are on the device"}

    async def _change(self, change: Callable[[], None], body: WeightChange, source: str) -> dict[str, Any]:
        """Apply a change between two batches, set the version of the weights, and return the answer."""
        weights, version = self.weights, body.weight_version

        def apply() -> None:
            change()
            weights.version = weights.version + 1 if version is None else int(version)

        await self.run_between(apply)
        return {"success": True, "status": "ok", "message": f"serving {source}", "weight_version": weights.version}

    def _list_networks(self, target: str) -> list[str]:
        """Return the networks of a target."""
        names = list(self.weights.networks)
        if target not in ("all", *names):
            raise RequestError(f"target is {target[:60]!r}, expected one of all, {', '.join(names)}")
        return names if target == "all" else [target]


def _list_adapters(body: SetLora) -> list[NamedAdapter]:
    """List the adapters of a request; RequestError if a list of values has another length than the nicknames."""
    nicknames = body.lora_nickname if isinstance(body.lora_nickname, list) else [body.lora_nickname]
    columns: list[Sequence[Any]] = [nicknames]
    for field in ("lora_path", "target", "strength", "lora_alpha"):
        value = getattr(body, field)
        if isinstance(value, list) and len(value) != len(nicknames):
            raise RequestError(f"{field} has {len(value)} items, expected {len(nicknames)}, one per lora_nickname")
        columns.append(value if isinstance(value, list) else [value] * len(nicknames))
    if isinstance(body.lora_path, str) and len(nicknames) > 1:
        raise RequestError(f"lora_path is a single path for {len(nicknames)} adapters, expected one per adapter, or null")
    return [NamedAdapter(*values) for values in zip(*columns, strict=True)]


def build_control_routes(routes: WeightRoutes) -> list[Route]:
    """Build the endpoints. They need the admin key, which the application checks."""
    handlers: dict[str, tuple[Callable[[Any], Awaitable[dict[str, Any]]], type[Struct]]] = {
        "/update_weights_from_disk": (routes.update_from_disk, UpdateFromDisk),
        "/update_weights_from_tensor": (routes.update_from_tensor, UpdateFromTensor),
        "/init_weights_update_group": (routes.init_group, InitGroup),
        "/destroy_weights_update_group": (routes.destroy_group, DestroyGroup),
        "/v1/set_lora": (routes.set_lora, SetLora),
        "/v1/merge_lora_weights": (routes.merge_lora, MergeLora),
        "/v1/unmerge_lora_weights": (routes.unmerge_lora, UnmergeLora),
        "/unload_lora_adapter": (routes.unload_lora, UnloadLora),
        "/update_weights_from_tensor_checker": (routes.check, CheckTensors),
        "/get_weights_checksum": (routes.list_checksums, ListChecksums),
        "/v1/list_loras": (routes.list_loras, NoFields),
        "/release_memory_occupation": (routes.release, NoFields),
        "/resume_memory_occupation": (routes.resume, NoFields),
    }

    def endpoint(path: str) -> Callable[[Request], Awaitable[JSONResponse]]:
        handler, kind = handlers[path]

        async def respond(request: Request) -> JSONResponse:
            try:
                body = await _read_fields(request, kind)
                async with routes.turn:
                    if kind is not NoFields and routes.weights.released:
                        raise RequestError("the weights are released: POST /resume_memory_occupation first")
                    return JSONResponse(await handler(body))
            except (RequestError, WireError) as error:
                status, problem = (error.status, error.problem) if isinstance(error, RequestError) else (400, str(error))
            except Exception as error:  # e.g. out of memory; the weights are unchanged
                status, problem = 500, " ".join(f"{type(error).__name__}: {error}".split())
            # sglang's form.
            return JSONResponse({"success": False, "message": problem, "detail": problem}, status)

        return respond

    methods = {"/v1/list_loras": ["GET"]}
    return [Route(path, endpoint(path), methods=methods.get(path, ["POST"])) for path in handlers]


async def _read_fields(request: Request, kind: type[Result]) -> Result:
    """Read the fields of a request, whose body may be empty."""
    empty = not request.headers.get("content-length", "").strip("0") and "transfer-encoding" not in request.headers
    return convert({}, kind) if empty else await read_json(request, kind, most_bytes=MOST_BYTES, lenient=True)
