"""Folder of votes: preferences.jsonl, one vote per line, and the images that it names.

    {"prompt", "image_0", "image_1", "label_0": 1, 0 or 0.5, "group", "size", "pair": [i, j], "voter", "time"}

The first columns are those of Pick-a-Pic, so `fluvial train dpo` reads the folder as preferences. The others name the
group that the two images are of, who compared them, and when (UTC).
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.engines.data.preferences import PREFERENCES
from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.engines.files import sync

IMAGES = "images"
LOCK = ".lock"


class Vote(NamedTuple):
    """Comparison of two images of a group."""

    group: str
    size: int  # number of images of the group
    pair: tuple[int, int]  # indices of the images within the group
    score: float  # 1 if the first is preferred, 0 if the second is, 0.5 for a tie
    voter: str


class VoteFolder:
    """Votes on disk; each is synced before it counts. One process at a time writes to a folder.

    Args:
        folder: folder, created if necessary.

    Raises:
        UsageError: the folder holds other files, another server uses it, or it cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / PREFERENCES
        with convert_errors(UsageError, OSError, says=f"votes cannot be written to {folder}"):
            (folder / IMAGES).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise UsageError(f"another server writes votes to {folder}: stop it, or choose another folder") from error
        try:
            self.lines = self._read()
        except UsageError:
            self.close()
            raise
        self.votes = [_parse_vote(line) for line in self.lines]

    def close(self) -> None:
        """Release the folder for another process."""
        os.close(self._lock)

    def keep_images(self, group: str, images: Sequence[bytes]) -> None:
        """Write the images of a group that are missing."""
        for number, image in enumerate(images):
            path = self.folder / name_image(group, number)
            if not path.exists():
                self._write(path, image)

    def append(self, vote: Vote, prompt: str) -> None:
        """Append a vote.

        Raises:
            RunError: the vote cannot be written, and does not count.
        """
        first, second = (name_image(vote.group, number) for number in vote.pair)
        line = {
            "prompt": prompt,
            "image_0": first,
            "image_1": second,
            "label_0": vote.score,
            "group": vote.group,
            "size": vote.size,
            "pair": list(vote.pair),
            "voter": vote.voter,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        before = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("ab") as stream:
                stream.write(json.dumps(line).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
            if not before:
                sync(self.folder)
        except OSError as error:
            if self.file.exists():
                os.truncate(self.file, before)
            raise RunError(f"{self.file} cannot be written: {error.strerror}") from error
        self.lines.append(line)
        self.votes.append(vote)

    def undo(self, voter: str) -> Vote | None:
        """Remove the last vote of a voter, and return it; None if there is none."""
        last = next((number for number in reversed(range(len(self.votes))) if self.votes[number].voter == voter), None)
        if last is None:
            return None
        lines = self.lines[:last] + self.lines[last + 1 :]
        self._write(self.file, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.lines = lines
        return self.votes.pop(last)

    def _read(self) -> list[dict[str, Any]]:
        """Return the lines of the file; an incomplete last line, left by a crash, is removed."""
        if not self.file.exists():
            return []
        whole, newline, rest = self.file.read_bytes().rpartition(b"\n")
        lines = []
        for number, text in enumerate(whole.split(b"\n") if newline else [], start=1):
            try:
                line = json.loads(text)
                _parse_vote(line)
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{self.file}, line {number} is not a vote: choose a folder of votes, or a new one"
                ) from error
            lines.append(line)
        if rest:
            os.truncate(self.file, len(whole) + len(newline))
        return lines

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file atomically."""
        partial = path.with_name(f".{path.name}.partial")
        with convert_errors(RunError, OSError, says=f"{path} cannot be written"):
            partial.write_bytes(content)
            sync(partial)
            partial.replace(path)
            sync(path.parent)


def hash_group(prompt: str, images: Sequence[bytes]) -> str:
    """Return the id of a group, a hash of its prompt and images."""
    digest = hashlib.sha256(prompt.encode())
    for image in images:
        digest.update(hashlib.sha256(image).digest())
    return digest.hexdigest()[:32]


def name_image(group: str, number: int) -> str:
    """Return the path of an image within the folder."""
    return f"{IMAGES}/{group}-{number:02d}.png"


def _parse_vote(line: dict[str, Any]) -> Vote:
    first, second = map(int, line["pair"])
    return Vote(str(line["group"]), int(line["size"]), (first, second), float(line["label_0"]), str(line["voter"]))
