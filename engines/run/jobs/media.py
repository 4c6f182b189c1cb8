"""Columns of images, videos and sounds for a pipeline's call, and checks that no column is ignored."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluvial.engines.data.records import FILES, Prompt
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.scoring.signature import CONDITIONS, signature_of
from fluvial.models import is_recorded
from fluvial.models.replay.arguments import FRAMES
from fluvial.models.replay.kinds import ARGUMENTS, VIDEO, count_frames, find_kind
from fluvial.models.replay.media import MediaSource

SIZE = ("height", "width")  # columns of a sample's size, for runs of several sizes


def list_media_columns(model: Any, mapping: Sequence[str]) -> dict[str, str]:
    """Return the column of each argument of the pipeline's call that is an image, a video or a sound.

    Args:
        model: the model; its attribute `takes` lists such arguments, none by default.
        mapping: columns as argument=column; by default a column has the name of its argument.

    Raises:
        UsageError: the pipeline has no such argument, or the mapping has it twice.
    """
    takes = getattr(model, "takes", ())
    named = dict[str, str]()
    for word in mapping:
        argument, _, column = word.partition("=")
        if argument not in takes:
            known = ", ".join(name for name in ARGUMENTS if name in takes) or "none"
            raise UsageError("pipeline.media", word, f"an argument of {_name_model(model)}, which takes {known}")
        if argument in named:
            raise UsageError("pipeline.media", word, "one column per argument", f"{argument} is {named[argument]} already")
        named[argument] = column
    return {**{name: name for name in ARGUMENTS if name in takes and name not in named}, **named}


def check_columns(model: Any, prompts: Sequence[Prompt], columns: Mapping[str, str]) -> None:
    """Check that no column named as an argument of the pipeline is ignored, and that all prompts have the same media.

    Args:
        model: the model.
        prompts: prompts of the run.
        columns: column of each argument that is an image, a video or a sound.

    Raises:
        UsageError: a column would be ignored, a prompt lacks a file that other prompts have or that the model needs, or
            videos have different numbers of frames; the message names the prompt and the column.
    """
    takes = getattr(model, "takes", ())
    expected = {name for prompt in prompts for name in prompt.media} | {*(() if is_recorded(model) else takes)}
    for prompt in prompts:
        present = dict.fromkeys((*(name for name in FILES if getattr(prompt, name) is not None), *prompt.metadata))
        if unasked := [name for name in present if name in getattr(model, "left_out", ())]:
            raise UsageError(
                f"prompt {prompt.text[:40]!r} has a column {unasked[0]}, which would be ignored: set "
                f"`pipeline.call` to {unasked[0]}=true, or rename or remove it"
            )
        used = (*SIZE, *(name for argument in prompt.media for name in (argument, columns[argument])))
        if unused := [name for name in present if name in takes and name not in used]:
            raise UsageError(
                f"prompt {prompt.text[:40]!r} has a column {unused[0]}, which {_name_model(model)} takes and which would "
                "be ignored: map it with `pipeline.media` if it is an image, a video or a sound, or rename or remove it"
            )
        if missing := sorted(expected - set(prompt.media)):
            raise UsageError(
                f"prompt {prompt.text[:40]!r} has no column {columns[missing[0]]}, which {_name_model(model)} or other "
                "prompts need: give all prompts the same images, videos and sounds"
            )
        for argument, source in prompt.media.items():
            if (count := _count_files(source)) != (first := _count_files(prompts[0].media.get(argument, source))):
                raise UsageError(
                    f"prompt {prompt.text[:40]!r} has {count} files in the column {columns[argument]}, expected {first} as "
                    "the first prompt has: samples of both cannot be in one batch"
                )
    _check_frames(model, prompts, columns)


def _count_files(source: MediaSource) -> int:
    """Return the number of files of an argument."""
    return len(source) if isinstance(source, tuple) else 1


def _check_frames(model: Any, prompts: Sequence[Prompt], columns: Mapping[str, str]) -> None:
    """Raise UsageError if the videos of an argument have different numbers of frames: they cannot be in one batch.

    A pipeline without an argument for the number of frames makes as many as its input has, which must be those of the size.
    """
    takes = getattr(model, "takes", ())
    expected = model.size[2] if is_recorded(model) and not {*FRAMES} & {*takes} else None
    counts = dict[str, tuple[int, Prompt]]()
    for prompt in prompts:
        for argument, source in prompt.media.items():
            if isinstance(source, tuple) or find_kind(argument, source) is not VIDEO:
                continue
            with convert_errors(UsageError, ValueError, says=f"prompt {prompt.text[:40]!r}, column {columns[argument]}"):
                count = count_frames(source)
            if expected not in (None, count):
                raise UsageError(
                    f"column {columns[argument]} of prompt {prompt.text[:40]!r} has {count} frames, so "
                    f"{_name_model(model)} makes {count}, but pipeline.frames is {expected}: set it to {count}"
                )
            first, other = counts.setdefault(argument, (count, prompt))
            if count != first:
                raise UsageError(
                    f"column {columns[argument]} of prompt {prompt.text[:40]!r} has {count} frames, and that of prompt "
                    f"{other.text[:40]!r} has {first}: give all prompts videos of one length"
                )


def _name_model(model: Any) -> str:
    """Return the class of a pipeline, or the name of a model without one."""
    return str(getattr(model, "pipeline", getattr(model, "name", type(model).__name__)))


def check_used(prompts: Sequence[Prompt], users: Mapping[str, Any]) -> None:
    """Check that a reward or an evaluator uses the files in the prompts' records, for a model that takes none.

    Raises:
        UsageError: a prompt has a file, and none of `users` takes it as a condition or with `metadata`.
    """
    signatures = [signature_of(user) for user in users.values()]
    for name, column in CONDITIONS.items():
        example = next((prompt for prompt in prompts if getattr(prompt, column) is not None), None)
        if example is None or any(signature.accepts(one) for signature in signatures for one in (name, "metadata")):
            continue
        raise UsageError(
            f"prompt {example.text[:40]!r} has a column {column}, which nothing uses: the model does not take it, and no "
            f"reward or evaluator takes {name} or metadata; remove the column, or use a file that holds only prompts"
        )


def check_files(prompts: Iterable[Prompt]) -> None:
    """Raise UsageError if a prompt has a folder of frames, which cannot be sent to servers."""
    for prompt in prompts:
        for argument, source in prompt.media.items():
            if isinstance(source, Path) and source.is_dir():
                raise UsageError(
                    f"prompt {prompt.text[:40]!r} has {source}, a folder of frames, in {argument}, which cannot be sent to "
                    "a server: use one file, or make rollouts in the run itself"
                )
