"""Samples made in this process, by the engine's own network."""

from collections.abc import Generator

from fluvial.engines.sampling.generate import Chunk, Requests, Sampling, generate
from fluvial.engines.sampling.source import Behaviour, Holder, RolloutSource
from fluvial.models import DiffusionModel


class InProcess(RolloutSource):
    """Source of samples that shares the trainer's weights.

    Args:
        behaviour: opens the network that makes the rollouts.
    """

    def __init__(self, model: DiffusionModel, behaviour: Behaviour) -> None:
        self.model, self.behaviour = model, behaviour
        self._version = 0

    def generate(self, requests: Requests, sampling: Sampling, *, micro_batch: int) -> Generator[Chunk, None, None]:
        """Yield the requested samples, see `RolloutSource`."""
        with self.behaviour() as module:
            for chunk in generate(self.model, module, requests, sampling, micro_batch=micro_batch):
                yield chunk._replace(version=self._version)

    def push(self, engine: Holder, version: int) -> None:
        """Note the version; the weights are shared."""
        self._version = version
