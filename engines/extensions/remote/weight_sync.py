"""Weight sync: pushes of the trainer's weights to the rollout servers after an update.

    method         trains      sends
    auto           an adapter  its file, by POST /v1/set_lora; before, once, the base weights to a server that lacks them
    auto           all         all weights in a folder, by POST /update_weights_from_disk
    disk           an adapter  the merged weights, in the same way
    shared_memory  an adapter  its factors in buckets, in files that fluvial's server on the same machine reads
    shared_memory  all         all weights, in the same way
    broadcast      an adapter  its factors in buckets, broadcast in a gloo group of the trainer and fluvial's servers
    broadcast      all         all weights, in the same way

An adapter of a form other than LoRA is merged, and all weights are sent. A folder is renamed when all of its files are
complete, so a killed trainer leaves nothing that a server reads. The adapter of another run is removed from a server, and
each adapter replaces the last one, so a server's memory does not grow.

After each push the server's checksums of the base and of the adapter are compared with the trainer's. In sglang, layers with
an adapter have other names and may be merged, so their checksum differs: there the list of adapters is compared.
"""

import json
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import FluvialError, RunError, UsageError, convert_errors
from fluvial.engines.export.model_folder import list_base_tensors, list_components, write_lora, write_model
from fluvial.engines.extensions.remote.push_folder import PushFolder, StoredPush
from fluvial.engines.extensions.remote.push_sums import FILES, PushSums, ServerDtype
from fluvial.engines.extensions.wire.client import HttpClient, UnreachableError
from fluvial.engines.extensions.wire.weight_buckets import (
    BROADCAST,
    FACTORS,
    PRECISIONS,
    SHARED_FILES,
    UNKNOWN,
    BroadcastGroup,
    BucketPlace,
    SharedBucket,
    compute_adapter_checksum,
    compute_checksum,
    expect_checksums,
    find_local_address,
    flatten,
    open_store,
    plan_buckets,
)
from fluvial.engines.files import LORA
from fluvial.engines.gathered import gather, gather_weights, layout
from fluvial.engines.sampling.source import Holder
from fluvial.models.lora import LowRank, find_lora_layers, read_form
from fluvial.models.lora_layer import Product

T = TypeVar("T")
Failed = dict[str, FluvialError]  # error of a push, by address of the server
Sums = dict[str, str]  # checksum by name of the network
Method = Literal["auto", "disk", "shared_memory", "broadcast"]
METHODS: tuple[Method, ...] = get_args(Method)
FACTOR_METHODS: tuple[Method, ...] = ("auto", "shared_memory", "broadcast")  # methods that send a LoRA's factors
MERGE_MODES: dict[Product, str] = {"auto": "dynamic", "factors": "dynamic", "merged": "merge"}  # sglang's names


class _Push(NamedTuple):
    """Push in progress."""

    module: nn.Module
    version: int
    peers: list[HttpClient]  # on the main rank
    failed: Failed
    adapter: str | None  # adapter that generates the rollouts; None if the module has none
    label: str = ""  # suffix of the folders' names


class WeightSync:
    """Pushes of an engine's weights to servers.

    Args:
        world: process group of the engine. Its main rank talks to the servers.
        folder: folder that trainer and servers see; by default one in the machine's shared memory.
        method: method of transport, see the module.
        verify: compare checksums. A server that fuses or renames layers needs False, because its checksums differ.
        product: how adapted layers multiply their input.
        bucket_bytes: bytes per bucket or file; one is hashed while the next one is gathered and sent.

    Raises:
        RunError: the folder cannot be written.
        UsageError: the method is unknown.
    """

    def __init__(
        self,
        world: World,
        *,
        folder: Path | None = None,
        method: Method = "auto",
        verify: bool = True,
        product: Product = "auto",
        bucket_bytes: int = 128_000_000,
    ) -> None:
        if method not in METHODS:
            raise UsageError("rollout.servers.weights", method, f"one of {', '.join(METHODS)}")
        self.world, self.method, self.verify, self.product = world, method, verify, product
        self.bucket_bytes = bucket_bytes
        self.last: StoredPush | None = None
        self._folder: PushFolder | None = None
        with world.agreed():
            if world.is_main:
                self._folder = PushFolder(folder)
        self.path = Path(world.gather_items(str(self._folder.path) if self._folder else "")[0])
        self._dtypes: dict[str, ServerDtype] = {}  # by address
        self._with_base: set[str] = set()  # addresses of the servers that have the trainer's base weights
        self._base: dict[ServerDtype, Sums] = {}  # checksums of the trainer's base weights
        self._parameters: dict[str, set[str]] = {}  # names of the parameters of each network, which checksums cover
        self._lock = threading.Lock()  # guards `_dtypes` and `_with_base`
        self._turn = threading.Lock()  # held during a push, and while a server that comes back gets weights
        self._group: tuple[list[str], BroadcastGroup] | None = None  # with the addresses of its servers

    @collective
    def push(
        self,
        engine: Holder,
        version: int,
        peers: Sequence[HttpClient],
        *,
        adapter: str = "default",
        label: str = "",
    ) -> dict[str, str]:
        """Push the current weights to servers.

        Args:
            version: number of updates of the weights.
            peers: clients of the servers; those of the main rank count.
            adapter: adapter that generates the rollouts.
            label: suffix of the folder's name, for other weights of the same version: sglang reads a path once.

        Returns:
            Error of each server that failed, by address, the same on all ranks. Such a server may have any weights, so it
            must get no requests until a push succeeds.

        Raises:
            UnreachableError: no server took the weights, but one that is away may do so later.
            RunError: no server took the weights, or they cannot be written.
        """
        module, failed = engine.module, Failed()
        trained = adapter if find_lora_layers(module) else None
        push = _Push(module, version, [*peers] if self.world.is_main else [], failed, trained, label)
        with self._turn:
            self._push(push)
        count, failed = self._share((len(push.peers), failed))
        for address in failed:
            self.forget(address)
        reasons = {address: str(error) for address, error in failed.items()}
        if len(failed) >= count:
            away = any(isinstance(error, UnreachableError) for error in failed.values())
            why = next(iter(reasons.values()), "there is none")
            raise (UnreachableError if away else RunError)(f"no server took the weights of update {version}: {why}")
        return reasons

    def _push(self, push: _Push) -> None:
        self._parameters = {
            name: set(list_base_tensors(net, parameters=True)) for name, net in list_components(push.module).items()
        }
        self._act_on_each(push.peers, push.failed, self._prepare_server)
        if push.adapter is not None and self.method in FACTOR_METHODS and isinstance(read_form(push.module), LowRank):
            self._push_base(push)
            (self._push_adapter if self.method == "auto" else self._push_buckets)(push, push.adapter)
        elif self.method in ("auto", "disk"):
            self._push_folder(push)
        else:
            self._push_buckets(push)

    def repeat(self, peer: HttpClient) -> str | None:
        """Push the weights of the last push to a server that has come back; only on the main rank.

        Returns:
            The problem, None if the server has the weights. It also takes part in the next `push`.
        """
        with self._turn:
            last, failed = self.last, Failed()
            if last is None:
                return "the last push was in buckets, which are not kept"
            self.forget(peer.address)

            def send(peer: HttpClient) -> None:
                self._prepare_server(peer)
                if last.is_adapter:
                    self._check_base(peer)
                self._send(peer, last)

            self._act_on_each([peer], failed, send)
            return None if not failed else str(failed[peer.address])

    def forget(self, address: str) -> None:
        """Forget a server's dtype and base weights, because it may have restarted; the next push checks them again."""
        with self._lock:
            self._with_base.discard(address)
            self._dtypes.pop(address, None)

    def close(self) -> None:
        """Remove the folder, and leave the group."""
        self._group = None
        if self._folder is not None:
            self._folder.close()

    # Adapters

    def _push_base(self, push: _Push) -> None:
        """Push the base weights to the servers that lack them."""
        networks = list_components(push.module)
        new = [peer for peer in push.peers if peer.address not in {*self._with_base, *push.failed}]
        dtypes = self._share({self._dtypes[peer.address] for peer in new} if self.verify else set())
        for dtype in sorted(dtypes - set(self._base), key=str):
            self._base[dtype] = {}
            for name, network in networks.items():
                tensors = list_base_tensors(network, parameters=True)
                named = ((key, gather(tensors[key])) for key in sorted(tensors))
                self._base[dtype][name] = compute_checksum(named, dtype=dtype)
        others = Failed()
        self._act_on_each(new, others, self._check_base)
        if not self._share(len(others)):
            return
        folder = f"base-{push.version}"
        with self._write_folder(folder) as out:
            for name, network in networks.items():
                tensors = list_base_tensors(network)
                like = {key: torch.empty(t.shape, dtype=t.dtype, device="meta") for key, t in tensors.items()}
                named = ((key, gather(tensor).cpu()) for key, tensor in tensors.items())
                write_model(named, out / name, like=like, config=None, world=self.world)
        if not self.world.is_main:
            return
        pushed = StoredPush(push.version, self.path / folder, tuple(self._parameters), {})

        def send(peer: HttpClient) -> None:
            self._send_folder(peer, pushed)
            self._check_base(peer)

        self._act_on_each([peer for peer in new if peer.address in others], push.failed, send)

    def _check_base(self, peer: HttpClient) -> None:
        """Raise RunError unless a server has the trainer's base weights."""
        expected = self._base.get(self._dtypes[peer.address], {})
        sums = _fetch_checksums(peer, expected) if self.verify else expected
        if (self.verify and not expected) or sums != expected:
            raise RunError(f"{peer.address} has other base weights than the trainer")
        with self._lock:
            self._with_base.add(peer.address)

    def _push_adapter(self, push: _Push, adapter: str) -> None:
        name = f"lora-{push.version}{push.label}"
        with self._write_folder(name) as out:
            write_lora(push.module, out, adapter=adapter, world=self.world)
        scaling = float(next(iter(find_lora_layers(push.module).values())).scaling[adapter])
        sums = dict[tuple[str, ServerDtype], str]()
        dtypes = self._gather_dtypes(push)
        for part in self._parameters if self.world.is_main and self.verify else ():
            tensors = load_file(_find_adapter_folder(self.path / name, part) / LORA)
            factors = {key.partition(".")[2]: tensor for key, tensor in tensors.items()}  # without the network's name
            for dtype in dtypes:
                sums[part, dtype] = compute_adapter_checksum(factors, scaling, dtype=dtype)
        self._deliver(push, StoredPush(push.version, self.path / name, tuple(self._parameters), sums, is_adapter=True))

    def _send_adapter(self, peer: HttpClient, pushed: StoredPush) -> None:
        """Send an adapter to a server, and verify it."""
        paths, dtype = list[str](), self._dtypes[peer.address]
        for name in pushed.networks:
            folder = _find_adapter_folder(pushed.folder, name)
            value = {
                "lora_nickname": f"fluvial-{name}",  # always the same, so that each adapter replaces the last one
                "lora_path": str(folder),
                "target": name,
                "strength": 1.0,
                "merge_mode": MERGE_MODES[self.product],
                "product": self.product,  # for fluvial's server
                "weight_version": str(pushed.version),
            }
            _post_change(peer, "/v1/set_lora", value)
            paths.append(str(folder))
        if not self.verify:
            return
        adapters = self._find_sums(peer, pushed)
        problem = f"{peer.address} accepted the adapter of update {pushed.version}, and"
        expected = expect_checksums(self._base[dtype], adapters)
        sums = _fetch_checksums(peer, expected)
        if all(sums[name + FACTORS] == UNKNOWN for name in adapters):  # sglang: adapted layers have other names
            loras = json.dumps(peer.get("/v1/list_loras"))
            if not all(json.dumps(path) in loras for path in paths):
                raise RunError(f"{problem} does not list it")
        elif sums != expected:
            raise RunError(f"{problem} has another checksum")

    # All weights

    def _push_folder(self, push: _Push) -> None:
        name, options, networks = (
            f"weights-{push.version}{push.label}",
            self._choose_export(push),
            list_components(push.module),
        )
        likes = {part: dict(sorted(layout(network, **options).items())) for part, network in networks.items()}
        dtypes = self._gather_dtypes(push) if self.verify else set()
        sums = PushSums(likes, self._parameters, dtypes, self.bucket_bytes, files=True)
        with self._write_folder(name) as out, sums:
            for part, like in likes.items():
                tensors = gather_weights(networks[part], **options, names=[*like])
                if self.world.is_main:
                    tensors = sums.watch(part, tensors)
                # Small files, because a server holds one file beside the network in memory.
                size = self.bucket_bytes
                write_model(tensors, out / part, like=like, config=None, max_shard_size=size, world=self.world)
        self._deliver(push, StoredPush(push.version, self.path / name, tuple(self._parameters), sums.hexdigests()))

    def _send_folder(self, peer: HttpClient, pushed: StoredPush) -> None:
        value = {
            "model_path": str(pushed.folder),
            "flush_cache": True,
            "target_modules": [*pushed.networks],
            "weight_version": str(pushed.version),
            "sha256": {name: pushed.sums[name, FILES] for name in pushed.networks if (name, FILES) in pushed.sums},
        }
        _post_change(peer, "/update_weights_from_disk", value)

    def _check_sums(self, peer: HttpClient, version: int, base: Sums, adapters: Sums | None = None) -> None:
        """Raise RunError unless a server has exactly these weights and adapters."""
        expected = expect_checksums(base, adapters)
        if _fetch_checksums(peer, expected) != expected:
            raise RunError(
                f"{peer.address} accepted the weights of update {version}, and has another checksum: a server that "
                "fuses or renames layers needs `rollout.servers.weights_verify` false"
            )

    # Buckets

    def _push_buckets(self, push: _Push, factors: str | None = None) -> None:
        """Send all weights in buckets, or only the factors of an adapter.

        A broadcast reaches all servers or none, so it restarts without those that fail.
        """
        self.last = None
        if self._folder is not None:
            self._folder.keep()  # removes all, also the base weights
        options = self._choose_export(push) if factors is None else {"adapter": factors}
        plans, likes = list[tuple[str, nn.Module, list[BucketPlace]]](), dict[str, dict[str, Tensor]]()
        for part, network in list_components(push.module).items():
            likes[part] = dict(sorted(layout(network, **options).items()))
            plans += [(part, network, places) for places in plan_buckets(likes[part], most_bytes=self.bucket_bytes)]
        dtypes = self._gather_dtypes(push) if self.verify else set()
        while True:
            failed = self._share(len(push.failed))
            with PushSums(likes, self._parameters if factors is None else likes, dtypes, self.bucket_bytes) as sums:
                self._send_buckets(push, plans, options, sums, factors)
            if self.method != "broadcast" or self._share(len(push.failed)) in (failed, self._share(len(push.peers))):
                break
        if not self.verify:
            return
        pushed = StoredPush(push.version, self.path, tuple(self._parameters), sums.hexdigests())

        def check(peer: HttpClient) -> None:
            sums = self._find_sums(peer, pushed)
            base, adapters = (sums, None) if factors is None else (self._base[self._dtypes[peer.address]], sums)
            self._check_sums(peer, push.version, base, adapters)

        self._act_on_each(push.peers, push.failed, check)

    def _send_buckets(
        self,
        push: _Push,
        plans: Sequence[tuple[str, nn.Module, list[BucketPlace]]],
        options: Mapping[str, Any],
        sums: PushSums,
        factors: str | None,
    ) -> None:
        """Send and hash the buckets of a push; a broadcast ends when a server fails."""
        peers, failed = push.peers, push.failed
        name, before = uuid.uuid4().hex if self.world.is_main else "", self._share(len(failed))
        with self.world.agreed():
            if self.world.is_main and self.method == "broadcast":
                self._join(peers, failed)
        for index, (part, network, places) in enumerate(plans):
            if self.method == "broadcast" and self._share(len(failed) != before or (self.world.is_main and not self._group)):
                return
            named = gather_weights(network, **options, names=[place.name for place in places])
            flat = flatten(places, [tensor for _, tensor in (sums.watch(part, named) if self.world.is_main else named)])
            with self.world.agreed():
                if self.world.is_main:
                    module = part if factors is None else part + FACTORS
                    where = str(self.path / f"bucket-{index}") if self._group is None else self._group[1].name
                    self._send_bucket(push, SharedBucket(name, index, len(plans), module, where, places), flat, factors)
            if self._share(len(failed) == len(peers)):
                break
        if factors is not None:
            sums.add_scaling(float(next(iter(find_lora_layers(push.module).values())).scaling[factors]))

    def _send_bucket(self, push: _Push, bucket: SharedBucket, flat: Tensor, factors: str | None) -> None:
        """Send a bucket to the servers that have not failed."""
        group = None if self._group is None else self._group[1]
        request: dict[str, Any] = {
            "load_format": SHARED_FILES if group is None else BROADCAST,
            "serialized_named_tensors": [json.dumps(bucket.as_json())],
            "target_modules": [bucket.module],
            "weight_version": str(push.version),
        }
        if factors is not None:
            layer = next(iter(find_lora_layers(push.module).values()))
            request |= {"lora_alpha": float(layer.lora_alpha[factors]), "product": self.product}
        post = partial(_post_change, path="/update_weights_from_tensor", value=request)
        if group is None:
            with convert_errors(RunError, OSError, says=f"weights cannot be written to {bucket.file}"):
                Path(bucket.file).write_bytes(flat.cpu().numpy().data)
            self._act_on_each(push.peers, push.failed, post)
            Path(bucket.file).unlink(missing_ok=True)
            return
        with self._act_during(push.peers, push.failed, post) as alive:
            group.broadcast(flat.cpu())
        if len(alive) < len(self._group[0] if self._group else ()):
            self._group = None

    def _join(self, peers: Sequence[HttpClient], failed: Failed) -> None:
        """Form a group with the servers that have not failed, unless it exists."""
        alive = [peer for peer in peers if peer.address not in failed]
        if self._group is not None and self._group[0] == [peer.address for peer in alive]:
            return
        self._group, name = None, uuid.uuid4().hex
        self._act_on_each(
            alive, failed, partial(_post_change, path="/destroy_weights_update_group", value={"group_name": name})
        )
        alive = [peer for peer in alive if peer.address not in failed]  # servers that support groups
        if not alive:
            return
        url = urlsplit(alive[0].address)
        with convert_errors(RunError, OSError, says=f"{alive[0].address} cannot be reached"):
            address = find_local_address(url.hostname or "", url.port or 80)
        store, addresses = open_store(address, 0, is_master=True), [peer.address for peer in alive]

        def ask(peer: HttpClient) -> None:
            value = {"master_address": address, "master_port": store.port, "group_name": name, "backend": "gloo"}
            value |= {"rank_offset": 1 + addresses.index(peer.address), "world_size": 1 + len(alive)}
            _post_change(peer, "/init_weights_update_group", value)

        with self._act_during(alive, failed, ask):
            self._group = addresses, BroadcastGroup(store, address, rank=0, size=1 + len(alive), name=name)

    @contextmanager
    def _act_during(
        self, peers: Sequence[HttpClient], failed: Failed, action: Callable[[HttpClient], None]
    ) -> Iterator[list[HttpClient]]:
        """Run an action on servers, see `_act_on_each`, in parallel with the context.

        Yields a list, which holds the servers that have not failed after the context. If the context raises RunError, only
        unreachable servers count as failed, or all of them if none is unreachable.
        """
        before, alive = dict(failed), list[HttpClient]()
        with ThreadPoolExecutor(1) as pool:
            acted = pool.submit(self._act_on_each, peers, failed, action)
            lost: RunError | None = None
            try:
                yield alive
            except RunError as error:
                lost, self._group = error, None
            acted.result()
        if lost is not None:
            gone = {address: error for address, error in failed.items() if isinstance(error, UnreachableError)}
            failed.clear()
            failed |= before | gone
            if len(failed) == len(before):
                failed |= {peer.address: UnreachableError(str(lost)) for peer in peers if peer.address not in failed}
        alive += [peer for peer in peers if peer.address not in failed]

    # Shared by all methods

    def _deliver(self, push: _Push, pushed: StoredPush) -> None:
        """Send a folder to the servers, on the main rank, and keep it for servers that come back."""
        if self._folder is None:
            return
        self._act_on_each(push.peers, push.failed, lambda peer: self._send(peer, pushed))
        self._folder.keep(pushed.folder.name)
        self.last = pushed

    def _send(self, peer: HttpClient, pushed: StoredPush) -> None:
        """Send a folder to a server, and verify its weights."""
        if pushed.is_adapter:
            self._send_adapter(peer, pushed)
            return
        self._send_folder(peer, pushed)
        if self.verify:
            self._check_sums(peer, pushed.version, self._find_sums(peer, pushed))

    def _find_sums(self, peer: HttpClient, pushed: StoredPush) -> Sums:
        """Return the expected checksums in a server's dtype; RunError if the push has none for it."""
        dtype = self._dtypes[peer.address]
        if any((name, dtype) not in pushed.sums for name in pushed.networks):
            raise RunError(f"{peer.address} computes in {dtype}, for which update {pushed.version} has no checksum")
        return {name: pushed.sums[name, dtype] for name in pushed.networks}

    def _gather_dtypes(self, push: _Push) -> set[ServerDtype]:
        """Return the dtypes of the servers that have not failed, the same on all ranks."""
        return self._share({self._dtypes[peer.address] for peer in push.peers if peer.address not in push.failed})

    def _prepare_server(self, peer: HttpClient) -> None:
        """Ask a server for the dtype of its weights, and remove the adapters of another run, once."""
        if peer.address not in self._dtypes:
            dtype = PRECISIONS.get(str(_find_value(peer.get("/v1/models"), "dit_precision")))
            try:
                if _find_value(peer.get("/v1/list_loras"), "active"):
                    peer.post("/v1/unmerge_lora_weights", {"target": "all"})
            except UnreachableError:
                raise
            except RunError:  # the server does not support adapters
                pass
            with self._lock:
                self._dtypes[peer.address] = dtype

    def _choose_export(self, push: _Push) -> dict[str, Any]:
        """Return the arguments of `gather_weights` for all weights with the adapter merged, the same on all ranks.

        The dtype is that of the servers. It is None, the trainer's, if servers differ, or if the module has floating-point
        buffers, which keep their dtype on a server.
        """
        dtypes, names = set(self._dtypes.values()), set(dict(push.module.named_parameters()))
        exact = any(t.is_floating_point() for name, t in push.module.state_dict().items() if name not in names)
        dtype = self._share(dtypes.pop() if len(dtypes) == 1 and not exact else None)
        return {"adapter": push.adapter, "merge": push.adapter is not None, "dtype": dtype}

    def _act_on_each(self, peers: Sequence[HttpClient], failed: Failed, action: Callable[[HttpClient], None]) -> None:
        """Run an action on each server that has not failed, concurrently, and add errors to `failed`."""
        alive = [peer for peer in peers if peer.address not in failed]

        def catch_error(peer: HttpClient) -> tuple[str, FluvialError] | None:
            try:
                action(peer)
            except FluvialError as error:
                return peer.address, error
            return None

        if alive:
            with ThreadPoolExecutor(len(alive)) as pool:
                failed.update(filter(None, pool.map(catch_error, alive)))

    def _share(self, item: T) -> T:
        """Return the main rank's item on all ranks."""
        return self.world.gather_items(item)[0]

    @contextmanager
    def _write_folder(self, name: str) -> Iterator[Path]:
        """Yield a temporary folder, which is renamed to `name` at the end of the context."""
        yield self.path / f".{name}"
        with self.world.agreed():
            if self._folder is not None:
                self._folder.finish(name)


def _find_adapter_folder(folder: Path, name: str) -> Path:
    """Return the folder of a network's adapter in a push's folder."""
    return folder if (folder / LORA).is_file() else folder / name


def _post_change(peer: HttpClient, path: str, value: Mapping[str, Any]) -> None:
    """Post a change of the weights; raise RunError if the server refuses."""
    answer = peer.post(path, value)
    if isinstance(answer, Mapping) and answer.get("success") is False:
        raise RunError(f"{peer.address}{path} refused: {str(answer.get('message'))[:160]}")


def _fetch_checksums(peer: HttpClient, names: Collection[str]) -> Sums:
    """Fetch checksums from a server; "not_found" for names that it does not know."""
    answer = peer.post("/get_weights_checksum", {"module_names": [*names]})
    values = {name: _find_value(answer, name) for name in names}
    return {name: value if isinstance(value, str) else UNKNOWN for name, value in values.items()}


def _find_value(value: Any, key: str) -> Any:
    """Return the value of a key anywhere in JSON, because servers nest their answers differently; None if it is missing."""
    if isinstance(value, Mapping):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((match for each in value if (match := _find_value(each, key)) is not None), None)
    return None
