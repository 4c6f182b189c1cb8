"""Dry runs of a pipeline: on several samples of one prompt, with a stand-in for its network."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.random import fold_in, key
from fluvial.core.table import Record
from fluvial.models.pipelines.folder import silence
from fluvial.models.protocol import Cond, Schedule
from fluvial.models.replay.arguments import CallForm, format_arguments, repeat_lyrics
from fluvial.models.replay.capture import Capture, have_same_recipes
from fluvial.models.replay.checks import build_error, check_initial_noise, check_tail, wrap_errors
from fluvial.models.replay.recorded import RecordedModel, make_generators
from fluvial.models.replay.scheduler import Recorder, RecordingScheduler
from fluvial.models.replay.sounds import run_alone
from fluvial.models.replay.stand_in import find_initial_samples
from fluvial.models.replay.start import find_start

COMPONENT = "transformer"


class PromptFreeValues(NamedTuple):
    """Values that do not depend on the prompt."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the samples that the pipeline ends with and decodes
    schedule: Schedule
    model: RecordedModel
    rows: tuple[tuple[torch.Size, ...], ...]  # shapes of the inputs with one row per sample
    pieces: tuple[torch.Size, ...]  # shapes of the pieces of a flat sample; empty for a sample of one piece
    levels: Tensor  # [T+1] the pipeline's noise levels; the last ones are taken

    def matches(self, other: "PromptFreeValues") -> bool:
        """Return whether two runs have the same recipes, with inputs of the same shapes."""
        return self.rows == other.rows and have_same_recipes(self.model.recipes, other.model.recipes)


class DryRun(NamedTuple):
    """Result of a pipeline's run on one prompt with a stand-in for its network."""

    known: PromptFreeValues
    cond: Cond  # rows of the prompt, by recipe
    offset: Tensor | None  # [1, *event] offset of the initial samples from noise, see `replay.start`; None if it is zero


class _WatchedCall(NamedTuple):
    """One recorded call of the pipeline."""

    arguments: dict[str, Any]
    capture: Capture
    recorder: Recorder
    timesteps: Tensor


@run_alone
@torch.no_grad()
def dry_run(
    pipe: Any,
    settings: dict[str, Any],
    form: CallForm,
    copies: int,
    *,
    steps: int,
    takes: Mapping[str, Any],
    frozen: Mapping[str, nn.Module],
    apart: bool,
) -> DryRun:
    """Run a pipeline on several samples of a prompt: in one call, or one call per sample if the form is single.

    Args:
        pipe: the pipeline with a stand-in for its network.
        settings: arguments of the call apart from the form's.
        form: form of the call.
        copies: number of samples.
        steps: number of steps that it takes.
        takes: parameters of the call.
        frozen: frozen networks beside the trained one, by part of the pipeline.
        apart: see `Capture`.

    Raises:
        ReplayError: the pipeline cannot be replayed faithfully.
        ValueError: the pipeline does not take these arguments.
    """
    name, seeds = type(pipe).__name__, make_generators(fold_in(key(0), torch.arange(copies)))
    noise: list[Any] = seeds if form.single else [seeds]
    arguments = [repeat_lyrics(takes, {**settings, **form.several, "generator": each}) for each in noise]
    calls = [_watch_call(pipe, each, settings, apart, form.single) for each in arguments]
    _, capture, recorder, timesteps = calls[0]
    initial = torch.cat([call.capture.initial for call in calls if call.capture.initial is not None])
    if len(initial) != copies:
        raise build_error(name, f"it makes {len(initial)} samples of a prompt, although {copies} were requested")
    levels = recorder.scheduled.sigmas
    first = check_tail(name, capture.taken, len(levels) - 1, steps)
    starts = []
    for call in calls if levels[first] != 1 else ():
        assert call.capture.initial is not None
        noiseless = partial(find_initial_samples, pipe, call.arguments)
        starts.append(find_start(name, call.capture.initial, call.recorder.mixtures, float(levels[first]), noiseless))
    mixed = [start for start in starts if start is not None]
    if first and not mixed:
        raise build_error(name, f"it takes the last {steps} steps only, and does not start from an image")
    check_initial_noise(name, torch.cat([start.noise for start in mixed]) if mixed else initial)
    recipes, cond = capture.build_recipes()
    for call in calls[1:]:
        other_recipes, rows = call.capture.build_recipes()
        if not have_same_recipes(other_recipes, recipes) or [*map(len, rows)] != [*map(len, cond)]:
            raise build_error(name, f"its {COMPONENT} is given inputs of unlike kinds for different noise")
        cond = tuple(tuple(map(_join_rows, *pair)) for pair in zip(cond, rows, strict=True))
    if any(not torch.equal(row[0], other) for rows in cond for row in rows for other in row[1:]):
        raise build_error(name, f"its {COMPONENT} gets an input other than the sample that depends on the sample")
    rescaled, scale = (levels[first:] / levels[first], mixed[0].scale) if mixed else (levels, 1.0)
    model = RecordedModel(name, rescaled[:-1], recipes, ragged=form.single, frozen=frozen, scale=scale)
    last = recorder.trajectory().x_next
    shapes = tuple(tuple(row.shape[1:] for row in rows) for rows in cond)
    schedule = Schedule(rescaled, timesteps[-steps:])
    known = PromptFreeValues(tuple(last.shape[2:]), last.dtype, schedule, model, shapes, recorder.shapes, levels)
    rows_of_one = tuple(tuple(row[:1] for row in rows) for rows in cond)
    return DryRun(known, rows_of_one, mixed[0].offset[:1] if mixed else None)


def _watch_call(pipe: Any, arguments: dict[str, Any], settings: dict[str, Any], apart: bool, single: bool) -> _WatchedCall:
    """Call a pipeline and record its steps; `settings` are the arguments that an error message shows."""
    name, pipe_scheduler = type(pipe).__name__, pipe.scheduler
    capture = Capture(pipe, COMPONENT, arguments, apart=apart or single, single=single)
    with wrap_errors(name, "be trained without an adapter"):
        config = {**pipe_scheduler.config, "_class_name": type(pipe_scheduler).__name__}
        scheduler = RecordingScheduler.from_config(config)
    with (
        silence(),
        capture.watch(pipe, scheduler),
        scheduler.recording(key=key(0), record=Record(form="unscaled"), on_step=capture.take_step) as recorder,
    ):
        with wrap_errors(name, f"be called with {format_arguments(settings)}"):
            pipe(**arguments)
        if capture.initial is None:
            raise build_error(name, "its scheduler takes no step")
    return _WatchedCall(arguments, capture, recorder, scheduler.timesteps)


def _join_rows(one: Tensor, other: Tensor) -> Tensor:
    """Return the rows of two calls as one tensor; if their shapes differ, placeholders that compare as different."""
    return torch.cat([one, other]) if one.shape[1:] == other.shape[1:] else torch.cat([one.isnan(), ~one.isnan()])
