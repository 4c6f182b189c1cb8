"""The weights of a served network: how they are read, checked and exchanged between two batches.

What a client names is read and checked completely before anything changes, and a change that fails is undone. Only
safetensors are read, from folders that the server was started with; nothing is unpickled.
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
from fluvial.engines.export.model_folder import base_tensors, components
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.rollout.ranks import Ranks, together
from fluvial.engines.extensions.wire.weight_buckets import (
    FACTORS,
    UNKNOWN,
    Checksum,
    SharedBucket,
    adapter_checksum,
    checksum,
)
from fluvial.engines.files import list_weight_files
from fluvial.engines.gathered import gather
from fluvial.models.device import is_accelerator
from fluvial.models.digests import digest_tensor
from fluvial.models.lora import LoraConfig, LowRank, adapter_parameters, add_lora, linear_layers, lora_layers
from fluvial.models.lora_files import FILES, LoraFile, load_lora, read_lora
from fluvial.models.lora_layer import Product

PAIR = (".lora_A.weight", ".lora_B.weight")  # after the name of a layer
MOST_LOADED = 16  # adapters that are kept for requests that name them again, and that act together at most


class Adapter(NamedTuple):
    """An adapter of one network."""

    nickname: str
    path: str
    strength: float
    file: LoraFile

    @property
    def scaling(self) -> float:
        """Factor of the product of its two matrices."""
        return self.file.alpha * self.strength / self.file.rank


class Applied(NamedTuple):
    """The adapters that act on a network, as one.

    Args:
        scaling: factor of the product of the two matrices of `file`.
    """

    adapters: tuple[Adapter, ...]
    file: LoraFile
    scaling: float
    product: Product


def merge_adapters(adapters: Sequence[Adapter], product: Product) -> Applied | None:
    """Return adapters as one whose rank is the sum of theirs; None if there is none.

        sum_i s_i B_i A_i = [s_1 B_1, s_2 B_2, ...] [A_1; A_2; ...]

    A single adapter keeps the bits of its factors, and so its checksum.

    Raises:
        RequestError: the scale of one is no number, or 0.
    """
    for each in adapters:
        if not math.isfinite(each.scaling) or each.scaling == 0:
            scale = each.scaling * each.file.rank
            raise RequestError(f"alpha times strength is {scale:g}, expected another finite number than 0")
    if len(adapters) <= 1:
        return Applied(tuple(adapters), adapters[0].file, adapters[0].scaling, product) if adapters else None
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
            held = a in each.file.tensors
            downs.append(each.file.tensors[a] if held else torch.zeros(each.file.rank, shape[0]))
            ups.append(each.scaling * each.file.tensors[b] if held else torch.zeros(shape[1], each.file.rank))
        tensors[a], tensors[b] = torch.cat(downs), torch.cat(ups, 1)
    return Applied(tuple(adapters), LoraFile(rank, float(rank), layers, tensors), 1.0, product)


Staged = dict[str, dict[str, Tensor]]  # tensors to exchange, by network and name


class ServedWeights:
    """The weights of a served network.

    `exchange`, `adapt`, `release` and `resume` change the network. Their caller has to see that nothing computes with it
    meanwhile. The other methods only read.

    Args:
        module: network, or an nn.ModuleDict of networks, with its base weights and no adapters.
        roots: folders that clients may name files in.
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
        if lora_layers(module):
            raise ValueError("the served module has adapters: serve the base, and set the adapter with `adapt`")
        self.module, self.ranks = module, ranks
        self.version = 0  # number of updates that made the weights
        self._pushed: Staged = {}  # on the process that serves: what `exchange` takes
        self.roots = [root.resolve() for root in roots]
        self.networks = components(module)
        self.adapters: dict[str, Applied] = {}
        self.last: dict[str, Applied] = {}  # those that were set last, which may be off
        self.loaded: dict[tuple[str, str], Adapter] = {}  # the last ones, by nickname and network
        self._sums: dict[str, str] = {}  # checksums since the last change, by the names of `checksums`
        self.released = False
        self._staging: tuple[str, int, Staged] = ("", 0, {})  # push, buckets of it so far, their tensors
        self._summing: dict[str, Checksum] = {}  # of the networks that are staged
        self._summed: list[Future[None]] = []  # buckets that were added to them, or will be
        self._pool = ThreadPoolExecutor(1, "checksums")
        # A frozen weight is multiplied in other operations than a trained one, and so with other bits.
        self._requires_grad = {id(p): p.requires_grad for p in module.parameters()}
        self.device = device or torch.device("cpu")

    # Files that clients name

    def inside(self, name: str) -> Path:
        """Return the real path of a file or folder within the roots.

        Raises:
            RequestError: it is elsewhere, a link that leads elsewhere, part of an unfinished export, or not there.
        """
        if not os.path.isabs(name):
            raise RequestError(f"{name!r} is no absolute path")
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
        shown = ", ".join(map(str, self.roots)) or "there are none"
        raise RequestError(f"{name!r} is outside the folders that files are read from ({shown}): see --weights-root")

    def _regular(self, path: Path, most_bytes: int) -> Path:
        """Return the real path of a safetensors file of at most `most_bytes` within the roots."""
        real = self.inside(str(path))
        if real.suffix != ".safetensors" or not S_ISREG(real.stat().st_mode):
            raise RequestError(f"{str(path)!r} is no safetensors file")
        if real.stat().st_size > most_bytes:
            raise RequestError(f"{str(path)!r} has {real.stat().st_size} bytes, expected at most {most_bytes}")
        return real

    # All weights of networks

    def read_folder(self, path: str, targets: Collection[str] | None, sha256: Mapping[str, str]) -> Staged:
        """Return the weights of `<path>/<network>/*.safetensors`, which are those of the networks to the last name.

        Memory: the tensors of the networks on the host, and the bytes of one file.

        Args:
            targets: names of the networks, by default all.
            sha256: checksum of each network's files, of all their tensors; compared where it is there.

        Raises:
            RequestError: anything is wrong with them.
        """
        folder, staged = self.inside(path), Staged()
        for name in self._targets(targets):
            where = folder / name
            if not where.is_dir():
                raise RequestError(f"{path!r} holds no folder {name}")
            with convert_errors(RequestError, UsageError, SafetensorError, OSError, says=f"{str(where)!r} cannot be read"):
                staged[name] = self._read_network(name, where)
            checksum_of = checksum(sorted(staged[name].items())) if name in sha256 else None
            if checksum_of != sha256.get(name):
                raise RequestError(f"{str(where)!r} is damaged: its checksum is {checksum_of}, expected {sha256[name]}")
        return staged

    def _read_network(self, name: str, folder: Path) -> dict[str, Tensor]:
        known = self.tensors(name)
        most = 8 * sum(tensor.numel() for tensor in known.values()) + 100_000_000  # bytes of numbers, and of a header
        # Read, rather than mapped: a file that shrinks under a mapping would end the process.
        tensors = dict[str, Tensor]()
        for file in [self._regular(file, most) for file in list_weight_files(folder)]:
            for key, tensor in load(file.read_bytes()).items():
                if key in tensors:
                    raise RequestError(f"{str(folder)!r} holds {key} twice")
                _check_tensor(key, tensor.shape, tensor.dtype, known, where=str(folder))
                tensors[key] = tensor
        _check_complete(tensors, known, where=str(folder))
        return tensors

    def most_bytes(self) -> int:
        """Return the largest size of a bucket: of all weights, in any dtype."""
        return 8 * sum(tensor.numel() for name in self.networks for tensor in self.tensors(name).values())

    def stage(self, bucket: SharedBucket, flat: Tensor | None = None) -> Staged | None:
        """Take a bucket, and return all tensors of the push with its last bucket.

        The buckets of a push come in order. Another push, or a bucket that is wrong, drops those that were staged.

        Args:
            flat: its bytes, uint8; by default those of its file.

        Raises:
            RequestError: anything is wrong with it.
        """
        push, done, staged = self._staging
        self._staging = ("", 0, {})
        if bucket.index == 0:
            push, done, staged = bucket.push, 0, Staged()
            self._summing, self._summed = {}, []
        if (push, done) != (bucket.push, bucket.index):
            raise RequestError(f"bucket {bucket.index} of push {bucket.push!r} is out of order: send it from its first")
        (name,), factors = self._targets([bucket.module.removesuffix(FACTORS)]), bucket.module.endswith(FACTORS)
        known, held = self.tensors(name), staged.setdefault(bucket.module, {})
        for place in bucket.places:
            if place.name in held:
                raise RequestError(f"{place.name} comes twice")
            if not factors:
                _check_tensor(place.name, place.shape, place.dtype, known, where="the bucket")
        flat = self._read_bucket(bucket) if flat is None else flat
        for place in bucket.places:
            raw = flat[place.start_idx : place.end_idx]
            aligned = raw.clone() if place.start_idx % place.dtype.itemsize else raw
            held[place.name] = aligned.view(place.dtype).reshape(place.shape)
        if not factors:
            total = self._summing.setdefault(name, Checksum())
            named = [(place.name, held[place.name]) for place in bucket.places]
            self._summed.append(self._pool.submit(total.add_all, named))
        if bucket.index + 1 < bucket.count:
            self._staging = (push, done + 1, staged)
            return None
        for name, tensors in staged.items():
            if name in self.networks:
                _check_complete(tensors, self.tensors(name), where=f"push {push!r}")
        return staged

    def sum_staged(self) -> dict[str, str]:
        """Return the checksums of the networks of the last push, of all their tensors; none if their names do not rise.

        They are computed while the buckets come.
        """
        problems = [each.exception() for each in self._summed]
        return {} if any(problems) else {name: total.hex() for name, total in self._summing.items()}

    def _read_bucket(self, bucket: SharedBucket) -> Tensor:
        """Return the bytes of a bucket's file, uint8."""
        path, size = self.inside(bucket.file), bucket.places[-1].end_idx
        with convert_errors(RequestError, OSError, says=f"{bucket.file!r} cannot be read"):
            if not S_ISREG(path.stat().st_mode) or path.stat().st_size != size:
                raise RequestError(f"{bucket.file!r} is no file of the {size} bytes that its tensors take")
            flat = torch.empty(size, dtype=torch.uint8)
            with path.open("rb") as file:
                if file.readinto(flat.numpy().data) != size:
                    raise RequestError(f"{bucket.file!r} has changed while it was read")
        return flat

    def open_adapter(self, target: str, tensors: Mapping[str, Tensor], *, alpha: float, path: str) -> Adapter:
        """Return the adapter of staged factors, for a network.

        Args:
            path: what the list of adapters says that it is from.

        Raises:
            RequestError: they do not fit its linear layers, or are not finite.
        """
        linear, layers = linear_layers(self.networks[target]), list[str]()
        ranks = {len(tensor) for name, tensor in tensors.items() if name.endswith(PAIR[0]) and tensor.ndim == 2}
        if len(ranks) != 1:
            raise RequestError(f"the adapter's factors have ranks {sorted(ranks)}, expected one")
        (rank,) = ranks
        for layer in sorted({name.removesuffix(end) for name in tensors for end in PAIR if name.endswith(end)}):
            a, b = (tensors.get(layer + end) for end in PAIR)
            shape = None if layer not in linear else (linear[layer].out_features, linear[layer].in_features)
            if (
                a is None
                or b is None
                or shape is None
                or (tuple(b.shape), tuple(a.shape)) != ((shape[0], rank), (rank, shape[1]))
            ):
                raise RequestError(f"the adapter's factors of {layer} fit no linear layer of {target}")
            layers.append(layer)
        if len(tensors) != 2 * len(layers) or not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise RequestError("the adapter holds other tensors than finite factors")
        return Adapter(f"fluvial-{target}", path, 1.0, LoraFile(rank, alpha, tuple(layers), dict(tensors)))

    def exchange(self, staged: Staged, sums: Mapping[str, str] | None = None) -> None:
        """Exchange the values of networks with those of `staged`, in place, and take their adapters off.

        So a network has exactly the weights of the push: each tensor is read back and compared, byte by byte. What fails
        leaves all as it was.

        Args:
            sums: checksums of staged networks; the networks' own, too, where parameters of the same dtypes are copied.
        """
        self._pushed = staged
        self._exchange({part: {name: each.to("meta") for name, each in held.items()} for part, held in staged.items()}, sums)

    @together()
    def _exchange(self, staged: Staged, sums: Mapping[str, str] | None) -> None:
        """Exchange values, see `exchange`; `staged` is on the meta device."""
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
                    held_here = self.tensors(network)
                    for name, like in tensors.items():
                        part, held = local(held_here[name]), pushed.get(network, {})
                        before = part.to("cpu", copy=True)
                        done.append((part, before))
                        tensor = held[name] if self.ranks is None else self.ranks.send(held.get(name), like)
                        mine = _part_of(held_here[name], tensor)
                        part.copy_(mine)
                        # So the sums of what was sent are those of what computes.
                        if not torch.equal(_bytes(part), _bytes(mine.to(part.dtype))):
                            raise RequestError(f"{name} has other bytes after its copy than were sent: push again", 500)
                        held.pop(name, None)  # frees it
        except BaseException:
            with torch.no_grad():
                for tensor, before in reversed(done):
                    tensor.copy_(before)
            self.adapt(adapters)
            raise
        self._sums |= known

    def _is_copied(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether tensors are a network's parameters alone, of the same dtypes."""
        tensors_held = base_tensors(self.networks[name], parameters=True)
        return tensors_held.keys() == tensors.keys() and all(
            tensors_held[key].dtype == each.dtype for key, each in tensors.items()
        )

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return parameters and persistent buffers of a network without adapters, by name; they share its storage."""
        return base_tensors(self.networks[name])

    # Adapters

    def read_adapter(self, path: str, target: str, *, nickname: str, strength: float, alpha: float | None) -> Adapter:
        """Return the adapter of a file, or of a folder with one, for a network.

        Args:
            strength: factor of the adapter's output.
            alpha: replaces the file's alpha.

        Raises:
            RequestError: anything is wrong with it.
        """
        folder, network = self.inside(path), self.networks[target]
        files = [folder / name for name in FILES if (folder / name).exists()] if folder.is_dir() else [folder]
        if not files:
            raise RequestError(f"{path!r} holds neither {FILES[0]} nor {FILES[1]}")
        most = 16 * sum(parameter.numel() for parameter in network.parameters()) + 100_000_000
        with convert_errors(RequestError, ValueError, OSError):
            file = read_lora(self._regular(files[0], most), network)
        if not isinstance(file.form, LowRank):
            raise RequestError(f"{path!r} is a {file.form.kind}, and adapters here are LoRA: send merged weights")
        return Adapter(nickname, path, strength, file if alpha is None else file._replace(alpha=alpha))

    def find_adapter(self, target: str, *, nickname: str, strength: float, alpha: float | None) -> Adapter:
        """Return an adapter of a network that was read before; see `read_adapter`.

        Raises:
            RequestError: there is none.
        """
        known = self.loaded.get((nickname, target))
        if known is None:
            raise RequestError(f"adapter {nickname} of {target} is not loaded: send its lora_path")
        return known._replace(strength=strength, file=known.file if alpha is None else known.file._replace(alpha=alpha))

    def set_last(self, target: str, *, strength: float, product: Product) -> Applied:
        """Return the adapters of a network that were set last, of another strength; RequestError if there are none."""
        if target not in self.last:
            raise RequestError(f"{target} has had no adapter: send the lora_path of one to /v1/set_lora")
        again = merge_adapters([each._replace(strength=strength) for each in self.last[target].adapters], product)
        assert again is not None
        return again

    @together(Applied, Adapter, LoraFile, LowRank)
    def adapt(self, wanted: Mapping[str, Applied | None]) -> None:
        """Give networks other adapters, or none. What fails leaves all as it was."""
        before = {name: self.adapters.get(name) for name in wanted}
        try:
            for name, each in wanted.items():
                self._set(name, each)
        except BaseException:
            for name, each in before.items():
                self._set(name, each)
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

    def without(self, nickname: str) -> dict[str, Applied | None]:
        """Return what is left on the networks that an adapter acts on, once it is off.

        Raises:
            RequestError: no adapter of this name is loaded.
        """
        if not any(nickname == known for known, _ in self.loaded):
            raise RequestError(f"adapter {nickname} is not loaded: GET /v1/list_loras has the names of those that are")
        return {
            name: merge_adapters([adapter for adapter in each.adapters if adapter.nickname != nickname], each.product)
            for name, each in self.adapters.items()
            if nickname in [adapter.nickname for adapter in each.adapters]
        }

    def forget(self, nickname: str) -> None:
        """Free the factors of an adapter that acts on no network."""
        self.loaded = {key: each for key, each in self.loaded.items() if key[0] != nickname}
        self.last = {
            name: each for name, each in self.last.items() if nickname not in [adapter.nickname for adapter in each.adapters]
        }

    def _set(self, name: str, wanted: Applied | None) -> None:
        network, held = self.networks[name], self.adapters.pop(name, None)
        self._sums.pop(name + FACTORS, None)
        if held is None or wanted is None or not _alike(held, wanted):
            self._strip(network)
            if wanted is None:
                return
            form = LowRank(product=wanted.product)
            config = LoraConfig(rank=wanted.file.rank, alpha=abs(wanted.scaling) * wanted.file.rank, form=form)
            add_lora(network, config, wanted.file.layers)
            network.train(network.training)
        for layer in lora_layers(network).values():
            layer.scaling["default"] = wanted.scaling
        load_lora(network, wanted.file.tensors, "default")
        self.adapters[name] = wanted

    def _strip(self, network: Any) -> None:
        """Take the adapters off, so that the network is as it was without."""
        layers = lora_layers(network)
        for name, layer in layers.items():
            parent, _, attribute = name.rpartition(".")
            setattr(network.get_submodule(parent), attribute, layer.get_base_layer())
        if hasattr(network, "peft_config"):
            del network.peft_config
        for parameter in network.parameters():
            parameter.requires_grad_(self._requires_grad[id(parameter)])

    # Checksums and memory

    @together()
    def checksums(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Return the checksum of the parameters of each network, and of its adapters as `<network>.lora`.

        Adapters are never merged, so the checksum of a network is that of its base weights. It is computed once per change,
        whoever asks for it how often.

        Args:
            names: what to return, by default all; the checksum of another name is "not_found".
        """
        known = [*self.networks, *(name + FACTORS for name in self.adapters)]
        return {name: self._checksum(name) if name in known else UNKNOWN for name in (known if names is None else names)}

    def _checksum(self, name: str) -> str:
        if name not in self._sums:
            network = self.networks[name.removesuffix(FACTORS)]
            if name in self.networks:
                held_here = base_tensors(network, parameters=True)
                self._sums[name] = checksum((key, gather(held_here[key])) for key in sorted(held_here))
            else:
                scaling = self.adapters[name.removesuffix(FACTORS)].scaling
                self._sums[name] = adapter_checksum(adapter_parameters(network, "default"), scaling)
        return self._sums[name]

    @together()
    def check_tensors(self, target: str, expected: Mapping[str, str]) -> None:
        """Compare tensors of a network with SHA-256 sums of dtype, shape and bytes, as sglang's checker computes them.

        Raises:
            RequestError: a tensor is missing, or has another sum.
        """
        (name,) = self._targets([target])
        held_here = self.tensors(name)
        missing = sorted(set(expected) - set(held_here))
        wrong = missing or [key for key in sorted(expected) if digest_tensor(gather(held_here[key])) != expected[key]]
        if wrong:
            what = "are missing" if missing else "have another checksum"
            raise RequestError(f"{len(wrong)} tensors of {name} {what}: {', '.join(wrong[:5])}")

    @together()
    def release(self) -> None:
        """Move the weights to the host and free the device's memory, until `resume`. On a CPU that saves nothing."""
        self.module.to("cpu")
        if is_accelerator(self.device):
            torch.get_device_module(self.device).empty_cache()
        self.released = True

    @together()
    def resume(self) -> None:
        """Move the weights back, to the bit."""
        self.module.to(self.device)
        self.released = False

    def _targets(self, names: Collection[str] | None) -> list[str]:
        for name in names or ():
            if name not in self.networks:
                raise RequestError(f"there is no network {name!r}, expected {' or '.join(self.networks)}")
        return list(self.networks) if names is None else list(dict.fromkeys(names))


def _part_of(held_here: Tensor, whole: Tensor) -> Tensor:
    """Return this process's part of a whole tensor that takes the place of `own`."""
    if not isinstance(held_here, DTensor):
        return whole
    return local(distribute_tensor(whole, held_here.device_mesh, held_here.placements, src_data_rank=None))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the host, uint8."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def _alike(left: Applied, right: Applied) -> bool:
    """Return whether two adapters differ in their numbers alone."""
    return (left.product, left.file.rank, left.file.layers) == (right.product, right.file.rank, right.file.layers)


def _check_tensor(name: str, shape: Sequence[int], dtype: torch.dtype, known: Mapping[str, Tensor], *, where: str) -> None:
    """Raise RequestError unless a tensor can be copied to the network's own."""
    if name not in known:
        raise RequestError(f"{where!r} holds {name}, which the network does not have")
    if list(shape) != list(known[name].shape):
        raise RequestError(f"{where!r} holds {name} of shape {list(shape)}, and the network has {list(known[name].shape)}")
    if dtype != known[name].dtype and not (dtype.is_floating_point and known[name].dtype.is_floating_point):
        raise RequestError(f"{where!r} holds {name} of {dtype}, and the network has {known[name].dtype}")


def _check_complete(held: Collection[str], known: Collection[str], *, where: str) -> None:
    if missing := sorted(set(known) - set(held)):
        raise RequestError(f"{where!r} is incomplete: {missing[0]} and {len(missing) - 1} more tensors are missing")
