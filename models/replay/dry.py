"""Dry runs of a pipeline: on several samples of one prompt, with a stand-in for its network."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.random import fold_in, key
from fluvial.core.table import Record
from fluvial.models.pipelines.folder import quietly
from fluvial.models.protocol import Cond, Schedule
from fluvial.models.replay.arguments import CallForm, build_arguments, format_arguments
from fluvial.models.replay.capture import Capture, same_steps
from fluvial.models.replay.checks import check_initial_noise, check_tail, foreign, refusal
from fluvial.models.replay.recorded import RecordedModel, generators
from fluvial.models.replay.scheduler import Recorder, RecordingScheduler
from fluvial.models.replay.sounds import alone
from fluvial.models.replay.stand_in import first_samples
from fluvial.models.replay.start import start_of

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

    def alike(self, other: "PromptFreeValues") -> bool:
        """Return whether two runs have the same recipes, with inputs of the same shapes."""
        return self.rows == other.rows and same_steps(self.model.recipes, other.model.recipes)


class Dry(NamedTuple):
    """A run of a pipeline without its network on one prompt."""

    known: PromptFreeValues
    cond: Cond  # rows of the prompt, by recipe
    offset: Tensor | None  # [1, *event] part of the initial samples that is no noise; None if there is none


class _Seen(NamedTuple):
    """One call of the pipeline."""

    asked: dict[str, Any]
    capture: Capture
    recorder: Recorder
    timesteps: Tensor


@alone
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
) -> Dry:
    """Run a pipeline on several samples of a prompt, by one call or, if the form makes single samples, by one call for each.

    Args:
        pipe: the pipeline with a stand-in for its network.
        settings: arguments of the call apart from the form's.
        form: form of the call.
        copies: number of samples.
        steps: number of steps that it takes.
        takes: parameters of the call.
        frozen: networks that stay frozen, by part of the pipeline.
        apart: see `Capture`.

    Raises:
        ReplayError: the pipeline cannot be replayed faithfully.
        ValueError: it cannot be called so.
    """
    name, seeds = type(pipe).__name__, generators(fold_in(key(0), torch.arange(copies)))
    noise: list[Any] = seeds if form.single else [seeds]
    seen = [
        _watch(pipe, build_arguments(takes, {**settings, **form.several, "generator": each}), settings, apart, form.single)
        for each in noise
    ]
    _, capture, recorder, timesteps = seen[0]
    initial = torch.cat([run.initial for _, run, *_ in seen if run.initial is not None])
    if len(initial) != copies:
        raise refusal(name, f"it makes {len(initial)} samples of a prompt, expected {copies} as asked")
    levels = recorder.scheduled.sigmas
    first = check_tail(name, capture.taken, len(levels) - 1, steps)
    starts = []
    for asked, run, record, _ in seen:
        assert run.initial is not None
        noiseless = partial(first_samples, pipe, asked)
        starts += (
            [start_of(name, run.initial, record.mixtures, float(levels[first]), noiseless)] if levels[first] != 1 else []
        )
    mixed = [start for start in starts if start is not None]
    if first and not mixed:
        raise refusal(name, f"it takes the last {steps} steps only, and starts from no image")
    check_initial_noise(name, torch.cat([start.noise for start in mixed]) if mixed else initial)
    recipes, cond = capture.recipes()
    for _, other, *_ in seen[1:]:
        same, rows = other.recipes()
        if not same_steps(same, recipes) or [len(levels_left) for levels_left in rows] != [
            len(levels_left) for levels_left in cond
        ]:
            raise refusal(name, f"its {COMPONENT} is given inputs of unlike kinds for different noise")
        cond = tuple(tuple(map(_both, *pair)) for pair in zip(cond, rows, strict=True))
    if any(not torch.equal(row[0], other) for rows in cond for row in rows for other in row[1:]):
        raise refusal(name, f"its {COMPONENT} is given something besides the sample that depends on it")
    levels_left, scale = (levels[first:] / levels[first], mixed[0].scale) if mixed else (levels, 1.0)
    model = RecordedModel(name, levels_left[:-1], recipes, ragged=form.single, frozen=frozen, scale=scale)
    last = recorder.trajectory().x_next
    shapes = tuple(tuple(row.shape[1:] for row in rows) for rows in cond)
    schedule = Schedule(levels_left, timesteps[-steps:])
    known = PromptFreeValues(tuple(last.shape[2:]), last.dtype, schedule, model, shapes, recorder.shapes, levels)
    rows_of_one = tuple(tuple(row[:1] for row in rows) for rows in cond)
    return Dry(known, rows_of_one, mixed[0].offset[:1] if mixed else None)


def _watch(pipe: Any, asked: dict[str, Any], settings: dict[str, Any], apart: bool, single: bool) -> _Seen:
    """Call a pipeline and record its steps."""
    name, theirs = type(pipe).__name__, pipe.scheduler
    capture = Capture(pipe, COMPONENT, asked, apart=apart or single, single=single)
    with foreign(name, "be trained without an adapter"):
        scheduler = RecordingScheduler.from_config({**theirs.config, "_class_name": type(theirs).__name__})
    with (
        quietly(),
        capture.watching(pipe, scheduler),
        scheduler.recording(key=key(0), record=Record(form="unscaled"), on_step=capture.step) as recorder,
    ):
        with foreign(name, f"be called with {format_arguments(settings)}"):
            pipe(**asked)
        if capture.initial is None:
            raise refusal(name, "its scheduler takes no step")
    return _Seen(asked, capture, recorder, scheduler.timesteps)


def _both(one: Tensor, other: Tensor) -> Tensor:
    """Return the rows of two calls; those of unlike shapes are not equal."""
    return torch.cat([one, other]) if one.shape[1:] == other.shape[1:] else torch.cat([one.isnan(), ~one.isnan()])
