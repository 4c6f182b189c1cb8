"""Columns of the prompts' records that a pipeline is called with, and refusals of columns that nothing would use."""

from collections.abc import Mapping, Sequence
from typing import Any

from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import UsageError
from fluvial.engines.rewards.signature import signature_of
from fluvial.models import is_recorded
from fluvial.models.replay.media import IMAGES

SIZE = ("height", "width")  # columns of a size, which are for runs of several sizes


def media_columns(model: Any, asked: Sequence[str]) -> dict[str, str]:
    """Return the column of each argument of the pipeline's call that is an image.

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
            known = ", ".join(name for name in IMAGES if name in takes) or "no images"
            raise UsageError("pipeline.media", word, f"an argument of {_name(model)}, which takes {known}")
        if argument in named:
            raise UsageError("pipeline.media", word, "one column per argument", f"{argument} is {named[argument]} already")
        named[argument] = column
    return {**{name: name for name in IMAGES if name in takes and name not in named}, **named}


def check_columns(model: Any, prompts: Sequence[Prompt], columns: Mapping[str, str]) -> None:
    """Check that each column that the pipeline could be called with is used, and that all prompts have the same images.

    Args:
        model: the model.
        prompts: prompts of the run.
        columns: column of each argument that is an image.

    Raises:
        UsageError: a prompt has a column with the name of an argument of the pipeline that the run does not pass, or lacks
            an image that another has or that the model needs; the message names the prompt and the column.
    """
    takes = getattr(model, "takes", ())
    expected = {name for prompt in prompts for name in prompt.media} | {*(() if is_recorded(model) else takes)}
    for prompt in prompts:
        image = () if prompt.image is None else ("image",)
        present = dict.fromkeys((*image, *prompt.metadata))
        used = (*SIZE, *(name for argument in prompt.media for name in (argument, columns[argument])))
        if unused := [name for name in present if name in takes and name not in used]:
            raise UsageError(
                f"prompt {prompt.text[:40]!r} has a column {unused[0]}, which {_name(model)} takes and which would be "
                "ignored: map it with `pipeline.media` if it is an image, or rename or remove it"
            )
        if missing := sorted(expected - set(prompt.media)):
            raise UsageError(
                f"prompt {prompt.text[:40]!r} has no column {columns[missing[0]]}, which {_name(model)} or other prompts "
                "need: give all prompts the same images"
            )


def _name(model: Any) -> str:
    """Return the class of a pipeline, or the name of a model without one."""
    return str(getattr(model, "pipeline", getattr(model, "name", type(model).__name__)))


def check_images(prompts: Sequence[Prompt], users: Mapping[str, Any]) -> None:
    """Check that images in the prompts' records are used by a reward or an evaluator, where the model takes none.

    Raises:
        UsageError: a prompt has an image, and none of `users` takes `condition_images` or `metadata`.
    """
    given = next((prompt for prompt in prompts if prompt.image is not None), None)
    if given is None:
        return
    signatures = [signature_of(user) for user in users.values()]
    if not any(signature.accepts(name) for signature in signatures for name in ("condition_images", "metadata")):
        raise UsageError(
            f"prompt {given.text[:40]!r} has a column image, which nothing uses: the model takes no images, and no reward "
            "or evaluator takes condition_images or metadata; remove the column"
        )
