"""Padding of prompts, cut off where a network masks it: a short prompt then costs no more than it must."""

from typing import Any

from fluvial.models.guidance import Guided
from fluvial.models.protocol import Cond

MULTIPLE = 32  # tokens; lengths are rounded up to it, so that shapes repeat


def trims_padding(model: Any) -> bool:
    """Return whether the model's network masks padding, so that cutting it off leaves the prediction unchanged.

    Such a model has three optional members: `text_tokens`, the number of tokens that `encode` pads a prompt to;
    `prompt_tokens(cond)`, the number of tokens of each prompt without padding, `[B]`; and `trimmed(cond, tokens)`, the
    conditioning with the first tokens of each prompt.
    """
    return all(hasattr(model, name) for name in ("text_tokens", "prompt_tokens", "trimmed"))


def pad_length(longest: int, *, limit: int) -> int:
    """Return the length that prompts are padded to: the longest one, rounded up to a multiple of 32, at most `limit`."""
    return min(-(-max(longest, 1) // MULTIPLE) * MULTIPLE, limit)


def trim(model: Any, cond: Cond, tokens: int | None) -> Cond:
    """Return conditioning, with or without guidance, cut to a number of tokens; None leaves it as it is.

    Args:
        model: model for which `trims_padding` holds, where a number is given.
        cond: conditioning as `encode` returns it, or `Guided`.
        tokens: number of tokens that no prompt exceeds.
    """
    if tokens is None:
        return cond
    if isinstance(cond, Guided):
        return cond._replace(cond=model.trimmed(cond.cond, tokens), uncond=model.trimmed(cond.uncond, tokens))
    return model.trimmed(cond, tokens)
