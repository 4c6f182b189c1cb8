"""Weight sync: after an update, the servers that make rollouts are given the trainer's weights.

    method         trains      what is sent
    auto           an adapter  its file, by POST /v1/set_lora; first the base weights, once, to a server that has others
    auto           all         all weights in a folder, by POST /update_weights_from_disk
    disk           an adapter  the merged weights, in the same way
    shared_memory  either      all weights in buckets, in files that fluvial's own server on the same machine reads

A folder gets its name when all of its files are complete, so a trainer that is killed leaves nothing that a server takes.
After each push the server's checksum is compared with the trainer's. In sglang, layers with an adapter have other names and
may be merged, so their checksum differs: there the list of adapters is compared. fluvial's own server never merges, and
reports the checksum of the adapter beside that of the base.
"""

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from fluvial.engines.errors import FluvialError, RunError, UsageError
from fluvial.engines.fsdp import export
from fluvial.engines.fsdp.files import LORA
from fluvial.engines.fsdp.loading import stored
from fluvial.engines.fsdp.world import World
from fluvial.engines.sources.peers import Dtype, Peer, Sums, accepted, checksums, precision
from fluvial.engines.sources.protocol import Holder
from fluvial.engines.sources.push_folder import Pushed, PushFolder, bucket_request, bytes_in, factors_in
from fluvial.engines.wire.weight_buckets import (
    FACTORS,
    UNKNOWN,
    Checksum,
    Place,
    SharedBucket,
    adapter_checksum,
    buckets,
    checksum,
    flattened,
)
from fluvial.models.lora import lora_layers
from fluvial.models.lora_layer import Product

T = TypeVar("T")
Method = Literal["auto", "disk", "shared_memory"]
METHODS: tuple[Method, ...] = get_args(Method)
MERGE_MODES: dict[Product, str] = {"factors": "dynamic", "merged": "merge"}  # on the wire


class WeightSync:
    """Gives servers the weights of an engine.

    Args:
        world: process group of the engine. Its main rank talks to the servers.
        folder: folder that trainer and servers see; by default one in the machine's shared memory.
        method: how weights travel, see the module.
        verify: compare checksums. A server that fuses or renames layers has others, and needs False.
        product: how adapted layers multiply their input.
        bucket_bytes: bytes per bucket.

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
        product: Product = "factors",
        bucket_bytes: int = 512_000_000,
    ) -> None:
        if method not in METHODS:
            raise UsageError("rollout.servers.weights", method, f"one of {', '.join(METHODS)}")
        self.world, self.method, self.verify, self.product = world, method, verify, product
        self.bucket_bytes = bucket_bytes
        self.sent_bytes = 0  # of the last push, on the main rank
        self.last: Pushed | None = None
        self._folder: PushFolder | None = None
        with world.agreed():
            if world.is_main:
                self._folder = PushFolder(folder)
        self.path = Path(world.gather_items(str(self._folder.path) if self._folder else "")[0])
        self._dtypes: dict[str, Dtype] = {}  # by address
        self._based: set[str] = set()  # addresses of the servers that have the trainer's base weights
        self._base: dict[Dtype, Sums] = {}  # checksums of the trainer's base weights
        self._parameters: dict[str, set[str]] = {}  # names of the parameters of each network, which checksums are of
        self._lock = threading.Lock()  # of what servers are known to have
        self._turn = threading.Lock()  # a push, or a server that comes back

    def push(self, engine: Holder, version: int, peers: Sequence[Peer], *, adapter: str = "default") -> dict[str, str]:
        """Give servers the current weights; every rank must take part.

        Args:
            engine: engine that holds them.
            version: number of updates that made them.
            peers: the servers; those of the main rank count.
            adapter: adapter that makes the rollouts.

        Returns:
            Why a server did not take them, by its address, the same on all ranks. Such a server has to be left out until a
            push succeeds, because it may have any weights.

        Raises:
            RunError: no server took them, or they cannot be written.
        """
        peers, failed = [*peers] if self.world.is_main else [], dict[str, str]()
        with self._turn:
            self._push(engine.module, version, peers, failed, adapter)
        count, failed = self._shared((len(peers), failed))
        for address in failed:
            self.forget(address)
        if len(failed) >= count:
            raise RunError(f"no server took the weights of update {version}: {next(iter(failed.values()), 'there is none')}")
        return failed

    def _push(self, module: nn.Module, version: int, peers: list[Peer], failed: dict[str, str], adapter: str) -> None:
        lora = bool(lora_layers(module))
        self.sent_bytes = 0
        self._parameters = {
            name: set(export.base_tensors(net, parameters=True)) for name, net in export.components(module).items()
        }
        self._each(peers, failed, self._learn)
        if lora and self.method == "auto":
            self._push_base(module, version, peers, failed)
            self._push_adapter(module, version, peers, failed, adapter)
        elif self.method in ("auto", "disk"):
            self._push_folder(module, version, peers, failed, adapter if lora else None)
        else:
            self._push_buckets(module, version, peers, failed, adapter if lora else None)

    def repeat(self, peer: Peer) -> str | None:
        """Give a server that has come back the weights of the last push; on the main rank alone.

        Returns:
            Why that is not possible now, None if it has them. The next `push` gives them in any case.
        """
        with self._turn:  # after a push that is under way
            last, failed = self.last, dict[str, str]()
            if last is None:
                return "the last push was in buckets, which are not kept"
            self.forget(peer.address)

            def send(peer: Peer) -> None:
                self._learn(peer)
                if last.scaling is not None:
                    self._check_base(peer)
                self._send(peer, last)

            self._each([peer], failed, send)
            return failed.get(peer.address)

    def forget(self, address: str) -> None:
        """Note that a server may have started again: what it has is compared at the next push."""
        with self._lock:
            self._based.discard(address)
            self._dtypes.pop(address, None)

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.close()

    # Adapters

    def _push_base(self, module: nn.Module, version: int, peers: list[Peer], failed: dict[str, str]) -> None:
        """Give the base weights to the servers that have others."""
        new = [peer for peer in peers if peer.address not in {*self._based, *failed}]
        dtypes = self._shared({self._dtypes[peer.address] for peer in new} if self.verify else set())
        for dtype in sorted(dtypes - set(self._base), key=str):
            self._base[dtype] = {}
            for name, network in export.components(module).items():
                tensors = export.base_tensors(network, parameters=True)
                named = ((key, export.gathered(tensors[key])) for key in sorted(tensors))
                self._base[dtype][name] = checksum(named, dtype=dtype)
        others: dict[str, str] = {}
        self._each(new, others, self._check_base)
        if not self._shared(len(others)):
            return
        with self._writing(f"base-{version}") as out:
            for name, network in export.components(module).items():
                tensors = export.base_tensors(network)
                like = {key: torch.empty(t.shape, dtype=t.dtype, device="meta") for key, t in tensors.items()}
                named = ((key, export.gathered(tensor).cpu()) for key, tensor in tensors.items())
                export.write_model(named, out / name, like=like, config=None, world=self.world)
        if not self.world.is_main:
            return
        pushed = Pushed(version, self.path / f"base-{version}", tuple(self._parameters), None)

        def send(peer: Peer) -> None:
            with suppress(RunError):  # there may be no adapter of another run
                peer.post("/v1/unmerge_lora_weights", {"target": "all"})
            self._send_folder(peer, pushed, verify=False)
            self._check_base(peer)

        self._each([peer for peer in new if peer.address in others], failed, send)
        self.sent_bytes += bytes_in(pushed.folder)

    def _check_base(self, peer: Peer) -> None:
        """Raise RunError unless a server has the trainer's base weights."""
        expected = self._base.get(self._dtypes[peer.address], {})
        found = checksums(peer, expected) if self.verify else expected
        if (self.verify and not expected) or found != expected:
            raise RunError(f"{peer.address} has other base weights than the trainer")
        with self._lock:
            self._based.add(peer.address)

    def _push_adapter(
        self, module: nn.Module, version: int, peers: list[Peer], failed: dict[str, str], adapter: str
    ) -> None:
        name = f"lora-{version}"
        with self._writing(name) as out:
            export.write_lora(module, out, adapter=adapter, world=self.world)
        scaling = float(next(iter(lora_layers(module).values())).scaling[adapter])
        self._deliver(Pushed(version, self.path / name, tuple(self._parameters), scaling), peers, failed)

    def _send_adapter(self, peer: Peer, pushed: Pushed, scaling: float) -> None:
        """Send an adapter to a server, and compare what it has then."""
        for name in pushed.networks:
            folder = pushed.folder if (pushed.folder / LORA).is_file() else pushed.folder / name
            nickname = f"fluvial-{pushed.version}-{uuid.uuid4().hex[:8]}"
            value = {
                "lora_nickname": nickname,
                "lora_path": str(folder),
                "target": name,
                "strength": 1.0,
                "merge_mode": MERGE_MODES[self.product],
                "weight_version": str(pushed.version),
            }
            accepted(peer, "/v1/set_lora", value)
            if not self.verify:
                continue
            reported = checksums(peer, [name + FACTORS])[name + FACTORS]
            if reported == UNKNOWN:
                if nickname not in json.dumps(peer.get("/v1/list_loras")):
                    raise RunError(f"{peer.address} accepted the adapter of update {pushed.version}, and does not list it")
            elif reported != adapter_checksum(factors_in(folder), scaling, dtype=self._dtypes[peer.address]):
                raise RunError(f"{peer.address} accepted the adapter of update {pushed.version}, and has another checksum")

    # All weights

    def _push_folder(
        self, module: nn.Module, version: int, peers: list[Peer], failed: dict[str, str], adapter: str | None
    ) -> None:
        name, options = f"weights-{version}", _options(adapter, self._common_dtype(module))
        with self._writing(name) as out:
            for part, network in export.components(module).items():
                like, tensors = export.layout(network, **options), export.weights(network, **options)
                export.write_model(tensors, out / part, like=like, config=None, world=self.world)
        self._deliver(Pushed(version, self.path / name, tuple(self._parameters), None), peers, failed)

    def _send_folder(self, peer: Peer, pushed: Pushed, *, verify: bool = True) -> None:
        """Send all weights of a folder to a server, and compare what it has then."""
        value = {
            "model_path": str(pushed.folder),
            "flush_cache": True,
            "target_modules": [*pushed.networks],
            "weight_version": str(pushed.version),
            "sha256": {name: checksum(stored(pushed.folder / name)) for name in pushed.networks},
        }
        accepted(peer, "/update_weights_from_disk", value)
        if verify and self.verify:
            sums = {}
            for name, own in self._parameters.items():
                named = (pair for pair in stored(pushed.folder / name) if pair[0] in own)
                sums[name] = checksum(named, dtype=self._dtypes[peer.address])
            self._check_sums(peer, pushed.version, sums)

    def _check_sums(self, peer: Peer, version: int, expected: Sums) -> None:
        if checksums(peer, expected) != expected:
            raise RunError(
                f"{peer.address} accepted the weights of update {version}, and has another checksum: a server that "
                "fuses or renames layers needs `rollout.servers.weights_verify` false"
            )

    # Buckets

    def _push_buckets(
        self, module: nn.Module, version: int, peers: list[Peer], failed: dict[str, str], adapter: str | None
    ) -> None:
        self.last = None
        options = _options(adapter, self._common_dtype(module))
        plans = list[tuple[str, nn.Module, list[Place]]]()
        for part, network in export.components(module).items():
            like = export.layout(network, **options)
            laid = buckets({name: like[name] for name in sorted(like)}, most_bytes=self.bucket_bytes)
            plans += [(part, network, places) for places in laid]
        name = uuid.uuid4().hex if self.world.is_main else ""
        dtypes = {self._dtypes[peer.address] for peer in peers if peer.address not in failed}
        sums = {dtype: {part: Checksum(dtype) for part in self._parameters} for dtype in dtypes}
        for index, (part, network, places) in enumerate(plans):
            named = export.weights(network, **options, names=[place.name for place in places])
            tensors = [tensor for _, tensor in named]
            for place, tensor in zip(places, tensors, strict=True):
                for each in sums.values():
                    if place.name in self._parameters[part]:
                        each[part].add(place.name, tensor)
            flat = flattened(places, tensors)
            del tensors
            with self.world.agreed():
                if self.world.is_main:
                    file = self.path / f"bucket-{index}"
                    bucket = SharedBucket(name, index, len(plans), part, str(file), places)
                    request = bucket_request(bucket, flat, version=version)
                    self.sent_bytes += flat.numel()
                    self._each(peers, failed, partial(accepted, path="/update_weights_from_tensor", value=request))
                    file.unlink(missing_ok=True)
            if self._shared(len(failed) == len(peers)):
                break
        if self.verify:
            found = {dtype: {part: each.hex() for part, each in parts.items()} for dtype, parts in sums.items()}
            self._each(peers, failed, lambda peer: self._check_sums(peer, version, found[self._dtypes[peer.address]]))

    # What all of them share

    def _deliver(self, pushed: Pushed, peers: list[Peer], failed: dict[str, str]) -> None:
        """Send a folder to the servers, on the main rank, and keep it for those that come back."""
        if self._folder is None:
            return
        self._each(peers, failed, lambda peer: self._send(peer, pushed))
        self.sent_bytes += bytes_in(pushed.folder)
        self._folder.keep(pushed.folder.name)
        self.last = pushed

    def _send(self, peer: Peer, pushed: Pushed) -> None:
        if pushed.scaling is None:
            self._send_folder(peer, pushed)
        else:
            self._send_adapter(peer, pushed, pushed.scaling)

    def _learn(self, peer: Peer) -> None:
        """Ask a server for the dtype of its weights, once."""
        if peer.address not in self._dtypes:
            dtype = precision(peer)
            with self._lock:
                self._dtypes[peer.address] = dtype

    def _common_dtype(self, module: nn.Module) -> Dtype:
        """Return the dtype in which all weights are sent, the same on all ranks: that of all servers, or None for their own.

        Buffers keep their dtype on a server, so a module with floating-point buffers is not rounded on the way.
        """
        dtypes, names = set(self._dtypes.values()), set(dict(module.named_parameters()))
        exact = any(tensor.is_floating_point() for name, tensor in module.state_dict().items() if name not in names)
        return self._shared(dtypes.pop() if len(dtypes) == 1 and not exact else None)

    def _each(self, peers: Sequence[Peer], failed: dict[str, str], action: Callable[[Peer], None]) -> None:
        """Act on each server that has not failed, all at the same time, and note why one fails."""
        left = [peer for peer in peers if peer.address not in failed]

        def guarded(peer: Peer) -> tuple[str, str] | None:
            try:
                action(peer)
            except FluvialError as error:
                return peer.address, str(error)
            return None

        if left:
            with ThreadPoolExecutor(len(left)) as pool:
                failed.update(filter(None, pool.map(guarded, left)))

    def _shared(self, item: T) -> T:
        """Return the main rank's item."""
        return self.world.gather_items(item)[0]

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """Yield a folder that gets its name when everything is written."""
        yield self.path / f".{name}"
        with self.world.agreed():
            if self._folder is not None:
                self._folder.finish(name)


def _options(adapter: str | None, dtype: Dtype) -> dict[str, Any]:
    """Return which weights of a network are exported: its own, or those that an adapter is merged into."""
    return {"adapter": adapter, "merge": adapter is not None, "dtype": dtype}
