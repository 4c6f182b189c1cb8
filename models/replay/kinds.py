"""Kinds of media in prompts: images, videos and sounds, with the arguments of pipelines that take them, and their files."""

import io
import wave
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps
from torch import Tensor

from fluvial.models.images import ENDINGS, compute_sort_key, convert_image, describe_file, read_image

File = Path | bytes  # a file, or the bytes of one
NUMPY = b"\x93NUMPY"  # first bytes of an array of numpy
ANIMATED = ("GIF", "WEBP", "PNG")  # formats of animated images
# FFmpeg's demuxers that may read files: none of playlists, which name other files and addresses.
DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,flac,mp3,ogg,wav,aac"
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


class Sound(NamedTuple):
    """A sound."""

    wave: Tensor  # [channels, n] float32 in [-1, 1]
    rate: int  # numbers per second and channel


class Frames(list[Image.Image]):
    """The frames of a video, in colour.

    Args:
        rate: frames per second; None if the file does not name it.
    """

    def __init__(self, frames: Iterable[Image.Image], rate: float | None = None) -> None:
        super().__init__(frames)
        self.rate = rate


class MediaKind(NamedTuple):
    """One kind of media: images, videos or sounds."""

    name: str  # also the name of the column in a prompt's record
    arguments: tuple[str, ...]  # of the calls of diffusers' pipelines
    read: Callable[[File], Any]  # returns an image, `Frames`, or a `Sound`
    write: Callable[[Any], bytes]
    change: Callable[[Any], Any]  # returns media of the same size in which all numbers differ


def write_image(image: Image.Image) -> bytes:
    """Return an image as the bytes of a PNG file."""
    with io.BytesIO() as file:
        image.save(file, "PNG")
        return file.getvalue()


def invert(image: Image.Image) -> Image.Image:
    """Return an image of the same size whose pixels all differ: its negative, upside down."""
    return ImageOps.flip(ImageOps.invert(image))


def read_video(file: File) -> Frames:
    """Return the frames of a video.

    Args:
        file: a folder of images, in the order of their names; an animated image (GIF, WebP, PNG); an array of numpy,
            `[F, H, W, 3]` uint8; or, with PyAV, any file that FFmpeg reads, e.g. MP4.

    Raises:
        ValueError: the file cannot be read as a video, or needs PyAV, which is missing; the message names the file.
    """
    if isinstance(file, Path) and file.is_dir():
        frames = [read_image(one).convert("RGB") for one in list_frames(file)]
        if not frames:
            raise ValueError(f"{file} is a folder without images, expected the frames of a video")
        return Frames(frames)
    with _describe_errors(file, "video"):
        if _starts_with(file, NUMPY):
            return Frames(map(Image.fromarray, _load_array(file)))
        try:
            image = Image.open(_to_source(file))
        except Image.UnidentifiedImageError:
            pass
        else:
            with image:
                frames = [_read_frame(image, number) for number in range(_count_images(image))]
                milliseconds = image.info.get("duration")  # of the last frame; nearly all files have one duration
                return Frames(frames, 1000 / milliseconds if milliseconds else None)
        with _open_stream(file, "video") as (container, stream):
            rate = stream.average_rate
            return Frames((frame.to_image() for frame in container.decode(stream)), None if rate is None else float(rate))


def count_frames(file: File) -> int:
    """Return the number of frames of a video, from its header if that has it.

    Raises:
        ValueError: see `read_video`.
    """
    if isinstance(file, Path) and file.is_dir():
        return len(list_frames(file))
    with _describe_errors(file, "video"):
        if _starts_with(file, NUMPY):
            return len(_load_array(file))
        try:
            with Image.open(_to_source(file)) as image:
                return _count_images(image)
        except Image.UnidentifiedImageError:
            with _open_stream(file, "video") as (container, stream):
                return int(stream.frames) or sum(1 for _ in container.decode(stream))


def check_pixels(file: bytes, most: int) -> None:
    """Check that an untrusted video has at most `most` pixels; decoding stops beyond them.

    Raises:
        ValueError: the video has more pixels, or cannot be read, see `read_video`.
    """
    count = 0
    with _describe_errors(file, "video"):
        if _starts_with(file, NUMPY):
            return  # its pixels take no more memory than the bytes of the file
        try:
            with Image.open(io.BytesIO(file), formats=ANIMATED) as image:
                count = image.width * image.height * _count_images(image)
        except Image.UnidentifiedImageError:
            with _open_stream(file, "video") as (container, stream):
                for frame in container.decode(stream):
                    count += frame.width * frame.height
                    if count > most:
                        break
    if count > most:
        raise ValueError(f"the video has more than {most} pixels")


def write_video(frames: list[Image.Image]) -> bytes:
    """Return frames as the bytes of an array of numpy, `[F, H, W, 3]` uint8."""
    with io.BytesIO() as file:
        np.save(file, np.stack([np.asarray(frame.convert("RGB")) for frame in frames]))
        return file.getvalue()


def read_sound(file: File) -> Sound:
    """Return a sound: an integer WAV file, or, with PyAV, any file that FFmpeg reads, e.g. FLAC or MP3.

    Raises:
        ValueError: the file cannot be read as a sound, or needs PyAV, which is missing; the message names the file.
    """
    with _describe_errors(file, "sound"):
        if _starts_with(file, b"RIFF"):
            try:
                return _read_wav(file)
            except (wave.Error, EOFError):  # floating-point samples, or a codec
                pass
        with _open_stream(file, "audio") as (container, stream):
            from av.audio.resampler import AudioResampler

            plain = AudioResampler(format="fltp")  # float32, one plane per channel
            frames = [resampled for frame in container.decode(stream) for resampled in plain.resample(frame)]
            parts = [frame.to_ndarray() for frame in [*frames, *plain.resample(None)]]
            return Sound(torch.from_numpy(np.concatenate(parts, axis=1)).clamp(-1, 1), int(stream.rate))


def write_sound(sound: Sound) -> bytes:
    """Return a sound as the bytes of a WAV file of 16 bits."""
    numbers = (sound.wave.clamp(-1, 1) * (2**15 - 1)).round().short()
    with io.BytesIO() as file:
        with wave.open(file, "wb") as wav:
            wav.setnchannels(len(numbers))
            wav.setsampwidth(2)
            wav.setframerate(sound.rate)
            wav.writeframes(numbers.T.contiguous().numpy().tobytes())
        return file.getvalue()


IMAGE = MediaKind(
    "image",
    (
        "image",
        "mask_image",
        "control_image",
        "control_mask",
        "last_image",
        "reference_image",
        "image_reference",
        "ip_adapter_image",
        "images",
        "input_images",
        "reference_images",
    ),
    read_image,
    write_image,
    invert,
)
VIDEO = MediaKind(
    "video",
    ("video", "control_video", "pose_video", "face_video", "background_video", "mask_video", "driving_video"),
    read_video,
    write_video,
    lambda frames: [invert(frame) for frame in frames],
)
SOUND = MediaKind(
    "audio",
    ("audio", "src_audio", "reference_audio"),
    read_sound,
    write_sound,
    lambda sound: sound._replace(wave=0.5 - sound.wave.flip(1) / 2),
)
KINDS = (IMAGE, VIDEO, SOUND)
ARGUMENTS = tuple(name for kind in KINDS for name in kind.arguments)


def find_kind(argument: str, file: File) -> MediaKind:
    """Return the kind of an argument of a pipeline's call; that of the file if the argument's name is unknown, as `mask`."""
    named = next((kind for kind in KINDS if argument in kind.arguments), None)
    if named is not None:
        return named
    if isinstance(file, Path) and file.is_dir():
        return VIDEO
    try:
        with Image.open(_to_source(file)) as image:
            return VIDEO if getattr(image, "n_frames", 1) > 1 else IMAGE
    except UNREADABLE:
        pass
    if _starts_with(file, NUMPY):
        return VIDEO
    if _starts_with(file, b"RIFF") or find_spec("av") is None:
        return SOUND
    import av

    try:
        with _open_bytes(file) as stream, av.open(stream, options={"format_whitelist": DEMUXERS}) as container:
            return VIDEO if container.streams.video else SOUND
    except UNREADABLE:
        return IMAGE


def _to_source(file: File) -> BinaryIO | Path:
    return io.BytesIO(file) if isinstance(file, bytes) else file


def _open_bytes(file: File) -> BinaryIO:
    return io.BytesIO(file) if isinstance(file, bytes) else file.open("rb")


def _starts_with(file: File, first: bytes) -> bool:
    with _open_bytes(file) as stream:
        return stream.read(len(first)) == first


@contextmanager
def _describe_errors(file: File, kind: str) -> Iterator[None]:
    """Turn an error of reading a file into a ValueError of one line that names the file."""
    try:
        yield
    except UNREADABLE as error:
        raise ValueError(
            f"{describe_file(file, kind)} cannot be read as a {kind}: {' '.join(str(error).split())}"
        ) from error


@contextmanager
def _open_stream(file: File, part: str) -> Iterator[tuple[Any, Any]]:
    """Yield the container of a file that FFmpeg reads, and its first stream of video or audio."""
    if find_spec("av") is None:
        raise ValueError("its format needs PyAV, which is not installed: pip install av")
    import av

    with _open_bytes(file) as stream, av.open(stream, options={"format_whitelist": DEMUXERS}) as container:
        streams = getattr(container.streams, part)
        if not streams:
            raise ValueError(f"it has no {part}")
        yield container, streams[0]


def list_frames(folder: Path) -> list[Path]:
    """Return the images of a folder in the natural order of their names, without hidden ones."""
    files = (file for file in folder.iterdir() if file.suffix.lower() in ENDINGS and not file.name.startswith("."))
    return sorted(files, key=compute_sort_key)


def _count_images(image: Image.Image) -> int:
    """Return the number of frames of an animated image; ValueError for a still one."""
    count = int(getattr(image, "n_frames", 1))
    if count == 1:
        raise ValueError("it is a still image")
    return count


def _read_frame(image: ImageFile.ImageFile, number: int) -> Image.Image:
    image.seek(number)
    return convert_image(image).convert("RGB")


def _load_array(file: File) -> Any:
    """Return the array of a file of numpy, `[F, H, W, 3]` uint8."""
    frames = np.load(_to_source(file), allow_pickle=False)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise ValueError(
            f"it is an array {list(frames.shape)} of {frames.dtype}, expected [frames, height, width, 3] of uint8"
        )
    return frames


def _read_wav(file: File) -> Sound:
    """Return the sound of an integer WAV file."""
    with _open_bytes(file) as stream, wave.open(stream, "rb") as wav:
        width, channels, rate = wav.getsampwidth(), wav.getnchannels(), wav.getframerate()
        data = wav.readframes(wav.getnframes())
    raw = np.frombuffer(data, dtype=np.uint8)
    if width == 1:  # unsigned
        numbers = raw.astype(np.int32) - 2**7
    else:  # the highest bytes of 32 bits, in two's complement
        wide = np.zeros((len(raw) // width, 4), dtype=np.uint8)
        wide[:, 4 - width :] = raw[: len(raw) // width * width].reshape(-1, width)
        numbers = wide.view("<i4")[:, 0] >> 8 * (4 - width)
    scaled = torch.from_numpy(np.ascontiguousarray(numbers)).float() / 2 ** (8 * width - 1)
    if not scaled.numel():
        raise ValueError("it is empty")
    return Sound(scaled.view(-1, channels).T.contiguous(), rate)
