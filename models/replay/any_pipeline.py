"""A model of any flow pipeline of diffusers without an adapter: the pipeline itself encodes, schedules and decodes.

To encode a prompt, the pipeline runs with a stand-in for its transformer that returns noise. The stand-in's inputs are the
prompt's conditioning, and the velocity that the pipeline makes of the noise is the step's recipe (`models.replay.capture`).
To decode samples, it runs with a scheduler that returns them. `AnyPipeline.check` compares with the real transformer.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fluvial.core.random import Key, fold_in, key
from fluvial.models.lora import attention_layers
from fluvial.models.pipelines.folder import local_folder, quietly
from fluvial.models.pipelines.wan import EXPERTS, WithExperts
from fluvial.models.protocol import Cond, Schedule, Sounds
from fluvial.models.replay.arguments import (
    LYRICS,
    ONE_OF_EACH,
    CallForm,
    arguments,
    build_arguments,
    class_of,
    compression,
    exactly,
    forms,
    parameters,
)
from fluvial.models.replay.capture import frozen_networks, same_steps
from fluvial.models.replay.checks import (
    ReplayError,
    check_images,
    check_initial_noise,
    check_tail,
    check_together,
    foreign,
    refusal,
)
from fluvial.models.replay.dry import COMPONENT, Dry, PromptFreeValues, dry_run
from fluvial.models.replay.experts import place_network
from fluvial.models.replay.latents import LatentLayout, latent_layout, to_samples, vae_input
from fluvial.models.replay.media import MediaPrompt, TextPrompt, get_text, use_modes
from fluvial.models.replay.recipe import Holds
from fluvial.models.replay.recorded import (
    TOLERANCES,
    Recording,
    check_replay,
    fits_within,
    generators,
    pad_to,
    record,
    rounding,
)
from fluvial.models.replay.sounds import Output, alone, read_rate, split_output
from fluvial.models.replay.stand_in import answering, copy_empty, make_stand_in, split_pieces
from fluvial.models.replay.start import add_offset, find_step_counts, least_steps, remove_offset

# A prompt is encoded as several samples, so that an input with one row per sample differs from one that all share.
COPIES = (3, 5, 7)
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")
SIZES, OFFSET = "sizes", "offset"  # names of the shapes of a prompt's inputs, and of what its samples start from


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
    how = "replayed as it was recorded"

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
        local = local_folder(folder, trust_remote_code=options.get("trust_remote_code", False))
        self.pipeline, self.network, self.takes = self._identify(local, example)
        most = (call or {}).get("max_sequence_length", getattr(self.takes.get("max_sequence_length"), "default", None))
        most = most if isinstance(most, int) else 2**31
        self.text_lengths = (most, 2**31)
        super().__init__(local, **options)
        self.decode_chunk = 1 if self.pipeline in ONE_OF_EACH else self.decode_chunk
        embedded = self.config.get("guidance_embeds")
        self.asked = arguments(
            self.pipeline, self.takes, (height, width, frames), steps, scale, negative, call or {}, embedded
        )
        if "max_sequence_length" in self.takes and self.text_tokens < 2**31:
            self.asked["max_sequence_length"] = self.text_tokens
        self._strength = float(self.asked.get("strength", getattr(self.takes.get("strength"), "default", 1.0)))
        self._counts = find_step_counts(steps, self._strength)  # numbers of steps to ask for, to be tried in order
        self.steps, self.compute, self.example, self.size = steps, compute, example, (height, width, frames)
        self.shortest = example
        self._form = 0  # index of the form of the call that makes samples of a prompt
        self._single = False  # whether it makes one at a time
        self._pipe: Any = None
        self._frozen: dict[str, Any] = {}  # control networks, in whose place the pipeline has stand-ins, too
        self._once: PromptFreeValues | None = None
        self._latents: LatentLayout | None = None
        self._sees: bool | None = None  # see `_decoding_sees_images`

    def _identify(self, local: Path, example: TextPrompt) -> tuple[str, str, dict[str, inspect.Parameter]]:
        """Return the class of a folder's pipeline, that of its network, and the parameters of its call."""
        kind, network = class_of(local, COMPONENT)
        return kind.__name__, network, parameters(kind)

    @property
    def lora_targets(self) -> tuple[str, ...]:  # type: ignore[override]
        """The attention projections that the network has of diffusers' usual names, else its attention's linear layers."""
        network = self.build_part(self.part, empty=True)
        layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
        usual = tuple(target for target in TARGETS if any(name.endswith(f".{target}") for name in layers))
        return usual if {*usual} - {"to_out.0"} else attention_layers(network)

    def list_blocks(self, network: nn.Module) -> Sequence[nn.Module]:
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
        with_tokenizers = [
            part.tokenizer if isinstance(part, ProcessorMixin) else part for part in named if part is not None
        ]
        if not with_tokenizers:
            raise ValueError(f"{self.pipeline} has no tokenizer: it makes no images from text")
        with foreign(self.pipeline, "tell the length of its prompts"):
            tokenizer = max(with_tokenizers, key=lambda one: one.model_max_length)
            return tokenizer, min(tokenizer.model_max_length, self.text_tokens)

    def count_tokens(self, tokenizer: Any, prompt: str) -> int:
        """Return the number of tokens of a prompt."""
        with foreign(self.pipeline, f"tokenize the prompt {prompt[:40]!r}"):
            return super().count_tokens(tokenizer, prompt)

    def check_prompt(self, prompt: TextPrompt) -> None:
        """Raise a ValueError of one line if a prompt has too many tokens, see `Pipeline.check_prompt`."""
        super().check_prompt(get_text(prompt))

    def adapt_to(self, prompts: Sequence[TextPrompt]) -> "AnyPipeline":
        """Return the model for the prompts of a run; inputs of unlike sizes are padded to those of the longest."""
        if self._tokenizers is None:
            self._tokenizers = self._load("tokenizer")
        tokenizer, _ = self.longest(self._tokenizers)
        ordered = sorted(prompts, key=lambda prompt: self.count_tokens(tokenizer, get_text(prompt)))
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
            fits = fits_within(run.known.rows, self.known.rows) if ragged else run.known.rows == self.known.rows
            if fits and same_steps(run.known.model.recipes, self.known.model.recipes):
                break
        else:
            way_out = "" if isinstance(prompt, str) else ": give all prompts images of one size"
            raise refusal(
                self.pipeline,
                f"its {COMPONENT} is given inputs of other shapes or settings for the prompt {get_text(prompt)[:40]!r} than "
                f"for others; samples of both cannot be in one batch{way_out}",
            )
        captured, cond, offset = run
        start = {} if offset is None else {OFFSET: offset}
        flat = [shape for rows in captured.rows for shape in rows]
        texts = start | {
            f"{recipe}.{row}": pad_to(tensor, self.known.rows[recipe][row])
            for recipe, rows in enumerate(cond)
            for row, tensor in enumerate(rows)
        }
        sizes = torch.tensor([[size for shape in flat for size in shape]], device=self.device)
        return {**texts, SIZES: sizes} if ragged else texts

    def encode(self, prompts: Sequence[TextPrompt]) -> Cond:
        """Return the conditioning of a batch of prompts with or without images, see `Pipeline.encode`."""
        return super().encode(prompts)

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
        return torch.cat([made.draw(self.size) for made in self._outputs(latents, prompts)]).to(latents.device)

    def _outputs(self, latents: Tensor, prompts: Sequence[TextPrompt] | None) -> Iterator[Output]:
        """Yield what the pipeline makes of samples, see `decode`."""
        asked = [self.example] * len(latents) if prompts is None else list(prompts)
        if (scale := self.known.model.scale) != 1:
            latents = add_offset(latents, scale, self.encode(asked)[-1])
        if not self._decoding_sees_images():
            asked = [self.example] * len(latents)
        first = 0
        for prompt, same in groupby(asked):
            last = first + len(list(same))
            size = 1 if self._single else self.decode_chunk
            yield from (self._decode_all(chunk, prompt) for chunk in latents[first:last].split(size))
            first = last

    @property
    def sound_rate(self) -> int | None:
        """Rate of the sounds that the pipeline makes, alone or beside a video; None if it makes none."""
        return read_rate(self._load_pipeline())

    @property
    def makes_images(self) -> bool:
        """Whether the pipeline makes images or videos; those of one that makes sounds alone are drawings of them."""
        return self.sound_rate is None or "height" in self.takes

    @torch.no_grad()
    def sounds(self, latents: Tensor, prompts: Sequence[TextPrompt] | None = None) -> Sounds:
        """Return the sounds of samples `[B, *event]`; for `prompts` see `decode`.

        Raises:
            ValueError: the pipeline makes none.
        """
        made = [output.waves for output in self._outputs(latents, prompts)]
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
            both = (self.example, self.example.change(*self.example.media))
            one, other = (self._decode_all(sample, prompt).draw(self.size) for prompt in both)
            self._sees = not torch.equal(one, other)
        return self._sees

    @property
    def vae(self) -> Any:
        """The VAE of the loaded pipeline."""
        return self._load_pipeline().vae

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
        return vae_input(self.vae, lambda: self._decode_all(latents, self.example), self.pipeline)

    def check(self, module: nn.Module, prompts: Sequence[TextPrompt]) -> float:
        """Compare the model with a run of the pipeline: schedule, velocities, initial noise, steps and decoded images.

        Prompts with images are run one by one, because pipelines take lists of images as they please. Each image must have
        an effect on the conditioning, and samples that are decoded together none on each other.

        Args:
            module: the transformer, as it is trained.
            prompts: prompts of the run.

        Returns:
            The largest relative error of the velocities and of the images.

        Raises:
            ValueError: something differs by more than rounding; the message names the pipeline and what differs.
        """
        conditioned = [prompt for prompt in prompts if isinstance(prompt, MediaPrompt)]
        alone = self.known.model.ragged or bool(conditioned)  # a batch would be padded
        self._check_effects(conditioned[:1])
        each, errors = [[prompt] for prompt in prompts], list[float]()
        batches = each if alone else [list(prompts)]
        try:
            runs = [self._run(module, batch, number) for number, batch in enumerate(batches)]
        except ReplayError:
            raise
        except ValueError:  # of the pipeline itself: some take no list of prompts
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
            final, theirs = run.trajectory.final, split_output(run.made)
            if theirs.images is not None:
                decoded = self.decode(final, batch)
                errors.append(check_images(self.pipeline, decoded, theirs.images, tolerance=TOLERANCES[self.dtype]))
            if theirs.waves is not None:
                waves = self.sounds(final, batch).waves
                errors.append(
                    check_images(self.pipeline, waves, theirs.waves, tolerance=TOLERANCES[self.dtype], what="sounds")
                )
        final = torch.cat([run.trajectory.final for run in runs])
        errors.append(self._check_together(final[:2], prompts[0]))
        cond = optree.tree_map(lambda row: row.to(final.device), self.encode(prompts))
        trajectory = optree.tree_map(lambda *parts: torch.cat(parts), *(run.trajectory for run in runs))
        trajectory = trajectory._replace(steps=trajectory.steps - (len(self.known.levels) - 1 - self.steps))
        ours = dataclasses.replace(
            runs[0], trajectory=trajectory, schedule=self.known.schedule, model=self.known.model, cond=cond
        )
        error = check_replay(module, ours, micro_batch=max(len(prompts) - 1, 1), tolerance=rounding(runs[0].model))
        return max(error, *errors)

    @torch.no_grad()
    def _check_together(self, samples: Tensor, prompt: TextPrompt) -> float:
        """Return the relative error of two samples that are decoded together; ValueError if it is more than rounding."""
        if self._single or self.decode_chunk == 1 or len(samples) == 1:
            return 0.0
        (both,) = self._outputs(samples, [prompt, prompt])
        one, other = (made for sample in samples.split(1) for made in self._outputs(sample, [prompt]))
        errors = [0.0]
        for together, *apart in zip(both, one, other, strict=True):
            if together is not None:
                made = torch.cat([part for part in apart if part is not None])
                errors.append(check_together(self.pipeline, together, made, tolerance=TOLERANCES[self.dtype]))
        return max(errors)

    @alone
    def _run(self, module: nn.Module, prompts: Sequence[TextPrompt], number: int) -> Recording:
        """Return the record of a run of the pipeline with its real transformer; images come with one prompt."""
        pipe = self._load_pipeline()
        networks = {part: getattr(pipe, part) for part in (*self._networks, *self._frozen)}
        apart = ("num_inference_steps", "return_dict", "output_type")
        asked = {name: value for name, value in self.asked.items() if name not in apart}
        calls = [call for recipe in self.known.model.recipes for call in recipe.calls]
        asked["places"] = [leaf.places for call in calls for leaf in call.leaves if isinstance(leaf, Holds)]
        start, texts = key(number), [get_text(prompt) for prompt in prompts]
        if isinstance(prompts[0], MediaPrompt) or self._single:
            asked |= self._forms(prompts[0], 1)[self._form].one
        if self._single:
            (asked["generator"],) = generators(fold_in(start, torch.arange(1)))
        asked |= {
            name: value for name, value in build_arguments(self.takes, {**asked, "prompt": texts}).items() if name == LYRICS
        }
        for part in self._networks:
            setattr(pipe, part, place_network(module, part))
        for part, real in self._frozen.items():
            setattr(pipe, part, real)
        try:
            with quietly(), torch.no_grad():
                return record(pipe, texts, key=start, steps=self._counts[0], sampler="ode", form="unscaled", **asked)
        finally:
            for part, network in networks.items():
                setattr(pipe, part, network)

    def _from_noise(self, run: Recording, prompts: Sequence[TextPrompt]) -> Recording:
        """Return a run in the coordinates in which samples start as noise, see `replay.start`."""
        if (scale := self.known.model.scale) == 1:
            return run
        kept, parts = run.trajectory, (run.trajectory.x, run.trajectory.x_next, run.trajectory.final, run.initial)
        x, x_next, final, initial = (remove_offset(part, scale, self.encode(prompts)[-1]) for part in parts)
        return dataclasses.replace(run, trajectory=kept._replace(x=x, x_next=x_next, final=final), initial=initial)

    def _check_effects(self, prompts: Sequence[MediaPrompt]) -> None:
        """Raise ValueError if an image changes nothing that the transformer is given."""
        for prompt in prompts:
            copies, (_, *cond) = next(self._runs(self._load_pipeline(), prompt, apart=True))
            for name in prompt.media:
                try:
                    _, *changed = self._dry(self._load_pipeline(), prompt.change(name), copies, apart=True)
                except ReplayError:
                    continue  # the pipeline uses the image otherwise
                same = optree.tree_map(torch.equal, cond, changed)
                if all(optree.tree_leaves(same)):
                    raise refusal(self.pipeline, f"its {name} has no effect on the samples; leave it out")

    @property
    def known(self) -> PromptFreeValues:
        """The record of a run of the pipeline on the example."""
        if self._once is None:
            pipe, runs, same = self._load_pipeline(), dict[int, PromptFreeValues](), None
            for copies, run in self._runs(pipe, self.example, single=[True] if self._single else [False, True]):
                if (same := next((number for number, other in runs.items() if other.alike(run.known)), None)) is not None:
                    break
                runs[copies] = run.known
            if same is None:
                numbers = " and ".join(map(str, runs))
                raise refusal(self.pipeline, f"its {COMPONENT} is given inputs of unlike kinds for {numbers} samples")
            chosen = runs[same]
            shortest = () if self.shortest == self.example else self._runs(pipe, self.shortest)
            if pipe.transformer.unlike or (shortest and not any(run.known.alike(chosen) for _, run in shortest)):
                chosen = self._dry(pipe, self.example, same, apart=True).known
                chosen = chosen._replace(model=dataclasses.replace(chosen.model, ragged=True))
            self._once = chosen
        return self._once

    @property
    def _networks(self) -> tuple[str, ...]:
        """Names of the pipeline's parts that are trained."""
        return (self.part,) if self.boundary_ratio is None else EXPERTS

    def _load(self, *wanted: str) -> Any:
        return self._load_pipeline()

    def _encoders(self) -> str:
        padding = f" {self.known.rows}" if self.known.model.ragged else ""
        others = self._compute_fingerprint("", tuple(name for name in self.parts if name not in self._networks))
        return f"{super()._encoders()} {others} {self.compute} {exactly(self.asked)}{padding}"

    def _load_pipeline(self) -> Any:
        """Return the pipeline with a stand-in for its transformer; its other parts are frozen and on the device."""
        if self._pipe is None:
            stand_ins = self._stand_ins()
            with quietly(), foreign(self.pipeline, "be loaded"):
                pipe = self._open(**stand_ins)
                for name, network in stand_ins.items():  # parts that are optional are read from the folder all the same
                    setattr(pipe, name, network)
                self._frozen = frozen_networks(pipe)
                self._freeze(pipe, pipe.register_modules)
                for name, real in self._frozen.items():
                    setattr(pipe, name, make_stand_in(copy_empty(real), self.device, real.dtype))
                pipe.set_progress_bar_config(disable=True)
            self._pipe = pipe
        return self._pipe

    def _stand_ins(self) -> dict[str, Any]:
        """Return a stand-in for each network that is trained."""
        networks = {part: self.build_part(part, empty=True) for part in self._networks}
        return {part: make_stand_in(network, self.device, self.compute) for part, network in networks.items()}

    def _freeze(self, pipe: Any, register: Callable[..., None]) -> None:
        """Freeze the other parts of a pipeline on the device; its VAE encodes to modes, and its scheduler takes Euler steps.

        Args:
            pipe: the pipeline.
            register: function that replaces parts of it.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler

        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and name not in self._networks:
                part.requires_grad_(False).eval().to(self.device)
        settings = getattr(getattr(pipe, "scheduler", None), "config", {})
        if settings.get("use_flow_sigmas") and settings.get("flow_shift") is not None:
            # A solver of higher order on the levels of a flow, which can be stepped through by Euler's method too.
            register(scheduler=FlowMatchEulerDiscreteScheduler(shift=settings["flow_shift"]))
        if isinstance(getattr(pipe, "vae", None), nn.Module):
            use_modes(pipe.vae)

    def _runs(
        self, pipe: Any, prompt: TextPrompt, *, apart: bool = False, single: Sequence[bool] | None = None
    ) -> Iterator[tuple[int, Dry]]:
        """Yield runs on several numbers of copies, see `_dry`: an input may be as long as one of them by coincidence.

        Args:
            pipe, prompt, apart: see `_dry`.
            single: kinds of forms to try, of several samples or of single ones; by default the one that is known to work.
        """
        failed = list[ValueError]()
        for kind in (self._single,) if single is None else single:
            errors = list[ValueError]()
            for copies in COPIES:
                try:
                    run = self._dry(pipe, prompt, copies, apart=apart, single=kind)
                except ValueError as error:
                    errors.append(error)
                    if len(errors) == 2 or not isinstance(error, ReplayError):
                        break
                else:
                    yield copies, run
            failed += errors if len(errors) == 2 or not all(isinstance(error, ReplayError) for error in errors) else []
        if failed:  # where the pipeline itself makes no several samples, what matters is why it cannot make one
            raise failed[0 if isinstance(failed[0], ReplayError) else -1]

    def _forms(self, prompt: TextPrompt, number: int) -> list[CallForm]:
        """Return the forms of the call that may make several samples of a prompt."""
        pipe = self._load_pipeline()
        crf = compression(pipe, self.asked)
        return forms(self.takes, prompt, number, steps=self._counts, rate=read_rate(pipe), crf=crf)

    def _dry(
        self, pipe: Any, prompt: TextPrompt, copies: int = COPIES[0], *, apart: bool = False, single: bool | None = None
    ) -> Dry:
        """Run the pipeline with the stand-in on several copies of one prompt; for `apart` see `Capture`.

        The forms of the call are tried in order until one gives as many samples as asked for.
        """
        single = self._single if single is None else single
        tried, errors = self._forms(prompt, copies), list[ValueError]()
        settings: dict[str, Any] = {"steps": self.steps, "takes": self.takes, "frozen": self._frozen, "apart": apart}
        for number in range(self._form, len(tried)):
            if tried[number].single is not single:
                continue
            try:
                run = dry_run(pipe, self.asked, tried[number], copies, **settings)
            except ValueError as error:
                errors.append(error)
            else:
                self._form, self._single = number, single
                return run
        raise errors[0]

    @alone
    def _decode_all(self, latents: Tensor, prompt: TextPrompt) -> Output:
        """Return what the pipeline makes of its last latents, samples of one prompt."""
        pipe = self._load_pipeline()
        scheduler_before = pipe.scheduler
        once = {**self._forms(prompt, len(latents))[self._form].several, "output_type": "pt"}
        once["num_inference_steps"] = least_steps(scheduler_before.config, self._strength)
        try:
            with quietly(), foreign(self.pipeline, "decode samples"):
                pipe.scheduler = answering(
                    scheduler_before, *split_pieces(latents.to(self.device, self.known.dtype), self.known.pieces)
                )
                return split_output(pipe(**build_arguments(self.takes, {**self.asked, **once})))
        finally:
            pipe.scheduler = scheduler_before
