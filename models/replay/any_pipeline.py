"""Model of any flow pipeline of diffusers without an adapter: the pipeline itself encodes, schedules and decodes.

To encode a prompt, the pipeline runs with a stand-in for its transformer that returns noise. The stand-in's inputs are the
prompt's conditioning, and the velocity computed from the noise reveals the step's recipe (`models.replay.capture`). To
decode samples, the pipeline runs with a scheduler that returns them. `AnyPipeline.check` runs the real transformer.
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
from fluvial.models.lora import find_attention_layers
from fluvial.models.pipelines.folder import find_folder, silence
from fluvial.models.pipelines.wan import EXPERTS, WithExperts
from fluvial.models.protocol import Cond, Schedule, Sounds
from fluvial.models.replay.arguments import (
    LYRICS,
    ONE_OF_EACH,
    CallForm,
    build_call_arguments,
    find_classes,
    find_compression,
    list_call_forms,
    list_call_parameters,
    repeat_lyrics,
    serialise_arguments,
)
from fluvial.models.replay.capture import find_frozen_networks, have_same_recipes
from fluvial.models.replay.checks import (
    ReplayError,
    build_error,
    check_images,
    check_initial_noise,
    check_tail,
    check_together,
    wrap_errors,
)
from fluvial.models.replay.dry import COMPONENT, DryRun, PromptFreeValues, dry_run
from fluvial.models.replay.experts import place_network
from fluvial.models.replay.latents import LatentLayout, capture_vae_input, find_latent_layout, to_samples
from fluvial.models.replay.media import MediaPrompt, TextPrompt, get_text, use_modes
from fluvial.models.replay.recipe import MixedInput
from fluvial.models.replay.recorded import (
    TOLERANCES,
    Recording,
    check_replay,
    find_tolerance,
    fits_within,
    make_generators,
    pad_to,
    record,
)
from fluvial.models.replay.sounds import Output, read_rate, run_alone, split_output
from fluvial.models.replay.stand_in import copy_empty, make_answering_scheduler, make_stand_in, split_pieces
from fluvial.models.replay.start import add_offset, find_least_steps, find_step_counts, remove_offset

# Numbers of samples that a prompt is encoded as, so that an input with one row per sample differs from one that all share.
COPIES = (3, 5, 7)
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")
SIZES, OFFSET = "sizes", "offset"  # names of the shapes of a prompt's inputs, and of its samples' initial offset


class AnyPipeline(WithExperts):
    """The model protocol over a flow pipeline without an adapter, for one size, number of steps and guidance.

    The conditioning includes the guidance and the negative prompt, and is defined only at the noise levels of the schedule.
    The text encoders stay loaded, because decoding runs the whole pipeline. If the folder's scheduler is a solver of higher
    order (as Sana's), it is replaced by Euler steps through the same flow.

    Args:
        folder: folder as diffusers saves a pipeline, or an id on the Hub; its transformer predicts a flow's velocity.
        height, width: size of the images or videos, in pixels.
        frames: number of frames of a video; 1 for images.
        steps: number of steps of the schedule.
        scale: guidance scale, passed as guidance_scale, or as true_cfg_scale if the pipeline has only that or its network
            takes no scale.
        negative: negative prompt of guidance.
        call: further arguments of the pipeline's call.
        example: prompt of the first run, with images if the pipeline needs them.
        compute: dtype that the transformer will compute in; pipelines round some of their own numbers to it.
        options: see `Pipeline`.

    Raises:
        ValueError: see `Pipeline`; or diffusers lacks the pipeline's class, or the class does not take an argument.
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
        local = find_folder(folder, trust_remote_code=options.get("trust_remote_code", False))
        self.pipeline, self.network, self.takes = self._identify(local, example)
        most = (call or {}).get("max_sequence_length", getattr(self.takes.get("max_sequence_length"), "default", None))
        most = most if isinstance(most, int) else 2**31
        self.text_lengths = (most, 2**31)
        super().__init__(local, **options)
        self.decode_chunk = 1 if self.pipeline in ONE_OF_EACH else self.decode_chunk
        embedded = self.config.get("guidance_embeds")
        self.call_arguments = build_call_arguments(
            self.pipeline, self.takes, (height, width, frames), steps, scale, negative, call or {}, embedded
        )
        if "max_sequence_length" in self.takes and self.text_tokens < 2**31:
            self.call_arguments["max_sequence_length"] = self.text_tokens
        self._strength = float(self.call_arguments.get("strength", getattr(self.takes.get("strength"), "default", 1.0)))
        self._counts = find_step_counts(steps, self._strength)  # numbers of steps to request, tried in order
        self.steps, self.compute, self.example, self.size = steps, compute, example, (height, width, frames)
        self.shortest = example
        self._form = 0  # index of the call form that makes samples of a prompt
        self._single = False  # whether that form makes one sample at a time
        self._pipe: Any = None
        self._frozen: dict[str, Any] = {}  # frozen networks that the pipeline has stand-ins for, too
        self._known: PromptFreeValues | None = None
        self._latents: LatentLayout | None = None
        self._decoding_uses_images: bool | None = None  # see `_needs_images_to_decode`

    def _identify(self, local: Path, example: TextPrompt) -> tuple[str, str, dict[str, inspect.Parameter]]:
        """Return the class names of a folder's pipeline and network, and the parameters of the pipeline's call."""
        kind, network = find_classes(local, COMPONENT)
        return kind.__name__, network, list_call_parameters(kind)

    @property
    def lora_targets(self) -> tuple[str, ...]:  # type: ignore[override]
        """Attention projections with diffusers' usual names; without them, all linear layers of the attention."""
        network = self.build_part(self.part, empty=True)
        layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
        usual = tuple(target for target in TARGETS if any(name.endswith(f".{target}") for name in layers))
        return usual if {*usual} - {"to_out.0"} else find_attention_layers(network)

    def list_blocks(self, network: nn.Module) -> Sequence[nn.Module]:
        """Return the layers in the network's module lists; if the network names its block classes, only layers of these."""
        layers = [layer for child in network.children() if isinstance(child, nn.ModuleList) for layer in child]
        named = {*(getattr(network, "_no_split_modules", None) or ()), *(getattr(network, "_repeated_blocks", None) or ())}
        return [layer for layer in layers if type(layer).__name__ in named] or layers

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one sample of the pipeline.

        Raises:
            ValueError: the size differs from that of the constructor, or the pipeline cannot be replayed.
        """
        size = (height, width, frames)
        if size != self.size:
            raise ValueError(f"size (height, width, frames) is {size}, expected {self.size}, as the pipeline was opened")
        return self.known.shape

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the pipeline's schedule; ValueError if the number of steps differs from that of the constructor."""
        if steps != self.steps:
            raise ValueError(f"steps is {steps}, expected {self.steps}, as the pipeline was opened")
        return self.known.schedule

    def find_token_limit(self, pipe: Any) -> tuple[Any, int]:
        """Return the tokenizer with the largest limit, and the number of tokens that it and the pipeline take."""
        from transformers import PreTrainedTokenizerBase, ProcessorMixin

        # Some pipelines have a processor of text and images instead of a tokenizer, under any name.
        kinds, parts = (ProcessorMixin, PreTrainedTokenizerBase), pipe.components.items()
        candidates = [part for name, part in parts if name.startswith("tokenizer") or isinstance(part, kinds)]
        known = [part for part in candidates if part is not None]
        tokenizers = [part.tokenizer if isinstance(part, ProcessorMixin) else part for part in known]
        if not tokenizers:
            raise ValueError(f"{self.pipeline} has no tokenizer: it makes no images from text")
        with wrap_errors(self.pipeline, "count the tokens of prompts"):
            tokenizer = max(tokenizers, key=lambda one: one.model_max_length)
            return tokenizer, min(tokenizer.model_max_length, self.text_tokens)

    def count_tokens(self, tokenizer: Any, prompt: str) -> int:
        """Return the number of tokens of a prompt."""
        with wrap_errors(self.pipeline, f"tokenize the prompt {prompt[:40]!r}"):
            return super().count_tokens(tokenizer, prompt)

    def adapt_to(self, prompts: Sequence[TextPrompt]) -> "AnyPipeline":
        """Return the model for the prompts of a run; inputs of unlike sizes are padded to those of the longest prompt."""
        if self._tokenizers is None:
            self._tokenizers = self._load_parts("tokenizer")
        tokenizer, _ = self.find_token_limit(self._tokenizers)
        ordered = sorted(prompts, key=lambda prompt: self.count_tokens(tokenizer, get_text(prompt)))
        other = copy.copy(self)
        other.example, other.shortest = ordered[-1], ordered[0]
        other._known = other._latents = other._decoding_uses_images = None
        return other

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return the transformer's inputs for a prompt, apart from the sample, by recipe and row, each `[1, ...]`.

        Raises:
            ValueError: the shapes or the recipe differ from those of other prompts.
        """
        ragged = self.known.model.ragged
        for _, run in self._try_copies(encoders, prompt, apart=ragged):
            fits = fits_within(run.known.rows, self.known.rows) if ragged else run.known.rows == self.known.rows
            if fits and have_same_recipes(run.known.model.recipes, self.known.model.recipes):
                break
        else:
            advice = "" if isinstance(prompt, str) else ": give all prompts images of one size"
            raise build_error(
                self.pipeline,
                f"its {COMPONENT} is given inputs of other shapes or settings for the prompt {get_text(prompt)[:40]!r} than "
                f"for others; samples of both cannot be in one batch{advice}",
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

    def build_cond(self, texts: Mapping[str, Tensor]) -> Cond:
        """Return the conditioning of the recorded model."""
        rows = tuple(
            tuple(texts[f"{recipe}.{row}"] for row in range(len(rows))) for recipe, rows in enumerate(self.known.rows)
        )
        sizes = (texts[SIZES],) if self.known.model.ragged else ()
        return (*rows, *sizes, *((texts[OFFSET],) if self.known.model.scale != 1 else ()))

    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, *, timestep: Tensor | None = None) -> Tensor:
        """Return the velocity that the pipeline would step with, guidance included, at noise levels of its schedule.

        Raises:
            ValueError: no step has a sigma. On a GPU this is not checked; the velocity is NaN there.
        """
        return self.known.model.predict(module, x, sigma, cond)

    @torch.no_grad()
    def decode(self, latents: Tensor, prompts: Sequence[TextPrompt] | None = None) -> Tensor:
        """Return images `[B, C, H, W]` or videos `[B, C, F, H, W]`, float in [0, 1].

        Args:
            latents: samples `[B, *event]`.
            prompts: prompt of each sample, by default the example. If decoding uses the images of the prompt, samples of
                different prompts are decoded separately.
        """
        return torch.cat([output.draw(self.size) for output in self._decode_prompts(latents, prompts)]).to(latents.device)

    def _decode_prompts(self, latents: Tensor, prompts: Sequence[TextPrompt] | None) -> Iterator[Output]:
        """Yield the pipeline's outputs for chunks of samples, see `decode`."""
        prompts = [self.example] * len(latents) if prompts is None else list(prompts)
        if (scale := self.known.model.scale) != 1:
            latents = add_offset(latents, scale, self.encode(prompts)[-1])
        if not self._needs_images_to_decode():
            prompts = [self.example] * len(latents)
        first = 0
        for prompt, same in groupby(prompts):
            last = first + len(list(same))
            size = 1 if self._single else self.decode_chunk
            yield from (self._decode_chunk(chunk, prompt) for chunk in latents[first:last].split(size))
            first = last

    @property
    def sound_rate(self) -> int | None:
        """Sampling rate of the pipeline's sounds, alone or beside a video; None if it makes no sounds."""
        return read_rate(self._load_pipeline())

    @property
    def makes_images(self) -> bool:
        """Whether the pipeline makes images or videos; if it makes only sounds, `decode` returns drawings of them."""
        return self.sound_rate is None or "height" in self.takes

    @torch.no_grad()
    def decode_sounds(self, latents: Tensor, prompts: Sequence[TextPrompt] | None = None) -> Sounds:
        """Return the sounds of samples `[B, *event]`; for `prompts` see `decode`.

        Raises:
            ValueError: the pipeline makes no sounds.
        """
        outputs = [output.waves for output in self._decode_prompts(latents, prompts)]
        waves, rate = [part for part in outputs if part is not None], self.sound_rate
        if not waves or rate is None:
            raise ValueError(f"{self.pipeline} makes no sounds")
        return Sounds(torch.cat(waves).to(latents.device), rate)

    def _needs_images_to_decode(self) -> bool:
        """Return whether decoding uses the images of the prompt: other images change the output for the same sample."""
        if isinstance(self.example, str):
            return False
        if self._decoding_uses_images is None:
            sample = torch.randn(1, *self.known.shape, generator=torch.Generator().manual_seed(0))
            both = (self.example, self.example.change(*self.example.media))
            one, other = (self._decode_chunk(sample, prompt).draw(self.size) for prompt in both)
            self._decoding_uses_images = not torch.equal(one, other)
        return self._decoding_uses_images

    @property
    def vae(self) -> Any:
        """VAE of the loaded pipeline."""
        return self._load_pipeline().vae

    @torch.no_grad()
    def encode_images(self, images: Tensor, *, key: Key | None = None) -> Tensor:
        """Return clean samples, see `Pipeline.encode_images`: the inverse of the pipeline's map from samples to its VAE.

        Raises:
            ValueError: the map is not a scaled rearrangement.
        """
        if self.known.model.scale != 1:
            raise build_error(self.pipeline, "its samples start from an image, so that clean images alone give no samples")
        if self._latents is None:
            self._latents = find_latent_layout(self._capture_vae_input, self.known.shape, self.pipeline)
        videos = images.unsqueeze(2) if len(self._latents.shape) == 4 and images.ndim == 4 else images
        return to_samples(self.encode_with_vae(videos, key), self._latents, self.known.shape)

    def _capture_vae_input(self, latents: Tensor) -> Tensor:
        """Return the VAE's input when the pipeline decodes samples."""
        return capture_vae_input(self.vae, lambda: self._decode_chunk(latents, self.example), self.pipeline)

    def check(self, module: nn.Module, prompts: Sequence[TextPrompt]) -> float:
        """Compare the model with a run of the pipeline: schedule, velocities, initial noise, steps and decoded images.

        Prompts with images are run one by one, because pipelines treat lists of images differently. Each image must affect
        the conditioning, and samples that are decoded together must not affect each other.

        Args:
            module: the transformer, as it is trained.
            prompts: prompts of the run.

        Returns:
            The largest relative error of the velocities and of the images.

        Raises:
            ValueError: something differs by more than rounding; the message names the pipeline and what differs.
        """
        conditioned = [prompt for prompt in prompts if isinstance(prompt, MediaPrompt)]
        one_by_one = self.known.model.ragged or bool(conditioned)  # a batch would be padded
        self._check_effects(conditioned[:1])
        each, errors = [[prompt] for prompt in prompts], list[float]()
        batches = each if one_by_one else [list(prompts)]
        try:
            runs = [self._run(module, batch, number) for number, batch in enumerate(batches)]
        except ReplayError:
            raise
        except ValueError:  # raised by the pipeline itself: some take no list of prompts
            if batches == each:
                raise
            batches = each
            runs = [self._run(module, batch, number) for number, batch in enumerate(batches)]
        for number, (run, batch) in enumerate(zip(runs, batches, strict=True)):
            if not torch.equal(run.schedule.levels, self.known.levels):
                raise build_error(self.pipeline, "its schedule differs from run to run")
            check_tail(self.pipeline, list(run.taken), len(run.schedule.levels) - 1, self.steps)
            runs[number] = run = self._remove_offset(run, batch)
            check_initial_noise(self.pipeline, run.initial)
            final, theirs = run.trajectory.final, split_output(run.outputs)
            if theirs.images is not None:
                decoded = self.decode(final, batch)
                errors.append(check_images(self.pipeline, decoded, theirs.images, tolerance=TOLERANCES[self.dtype]))
            if theirs.waves is not None:
                waves = self.decode_sounds(final, batch).waves
                errors.append(
                    check_images(self.pipeline, waves, theirs.waves, tolerance=TOLERANCES[self.dtype], what="sounds")
                )
        final = torch.cat([run.trajectory.final for run in runs])
        errors.append(self._check_together(final[:2], prompts[0]))
        cond = optree.tree_map(lambda row: row.to(final.device), self.encode(prompts))
        trajectory = optree.tree_map(lambda *parts: torch.cat(parts), *(run.trajectory for run in runs))
        trajectory = trajectory._replace(steps=trajectory.steps - (len(self.known.levels) - 1 - self.steps))
        fields = {"schedule": self.known.schedule, "model": self.known.model, "cond": cond}
        recording = dataclasses.replace(runs[0], trajectory=trajectory, **fields)
        tolerance = find_tolerance(runs[0].model)
        return max(check_replay(module, recording, micro_batch=max(len(prompts) - 1, 1), tolerance=tolerance), *errors)

    @torch.no_grad()
    def _check_together(self, samples: Tensor, prompt: TextPrompt) -> float:
        """Return the relative error of two samples that are decoded together; ValueError if it is more than rounding."""
        if self._single or self.decode_chunk == 1 or len(samples) == 1:
            return 0.0
        (both,) = self._decode_prompts(samples, [prompt, prompt])
        one, other = (output for sample in samples.split(1) for output in self._decode_prompts(sample, [prompt]))
        errors = [0.0]
        for together, *apart in zip(both, one, other, strict=True):
            if together is not None:
                separate = torch.cat([part for part in apart if part is not None])
                errors.append(check_together(self.pipeline, together, separate, tolerance=TOLERANCES[self.dtype]))
        return max(errors)

    @run_alone
    def _run(self, module: nn.Module, prompts: Sequence[TextPrompt], number: int) -> Recording:
        """Run the pipeline with its real transformer and return the recording; with images there is one prompt."""
        pipe = self._load_pipeline()
        stand_ins = {part: getattr(pipe, part) for part in (*self._networks, *self._frozen)}
        set_here = ("num_inference_steps", "return_dict", "output_type")
        options = {name: value for name, value in self.call_arguments.items() if name not in set_here}
        calls = [call for recipe in self.known.model.recipes for call in recipe.calls]
        options["gather_maps"] = [leaf.gather_map for call in calls for leaf in call.leaves if isinstance(leaf, MixedInput)]
        start, texts = key(number), [get_text(prompt) for prompt in prompts]
        if isinstance(prompts[0], MediaPrompt) or self._single:
            options |= self._list_forms(prompts[0], 1)[self._form].one
        if self._single:
            (options["generator"],) = make_generators(fold_in(start, torch.arange(1)))
        if LYRICS in (repeated := repeat_lyrics(self.takes, {**options, "prompt": texts})):
            options[LYRICS] = repeated[LYRICS]
        for part in self._networks:
            setattr(pipe, part, place_network(module, part))
        for part, real in self._frozen.items():
            setattr(pipe, part, real)
        try:
            with silence(), torch.no_grad():
                return record(pipe, texts, key=start, steps=self._counts[0], sampler="ode", form="unscaled", **options)
        finally:
            for part, stand_in in stand_ins.items():
                setattr(pipe, part, stand_in)

    def _remove_offset(self, run: Recording, prompts: Sequence[TextPrompt]) -> Recording:
        """Return a run in the coordinates in which samples start as noise, see `replay.start`."""
        if (scale := self.known.model.scale) == 1:
            return run
        steps, parts = run.trajectory, (run.trajectory.x, run.trajectory.x_next, run.trajectory.final, run.initial)
        x, x_next, final, initial = (remove_offset(part, scale, self.encode(prompts)[-1]) for part in parts)
        return dataclasses.replace(run, trajectory=steps._replace(x=x, x_next=x_next, final=final), initial=initial)

    def _check_effects(self, prompts: Sequence[MediaPrompt]) -> None:
        """Raise ValueError if an image has no effect on the transformer's inputs."""
        for prompt in prompts:
            copies, (_, *cond) = next(self._try_copies(self._load_pipeline(), prompt, apart=True))
            for name in prompt.media:
                try:
                    _, *changed = self._dry_run(self._load_pipeline(), prompt.change(name), copies, apart=True)
                except ReplayError:
                    continue  # the pipeline uses the image otherwise
                same = optree.tree_map(torch.equal, cond, changed)
                if all(optree.tree_leaves(same)):
                    raise build_error(self.pipeline, f"its {name} has no effect on the samples; leave it out")

    @property
    def known(self) -> PromptFreeValues:
        """Values that do not depend on the prompt, from runs on the example."""
        if self._known is None:
            pipe, runs, same = self._load_pipeline(), dict[int, PromptFreeValues](), None
            for copies, run in self._try_copies(pipe, self.example, single=[True] if self._single else [False, True]):
                if (same := next((number for number, other in runs.items() if other.matches(run.known)), None)) is not None:
                    break
                runs[copies] = run.known
            if same is None:
                numbers = " and ".join(map(str, runs))
                raise build_error(self.pipeline, f"its {COMPONENT} is given inputs of unlike kinds for {numbers} samples")
            chosen = runs[same]
            shortest = () if self.shortest == self.example else self._try_copies(pipe, self.shortest)
            if pipe.transformer.unlike or (shortest and not any(run.known.matches(chosen) for _, run in shortest)):
                chosen = self._dry_run(pipe, self.example, same, apart=True).known
                chosen = chosen._replace(model=dataclasses.replace(chosen.model, ragged=True))
            self._known = chosen
        return self._known

    @property
    def _networks(self) -> tuple[str, ...]:
        """Names of the pipeline's trained parts."""
        return (self.part,) if self.boundary_ratio is None else EXPERTS

    def _load_parts(self, *prefixes: str) -> Any:
        return self._load_pipeline()

    def _fingerprint_encoders(self) -> str:
        padding = f" {self.known.rows}" if self.known.model.ragged else ""
        others = self._compute_fingerprint("", tuple(name for name in self.parts if name not in self._networks))
        arguments = serialise_arguments(self.call_arguments)
        return f"{super()._fingerprint_encoders()} {others} {self.compute} {arguments}{padding}"

    def _load_pipeline(self) -> Any:
        """Return the pipeline with a stand-in for its transformer; its other parts are frozen and on the device."""
        if self._pipe is None:
            stand_ins = self._make_stand_ins()
            with silence(), wrap_errors(self.pipeline, "be loaded"):
                pipe = self._open_pipeline(**stand_ins)
                for name, network in stand_ins.items():  # optional parts are read from the folder in any case
                    setattr(pipe, name, network)
                self._frozen = find_frozen_networks(pipe)
                self._freeze(pipe, pipe.register_modules)
                for name, real in self._frozen.items():
                    setattr(pipe, name, make_stand_in(copy_empty(real), self.device, real.dtype))
                pipe.set_progress_bar_config(disable=True)
            self._pipe = pipe
        return self._pipe

    def _make_stand_ins(self) -> dict[str, Any]:
        """Return a stand-in for each trained network."""
        networks = {part: self.build_part(part, empty=True) for part in self._networks}
        return {part: make_stand_in(network, self.device, self.compute) for part, network in networks.items()}

    def _freeze(self, pipe: Any, register: Callable[..., None]) -> None:
        """Freeze the other parts of a pipeline on the device; its VAE encodes to modes, its scheduler takes Euler steps."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and name not in self._networks:
                part.requires_grad_(False).eval().to(self.device)
        settings = getattr(getattr(pipe, "scheduler", None), "config", {})
        if settings.get("use_flow_sigmas") and settings.get("flow_shift") is not None:
            # A solver of higher order on the levels of a flow, which Euler steps, too, can integrate.
            register(scheduler=FlowMatchEulerDiscreteScheduler(shift=settings["flow_shift"]))
        if isinstance(getattr(pipe, "vae", None), nn.Module):
            use_modes(pipe.vae)

    def _try_copies(
        self, pipe: Any, prompt: TextPrompt, *, apart: bool = False, single: Sequence[bool] | None = None
    ) -> Iterator[tuple[int, DryRun]]:
        """Yield runs on several numbers of copies, see `_dry_run`: an input may have the length of one by coincidence.

        `single` are the kinds of forms to try, for several samples or for single ones; by default the one known to work.
        """
        failed = list[ValueError]()
        for kind in (self._single,) if single is None else single:
            errors = list[ValueError]()
            for copies in COPIES:
                try:
                    run = self._dry_run(pipe, prompt, copies, apart=apart, single=kind)
                except ValueError as error:
                    errors.append(error)
                    if len(errors) == 2 or not isinstance(error, ReplayError):
                        break
                else:
                    yield copies, run
            failed += errors if len(errors) == 2 or not all(isinstance(error, ReplayError) for error in errors) else []
        if failed:  # if the pipeline itself makes no batches, the useful error is the one for a single sample
            raise failed[0 if isinstance(failed[0], ReplayError) else -1]

    def _list_forms(self, prompt: TextPrompt, number: int) -> list[CallForm]:
        """Return the forms of the call that may make several samples of a prompt."""
        pipe = self._load_pipeline()
        crf = find_compression(pipe, self.call_arguments)
        return list_call_forms(self.takes, prompt, number, steps=self._counts, rate=read_rate(pipe), crf=crf)

    def _dry_run(
        self, pipe: Any, prompt: TextPrompt, copies: int = COPIES[0], *, apart: bool = False, single: bool | None = None
    ) -> DryRun:
        """Run the pipeline with the stand-in on several copies of one prompt; for `apart` see `Capture`.

        The forms of the call are tried in order until one gives the requested number of samples.
        """
        single = self._single if single is None else single
        tried, errors = self._list_forms(prompt, copies), list[ValueError]()
        settings: dict[str, Any] = {"steps": self.steps, "takes": self.takes, "frozen": self._frozen, "apart": apart}
        for number in range(self._form, len(tried)):
            if tried[number].single is not single:
                continue
            try:
                run = dry_run(pipe, self.call_arguments, tried[number], copies, **settings)
            except ValueError as error:
                errors.append(error)
            else:
                self._form, self._single = number, single
                return run
        raise errors[0]

    @run_alone
    def _decode_chunk(self, latents: Tensor, prompt: TextPrompt) -> Output:
        """Return the pipeline's output for latents, samples of one prompt."""
        pipe = self._load_pipeline()
        scheduler_before = pipe.scheduler
        least = find_least_steps(scheduler_before.config, self._strength)
        form = self._list_forms(prompt, len(latents))[self._form].several
        arguments = {**self.call_arguments, **form, "output_type": "pt", "num_inference_steps": least}
        try:
            with silence(), wrap_errors(self.pipeline, "decode samples"):
                pipe.scheduler = make_answering_scheduler(
                    scheduler_before, *split_pieces(latents.to(self.device, self.known.dtype), self.known.pieces)
                )
                return split_output(pipe(**repeat_lyrics(self.takes, arguments)))
        finally:
            pipe.scheduler = scheduler_before
