"""A model of any flow pipeline of diffusers without an adapter: the pipeline itself encodes, schedules and decodes.

To encode a prompt, the pipeline runs with a stand-in for its transformer, which returns noise at no cost. The inputs of the
stand-in, apart from the sample, are the prompt's conditioning; the velocity that the pipeline makes from the noise gives the
step's recipe (`models.replay.capture`). To decode samples, the pipeline runs with a scheduler that returns them. Everything
that a rollout relies on is checked (`models.replay.checks`), and `AnyPipeline.check` compares the result with a run of the
pipeline with its real transformer.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core.random import Key, fold_in, key
from fluvial.core.table import Record
from fluvial.models.lora import attention_layers
from fluvial.models.pipelines.folder import entries, local_folder, quietly, read_index
from fluvial.models.pipelines.wan import EXPERTS, WithExperts
from fluvial.models.protocol import Cond, Schedule, Sounds
from fluvial.models.replay.arguments import LYRICS, ONE_OF_EACH, arguments, called, exactly, forms, parameters, shown
from fluvial.models.replay.capture import Capture, control_networks, same_steps
from fluvial.models.replay.checks import ReplayError, check_images, check_initial_noise, check_tail, foreign, refusal
from fluvial.models.replay.experts import placed
from fluvial.models.replay.latents import LatentLayout, latent_layout, to_samples, vae_input
from fluvial.models.replay.media import MediaPrompt, TextPrompt, as_png, inverted, open_image, text_of, use_modes
from fluvial.models.replay.processors import read_processors
from fluvial.models.replay.recorded import (
    TOLERANCES,
    RecordedModel,
    Recording,
    check_replay,
    generators,
    padded_to,
    record,
    rounding,
    within,
)
from fluvial.models.replay.sounds import Output, alone, output_of, rate_of
from fluvial.models.replay.stand_in import answering, emptied, pieces_of, stand_in
from fluvial.models.replay.start import start_of, taken_of, with_offset, without_offset

# A prompt is encoded as several samples, so that an input with one row per sample differs from one that all share.
COPIES = (3, 5, 7)
COMPONENT = "transformer"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")
LEAST_STEPS = {"invert_sigmas": 3, "shift_terminal": 2}  # of a schedule, by what its scheduler is set to
SIZES, OFFSET = "sizes", "offset"  # names of the shapes of a prompt's inputs, and of what its samples start from


class _Known(NamedTuple):
    """Values that do not depend on the prompt."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the samples that the pipeline ends with and decodes
    schedule: Schedule
    model: RecordedModel
    rows: tuple[tuple[torch.Size, ...], ...]  # shapes of the inputs with one row per sample
    pieces: tuple[torch.Size, ...]  # shapes of the pieces of a flat sample; empty for a sample of one piece
    levels: Tensor  # [T+1] the pipeline's own noise levels, of which the last are taken


class _Dry(NamedTuple):
    """A run of the pipeline without its network on one prompt."""

    known: _Known
    cond: Cond  # rows of the prompt, by recipe
    offset: Tensor | None  # [1, *event] part of the initial samples that is no noise; None if there is none


class AnyPipeline(WithExperts):
    """The model protocol over a flow pipeline without an adapter, for one size, number of steps and guidance.

    The conditioning includes the guidance, with the negative prompt, and is known only at the noise levels of the schedule.
    The text encoders stay loaded, because the whole pipeline takes part in decoding. If the folder's scheduler is a solver
    of higher order (as Sana's), it is replaced by Euler steps through the same flow.

    Args:
        folder: folder as diffusers saves a pipeline, or an id on the Hub; its transformer predicts a flow's velocity.
        height, width: size of the images or videos, in pixels.
        frames: number of frames of a video; 1 for images.
        steps: number of steps of the schedule.
        scale: scale of guidance, passed on as guidance_scale, or as true_cfg_scale if the pipeline has only that or its
            network takes no scale.
        negative: negative prompt of guidance.
        call: further arguments of the pipeline's call.
        example: prompt that the pipeline is first run on; a pipeline that needs images is given those of the example.
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
        example: TextPrompt = "",
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
        self.takes = parameters(kind)
        most = (call or {}).get("max_sequence_length", getattr(self.takes.get("max_sequence_length"), "default", None))
        most = most if isinstance(most, int) else 2**31
        self.text_lengths = (most, 2**31)
        super().__init__(local, **options)
        self.decode_chunk = 1 if self.pipeline in ONE_OF_EACH else self.decode_chunk
        embedded = self.config.get("guidance_embeds", True)
        self.asked = arguments(
            self.pipeline, self.takes, (height, width, frames), steps, scale, negative, call or {}, embedded
        )
        if "max_sequence_length" in self.takes and self.text_tokens < 2**31:
            self.asked["max_sequence_length"] = self.text_tokens
        if "strength" in self.takes:
            strength = self.asked.get("strength", self.takes["strength"].default)
            self.asked["num_inference_steps"] = taken_of(steps, float(strength))
        self.steps, self.compute, self.example, self.size = steps, compute, example, (height, width, frames)
        self.shortest = example
        self._form = 0  # index of the form of the call that makes several samples of a prompt
        self._pipe: Any = None
        self._frozen: dict[str, Any] = {}  # control networks, in whose place the pipeline has stand-ins, too
        self._once: _Known | None = None
        self._latents: LatentLayout | None = None
        self._sees: bool | None = None  # see `_decoding_sees_images`

    @property
    def lora_targets(self) -> tuple[str, ...]:  # type: ignore[override]
        """The attention projections that the network has of diffusers' usual names, else its attention's linear layers."""
        layers = [name for name, layer in self._loaded().transformer.named_modules() if isinstance(layer, nn.Linear)]
        usual = tuple(target for target in TARGETS if any(name.endswith(f".{target}") for name in layers))
        return usual or attention_layers(self._loaded().transformer)

    def blocks_of(self, network: nn.Module) -> Sequence[nn.Module]:
        """Return the layers in the network's module lists; if the network names its block classes, only those layers."""
        layers = [layer for child in network.children() if isinstance(child, nn.ModuleList) for layer in child]
        named = {*(getattr(network, "_no_split_modules", None) or ()), *(getattr(network, "_repeated_blocks", None) or ())}
        return [layer for layer in layers if type(layer).__name__ in named] or layers

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one sample of the pipeline.

        Raises:
            ValueError: the size is not the one that the model was opened with, or the pipeline cannot be replayed.
        """
        size = (height, width, frames)
        if size != self.size:
            raise ValueError(f"size (height, width, frames) is {size}, expected {self.size}, as the pipeline was opened")
        return self.known.shape

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the pipeline's schedule; ValueError if the number of steps is not the one that it was opened with."""
        if steps != self.steps:
            raise ValueError(f"steps is {steps}, expected {self.steps}, as the pipeline was opened")
        return self.known.schedule

    def longest(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the tokenizer with the largest limit, and the number of tokens that it and the pipeline take."""
        from transformers import PreTrainedTokenizerBase, ProcessorMixin

        # Some pipelines have a processor of text and images in the tokenizer's place, under any name.
        kinds, parts = (ProcessorMixin, PreTrainedTokenizerBase), tokenizers.components.items()
        named = [part for name, part in parts if name.startswith("tokenizer") or isinstance(part, kinds)]
        found = [part.tokenizer if isinstance(part, ProcessorMixin) else part for part in named if part is not None]
        if not found:
            raise ValueError(f"{self.pipeline} has no tokenizer: it makes no images from text")
        with foreign(self.pipeline, "tell the length of its prompts"):
            tokenizer = max(found, key=lambda one: one.model_max_length)
            return tokenizer, min(tokenizer.model_max_length, self.text_tokens)

    def count_tokens(self, tokenizer: Any, prompt: str) -> int:
        """Return the number of tokens of a prompt."""
        with foreign(self.pipeline, f"tokenize the prompt {prompt[:40]!r}"):
            return super().count_tokens(tokenizer, prompt)

    def check_prompt(self, prompt: TextPrompt) -> None:
        """Raise a ValueError of one line if a prompt has too many tokens, see `Pipeline.check_prompt`."""
        super().check_prompt(text_of(prompt))

    def given(self, prompts: Sequence[TextPrompt]) -> "AnyPipeline":
        """Return the model for the prompts of a run; inputs of unlike sizes are padded to those of the longest."""
        if self._tokenizers is None:
            self._tokenizers = self._load("tokenizer")
        tokenizer, _ = self.longest(self._tokenizers)
        ordered = sorted(prompts, key=lambda prompt: self.count_tokens(tokenizer, text_of(prompt)))
        other = copy.copy(self)
        other.example, other.shortest, other._once, other._latents, other._sees = ordered[-1], ordered[0], None, None, None
        return other

    def text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return the transformer's inputs for a prompt apart from the sample, by recipe and row, each `[1, ...]`.

        Raises:
            ValueError: they have other shapes or another recipe than those of other prompts.
        """
        ragged = self.known.model.ragged
        for _, run in self._runs(encoders, prompt, apart=ragged):
            fits = within(run.known.rows, self.known.rows) if ragged else run.known.rows == self.known.rows
            if fits and same_steps(run.known.model.recipes, self.known.model.recipes):
                break
        else:
            raise refusal(
                self.pipeline,
                f"its {COMPONENT} is given inputs of other shapes or settings for the prompt {text_of(prompt)[:40]!r} than "
                "for others; samples of both cannot be in one batch",
            )
        found, cond, offset = run
        start = {} if offset is None else {OFFSET: offset}
        flat = [shape for rows in found.rows for shape in rows]
        texts = start | {
            f"{recipe}.{row}": padded_to(tensor, self.known.rows[recipe][row])
            for recipe, rows in enumerate(cond)
            for row, tensor in enumerate(rows)
        }
        sizes = torch.tensor([[size for shape in flat for size in shape]], device=self.device)
        return {**texts, SIZES: sizes} if ragged else texts

    def encode(self, prompts: Sequence[TextPrompt]) -> Cond:
        """Return the conditioning of a batch of prompts with or without images, see `Pipeline.encode`."""
        return super().encode(prompts)  # type: ignore[arg-type]

    def cond(self, texts: Mapping[str, Tensor]) -> Cond:
        """Return the conditioning of the recorded model."""
        rows = tuple(
            tuple(texts[f"{recipe}.{row}"] for row in range(len(rows))) for recipe, rows in enumerate(self.known.rows)
        )
        sizes = (texts[SIZES],) if self.known.model.ragged else ()
        return (*rows, *sizes, *((texts[OFFSET],) if self.known.model.scale != 1 else ()))

    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, *, timestep: Tensor | None = None) -> Tensor:
        """Return the velocity that the pipeline would step with, guidance included, at noise levels of its schedule.

        Raises:
            ValueError: a sigma is that of no step. On a GPU this is not checked; the velocity is NaN there.
        """
        return self.known.model.predict(module, x, sigma, cond)

    @torch.no_grad()
    def decode(self, latents: Tensor, prompts: Sequence[TextPrompt] | None = None) -> Tensor:
        """Return images `[B, C, H, W]` or videos `[B, C, F, H, W]`, float in [0, 1].

        Args:
            latents: samples `[B, *event]`.
            prompts: prompt of each sample, by default the example. A pipeline whose images depend on those of the prompt
                besides the samples decodes the samples of each prompt apart.
        """
        asked = [self.example] * len(latents) if prompts is None else list(prompts)
        if (scale := self.known.model.scale) != 1:
            latents = with_offset(latents, scale, self.encode(asked)[-1])
        if not self._decoding_sees_images():
            asked = [self.example] * len(latents)
        images, first = list[Tensor](), 0
        for prompt, same in groupby(asked):
            last = first + len(list(same))
            images += [self._made(chunk, prompt).shown(self.size) for chunk in latents[first:last].split(self.decode_chunk)]
            first = last
        return torch.cat(images).to(latents.device)

    @property
    def sound_rate(self) -> int | None:
        """Rate of the sounds that the pipeline makes, alone or beside a video; None if it makes none."""
        return rate_of(self._loaded())

    @property
    def makes_images(self) -> bool:
        """Whether the pipeline makes images or videos; those of one that makes sounds alone are drawings of them."""
        return self.sound_rate is None or "height" in self.takes

    @torch.no_grad()
    def sounds(self, latents: Tensor) -> Sounds:
        """Return the sounds of samples `[B, *event]`, which depend on no prompt.

        Raises:
            ValueError: the pipeline makes none.
        """
        made = [self._made(chunk, self.example).waves for chunk in latents.split(self.decode_chunk)]
        waves, rate = [part for part in made if part is not None], self.sound_rate
        if not waves or rate is None:
            raise ValueError(f"{self.pipeline} makes no sounds")
        return Sounds(torch.cat(waves).to(latents.device), rate)

    def _decoding_sees_images(self) -> bool:
        """Return whether the same sample is decoded to other images with another image in its prompt."""
        if isinstance(self.example, str):
            return False
        if self._sees is None:
            sample = torch.randn(1, *self.known.shape, generator=torch.Generator().manual_seed(0))
            changed = {name: as_png(inverted(open_image(source))) for name, source in self.example.media.items()}
            both = (self.example, MediaPrompt(self.example.text, changed))
            one, other = (self._made(sample, prompt).shown(self.size) for prompt in both)
            self._sees = not torch.equal(one, other)
        return self._sees

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
        if self.known.model.scale != 1:
            raise refusal(self.pipeline, "its samples start from an image, so that clean images alone give no samples")
        if self._latents is None:
            self._latents = latent_layout(self._vae_input, self.known.shape, self.pipeline)
        videos = images.unsqueeze(2) if len(self._latents.shape) == 4 and images.ndim == 4 else images
        return to_samples(self.encode_with_vae(videos, key), self._latents, self.known.shape)

    def _vae_input(self, latents: Tensor) -> Tensor:
        """Return what the pipeline gives to its VAE to decode samples."""
        return vae_input(self.vae, lambda: self._made(latents, self.example), self.pipeline)

    def check(self, module: nn.Module, prompts: Sequence[TextPrompt]) -> float:
        """Compare the model with a run of the pipeline: schedule, velocities, initial noise, steps and decoded images.

        Prompts with images are run one by one, because pipelines take lists of images as they please. Each image must have
        an effect on the conditioning.

        Args:
            module: the transformer, as it is trained.
            prompts: prompts of the run.

        Returns:
            The largest relative error of the velocities and of the images.

        Raises:
            ValueError: something differs by more than rounding; the message names the pipeline and what differs.
        """
        conditioned = [prompt for prompt in prompts if isinstance(prompt, MediaPrompt)]
        self._check_effects(conditioned[:1])
        alone = bool(conditioned) or self.known.model.ragged  # a batch would be padded
        each, errors = [[prompt] for prompt in prompts], list[float]()
        batches = each if alone else [list(prompts)]
        try:
            runs = [self._run(module, batch, number) for number, batch in enumerate(batches)]
        except ReplayError:
            raise
        except ValueError:  # of the pipeline itself, some of which take no list of prompts
            if batches == each:
                raise
            batches = each
            runs = [self._run(module, batch, number) for number, batch in enumerate(batches)]
        for number, (run, batch) in enumerate(zip(runs, batches, strict=True)):
            if not torch.equal(run.schedule.levels, self.known.levels):
                raise refusal(self.pipeline, "its schedule differs from run to run")
            check_tail(self.pipeline, list(run.taken), len(run.schedule.levels) - 1, self.steps)
            runs[number] = run = self._from_noise(run, batch)
            check_initial_noise(self.pipeline, run.initial)
            final, theirs = run.trajectory.final, output_of(run.made)
            if theirs.images is not None:
                decoded = self.decode(final, batch)
                errors.append(check_images(self.pipeline, decoded, theirs.images, tolerance=TOLERANCES[self.dtype]))
            if theirs.waves is not None:
                waves = self.sounds(final).waves
                errors.append(
                    check_images(self.pipeline, waves, theirs.waves, tolerance=TOLERANCES[self.dtype], what="sounds")
                )
        final = torch.cat([run.trajectory.final for run in runs])
        cond = optree.tree_map(lambda row: row.to(final.device), self.encode(prompts))
        trajectory = optree.tree_map(lambda *parts: torch.cat(parts), *(run.trajectory for run in runs))
        trajectory = trajectory._replace(steps=trajectory.steps - (len(self.known.levels) - 1 - self.steps))
        ours = dataclasses.replace(
            runs[0], trajectory=trajectory, schedule=self.known.schedule, model=self.known.model, cond=cond
        )
        error = check_replay(module, ours, micro_batch=max(len(prompts) - 1, 1), tolerance=rounding(runs[0].model))
        return max(error, *errors)

    @alone
    def _run(self, module: nn.Module, prompts: Sequence[TextPrompt], number: int) -> Recording:
        """Return the record of a run of the pipeline with its real transformer; images come with one prompt."""
        pipe = self._loaded()
        own = {part: getattr(pipe, part) for part in (*self._networks, *self._frozen)}
        apart = ("num_inference_steps", "return_dict", "output_type")
        asked = {name: value for name, value in self.asked.items() if name not in apart}
        if isinstance(prompts[0], MediaPrompt):
            asked |= {**prompts[0].opened(), "prompt": prompts[0].text}
        start, texts = key(number), [text_of(prompt) for prompt in prompts]
        asked |= {name: value for name, value in called(self.takes, {**asked, "prompt": texts}).items() if name == LYRICS}
        for part in self._networks:
            setattr(pipe, part, placed(module, part))
        for part, real in self._frozen.items():
            setattr(pipe, part, real)
        try:
            with quietly(), torch.no_grad():
                return record(
                    pipe, texts, key=start, steps=self.asked["num_inference_steps"], sampler="ode", form="unscaled", **asked
                )
        finally:
            for part, network in own.items():
                setattr(pipe, part, network)

    def _from_noise(self, run: Recording, prompts: Sequence[TextPrompt]) -> Recording:
        """Return a run in the coordinates in which samples start as noise, see `replay.start`."""
        if (scale := self.known.model.scale) == 1:
            return run
        offset, kept = self.encode(prompts)[-1], run.trajectory
        x, x_next, final, initial = (
            without_offset(part, scale, offset) for part in (kept.x, kept.x_next, kept.final, run.initial)
        )
        return dataclasses.replace(run, trajectory=kept._replace(x=x, x_next=x_next, final=final), initial=initial)

    def _check_effects(self, prompts: Sequence[MediaPrompt]) -> None:
        """Raise ValueError if an image changes nothing that the transformer is given."""
        for prompt in prompts:
            copies, (_, *cond) = next(self._runs(self._loaded(), prompt, apart=True))
            for name in prompt.media:
                other = MediaPrompt(prompt.text, {**prompt.media, name: as_png(inverted(open_image(prompt.media[name])))})
                try:
                    _, *changed = self._dry(self._loaded(), other, copies, apart=True)
                except ReplayError:
                    continue  # the pipeline uses the image otherwise
                same = optree.tree_map(torch.equal, cond, changed)
                if all(optree.tree_leaves(same)):
                    raise refusal(self.pipeline, f"its {name} has no effect on the images; leave it out")

    @property
    def known(self) -> _Known:
        """The record of a run of the pipeline on the example."""
        if self._once is None:
            pipe, runs, same = self._loaded(), dict[int, _Known](), None
            for copies, run in self._runs(pipe, self.example):
                if (same := next((number for number, other in runs.items() if _alike(other, run.known)), None)) is not None:
                    break
                runs[copies] = run.known
            if same is None:
                numbers = " and ".join(map(str, runs))
                raise refusal(self.pipeline, f"its {COMPONENT} is given inputs of unlike kinds for {numbers} samples")
            found = runs[same]
            shortest = () if self.shortest == self.example else self._runs(pipe, self.shortest)
            if shortest and not any(_alike(run.known, found) for _, run in shortest):
                found = self._dry(pipe, self.example, same, apart=True).known
                found = found._replace(model=dataclasses.replace(found.model, ragged=True))
            self._once = found
        return self._once

    @property
    def _networks(self) -> tuple[str, ...]:
        """Names of the pipeline's parts that are trained."""
        return (COMPONENT,) if self.boundary_ratio is None else EXPERTS

    def _load(self, *wanted: str) -> Any:
        return self._loaded()

    def _encoders(self) -> str:
        padding = f" {self.known.rows}" if self.known.model.ragged else ""
        images = self._fingerprint_of("", ("vae", "image_encoder", "processor", "image_processor", "feature_extractor"))
        return f"{super()._encoders()} {images} {self.compute} {exactly(self.asked)}{padding}"

    def _loaded(self) -> Any:
        """Return the pipeline with a stand-in for its transformer; its other parts are frozen and on the device."""
        if self._pipe is None:
            from diffusers import FlowMatchEulerDiscreteScheduler

            stand_ins = {
                part: stand_in(self.build_part(part, empty=True), self.device, self.compute, guess=True)
                for part in self._networks
            }
            with quietly(), foreign(self.pipeline, "be loaded"):
                pipe = self._opened(**stand_ins, **read_processors(self.folder))
                self._frozen = control_networks(pipe)
                for name, part in pipe.components.items():
                    if isinstance(part, nn.Module) and name not in stand_ins:
                        part.requires_grad_(False).eval().to(self.device)
                settings = pipe.scheduler.config
                if settings.get("use_flow_sigmas") and settings.get("flow_shift") is not None:
                    # A solver of higher order on the levels of a flow, which can be stepped through by Euler's method too.
                    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=settings["flow_shift"])
                for name, real in self._frozen.items():
                    setattr(pipe, name, stand_in(emptied(real), self.device, real.dtype))
                if isinstance(getattr(pipe, "vae", None), nn.Module):
                    use_modes(pipe.vae)
                pipe.set_progress_bar_config(disable=True)
            self._pipe = pipe
        return self._pipe

    def _runs(self, pipe: Any, prompt: TextPrompt, *, apart: bool = False) -> Iterator[tuple[int, _Dry]]:
        """Yield runs on several numbers of copies, see `_dry`: an input may be as long as one of them by coincidence."""
        errors = list[ReplayError]()
        for copies in COPIES:
            try:
                found = self._dry(pipe, prompt, copies, apart=apart)
            except ReplayError as error:
                if errors:
                    raise errors[0] from error
                errors.append(error)
            else:
                yield copies, found

    @torch.no_grad()
    def _dry(self, pipe: Any, prompt: TextPrompt, copies: int = COPIES[0], *, apart: bool = False) -> _Dry:
        """Run the pipeline with the stand-in on several copies of one prompt; for `apart` see `Capture`.

        The forms of the call are tried in order until one gives as many samples as asked for.
        """
        tried, errors = forms(self.takes, prompt, copies), list[ValueError]()
        for number in range(self._form, len(tried)):
            try:
                found = self._dry_run(pipe, tried[number], copies, apart)
            except ValueError as error:
                errors.append(error)
            else:
                self._form = number
                return found
        raise errors[0]

    @alone
    def _dry_run(self, pipe: Any, form: dict[str, Any], copies: int, apart: bool) -> _Dry:
        """Run the pipeline with the stand-in on one form of several samples of a prompt, see `_dry`."""
        from fluvial.models.replay.scheduler import RecordingScheduler

        seeds = generators(fold_in(key(0), torch.arange(copies)))
        asked = called(self.takes, {**self.asked, **form, "generator": seeds})
        capture = Capture(pipe, COMPONENT, asked, apart=apart)
        theirs = pipe.scheduler
        with foreign(self.pipeline, "be trained without an adapter"):
            scheduler = RecordingScheduler.from_config({**theirs.config, "_class_name": type(theirs).__name__})
        with (
            quietly(),
            capture.watching(pipe, scheduler),
            scheduler.recording(key=key(0), record=Record(form="unscaled"), on_step=capture.step) as recorder,
        ):
            with foreign(self.pipeline, f"be called with {shown(self.asked)}"):
                pipe(**asked)
            if capture.initial is None:
                raise refusal(self.pipeline, "its scheduler takes no step")
        if len(capture.initial) != copies:
            raise refusal(self.pipeline, f"it makes {len(capture.initial)} samples of a prompt, expected {copies} as asked")
        levels = recorder.scheduled.sigmas
        first = check_tail(self.pipeline, capture.taken, len(levels) - 1, self.steps)
        start = None
        if float(levels[first]) != 1 and recorder.mixtures:
            start = start_of(self.pipeline, capture.initial, recorder.mixtures, float(levels[first]))
        elif first:
            raise refusal(self.pipeline, f"it takes the last {self.steps} steps only, and starts from no image")
        check_initial_noise(self.pipeline, capture.initial if start is None else start.noise)
        recipes, cond = capture.recipes()
        if any(not torch.equal(row[0], other) for rows in cond for row in rows for other in row[1:]):
            raise refusal(self.pipeline, f"its {COMPONENT} is given something besides the sample that depends on it")
        shapes = tuple(tuple(row.shape[1:] for row in rows) for rows in cond)
        own = levels if start is None else levels[first:] / levels[first]
        model = RecordedModel(
            self.pipeline, own[:-1], recipes, frozen=self._frozen, scale=1.0 if start is None else start.scale
        )
        last = recorder.trajectory().x_next
        rows_of_one = tuple(tuple(row[:1] for row in rows) for rows in cond)
        schedule = Schedule(own, scheduler.timesteps[-self.steps :])
        known = _Known(tuple(last.shape[2:]), last.dtype, schedule, model, shapes, recorder.shapes, levels)
        return _Dry(known, rows_of_one, None if start is None else start.offset[:1])

    @alone
    def _made(self, latents: Tensor, prompt: TextPrompt) -> Output:
        """Return what the pipeline makes of its last latents, samples of one prompt."""
        pipe = self._loaded()
        own = pipe.scheduler
        tried = forms(self.takes, prompt, len(latents))
        steps = next((least for name, least in LEAST_STEPS.items() if own.config.get(name)), 1)
        once = {**tried[self._form], "num_inference_steps": steps, "output_type": "pt"}
        try:
            with quietly(), foreign(self.pipeline, "decode samples"):
                pipe.scheduler = answering(own, *pieces_of(latents.to(self.device, self.known.dtype), self.known.pieces))
                return output_of(pipe(**called(self.takes, {**self.asked, **once})))
        finally:
            pipe.scheduler = own


def _alike(one: _Known, other: _Known) -> bool:
    """Return whether two runs have the same recipes, with inputs of the same shapes."""
    return one.rows == other.rows and same_steps(one.model.recipes, other.model.recipes)
