"""UniRL (Tencent-Hunyuan/UniRL): `SD3DiffusionStage.diffuse` and `TrainStack.train` with its FlowGRPO algorithm.

The project's code runs: the stage, its step, the Flow-SDE strategy, the algorithm, the loop over micro-batches and the
optimizer step of its FSDP backend, without Ray. The backend's constructor, which reads configurations, is left out. On
several processes its `fsdp_wrap` shards the module without resharding after the forward pass, as in its configurations of
SD3; one process needs no wrap.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fluvial.bench.peers import clone
from fluvial.bench.peers.pipeline import VAE_SCALE, Peer
from fluvial.bench.peers.work import PeerRollout, Sampled, Work

# Packages that its files import for processes, configurations and logging.
UNUSED = ("ray", "hydra", "omegaconf", "wandb", "PIL", "imageio", "av", "cv2", "tensordict", "torchvision", "torchaudio")


class UniRLPeer(Peer):
    """UniRL's code on the work.

    Args:
        folder: clone of the project.
        work: the work.
    """

    def __init__(self, folder: Path, work: Work) -> None:
        load = importlib.import_module
        with clone.make_importable(folder, stand_ins=UNUSED):
            self.inject = load("unirl.train.inject")
        super().__init__(work)
        with clone.make_importable(folder, stand_ins=UNUSED):
            diffusion, conditions = load("unirl.models.sd3.diffusion"), load("unirl.models.sd3.conditions")
            flowgrpo, stack = load("unirl.algorithms.flowgrpo"), load("unirl.train.stack")
            backend, kernels = load("unirl.train.backend.fsdp"), load("unirl.sde.kernels")
            self.types, self.latent = load("unirl.types.rollout_resp"), load("unirl.types.segments.latent")
            text, sampling = load("unirl.types.conditions.text"), load("unirl.types.sampling")
        self.params = sampling.DiffusionSamplingParams(
            num_inference_steps=work.steps,
            guidance_scale=work.scale,
            eta=work.eta,
            sde_indices=list(work.recorded),
            seed=0,
            **self.pixels,
        )
        self.stage = diffusion.SD3DiffusionStage(
            model=SimpleNamespace(transformer=self.module, device=torch.device("cpu")),
            step=diffusion.SD3DiffusionStep(),
            strategy=kernels.FlowSDEStrategy(),
            autocast_precision="fp32",
            trajectory_precision="fp32",
            vae_scale_factor=VAE_SCALE,
            latent_channels=work.size.event[0],
        )
        self.sigmas: Tensor = work.make_scheduler().sigmas
        self.typed = conditions.SD3Conditions(
            text=text.TextEmbedCondition(embeds=work.cond.tokens, pooled=work.cond.pooled),
            negative_text=text.TextEmbedCondition(embeds=work.uncond.tokens, pooled=work.uncond.pooled),
        )
        algorithm = flowgrpo.FlowGRPO(
            params=self.params, stage=self.stage, clip_range=work.clip, conditions_cls=conditions.SD3Conditions
        )
        holder = clone.fill_object(
            backend.FSDPBackend,
            model=self.module,
            optimizer=self.optimizer,
            scheduler=None,
            ema=None,
            _optimizer_step_count=0,
            _defer_grad_sync=False,
            _grad_sync_enabled=True,
        )
        self.stack = stack.TrainStack(
            fsdp_backend=holder, algorithm=algorithm, micro_batch_size=work.samples, max_grad_norm=work.max_grad_norm
        )

    def shard(self) -> None:
        """Wrap the blocks and the network by its own function."""
        blocks = ("JointTransformerBlock",)
        self.inject.fsdp_wrap(
            self.module, block_class_names=blocks, mixed_precision=False, param_dtype="fp32", reshard_after_forward=False
        )

    def set_micro_batch(self, samples: int) -> None:
        """Set the size of its micro-batches."""
        self.stack.micro_batch_size = samples

    def _make_segment(self, x: Tensor, x_next: Tensor, log_prob: Tensor | None) -> Any:
        steps = self.work.recorded
        return self.latent.make_image_segment(
            latents=torch.cat([x, x_next[:, -1:]], dim=1),
            sigmas=self.sigmas,
            indices=torch.arange(steps.start, steps.stop + 1),
            sde_logp=log_prob,
            sde_indices=torch.tensor(steps),
        )

    def rollout(self) -> Sampled:
        """Generate a rollout by its stage."""
        initial = torch.randn(self.work.samples, *self.work.size.event)
        segment = self.stage.diffuse(self.typed, schedule=self.sigmas, params=self.params, initial_latents=initial)
        return Sampled(segment.latents[:, : len(self.work.recorded) + 1], segment.sde_logp)  # without the clean samples

    def log_prob(self, x: Tensor, x_next: Tensor) -> Tensor:
        """Compute the log-probabilities by its stage's `replay`."""
        with torch.no_grad():
            log_probs: Tensor = self.stage.replay(
                self.typed, segment=self._make_segment(x, x_next, None), params=self.params
            ).log_probs
        return log_probs

    def update(self, stored: PeerRollout) -> float:
        """Take one optimizer step by its training loop."""
        track = self.types.RolloutTrack(
            sample_ids=self.work.prompts,
            conditions=self.typed.to_dict(),
            advantages=stored.advantage,
            segment=self._make_segment(stored.x, stored.x_next, stored.log_prob),
        )
        slices = self.stack._optimizer_step_slices(self.work.samples)
        return self.average_over_ranks(float(self.stack.train(track, micro_slices=slices[0], training_progress=0.0).loss))
