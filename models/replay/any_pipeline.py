"""A model of any flow pipeline of diffusers, without an adapter: the pipeline itself encodes, schedules and decodes.

To encode a prompt, the pipeline is run with a stand-in for its transformer, which returns noise and takes no time. What the
transformer would have been given at each step, but for the sample, is the prompt's conditioning, and what the pipeline made
of the noise says how its velocity comes about (`models.capture`). To decode samples, it is run with a scheduler that answers
with them. `check` compares all this with a run of the pipeline with its real transformer.
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.random import fold_in, key
from fluvial.models.pipelines.base import Pipeline
from fluvial.models.pipelines.folder import entries, local_folder, quietly, read_index
from fluvial.models.protocol import Cond, Schedule
from fluvial.models.replay.capture import SCALES, Capture, same_steps
from fluvial.models.replay.recorded import RecordedModel, check_replay, generators, record, rounding

# A prompt is encoded as that many samples, so that an input with a row for each is told from one that all share.
COPIES = 3
COMPONENT = "transformer"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")


class _Known(NamedTuple):
    """What does not depend on the prompt."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the samples that the pipeline ends with, and decodes
    schedule: Schedule
    model: RecordedModel
    rows: tuple[tuple[torch.Size, ...], ...]  # shapes of the inputs with a row a sample


class AnyPipeline(Pipeline):
    """The velocity-model protocol over a flow pipeline that has no adapter, for one size, number of steps and guidance.

    Its conditioning holds its guidance, negative prompt and all, and is known at the noise levels of its schedule alone. The
    text encoders stay loaded, since the pipeline takes part in decoding. A folder's solver of higher order (as Sana has)
    makes way for Euler's steps through the same flow.

    Args:
        folder: as diffusers saves a pipeline, or an id on the Hub; its transformer predicts a flow's velocity.
        height, width, frames: of the images (videos), in pixels.
        steps: of its schedule.
        scale: of its guidance; passed on as guidance_scale, or as true_cfg_scale where it knows no other.
        negative: prompt that is guided away from.
        call: what else the pipeline is called with.
        compute: dtype that the transformer will work in, which pipelines round numbers of their own to.
        options: as any pipeline takes them.

    Raises:
        ValueError: as `Pipeline`, or the pipeline's class is not one of diffusers'.
    """

    recorded = True

    def __init__(
        self,
        folder: str | Path,
        *,
        height: int,
        width: int,
        frames: int = 1,
        steps: int,
        scale: float = 1.0,
        negative: str = "",
        call: Mapping[str, Any] | None = None,
        compute: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        import diffusers

        local = local_folder(folder, trust_remote_code=options.get("trust_remote_code", False))
        self.pipeline, parts = str(read_index(local).get("_class_name")), entries(local)
        kind = getattr(diffusers, self.pipeline, None)
        if kind is None:
            raise ValueError(f"{local} holds a {self.pipeline}, which diffusers {diffusers.__version__} does not have")
        if parts.get(COMPONENT) is None:
            raise ValueError(
                f"{local} holds a {self.pipeline}, which there is no adapter for, and without one only flow pipelines with "
                f"a {COMPONENT} can be trained (fluvial models)"
            )
        self.network = str(parts[COMPONENT])
        self.takes = inspect.signature(kind.__call__).parameters
        most = (call or {}).get("max_sequence_length", getattr(self.takes.get("max_sequence_length"), "default", None))
        most = most if isinstance(most, int) else 2**31
        self.text_lengths = (most, 2**31)
        self.asked = self._asked(height, width, frames, steps, scale, negative, call or {})
        super().__init__(local, **options)
        if "max_sequence_length" in self.takes and self.text_tokens < 2**31:
            self.asked["max_sequence_length"] = self.text_tokens
        self.steps, self.compute = steps, compute
        self._pipe: Any = None
        self._once: _Known | None = None

    @property
    def lora_targets(self) -> tuple[str, ...]:  # type: ignore[override]
        """The projections of attention, by those of the names that diffusers gives them that this network has."""
        layers = [name for name, layer in self._loaded().transformer.named_modules() if isinstance(layer, nn.Linear)]
        return tuple(target for target in TARGETS if any(name.endswith(f".{target}") for name in layers))

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the layers in the network's lists, those alone that it says are its blocks if it says so."""
        layers = [layer for child in module.children() if isinstance(child, nn.ModuleList) for layer in child]
        said = {*(getattr(module, "_no_split_modules", None) or ()), *(getattr(module, "_repeated_blocks", None) or ())}
        return [layer for layer in layers if type(layer).__name__ in said] or layers

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of the samples that the pipeline makes.

        Raises:
            ValueError: another size is asked for than it was opened with, or it refuses that.
        """
        size = (height, width, frames)
        if size != (opened := (self.asked["height"], self.asked["width"], self.asked.get("num_frames", 1))):
            raise ValueError(f"{size} (height, width, frames) is asked for, expected {opened}, as the pipeline was opened")
        return self.known.shape

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return what the pipeline steps through; ValueError if other steps are asked for than it was opened with."""
        if steps != self.steps:
            raise ValueError(f"{steps} steps are asked for, expected {self.steps}, as the pipeline was opened")
        return self.known.schedule

    def longest(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the tokenizer that takes most, and how many tokens the pipeline or it takes."""
        found = [part for name, part in tokenizers.components.items() if name.startswith("tokenizer") and part is not None]
        if not found:
            raise ValueError(f"{self.pipeline} has no tokenizer: it makes no images from text")
        tokenizer = max(found, key=lambda one: one.model_max_length)
        return tokenizer, min(tokenizer.model_max_length, self.text_tokens)

    def text(self, encoders: Any, prompt: str) -> dict[str, Tensor]:
        """Return what the transformer is given for a prompt besides the sample, by way and row, each `[1, ...]`.

        Raises:
            ValueError: it is given something else than for other prompts.
        """
        found, cond = self._dry(encoders, prompt)
        if not same_steps(found.model.ways, self.known.model.ways) or found.rows != self.known.rows:
            raise ValueError(
                f"{self.pipeline} cannot be trained without an adapter: its {COMPONENT} is given inputs of other shapes or "
                f"settings for the prompt {prompt[:40]!r} than for others; samples of both cannot be in one batch"
            )
        return {f"{way}.{row}": tensor for way, rows in enumerate(cond) for row, tensor in enumerate(rows)}

    def cond(self, texts: Mapping[str, Tensor]) -> Cond:
        """Return them as the recorded model takes them."""
        return tuple(tuple(texts[f"{way}.{row}"] for row in range(len(rows))) for way, rows in enumerate(self.known.rows))

    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, *, timestep: Tensor | None = None) -> Tensor:
        """Return the velocity that the pipeline would step with, guidance included, at levels of its schedule.

        Raises:
            ValueError: a sigma is no step's (looked at only where that is free; elsewhere the answer is NaN).
        """
        return self.known.model.predict(module, x, sigma, cond)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images `[B, C, H, W]`, or videos `[B, C, F, H, W]`, float in [0, 1]."""
        return torch.cat([self._decoded(chunk) for chunk in latents.split(self.decode_chunk)]).to(latents.device)

    def check(self, module: nn.Module, prompts: Sequence[str]) -> float:
        """Compare the model with a run of the pipeline: return the largest relative error of its velocities.

        Args:
            module: the transformer, as it is trained.
            prompts: to run it on.

        Raises:
            ValueError: they are further apart than by rounding, or the schedules differ; the message names the pipeline.
        """
        pipe, stand_in = self._loaded(), self._loaded().transformer
        asked = {name: value for name, value in self.asked.items() if name not in ("num_inference_steps", "return_dict")}
        pipe.transformer = module
        try:
            with quietly():
                run = record(pipe, prompts, key=key(0), steps=self.steps, sampler="ode", form="unscaled", **asked)
        finally:
            pipe.transformer = stand_in
        if not torch.equal(run.schedule.levels, self.known.schedule.levels):
            raise ValueError(f"{self.pipeline} cannot be trained without an adapter: its schedule differs from run to run")
        device = run.trajectory.final.device
        cond = tuple(tuple(row.to(device) for row in rows) for rows in self.encode(prompts))
        ours = dataclasses.replace(run, model=self.known.model, cond=cond)
        return check_replay(module, ours, micro_batch=max(len(prompts) - 1, 1), tolerance=rounding(run.model))

    @property
    def known(self) -> _Known:
        """What a run of the pipeline on the empty prompt shows."""
        if self._once is None:
            self._once = self._dry(self._loaded(), "")[0]
        return self._once

    def _asked(
        self, height: int, width: int, frames: int, steps: int, scale: float, negative: str, call: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what the pipeline is called with besides the prompt."""
        asked: dict[str, Any] = {
            "height": height, "width": width, "num_inference_steps": steps, "output_type": "latent", "return_dict": False
        }  # fmt: skip
        if "num_frames" in self.takes:
            asked["num_frames"] = frames
        elif frames != 1:
            raise ValueError(f"{frames} frames are asked for, expected 1: {self.pipeline} makes images")
        guidance = next((name for name in SCALES if name in self.takes), None)
        if guidance is not None:
            asked[guidance] = scale
        elif scale != 1:
            raise ValueError(f"guidance of scale {scale:g} is asked for, and {self.pipeline} has none")
        if scale != 1 and "negative_prompt" in self.takes:
            asked["negative_prompt"] = negative
        asked |= call
        if unknown := [name for name in asked if name not in self.takes]:
            raise ValueError(f"{self.pipeline} takes no {unknown[0]}, it takes {', '.join(list(self.takes)[1:])}")
        return asked

    def _load(self, *wanted: str) -> Any:
        return self._loaded()

    def _encoders(self) -> str:
        return f"{super()._encoders()} {self.compute} {_shown(self.asked)}"

    def _loaded(self) -> Any:
        """Return the pipeline with a stand-in for its transformer, its other parts frozen and on the device."""
        if self._pipe is None:
            from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

            stand_in = _stand_in(self.build(empty=True), self.device, self.compute)
            with quietly():
                self._pipe = DiffusionPipeline.from_pretrained(
                    self.folder, transformer=None, torch_dtype=self.dtype, local_files_only=True,
                    trust_remote_code=self.trust_remote_code,
                )  # fmt: skip
            for part in self._pipe.components.values():
                if isinstance(part, nn.Module):
                    part.requires_grad_(False).eval().to(self.device)
            settings = self._pipe.scheduler.config
            if settings.get("use_flow_sigmas") and settings.get("flow_shift") is not None:
                # A solver of higher order on the levels of a flow, which have Euler's steps too.
                self._pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=settings["flow_shift"])
            self._pipe.transformer = stand_in
            self._pipe.set_progress_bar_config(disable=True)
        return self._pipe

    def _several(self, prompt: str, number: int) -> dict[str, Any]:
        """Return how the pipeline is told to make several samples of a prompt."""
        for name in ("num_images_per_prompt", "num_videos_per_prompt"):
            if name in self.takes:
                return {"prompt": prompt, name: number}
        return {"prompt": [prompt] * number}

    @torch.no_grad()
    def _dry(self, pipe: Any, prompt: str) -> tuple[_Known, Cond]:
        """Run the pipeline with the stand-in on one prompt: (what it shows, the conditioning of that prompt)."""
        from fluvial.models.replay.scheduler import RecordingScheduler

        seeds = generators(fold_in(key(0), torch.arange(COPIES)))
        asked = {**self.asked, **self._several(prompt, COPIES), "generator": seeds}
        capture = Capture(pipe, COMPONENT, asked)
        own = pipe.scheduler
        scheduler = RecordingScheduler.from_config({**own.config, "_class_name": type(own).__name__})
        try:
            with (
                quietly(), capture.watching(pipe, scheduler),
                scheduler.recording(key=key(0), form="unscaled", on_step=capture.step) as recorder,
            ):  # fmt: skip
                pipe(**asked)
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, IndexError) as error:
            if str(error).startswith(self.pipeline):  # a refusal of the capture's
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.pipeline} cannot be called with {_shown(self.asked)}: {reason}") from error
        ways, cond = capture.ways()
        if any(not torch.equal(row[0], other) for rows in cond for row in rows for other in row[1:]):
            raise ValueError(
                f"{self.pipeline} cannot be trained without an adapter: its {COMPONENT} is given something besides the "
                "sample that depends on it"
            )
        shapes = tuple(tuple(row.shape[1:] for row in rows) for rows in cond)
        levels = recorder.sigmas
        model = RecordedModel(self.pipeline, levels[:-1], ways)
        last = recorder.trajectory().x_next
        own = tuple(tuple(row[:1] for row in rows) for rows in cond)
        return _Known(tuple(last.shape[2:]), last.dtype, Schedule(levels, scheduler.timesteps), model, shapes), own

    def _decoded(self, latents: Tensor) -> Tensor:
        """Return what the pipeline makes of its last latents."""
        pipe = self._loaded()
        own = pipe.scheduler
        pipe.scheduler = _answer(own, latents.to(self.device, self.known.dtype))
        once = {**self._several("", len(latents)), "num_inference_steps": 1, "output_type": "pt"}
        try:
            with quietly():
                images: Tensor = pipe(**{**self.asked, **once})[0]
        finally:
            pipe.scheduler = own
        return (images.transpose(1, 2) if images.ndim == 5 else images).float().clamp(0, 1)


def _shown(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in asked.items() if name not in ("output_type", "return_dict"))


def _stand_in(network: Any, on: torch.device, compute: torch.dtype) -> Any:
    """Return the empty network, made to look as if it were on a device and of a dtype, and to answer with noise."""
    kind, source = type(network), torch.Generator().manual_seed(0)
    doubled = network.config.get("out_channels") == 2 * network.config.get("in_channels", math.inf)  # a learned variance

    class StandIn(kind):  # type: ignore[misc, valid-type]
        device, dtype = property(lambda self: on), property(lambda self: compute)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            sample = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            shape = (len(sample), (2 if doubled else 1) * sample.shape[1], *sample.shape[2:])
            return (torch.randn(shape, generator=source).to(sample.device, compute),)

    network.__class__ = StandIn
    return network


def _answer(scheduler: Any, latents: Tensor) -> Any:
    """Return a scheduler with another one's settings, whose steps all lead to the given samples."""

    class Answer(type(scheduler)):  # type: ignore[misc]
        def step(self, *args: Any, **kwargs: Any) -> tuple[Tensor]:
            return (latents,)

    return Answer.from_config(scheduler.config)
