"""Weights of a served network, which are read, checked and exchanged between two batches.

Files and buckets are checked completely before anything changes, and a failed change is undone. Only safetensors are read,
from folders that the server was started with; nothing is unpickled.
"""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fluvial.engines.engine.shards import local
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.export.model_folder import list_base_tensors, list_components
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.rollout.ranks import Ranks, on_all_ranks
from fluvial.engines.extensions.wire.weight_buckets import (
    FACTORS,
    UNKNOWN,
    Checksum,
    SharedBucket,
    compute_adapter_checksum,
    compute_checksum,
)
from fluvial.engines.files import list_weight_files
from fluvial.engines.gathered import gather
from fluvial.models.device import is_accelerator
from fluvial.models.digests import digest_tensor
from fluvial.models.lora import LoraConfig, LowRank, add_lora, find_adapter_parameters, find_linear_layers, find_lora_layers
from fluvial.models.lora_files import FILES, LoraFile, load_lora, read_lora
from fluvial.models.lora_layer import Product

PAIR = (".lora_A.weight", ".lora_B.weight")  # suffixes of a layer's name
MOST_LOADED = 16  # largest number of adapters that are kept for later requests, and that act together


class Adapter(NamedTuple):
    """Adapter of one network."""

    nickname: str
    path: str
    strength: float
    file: LoraFile

    @property
    def scaling(self) -> float:
        """Factor of the product B A."""
        return self.file.alpha * self.strength / self.file.rank


class AppliedAdapters(NamedTuple):
    """Adapters that act on a network, stacked to one.

    Args:
        adapters: the single adapters.
        file: factors of the stacked adapter.
        scaling: factor of its product B A.
        product: how adapted layers multiply their input.
    """

    adapters: tuple[Adapter, ...]
    file: LoraFile
    scaling: float
    product: Product


def stack_adapters(adapters: Sequence[Adapter], product: Product) -> AppliedAdapters | None:
    """Stack adapters to one whose rank is the sum of theirs; None if there is none.

        sum_i s_i B_i A_i = [s_1 B_1, s_2 B_2, ...] [A_1; A_2; ...]

    A single adapter keeps the bits of its factors, and so its checksum.

    Raises:
        RequestError: a scale is 0 or not finite.
    """
    for each in adapters:
        if not math.isfinite(each.scaling) or each.scaling == 0:
            scale = each.scaling * each.file.rank
            raise RequestError(f"alpha times strength is {scale:g}, expected a finite number other than 0")
    if len(adapters) <= 1:
        return AppliedAdapters(tuple(adapters), adapters[0].file, adapters[0].scaling, product) if adapters else None
    rank = sum(each.file.rank for each in adapters)
    layers = tuple(sorted({layer for each in adapters for layer in each.file.layers}))
    tensors = dict[str, Tensor]()
    for layer in layers:
        a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        shape = next(
            (each.file.tensors[a].shape[1], len(each.file.tensors[b])) for each in adapters if a in each.file.tensors
        )
        downs, ups = [], []
        for each in adapters:
            has_layer = a in each.file.tensors
            downs.append(each.file.tensors[a] if has_layer else torch.zeros(each.file.rank, shape[0]))
            ups.append(each.scaling * each.file.tensors[b] if has_layer else torch.zeros(shape[1], each.file.rank))
        tensors[a], tensors[b] = torch.cat(downs), torch.cat(ups, 1)
    return AppliedAdapters(tuple(adapters), LoraFile(rank, float(rank), layers, tensors), 1.0, product)


Staged = dict[str, dict[str, Tensor]]  # tensors to exchange, by network and name


class ServedWeights:
    """Weights of a served network.

    `exchange`, `adapt`, `release` and `resume` change the network. The caller must ensure that nothing computes with it
    meanwhile. The other methods only read.

    Args:
        module: network, or an nn.ModuleDict of networks, with its base weights and no adapters.
        roots: folders from which clients may name files.
        ranks: processes that each hold a part of the weights; None for one process.

    Raises:
        ValueError: the module has adapters.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        roots: Sequence[Path],
        device: torch.device | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if find_lora_layers(module):
            raise ValueError("the served module has adapters: serve the base, and set the adapter with `adapt`")
        self.module, self.ranks = module, ranks
        self.version = 0  # number of updates of the weights
        self._pushed: Staged = {}  # tensors of the current `exchange`, on the process that serves
        self.roots = [root.resolve() for root in roots]
        self.networks = list_components(module)
        self.adapters: dict[str, AppliedAdapters] = {}  # active adapters by network
        self.last: dict[str, AppliedAdapters] = {}  # adapters that were set last, which may be inactive
        self.loaded: dict[tuple[str, str], Adapter] = {}  # kept adapters by nickname and network
        self._sums: dict[str, str] = {}  # checksums since the last change, by the names of `list_checksums`
        self.released = False
        self._staging: tuple[str, int, Staged] = ("", 0, {})  # push, number of its staged buckets, their tensors
        self._staged_sums: dict[str, Checksum] = {}  # of staged networks
        self._hashing: list[Future[None]] = []  # tasks that hash staged buckets
        self._pool = ThreadPoolExecutor(1, "checksums")
        # Frozen and trained weights are multiplied by different operations, so restoring the flags keeps the bits.
        self._requires_grad = {id(p): p.requires_grad for p in module.parameters()}
        self.device = device or torch.device("cpu")

    # Files that clients name

    def resolve_path(self, name: str) -> Path:
        """Return the real path of a file or folder within the roots.

        Raises:
            RequestError: the path is relative, missing, hidden (an unfinished export), or leads outside the roots.
        """
        if not os.path.isabs(name):
            raise RequestError(f"{name!r} is not an absolute path")
        try:
            path = Path(name).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or "no such path"
            raise RequestError(f"{name!r} cannot be read: {reason}") from None
        for root in self.roots:
            if path.is_relative_to(root):
                if any(part.startswith(".") for part in path.relative_to(root).parts):
                    raise RequestError(f"{name!r} is hidden, as the files of an unfinished export are")
                return path
        roots = ", ".join(map(str, self.roots)) or "none"
        raise RequestError(f"{name!r} is outside the folders that files are read from ({roots}): see --weights-root")

    def _resolve_file(self, path: Path, most_bytes: int) -> Path:
        """Return the real path of a safetensors file of at most `most_bytes` within the roots."""
        real = self.resolve_path(str(path))
        if real.suffix != ".safetensors" or not S_ISREG(real.stat().st_mode):
            raise RequestError(f"{str(path)!r} is not a safetensors file")
        if real.stat().st_size > most_bytes:
            raise RequestError(f"{str(path)!r} has {real.stat().st_size} bytes, expected at most {most_bytes}")
        return real

    # All weights of networks

    def read_folder(self, path: str, targets: Collection[str] | None, sha256: Mapping[str, str]) -> Staged:
        """Read complete weights of networks from `<path>/<network>/*.safetensors`.

        Memory: the tensors of the networks on the host, and the bytes of one file.

        Args:
            targets: names of the networks, by default all.
            sha256: optional checksums over all tensors of a network, by network.

        Raises:
            RequestError: a file is missing, damaged or does not fit its network.
        """
        folder, staged = self.resolve_path(path), Staged()
        for name in self._list_networks(targets):
            where = folder / name
            if not where.is_dir():
                raise RequestError(f"{path!r} holds no folder {name}")
            with convert_errors(RequestError, UsageError, SafetensorError, OSError, says=f"{str(where)!r} cannot be read"):
                staged[name] = self._read_network(name, where)
            checksum = compute_checksum(sorted(staged[name].items())) if name in sha256 else None
            if checksum != sha256.get(name):
                raise RequestError(f"{str(where)!r} is damaged: its checksum is {checksum}, expected {sha256[name]}")
        return staged

    def _read_network(self, name: str, folder: Path) -> dict[str, Tensor]:
        known = self.list_tensors(name)
        most = 8 * sum(tensor.numel() for tensor in known.values()) + 100_000_000  # bytes of numbers, and of the header
        # Read instead of mapped, because a mapped file that shrinks would crash the process.
        tensors = dict[str, Tensor]()
        for file in [self._resolve_file(file, most) for file in list_weight_files(folder)]:
            for key, tensor in load(file.read_bytes()).items():
                if key in tensors:
                    raise RequestError(f"{str(folder)!r} holds {key} twice")
                _check_tensor(key, tensor.shape, tensor.dtype, known, where=str(folder))
                tensors[key] = tensor
        _check_complete(tensors, known, where=str(folder))
        return tensors

    def count_most_bytes(self) -> int:
        """Return the largest size of a bucket: that of all weights in the largest dtype."""
        return 8 * sum(tensor.numel() for name in self.networks for tensor in self.list_tensors(name).values())

    def stage(self, bucket: SharedBucket, flat: Tensor | None = None) -> Staged | None:
        """Stage a bucket; return all tensors of the push after its last bucket, None before.

        The buckets of a push must come in order. Another push, or a wrong bucket, drops the staged ones.

        Args:
            flat: bytes of the bucket, uint8; by default those of its file.

        Raises:
            RequestError: the bucket is out of order, or does not fit its network.
        """
        push, count, staged = self._staging
        self._staging = ("", 0, {})
        if bucket.index == 0:
            push, count, staged = bucket.push, 0, Staged()
            self._staged_sums, self._hashing = {}, []
        if (push, count) != (bucket.push, bucket.index):
            raise RequestError(f"bucket {bucket.index} of push {bucket.push!r} is out of order: start with the first one")
        (name,), is_adapter = self._list_networks([bucket.module.removesuffix(FACTORS)]), bucket.module.endswith(FACTORS)
        known, tensors = self.list_tensors(name), staged.setdefault(bucket.module, {})
        for place in bucket.places:
            if place.name in tensors:
                raise RequestError(f"{place.name} comes twice")
            if not is_adapter:
                _check_tensor(place.name, place.shape, place.dtype, known, where="the bucket")
        flat = self._read_bucket(bucket) if flat is None else flat
        for place in bucket.places:
            raw = flat[place.start_idx : place.end_idx]
            aligned = raw.clone() if place.start_idx % place.dtype.itemsize else raw
            tensors[place.name] = aligned.view(place.dtype).reshape(place.shape)
        if not is_adapter:
            total = self._staged_sums.setdefault(name, Checksum())
            named = [(place.name, tensors[place.name]) for place in bucket.places]
            self._hashing.append(self._pool.submit(total.add_all, named))
        if bucket.index + 1 < bucket.count:
            self._staging = (push, count + 1, staged)
            return None
        for name, tensors in staged.items():
            if name in self.networks:
                _check_complete(tensors, self.list_tensors(name), where=f"push {push!r}")
        return staged

    def sum_staged(self) -> dict[str, str]:
        """Return the checksums of the last push by network, computed while buckets arrive; empty if names do not ascend."""
        problems = [each.exception() for each in self._hashing]
        return {} if any(problems) else {name: total.hexdigest() for name, total in self._staged_sums.items()}

    def _read_bucket(self, bucket: SharedBucket) -> Tensor:
        """Read the bytes of a bucket's file, uint8."""
        path, size = self.resolve_path(bucket.file), bucket.places[-1].end_idx
        with convert_errors(RequestError, OSError, says=f"{bucket.file!r} cannot be read"):
            if not S_ISREG(path.stat().st_mode) or path.stat().st_size != size:
                raise RequestError(f"{bucket.file!r} is not a file of {size} bytes, the size of its tensors")
            flat = torch.empty(size, dtype=torch.uint8)
            with path.open("rb") as file:
                if file.readinto(flat.numpy().data) != size:
                    raise RequestError(f"{bucket.file!r} has changed while it was read")
        return flat

    def open_adapter(self, target: str, tensors: Mapping[str, Tensor], *, alpha: float, path: str) -> Adapter:
        """Build an adapter of a network from staged factors.

        Args:
            path: path in the list of adapters.

        Raises:
            RequestError: the factors do not fit the network's linear layers, or are not finite.
        """
        linear, layers = find_linear_layers(self.networks[target]), list[str]()
        ranks = {len(tensor) for name, tensor in tensors.items() if name.endswith(PAIR[0]) and tensor.ndim == 2}
        if len(ranks) != 1:
            raise RequestError(f"the adapter's factors have ranks {sorted(ranks)}, expected one")
        (rank,) = ranks
        for layer in sorted({name.removesuffix(end) for name in tensors for end in PAIR if name.endswith(end)}):
            a, b = (tensors.get(layer + end) for end in PAIR)
            base = linear.get(layer)
            expected = None if base is None else ((base.out_features, rank), (rank, base.in_features))
            if a is None or b is None or (tuple(b.shape), tuple(a.shape)) != expected:
                raise RequestError(f"the adapter's factors of {layer} fit no linear layer of {target}")
            layers.append(layer)
        if len(tensors) != 2 * len(layers) or not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise RequestError("the adapter holds tensors other than finite factors")
        return Adapter(f"fluvial-{target}", path, 1.0, LoraFile(rank, alpha, tuple(layers), dict(tensors)))

    def exchange(self, staged: Staged, sums: Mapping[str, str] | None = None) -> None:
        """Replace the values of networks with those of `staged`, in place, and remove their adapters.

        Each tensor is read back and compared byte by byte, so a network has exactly the weights of the push. A failure
        restores everything.

        Args:
            sums: checksums of staged networks, which are kept if the tensors are all parameters, in the network's dtypes.
        """
        self._pushed = staged
        self._exchange({part: {key: each.to("meta") for key, each in named.items()} for part, named in staged.items()}, sums)

    @on_all_ranks()
    def _exchange(self, staged: Staged, sums: Mapping[str, str] | None) -> None:
        """Replace values, see `exchange`; `staged` is on the meta device."""
        known = {name: each for name, each in (sums or {}).items() if name in staged and self._is_copied(name, staged[name])}
        pushed, self._pushed = self._pushed, {}
        adapters = {name: self.adapters.get(name) for name in staged}
        done: list[tuple[Tensor, Tensor]] = []
        self.adapt(dict.fromkeys(staged))
        for name in staged:
            self._sums.pop(name, None)
        try:
            with torch.no_grad():
                for network, tensors in staged.items():
                    targets, sources = self.list_tensors(network), pushed.get(network, {})
                    for name, like in tensors.items():
                        part = local(targets[name])
                        before = part.to("cpu", copy=True)
                        done.append((part, before))
                        tensor = sources[name] if self.ranks is None else self.ranks.send(sources.get(name), like)
                        shard = _select_shard(targets[name], tensor)
                        part.copy_(shard)
                        # So the checksums of the push are those of the weights in use.
                        if not torch.equal(_to_bytes(part), _to_bytes(shard.to(part.dtype))):
                            raise RequestError(
                                f"{name} was copied wrongly: its bytes differ from those sent; push again", 500
                            )
                        sources.pop(name, None)  # frees it
        except BaseException:
            with torch.no_grad():
                for tensor, before in reversed(done):
                    tensor.copy_(before)
            self.adapt(adapters)
            raise
        self._sums |= known

    def _is_copied(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether tensors are exactly a network's parameters, in the same dtypes."""
        parameters = list_base_tensors(self.networks[name], parameters=True)
        return parameters.keys() == tensors.keys() and all(
            parameters[key].dtype == each.dtype for key, each in tensors.items()
        )

    def list_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers of a network without adapters, by name, sharing its storage."""
        return list_base_tensors(self.networks[name])

    # Adapters

    def read_adapter(self, path: str, target: str, *, nickname: str, strength: float, alpha: float | None) -> Adapter:
        """Read an adapter of a network from a file, or from a folder with one.

        Args:
            strength: factor of the adapter's output.
            alpha: replaces the file's alpha.

        Raises:
            RequestError: the file is missing, damaged or does not fit the network.
        """
        folder, network = self.resolve_path(path), self.networks[target]
        files = [folder / name for name in FILES if (folder / name).exists()] if folder.is_dir() else [folder]
        if not files:
            raise RequestError(f"{path!r} holds neither {FILES[0]} nor {FILES[1]}")
        most = 16 * sum(parameter.numel() for parameter in network.parameters()) + 100_000_000
        with convert_errors(RequestError, ValueError, OSError):
            file = read_lora(self._resolve_file(files[0], most), network)
        if not isinstance(file.form, LowRank):
            raise RequestError(f"{path!r} is a {file.form.kind}, and adapters here are LoRA: send merged weights")
        return Adapter(nickname, path, strength, file if alpha is None else file._replace(alpha=alpha))

    def find_adapter(self, target: str, *, nickname: str, strength: float, alpha: float | None) -> Adapter:
        """Return an adapter of a network that was read before, see `read_adapter`; RequestError if it is not kept."""
        known = self.loaded.get((nickname, target))
        if known is None:
            raise RequestError(f"adapter {nickname} of {target} is not loaded: send its lora_path")
        return known._replace(strength=strength, file=known.file if alpha is None else known.file._replace(alpha=alpha))

    def rescale_last(self, target: str, *, strength: float, product: Product) -> AppliedAdapters:
        """Return the adapters of a network that were set last, with another strength; RequestError if there are none."""
        if target not in self.last:
            raise RequestError(f"no adapter was set for {target}: send the lora_path of one to /v1/set_lora")
        rescaled = stack_adapters([each._replace(strength=strength) for each in self.last[target].adapters], product)
        assert rescaled is not None
        return rescaled

    @on_all_ranks(AppliedAdapters, Adapter, LoraFile, LowRank)
    def adapt(self, wanted: Mapping[str, AppliedAdapters | None]) -> None:
        """Replace or remove the adapters of networks. A failure restores everything."""
        before = {name: self.adapters.get(name) for name in wanted}
        try:
            for name, each in wanted.items():
                self._set_adapter(name, each)
        except BaseException:
            for name, each in before.items():
                self._set_adapter(name, each)
            raise
        for name, each in wanted.items():
            if each is None:
                continue
            self.last[name] = each
            for adapter in each.adapters:
                self.loaded.pop((adapter.nickname, name), None)
                self.loaded[adapter.nickname, name] = adapter
        for key in list(self.loaded)[:-MOST_LOADED]:
            del self.loaded[key]

    def plan_removal(self, nickname: str) -> dict[str, AppliedAdapters | None]:
        """Return the remaining adapters of the networks on which an adapter acts; RequestError if it is not loaded."""
        if not any(nickname == known for known, _ in self.loaded):
            raise RequestError(f"adapter {nickname} is not loaded: GET /v1/list_loras has the names of loaded adapters")
        return {
            name: stack_adapters([adapter for adapter in each.adapters if adapter.nickname != nickname], each.product)
            for name, each in self.adapters.items()
            if nickname in [adapter.nickname for adapter in each.adapters]
        }

    def forget(self, nickname: str) -> None:
        """Drop the factors of an inactive adapter."""
        self.loaded = {key: each for key, each in self.loaded.items() if key[0] != nickname}
        self.last = {
            name: each for name, each in self.last.items() if nickname not in [adapter.nickname for adapter in each.adapters]
        }

    def _set_adapter(self, name: str, wanted: AppliedAdapters | None) -> None:
        network, current = self.networks[name], self.adapters.pop(name, None)
        self._sums.pop(name + FACTORS, None)
        if current is None or wanted is None or not _have_same_layers(current, wanted):
            self._remove_adapters(network)
            if wanted is None:
                return
            form = LowRank(product=wanted.product)
            config = LoraConfig(rank=wanted.file.rank, alpha=abs(wanted.scaling) * wanted.file.rank, form=form)
            add_lora(network, config, wanted.file.layers)
            network.train(network.training)
        for layer in find_lora_layers(network).values():
            layer.scaling["default"] = wanted.scaling
        load_lora(network, wanted.file.tensors, "default")
        self.adapters[name] = wanted

    def _remove_adapters(self, network: Any) -> None:
        """Remove the adapters, and restore the original layers of a network."""
        layers = find_lora_layers(network)
        for name, layer in layers.items():
            parent, _, attribute = name.rpartition(".")
            setattr(network.get_submodule(parent), attribute, layer.get_base_layer())
        if hasattr(network, "peft_config"):
            del network.peft_config
        for parameter in network.parameters():
            parameter.requires_grad_(self._requires_grad[id(parameter)])

    # Checksums and memory

    @on_all_ranks()
    def list_checksums(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Return the checksum of the parameters of each network, and of its adapters as `<network>.lora`.

        Adapters are never merged, so the checksum of a network is that of its base weights. It is computed once per change.

        Args:
            names: networks and adapters, by default all; an unknown name has the checksum "not_found".
        """
        known = [*self.networks, *(name + FACTORS for name in self.adapters)]
        return {
            name: self._compute_checksum(name) if name in known else UNKNOWN for name in (known if names is None else names)
        }

    def _compute_checksum(self, name: str) -> str:
        if name not in self._sums:
            network = self.networks[name.removesuffix(FACTORS)]
            if name in self.networks:
                parameters = list_base_tensors(network, parameters=True)
                self._sums[name] = compute_checksum((key, gather(parameters[key])) for key in sorted(parameters))
            else:
                scaling = self.adapters[name.removesuffix(FACTORS)].scaling
                self._sums[name] = compute_adapter_checksum(find_adapter_parameters(network, "default"), scaling)
        return self._sums[name]

    @on_all_ranks()
    def check_tensors(self, target: str, expected: Mapping[str, str]) -> None:
        """Compare tensors of a network with SHA-256 sums of dtype, shape and bytes, as in sglang's checker.

        Raises:
            RequestError: a tensor is missing, or has another sum.
        """
        (name,) = self._list_networks([target])
        tensors = self.list_tensors(name)
        missing = sorted(set(expected) - set(tensors))
        wrong = missing or [key for key in sorted(expected) if digest_tensor(gather(tensors[key])) != expected[key]]
        if wrong:
            problem = "are missing" if missing else "have another checksum"
            raise RequestError(f"{len(wrong)} tensors of {name} {problem}: {', '.join(wrong[:5])}")

    @on_all_ranks()
    def release(self) -> None:
        """Move the weights to the host and free the device's memory, until `resume`. On a CPU it saves no memory."""
        self.module.to("cpu")
        if is_accelerator(self.device):
            torch.get_device_module(self.device).empty_cache()
        self.released = True

    @on_all_ranks()
    def resume(self) -> None:
        """Move the weights back to the device, to the bit."""
        self.module.to(self.device)
        self.released = False

    def _list_networks(self, names: Collection[str] | None) -> list[str]:
        for name in names or ():
            if name not in self.networks:
                raise RequestError(f"there is no network {name!r}, expected {' or '.join(self.networks)}")
        return list(self.networks) if names is None else list(dict.fromkeys(names))


def _select_shard(target: Tensor, whole: Tensor) -> Tensor:
    """Select this process's part of a whole tensor, which will replace `target`."""
    if not isinstance(target, DTensor):
        return whole
    return local(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))


def _to_bytes(tensor: Tensor) -> Tensor:
    """Copy the bytes of a tensor to the host, uint8."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def _have_same_layers(left: AppliedAdapters, right: AppliedAdapters) -> bool:
    """Return whether two adapters differ only in their numbers."""
    return (left.product, left.file.rank, left.file.layers) == (right.product, right.file.rank, right.file.layers)


def _check_tensor(name: str, shape: Sequence[int], dtype: torch.dtype, known: Mapping[str, Tensor], *, where: str) -> None:
    """Raise RequestError unless a tensor can be copied to that of the network."""
    if name not in known:
        raise RequestError(f"{where!r} holds {name}, which the network lacks")
    if list(shape) != list(known[name].shape):
        raise RequestError(f"{where!r} holds {name} of shape {list(shape)}, and the network has {list(known[name].shape)}")
    if dtype != known[name].dtype and not (dtype.is_floating_point and known[name].dtype.is_floating_point):
        raise RequestError(f"{where!r} holds {name} of {dtype}, and the network has {known[name].dtype}")


def _check_complete(names: Collection[str], known: Collection[str], *, where: str) -> None:
    if missing := sorted(set(known) - set(names)):
        raise RequestError(f"{where!r} is incomplete: {missing[0]} and {len(missing) - 1} more tensors are missing")
