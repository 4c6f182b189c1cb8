"""Reachability of the Hugging Face Hub: offline, its client reads the cache at once, as with HF_HUB_OFFLINE=1."""

import functools
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

PROXIES = ("https_proxy", "all_proxy", "http_proxy")
SECONDS = 3.0  # timeout of an attempt to connect


@contextmanager
def probe_hub() -> Iterator[bool]:
    """Restrict the Hub's client to its cache inside the context if the Hub cannot be reached; yield whether it can be.

    One line on stderr reports an unreachable Hub. Without this, the client retries six times per file, for 23 seconds.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _is_reachable(constants.ENDPOINT):
        yield not constants.HF_HUB_OFFLINE
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield False
    finally:
        constants.HF_HUB_OFFLINE = False


@functools.cache
def _is_reachable(endpoint: str) -> bool:
    """Return whether the Hub's server accepts a connection; behind a proxy it counts as reachable."""
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXIES):
        return True
    parts = urlsplit(endpoint)
    try:
        socket.create_connection(
            (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)), SECONDS
        ).close()
    except OSError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{endpoint} cannot be reached ({error.strerror or error}): only its cache is read", file=sys.stderr)
        return False
    return True
