"""Rewards of a server that speaks Flow-Factory's JSON: POST /compute."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fluvial.engines.errors import UsageError
from fluvial.engines.rewards.clients import images as wire
from fluvial.engines.rewards.clients.parallel import in_batches
from fluvial.engines.rewards.clients.replies import field, scores
from fluvial.engines.wire.client import HttpClient


class FlowFactory:
    """Scores of a Flow-Factory reward server; images travel as PNG files, videos as lists of them.

    Source of the format: Flow-Factory, `reward_server/example_server.py`.

    Args:
        server: the server.
        batch: largest number of samples per request.
    """

    def __init__(self, server: HttpClient, *, batch: int = 16) -> None:
        if batch < 1:
            raise UsageError("batch", batch, "at least 1")
        self.server, self.batch = server, batch

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the server's score of each sample, `[B]`; NaN for one that it has none of.

        Raises:
            RunError: no request succeeded.
        """
        samples = wire.on_host(images, prompts)

        def scored(part: slice) -> list[float]:
            answer = self.server.post("/compute", self._payload(samples[part], [*map(str, prompts[part])]))
            where = f"{self.server.address}/compute"
            return scores(field(answer, "rewards", where=where), len(samples[part]), where=f"{where}: rewards")

        return in_batches(scored, len(samples), batch=self.batch, at_once=self.server.in_flight)

    def _payload(self, samples: Tensor, prompts: list[str]) -> dict[str, Any]:
        files = [[wire.as_text(wire.png(frame)) for frame in wire.frames(sample)] for sample in samples]
        videos = samples.ndim == 5
        return {
            "prompt": prompts,
            "image": None if videos else [file for (file,) in files],
            "video": files if videos else None,
            "condition_images": None,
            "condition_videos": None,
        }
