"""Servers as weight sync sees them: what is asked of them, and what their answers say."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from fluvial.engines.errors import RunError
from fluvial.engines.wire.weight_buckets import PRECISIONS, UNKNOWN

Dtype = torch.dtype | None  # of a server's weights; None where it does not say, and then the trainer's own
Sums = dict[str, str]  # checksum by name of a network


class Peer(Protocol):
    """A server that takes weights, e.g. an `HttpClient`."""

    @property
    def address(self) -> str:
        """The server's address."""
        ...

    def get(self, path: str) -> Any:
        """Return the JSON at a path; RunError if there is none."""
        ...

    def post(self, path: str, value: Any) -> Any:
        """Return the JSON that is answered to a value; RunError if the server fails or refuses."""
        ...


def accepted(peer: Peer, path: str, value: Mapping[str, Any]) -> None:
    """Post a change of the weights.

    Raises:
        RunError: the server does not say that it was made.
    """
    answer = peer.post(path, value)
    if isinstance(answer, Mapping) and answer.get("success") is False:
        raise RunError(f"{peer.address}{path} refused: {str(answer.get('message'))[:160]}")


def checksums(peer: Peer, names: Collection[str]) -> Sums:
    """Return the checksums that a server reports; "not_found" for what it does not know."""
    answer = peer.post("/get_weights_checksum", {"module_names": [*names]})
    found = {name: _found(answer, name) for name in names}
    return {name: value if isinstance(value, str) else UNKNOWN for name, value in found.items()}


def precision(peer: Peer) -> Dtype:
    """Return the dtype of a server's weights."""
    return PRECISIONS.get(str(_found(peer.get("/v1/models"), "dit_precision")))


def _found(value: Any, key: str) -> Any:
    """Return the value of a key anywhere in JSON, because servers nest their answers differently; None if it is nowhere."""
    if isinstance(value, Mapping):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((found for each in value if (found := _found(each, key)) is not None), None)
    return None
