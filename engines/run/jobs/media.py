"""Columns of images, videos and sounds that a pipeline is called with, and refusals of those that nothing would use."""

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

SIZE = ("height", "width")  # columns of a size, which are for runs of several sizes


def media_columns(model: Any, asked: Sequence[str]) -> dict[str, str]:
    """Return the column of each argument of the pipeline's call that is an image, a video or a sound.

    Args:
        model: the model; one without `takes`, the names of such arguments, takes none.
        asked: columns that are named, as argument=column; others have the name of their argument.

    Raises:
        UsageError: the pipeline has no such argument, or it is named twice.
    """
    takes = getattr(model, "takes", ())
    named = dict[str, str]()
    for word in asked:
        argument, _, column = word.partition("=")
        if argument not in takes:
            known = ", ".join(name for name in ARGUMENTS if name in takes) or "none"
            raise UsageError("pipeline.media", word, f"an argument of {_name(model)}, which takes {known}")
        if argument in named:
            raise UsageError("pipeline.media", word, "one column per argument", f"{argument} is {named[argument]} already")
        named[argument] = column
    return {**{name: name for name in ARGUMENTS if name in takes and name not in named}, **named}


def check_columns(model: Any, prompts: Sequence[Prompt], columns: Mapping[str, str]) -> None:
    """Check that each column that the pipeline could be called with is used, and that all prompts have the same media.

    Args:
        model: the model.
        prompts: prompts of the run.
        columns: column of each argument that is an image, a video or a sound.

    Raises:
        UsageError: a prompt has a column with the name of an argument of the pipeline that the run does not pass, or lacks
            a file that another has or that the model needs, or videos have unlike numbers of frames; the message names the
            prompt and the column.
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
                f"prompt {prompt.text[:40]!r} has a column {unused[0]}, which {_name(model)} takes and which would be "
                "ignored: map it with `pipeline.media` if it is an image, a video or a sound, or rename or remove it"
            )
        if missing := sorted(expected - set(prompt.media)):
            raise UsageError(
                f"prompt {prompt.text[:40]!r} has no column {columns[missing[0]]}, which {_name(model)} or other prompts "
                "need: give all prompts the same images, videos and sounds"
            )
        for argument, source in prompt.media.items():
            if (count := _count(source)) != (first := _count(prompts[0].media.get(argument, source))):
                raise UsageError(
                    f"prompt {prompt.text[:40]!r} has {count} files in the column {columns[argument]}, expected {first} as "
                    "the first prompt has: samples of both cannot be in one batch"
                )
    _check_frames(model, prompts, columns)


def _count(source: MediaSource) -> int:
    """Return the number of files of an argument."""
    return len(source) if isinstance(source, tuple) else 1


def _check_frames(model: Any, prompts: Sequence[Prompt], columns: Mapping[str, str]) -> None:
    """Raise UsageError if the videos of an argument have unlike numbers of frames: their samples cannot be in one batch.

    A pipeline without an argument for it makes as many frames as it is given, which the size has to say.
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
                    f"column {columns[argument]} of prompt {prompt.text[:40]!r} has {count} frames, of which {_name(model)} "
                    f"makes as many, and pipeline.frames is {expected}: set it to {count}"
                )
            first, other = counts.setdefault(argument, (count, prompt))
            if count != first:
                raise UsageError(
                    f"column {columns[argument]} of prompt {prompt.text[:40]!r} has {count} frames, and that of prompt "
                    f"{other.text[:40]!r} has {first}: give all prompts videos of one length"
                )


def _name(model: Any) -> str:
    """Return the class of a pipeline, or the name of a model without one."""
    return str(getattr(model, "pipeline", getattr(model, "name", type(model).__name__)))


def check_used(prompts: Sequence[Prompt], users: Mapping[str, Any]) -> None:
    """Check that files in the prompts' records are used by a reward or an evaluator, where the model takes none.

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
            f"reward or evaluator takes {name} or metadata; remove the column, or name a file of the prompts alone"
        )


def check_files(prompts: Iterable[Prompt]) -> None:
    """Raise UsageError if a prompt has a folder of frames, which cannot be sent to servers."""
    for prompt in prompts:
        for argument, source in prompt.media.items():
            if isinstance(source, Path) and source.is_dir():
                raise UsageError(
                    f"prompt {prompt.text[:40]!r} has {source}, a folder of frames, in {argument}, which no server is sent: "
                    "use one file, or make rollouts in the run itself"
                )
