"""Cache of encoded images on disk: each image is encoded once, by one rank, and read during training."""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fluvial.engines.data.images import read_image, read_size
from fluvial.engines.data.sizes import Size, find_nearest_size, fits
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.files import save_tensors
from fluvial.engines.waits import wait_for
from fluvial.models.digests import describe_encoding_code, digest_file
from fluvial.models.images import describe_file

MANIFEST = "encoded.json"  # settings of a cache
LEFT_OUT = "left_out.txt"  # names of the images that the last run left out
NAME = "latents"
BATCH = 4  # number of images that are encoded together


Image = Path | bytes  # file of an image, or its bytes


class ImageCache:
    """Clean samples of images, in a folder shared by runs and ranks.

    Args:
        folder: folder of the encoded images, one safetensors file each; created if necessary.
        settings: settings on which the samples depend, by name; a folder with other settings is rejected.
        encode: function from images `[B, C, H, W]` in [0, 1] to clean samples.
        shapes: shape of a sample by size; images are scaled and cut to the nearest size. The size None keeps images as they
            are.
        skip: whether to leave out images that cannot be read or that fit no size, and name them in `left_out.txt`,
            instead of raising an error.
        compare: whether to encode one image of the folder again and compare the samples, because the settings may not cover
            everything that `encode` depends on, such as the closure of a function.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, str],
        encode: Callable[[Tensor], Tensor],
        shapes: Mapping[Size, tuple[int, ...]] | Mapping[None, tuple[int, ...]],
        skip: bool = False,
        compare: bool = False,
    ) -> None:
        self.folder, self.encode, self.skip, self.compare = folder, encode, skip, compare
        self.shapes: dict[Size | None, tuple[int, ...]] = {size: tuple(shape) for size, shape in shapes.items()}
        self.settings = {
            **settings,
            "shape": " ".join(str(list(shape)) for shape in self.shapes.values()),
            "size": " ".join(map(str, self.shapes)),
        }
        self.sizes: dict[Image, Size | None] = {}  # size of a group, by its first image
        self.left_out: frozenset[tuple[Image, ...]] = frozenset()

    def sample(self, image: Image, size: Size | None = None) -> Tensor:
        """Return the clean sample of an image, `[*event]`, at the size of its group; by default the only size.

        Raises:
            RunError: the sample is missing or damaged.
        """
        file = self._locate(image, size or next(iter(self.shapes)))
        try:
            return load_file(file)[NAME]
        except (OSError, SafetensorError, KeyError) as error:
            raise RunError(
                f"the encoded image {file} of {describe_file(image)} cannot be read ({error}): start again"
            ) from error

    def fill(self, groups: Sequence[tuple[Image, ...]], world: World) -> None:
        """Encode the images that are not in the folder yet, a part on each rank. All ranks must call this.

        All images of a group get the size nearest to the first of them. An interrupted run continues where it stopped.

        Raises:
            UsageError: an image cannot be read or fits no size, its sample has another shape, or the folder has other
                settings.
            RunError: the folder cannot be written.
        """
        with world.agreed():
            if world.is_main:
                self._claim()
        unique = list(dict.fromkeys(groups))
        sizes = self._assign(unique, world)
        wanted = list(dict.fromkeys((image, size) for group, size in sizes.items() for image in group))
        bad: list[int] = []
        with world.agreed():
            if self.compare and world.is_main:
                self._compare(wanted)
            missing = [number for number in range(world.rank, len(wanted), world.size) if not self._holds(*wanted[number])]
            with wait_for("encoding", len(missing), "images") as wait:
                for part in self._read_in_parts(wanted, missing, bad):
                    self._encode(part)
                    wait.advance(len(part))
        unreadable = {wanted[number][0] for part in world.gather_items(bad) for number in part}
        self.left_out = frozenset(group for group in unique if group not in sizes or not unreadable.isdisjoint(group))
        self.sizes = {group[0]: size for group, size in sizes.items()}
        with world.agreed():
            if world.is_main:
                self._list_left_out(sorted(" ".join(map(describe_file, group)) for group in self.left_out))

    def _assign(self, groups: Sequence[tuple[Image, ...]], world: World) -> dict[tuple[Image, ...], Size | None]:
        """Return the size of each group that fits one; each rank reads its part of the images."""
        if len(self.shapes) == 1:
            return dict.fromkeys(groups, next(iter(self.shapes)))
        sizes = [size for size in self.shapes if size is not None]
        assigned: list[tuple[int, int]] = []  # index of the group, index of its size
        with world.agreed():
            for number in range(world.rank, len(groups), world.size):
                try:
                    assigned.append((number, sizes.index(self._find_nearest(groups[number], sizes))))
                except UsageError:
                    if not self.skip:
                        raise
        size_of = {number: sizes[index] for part in world.gather_items(assigned) for number, index in part}
        return {group: size_of[number] for number, group in enumerate(groups) if number in size_of}

    def _find_nearest(self, group: tuple[Image, ...], sizes: Sequence[Size]) -> Size:
        """Return the size of a group; UsageError if an image cannot be read or fits no size."""
        image_sizes = [read_size(image) for image in group]
        try:
            size = find_nearest_size(image_sizes[0], sizes)
        except ValueError as error:
            raise UsageError(f"{describe_file(group[0])} of {error}") from error
        for image, image_size in zip(group, image_sizes, strict=True):
            if not fits(image_size, size):
                raise UsageError(
                    f"{describe_file(image)} of {image_size} pixels cannot be cut to {size}, the size of "
                    f"{describe_file(group[0])} beside it: more than a third would be cut off; leave the two out"
                )
        return size

    def _read_in_parts(
        self, wanted: Sequence[tuple[Image, Size | None]], numbers: Sequence[int], bad: list[int]
    ) -> Iterator[list[tuple[Image, Size | None, Tensor]]]:
        """Yield the images of the given indices in parts of one size; indices of unreadable ones are added to `bad`."""
        part: list[tuple[Image, Size | None, Tensor]] = []
        for number in numbers:
            image, size = wanted[number]
            try:
                pixels = read_image(image, size)
            except UsageError:
                if not self.skip:
                    raise
                bad.append(number)
                continue
            if part and (len(part) == BATCH or part[0][2].shape != pixels.shape):
                yield part
                part = []
            part.append((image, size, pixels))
        if part:
            yield part

    def _encode(self, part: Sequence[tuple[Image, Size | None, Tensor]]) -> None:
        """Encode images of one size, and write each."""
        first, size = describe_file(part[0][0]), part[0][1]
        try:
            samples = self.encode(torch.stack([pixels for _, _, pixels in part])).float().cpu()
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{first} cannot be encoded: {' '.join(str(error).split())}") from error
        if tuple(samples.shape[1:]) != self.shapes[size]:
            raise UsageError(f"{first} gives a sample of {list(samples.shape[1:])}, expected {list(self.shapes[size])}")
        for (image, size, _), sample in zip(part, samples, strict=True):
            file = self._locate(image, size)
            partial = file.with_suffix(f".{secrets.token_hex(4)}")
            try:
                save_tensors({NAME: sample.contiguous()}, partial)
                os.replace(partial, file)
            except (OSError, SafetensorError) as error:
                partial.unlink(missing_ok=True)
                reason = getattr(error, "strerror", None) or error
                raise RunError(
                    f"{self.folder} cannot be written: {reason}; encoded images are kept, start again to continue"
                ) from error

    def _compare(self, wanted: Sequence[tuple[Image, Size | None]]) -> None:
        """Raise UsageError if `encode` returns another sample for the first image that the folder holds."""
        for image, size in wanted:
            if self._holds(image, size):
                sample = self.encode(read_image(image, size)[None])[0].float().cpu()
                if not torch.allclose(sample, self.sample(image, size), rtol=1e-2, atol=1e-2):
                    raise UsageError(
                        f"`data.cache` {self.folder} holds another sample of {describe_file(image)} than encode returns: "
                        "set it to another folder"
                    )
                return

    def _claim(self) -> None:
        """Write the settings to the folder, or compare them with those of the folder."""
        file = self.folder / MANIFEST
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                file.write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")
            stored = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"`data.cache` {self.folder} cannot be used: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{file} cannot be read: delete the folder, or set `data.cache` to another") from error
        if stored != self.settings:
            names = [name for name in self.settings if stored.get(name) != self.settings[name]]
            differs = ", ".join(f"{name} {stored.get(name)} there and {self.settings[name]} here" for name in names)
            raise UsageError(
                f"`data.cache` {self.folder} was written with other settings ({differs}): set it to another folder"
            )

    def _list_left_out(self, left_out: Sequence[str]) -> None:
        """Write the names of left-out images to the folder, one group per line."""
        file = self.folder / LEFT_OUT
        try:
            if left_out:
                file.write_text("\n".join(left_out) + "\n", encoding="utf-8")
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{file} cannot be written: {error.strerror}") from error

    def _holds(self, image: Image, size: Size | None) -> bool:
        """Return whether the folder holds the complete sample of an image."""
        file = self._locate(image, size)
        try:
            with safe_open(file, framework="pt") as tensors:
                return tuple(tensors.get_slice(NAME).get_shape()) == self.shapes[size]
        except (OSError, SafetensorError):
            return False

    def _locate(self, image: Image, size: Size | None) -> Path:
        """Return the file of an image at a size; its name depends on the image's bytes, the settings, and the code."""
        try:
            key = [self.settings, describe_encoding_code(), str(size), digest_file(image)]
        except OSError as error:
            raise UsageError(f"{image!s} cannot be read as an image: {error.strerror}") from error
        return self.folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.safetensors"
