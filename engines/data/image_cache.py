"""Encoded images on disk: each image is encoded once, by one rank, and read when it is trained on."""

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
from fluvial.engines.data.sizes import Size, fits, nearest_size
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.files import save_tensors
from fluvial.engines.waits import wait_for
from fluvial.models.digests import digest_file, encoding_code
from fluvial.models.images import describe_file

MANIFEST = "encoded.json"  # settings that a cache was written with
LEFT_OUT = "left_out.txt"  # names of the images that the last run left out
NAME = "latents"
BATCH = 4  # images that are encoded together


Image = Path | bytes  # file of an image, or its bytes


class ImageCache:
    """Clean samples of images, in a folder that runs and ranks share.

    Args:
        folder: folder of the encoded images, one safetensors file each, which is made if necessary.
        settings: what the samples depend on besides the image, by name; a folder of other settings is refused.
        encode: function from images `[B, C, H, W]` in [0, 1] to clean samples.
        shapes: shape of a sample of each size that images are scaled and cut to; with several, an image gets the nearest.
            The size None takes images as they are.
        skip: whether images that cannot be read, or that no size takes, are left out, instead of an error; `left_out.txt`
            in the folder names them then.
        compare: whether an image that is in the folder is encoded again and compared, because the settings do not say all
            that `encode` depends on, such as what a function encloses.
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
        self.sizes: dict[Image, Size | None] = {}  # of the first image of each group, where there are several sizes
        self.left_out: frozenset[tuple[Image, ...]] = frozenset()

    def sample(self, image: Image, size: Size | None = None) -> Tensor:
        """Return the clean sample of an image, `[*event]`, at the size of its group, by default the only one.

        Raises:
            RunError: it is not in the folder, or damaged.
        """
        file = self._locate(image, size or next(iter(self.shapes)))
        try:
            return load_file(file)[NAME]
        except (OSError, SafetensorError, KeyError) as error:
            raise RunError(
                f"the encoded image {file} of {describe_file(image)} cannot be read ({error}): start again"
            ) from error

    def fill(self, groups: Sequence[tuple[Image, ...]], world: World) -> None:
        """Encode the images that are not in the folder yet, each rank its part; every rank must take part.

        The images of a group belong together, and get the size that is nearest to the first of them. What an interrupted run
        has encoded is kept.

        Raises:
            UsageError: an image cannot be read or none of several sizes takes it, its sample has another shape, or the
                folder was written with other settings.
            RunError: the folder cannot be written.
        """
        with world.agreed():
            if world.is_main:
                self._claim()
        everyone = list(dict.fromkeys(groups))
        sizes = self._assign(everyone, world)
        wanted = list(dict.fromkeys((image, size) for group, size in sizes.items() for image in group))
        bad: list[int] = []
        with world.agreed():
            if self.compare and world.is_main:
                self._compare(wanted)
            missing = [place for place in range(world.rank, len(wanted), world.size) if not self._holds(*wanted[place])]
            with wait_for("encoding", len(missing), "images") as wait:
                for part in self._read_in_parts(wanted, missing, bad):
                    self._encode(part)
                    wait.advance(len(part))
        unreadable = {wanted[place][0] for part in world.gather_items(bad) for place in part}
        self.left_out = frozenset(group for group in everyone if group not in sizes or not unreadable.isdisjoint(group))
        self.sizes = {group[0]: size for group, size in sizes.items()}
        with world.agreed():
            if world.is_main:
                self._list_left_out(sorted(" ".join(map(describe_file, group)) for group in self.left_out))

    def _assign(self, groups: Sequence[tuple[Image, ...]], world: World) -> dict[tuple[Image, ...], Size | None]:
        """Return the size of each group that one of the sizes takes; each rank looks at its part."""
        if len(self.shapes) == 1:
            return dict.fromkeys(groups, next(iter(self.shapes)))
        known = [size for size in self.shapes if size is not None]
        assigned: list[tuple[int, int]] = []
        with world.agreed():
            for place in range(world.rank, len(groups), world.size):
                try:
                    assigned.append((place, known.index(self._find_nearest(groups[place], known))))
                except UsageError:
                    if not self.skip:
                        raise
        taken = {place: known[number] for part in world.gather_items(assigned) for place, number in part}
        return {group: taken[place] for place, group in enumerate(groups) if place in taken}

    def _find_nearest(self, group: tuple[Image, ...], sizes: Sequence[Size]) -> Size:
        """Return the size of a group. UsageError if an image cannot be read, or no size takes it."""
        each = [read_size(image) for image in group]
        try:
            size = nearest_size(each[0], sizes)
        except ValueError as error:
            raise UsageError(f"{describe_file(group[0])} of {error}") from error
        for image, its in zip(group, each, strict=True):
            if not fits(its, size):
                raise UsageError(
                    f"{describe_file(image)} of {its} pixels cannot be cut to {size}, the size of {describe_file(group[0])} "
                    "beside it: more than a third would be cut off; leave the two out"
                )
        return size

    def _read_in_parts(
        self, wanted: Sequence[tuple[Image, Size | None]], places: Sequence[int], bad: list[int]
    ) -> Iterator[list[tuple[Image, Size | None, Tensor]]]:
        """Yield the images at the given places in parts of one size; places of unreadable ones are added to `bad`."""
        part: list[tuple[Image, Size | None, Tensor]] = []
        for place in places:
            image, size = wanted[place]
            try:
                pixels = read_image(image, size)
            except UsageError:
                if not self.skip:
                    raise
                bad.append(place)
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
                    f"{self.folder} cannot be written: {reason}; what is encoded is kept, start again to go on"
                ) from error

    def _compare(self, wanted: Sequence[tuple[Image, Size | None]]) -> None:
        """Raise UsageError if the first image that the folder holds has another sample than `encode` returns."""
        for image, size in wanted:
            if self._holds(image, size):
                sample = self.encode(read_image(image, size)[None])[0].float().cpu()
                if not torch.allclose(sample, self.sample(image, size), rtol=1e-2, atol=1e-2):
                    there = f"`data.cache` {self.folder} holds another sample of {describe_file(image)}"
                    raise UsageError(f"{there} than encode returns: set it to another folder")
                return

    def _claim(self) -> None:
        """Write the settings into the folder, or check them against those that are there."""
        file = self.folder / MANIFEST
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                file.write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")
            there = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"`data.cache` {self.folder} cannot be used: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{file} cannot be read: delete the folder, or set `data.cache` to another") from error
        if there != self.settings:
            names = [name for name in self.settings if there.get(name) != self.settings[name]]
            differs = ", ".join(f"{name} {there.get(name)} there and {self.settings[name]} here" for name in names)
            raise UsageError(
                f"`data.cache` {self.folder} was written with other settings ({differs}): set it to another folder"
            )

    def _list_left_out(self, left_out: Sequence[str]) -> None:
        """Write the names of the images that are left out into the folder, one group per line."""
        file = self.folder / LEFT_OUT
        try:
            if left_out:
                file.write_text("\n".join(left_out) + "\n", encoding="utf-8")
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{file} cannot be written: {error.strerror}") from error

    def _holds(self, image: Image, size: Size | None) -> bool:
        """Return whether an image's sample is in the folder, whole."""
        file = self._locate(image, size)
        try:
            with safe_open(file, framework="pt") as tensors:
                return tuple(tensors.get_slice(NAME).get_shape()) == self.shapes[size]
        except (OSError, SafetensorError):
            return False

    def _locate(self, image: Image, size: Size | None) -> Path:
        """Return the file of an image at a size: by its bytes, the settings, and the code that opens and encodes it."""
        try:
            key = [self.settings, encoding_code(), str(size), digest_file(image)]
        except OSError as error:
            raise UsageError(f"{image!s} cannot be read as an image: {error.strerror}") from error
        return self.folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.safetensors"
