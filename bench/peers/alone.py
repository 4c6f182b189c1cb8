"""The transformer's passes alone, with fluvial's LoRA layers and with peft's: what neither side of a comparison can save."""

from typing import Any

import torch
from torch import Tensor, nn

from fluvial.bench.peers.pipeline import adapter_of, build_pipeline
from fluvial.bench.peers.work import Work
from fluvial.models.lora import adapter_parameters, add_lora


class _Passes:
    """The passes of a transformer over both halves of guidance; their inputs cost nothing.

    Args:
        module: the transformer.
        adapter: its adapters' factors by short name; they get the values of the work.
        work: what is done.
    """

    def __init__(self, module: Any, adapter: dict[str, nn.Parameter], work: Work) -> None:
        self.module, self.work = module, work
        self.timestep = work.scheduler().timesteps[0]
        self.halves = [torch.cat(halves) for halves in zip(work.cond, work.uncond, strict=True)]
        values = work.adapter({name: p.shape for name, p in adapter.items()})
        with torch.no_grad():
            for name, parameter in adapter.items():
                parameter.copy_(values[name])

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


class FluvialAlone(_Passes):
    """The transformer with fluvial's LoRA layers, and nothing around it.

    Args:
        work: what is done.
    """

    def __init__(self, work: Work) -> None:
        module = work.model.build()
        add_lora(module, work.lora, ())
        super().__init__(module, dict(adapter_parameters(module, "default")), work)


class PeftAlone(_Passes):
    """The transformer with peft's LoRA, as the projects have it.

    Args:
        work: what is done.
    """

    def __init__(self, work: Work) -> None:
        module = build_pipeline(work).transformer
        super().__init__(module, adapter_of(module), work)
