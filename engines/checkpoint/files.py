"""Files of a checkpoint as torch's library sees them: hashed while they are written, fetched when they are read."""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from fluvial.engines.checkpoint.storage import CheckpointStore, Draft


class DraftFiles(FileSystem):
    """A draft as the library's writer sees it; notes the size and SHA-256 of each file while it is written."""

    def __init__(self, store: CheckpointStore, draft: Draft) -> None:
        self.store, self.draft = store, draft
        self.written: dict[str, dict[str, int | str]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        file = Path(path).name
        with self.store.create(self.draft, file) as stream:
            hashed = Hashed(stream)
            yield hashed
        self.written[self.draft.prefix + file] = {"bytes": hashed.tell(), "sha256": hashed.digest.hexdigest()}

    def mkdir(self, path: Any) -> None:
        """Do nothing: the storage makes its folders."""

    def exists(self, path: Any) -> bool:
        return False


class Hashed(io.RawIOBase):
    """A stream for writing that hashes what goes through it. Closing it leaves the underlying stream open."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.digest, self.count = stream, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.stream.write(data)
        self.digest.update(data)
        self.count += len(data)
        return len(data)

    def tell(self) -> int:
        return self.count


class ReadFiles(FileSystem):
    """A folder as the library lists it for reading: paths of files in any place."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def ls(self, path: Any) -> list[str]:
        return self.paths


class TensorFiles(HuggingFaceStorageReader):
    """Reads a checkpoint's headers, and then only the files with tensors for this rank."""

    def __init__(self, store: CheckpointStore, name: str, files: dict[str, Any], scratch: Path) -> None:
        super().__init__(store.spelled(name))
        self.store, self.name, self.scratch = store, name, scratch
        self.files = {store.head(name, file, entry["bytes"], scratch): file for file, entry in files.items()}
        self.fs = ReadFiles([*self.files])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for path in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            self.store.body(self.name, self.files[path], self.scratch)
        return super().read_data(plan, planner)
