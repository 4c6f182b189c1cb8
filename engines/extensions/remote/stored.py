"""Rollouts on disk: a source that stores the rollouts of another one, and a source that replays them.

A rollout is a pair of files per rank, named by its key: tensors (`.safetensors`), and an index (`.json`) with their size and
SHA-256. The index is written last, so a rollout is complete or absent.
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
from fluvial.engines.data.records import model_inputs
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.engines.files import save_tensors, sync
from fluvial.engines.sampling.config import REPLAYED, ReadingConfig, RolloutConfig
from fluvial.engines.sampling.generate import Chunk, Requests, Sampling
from fluvial.engines.sampling.handshake import Handshake
from fluvial.engines.sampling.source import Holder, RolloutSource
from fluvial.models import DiffusionModel

FORMAT: Literal[1] = 1
FIELDS = ("x", "x_next", "steps", "log_prob", "velocity", "final", "images")  # tensors of a chunk; velocity if recorded


class StoringSource(RolloutSource):
    """Source that stores the complete rollouts of another one in a folder.

    Args:
        world: process group; one of the ranks with the same samples writes.
        resume: whether the run continues, so that its rollouts may exist already.

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
            chunks.append(_move_to_host(chunk))
        if self.world.rank % self.world.sequence == 0:
            write_rollout(self.folder, requests, sampling, chunks, part=self.world.data_rank)

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


class ReplaySource(RolloutSource):
    """Source that replays a folder of stored rollouts.

    A rollout is identified by its key, which follows from the run's seed and number of updates. Its log-probabilities are
    those of the policy that sampled it, which may differ from the trainer's.

    Args:
        model: adapter of the architecture, which encodes the prompts.

    Raises:
        UsageError: the folder holds no rollouts.
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
            RunError: they are missing or damaged, or were sampled with other settings than the run's.
        """
        device = sampling.schedule.timesteps.device
        locations, open_tensors = self._locate_samples(requests, sampling), lru_cache(maxsize=4)(_open_tensors)
        for start in range(0, len(requests.ids), micro_batch):
            part = slice(start, start + micro_batch)
            stored = [locations[sample_id] for sample_id in requests.ids[part]]
            if [each.chunk.windows[each.row] for each in stored] != _list_windows(requests, sampling, part):
                raise RunError(
                    f"`rollout.source` is replayed:{self.folder}, whose samples have other stochastic steps: use the "
                    "window of the run that stored them, and its `engine.micro_batch` where the window is drawn per call"
                )
            tensors = {name: _stack_samples(name, stored, open_tensors) for name in FIELDS}
            _check_shapes(self.folder, tensors, sampling, len(stored))
            cond = sampling.encode(self.model, requests.prompts[part])
            on_device = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
            images = on_device.pop("images")
            assert images is not None
            trajectory = Trajectory(**on_device, debug=None)  # type: ignore[arg-type]  # only velocity may be None
            yield Chunk(requests.prompts[part], cond, trajectory, images, min(each.chunk.version for each in stored))

    def _locate_samples(self, requests: Requests, sampling: Sampling) -> dict[int, "_StoredSample"]:
        """Return the location of the requested samples, by id."""
        name, locations = format_key(requests.key), dict[int, _StoredSample]()
        for path in sorted(self.folder.glob(f"{name}-*.json")):
            rollout = _read_index(path)
            if difference := _find_difference(rollout.sampling, _describe_sampling(sampling)):
                raise RunError(f"{path} was sampled with other settings than this run's: its {difference}")
            for number, chunk in enumerate(rollout.chunks):
                for row, sample_id in enumerate(chunk.ids):
                    location = _StoredSample(path.with_suffix(".safetensors"), rollout, number, row)
                    locations.setdefault(sample_id, location)
        if not locations:
            raise RunError(
                f"`rollout.source` is replayed:{self.folder}, which has no rollout of key {name}: use the seed, the "
                "prompts and the updates per rollout of the run that stored them, and no more updates"
            )
        for sample_id, prompt in zip(requests.ids, requests.prompts, strict=True):
            if sample_id not in locations:
                raise RunError(f"{self.folder}: rollout {name} has no sample {sample_id}: its run had smaller rollouts")
            chunk, row = locations[sample_id].chunk, locations[sample_id].row
            pairs: dict[str, tuple[str | None, str | None]] = {"prompt": (chunk.prompts[row], str(prompt.model_input))}
            if chunk.negatives is not None:
                pairs["negative prompt"] = chunk.negatives[row], prompt.negative
            for kind, (stored, requested) in pairs.items():
                if stored != requested:
                    raise RunError(
                        f"{self.folder}: sample {sample_id} of rollout {name} has the {kind} {stored!r}, expected "
                        f"{requested!r}: use the prompts of the run that stored it"
                    )
        return locations


def format_key(key: Key) -> str:
    """Format a key as the name of its rollout."""
    return f"{int(key.high):08x}{int(key.low):08x}"


def write_rollout(folder: Path, requests: Requests, sampling: Sampling, chunks: Sequence[Chunk], *, part: int) -> None:
    """Write this rank's part of a rollout.

    Args:
        chunks: all chunks of this rank, on the host.
        part: index of this rank's part: its data-parallel rank.

    Raises:
        RunError: the folder cannot be written.
    """
    tensors, stored_chunks, start = dict[str, Tensor](), list[StoredChunk](), 0
    for number, chunk in enumerate(chunks):
        fields = {**chunk.trajectory._asdict(), "images": chunk.images}
        tensors |= {f"{number}.{name}": fields[name].contiguous() for name in FIELDS if fields[name] is not None}
        samples = slice(start, start + len(chunk.prompts))
        prompts, windows = [str(each) for each in model_inputs(chunk.prompts)], _list_windows(requests, sampling, samples)
        negatives = [prompt.negative for prompt in chunk.prompts]
        stored_chunks.append(StoredChunk(chunk.version, list(requests.ids[samples]), prompts, windows, negatives))
        start += len(prompts)
    stem, partial = f"{format_key(requests.key)}-{part:05d}", f".{secrets.token_hex(4)}"
    file, index = folder / f"{stem}.safetensors", folder / f"{stem}.json"
    try:
        save_tensors(tensors, Path(f"{file}{partial}"))
        size, digest = os.path.getsize(f"{file}{partial}"), _hash_file(Path(f"{file}{partial}"))
        text = msgspec.json.encode(StoredRollout(size, digest, _describe_sampling(sampling), stored_chunks))
        Path(f"{index}{partial}").write_bytes(msgspec.json.format(text, indent=1))
        for path in (file, index):
            sync(Path(f"{path}{partial}"))
        index.unlink(missing_ok=True)  # of the same rollout, sampled before the run was resumed
        for path in (file, index):
            os.replace(f"{path}{partial}", path)
        sync(folder)
    except (OSError, SafetensorError) as error:
        for path in (file, index):
            Path(f"{path}{partial}").unlink(missing_ok=True)
        raise RunError(f"rollout.store: {folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def open_replayed(
    rollout: RolloutConfig, sampling: ReadingConfig, model: DiffusionModel, *_: Any, **__: Any
) -> ReplaySource:
    """Open the folder of stored rollouts that `rollout.source` names, see `sampling.build`; UsageError if it holds none."""
    return ReplaySource(Path(rollout.source.removeprefix(REPLAYED)), model)


class StoredChunk(Struct, frozen=True):
    """Chunk of a stored rollout: id, prompt with digests of its images, stochastic steps and negative prompt per sample."""

    version: int
    ids: list[int]
    prompts: list[str]
    windows: list[list[int]]
    negatives: list[str | None] | None = None  # None in older files; an item is None if the prompt has no negative one

    def __post_init__(self) -> None:
        lists = (self.prompts, self.windows, *(() if self.negatives is None else (self.negatives,)))
        if any(len(each) != len(self.ids) for each in lists):
            raise ValueError("ids, prompts, windows and negatives differ in length")


class StoredRollout(Struct, frozen=True):
    """Index of a rollout, with the size and SHA-256 of its tensors."""

    bytes: int
    sha256: str
    sampling: dict[str, Any]
    chunks: list[StoredChunk]
    format: Literal[1] = FORMAT


class _StoredSample(NamedTuple):
    """Location of a stored sample."""

    path: Path  # of the tensors
    rollout: StoredRollout
    number: int  # index of the chunk
    row: int  # row of the chunk's tensors

    @property
    def chunk(self) -> StoredChunk:
        return self.rollout.chunks[self.number]


def _stack_samples(
    name: str, samples: Sequence[_StoredSample], open_tensors: Callable[[Path, int, str], Any]
) -> Tensor | None:
    """Stack one tensor of some samples; None if it was not recorded."""
    parts = []
    for path, rollout, chunk, row in samples:
        file = open_tensors(path, rollout.bytes, rollout.sha256)
        if f"{chunk}.{name}" not in file.keys():  # noqa: SIM118
            if name == "velocity":
                return None
            raise RunError(f"{path} has no tensor {chunk}.{name}")
        tensor = file.get_slice(f"{chunk}.{name}")
        shape = tensor.get_shape()
        if not shape or row >= shape[0]:
            raise RunError(f"{path}: {chunk}.{name} has shape {shape}, and no row {row}")
        parts.append(tensor[row])
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        raise RunError(f"{path.parent}: {name} of samples of one rollout have different shapes")
    return torch.stack(parts)


def _open_tensors(path: Path, size: int, digest: str) -> Any:
    """Open a safetensors file, and check its size and SHA-256."""
    with convert_errors(RunError, OSError, SafetensorError, says=f"{path} cannot be read"):
        if path.stat().st_size != size:
            raise RunError(f"{path} has {path.stat().st_size} bytes, expected {size}: it is damaged, copy it again")
        if _hash_file(path) != digest:
            raise RunError(f"{path} is damaged: its SHA-256 is not that of its index; copy it again")
        return safe_open(path, framework="pt")


def _move_to_host(chunk: Chunk) -> Chunk:
    """Move a chunk to the host, without its conditioning."""
    trajectory = optree.tree_map(lambda tensor: tensor.cpu(), chunk.trajectory)
    return chunk._replace(cond=None, trajectory=trajectory, images=chunk.images.cpu())


def _describe_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling settings that an update of the rollout depends on, as JSON values."""
    levels, guidance, stochastic = sampling.schedule.levels, sampling.guidance, sampling.stochastic
    recorded: dict[str, Any] = {}
    if stochastic is not None and stochastic.record:
        table = step_coefficients(stochastic.transition, levels)
        columns = {f"coefficient {name}": _to_json_numbers(value) for name, value in table._asdict().items()}
        recorded = {"form": stochastic.form, "reduction": stochastic.reduction, **columns}
    return {
        "shape": list(sampling.shape),
        "levels": levels.tolist(),
        "timesteps": sampling.schedule.timesteps.tolist(),
        "guidance scale": guidance.scale,
        "negative prompt": guidance.negative,
        **recorded,
    }


def _to_json_numbers(tensor: Tensor) -> list[Any]:
    """Convert numbers to JSON, non-finite ones to texts, because NaN is not equal to itself."""
    return [value if math.isfinite(value) else str(value) for value in tensor.tolist()]


def _list_windows(requests: Requests, sampling: Sampling, part: slice) -> list[list[int]]:
    """List the stochastic steps of each sample of a chunk."""
    ids = requests.ids[part]
    steps = () if sampling.stochastic is None else sampling.stochastic.choose_steps(ids)
    return steps.tolist() if isinstance(steps, Tensor) else [sorted(steps)] * len(ids)


def _find_difference(stored: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """Describe the first difference of sampling settings; None if they are equal."""
    for name in {**expected, **stored}:
        if stored.get(name) != expected.get(name):
            return f"{name} is {_format_value(stored.get(name))}, expected {_format_value(expected.get(name))}"
    return None


def _format_value(value: Any) -> str:
    """Format a value for a message, in at most 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _read_index(path: Path) -> StoredRollout:
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredRollout)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is not an index of format {FORMAT}; it is damaged, or of another version of fluvial: {error}"
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


def _hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
