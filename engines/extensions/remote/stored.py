"""Rollouts on disk: a source that keeps what another makes, and one that replays what was kept.

A rollout is a pair of files per rank, named by the words of its key: tensors (`.safetensors`), then an index (`.json`) that
holds their size and SHA-256. The index is written last, so a rollout is complete or not there.
"""

import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import optree
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fluvial.core.random import Key
from fluvial.core.rollout import Trajectory
from fluvial.core.table import step_coefficients
from fluvial.engines.data.records import texts
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.engines.files import save_tensors, sync
from fluvial.engines.sampling.config import REPLAYED, ReadingConfig, RolloutConfig
from fluvial.engines.sampling.generate import Chunk, Requests, Sampling
from fluvial.engines.sampling.handshake import Handshake
from fluvial.engines.sampling.source import Holder, RolloutSource
from fluvial.models import DiffusionModel

FORMAT: Literal[1] = 1
FIELDS = ("x", "x_next", "steps", "log_prob", "velocity", "final", "images")  # tensors of a chunk; velocity where recorded


class Storing(RolloutSource):
    """Source that keeps the rollouts of another in a folder, whole ones alone.

    Args:
        world: process group; one rank of those with the same samples writes.
        resume: whether the run goes on, so that its rollouts may be there already.

    Raises:
        UsageError: the folder cannot be written, or holds rollouts of another run.
    """

    def __init__(self, source: RolloutSource, folder: Path, world: World, *, resume: bool = False) -> None:
        self.source, self.folder, self.world = source, folder, world
        if not resume and next(folder.glob("*.json"), None) is not None:
            raise UsageError(f"`rollout.store` is {folder}, which holds rollouts already: name another folder")
        with convert_errors(UsageError, OSError, says=f"`rollout.store` is {folder}, which cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)

    def generate(self, requests: Requests, sampling: Sampling, *, micro_batch: int) -> Generator[Chunk, None, None]:
        """Yield the samples of the source, and write them after the last, see `RolloutSource`."""
        chunks = list[Chunk]()
        for chunk in self.source.generate(requests, sampling, micro_batch=micro_batch):
            yield chunk
            chunks.append(_on_host(chunk))
        if self.world.rank % self.world.sequence == 0:
            write(self.folder, requests, sampling, chunks, part=self.world.data_rank)

    def push(self, engine: Holder, version: int) -> None:
        self.source.push(engine, version)

    def compare_with_servers(self, requests: Requests, sampling: Sampling) -> Handshake | None:
        return self.source.compare_with_servers(requests, sampling)

    def probe(self, engine: Holder, requests: Requests, sampling: Sampling) -> Mapping[str, Any]:
        return self.source.probe(engine, requests, sampling)

    def leave_out(self, addresses: Collection[str]) -> bool:
        return self.source.leave_out(addresses)

    def hurry(self) -> None:
        self.source.hurry()

    def close(self) -> None:
        self.source.close()


class Replayed(RolloutSource):
    """Source that takes its samples from a folder of stored rollouts.

    A rollout is found by its key, and so by the seed of the run and its number of updates. The weights that made it may be
    others than the trainer's: its log-probabilities are those of the policy that made it.

    Args:
        model: adapter of the architecture, which encodes the prompts.

    Raises:
        UsageError: there are none.
    """

    def __init__(self, folder: Path, model: DiffusionModel) -> None:
        self.folder, self.model = folder, model
        if next(folder.glob("*.json"), None) is None:
            raise UsageError(
                f"`rollout.source` is replayed:{folder}, which holds no rollouts: name a folder that "
                "a run wrote with `rollout.store`"
            )

    def generate(self, requests: Requests, sampling: Sampling, *, micro_batch: int) -> Generator[Chunk, None, None]:
        """Yield the stored samples with the requested ids, see `RolloutSource`.

        Raises:
            RunError: they are not there, are damaged, or were made in another way than the run asks for.
        """
        device = sampling.schedule.timesteps.device
        rows, opened = self._rows(requests, sampling), lru_cache(maxsize=4)(_open)
        for start in range(0, len(requests.ids), micro_batch):
            part = slice(start, start + micro_batch)
            stored = [rows[number] for number in requests.ids[part]]
            if [row.chunk.windows[row.row] for row in stored] != _windows(requests, sampling, part):
                raise RunError(
                    f"`rollout.source` is replayed:{self.folder}, whose samples have other stochastic steps: use the "
                    "window of the run that stored them, and its `engine.micro_batch` where the window is drawn per call"
                )
            tensors = {name: _stack(name, stored, opened) for name in FIELDS}
            _check_shapes(self.folder, tensors, sampling, len(stored))
            cond = sampling.encode(self.model, requests.prompts[part])
            placed = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
            images = placed.pop("images")
            assert images is not None
            trajectory = Trajectory(**placed, debug=None)  # type: ignore[arg-type]  # only velocity may be None
            yield Chunk(requests.prompts[part], cond, trajectory, images, min(row.chunk.version for row in stored))

    def _rows(self, requests: Requests, sampling: Sampling) -> dict[int, "_StoredSample"]:
        """Return where the requested samples are, by id."""
        name, samples_read = name_of(requests.key), dict[int, _StoredSample]()
        for path in sorted(self.folder.glob(f"{name}-*.json")):
            index = _index(path)
            if wrong := _difference(index.sampling, _describe_sampling(sampling)):
                raise RunError(f"{path} was sampled in another way than this run asks for: its {wrong}")
            for number, chunk in enumerate(index.chunks):
                for row, sample_id in enumerate(chunk.ids):
                    samples_read.setdefault(sample_id, _StoredSample(path.with_suffix(".safetensors"), index, number, row))
        if not samples_read:
            raise RunError(
                f"`rollout.source` is replayed:{self.folder}, which has no rollout of key {name}: use the seed, the "
                "prompts and the updates per rollout of the run that stored them, and no more updates"
            )
        for number, prompt in zip(requests.ids, requests.prompts, strict=True):
            if number not in samples_read:
                raise RunError(f"{self.folder}: rollout {name} has no sample {number}: its run had smaller rollouts")
            kept, place = samples_read[number].chunk, samples_read[number].row
            pairs: dict[str, tuple[str | None, str | None]] = {"prompt": (kept.prompts[place], prompt.text)}
            if kept.negatives is not None:
                pairs["negative prompt"] = kept.negatives[place], prompt.negative
            for kind, (stored, asked) in pairs.items():
                if stored != asked:
                    raise RunError(
                        f"{self.folder}: sample {number} of rollout {name} is of the {kind} {stored!r}, expected "
                        f"{asked!r}: use the prompts of the run that stored it"
                    )
        return samples_read


def name_of(key: Key) -> str:
    """Return the name of the rollout of a key."""
    return f"{int(key.high):08x}{int(key.low):08x}"


def write(folder: Path, requests: Requests, sampling: Sampling, chunks: Sequence[Chunk], *, part: int) -> None:
    """Write this rank's part of a rollout.

    Args:
        chunks: all chunks of this rank, on the host.
        part: number of this rank among those with other samples.

    Raises:
        RunError: it cannot be written.
    """
    tensors, listed, start = dict[str, Tensor](), list[StoredChunk](), 0
    for number, chunk in enumerate(chunks):
        tensors_of_chunk = {**chunk.trajectory._asdict(), "images": chunk.images}
        tensors |= {
            f"{number}.{name}": tensors_of_chunk[name].contiguous() for name in FIELDS if tensors_of_chunk[name] is not None
        }
        written = slice(start, start + len(chunk.prompts))
        prompts, windows = texts(chunk.prompts), _windows(requests, sampling, written)
        negatives = [prompt.negative for prompt in chunk.prompts]
        listed.append(StoredChunk(chunk.version, list(requests.ids[written]), prompts, windows, negatives))
        start += len(prompts)
    stem, partial = f"{name_of(requests.key)}-{part:05d}", f".{secrets.token_hex(4)}"
    file, index = folder / f"{stem}.safetensors", folder / f"{stem}.json"
    try:
        save_tensors(tensors, Path(f"{file}{partial}"))
        size, digest = os.path.getsize(f"{file}{partial}"), _digest(Path(f"{file}{partial}"))
        text = msgspec.json.encode(StoredRollout(size, digest, _describe_sampling(sampling), listed))
        Path(f"{index}{partial}").write_bytes(msgspec.json.format(text, indent=1))
        for path in (file, index):
            sync(Path(f"{path}{partial}"))
        index.unlink(missing_ok=True)  # of the same rollout, made before the run was resumed
        for path in (file, index):
            os.replace(f"{path}{partial}", path)
        sync(folder)
    except (OSError, SafetensorError) as error:
        for path in (file, index):
            Path(f"{path}{partial}").unlink(missing_ok=True)
        raise RunError(f"rollout.store: {folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def open_replayed(rollout: RolloutConfig, sampling: ReadingConfig, model: DiffusionModel, *_: Any, **__: Any) -> Replayed:
    """Open the folder of stored rollouts that `rollout.source` names, see `sampling.build`; UsageError if it holds none."""
    return Replayed(Path(rollout.source.removeprefix(REPLAYED)), model)


class StoredChunk(Struct, frozen=True):
    """A chunk of a stored rollout: for each sample its id, prompt, stochastic steps and own negative prompt."""

    version: int
    ids: list[int]
    prompts: list[str]
    windows: list[list[int]]
    negatives: list[str | None] | None = None  # not written before; None of a prompt without one of its own

    def __post_init__(self) -> None:
        lists = (self.prompts, self.windows, *(() if self.negatives is None else (self.negatives,)))
        if any(len(each) != len(self.ids) for each in lists):
            raise ValueError("ids, prompts, windows and negatives are not as many")


class StoredRollout(Struct, frozen=True):
    """Index of the tensors of a rollout, with their size and SHA-256."""

    bytes: int
    sha256: str
    sampling: dict[str, Any]
    chunks: list[StoredChunk]
    format: Literal[1] = FORMAT


class _StoredSample(NamedTuple):
    """Place of a stored sample."""

    path: Path  # of the tensors
    rollout: StoredRollout
    number: int  # of the chunk
    row: int

    @property
    def chunk(self) -> StoredChunk:
        return self.rollout.chunks[self.number]


def _stack(name: str, samples: Sequence[_StoredSample], opened: Callable[[Path, int, str], Any]) -> Tensor | None:
    """Return a tensor of some samples; None where it was not recorded."""
    parts = []
    for path, rollout, chunk, row in samples:
        file = opened(path, rollout.bytes, rollout.sha256)
        if f"{chunk}.{name}" not in file.keys():  # noqa: SIM118
            if name == "velocity":
                return None
            raise RunError(f"{path} has no tensor {chunk}.{name}")
        whole = file.get_slice(f"{chunk}.{name}")
        shape = whole.get_shape()
        if not shape or row >= shape[0]:
            raise RunError(f"{path}: {chunk}.{name} has shape {shape}, and no row {row}")
        parts.append(whole[row])
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        raise RunError(f"{path.parent}: {name} of samples of one rollout have different shapes")
    return torch.stack(parts)


def _open(path: Path, size: int, digest: str) -> Any:
    """Return a file of safetensors that is as its index says."""
    with convert_errors(RunError, OSError, SafetensorError, says=f"{path} cannot be read"):
        if path.stat().st_size != size:
            raise RunError(f"{path} has {path.stat().st_size} bytes, expected {size}: it is damaged, copy it again")
        if _digest(path) != digest:
            raise RunError(f"{path} is damaged: its SHA-256 is not that of its index; copy it again")
        return safe_open(path, framework="pt")


def _on_host(chunk: Chunk) -> Chunk:
    """Return what is kept of a chunk, on the host."""
    trajectory = optree.tree_map(lambda tensor: tensor.cpu(), chunk.trajectory)
    return chunk._replace(cond=None, trajectory=trajectory, images=chunk.images.cpu())


def _describe_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return what the update of a rollout must know of its sampling, as JSON values."""
    levels, guidance, stochastic = sampling.schedule.levels, sampling.guidance, sampling.stochastic
    recorded: dict[str, Any] = {}
    if stochastic is not None and stochastic.record:
        table = step_coefficients(stochastic.transition, levels)
        columns = {f"coefficient {name}": _numbers(value) for name, value in table._asdict().items()}
        recorded = {"form": stochastic.form, "reduction": stochastic.reduction, **columns}
    return {
        "shape": list(sampling.shape),
        "levels": levels.tolist(),
        "timesteps": sampling.schedule.timesteps.tolist(),
        "guidance scale": guidance.scale,
        "negative prompt": guidance.negative,
        **recorded,
    }


def _numbers(tensor: Tensor) -> list[Any]:
    """Return numbers as JSON values; what is not finite is a text, because NaN is not equal to itself."""
    return [value if math.isfinite(value) else str(value) for value in tensor.tolist()]


def _windows(requests: Requests, sampling: Sampling, part: slice) -> list[list[int]]:
    """Return the stochastic steps of each sample of a chunk, none where there are none."""
    ids = requests.ids[part]
    steps = () if sampling.stochastic is None else sampling.stochastic.steps_of(ids)
    return steps.tolist() if isinstance(steps, Tensor) else [sorted(steps)] * len(ids)


def _difference(stored: dict[str, Any], asked: dict[str, Any]) -> str | None:
    """Return what of the sampling differs, in words; None if nothing does."""
    for name in {**asked, **stored}:
        if stored.get(name) != asked.get(name):
            return f"{name} is {_format_value(stored.get(name))}, expected {_format_value(asked.get(name))}"
    return None


def _format_value(value: Any) -> str:
    """Return a value for a message, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _index(path: Path) -> StoredRollout:
    """Return the index of a file of a rollout."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredRollout)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is no index of format {FORMAT}, it is damaged or of another version of fluvial: {error}"
        ) from error


def _check_shapes(folder: Path, tensors: dict[str, Tensor | None], sampling: Sampling, batch: int) -> None:
    """Raise RunError unless the tensors of a chunk fit each other and the run."""
    steps = tensors["steps"]
    assert steps is not None
    count = int(steps.shape[-1])
    event, recorded = (batch, *sampling.shape), (batch, count, *sampling.shape)
    expected = {"x": recorded, "x_next": recorded, "log_prob": (batch, count), "velocity": recorded, "final": event}
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor is not None and tuple(tensor.shape) != shape:
            raise RunError(f"{folder}: {name} of a stored rollout has shape {list(tensor.shape)}, expected {list(shape)}")
    stochastic = sampling.stochastic
    wants = stochastic is not None and stochastic.record and stochastic.keep_velocity
    if wants and tensors["velocity"] is None:
        raise RunError(f"{folder}: a stored rollout has no predictions, which the objective compares with")
    if steps.dtype != torch.int64 or (
        count and not 0 <= int(steps.min()) <= int(steps.max()) < len(sampling.schedule.timesteps)
    ):
        raise RunError(f"{folder}: a stored rollout has steps that are not steps of the schedule")


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
