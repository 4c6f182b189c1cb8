"""The model as verl's batches use it: schedule, sampler, conditioning and predictions, with its guidance."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core.transitions import Sampler, bind
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.extensions.verl.batch import Fields, lengths_of
from fluvial.engines.extensions.verl.settings import Settings
from fluvial.models import Cond, Schedule
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.pipelines.base import PATCH, TextCond, pack, unpack
from fluvial.models.pipelines.open import open_model
from fluvial.models.pipelines.qwen_image import QwenCond

Shape = tuple[int, ...]
WAN_SHIFT = 5.0  # of the noise levels: verl-omni's own, whatever the folder's scheduler has


class Architecture(NamedTuple):
    """How the fields of a batch become the inputs of a model."""

    fields: tuple[str, ...]  # fields of the conditioning; those of the negative prompt are `negative_...`
    cond: Callable[[Mapping[str, Tensor]], Cond]  # conditioning, from these fields
    scale: Literal["guidance_scale", "true_cfg_scale"]  # field of the pipeline config that holds the guidance scale
    packed: bool = False  # whether samples come as tokens `[..., H W / 4, 4 C]`, and not as the model takes them
    masked: bool = False  # whether the network masks padding tokens
    schedule: Callable[[int], Schedule] | None = None  # schedule of a number of steps, where it is not the pipeline's

    def layout(self, shape: Shape) -> Shape:
        """Return the shape that a sample of shape (C, H, W), or (C, F, H, W) for a video, has in a batch."""
        if not self.packed:
            return shape
        channels, height, width = shape
        return ((height // PATCH) * (width // PATCH), channels * PATCH**2)

    def unpack(self, samples: Tensor, shape: Shape) -> Tensor:
        """Return samples as the model takes them, `[..., C, H, W]` or `[..., C, F, H, W]`, of a batch's samples."""
        return unpack(samples, shape[-2]) if self.packed else samples

    def pack(self, samples: Tensor) -> Tensor:
        """Return samples of the model as a batch holds them."""
        return pack(samples) if self.packed else samples


def _sd3(fields: Mapping[str, Tensor]) -> TextCond:
    return TextCond(fields["prompt_embeds"].float(), fields["pooled_prompt_embeds"].float())


def _qwen_image(fields: Mapping[str, Tensor]) -> QwenCond:
    tokens, mask = fields["prompt_embeds"].float(), fields["prompt_embeds_mask"].bool()
    # What lies at padding tokens is masked, but verl may have left it as it was.
    return QwenCond(torch.where(mask[..., None], tokens, 0.0), mask)


def _wan(fields: Mapping[str, Tensor]) -> TextCond:
    return TextCond(fields["prompt_embeds"].float() * fields["prompt_embeds_mask"][..., None].float())


def _wan_schedule(steps: int) -> Schedule:
    """Return the shifted levels s t / (1 + (s - 1) t) of t = 1, 1 - 1/T, ..., 0."""
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64).float()
    levels = WAN_SHIFT * t / (1 + (WAN_SHIFT - 1) * t)
    return Schedule(levels, 1000 * levels[:-1])


ARCHITECTURES: dict[str, Architecture] = {
    "StableDiffusion3Pipeline": Architecture(("prompt_embeds", "pooled_prompt_embeds"), _sd3, "guidance_scale"),
    "QwenImagePipeline": Architecture(
        ("prompt_embeds", "prompt_embeds_mask"), _qwen_image, "true_cfg_scale", packed=True, masked=True
    ),
    "WanPipeline": Architecture(("prompt_embeds", "prompt_embeds_mask"), _wan, "true_cfg_scale", schedule=_wan_schedule),
}


NEAR = 0.01  # largest difference between a rollout's timestep, up to 1000, and the schedule's
TIMESTEPS = 1000.0  # timestep of a flow's noise level 1


class Denoiser:
    """A pipeline's model with the settings of a run.

    Args:
        settings: the run.
        device: device of the engine.

    Raises:
        UsageError: the folder holds no pipeline, or one that has no row in `ARCHITECTURES`.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        if settings.architecture not in ARCHITECTURES:
            raise UsageError(
                f"model.architecture is {settings.architecture!r}, which fluvial's engine for verl has no adapter for: "
                f"expected one of {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[settings.architecture]
        with convert_errors(UsageError, ValueError, OSError, says="model.path"):
            self.model = open_model(settings.folder, device=device)
        if self.model.pipeline != settings.architecture:
            raise UsageError(
                f"model.architecture is {settings.architecture}, and {settings.folder} is {self.model.pipeline}"
            )
        if not isinstance(self.model.weights, Path):
            raise UsageError(
                f"model.path: {settings.folder} has {len(self.model.weights)} networks, and verl-omni trains one"
            )
        self.schedule = cache(self._schedule)
        self.scale = settings.scale[self.architecture.scale]

    def _schedule(self, shape: Shape) -> Schedule:
        if self.architecture.schedule is not None:
            return self.architecture.schedule(self.settings.steps)
        return Schedule(*(t.float() for t in self.model.schedule(self.settings.steps, shape)))

    def shape(self, fields: Fields) -> Shape:
        """Return the shape of a sample, (C, H, W) or (C, F, H, W). UsageError if the model does not support that size."""
        names = ("height", "width", "num_frames")
        size = (int(fields.plain(name, own)) for name, own in zip(names, self.settings.size, strict=True))
        with convert_errors(UsageError, ValueError, says="model.pipeline"):
            return self.model.latent_shape(*size)

    def latents(self, fields: Fields, name: str, shape: Shape, *before: int) -> Tensor:
        """Return samples `[*before, C, (F,) H, W]` of a batch, in float32. UsageError if it has none of that shape."""
        layout = self.architecture.layout(shape)
        value = fields.tensor(name, (*before, *layout), what=f"samples of {shape} for the size that is set")
        if value.ndim != len(before) + len(layout):
            raise UsageError(f"{name} has shape {list(value.shape)}, expected {[*before, *layout]}")
        return self.architecture.unpack(value.float(), shape)

    def sampler(self, shape: Shape) -> Sampler:
        """Return the sampler of the stochastic steps for the schedule of a shape."""
        return bind(self.settings.sampler, self.settings.eta, self.schedule(shape).levels)

    def steps(self, timesteps: Tensor, shape: Shape) -> Tensor:
        """Return the index in the schedule of each timestep of a rollout, int64. UsageError if it has no such timestep."""
        known = self.schedule(shape).timesteps
        away, found = (timesteps.float().cpu()[..., None] - known).abs().min(-1)
        if bool((away > NEAR).any()):
            wrong = float(timesteps.flatten()[int(away.argmax())])
            raise UsageError(
                f"all_timesteps holds {wrong:g}, which is none of the {len(known)} timesteps of the schedule "
                f"({float(known[0]):g} to {float(known[-1]):g}): set model.pipeline.num_inference_steps, height and width "
                "as in the rollout"
            )
        return found

    def cond(self, fields: Fields) -> Cond:
        """Return the conditioning of each sample on the device, with that of the negative prompt where there is guidance."""
        cond = self._cond(fields, "")
        if self.scale > 1:  # verl-omni counts a scale of up to 1 as no guidance
            cond = Guided(cond, self._cond(fields, "negative_"), torch.full((fields.samples,), self.scale))
        return optree.tree_map(lambda tensor: tensor.to(self.device), cond)

    def _cond(self, fields: Fields, prefix: str) -> Cond:
        architecture, found = self.architecture, dict[str, Tensor]()
        for name in architecture.fields:
            full = prefix + name
            if name == "prompt_embeds_mask" and not fields.has(full):
                embeds = fields.tensor(prefix + "prompt_embeds", (fields.samples,))
                lengths = torch.tensor(lengths_of(embeds))
                found[name] = torch.arange(int(lengths.max())) < lengths[:, None]
            else:
                found[name] = fields.dense(full, masked=architecture.masked)
        mask, embeds = found.get("prompt_embeds_mask"), found["prompt_embeds"]
        if mask is not None and mask.shape != embeds.shape[:2]:
            raise UsageError(
                f"{prefix}prompt_embeds_mask has shape {list(mask.shape)}, expected {list(embeds.shape[:2])}, one number "
                f"per token of {prefix}prompt_embeds"
            )
        return architecture.cond(found)

    def predict(self, module: nn.Module, items: dict[str, Tensor], cond: Cond) -> Tensor:
        """Return the prediction at each item of a micro-batch, guided as the rollout was, in float32.

        Guidance makes two forward passes, so that a pass has as many samples as verl's setting says.
        """
        own: Any = optree.tree_map(lambda table: table[items["sample"]], cond)
        v = guided_velocity(self.model, module, items["x"], items["level"], own, timestep=items["timestep"], forwards="two")
        return v.float()

    def add_noise(self, fields: Fields, x0: Tensor, noise: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        """Return the items x = (1 - sigma) x0 + sigma noise, `[N, *event]`, at sigma = timestep / 1000, `[N]`."""
        level = timestep.float() / TIMESTEPS
        sigma = level.view(-1, *[1] * (x0.ndim - 1))
        sample = torch.arange(fields.samples).repeat(len(level) // fields.samples)
        return {
            "x": (1 - sigma) * x0 + sigma * noise,
            "level": level,
            "timestep": timestep.float(),
            "sample": sample.to(level.device),
            "x0": x0,
            "noise": noise,
        }
