"""Flow-GRPO (yifan123/flow_grpo): its SD3 pipeline with log-probabilities, and the training loop of `scripts/train_sd3.py`.

The project's code runs: `pipeline_with_logprob`, `sde_step_with_logprob`, `compute_log_prob`, and the loop over inner epochs
in `main`, with accelerate, which wraps the transformer in DDP for several processes. Work with a window runs on its fast
pipeline and `scripts/train_sd3_fast.py`. Its progress bars and the upload of logged numbers are left out.
"""

import contextlib
import importlib
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fluvial.bench.peers import clone
from fluvial.bench.peers.pipeline import Peer
from fluvial.bench.peers.work import Halves, PeerRollout, Sampled, Work
from fluvial.models.device import is_accelerator


def find_halves(folder: Path) -> Halves:
    """Return the halves of guidance that the clone's update differentiates: commits of 2025 detach the unconditional one."""
    detached = "noise_pred_uncond.detach()" in (folder / "scripts" / "train_sd3.py").read_text(encoding="utf-8")
    return "conditional" if detached else "both"


class FlowGrpoPeer(Peer):
    """Flow-GRPO's code on the work.

    Args:
        folder: clone of the project.
        work: the work.
    """

    def __init__(self, folder: Path, work: Work) -> None:
        from accelerate import Accelerator

        super().__init__(work)
        with clone.make_importable(folder):
            fast = "_fast" if work.window is not None else ""
            patch = importlib.import_module(f"flow_grpo.diffusers_patch.sd3_pipeline_with_logprob{fast}")
        self.sample = patch.pipeline_with_logprob
        self.accelerator: Any = Accelerator(
            mixed_precision="no", gradient_accumulation_steps=len(work.recorded), cpu=not is_accelerator(work.device)
        )
        transformer, self.optimizer = self.accelerator.prepare(self.module, self.optimizer)
        if transformer is self.module:  # one process: its KL reads DDP's attribute; `nn.Module` would register a cycle
            object.__setattr__(transformer, "module", transformer)
        self.config = SimpleNamespace(
            train=SimpleNamespace(
                cfg=True,
                beta=work.kl,
                adv_clip_max=1e9,
                clip_range=work.clip,
                max_grad_norm=work.max_grad_norm,
                ema=False,
                num_inner_epochs=1,
            ),
            sample=SimpleNamespace(guidance_scale=work.scale, noise_level=work.eta, num_batches_per_epoch=1, sde_type="sde"),
        )
        steps = work.recorded
        timesteps = self.pipeline.scheduler.timesteps[steps.start : steps.stop].to(work.device)
        self.timesteps = timesteps.expand(work.samples, -1)
        self.window: dict[str, Any] = {}
        if work.window is not None:
            self.window = {"sde_window_size": len(steps), "sde_window_range": (steps.start, steps.stop)}
        self.logged: dict[str, Any] = {}
        scope: dict[str, Any] = {
            "torch": torch,
            "defaultdict": defaultdict,
            "tqdm": _skip_bar,
            "autocast": contextlib.nullcontext,
            "wandb": SimpleNamespace(log=lambda info, step: self.logged.update(info)),
            "accelerator": self.accelerator,
            "transformer": transformer,
            "optimizer": self.optimizer,
            "pipeline": self.pipeline,
            "config": self.config,
            "sde_step_with_logprob": patch.sde_step_with_logprob,
            "num_train_timesteps": len(work.recorded),
            "train_neg_prompt_embeds": work.uncond.tokens,
            "train_neg_pooled_prompt_embeds": work.uncond.pooled,
            "total_batch_size": work.samples,
        }
        script = folder / "scripts" / f"train_sd3{fast}.py"
        self.compute_log_prob = clone.compile_function(script, "compute_log_prob", scope)
        self.train = clone.compile_loop(script, "main", "inner_epoch", scope, arguments=("samples", "epoch", "global_step"))

    def rollout(self) -> Sampled:
        """Generate a rollout by its pipeline."""
        steps = self.work.steps
        _, latents, log_probs, *_ = self.sample(
            self.pipeline,
            num_inference_steps=steps,
            sigmas=torch.linspace(1, 1 / steps, steps).tolist(),
            guidance_scale=self.work.scale,
            noise_level=self.work.eta,
            output_type="pt",
            **self.pixels,
            **self.embeddings,
            **self.window,
        )
        return Sampled(torch.stack(latents, dim=1), torch.stack(log_probs, dim=1))

    def set_micro_batch(self, samples: int) -> None:
        """Set the number of batches per rollout in its loop, and of the passes of an optimizer step."""
        self.config.sample.num_batches_per_epoch = self.work.samples // samples
        self.accelerator.gradient_accumulation_steps = self.work.samples // samples * len(self.work.recorded)

    def log_prob(self, x: Tensor, x_next: Tensor) -> Tensor:
        """Compute the log-probabilities by its `compute_log_prob`."""
        sample = {"latents": x, "next_latents": x_next, "timesteps": self.timesteps}
        tokens, pooled = (torch.cat(halves) for halves in zip(self.work.uncond, self.work.cond, strict=True))
        with torch.no_grad():
            steps = [
                self.compute_log_prob(self.module, self.pipeline, sample, j, tokens, pooled, self.config)[1]
                for j in range(len(self.work.recorded))
            ]
        return torch.stack(steps, dim=1)

    def update(self, stored: PeerRollout) -> float:
        """Take one optimizer step by its training loop, and return the loss, which only the main process logs."""
        samples = {
            "latents": stored.x,
            "next_latents": stored.x_next,
            "timesteps": self.timesteps,
            "log_probs": stored.log_prob,
            "advantages": stored.advantage[:, None].expand(-1, len(self.work.recorded)),
            **{name: self.embeddings[name] for name in ("prompt_embeds", "pooled_prompt_embeds")},
        }
        self.train(samples, 0, 0)
        return float(self.logged["loss"].detach()) if self.accelerator.is_main_process else math.nan


def _skip_bar(items: Any, **options: Any) -> Any:
    """Return the items, without a progress bar."""
    return items
