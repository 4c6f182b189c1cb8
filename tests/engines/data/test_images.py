"""Images with captions, and their encoded samples on disk: each is encoded once, and what is wrong is named."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from fluvial.engines.data import image_cache
from fluvial.engines.data.image_cache import MANIFEST, ImageCache
from fluvial.engines.data.images import read_image, read_images
from fluvial.engines.data.records import texts
from fluvial.engines.data.sizes import Size
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.fsdp.world import World, init_world

COLOURS = {"a": (255, 0, 0), "b": (0, 255, 0), "c": (0, 0, 255)}


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """The world of this process."""
    with init_world() as world:
        yield world


def anything(prompt: str) -> None:
    """A model that takes prompts of at most three words."""
    if len(prompt.split()) > 3:
        raise ValueError(f"prompt {prompt!r} is long")


def painted(folder: Path, *, captions: bool = True) -> Path:
    """Return a folder of three images of one colour, each with a caption beside it."""
    folder.mkdir(exist_ok=True)
    for name, colour in COLOURS.items():
        Image.new("RGB", (6, 4), colour).save(folder / f"{name}.png")
        if captions:
            (folder / f"{name}.txt").write_text(f"image\n{name} \n")
    return folder


def imagefolder(folder: Path) -> Path:
    painted(folder, captions=False)
    rows = [{"file_name": f"{name}.png", "text": f"image {name}", "width": 6} for name in COLOURS]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def parquet(folder: Path) -> Path:
    import pyarrow as arrow
    from pyarrow import parquet as files

    painted(folder, captions=False)
    rows = [
        {"image": {"bytes": (folder / f"{name}.png").read_bytes(), "path": f"{name}.png"}, "caption": f"image {name}"}
        for name in COLOURS
    ]
    files.write_table(arrow.Table.from_pylist(rows), folder / "all.parquet")
    return folder / "all.parquet"


@pytest.mark.parametrize("make", [painted, imagefolder, parquet])
def test_captions_know_their_images(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """Whether they lie beside them, in a table, or in one file with them."""
    found = read_images(make(tmp_path / "all"), check=anything)
    assert texts(found) == ["image a", "image b", "image c"]
    assert {prompt.source for prompt in found} == {"all"}
    for prompt, colour in zip(found, COLOURS.values(), strict=True):
        assert prompt.image is not None
        pixels = read_image(prompt.image)
        assert pixels.shape == (3, 4, 6)
        assert (pixels * 255).round()[:, 0, 0].tolist() == list(colour)
    if make is imagefolder:
        assert found[0].metadata == {"width": 6, "image": str(tmp_path / "all" / "a.png")}


def test_an_image_is_scaled_to_cover_and_cut_around_its_centre(tmp_path: Path) -> None:
    """Without a size it stays as it is, grey with one channel; with one it is in colour."""
    wide = Image.new("L", (30, 10), 0)
    wide.paste(255, (10, 0, 20, 10))
    wide.save(tmp_path / "wide.png")
    assert read_image(tmp_path / "wide.png").shape == (1, 10, 30)
    middle = read_image(tmp_path / "wide.png", (5, 5))
    assert middle.shape == (3, 5, 5)
    assert middle[:, :, 2].min() == 1.0
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    wide.save(turned, "JPEG", exif=exif)
    assert read_image(turned.getvalue()).shape == (1, 30, 10)


def lone_image(folder: Path) -> Path:
    (painted(folder) / "b.txt").unlink()
    return folder


def lone_caption(folder: Path) -> Path:
    (painted(folder) / "b.png").unlink()
    return folder


def written(name: str, text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (painted(folder) / name).write_text(text)
        return folder

    return make


def table(*rows: dict[str, Any]) -> Callable[[Path], Path]:
    return written("metadata.jsonl", "\n".join(map(json.dumps, rows)))


def only_text(folder: Path) -> Path:
    (folder / "prompts.txt").parent.mkdir()
    (folder / "prompts.txt").write_text("a fox")
    return folder / "prompts.txt"


def nothing(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lone_image, "b.png has no caption: write b.txt beside it, or metadata.jsonl"),
        (lone_caption, "the caption b.txt has no image of the same name"),
        (written("b.txt", " \n"), "b.png has an empty caption in b.txt"),
        (written("b.txt", "one two three four"), "b.png: prompt 'one two three four' is long"),
        (written("b.txt", "a cow"), "b.png: 'a cow' is held out for evaluation, never trained on"),
        (table({"file_name": "z.png", "text": "x"}), "line 1, column image names z.png, and there is no such file"),
        (table({"file_name": "a.png"}), "line 1 has no column prompt or text or caption, it has image"),
        (table({"text": "x"}), "line 1 has no column image or file_name, it has text"),
        (only_text, "prompts.txt is not a folder of images, or a file of records"),
        (nothing, "holds no images, expected some with captions"),
    ],
)
def test_what_is_wrong_with_images(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    """One line that names the file."""
    with pytest.raises(UsageError) as error:
        read_images(make(tmp_path / "all"), check=anything, heldout=("a cow",))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


class Encoder:
    """Halves an image, and counts how many it was given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.count += len(images)
        return images[:, :, ::2, ::2] * 2 - 1


def cache(folder: Path, encode: Any = None, **changes: Any) -> ImageCache:
    asked = {"settings": {"encoder": "halves"}, "encode": encode or Encoder(), "shapes": {None: (3, 2, 3)}, **changes}
    return ImageCache(folder / "cache", **asked)


def images_of(folder: Path) -> list[tuple[Path]]:
    return [(image,) for image in sorted(painted(folder).glob("*.png"))]


def test_each_image_is_encoded_once(tmp_path: Path, one: World) -> None:
    """What is there is kept, whoever wrote it; an image that changed, or a damaged file, is encoded again."""
    images, encode = images_of(tmp_path), Encoder()
    made = cache(tmp_path, encode)
    made.fill(images[:2], one)
    made.fill([*images, images[0]], one)
    assert encode.count == 3
    for (image,) in images:
        torch.testing.assert_close(made.sample(image), Encoder()(read_image(image)[None])[0])
    again = Encoder()
    cache(tmp_path, again).fill(images, one)
    assert again.count == 0
    next(iter((tmp_path / "cache").glob("*.safetensors"))).write_bytes(b"damaged")
    Image.new("RGB", (6, 4)).resize((12, 8)).resize((6, 4)).save(images[1][0], compress_level=0)
    cache(tmp_path, again).fill(images, one)
    assert again.count in (1, 2)  # the damaged file may be that of the image that changed


def test_an_image_that_cannot_be_read(tmp_path: Path, one: World) -> None:
    """It is named, or left out where that is asked for; what was encoded before it is kept."""
    images = images_of(tmp_path)
    images[1][0].write_text("no image")
    with pytest.raises(UsageError, match=r"b\.png cannot be read as an image: ") as error:
        cache(tmp_path).fill(images, one)
    assert "\n" not in str(error.value)
    made = cache(tmp_path, skip=True)
    made.fill(images, one)
    assert made.left_out == {images[1]}
    assert (tmp_path / "cache" / "left_out.txt").read_text() == f"{images[1][0]}\n"
    assert made.sample(*images[2]).shape == (3, 2, 3)
    with pytest.raises(RunError, match=r"of .*b\.png cannot be read .*: start again"):
        made.sample(*images[1])
    made.fill(images[:1], one)
    assert not (tmp_path / "cache" / "left_out.txt").exists()


def test_a_cache_of_another_model_is_refused(tmp_path: Path, one: World) -> None:
    cache(tmp_path).fill(images_of(tmp_path), one)
    with pytest.raises(UsageError, match=r"other settings \(encoder halves there and thirds here\)"):
        cache(tmp_path, settings={"encoder": "thirds"}).fill([], one)
    with pytest.raises(UsageError, match=r"size None there and 8x4 here"):
        cache(tmp_path, shapes={Size(4, 8): (3, 2, 3)}).fill([], one)
    (tmp_path / "cache" / MANIFEST).write_text("{")
    with pytest.raises(UsageError, match="cannot be read: delete the folder"):
        cache(tmp_path).fill([], one)


def test_images_of_another_size_are_named(tmp_path: Path, one: World) -> None:
    with pytest.raises(UsageError, match=r"a\.png gives a sample of \[3, 2, 3\], expected \[3, 4, 4\]"):
        cache(tmp_path, shapes={None: (3, 4, 4)}).fill(images_of(tmp_path), one)


def test_a_full_disk_loses_nothing(tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; the images that were written are not encoded again."""
    images, write = images_of(tmp_path), image_cache.save_tensors

    def full(tensors: Any, path: Path) -> None:
        if len([*(tmp_path / "cache").glob("*.safetensors")]) == 2:
            raise OSError(28, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(image_cache, "save_tensors", full)
    with pytest.raises(RunError, match="No space left on device; what is encoded is kept, start again to go on"):
        cache(tmp_path).fill(images, one)
    monkeypatch.setattr(image_cache, "save_tensors", write)
    encode = Encoder()
    cache(tmp_path, encode).fill(images, one)
    assert encode.count == 1
