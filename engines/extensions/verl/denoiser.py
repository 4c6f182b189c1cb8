"""Model for batches of verl: schedule, sampler, conditioning and guided predictions."""

import copy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fluvial.core.sigmas import from_scheduler
from fluvial.core.transitions import Sampler, bind
from fluvial.engines.data.records import list_negatives, model_inputs
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.extensions.verl.batch import BatchFields, list_lengths
from fluvial.engines.extensions.verl.settings import NETWORK, Settings
from fluvial.engines.extensions.verl.settings import SAMPLERS as KINDS
from fluvial.engines.run.jobs.pipeline import is_adapter, open_named
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.models import Cond, Schedule, is_recorded
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.padding import trims_padding
from fluvial.models.pipelines.base import PATCH, pack, unpack
from fluvial.models.protocol import knows_any_level
from fluvial.models.replay.kinds import ARGUMENTS

Shape = tuple[int, ...]
# Fields of verl-omni's batches by fields of a model's conditioning. Those of the text have a negative one, `negative_...`.
TEXT = {"tokens": "prompt_embeds", "pooled": "pooled_prompt_embeds", "mask": "prompt_embeds_mask"}
IMAGES = {"image": "condition_image_latents"}
MASKS = ("mask", "lengths")  # fields that follow from the padding of the tokens
SCALE = "guidance"  # field of a distilled network, which the model computes from pipeline.guidance_scale

NEAR = 0.01  # largest difference between a rollout's timestep, up to 1000, and the schedule's
TIMESTEPS = 1000.0  # timestep of a flow's noise level 1


class Denoiser:
    """Any model that `--model` accepts, with the settings of a run of verl.

    Args:
        settings: settings of the run.
        device: device of the engine.
        scheduler: scheduler of verl-omni's adapter, which its rollouts use; None takes the model's own.

    Raises:
        UsageError: the model cannot be opened, or does not fit the settings.
    """

    def __init__(self, settings: Settings, device: torch.device, scheduler: Any = None) -> None:
        self.settings, self.device, self._scheduler = settings, device, scheduler
        self._open = lru_cache(1)(self._open_model)
        self.model = self._open("")
        self.schedule = cache(self._build_schedule)
        self.packed = bool(getattr(self.model, "packed", False))
        self.scale = self._find_scale()
        predicts = self.model.prediction
        if SAMPLERS[settings.sampler].prediction != predicts:
            fits = " or ".join(name for name, (kind, _) in KINDS.items() if SAMPLERS[kind].prediction == predicts)
            raise UsageError(f"model.algo.sde_type is {settings.kind!r}, and the model predicts {predicts}: set {fits}")

    def _open_model(self, negative: str) -> Any:
        """Open the model; a replayed one contains the guidance with this negative prompt."""
        settings, (height, width, frames) = self.settings, self.settings.size
        trusts_code = settings.trusts_code and not is_adapter(settings.model)
        config = PipelineConfig(height, width, frames=frames, trust_remote_code=trusts_code)
        guidance = Guidance(max(settings.guidance_scale or 1.0, settings.true_cfg_scale, 1.0), negative)
        compute = settings.engine.compute_dtype(self.device)
        model = open_named(settings.model, config, steps=settings.steps, guidance=guidance, compute=compute)
        if settings.guidance_scale is not None and hasattr(model, "embedded_guidance"):
            model.embedded_guidance = settings.guidance_scale
        if settings.weights is None and settings.part in (NETWORK, getattr(model, "part", NETWORK)):
            return model
        if not isinstance(model.weights, Path):
            trained = ", ".join(model.weights or ()) or "no folder of weights"
            raise UsageError(
                f"model.transformer_subfolder is {settings.part!r}, and {settings.model} trains {trained}: leave it out"
            )
        with convert_errors(UsageError, ValueError, OSError, says="model.config_path"):
            return model.with_weights(settings.weights or Path(settings.model) / settings.part)

    def _find_scale(self) -> float:
        """Return the scale of guidance by two forward passes. The scale of a distilled network is an input of the network.

        Raises:
            UsageError: both scales are set, and the model uses one.
        """
        guidance, true = self.settings.guidance_scale or 1.0, self.settings.true_cfg_scale
        if hasattr(self.model, "embedded_guidance"):
            return true
        if min(guidance, true) > 1:
            raise UsageError(
                f"model.pipeline.guidance_scale is {guidance:g} and true_cfg_scale is {true:g}, but one scale is used: "
                "leave one of them out"
            )
        return max(guidance, true)

    def fit(self, fields: BatchFields) -> "Denoiser":
        """Return the denoiser for a batch: a pipeline without an adapter is recorded on the batch's prompts.

        Raises:
            UsageError: the batch has several negative prompts, or a negative prompt for a user-defined model, or the
                pipeline cannot be replayed.
        """
        if not is_recorded(self.model):
            return self
        prompts = fields.read_prompts(self.argument)
        if len(opposed := set(list_negatives(prompts, ""))) > 1:
            raise UsageError(f"the batch has {len(opposed)} negative prompts, and a pipeline without an adapter takes one")
        if opposed != {""} and is_adapter(self.settings.model):
            raise UsageError(f"the batch has a raw_negative_prompt, and {self.settings.model} has its own: leave it out")
        other = copy.copy(self)
        with convert_errors(UsageError, ValueError, says="model"):
            other.model = self._open(*opposed).adapt_to(model_inputs(prompts))
        other.schedule = cache(other._build_schedule)
        return other

    @property
    def argument(self) -> str:
        """Argument of the pipeline's call for the images of a prompt."""
        return next((name for name in ARGUMENTS if name in getattr(self.model, "takes", ())), "image")

    @property
    def scheduler(self) -> Any:
        """diffusers' scheduler: verl-omni's adapter's, else the model's, else a flow scheduler without a shift."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        default = getattr(self.model, "build_scheduler", FlowMatchEulerDiscreteScheduler)
        return self._scheduler or default()

    def add_network_prefix(self, name: str) -> str:
        """Prefix the name of a tensor with the folder of its network, for a pipeline's rollout engine."""
        return f"{getattr(self.model, 'part', NETWORK)}.{name}" if isinstance(self.model.weights, Path | None) else name

    def _build_schedule(self, shape: Shape) -> Schedule:
        if self._scheduler is not None and not is_recorded(self.model):
            return Schedule(from_scheduler(self._scheduler).cpu(), self._scheduler.timesteps.float().cpu())
        with convert_errors(UsageError, ValueError, says="model.pipeline"):
            return Schedule(*(t.float() for t in self.model.schedule(self.settings.steps, shape)))

    def read_shape(self, fields: BatchFields) -> Shape:
        """Return the shape of a sample, such as (C, H, W); UsageError if the model does not support the size."""
        names = ("height", "width", "num_frames")
        size = (int(fields.read_plain(name, length)) for name, length in zip(names, self.settings.size, strict=True))
        with convert_errors(UsageError, ValueError, says="model.pipeline"):
            return tuple(self.model.latent_shape(*size))

    def pack_shape(self, shape: Shape) -> Shape:
        """Return the shape of a sample in a batch: tokens `[H W / 4, 4 C]` if the network takes tokens."""
        if not self.packed:
            return shape
        channels, height, width = shape
        return ((height // PATCH) * (width // PATCH), channels * PATCH**2)

    def pack(self, samples: Tensor) -> Tensor:
        """Convert samples of the model to the layout of a batch."""
        return pack(samples) if self.packed else samples

    def read_latents(self, fields: BatchFields, name: str, shape: Shape, *before: int) -> Tensor:
        """Return samples `[*before, *shape]` of a batch, in float32; UsageError if they are missing or of another shape."""
        layout = self.pack_shape(shape)
        value = fields.read_tensor(name, (*before, *layout), what=f"samples of {shape} for the size that is set")
        if value.ndim != len(before) + len(layout):
            raise UsageError(f"{name} has shape {list(value.shape)}, expected {[*before, *layout]}")
        return unpack(value.float(), shape[-2]) if self.packed else value.float()

    def bind_sampler(self, shape: Shape) -> Sampler:
        """Bind the sampler of the stochastic steps to the schedule of a shape."""
        return bind(self.settings.sampler, self.settings.eta, self.schedule(shape).levels)

    def find_steps(self, timesteps: Tensor, shape: Shape) -> Tensor:
        """Return the index in the schedule of each timestep of a rollout, int64; UsageError if one is not in it."""
        known = self.schedule(shape).timesteps
        distance, nearest = (timesteps.float().cpu()[..., None] - known).abs().min(-1)
        if bool((distance > NEAR).any()):
            wrong = float(timesteps.flatten()[int(distance.argmax())])
            raise UsageError(
                f"all_timesteps holds {wrong:g}, which is not one of the {len(known)} timesteps of the schedule "
                f"({float(known[0]):g} to {float(known[-1]):g}): set model.pipeline.num_inference_steps, height and width "
                "as in the rollout"
            )
        return nearest

    def build_cond(self, fields: BatchFields) -> Cond:
        """Return the conditioning of each sample on the device, with guidance also that of the negative prompt.

        It is read from the batch if the rollout returned all of its tensors. Otherwise the model encodes the prompts.
        """
        prefixes = ("", "negative_") if self.scale > 1 else ("",)  # in verl-omni a scale of up to 1 is no guidance
        names = self._list_conditioning()
        has_all = all(fields.has_tensor(name) for prefix in prefixes for name in self._list_fields(names, prefix))
        if names and (has_all or fields.read_plain("raw_prompt") is None):
            cond = self._read_cond(fields, names, "")
            if len(prefixes) > 1:
                cond = Guided(cond, self._read_cond(fields, names, "negative_"), torch.full((fields.samples,), self.scale))
        else:
            self._check_padding()
            prompts = fields.read_prompts(self.argument)
            with convert_errors(UsageError, ValueError, OSError, says="model"):
                cond = Guidance(max(self.scale, 1.0)).encode(self.model, prompts)
        return optree.tree_map(lambda tensor: tensor.to(self.device), cond)

    def _check_padding(self) -> None:
        """Raise UsageError if the network attends to padding, and pads to another length than the rollout."""
        tokens = None if is_recorded(self.model) or trims_padding(self.model) else getattr(self.model, "text_tokens", None)
        if tokens not in (None, self.settings.tokens):
            raise UsageError(
                f"model.pipeline.max_sequence_length is {self.settings.tokens}, and the model pads prompts to {tokens} "
                "tokens and attends to them: set it to that, or let the rollout return prompt_embeds"
            )

    def _list_conditioning(self) -> list[str]:
        """List the conditioning's fields that a batch may hold; empty if only the model can compute them."""
        kind: Any = None if is_recorded(self.model) else getattr(self.model, "conditioning", None)
        names = [
            name
            for name in getattr(kind, "_fields", ())
            if name != SCALE and (name not in kind._field_defaults or name in getattr(self.model, "encoded", ()))
        ]
        return names if {*names} <= {*TEXT, *IMAGES, *MASKS} else []

    def _list_fields(self, names: list[str], prefix: str) -> list[str]:
        """List the batch's fields for fields of a conditioning, without masks, which may follow from the tokens."""
        return [IMAGES.get(name) or prefix + TEXT[name] for name in names if name not in MASKS]

    def _read_cond(self, fields: BatchFields, names: list[str], prefix: str) -> Cond:
        """Read a conditioning from a batch; padding tokens are set to 0."""
        masked, encoded = trims_padding(self.model), [name for name in names if name not in MASKS]
        tensors = {
            name: fields.read_padded(field, masked=masked).float()
            for name, field in zip(encoded, self._list_fields(names, prefix), strict=True)
        }
        mask_field, tokens = prefix + TEXT["mask"], tensors["tokens"]
        if fields.has_tensor(mask_field):
            mask = fields.read_padded(mask_field, masked=True).bool()
        else:
            lengths = torch.tensor(list_lengths(fields.read_tensor(prefix + TEXT["tokens"], (fields.samples,))))
            mask = torch.arange(int(lengths.max())) < lengths[:, None]
        if mask.shape != tokens.shape[:2]:
            raise UsageError(
                f"{mask_field} has shape {list(mask.shape)}, expected {list(tokens.shape[:2])}, one number per token of "
                f"{prefix + TEXT['tokens']}"
            )
        tensors |= {"tokens": torch.where(mask[..., None], tokens, 0.0), "mask": mask, "lengths": mask.sum(1)}
        return self.model.build_cond({name: tensors[name] for name in names})

    def predict(self, module: nn.Module, items: dict[str, Tensor], cond: Cond) -> Tensor:
        """Return the prediction at each item of a micro-batch, in float32, with the rollout's guidance.

        Guidance takes two forward passes, so that each pass has verl's micro-batch size.
        """
        rows_of_cond: Any = optree.tree_map(lambda table: table[items["sample"]], cond)
        v = guided_velocity(
            self.model, module, items["x"], items["level"], rows_of_cond, timestep=items["timestep"], forwards="two"
        )
        return v.float()

    @property
    def _replays(self) -> bool:
        """Whether the prediction is only defined at the noise levels of the schedule."""
        return is_recorded(self.model) and not knows_any_level(self.model)

    def list_timesteps(self, shape: Shape) -> Tensor:
        """List the timesteps at which samples may be noised."""
        known: Tensor = self.schedule(shape).timesteps if self._replays else self.scheduler.timesteps
        return known.float()

    def add_noise(self, fields: BatchFields, x0: Tensor, noise: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        """Return the items x = (1 - sigma) x0 + sigma noise, `[N, *event]`, at sigma = timestep / 1000, `[N]`.

        For a replayed pipeline, sigma is that of the schedule at the timestep.

        Raises:
            UsageError: the model is not a flow, or the schedule of a replayed one lacks a timestep.
        """
        if self.model.prediction != "velocity":
            raise UsageError("the model predicts epsilon, and verl-omni adds noise as a flow does: use a loss of log_probs")
        shape, timestep = tuple(x0.shape[1:]), timestep.float()
        level = self.schedule(shape).levels[self.find_steps(timestep, shape)] if self._replays else timestep / TIMESTEPS
        sigma = level.to(x0.device).view(-1, *[1] * (x0.ndim - 1))
        sample = torch.arange(fields.samples).repeat(len(level) // fields.samples)
        return {
            "x": (1 - sigma) * x0 + sigma * noise,
            "level": sigma.flatten(),
            "timestep": timestep,
            "sample": sample.to(sigma.device),
            "x0": x0,
            "noise": noise,
        }
