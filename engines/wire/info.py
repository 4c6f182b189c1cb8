"""Description of a rollout server: the answer to GET /v1/model_info."""

from typing import Literal

from msgspec import Struct

Kind = Literal["fluvial", "sglang"]  # server of `fluvial serve`, or any other with sglang's endpoints


class ServerInfo(Struct, frozen=True):
    """What a server can do.

    Args:
        takes_options: whether it reads fluvial's own fields of a request, `FluvialOptions`.
        prediction: what its model predicts; None where it does not say.
        weight_version: number of updates that made its weights, or what another server calls them.
    """

    takes_options: bool = False
    prediction: str | None = None
    weight_version: int | str | None = None

    @property
    def kind(self) -> Kind:
        """The kind of server, for messages and records."""
        return "fluvial" if self.takes_options else "sglang"
