"""Encoded images on disk: each image is encoded once, by one rank, and read when it is trained on."""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluvial.engines.data.images import read_image, shown
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.fsdp.world import World

MANIFEST = "encoded.json"  # settings that a cache was written with
NAME = "latents"
BATCH = 4  # images that are encoded together


class ImageCache:
    """Clean samples of images, in a folder that runs and ranks share.

    Args:
        folder: folder of the encoded images, one safetensors file each, which is made if necessary.
        settings: what the samples depend on besides the image, by name; a folder of other settings is refused.
        encode: function from images `[B, C, H, W]` in [0, 1] to clean samples.
        shape: shape of one sample.
        size: height and width that images are cut to; None takes them as they are.
        skip: whether an image that cannot be read is left out, instead of an error.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, str],
        encode: Callable[[Tensor], Tensor],
        shape: tuple[int, ...],
        size: tuple[int, int] | None = None,
        skip: bool = False,
    ) -> None:
        self.folder, self.encode, self.shape, self.size, self.skip = folder, encode, tuple(shape), size, skip
        self.settings = {**settings, "shape": str(list(shape)), "size": str(size)}
        self.unreadable: frozenset[Path | bytes] = frozenset()

    def __getitem__(self, image: Path | bytes) -> Tensor:
        """Return the clean sample of an image.

        Raises:
            RunError: it is not in the folder, or damaged.
        """
        file = self._file(image)
        try:
            return load_file(file)[NAME]
        except (OSError, SafetensorError, KeyError) as error:
            raise RunError(f"the encoded image {file} of {shown(image)} cannot be read ({error}): start again") from error

    def fill(self, images: Sequence[Path | bytes], world: World) -> None:
        """Encode the images that are not in the folder yet, each rank its part; every rank must take part.

        What an interrupted run has encoded is kept.

        Raises:
            UsageError: an image cannot be read, its sample has another shape, or the folder was written with other settings.
            RunError: the folder cannot be written.
        """
        with world.agreed():
            if world.is_main:
                self._claim()
        everyone = list(dict.fromkeys(images))
        bad: list[int] = []
        with world.agreed():
            missing = [place for place in range(world.rank, len(everyone), world.size) if not self._holds(everyone[place])]
            for group in self._readable(everyone, missing, bad):
                self._encode(group)
        found = {place for part in world.gather_items(bad) for place in part}
        self.unreadable = frozenset(everyone[place] for place in found)

    def _readable(
        self, images: Sequence[Path | bytes], places: Sequence[int], bad: list[int]
    ) -> Iterator[list[tuple[Path | bytes, Tensor]]]:
        """Yield the images at the given places in groups of one size; places of unreadable ones are added to `bad`."""
        group: list[tuple[Path | bytes, Tensor]] = []
        for place in places:
            try:
                pixels = read_image(images[place], self.size)
            except UsageError:
                if not self.skip:
                    raise
                bad.append(place)
                continue
            if group and (len(group) == BATCH or group[0][1].shape != pixels.shape):
                yield group
                group = []
            group.append((images[place], pixels))
        if group:
            yield group

    def _encode(self, group: Sequence[tuple[Path | bytes, Tensor]]) -> None:
        """Encode images of one size, and write each."""
        first = shown(group[0][0])
        try:
            samples = self.encode(torch.stack([pixels for _, pixels in group])).float().cpu()
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{first} cannot be encoded: {' '.join(str(error).split())}") from error
        if tuple(samples.shape[1:]) != self.shape:
            raise UsageError(f"{first} gives a sample of {list(samples.shape[1:])}, expected {list(self.shape)}")
        for (image, _), sample in zip(group, samples, strict=True):
            file = self._file(image)
            partial = file.with_suffix(f".{secrets.token_hex(4)}")
            try:
                save_file({NAME: sample.contiguous()}, partial)
                os.replace(partial, file)
            except (OSError, SafetensorError) as error:
                partial.unlink(missing_ok=True)
                reason = getattr(error, "strerror", None) or error
                raise RunError(
                    f"{self.folder} cannot be written: {reason}; what is encoded is kept, start again to go on"
                ) from error

    def _claim(self) -> None:
        """Write the settings into the folder, or check them against those that are there."""
        file = self.folder / MANIFEST
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                file.write_text(json.dumps(self.settings, indent=1) + "\n")
            there = json.loads(file.read_text())
        except OSError as error:
            raise UsageError(f"data_cache {self.folder} cannot be used: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{file} cannot be read: delete the folder, or set data_cache to another") from error
        if there != self.settings:
            names = [name for name in self.settings if there.get(name) != self.settings[name]]
            differs = ", ".join(f"{name} {there.get(name)} there and {self.settings[name]} here" for name in names)
            raise UsageError(
                f"data_cache {self.folder} was written with other settings ({differs}): set it to another folder"
            )

    def _holds(self, image: Path | bytes) -> bool:
        """Return whether an image's sample is in the folder, whole."""
        file = self._file(image)
        try:
            with safe_open(file, framework="pt") as tensors:
                return tuple(tensors.get_slice(NAME).get_shape()) == self.shape
        except (OSError, SafetensorError):
            return False

    def _file(self, image: Path | bytes) -> Path:
        """Return the file of an image: of its bytes, or of its path with size and time of its last change."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode())
        if isinstance(image, bytes):
            digest.update(image)
        else:
            try:
                known = image.stat()
            except OSError as error:
                raise UsageError(f"{image} cannot be read as an image: {error.strerror}") from error
            digest.update(f"{image} {known.st_size} {known.st_mtime_ns}".encode())
        return self.folder / f"{digest.hexdigest()}.safetensors"
