"""Model of any modular pipeline of diffusers: its own blocks encode, compute the velocity and decode."""

import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.random import key
from fluvial.core.rollout import Velocity, rollout
from fluvial.core.transitions import ddim, ode
from fluvial.models.digests import digest_file
from fluvial.models.modular.blocks import (
    BlockNetwork,
    Blocks,
    LoopInputs,
    copy_generator,
    run_from_loop,
    run_to_loop,
    run_whole,
    split_blocks,
)
from fluvial.models.modular.conditioning import pad_rows, place_samples, split_inputs
from fluvial.models.modular.velocity import ModularVelocity, find_velocity
from fluvial.models.pipelines.folder import read_settings, silence
from fluvial.models.protocol import Cond, Schedule
from fluvial.models.replay.any_pipeline import SIZES, AnyPipeline
from fluvial.models.replay.arguments import SEVERAL, list_call_forms
from fluvial.models.replay.capture import SCALES, UNGUIDED
from fluvial.models.replay.checks import build_error, check_images, check_initial_noise, wrap_errors
from fluvial.models.replay.experts import place_network
from fluvial.models.replay.media import MediaPrompt, TextPrompt, get_media, get_text
from fluvial.models.replay.processors import read_processors
from fluvial.models.replay.recorded import TOLERANCES, fits_within
from fluvial.models.replay.sounds import Output, run_alone, split_output


class ModularValues(NamedTuple):
    """Values that do not depend on the prompt, as `replay.dry.PromptFreeValues`."""

    shape: tuple[int, ...]
    schedule: Schedule
    model: ModularVelocity
    rows: tuple[torch.Size, ...]  # shapes of the tensors of the longest prompt
    levels: Tensor
    requested_steps: int  # number of steps to request, so that the loop takes those of the schedule


class AnyModular(AnyPipeline):
    """The model protocol over a modular pipeline, for one size, number of steps and guidance.

    Args and Raises: see `AnyPipeline`.
    """

    others = ()
    _states: dict[TextPrompt, LoopInputs]  # inputs of the loop for the prompt that was decoded last
    how = "trained through its own blocks"

    def _identify(self, local: Path, example: TextPrompt) -> tuple[str, str, dict[str, inspect.Parameter]]:
        """Return the class of the pipeline, that of its trained network, and the arguments of its call."""
        with silence(), wrap_errors(str(local), "be opened as a modular pipeline"):
            self._empty = self._open_empty(local)
        blocks = split_blocks(self._empty, self._read_arguments(example))
        parts = {name: kind for name, kind in blocks.list_networks().items() if name not in UNGUIDED}
        name = type(self._empty).__name__
        if not parts:
            raise build_error(name, "its loop calls no network")
        scheduler = local / "scheduler" / "scheduler_config.json"
        settings = read_settings(scheduler) if scheduler.is_file() else {}
        if "beta_schedule" in settings and settings.get("prediction_type") == "epsilon":
            self.prediction = "epsilon"
        self.part = "transformer" if "transformer" in parts else next(iter(parts))
        kind, keyword = inspect.Parameter, inspect.Parameter.KEYWORD_ONLY
        defaults = {entry.name: entry.default for entry in blocks.inputs if entry.name not in (None, "strength")}
        takes = {name: kind(name, keyword, default=default) for name, default in defaults.items()}
        self._own = frozenset(takes)
        further = ["return_dict", "output_type", "num_inference_steps", *(SCALES[:1] if _list_guiders(self._empty) else [])]
        takes |= {name: kind(name, keyword, default=None) for name in further if name not in takes}
        return name, parts[self.part].__name__, takes

    def _open_empty(self, folder: Path) -> Any:
        """Return the pipeline without its parts."""
        from diffusers import ModularPipeline

        trust = {"trust_remote_code": True} if getattr(self, "trust_remote_code", False) else {}
        return ModularPipeline.from_pretrained(str(folder), local_files_only=True, **trust)

    def _read_arguments(self, prompt: TextPrompt) -> dict[str, Any]:
        """Return the arguments that a prompt contains, which select the blocks."""
        return {"prompt": get_text(prompt), **get_media(prompt)}

    @property
    def known(self) -> ModularValues:  # type: ignore[override]
        """Values that do not depend on the prompt, found with the example."""
        if self._known is None:
            pipe, steps = self._load_pipeline(), self.steps
            loop_inputs = self._enter(self.example, steps)
            if (taken := len(loop_inputs.values)) != steps:  # some take one step less than requested
                steps += steps - taken
                loop_inputs = self._enter(self.example, steps)
            if len(loop_inputs.values) != self.steps:
                taken = len(loop_inputs.values)
                raise build_error(self.pipeline, f"asked for {steps} steps, it takes {taken}: --sampling.steps {taken}")
            with silence(), wrap_errors(self.pipeline, "take a step"):
                others = self._enter_others(steps)
                velocity = find_velocity(pipe, self._blocks, loop_inputs, self._networks, self.compute, others)
            model = dataclasses.replace(velocity, prediction=self.prediction)
            _, rows, _ = split_inputs(self.pipeline, loop_inputs, model.streams)
            shapes = tuple(row.shape[1:] for row in rows)
            self._known = ModularValues(model.shape, model.schedule, model, shapes, model.schedule.levels, steps)  # type: ignore[assignment]
        return self._known  # type: ignore[return-value]

    @property
    def any_level(self) -> bool:
        """Whether the velocity is defined at any noise level, not only at those of the schedule."""
        return self.known.model.time is not None

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return the inputs of the loop's steps for a prompt, as tensors `[1, ...]` by number, and their sizes.

        Raises:
            ValueError: they have another structure than those of other prompts, or larger tensors.
        """
        known = self.known
        loop_inputs = self._enter(prompt, known.requested_steps)
        layout, rows, sizes = split_inputs(self.pipeline, loop_inputs, known.model.streams)
        shapes = tuple(row.shape[1:] for row in rows)
        fits = shapes == known.rows if known.model.joined else fits_within([shapes], [known.rows])
        if not fits or not layout.matches(known.model.layout):
            raise build_error(
                self.pipeline,
                f"its loop is given values of other kinds, or larger ones, for the prompt {get_text(prompt)[:40]!r} than "
                "for others; samples of both cannot be in one batch",
            )
        row_fields = {str(number): row for number, row in enumerate(pad_rows(rows, known.rows))}
        return {**row_fields, SIZES: torch.tensor([sizes], dtype=torch.float64, device=self.device)}

    def build_cond(self, texts: Mapping[str, Tensor]) -> Cond:
        """Return the conditioning of `ModularVelocity`."""
        return (*(texts[str(number)] for number in range(len(self.known.rows))), texts[SIZES])

    def adapt_to(self, prompts: Sequence[TextPrompt]) -> "AnyModular":
        """Return the model for the prompts of a run, see `AnyPipeline.adapt_to`; their images select the blocks."""
        other: Any = super().adapt_to(prompts)
        if isinstance(other.example, MediaPrompt):
            _, other.network, _ = other._identify(other.folder, other.example)
            other._pipe = None
            other.weights = other.folder / other.part if other.boundary_ratio is None else other.weights
        other._states = {}
        return other

    def check(self, module: nn.Module, prompts: Sequence[TextPrompt]) -> float:
        """Compare the model with runs of the pipeline on prompts: images and sounds of the ODE, and initial noise.

        A velocity must not depend on earlier calls.

        Args:
            module: the network, as it is trained.
            prompts: prompts of the run.

        Returns:
            The largest relative error of images and sounds.

        Raises:
            ValueError: something differs by more than rounding; the message names the pipeline and what differs.
        """
        errors, starts, schedule = list[float](), list[Tensor](), self.known.schedule
        for prompt in dict.fromkeys(prompts):  # the noise of one prompt is the same each time
            theirs = self._run_pipeline(module, prompt)
            loop_inputs = self._enter(prompt, self.known.requested_steps)
            noise = self._read_initial_samples(loop_inputs)
            starts.append(noise)
            cond = [row.to(self.device) for row in self.encode([prompt])]

            def velocity(x: Tensor, level: Tensor, step: int, cond: Any = cond) -> Tensor:
                return self.predict(module, x, level, cond)

            with torch.no_grad():
                first = velocity(noise, schedule.levels[:1].to(noise.device), 0)
                final = self._roll_out(velocity, noise, loop_inputs)
                again = velocity(noise, schedule.levels[:1].to(noise.device), 0)
            if not torch.equal(first, again):
                raise build_error(self.pipeline, "its velocity depends on earlier calls: its network keeps what it computed")
            ours = self._decode_chunk(final, prompt)
            tolerance = TOLERANCES[self.dtype]
            for what, one, other in zip(("images", "sounds"), ours, theirs, strict=True):
                if other is not None and one is not None:
                    errors.append(check_images(self.pipeline, one, other, tolerance=tolerance, what=what))
        if not errors:
            raise build_error(self.pipeline, "the blocks after its loop make no images and no sounds")
        check_initial_noise(self.pipeline, torch.cat(starts).flatten(1))
        return max(errors)

    def _roll_out(self, velocity: Velocity, x: Tensor, loop_inputs: LoopInputs) -> Tensor:
        """Take the pipeline's own steps from samples `[1, *event]`: along the ODE, or with new noise at each step."""
        levels, streams = self.known.schedule.levels, self.known.model.streams
        if streams[0].scheduler:
            transition = ode if self.prediction == "velocity" else partial(ddim, eta=0.0)
            settings: dict[str, Any] = {"transition": transition, "deterministic": transition, "window": (), "record": ()}
            return rollout(velocity, x, levels, key=key(0), **settings).final
        source = copy_generator(loop_inputs.state.get("generator"))
        for step, (level, following) in enumerate(pairwise(levels.tolist())):
            clean = x - level * velocity(x, levels[step : step + 1].to(x.device), step)
            if following:
                noise = [stream.gather(torch.randn(stream.shape, generator=source)) for stream in streams]
                clean = (1 - following) * clean + following * torch.cat(noise).reshape(x.shape).to(x)
            x = clean
        return x

    @run_alone
    def _run_pipeline(self, module: nn.Module, prompt: TextPrompt) -> Output:
        """Return the output of the pipeline itself for a prompt."""
        pipe, arguments = self._load_pipeline(), self._build_arguments(prompt, self.known.requested_steps)
        networks = {part: BlockNetwork(place_network(module, part), self.device, self.compute) for part in self._networks}
        return self._read_output(run_whole(pipe, self._blocks, networks, arguments, _compute_seed(prompt)))

    def _read_initial_samples(self, loop_inputs: LoopInputs) -> Tensor:
        """Return the samples `[1, *event]` that the pipeline itself starts from."""
        streams, values = self.known.model.streams, loop_inputs.values[0]
        stream_values = [values[stream.field].flatten()[stream.elements].float() for stream in streams]
        return torch.cat(stream_values).reshape(1, *self.known.shape)

    @run_alone
    def _decode_chunk(self, latents: Tensor, prompt: TextPrompt) -> Output:
        """Return the outputs of the blocks after the loop for samples `[B, *event]` of one prompt, one by one."""
        pipe, streams = self._load_pipeline(), self.known.model.streams
        if prompt not in self._states:
            self._states = {prompt: self._enter(prompt, self.known.requested_steps)}
        loop_inputs, outputs = self._states[prompt], list[Output]()
        for sample in latents.to(self.device):
            values = place_samples(dict(loop_inputs.values[0]), sample.flatten(), streams)
            with silence(), wrap_errors(self.pipeline, "decode samples"):
                state = run_from_loop(pipe, self._blocks, loop_inputs, values, {stream.field for stream in streams})
            outputs.append(self._read_output(state))
        return Output(*(None if None in each else torch.cat(each) for each in zip(*outputs, strict=True)))

    def _build_arguments(self, prompt: TextPrompt, steps: int) -> dict[str, Any]:
        """Return the arguments of the pipeline's call for a prompt."""
        one = list_call_forms(self.takes, prompt, 1, steps=(steps,))[0].one
        arguments = {**self.call_arguments, **one, "output_type": "pt"}
        return {name: value for name, value in arguments.items() if name in self._own}

    def _enter(self, prompt: TextPrompt, steps: int) -> LoopInputs:
        """Return the inputs of the loop's steps for a prompt."""
        pipe = self._load_pipeline()
        return run_to_loop(pipe, self._blocks, self._networks, self._build_arguments(prompt, steps), _compute_seed(prompt))

    def _enter_others(self, steps: int) -> list[LoopInputs]:
        """Return the inputs of the steps for two samples of the example, and for the shortest and longest prompt of a run.

        The list is empty if the pipeline makes one sample at a time, a guider changes the network from call to call, or the
        prompts have images, which may differ in size.
        """
        from diffusers.guiders.guider_utils import BaseGuidance

        text, pipe = self.example, self._load_pipeline()
        plain = all(type(guider).prepare_models is BaseGuidance.prepare_models for guider in _list_guiders(pipe))
        if not isinstance(text, str) or not plain:
            return []
        both: dict[str, Any] = {name: 2 for name in SEVERAL if name in self._own} or {"prompt": [text, text]}
        ends = (self.shortest, text) if self.shortest != text else ("a", f"{text} {text} {text}")
        try:
            several = run_to_loop(
                pipe, self._blocks, self._networks, {**self._build_arguments(text, steps), **both}, _compute_seed(text)
            )
            return [several, *(self._enter(prompt, steps) for prompt in ends)]
        except ValueError:
            return []

    def _load_pipeline(self) -> Any:
        """Return the pipeline with the parts that its blocks use, and stand-ins for the trained networks."""
        if self._pipe is None:
            with silence(), wrap_errors(self.pipeline, "be loaded"):
                pipe = self._open_empty(self.folder)
            blocks = split_blocks(pipe, self._build_arguments(self.example, self.steps))
            stand_ins = self._make_stand_ins()
            with silence(), wrap_errors(self.pipeline, "be loaded"):
                used = blocks.list_parts()
                processors = {name: part for name, part in self._read_processors().items() if name in used}
                specs = {name: pipe.get_component_spec(name) for name in used if name not in (*stand_ins, *processors)}
                sources = {
                    name: str(self.folder) if name in self.parts else spec.pretrained_model_name_or_path
                    for name, spec in specs.items()
                    if spec.default_creation_method == "from_pretrained"
                }
                sources = {name: source for name, source in sources.items() if source is not None}
                options = {"torch_dtype": self.dtype, "local_files_only": True}
                pipe.load_components([*sources], pretrained_model_name_or_path=sources, **options)
                if unread := [f"{name} of {path}" for name, path in sources.items() if getattr(pipe, name, None) is None]:
                    raise ValueError(f"{', '.join(unread)} cannot be read")
                pipe.register_components(**stand_ins, **processors)
                self._place_parts(pipe, blocks)
            self._pipe, self._blocks, self._states = pipe, blocks, {}
        return self._pipe

    def _read_processors(self) -> dict[str, Any]:
        """Return the processors that transformers cannot read without torchvision, see `replay.processors`."""
        from transformers import AutoTokenizer

        processors = read_processors(self.folder)
        of_text = [name for name, part in processors.items() if part is None]
        return processors | {
            name: AutoTokenizer.from_pretrained(self.folder / name, local_files_only=True) for name in of_text
        }

    def _read_output(self, state: Any) -> Output:
        """Return the images and sounds among the outputs of the blocks after the loop."""
        tensors = list[Tensor]()
        for name in sorted(self._blocks.list_outputs() - {stream.field for stream in self.known.model.streams}):
            value = state.get(name)
            several = isinstance(value, list) and value and all(isinstance(one, Tensor) for one in value)
            value = torch.stack(value) if several and len({one.shape for one in value}) == 1 else value
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
                frames_alone = value.ndim == 4 and self.size[2] > 1 and len(value) > 1  # of the one sample
                tensors.append(value[None] if frames_alone else value)
        output = split_output(tuple(tensors))
        if output.images is not None and len(output.images) != 1:
            raise build_error(self.pipeline, f"it makes {len(output.images)} images of one sample")
        return output

    def _place_parts(self, pipe: Any, blocks: Blocks) -> None:
        """Freeze the other parts of a pipeline, and set its guidance and its scheduler."""
        from diffusers import DDIMScheduler

        settings = getattr(getattr(pipe, "scheduler", None), "config", {})
        self._freeze(pipe, pipe.register_components)
        if self.prediction == "epsilon":  # as the adapter of Stable Diffusion
            pipe.register_components(scheduler=DDIMScheduler.from_config(settings, clip_sample=False, thresholding=False))
        if settings.get("scheduler_type") == "unipc":  # of Helios, whose levels are those of its Euler steps
            pipe.scheduler.register_to_config(scheduler_type="euler")
        for guider in _list_guiders(pipe):
            guider.guidance_scale = self.call_arguments.get(SCALES[0], 1.0)
        if hasattr(blocks.loop, "set_progress_bar_config"):
            blocks.loop.set_progress_bar_config(disable=True)
        module = vars(sys.modules[type(blocks.inner).__module__])
        if "tqdm" in module:  # a block that takes all steps calls it itself
            module["tqdm"] = partial(module["tqdm"], disable=True)


def _list_guiders(pipe: Any) -> list[Any]:
    """Return the parts that guide with a scale."""
    from diffusers.guiders.guider_utils import BaseGuidance

    return [part for part in pipe.components.values() if isinstance(part, BaseGuidance) and hasattr(part, "guidance_scale")]


def _compute_seed(prompt: TextPrompt) -> int:
    """Return the seed of a prompt for the pipeline's draws other than samples, such as noise on given frames."""
    return int(digest_file(str(prompt).encode())[:8], 16)
