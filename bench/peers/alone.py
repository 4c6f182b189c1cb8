"""The transformer's passes alone, with fluvial's LoRA layers and with peft's: what neither side of a comparison can save."""

from typing import Any

import torch
from torch import Tensor

from fluvial.bench.peers.pipeline import build_pipeline
from fluvial.bench.peers.work import Work
from fluvial.models.lora import adapter_parameters, add_lora


class Passes:
    """The passes of a transformer over both halves of guidance; their inputs cost nothing.

    Args:
        work: what is done.
        peft: whether the transformer has peft's LoRA, as the projects have it, instead of fluvial's.
    """

    def __init__(self, work: Work, *, peft: bool) -> None:
        self.work = work
        if peft:
            self.module: Any = build_pipeline(work).transformer
        else:
            self.module = work.model.build()
            add_lora(self.module, work.lora, ())
            work.fill(dict(adapter_parameters(self.module, "default")))
        self.timestep = work.scheduler().timesteps[0]
        self.halves = [torch.cat(halves) for halves in zip(work.cond, work.uncond, strict=True)]

    def predict(self, pairs: int) -> Tensor:
        """Return the prediction of a pass over `pairs` (sample, step) pairs, which are as many samples twice."""
        tokens, pooled = (half.repeat(-(-pairs // self.work.samples), *[1] * (half.ndim - 1)) for half in self.halves)
        x = torch.ones(2 * pairs, *self.work.size.event)
        made: Tensor = self.module(
            hidden_states=x,
            encoder_hidden_states=tokens[: len(x)],
            pooled_projections=pooled[: len(x)],
            timestep=self.timestep.expand(len(x)),
            return_dict=False,
        )[0]
        return made

    def rollout(self) -> None:
        """Make the forward passes of a rollout."""
        with torch.no_grad():
            for _ in range(self.work.steps):
                self.predict(self.work.samples)

    def passes(self, pairs: int) -> None:
        """Make the forward and backward passes of an update."""
        left = self.work.samples * len(self.work.recorded)
        while left > 0:
            self.predict(pairs).sum().backward()
            left -= pairs
        for parameter in self.module.parameters():
            parameter.grad = None
