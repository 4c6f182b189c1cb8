"""verl-omni (verl-project/verl-omni): the update of its diffusers engine with FlowGRPO and the adapter of SD3.

The project's code runs: `forward_backward_batch`, `forward_step` and `optimizer_step` of `PPODiffusersFSDPEngine`, the
adapter, the SDE scheduler and the loss. Its rollout, in a separate serving engine, is left out. So are Ray, and the rollout
correction, which is off by default. A dictionary replaces verl's TensorDict, and empty classes replace verl's base classes;
both are cheaper. On several processes blocks and network are sharded as by verl's `apply_fsdp2` with its defaults; one
process needs no FSDP.
"""

import importlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fluvial.bench.peers import clone
from fluvial.bench.peers.pipeline import Peer
from fluvial.bench.peers.work import PeerRollout, Work
from fluvial.models.pixel_model import SHIFT

# Packages that its files import.
UNUSED = ("verl", "tensordict", "omegaconf", "ray", "hydra", "vllm", "vllm_omni")
# Packages of its own whose `__init__` imports all models, and modules that only other algorithms need.
BARE = (
    "verl_omni",
    "verl_omni.pipelines",
    "verl_omni.pipelines.sd3_flow_grpo",
    "verl_omni.trainer",
    "verl_omni.trainer.diffusion",
    "verl_omni.workers",
    "verl_omni.workers.engine",
    "verl_omni.workers.engine.fsdp",
    "verl_omni.workers.utils",
)
REPLACED = ("verl_omni.workers.config", "verl_omni.utils", "verl_omni.trainer.omni")


class VerlBatch(dict[str, Any]):
    """A dictionary with the methods of a TensorDict that verl-omni's engine calls."""

    def to(self, device: Any) -> "VerlBatch":
        """Return the batch unchanged."""
        return self


class EngineContext:
    """Base class with the methods that verl-omni's contexts of training and evaluation call."""

    def __init__(self, engine: Any, mode: str, **options: Any) -> None:
        self.engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: Any) -> None:
        pass


class Registry:
    """A registry that keeps nothing."""

    @staticmethod
    def register(**options: Any) -> Any:
        """Return a decorator without effect."""
        return lambda kind: kind


class Metric:
    """Class with the method of a metric that verl-omni's loss calls."""

    @staticmethod
    def from_dict(values: dict[str, Any], aggregation: Any) -> dict[str, Any]:
        """Return the values."""
        return values


def _append(totals: dict[str, list[Any]], values: dict[str, Any]) -> None:
    for name, value in values.items():
        totals.setdefault(name, []).append(value)


def _device() -> str:
    return "cpu"


def _fsdp_version(module: nn.Module) -> int:
    return 2 if isinstance(module, FSDPModule) else 0


# Names that its files import from the replaced packages.
CONTENTS: dict[str, dict[str, Any]] = {
    "tensordict": {"TensorDict": VerlBatch},
    "verl.utils": {
        "tensordict_utils": SimpleNamespace(
            assign_non_tensor=lambda data, **values: data.update(values),
            get_non_tensor_data=lambda data, key, default: data.get(key, default),
            get_tensordict=VerlBatch,
        )
    },
    "verl.utils.device": {"get_device_name": _device, "get_device_id": _device},
    "verl.utils.fsdp_utils": {"fsdp2_clip_grad_norm_": nn.utils.clip_grad_norm_, "fsdp_version": _fsdp_version},
    "verl.utils.metric": {"Metric": Metric, "AggregationType": SimpleNamespace(MEAN="mean")},
    "verl.utils.py_functional": {"append_to_dict": _append},
    "verl.workers.engine.base": {"BaseEngineCtx": EngineContext, "EngineRegistry": Registry},
    "verl.workers.engine.utils": {"prepare_micro_batches": lambda data, **options: ([data], None)},
}


class VerlOmni(Peer):
    """verl-omni's code on the work.

    Args:
        folder: clone of the project.
        work: the work.
        recomputes: recompute the old log-probabilities before the update, as by default, instead of using the rollout's.
    """

    def __init__(self, folder: Path, work: Work, *, recomputes: bool = False) -> None:
        super().__init__(work)
        with clone.make_importable(folder, stand_ins=UNUSED, contents=CONTENTS, replaced=REPLACED, bare=BARE):
            load = importlib.import_module
            engines = load("verl_omni.workers.engine.fsdp.diffusers_impl")
            load("verl_omni.pipelines.sd3_flow_grpo.diffusers_training_adapter")  # registers itself
            schedulers = load("verl_omni.pipelines.schedulers.flow_match_sde")
            losses, self.padding = load("verl_omni.workers.utils.losses"), load("verl_omni.workers.utils.padding")
        self.recomputes = recomputes
        scheduler = schedulers.FlowMatchSDEDiscreteScheduler(shift=SHIFT)
        scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / work.steps, work.steps).tolist())
        model_config = SimpleNamespace(
            architecture="StableDiffusion3Pipeline",
            algorithm="flow_grpo",
            external_lib=None,
            pipeline=SimpleNamespace(guidance_scale=work.scale),
            algo=SimpleNamespace(noise_level=work.eta, sde_type="sde"),
        )
        self.engine = clone.fill_object(
            engines.PPODiffusersFSDPEngine,
            module=self.module,
            optimizer=self.optimizer,
            scheduler=scheduler,
            model_config=model_config,
            engine_config=SimpleNamespace(fsdp_size=work.ranks),
            optimizer_config=SimpleNamespace(clip_grad=work.max_grad_norm),
            ulysses_device_mesh=None,
            ulysses_sequence_parallel_size=1,
            use_ulysses_sp=False,
        )
        actor = SimpleNamespace(
            global_batch_info={},
            loss_scale_factor=None,
            use_kl_loss=False,
            use_distill_loss=False,
            diffusion_loss=clone.CloneSettings(loss_mode="flow_grpo", clip_ratio=work.clip, adv_clip_max=1e9),
            rollout_correction=SimpleNamespace(bypass_mode=False),
        )
        self.loss = partial(losses.diffusion_loss, actor)
        steps = work.recorded
        self.timesteps = scheduler.timesteps[steps.start : steps.stop].expand(work.samples, -1)

    def shard(self) -> None:
        """Shard the blocks and the network."""
        for block in self.module.transformer_blocks:
            fully_shard(block)
        fully_shard(self.module)

    def _make_batch(self, x: Tensor, x_next: Tensor) -> VerlBatch:
        mask = torch.ones(self.embeddings["prompt_embeds"].shape[:2], dtype=torch.bool)
        batch = VerlBatch(
            all_latents=torch.cat([x, x_next[:, -1:]], dim=1),
            all_timesteps=self.timesteps,
            prompt_embeds_mask=mask,
            negative_prompt_embeds_mask=mask,
            **self.embeddings,
        )
        padded: VerlBatch = self.padding.embeds_padding_2_no_padding(batch)
        return padded

    def log_prob(self, x: Tensor, x_next: Tensor) -> Tensor:
        """Compute the log-probabilities by its engine, as before an update."""
        with self.engine.eval_mode(), torch.no_grad():
            output = self.engine.forward_backward_batch(self._make_batch(x, x_next), None, forward_only=True)
        log_probs: Tensor = output["model_output"]["log_probs"]
        return log_probs

    def update(self, stored: PeerRollout) -> float:
        """Take one optimizer step by its engine."""
        old = self.log_prob(stored.x, stored.x_next).float() if self.recomputes else stored.log_prob
        batch = self._make_batch(stored.x, stored.x_next)
        batch["old_log_probs"], batch["advantages"] = old, stored.advantage[:, None].expand(-1, old.shape[1])
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            output = self.engine.forward_backward_batch(batch, self.loss)
            self.engine.optimizer_step()
        return self.average_over_ranks(float(torch.tensor(output["loss"]).sum()))
