"""Images with captions, and their encoded samples on disk: each is encoded once, and what is wrong is named."""

import base64
import io
import json
import os
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch import Tensor

from fluvial.engines.data import image_cache
from fluvial.engines.data.image_cache import MANIFEST, ImageCache
from fluvial.engines.data.images import read_image, read_images, read_size
from fluvial.engines.data.records import texts
from fluvial.engines.data.sizes import Size
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.servers import formats
from fluvial.models import images
from fluvial.models.replay import kinds

COLOURS = {"a": (255, 0, 0), "b": (0, 255, 0), "c": (0, 0, 255)}


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


def webdataset(folder: Path) -> Path:
    """Write a tar with an image, a caption and columns per sample; a stem may have dots in its folder."""
    with tarfile.open(painted(folder) / "all.tar", "w") as archive:
        for name in COLOURS:
            (folder / f"{name}.json").write_text(json.dumps({"width": 6}))
            for ending in ("json", "png", "txt"):
                archive.add(folder / f"{name}.{ending}", f"v1.0/{name}.{ending}")
    return folder / "all.tar"


@pytest.mark.parametrize("make", [painted, imagefolder, parquet, webdataset])
def test_captions_know_their_images(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """Whether they lie beside them, in a table, or in one file with them."""
    found = read_images(make(tmp_path / "all"), check=anything)
    assert [" ".join(text.split()) for text in texts(found)] == ["image a", "image b", "image c"]
    assert {prompt.source for prompt in found} == {"all"}
    for prompt, colour in zip(found, COLOURS.values(), strict=True):
        assert prompt.image is not None
        pixels = read_image(prompt.image)
        assert pixels.shape == (3, 4, 6)
        assert (pixels * 255).round()[:, 0, 0].tolist() == list(colour)
    if make is webdataset:
        assert found[0].metadata == {"width": 6}
    if make is imagefolder:
        assert found[0].metadata == {"width": 6, "image": str(tmp_path / "all" / "a.png")}


GREY = np.array([[0, 64, 128, 255], [255, 192, 32, 0]], dtype=np.uint8)
COLOUR = np.stack([GREY, GREY[::-1], 255 - GREY], axis=-1)
OPACITY = np.where(GREY > 100, 255, 0).astype(np.uint8)
SIXTEEN = GREY.astype(np.uint16) * 257


def stored(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    """Return pixels, or an image, as a file."""
    with io.BytesIO() as file:
        (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(file, kind, **options)
        return file.getvalue()


def turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return stored(COLOUR, kind, exif=exif, lossless=True)


# Files as other programs write them, and how they are seen.
SEEN: dict[str, tuple[bytes, Any]] = {
    "grey of 1 bit": (stored(Image.fromarray(OPACITY).convert("1")), OPACITY),
    "grey of 16 bits, PNG": (stored(SIXTEEN), GREY),
    "grey of 16 bits, TIFF": (stored(SIXTEEN, "TIFF"), GREY),
    "grey of 16 bits whose white is 0": (stored(SIXTEEN, "TIFF", tiffinfo={262: 0}), 255 - GREY),
    "grey of 16 bits, PGM": (stored(SIXTEEN.astype(np.int32), "PPM"), GREY),
    "grey of 16 bits with a transparent number": (stored(SIXTEEN, transparency=0), np.where(GREY == 0, 255, GREY)),
    "real numbers": (stored(GREY.astype(np.float32) / 255, "TIFF"), GREY),
    "grey with opacity": (stored(np.stack([GREY, OPACITY], axis=-1)), np.where(OPACITY, GREY, 255)),
    "grey with a transparent number": (stored(GREY, transparency=0), np.where(GREY == 0, 255, GREY)),
    "colour with opacity": (stored(np.dstack([COLOUR, OPACITY])), np.where(OPACITY[..., None], COLOUR, 255)),
    "palette": (stored(Image.fromarray(COLOUR).quantize(8)), COLOUR),
    "palette with opacity": (
        stored(Image.fromarray(GREY).convert("P"), transparency=0),
        np.where(GREY == 0, 255, GREY)[..., None].repeat(3, -1),
    ),
    "CMYK": (stored(Image.new("CMYK", (4, 2), (255, 0, 0, 0)), "JPEG"), np.full((2, 4, 3), (0, 255, 255))),
    **{
        f"{kind} turned by EXIF {number}": (turned(kind, number), np.rot90(COLOUR, times))
        for kind in ("PNG", "TIFF", "WEBP")
        for number, times in ((3, 2), (6, 3), (8, 1), (9, 0))  # there are 8
    },
}


@pytest.mark.parametrize("name", SEEN)
def test_every_door_opens_an_image_as_it_is_seen(name: str, tmp_path: Path) -> None:
    """Data, images of edits and the reward server see the same pixels, upright, on white, and the size that they have."""
    file, expected = SEEN[name]
    (tmp_path / "image").write_bytes(file)
    data = (read_image(tmp_path / "image") * 255).permute(1, 2, 0).numpy()
    assert np.abs(data - expected.reshape(data.shape)).max() < 1
    assert read_size(file) == Size(*expected.shape[:2])
    given = np.asarray(kinds.read_image(file))
    assert np.array_equal(given, data.astype(np.uint8).reshape(given.shape))
    if file[:4] != b"II*\0" and not file.startswith(b"P5"):
        request = formats.ComputeBody(["a"], image=[base64.b64encode(file).decode()])
        [sample] = formats.read_flow_factory(request, formats.ScoringLimits())
        assert np.array_equal(sample.image.permute(1, 2, 0), np.broadcast_to(data, (*data.shape[:2], 3)))


@pytest.mark.parametrize(
    ("pixels", "says"),
    [
        (GREY.astype(np.int32), "its numbers are integers of 32 bits"),
        (GREY.astype(np.float32), r"its numbers are 0 to 255, expected 0 \(black\) to 1 \(white\)"),
        (np.full((2, 2), np.nan, dtype=np.float32), "its numbers are nan to nan"),
    ],
)
def test_an_image_that_does_not_say_what_is_white_is_refused(pixels: Any, says: str, tmp_path: Path) -> None:
    """Numbers of 32 bits have no white, unless they lie in [0, 1]."""
    (tmp_path / "depth.tif").write_bytes(stored(pixels, "TIFF"))
    with pytest.raises(UsageError, match=rf"depth.tif cannot be read as an image: {says}"):
        read_image(tmp_path / "depth.tif")


def test_transparent_pixels_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Opaque pixels need no line."""
    images._note_transparency.cache_clear()
    kinds.read_image(stored(np.dstack([COLOUR, np.full_like(GREY, 255)])))
    assert capsys.readouterr().err == ""
    for _ in range(2):
        kinds.read_image(stored(np.dstack([COLOUR, OPACITY])))
    assert capsys.readouterr().err == "images have transparent pixels: they are shown on white\n"


def test_an_image_is_scaled_to_cover_and_cut_around_its_centre(tmp_path: Path) -> None:
    """Without a size it stays as it is, grey with one channel; with one it is in colour."""
    wide = Image.new("L", (30, 10), 0)
    wide.paste(255, (10, 0, 20, 10))
    wide.save(tmp_path / "wide.png")
    assert read_image(tmp_path / "wide.png").shape == (1, 10, 30)
    middle = read_image(tmp_path / "wide.png", (5, 5))
    assert middle.shape == (3, 5, 5)
    assert middle[:, :, 2].min() == 1.0


def test_a_folder_is_read_as_people_see_it(tmp_path: Path) -> None:
    """In the natural order of names, of captions and of frames; hidden files and folders are left out."""
    names = ["1", "2", "10", "a/2b", "a/10", ".ipynb_checkpoints/1-checkpoint", ".Trash-1000/files/old", "._2"]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), number).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a fox")
    found = [prompt.image for prompt in read_images(tmp_path, check=anything)]
    assert found == [tmp_path / f"{name}.png" for name in names[:5]]
    assert [frame.getpixel((0, 0)) for frame in kinds.read_video(tmp_path)] == [(number,) * 3 for number in range(3)]
    assert kinds.count_frames(tmp_path) == 3


def test_folders_of_kohya_have_weights_and_captions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By their names, if all have such ones; a file .caption beside an image comes first."""
    for name in ("10_red fox", "2_owl"):
        painted(tmp_path / name, captions=False)
    (tmp_path / "2_owl" / "b.caption").write_text("an owl")
    found = {(prompt.text, prompt.weight) for prompt in read_images(tmp_path, check=anything)}
    assert found == {("red fox", 10.0), ("owl", 2.0), ("an owl", 2.0)}
    assert "the weights of kohya's folders: 2_owl 2, 10_red fox 10" in capfd.readouterr().err
    painted(tmp_path / "others")
    with pytest.raises(UsageError, match=r"2_owl.a\.png has no caption"):
        read_images(tmp_path, check=anything)


def written(name: str, text: str | None) -> Callable[[Path], Path]:
    """Return what makes a folder of images in which a file has another text, or is missing."""

    def make(folder: Path) -> Path:
        painted(folder)
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)
        return folder

    return make


def table(*rows: dict[str, Any]) -> Callable[[Path], Path]:
    return written("metadata.jsonl", "\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (written("b.txt", None), "b.png has no caption: write b.txt beside it, or metadata.jsonl"),
        (written("b.png", None), "the caption b.txt has no image of the same name"),
        (written("b.txt", " \n"), "b.png has an empty caption in b.txt"),
        (written("b.txt", "one two three four"), "b.png: prompt 'one two three four' is long"),
        (written("b.txt", "a cow"), "b.png: 'a cow' is held out for evaluation, never trained on"),
        (table({"file_name": "z.png", "text": "x"}), "line 1, column image names z.png, which does not exist in"),
        (table({"file_name": "a.png"}), "line 1 has no column prompt or text or caption, it has image"),
        (table({"text": "x"}), "line 1 has no column image or file_name, it has text"),
        (lambda folder: written("b.txt", "a fox")(folder) / "b.txt", "b.txt is text, expected a folder of images"),
        (lambda folder: folder.parent, "holds no images, expected some with captions"),
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


def test_an_encoder_that_encloses_another_number_is_another(tmp_path: Path, one: World) -> None:
    """Where the settings do not say all, an image that is there is encoded again and compared."""
    images = images_of(tmp_path)
    for factor, says in ((2.0, None), (2.0, None), (3.0, r"cache holds another sample of .*a\.png than encode returns")):
        made = cache(tmp_path, lambda images, factor=factor: images[:, :, ::2, ::2] * factor, compare=True)
        with nullcontext() if says is None else pytest.raises(UsageError, match=says):
            made.fill(images, one)


def test_an_image_is_known_by_its_bytes(tmp_path: Path, one: World) -> None:
    """Whatever its name, size and time are, as of unpacked archives."""
    first, _, last = (image for (image,) in images_of(tmp_path))
    first.write_bytes(stored(Image.new("RGB", (6, 4), COLOURS["a"]), "BMP"))
    cache(tmp_path).fill([(first,)], one)
    moved, encode = last.rename(tmp_path / "moved.png"), Encoder()
    moved.write_bytes(first.read_bytes())
    before = first.stat()
    first.write_bytes(stored(Image.new("RGB", (6, 4), COLOURS["c"]), "BMP"))
    assert first.stat().st_size == before.st_size
    os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))
    made = cache(tmp_path, encode)
    made.fill([(moved,)], one)
    assert encode.count == 0
    made.fill([(first,)], one)
    torch.testing.assert_close(made.sample(first), Encoder()(read_image(first)[None])[0])


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
    with pytest.raises(UsageError, match=r"a\.png gives a sample of \[3, 2, 3\], expected \[3, 4, 4\]"):
        cache(tmp_path / "other", shapes={None: (3, 4, 4)}).fill(images_of(tmp_path), one)
    cache(tmp_path).fill(images_of(tmp_path), one)
    for changes, says in (
        ({"settings": {"encoder": "thirds"}}, r"other settings \(encoder halves there and thirds here\)"),
        ({"shapes": {Size(4, 8): (3, 2, 3)}}, "size None there and 8x4 here"),
    ):
        with pytest.raises(UsageError, match=says):
            cache(tmp_path, **changes).fill([], one)
    (tmp_path / "cache" / MANIFEST).write_text("{")
    with pytest.raises(UsageError, match="cannot be read: delete the folder"):
        cache(tmp_path).fill([], one)


def test_a_full_disk_loses_nothing(tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; the images that were written are not encoded again."""
    images, write = images_of(tmp_path), image_cache.save_tensors

    def full(tensors: Any, path: Path) -> None:
        if len([*(tmp_path / "cache").glob("*.safetensors")]) == 2:
            raise OSError(28, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(image_cache, "save_tensors", full)
    with pytest.raises(RunError, match="No space left on device; encoded images are kept, start again to continue"):
        cache(tmp_path).fill(images, one)
    monkeypatch.setattr(image_cache, "save_tensors", write)
    encode = Encoder()
    cache(tmp_path, encode).fill(images, one)
    assert encode.count == 1
