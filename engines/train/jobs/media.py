"""Columns of the prompts' records that a pipeline is called with, and refusals of columns that nothing would use."""

from collections.abc import Mapping, Sequence
from typing import Any

from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import UsageError
from fluvial.engines.rewards.signature import signature_of

SIZE = ("height", "width")  # columns of a size, which are for runs of several sizes


def check_columns(model: Any, prompts: Sequence[Prompt]) -> None:
    """Check that each column that the pipeline could be called with is used.

    Raises:
        UsageError: a prompt has a column with the name of an argument of the pipeline that the run does not pass; the
            message names the prompt and the column.
    """
    takes = getattr(model, "takes", ())
    for prompt in prompts:
        image = () if prompt.image is None else ("image",)
        unused = [name for name in dict.fromkeys((*image, *prompt.metadata)) if name in takes and name not in SIZE]
        if unused:
            raise UsageError(
                f"prompt {prompt.text[:40]!r} has a column {unused[0]}, which {model.pipeline} takes and which would be "
                f"ignored: rename or remove the column"
            )


def check_images(prompts: Sequence[Prompt], users: Mapping[str, Any]) -> None:
    """Check that images in the prompts' records are used by a reward or an evaluator, where the model takes none.

    Raises:
        UsageError: a prompt has an image, and none of `users` takes `condition_images` or `metadata`.
    """
    given = next((prompt for prompt in prompts if prompt.image is not None), None)
    if given is None:
        return
    signatures = [signature_of(user) for user in users.values()]
    if not any(signature.takes(name) for signature in signatures for name in ("condition_images", "metadata")):
        raise UsageError(
            f"prompt {given.text[:40]!r} has a column image, which nothing uses: the model takes no images, and no reward "
            "or evaluator takes condition_images or metadata; remove the column"
        )
