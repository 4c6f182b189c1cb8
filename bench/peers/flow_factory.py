"""Flow-Factory (X-GenGroup/Flow-Factory): `sample` and `optimize` of its GRPOTrainer, over its SD3.5 adapter and scheduler.

The project's code runs: the trainer's two phases, `SD3_5Adapter.inference` and `.forward`, and its SDE scheduler, with
accelerate. Their objects are created here without their constructors, which read weights, data sets and reward models.
"""

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fluvial.bench.peers import clone
from fluvial.bench.peers.pipeline import Peer
from fluvial.bench.peers.work import PeerRollout, Sampled, Work
from fluvial.models.pixel_model import SHIFT

# Packages that its files import for video and audio data and for loggers.
UNUSED = ("imageio", "av", "decord", "torchaudio", "datasets", "wandb", "swanlab", "cv2")


class FlowFactoryPeer(Peer):
    """Flow-Factory's code on the work.

    Args:
        folder: clone of the project.
        work: the work.
    """

    def __init__(self, folder: Path, work: Work) -> None:
        from accelerate import Accelerator

        super().__init__(work)
        with clone.make_importable(folder / "src", stand_ins=UNUSED):
            sd3 = importlib.import_module("flow_factory.models.stable_diffusion.sd3_5")
            trainers = importlib.import_module("flow_factory.trainers.grpo")
        self.sample_kind = sd3.SD3_5Sample
        self.accelerator: Any = Accelerator(mixed_precision="no", gradient_accumulation_steps=len(work.recorded), cpu=True)
        scheduler = sd3.FlowMatchEulerDiscreteSDEScheduler(
            noise_level=work.eta, sde_steps=list(work.recorded), dynamics_type="Flow-SDE", shift=SHIFT
        )
        event = work.size.event
        sd3.set_scheduler_timesteps(scheduler, work.steps, seq_len=event[-2] * event[-1] // 4)
        self.pipeline.scheduler = scheduler
        transformer, self.optimizer = self.accelerator.prepare(self.module, self.optimizer)
        accelerator = self.accelerator
        settings = clone.CloneSettings(
            per_device_batch_size=work.samples,
            num_batches_per_epoch=1,
            num_inner_epochs=1,
            seed=0,
            kl_beta=work.kl,
            kl_type="x-based",
            guidance_scale=work.scale,
            num_inference_steps=work.steps,
            **self.pixels,
            clip_range=(-work.clip, work.clip),
            adv_clip_range=(-1e9, 1e9),
            max_grad_norm=work.max_grad_norm,
            latent_storage_dtype=None,
            offload_samples_to_cpu=False,
        )
        adapter = clone.fill_object(
            sd3.SD3_5Adapter,
            pipeline=self.pipeline,
            accelerator=accelerator,
            training_args=settings,
            model_args=SimpleNamespace(target_components=["transformer"], finetune_type="lora"),
            target_module_map={"transformer": list(work.lora.targets or ())},
            _mode="train",
            _components={"transformer": transformer},
        )
        self.trainer = clone.fill_object(
            _make_quiet(trainers.GRPOTrainer),
            adapter=adapter,
            accelerator=accelerator,
            training_args=settings,
            epoch=0,
            step=0,
            autocast=nullcontext,
            optimizer=self.optimizer,
            log_args=SimpleNamespace(verbose=False),
            reward_buffer=SimpleNamespace(clear=lambda: None, add_samples=lambda samples: None),
            dataloader=_RepeatedBatch(self._make_batch()),
            logged={},
        )

    def set_micro_batch(self, samples: int) -> None:
        """Set the size of its batches, and the number of the passes of an optimizer step."""
        self.trainer.training_args["per_device_batch_size"] = samples
        self.accelerator.gradient_accumulation_steps = self.work.samples // samples * len(self.work.recorded)

    def _make_batch(self) -> dict[str, Any]:
        return {"prompt": self.work.prompts, "negative_prompt": [""] * self.work.samples, **self.embeddings}

    def rollout(self) -> Sampled:
        """Generate a rollout by its trainer."""
        samples = self.trainer.sample()
        return Sampled(torch.stack([s.all_latents for s in samples]), torch.stack([s.log_probs for s in samples]))

    def log_prob(self, x: Tensor, x_next: Tensor) -> Tensor:
        """Compute the log-probabilities by its adapter's `forward`."""
        timesteps, rows = self.pipeline.scheduler.timesteps, []
        with torch.no_grad():
            for index, step in enumerate(self.work.recorded):
                t_next = timesteps[step + 1] if step + 1 < self.work.steps else torch.tensor(0)
                output = self.trainer.adapter.forward(
                    t=timesteps[step],
                    t_next=t_next,
                    latents=x[:, index],
                    next_latents=x_next[:, index],
                    guidance_scale=self.work.scale,
                    noise_level=self.work.eta,
                    return_kwargs=["log_prob"],
                    **self.embeddings,
                )
                rows.append(output.log_prob)
        return torch.stack(rows, dim=1)

    def update(self, stored: PeerRollout) -> float:
        """Take one optimizer step by its trainer's `optimize`."""
        batch, steps = self._make_batch(), torch.tensor(self.work.recorded)
        latents = torch.cat([stored.x[:, :1], stored.x_next], dim=1)
        indices = torch.full((self.work.steps + 1,), -1)  # index of each step's latents among the stored ones
        indices[steps] = torch.arange(len(steps))
        log_prob_indices = indices.clone()
        indices[steps[-1] + 1] = len(steps)
        samples = [
            self.sample_kind(
                timesteps=self.pipeline.scheduler.timesteps,
                all_latents=latents[b],
                log_probs=stored.log_prob[b],
                latent_index_map=indices,
                log_prob_index_map=log_prob_indices,
                extra_kwargs={"advantage": stored.advantage[b]},
                **{name: rows[b] for name, rows in batch.items()},
            )
            for b in range(self.work.samples)
        ]
        self.trainer.optimize(samples)
        return float(self.trainer.logged["train/loss"])


class _RepeatedBatch:
    """A data loader with one batch per epoch."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return an iterator over the batch."""
        return iter([self.batch])


def _make_quiet(kind: type) -> type:
    """Return a subclass of a trainer that keeps logged numbers instead of printing them."""
    return type(kind.__name__, (kind,), {"log_data": lambda self, data, step: self.logged.update(data)})
