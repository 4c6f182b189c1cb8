"""The prompt of a request, with its images, videos and sounds: files in the server's own folders, or data URLs."""

import base64
import binascii
from stat import S_ISREG

from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import convert_errors
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.rollout.policy import Policy
from fluvial.engines.extensions.wire.request import RolloutRequest
from fluvial.models.images import open_image
from fluvial.models.replay.kinds import SOUND, VIDEO, check_pixels
from fluvial.models.replay.media import find_list_arguments, list_arguments

MOST_NAME = 4096  # characters
FORMATS = ("PNG", "JPEG", "WEBP")  # decoders that a stranger's bytes reach


def prompt_of(request: RolloutRequest, policy: Policy, *, most_bytes: int, most_pixels: int) -> Prompt:
    """Return the prompt of a request with the images that the pipeline is given.

    Args:
        most_bytes: largest file of an image.
        most_pixels: largest image or video. An image's is known from its header, before anything is decoded.

    Raises:
        RequestError: there are other images than the model was recorded with, or one cannot be read.
    """
    expected, given = list_arguments(policy.model), request.image_path or ()
    names = request.fluvial.media if request.fluvial.media is not None else expected
    if given and not expected:
        raise RequestError(
            "image_path is set, and this server makes samples from prompts alone: leave it out, or serve a pipeline that "
            "takes images with --prompts, a file of prompts with images"
        )
    if request.fluvial.media is None and len(expected) == 1:  # of which there may be several
        names = expected * len(given)
    if len(given) != len(names) or {*names} != {*expected}:
        got = f"{len(given)} images" + (f" ({', '.join(names)})" if request.fluvial.media else "")
        raise RequestError(f"image_path holds {got}, expected {len(expected)}: {', '.join(expected) or 'none'}")
    lists = find_list_arguments(policy.model)
    for name in names:
        if (count := names.count(name)) > 1 and name not in lists:
            raise RequestError(f"image_path holds {count} images for {name}, expected one")
    media: dict[str, bytes | tuple[bytes, ...]] = {}
    for name, image in zip(names, given, strict=True):
        file = check_file(_file(image, policy, most_bytes), name, most_pixels)
        media[name] = (*media.get(name, ()), file) if name in lists else file
    return Prompt(request.prompt, media=media)


def _file(image: str, policy: Policy, most_bytes: int) -> bytes:
    """Return the bytes of an image's file."""
    if image.startswith("data:"):
        head, _, data = image.partition(",")
        if not head.endswith(";base64"):
            raise RequestError(f"image_path holds {head[:40]!r}, expected data:image/png;base64,...")
        try:
            found = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise RequestError("image_path holds a data URL whose base64 cannot be read") from None
    else:
        if len(image) > MOST_NAME:
            raise RequestError(f"image_path holds a name of {len(image)} characters, expected at most {MOST_NAME}")
        path = policy.weights.inside(image)
        if not S_ISREG(path.stat().st_mode):
            raise RequestError(f"image_path holds {image!r}, which is no file")
        if (size := path.stat().st_size) > most_bytes:
            raise RequestError(f"{image!r} has {size} bytes, expected at most {most_bytes}", 413)
        with convert_errors(RequestError, OSError, says=f"{str(path)!r} cannot be read"):
            found = path.read_bytes()
    if len(found) > most_bytes:
        raise RequestError(f"an image of image_path has {len(found)} bytes, expected at most {most_bytes}", 413)
    return found


def check_file(file: bytes, name: str, most_pixels: int) -> bytes:
    """Return the bytes of a file that is an image or a video of at most `most_pixels`, or a WAV file, by its argument."""
    if name in SOUND.arguments and not file.startswith(b"RIFF"):
        raise RequestError(f"image_path: {name} cannot be read as WAV")
    if name in SOUND.arguments:
        return file
    if name in VIDEO.arguments:
        with convert_errors(RequestError, ValueError, says=f"image_path: {name}"):
            check_pixels(file, most_pixels)
        return file
    try:
        with open_image(file, formats=FORMATS) as image:
            width, height = image.size
    except ValueError:
        raise RequestError(f"image_path: {name} cannot be read as {', '.join(FORMATS)}") from None
    if width * height > most_pixels:
        raise RequestError(f"image_path: {name} has {width} x {height} pixels, expected at most {most_pixels}", 413)
    return file
