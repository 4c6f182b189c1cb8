"""Forms with files, as browsers and HTTP clients send them (multipart/form-data, RFC 7578)."""

import re
from email.message import Message
from typing import NamedTuple

from fluvial.engines.extensions.servers.asgi import RequestError

FORM = "multipart/form-data"
MOST_FIELDS = 64


class Field(NamedTuple):
    """A field of a form; a file has a file name."""

    name: str
    data: bytes
    file: str | None


def read_form(body: bytes, content_type: str) -> list[Field]:
    """Return the fields of a form in their order; RequestError if it is none, or has more than `MOST_FIELDS`."""
    match = re.fullmatch(rf'{FORM};.*?boundary="?([\w\'()+,./:=? -]{{1,70}})"?(;.*)?', content_type.strip(), re.IGNORECASE)
    if match is None:
        raise RequestError(f"the content type is {content_type[:60]!r}, expected {FORM} with a boundary", 415)
    line = b"\r\n--" + match[1].encode()
    if (b"\r\n" + body).count(line) > MOST_FIELDS + 1:
        raise RequestError(f"the form has more than {MOST_FIELDS} fields", 413)
    before, *parts = (b"\r\n" + body).split(line)
    if before.strip() or not parts or not parts[-1].startswith(b"--"):
        raise RequestError("the form is cut off, or is none")
    return [_read_field(part) for part in parts[:-1]]


def _read_field(part: bytes) -> Field:
    head, separator, data = part.partition(b"\r\n\r\n")
    header = Message()
    for line in head.decode("utf-8", "replace").split("\r\n"):
        title, _, value = line.partition(":")
        if title.strip().lower() == "content-disposition":
            header["content-disposition"] = value.strip()
    name, file = (header.get_param(each, header="content-disposition") for each in ("name", "filename"))
    if not separator or not isinstance(name, str):
        raise RequestError("a field of the form has no name")
    return Field(name, data, file if isinstance(file, str) else None)
