"""Servers that make the samples of a run, and how they are asked."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fluvial.core.checks import check_fields


@dataclass(frozen=True)
class ServersConfig:
    """How the servers that `rollout.source` names are asked.

    Args:
        timeout: Seconds that one request may take, from the connection to the last byte of the reply.
        patience: Seconds without a reply from any server after which the run ends; 10 at most until one has answered.
        in_flight: Largest number of requests at the same time, per server and process.
        most_mb: Largest reply, in megabytes.
        key_env: Environment variable with the API key of the servers. Empty sends none.
        admin_env: Environment variable with the key of the endpoints that change weights. Empty sends that of `key_env`.
        weights: How they are given the weights after an update: auto (an adapter as its file, all weights in a folder), disk
            (always all weights in a folder), or shared_memory (all weights in buckets, which `fluvial serve` on this machine
            reads).
        weights_folder: Folder that trainer and servers see, for these files; by default one in this machine's shared memory.
        weights_verify: Compare the checksum of a server's weights with the trainer's. A server that fuses or renames layers
            has another one, and needs False.
        tolerance: Largest |difference| between a server's log-probability of a step and the trainer's own, with which a run
            starts; with `correction.mode` it may be larger.
    """

    timeout: float = 600.0
    patience: float = 300.0
    in_flight: int = 8
    most_mb: int = 1024
    key_env: str = ""
    admin_env: str = ""
    weights: Literal["auto", "disk", "shared_memory"] = "auto"
    weights_folder: Path | None = None
    weights_verify: bool = True
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        check_fields(
            self,
            "rollout.servers",
            timeout=(1e-3, 1e6),
            patience=(0, 1e6),
            in_flight=(1, 1024),
            most_mb=(1, 2**20),
            tolerance=(0, math.inf),
        )
