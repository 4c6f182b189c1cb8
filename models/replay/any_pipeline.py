"""A model of any flow pipeline of diffusers without an adapter: the pipeline itself encodes, schedules and decodes.

To encode a prompt, the pipeline runs with a stand-in for its transformer, which returns noise at no cost. The inputs of the
stand-in, apart from the sample, are the prompt's conditioning; the velocity that the pipeline makes from the noise gives the
step's recipe (`models.replay.capture`). To decode samples, the pipeline runs with a scheduler that returns them. Everything
that a rollout relies on is checked (`models.replay.checks`), and `AnyPipeline.check` compares the result with a run of the
pipeline with its real transformer.
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from fluvial.core.random import Key, fold_in, key
from fluvial.core.table import Record
from fluvial.models.pipelines.base import Pipeline
from fluvial.models.pipelines.folder import entries, local_folder, quietly, read_index
from fluvial.models.protocol import Cond, Schedule
from fluvial.models.replay.capture import SCALES, Capture, same_steps
from fluvial.models.replay.checks import check_images, check_initial_noise, check_steps, foreign, refusal
from fluvial.models.replay.latents import LatentLayout, latent_layout, to_samples, vae_input
from fluvial.models.replay.recorded import TOLERANCES, RecordedModel, check_replay, generators, record, rounding

# A prompt is encoded as this many samples, so that an input with one row per sample differs from one that all share.
COPIES = 3
COMPONENT = "transformer"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")
UNSHOWN = ("output_type", "return_dict")  # arguments that the caller does not choose


class _Known(NamedTuple):
    """Values that do not depend on the prompt."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the samples that the pipeline ends with and decodes
    schedule: Schedule
    model: RecordedModel
    rows: tuple[tuple[torch.Size, ...], ...]  # shapes of the inputs with one row per sample


class AnyPipeline(Pipeline):
    """The model protocol over a flow pipeline without an adapter, for one size, number of steps and guidance.

    The conditioning includes the guidance, with the negative prompt, and is known only at the noise levels of the schedule.
    The text encoders stay loaded, because the whole pipeline takes part in decoding. If the folder's scheduler is a solver
    of higher order (as Sana's), it is replaced by Euler steps through the same flow.

    Args:
        folder: folder as diffusers saves a pipeline, or an id on the Hub; its transformer predicts a flow's velocity.
        height, width: size of the images or videos, in pixels.
        frames: number of frames of a video; 1 for images.
        steps: number of steps of the schedule.
        scale: scale of guidance, passed on as guidance_scale, or as true_cfg_scale if the pipeline has only that.
        negative: negative prompt of guidance.
        call: further arguments of the pipeline's call.
        compute: dtype that the transformer will compute in; pipelines round some of their own numbers to it.
        options: see `Pipeline`.

    Raises:
        ValueError: see `Pipeline`; or diffusers does not have the pipeline's class, or the class does not take an argument.
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
        self._latents: LatentLayout | None = None

    @property
    def lora_targets(self) -> tuple[str, ...]:  # type: ignore[override]
        """The attention projections, by those of diffusers' usual names that the network has."""
        layers = [name for name, layer in self._loaded().transformer.named_modules() if isinstance(layer, nn.Linear)]
        return tuple(target for target in TARGETS if any(name.endswith(f".{target}") for name in layers))

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the layers in the network's module lists; if the network names its block classes, only those layers."""
        layers = [layer for child in module.children() if isinstance(child, nn.ModuleList) for layer in child]
        named = {*(getattr(module, "_no_split_modules", None) or ()), *(getattr(module, "_repeated_blocks", None) or ())}
        return [layer for layer in layers if type(layer).__name__ in named] or layers

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one sample of the pipeline.

        Raises:
            ValueError: the size is not the one that the model was opened with, or the pipeline cannot be replayed.
        """
        size = (height, width, frames)
        if size != (opened := (self.asked["height"], self.asked["width"], self.asked.get("num_frames", 1))):
            raise ValueError(f"size (height, width, frames) is {size}, expected {opened}, as the pipeline was opened")
        return self.known.shape

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the pipeline's schedule; ValueError if the number of steps is not the one that it was opened with."""
        if steps != self.steps:
            raise ValueError(f"steps is {steps}, expected {self.steps}, as the pipeline was opened")
        return self.known.schedule

    def longest(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the tokenizer with the largest limit, and the number of tokens that it and the pipeline take."""
        from transformers import ProcessorMixin

        parts = [part for name, part in tokenizers.components.items() if name.startswith("tokenizer") and part is not None]
        # Some pipelines have a processor of text and images in the tokenizer's place.
        found = [part.tokenizer if isinstance(part, ProcessorMixin) else part for part in parts]
        if not found:
            raise ValueError(f"{self.pipeline} has no tokenizer: it makes no images from text")
        with foreign(self.pipeline, "tell the length of its prompts"):
            tokenizer = max(found, key=lambda one: one.model_max_length)
            return tokenizer, min(tokenizer.model_max_length, self.text_tokens)

    def count_tokens(self, tokenizer: Any, prompt: str) -> int:
        """Return the number of tokens of a prompt."""
        with foreign(self.pipeline, f"tokenize the prompt {prompt[:40]!r}"):
            return super().count_tokens(tokenizer, prompt)

    def text(self, encoders: Any, prompt: str) -> dict[str, Tensor]:
        """Return the transformer's inputs for a prompt apart from the sample, by recipe and row, each `[1, ...]`.

        Raises:
            ValueError: they have other shapes or another recipe than those of other prompts.
        """
        found, cond = self._dry(encoders, prompt)
        if not same_steps(found.model.recipes, self.known.model.recipes) or found.rows != self.known.rows:
            raise refusal(
                self.pipeline,
                f"its {COMPONENT} is given inputs of other shapes or settings for the prompt {prompt[:40]!r} than for "
                "others; samples of both cannot be in one batch",
            )
        return {f"{recipe}.{row}": tensor for recipe, rows in enumerate(cond) for row, tensor in enumerate(rows)}

    def cond(self, texts: Mapping[str, Tensor]) -> Cond:
        """Return the conditioning of the recorded model."""
        return tuple(
            tuple(texts[f"{recipe}.{row}"] for row in range(len(rows))) for recipe, rows in enumerate(self.known.rows)
        )

    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, *, timestep: Tensor | None = None) -> Tensor:
        """Return the velocity that the pipeline would step with, guidance included, at noise levels of its schedule.

        Raises:
            ValueError: a sigma is that of no step. On a GPU this is not checked; the velocity is NaN there.
        """
        return self.known.model.predict(module, x, sigma, cond)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images `[B, C, H, W]` or videos `[B, C, F, H, W]`, float in [0, 1]."""
        return torch.cat([self._decoded(chunk) for chunk in latents.split(self.decode_chunk)]).to(latents.device)

    @property
    def vae(self) -> Any:
        """The VAE of the loaded pipeline."""
        return self._loaded().vae

    @torch.no_grad()
    def encode_images(self, images: Tensor, *, key: Key | None = None) -> Tensor:
        """Return clean samples, see `Pipeline.encode_images`: the pipeline's way from samples to its VAE, backwards.

        Raises:
            ValueError: that way is not a scaled rearrangement.
        """
        if self._latents is None:
            self._latents = latent_layout(self._vae_input, self.known.shape, self.pipeline)
        videos = images.unsqueeze(2) if len(self._latents.shape) == 4 and images.ndim == 4 else images
        return to_samples(self.encode_with_vae(videos, key), self._latents, self.known.shape)

    def _vae_input(self, latents: Tensor) -> Tensor:
        """Return what the pipeline gives to its VAE to decode samples."""
        return vae_input(self.vae, lambda: self._decoded(latents), self.pipeline)

    def check(self, module: nn.Module, prompts: Sequence[str]) -> float:
        """Compare the model with a run of the pipeline: schedule, velocities, initial noise, steps and decoded images.

        Args:
            module: the transformer, as it is trained.
            prompts: prompts of the run.

        Returns:
            The largest relative error of the velocities.

        Raises:
            ValueError: something differs by more than rounding; the message names the pipeline and what differs.
        """
        pipe, stand_in = self._loaded(), self._loaded().transformer
        apart = ("num_inference_steps", "return_dict", "output_type")
        asked = {name: value for name, value in self.asked.items() if name not in apart}
        pipe.transformer = module
        try:
            with quietly(), torch.no_grad():
                run = record(pipe, prompts, key=key(0), steps=self.steps, sampler="ode", form="unscaled", **asked)
        finally:
            pipe.transformer = stand_in
        if not torch.equal(run.schedule.levels, self.known.schedule.levels):
            raise refusal(self.pipeline, "its schedule differs from run to run")
        check_steps(self.pipeline, run.taken, self.steps)
        check_initial_noise(self.pipeline, run.initial)
        final = run.trajectory.final
        check_images(self.pipeline, self.decode(final), _pixels(run.images), tolerance=TOLERANCES[self.dtype])
        cond = tuple(tuple(row.to(final.device) for row in rows) for rows in self.encode(prompts))
        ours = dataclasses.replace(run, model=self.known.model, cond=cond)
        return check_replay(module, ours, micro_batch=max(len(prompts) - 1, 1), tolerance=rounding(run.model))

    @property
    def known(self) -> _Known:
        """The record of a run of the pipeline on the empty prompt."""
        if self._once is None:
            self._once = self._dry(self._loaded(), "")[0]
        return self._once

    def _asked(
        self, height: int, width: int, frames: int, steps: int, scale: float, negative: str, call: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of the pipeline's call apart from the prompt."""
        asked: dict[str, Any] = {
            "height": height,
            "width": width,
            "num_inference_steps": steps,
            "output_type": "latent",
            "return_dict": False,
        }
        if "num_frames" in self.takes:
            asked["num_frames"] = frames
        elif frames != 1:
            raise ValueError(f"frames is {frames}, expected 1: {self.pipeline} makes images")
        guidance = next((name for name in SCALES if name in self.takes), None)
        if guidance is not None:
            asked[guidance] = scale
        elif scale != 1:
            raise ValueError(f"the scale of guidance is {scale:g}, expected 1: {self.pipeline} has no guidance")
        if scale != 1 and "negative_prompt" in self.takes:
            asked["negative_prompt"] = negative
        asked |= call
        if unknown := [name for name in asked if name not in self.takes]:
            raise ValueError(f"{self.pipeline} takes no {unknown[0]}, it takes {', '.join(list(self.takes)[1:])}")
        return asked

    def _load(self, *wanted: str) -> Any:
        return self._loaded()

    def _encoders(self) -> str:
        return f"{super()._encoders()} {self.compute} {_exactly(self.asked)}"

    def _loaded(self) -> Any:
        """Return the pipeline with a stand-in for its transformer; its other parts are frozen and on the device."""
        if self._pipe is None:
            from diffusers import FlowMatchEulerDiscreteScheduler

            stand_in = _stand_in(self.build(empty=True), self.device, self.compute)
            with quietly(), foreign(self.pipeline, "be loaded"):
                pipe = self._opened(transformer=None)
                for part in pipe.components.values():
                    if isinstance(part, nn.Module):
                        part.requires_grad_(False).eval().to(self.device)
                settings = pipe.scheduler.config
                if settings.get("use_flow_sigmas") and settings.get("flow_shift") is not None:
                    # A solver of higher order on the levels of a flow, which can be stepped through by Euler's method too.
                    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=settings["flow_shift"])
                pipe.transformer = stand_in
                pipe.set_progress_bar_config(disable=True)
            self._pipe = pipe
        return self._pipe

    def _several(self, prompt: str, number: int) -> dict[str, Any]:
        """Return the arguments that make the pipeline draw several samples of a prompt."""
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
        with foreign(self.pipeline, "be trained without an adapter"):
            scheduler = RecordingScheduler.from_config({**own.config, "_class_name": type(own).__name__})
        with (
            quietly(),
            capture.watching(pipe, scheduler),
            scheduler.recording(key=key(0), record=Record(form="unscaled"), on_step=capture.step) as recorder,
        ):
            with foreign(self.pipeline, f"be called with {_shown(self.asked)}"):
                pipe(**asked)
            if capture.initial is None:
                raise refusal(self.pipeline, "its scheduler takes no step")
        levels = recorder.scheduled.sigmas
        check_steps(self.pipeline, capture.taken, len(levels) - 1)
        check_initial_noise(self.pipeline, capture.initial)
        recipes, cond = capture.recipes()
        if any(not torch.equal(row[0], other) for rows in cond for row in rows for other in row[1:]):
            raise refusal(self.pipeline, f"its {COMPONENT} is given something besides the sample that depends on it")
        shapes = tuple(tuple(row.shape[1:] for row in rows) for rows in cond)
        model = RecordedModel(self.pipeline, levels[:-1], recipes)
        last = recorder.trajectory().x_next
        first = tuple(tuple(row[:1] for row in rows) for rows in cond)
        return _Known(tuple(last.shape[2:]), last.dtype, Schedule(levels, scheduler.timesteps), model, shapes), first

    def _decoded(self, latents: Tensor) -> Tensor:
        """Return the pipeline's images for its last latents."""
        pipe = self._loaded()
        own = pipe.scheduler
        once = {**self._several("", len(latents)), "num_inference_steps": 1, "output_type": "pt"}
        try:
            with quietly(), foreign(self.pipeline, "decode samples"):
                pipe.scheduler = _answer(own, latents.to(self.device, self.known.dtype))
                return _pixels(pipe(**{**self.asked, **once})[0])
        finally:
            pipe.scheduler = own


def _shown(asked: Mapping[str, Any]) -> str:
    """Return the arguments of a pipeline's call in one line, for messages."""

    def short(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"tensor{list(value.shape)}"
        text = " ".join(repr(value).split())
        return text if len(text) <= 60 else f"{text[:60]}..."

    return ", ".join(f"{name}={short(value)}" for name, value in asked.items() if name not in UNSHOWN)


def _exactly(asked: Mapping[str, Any]) -> str:
    """Return the arguments of a pipeline's call with all values of tensors and images, for a fingerprint."""

    def whole(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} {value.tolist()}"
        return f"{value.size} {value.tobytes()!r}" if isinstance(value, Image.Image) else repr(value)

    return ", ".join(f"{name}={whole(value)}" for name, value in asked.items() if name not in UNSHOWN)


def _pixels(made: Tensor) -> Tensor:
    """Return a pipeline's output as images `[B, C, H, W]` or videos `[B, C, F, H, W]`, float in [0, 1]."""
    return (made.transpose(1, 2) if made.ndim == 5 else made).float().clamp(0, 1)


def _stand_in(network: Any, on: torch.device, compute: torch.dtype) -> Any:
    """Return the empty network with another device and dtype, whose forward pass returns noise."""
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
    """Return a scheduler with the settings of another one, whose steps return the given samples."""

    class Answer(type(scheduler)):  # type: ignore[misc]
        def step(self, *args: Any, **kwargs: Any) -> tuple[Tensor]:
            return (latents,)

    return Answer.from_config(scheduler.config)
