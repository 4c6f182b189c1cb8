"""Algorithms of verl-omni's model types: items of a batch, and outputs of the model for the loss function.

| model type | items | outputs |
|---|---|---|
| diffusion_model | recorded steps of rollouts | log_probs, prev_sample_mean, std_dev_t, sqrt_dt |
| diffusion_nft_model | clean samples with noise | predictions of the policy, of the adapter `old` and of the base model |
| diffusion_dpo_model | clean samples with noise, in pairs | noise_pred, noise, latent, timesteps |
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core import gaussian
from fluvial.core.checks import per_sample
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.verl.batch import BatchFields, ItemBatch, flatten_steps
from fluvial.engines.extensions.verl.denoiser import Denoiser
from fluvial.engines.extensions.verl.settings import Settings
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.kernels import step_log_prob
from fluvial.models import Cond
from fluvial.models.lora import use_adapter

OLD = "old"  # adapter of DiffusionNFT's old policy
NUMBERS = ("old_log_probs", "advantages")  # required numbers of recorded steps
PER_STEP = (
    "ref_log_prob",
    "ref_prev_sample_mean",
    "teacher_prev_sample_mean",
    "old_prev_sample_mean",
    "rollout_is_weights",
)
PER_SAMPLE = ("ref_noise_pred", "teacher_noise_pred")
Tensors = dict[str, Tensor]


class Algorithm(NamedTuple):
    """Algorithm of a model type.

    Args:
        name: model type.
        read_batch: returns the items of a batch; its last argument is whether a loss is computed.
        compute_outputs: returns the outputs of a micro-batch, `[b, ...]`.
        adapter: adapter that training compares with.
    """

    name: str
    read_batch: Callable[[Denoiser, BatchFields, bool], ItemBatch]
    compute_outputs: Callable[[Denoiser, nn.Module, Tensors, Cond], Tensors]
    adapter: str | None = None

    def check(self, settings: Settings) -> None:
        """Raise UsageError if a training run lacks the adapter."""
        trained = settings.optimizer is not None
        if trained and self.adapter is not None and (settings.lora is None or self.adapter not in settings.adapters):
            raise UsageError(
                f"{self.name} compares with the adapter {self.adapter}: set model.lora_rank, and "
                f"model.policy_state_adapters to [default, {self.adapter}]"
            )


def read_recorded_steps(denoiser: Denoiser, fields: BatchFields, loss: bool) -> ItemBatch:
    """Read the recorded steps of rollouts, for Flow-GRPO, DanceGRPO, Flow-DPPO, GRPO-Guard and distillation."""
    shape, samples = denoiser.read_shape(fields), fields.samples
    timesteps = fields.read_tensor("all_timesteps", (samples, None), what="one timestep per sample and step")
    count = timesteps.shape[1]
    steps = flatten_steps(denoiser.find_steps(timesteps, shape))
    if fields.has_tensor("all_next_latents"):
        x = denoiser.read_latents(fields, "all_latents", shape, samples, count)
        x_next = denoiser.read_latents(fields, "all_next_latents", shape, samples, count)
    else:
        latents = denoiser.read_latents(fields, "all_latents", shape, samples, count + 1)
        x, x_next = latents[:, :-1], latents[:, 1:]
    schedule, device = denoiser.schedule(shape), x.device
    items = {
        "x": flatten_steps(x),
        "x_next": flatten_steps(x_next),
        "level": schedule.levels[steps].to(device),
        "level_next": schedule.levels[steps + 1].to(device),
        "timestep": schedule.timesteps[steps].to(device),
        "sample": torch.arange(samples, device=device).repeat(count),
    }
    numbers = {}
    if loss:
        numbers = {name: fields.read_items(name, count, exact=True) for name in NUMBERS}
        numbers.update({name: fields.read_items(name, count) for name in PER_STEP if fields.has_tensor(name)})
    return ItemBatch(samples, count, items, denoiser.build_cond(fields), numbers)


def compute_step_outputs(denoiser: Denoiser, module: nn.Module, items: Tensors, cond: Cond) -> Tensors:
    """Return log_probs `[b]`, prev_sample_mean, std_dev_t `[b, 1, ...]` and sqrt_dt `[b]`.

    std_dev_t has verl-omni's unit: the standard deviation of the step, for "sde" divided by sqrt_dt.
    """
    settings, x, level, level_next = denoiser.settings, items["x"], items["level"], items["level_next"]
    transition = denoiser.bind_sampler(tuple(x.shape[1:]))(level, level_next)
    v = denoiser.predict(module, items, cond)
    log_prob, _ = step_log_prob(transition, x, v, items["x_next"], form=settings.form)
    mean = denoiser.pack(gaussian.mean(transition, x, v))
    sqrt_dt = torch.sqrt((level - level_next).abs())
    is_rate = SAMPLERS[settings.sampler].kl_weight == "rate"
    std = transition.std / sqrt_dt if is_rate else transition.std
    return {"log_probs": log_prob, "prev_sample_mean": mean, "std_dev_t": per_sample(std, mean), "sqrt_dt": sqrt_dt}


def read_noised_steps(denoiser: Denoiser, fields: BatchFields, loss: bool) -> ItemBatch:
    """Add noise to clean samples, for DiffusionNFT.

    Without `forward_noise` in the batch, the noise is drawn with torch's default generator.
    """
    shape, samples = denoiser.read_shape(fields), fields.samples
    timesteps = fields.read_tensor("train_timesteps", (samples, None), what="one timestep per sample and step")
    count = timesteps.shape[1]
    x0 = denoiser.read_latents(fields, "latents_clean", shape, samples)
    clean = x0.repeat(count, *[1] * (x0.ndim - 1))
    if fields.has_tensor("forward_noise"):
        layout = denoiser.pack_shape(shape)
        per_step = fields.read_tensor("forward_noise").ndim == 2 + len(layout)
        noise = denoiser.read_latents(fields, "forward_noise", shape, samples, *[count] * per_step)
        noise = flatten_steps(noise) if per_step else noise.repeat(count, *[1] * (noise.ndim - 1))
    else:
        noise = torch.randn_like(clean)
    items = denoiser.add_noise(fields, clean, noise, flatten_steps(timesteps))
    numbers = {"reward_prob": fields.read_items("reward_prob", count)} if loss else {}
    return ItemBatch(samples, count, items, denoiser.build_cond(fields), numbers)


def compute_nft_outputs(denoiser: Denoiser, module: nn.Module, items: Tensors, cond: Cond) -> Tensors:
    """Return old_prediction, forward_prediction, ref_forward_prediction, x0, xt and t_expanded."""
    with torch.no_grad():
        with use_adapter(module, OLD):
            old = denoiser.predict(module, items, cond)
        with use_adapter(module, None):
            reference = denoiser.predict(module, items, cond)
    samples = {
        "old_prediction": old,
        "forward_prediction": denoiser.predict(module, items, cond),
        "ref_forward_prediction": reference,
        "x0": items["x0"],
        "xt": items["x"],
    }
    packed = {name: denoiser.pack(value) for name, value in samples.items()}
    return {**packed, "t_expanded": per_sample(items["level"], packed["xt"])}


def read_noised_pairs(denoiser: Denoiser, fields: BatchFields, loss: bool) -> ItemBatch:
    """Add noise to pairs of clean samples, the same to both, for Diffusion-DPO.

    Samples 2 k and 2 k + 1 are a pair, the chosen one first. Without `noise` and `timesteps` in the batch, they are drawn
    per pair with torch's default generator: the timestep is one of the scheduler's, logit-normal.
    """
    shape, samples = denoiser.read_shape(fields), fields.samples
    if samples % 2:
        raise UsageError(f"the batch has {samples} samples, expected pairs: chosen, rejected, chosen, ...")
    x0 = denoiser.read_latents(fields, "latents_clean", shape, samples)
    if fields.has_tensor("noise") != fields.has_tensor("timesteps"):
        present, missing = ("noise", "timesteps") if fields.has_tensor("noise") else ("timesteps", "noise")
        raise UsageError(f"the batch has {present} and no {missing}, expected both or neither")
    if fields.has_tensor("noise"):
        noise = denoiser.read_latents(fields, "noise", shape, samples)
        timesteps = fields.read_tensor("timesteps", (samples,), what="one timestep per sample").float()
        for name, value in (("noise", noise), ("timesteps", timesteps)):
            if not torch.equal(value[0::2], value[1::2]):
                raise UsageError(f"{name} differs between the two samples of a pair, expected the same")
    else:
        noise = torch.randn_like(x0[0::2]).repeat_interleave(2, 0)
        known = denoiser.list_timesteps(shape)
        position = torch.sigmoid(torch.randn(samples // 2))
        timesteps = known[(position * len(known)).long()].repeat_interleave(2).to(x0.device)
    items = denoiser.add_noise(fields, x0, noise, timesteps)
    numbers, uid = {}, None
    if loss:
        numbers["sample_level_rewards"] = fields.read_tensor(
            "sample_level_rewards", (samples,), what="one reward per sample"
        )
        layout = 1 + len(denoiser.pack_shape(shape))
        for name in PER_SAMPLE:
            if fields.has_tensor(name):
                value = fields.read_tensor(name, (samples,))
                numbers[name] = value[:, 0] if value.ndim == layout + 1 and value.shape[1] == 1 else value
        uid = fields.read_plain("uid")
    return ItemBatch(samples, 1, items, denoiser.build_cond(fields), numbers, None if uid is None else list(uid), width=2)


def compute_pair_outputs(denoiser: Denoiser, module: nn.Module, items: Tensors, cond: Cond) -> Tensors:
    """Return noise_pred, noise, latent and timesteps `[b]`."""
    pack = denoiser.pack
    return {
        "noise_pred": pack(denoiser.predict(module, items, cond)),
        "noise": pack(items["noise"]),
        "latent": pack(items["x0"]),
        "timesteps": items["timestep"],
    }


ALGORITHMS = (
    Algorithm("diffusion_model", read_recorded_steps, compute_step_outputs),
    Algorithm("diffusion_nft_model", read_noised_steps, compute_nft_outputs, OLD),
    Algorithm("diffusion_dpo_model", read_noised_pairs, compute_pair_outputs),
)
