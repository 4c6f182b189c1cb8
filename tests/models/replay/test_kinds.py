"""Files of images, videos and sounds: what is read is what was written, and what cannot be read is one line."""

import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.marks import Patch
from helpers.refusals import refuses
from PIL import Image

from fluvial.models.replay import kinds
from fluvial.models.replay.kinds import (
    KINDS,
    SOUND,
    VIDEO,
    Sound,
    check_pixels,
    count_frames,
    find_kind,
    read_sound,
    read_video,
)
from fluvial.models.replay.media import MediaPrompt, digest_source

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)


def images() -> list[Image.Image]:
    return [Image.fromarray(frame) for frame in FRAMES]


def as_npy(file: Path) -> Path:
    np.save(file.with_suffix(".npy"), FRAMES)
    return file.with_suffix(".npy")


def as_folder(file: Path) -> Path:
    file.mkdir()
    for number, frame in enumerate(images()):
        frame.save(file / f"{number:03d}.png")
    return file


def as_webp(file: Path) -> Path:
    images()[0].save(file.with_suffix(".webp"), save_all=True, append_images=images()[1:], lossless=True)
    return file.with_suffix(".webp")


def as_mkv(file: Path) -> Path:
    import av

    with av.open(file.with_suffix(".mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=8)
        stream.width, stream.height, stream.pix_fmt = 24, 16, "bgr0"
        for frame in FRAMES:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.with_suffix(".mkv")


WRITERS = (as_npy, as_folder, as_webp, as_mkv)


@pytest.mark.parametrize("write", WRITERS)
def test_frames_of_a_video_are_those_written(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Whatever the format, as a file and as bytes; an argument whose name says no kind is a video then."""
    file = write(tmp_path / "clip")
    sources: list[Path | bytes] = [file] if file.is_dir() else [file, file.read_bytes()]
    for source in sources:
        assert np.array_equal(np.stack([np.asarray(frame) for frame in read_video(source)]), FRAMES)
        assert count_frames(source) == len(FRAMES)
        assert find_kind("mask", source) is VIDEO


def pcm(width: int, channels: int = 2, count: int = 50) -> tuple[bytes, torch.Tensor]:
    numbers = np.random.default_rng(width).integers(-(2 ** (8 * width - 1)), 2 ** (8 * width - 1), (count, channels))
    with io.BytesIO() as file:
        with wave.open(file, "wb") as made:
            made.setnchannels(channels)
            made.setsampwidth(width)
            made.setframerate(400)
            stored = numbers + 128 if width == 1 else numbers
            whole = stored.astype("<i8").view(np.uint8).reshape(count, channels, 8)[..., :width]
            made.writeframes(whole.tobytes())
        return file.getvalue(), torch.from_numpy(numbers.T / 2 ** (8 * width - 1)).float()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sounds_of_whole_numbers_are_those_written(width: int) -> None:
    file, expected = pcm(width)
    found = read_sound(file)
    assert found.rate == 400
    torch.testing.assert_close(found.wave, expected, rtol=0, atol=0)
    assert find_kind("sound", file) is SOUND


def test_sounds_of_other_formats_are_read_by_ffmpeg(tmp_path: Path) -> None:
    import av

    numbers = np.random.default_rng(0).integers(-(2**15), 2**15, (2, 4096), dtype=np.int16)
    file = tmp_path / "sound.flac"
    with av.open(file, "w") as container:
        stream = container.add_stream("flac", rate=8000, layout="stereo", format="s16")
        frame = av.AudioFrame.from_ndarray(numbers.T.reshape(1, -1), format="s16", layout="stereo")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    found = read_sound(file)
    assert (found.rate, find_kind("tone", file)) == (8000, SOUND)
    torch.testing.assert_close(found.wave, torch.from_numpy(numbers / 2**15).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_changed_one_has_the_same_size_and_no_number_in_common(kind: kinds.MediaKind) -> None:
    """What is written is read again to the bit: it takes the place of a prompt's own to see whether that has an effect."""
    made: Any = {"image": images()[0], "video": images(), "audio": Sound(torch.rand(2, 40) - 0.7, 400)}[kind.name]

    def numbers(found: Any) -> np.ndarray[Any, Any]:
        frames = [found] if kind.name == "image" else found
        return np.asarray(found.wave) if kind is SOUND else np.stack([np.asarray(one) for one in frames])

    own = numbers(kind.read(kind.write(made)))
    other = numbers(kind.read(kind.write(kind.change(made))))
    assert own.shape == other.shape
    assert (own != other).mean() > 0.9
    np.testing.assert_allclose(own, numbers(made), atol=1e-4)


def test_what_is_no_video_or_sound_is_one_line(tmp_path: Path) -> None:
    images()[0].save(tmp_path / "still.png")
    (tmp_path / "words.mp4").write_text("no video")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "floats.npy", FRAMES / 255.0)
    (tmp_path / "silent.wav").write_bytes(pcm(2, count=0)[0])
    as_mkv(tmp_path / "clip")
    readers: tuple[tuple[Callable[[Path], Any], str, str, str], ...] = (
        (read_video, "video", "still.png", "it is a still image"),
        (read_video, "video", "words.mp4", ".*Invalid data"),
        (read_video, "video", "floats.npy", r"it is an array \[5, 16, 24, 3\] of float64"),
        (read_sound, "sound", "still.png", ""),
        (read_sound, "sound", "silent.wav", "it is empty$"),
        (read_sound, "sound", "clip.mkv", "it has no audio$"),
    )
    for read, kind, name, why in readers:
        refuses(f"{name} cannot be read as a {kind}: {why}", read, tmp_path / name)
    refuses("empty is a folder without images, expected the frames of a video", read_video, tmp_path / "empty")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(kinds, "find_spec", lambda name: None)
    assert read_sound(pcm(2)[0]).rate == 400
    assert len(read_video(as_webp(tmp_path / "clip"))) == len(FRAMES)
    refuses("clip.mkv cannot be read as a video: its format needs PyAV", read_video, as_mkv(tmp_path / "clip"))


@pytest.mark.parametrize("write", [as_npy, as_webp, as_mkv])
def test_a_strangers_video_has_no_more_pixels_than_allowed(write: Callable[[Path], Path], tmp_path: Path) -> None:
    file = write(tmp_path / "clip").read_bytes()
    check_pixels(file, 5 * 16 * 24)
    if write is not as_npy:
        refuses(r"^the video has more than 1919 pixels$", check_pixels, file, 5 * 16 * 24 - 1)
    refuses(r"a video of 8 bytes cannot be read as a video", check_pixels, b"no video", 100)


def test_a_playlist_is_no_video(tmp_path: Path) -> None:
    other = as_mkv(tmp_path / "clip")
    playlist = tmp_path / "clip.m3u8"
    playlist.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{other}\n#EXT-X-ENDLIST\n")
    for source in (playlist, playlist.read_bytes(), f"ffconcat version 1.0\nfile {other.name}\n".encode()):
        refuses("cannot be read as a video: ", read_video, source)


def test_prompts_are_equal_by_the_contents_of_all_their_files(tmp_path: Path) -> None:
    folder, other = as_folder(tmp_path / "one"), as_folder(tmp_path / "two")
    one = MediaPrompt("a fox", {"video": folder})
    assert one == MediaPrompt("a fox", {"video": other})
    images()[0].save(other / "004.png")
    assert one != MediaPrompt("a fox", {"video": other})
    first, second = folder / "000.png", folder / "001.png"
    pairs = [
        MediaPrompt("a fox", {"images": pair}) for pair in ((first, second), (second, first), (first.read_bytes(), second))
    ]
    assert pairs[0] == pairs[2] != pairs[1]
    assert digest_source((first, second)) == f"{digest_source(first)} {digest_source(second)}"
    assert [image.size for image in pairs[0].open_files()["images"]] == [(24, 16)] * 2
    assert pairs[0].change("images") != pairs[0]
