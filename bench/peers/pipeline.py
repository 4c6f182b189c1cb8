"""Base of the projects' adapters: diffusers' SD3 pipeline with the transformer of the work and peft's LoRA.

`PeerPasses` is the transformer alone, with peft's or fluvial's LoRA: the minimum cost of both sides.
"""

from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fluvial.bench.peers.work import PeerRollout, Sampled, Work
from fluvial.models.lora import add_lora, find_adapter_parameters

PREFIX, SUFFIX = "base_model.model.", ".default"
VAE_SCALE = 8


class FreeVae(nn.Module):
    """A VAE without cost, because decoding is not part of the work."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            block_out_channels=(1,) * 4, scaling_factor=1.0, shift_factor=0.0, latent_channels=1, in_channels=1
        )
        self.dtype, self.device = torch.float32, device

    def decode(self, latents: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        """Return the latents."""
        return (latents,)


def build_pipeline(work: Work) -> Any:
    """Build a StableDiffusion3Pipeline without encoders; its transformer has the adapters of the work."""
    import peft
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline(
        transformer=work.model.build().to(work.device),
        scheduler=work.make_scheduler(),
        vae=FreeVae(work.device),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.requires_grad_(False)
    config = peft.LoraConfig(r=work.lora.rank, lora_alpha=work.lora.alpha, target_modules=list(work.lora.targets or ()))
    pipeline.transformer = peft.get_peft_model(pipeline.transformer, config)
    work.fill(list_adapter_parameters(pipeline.transformer))
    return pipeline


def list_adapter_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters of a PeftModel by fluvial's short names."""
    return {
        name.removeprefix(PREFIX).replace(SUFFIX, ""): p for name, p in transformer.named_parameters() if p.requires_grad
    }


class Peer(ABC):
    """Another project's code on the work.

    Args:
        work: the work.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.pipeline = work, build_pipeline(work)
        self.module: Any = self.pipeline.transformer  # the network that the project's code calls
        if work.ranks > 1:
            self.shard()
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(parameters, lr=work.lr, betas=(0.9, 0.999), weight_decay=0.0, eps=1e-8)
        self.pixels = {"height": work.size.event[-2] * VAE_SCALE, "width": work.size.event[-1] * VAE_SCALE}
        self.embeddings = {
            "prompt_embeds": work.cond.tokens,
            "pooled_prompt_embeds": work.cond.pooled,
            "negative_prompt_embeds": work.uncond.tokens,
            "negative_pooled_prompt_embeds": work.uncond.pooled,
        }

    def shard(self) -> None:  # noqa: B027
        """Distribute the network over the processes, before its optimizer is built, if the project does so itself."""

    def average_over_ranks(self, loss: float) -> float:
        """Return the mean of the processes' losses, which the project's driver computes (4 bytes)."""
        if self.work.ranks == 1:
            return loss
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return float(total) / self.work.ranks

    def rollout(self) -> Sampled:
        """Generate a rollout from noise that the project draws; not called if `Project.samples` is False."""
        raise NotImplementedError

    def set_micro_batch(self, samples: int) -> None:
        """Set the samples of a step per forward pass of the update; not called if `Project.micro_batches` is False."""
        raise NotImplementedError

    @abstractmethod
    def log_prob(self, x: Tensor, x_next: Tensor) -> Tensor:
        """Compute the log-probabilities of recorded steps, `[B, S, *event]` -> `[B, S]`."""

    @abstractmethod
    def update(self, stored: PeerRollout) -> float:
        """Take one optimizer step on a stored rollout, and return the loss before it."""

    def read_gradients(self) -> dict[str, Tensor]:
        """Return the scaled gradient of the first update from AdamW's first moment, by the adapters' short names."""
        moments = {name: self.optimizer.state[p]["exp_avg"] for name, p in list_adapter_parameters(self.module).items()}
        return {name: m.full_tensor() if isinstance(m, DTensor) else m.clone() for name, m in moments.items()}


class PeerPasses:
    """Passes of a transformer over both halves of guidance; their inputs cost nothing.

    Args:
        work: the work.
        peft: use peft's LoRA, as the projects do, instead of fluvial's.
    """

    def __init__(self, work: Work, *, peft: bool) -> None:
        self.work = work
        if peft:
            self.module: Any = build_pipeline(work).transformer
        else:
            self.module = work.model.build().to(work.device)
            add_lora(self.module, work.lora, ())
            work.fill(dict(find_adapter_parameters(self.module, "default")))
        self.timestep = work.make_scheduler().timesteps[0].to(work.device)
        self.halves = [torch.cat(halves) for halves in zip(work.cond, work.uncond, strict=True)]

    def predict(self, pairs: int) -> Tensor:
        """Run a pass over `pairs` (sample, step) pairs, with 2 * `pairs` rows because of guidance."""
        tokens, pooled = (half.repeat(-(-pairs // self.work.samples), *[1] * (half.ndim - 1)) for half in self.halves)
        x = torch.ones(2 * pairs, *self.work.size.event, device=self.work.device)
        prediction: Tensor = self.module(
            hidden_states=x,
            encoder_hidden_states=tokens[: len(x)],
            pooled_projections=pooled[: len(x)],
            timestep=self.timestep.expand(len(x)),
            return_dict=False,
        )[0]
        return prediction

    def rollout(self) -> None:
        """Run the forward passes of a rollout."""
        with torch.no_grad():
            for _ in range(self.work.steps):
                self.predict(self.work.samples)

    def run_passes(self, pairs: int) -> None:
        """Run the forward and backward passes of an update."""
        left = self.work.samples * len(self.work.recorded)
        while left > 0:
            self.predict(pairs).sum().backward()
            left -= pairs
        for parameter in self.module.parameters():
            parameter.grad = None
