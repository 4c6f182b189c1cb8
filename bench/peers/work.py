"""The work that both sides do: one SD3 transformer, its prompts, schedule and LoRA, and what a side answers with.

Nothing here knows a project. Both sides start from the same weights and get the same tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fluvial.bench.update.cases import NetworkSize
from fluvial.core.random import fold_in, key, normal
from fluvial.core.step import KLWeight
from fluvial.models import LoraConfig
from fluvial.models.handwriting import Handwriting
from fluvial.models.handwriting.model import CodeCond
from fluvial.models.pipelines.sd3 import SD3

Halves = Literal["both", "conditional"]  # of guidance: those that the gradient flows through

CPU = torch.device("cpu")

# Streams of the drawn inputs, folded into `ROOT`.
ROOT = key(13)
TOKENS, POOLED, LORA, ADVANTAGE, SHIFT = range(5)
LORA_CONFIG = LoraConfig(targets=SD3.lora_targets)


class Sampled(NamedTuple):
    """A rollout as a side returns it."""

    x: Tensor  # [B, S + 1, *event]: sample before the first recorded step, and the samples after each of the S steps
    log_prob: Tensor  # [B, S], in nats per dimension


class StoredRollout(NamedTuple):
    """A rollout as both sides are given it for an update."""

    x: Tensor  # [B, S, *event] before each recorded step
    x_next: Tensor  # [B, S, *event] after it
    log_prob: Tensor  # [B, S], the old log-probabilities
    advantage: Tensor  # [B]


@cache  # encoding is not part of the work: the projects are given embeddings, too
def _draw_embeddings(numbers: tuple[int, ...], tokens: int, width: int, pooled: int) -> CodeCond:
    rows = fold_in(ROOT, torch.tensor(numbers))
    return CodeCond(
        normal(fold_in(rows, TOKENS), (len(numbers), tokens, width)), normal(fold_in(rows, POOLED), (len(numbers), pooled))
    )


class PeerModel(Handwriting):
    """SD3's transformer of a size with random weights; each prompt is the number of a row of random embeddings.

    Args:
        size: transformer and shape of its inputs.
    """

    def __init__(self, size: NetworkSize) -> None:
        super().__init__(None)
        self.size = size

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the transformer with random weights, the same in each call."""
        return self.size.build("full", torch.device("cpu"))

    def latent_shape(self, height: int | None = None, width: int | None = None, frames: int = 1) -> tuple[int, ...]:
        """Return the only shape."""
        return self.size.event

    def check_prompt(self, prompt: str) -> None:
        """Accept every number."""
        int(prompt)

    def encode(self, prompts: Sequence[str]) -> CodeCond:
        """Return random embeddings: one row per number, and row 0 for the empty prompt."""
        settings = self.size.settings
        widths = settings["joint_attention_dim"], settings["pooled_projection_dim"]
        return _draw_embeddings(tuple(int(prompt or 0) for prompt in prompts), self.size.tokens, *widths)


@dataclass(frozen=True)
class Work:
    """The work of both sides.

    Args:
        size: transformer and shape of its inputs.
        samples: samples per rollout and rank, which go through one forward pass.
        steps: steps of the schedule.
        window: the steps that are stochastic, recorded and trained on; the others are the ODE's. None is all of them.
        rank, ranks: index of this process, and their number; each rank has samples of its own.
        gradient: halves of guidance that the gradient flows through, as the project has it.
        device: device of both sides.
        scale: guidance scale.
        eta: scale of Flow-SDE's noise.
        clip: half-width of the ratio's range.
        kl: weight of the KL term to the network without adapters; 0 leaves the term out.
        kl_weight: weight of the KL of a step, as the project has it.
        lr: learning rate of AdamW, so small that timed updates stay where they started.
        max_grad_norm: bound of the gradient's norm; the default never clips, because gradients are compared.
        lora: adapters of the layers that both projects adapt.
    """

    size: NetworkSize
    samples: int = 8
    steps: int = 10
    window: range | None = None
    rank: int = 0
    ranks: int = 1
    gradient: Halves = "both"
    device: torch.device = CPU
    scale: float = 4.5
    eta: float = 0.7
    clip: float = 1e-3
    kl: float = 0.0
    kl_weight: KLWeight = "rate"
    lr: float = 1e-6
    max_grad_norm: float = 1e9
    lora: LoraConfig = LORA_CONFIG

    @property
    def model(self) -> PeerModel:
        """Adapter of the transformer."""
        return PeerModel(self.size)

    @property
    def recorded(self) -> range:
        """The recorded steps."""
        return range(self.steps) if self.window is None else self.window

    @property
    def ids(self) -> range:
        """Indices of this rank's samples among those of all ranks."""
        return range(self.rank * self.samples, (self.rank + 1) * self.samples)

    @property
    def prompts(self) -> list[str]:
        """One prompt per sample of this rank."""
        return [str(number + 1) for number in self.ids]

    @property
    def cond(self) -> CodeCond:
        """Embeddings of the prompts."""
        return self._on_device(self.model.encode(self.prompts))

    @property
    def uncond(self) -> CodeCond:
        """Embeddings of the negative prompt, one row per sample."""
        return self._on_device(self.model.encode([""] * self.samples))

    @property
    def advantage(self) -> Tensor:
        """An advantage per sample of this rank, `[B]`."""
        drawn = normal(fold_in(ROOT, ADVANTAGE), (self.ranks * self.samples,))
        return drawn[self.ids.start : self.ids.stop].to(self.device)

    def shift_log_prob(self, log_prob: Tensor) -> Tensor:
        """Return log-probabilities moved by about the clip range, so that some ratios are clipped and others are not."""
        return log_prob + 2 * self.clip * normal(fold_in(ROOT, SHIFT), tuple(log_prob.shape), device=log_prob.device)

    def _on_device(self, cond: CodeCond) -> CodeCond:
        return CodeCond(*(tensor.to(self.device) for tensor in cond))

    @torch.no_grad()
    def fill(self, adapter: Mapping[str, Tensor]) -> None:
        """Give the adapters' factors their values, by their short names; B is not 0, so that A has a gradient, too."""
        for number, name in enumerate(sorted(adapter)):
            factor = adapter[name]
            value = 0.05 * normal(fold_in(fold_in(ROOT, LORA), number), tuple(factor.shape))
            if isinstance(factor, DTensor):  # each rank holds its part
                value = distribute_tensor(value, factor.device_mesh, factor.placements)
            factor.copy_(value)

    def make_scheduler(self) -> Any:
        """Return diffusers' scheduler with the schedule of the work."""
        return self.model.scheduler(self.steps)
