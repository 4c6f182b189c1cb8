"""Padding of prompts, trimmed if the network masks it, so that short prompts cost less."""

from typing import Any

from fluvial.models.guidance import Guided
from fluvial.models.protocol import Cond

MULTIPLE = 32  # tokens; lengths are rounded up to it, so that shapes repeat


def trims_padding(model: Any) -> bool:
    """Return whether the model's network masks padding, so that trimming it leaves the prediction unchanged.

    Such a model has three optional members: `text_tokens`, the number of tokens that `encode` pads a prompt to;
    `count_prompt_tokens(cond)`, which returns the number of tokens of each prompt without padding, `[B]`; and
    `trim_cond(cond, tokens)`, which returns the conditioning with the first tokens of each prompt.
    """
    return all(hasattr(model, name) for name in ("text_tokens", "count_prompt_tokens", "trim_cond"))


def pad_length(longest: int, *, limit: int) -> int:
    """Return the length to pad prompts to: the longest one, rounded up to a multiple of 32, at most `limit`."""
    return min(-(-max(longest, 1) // MULTIPLE) * MULTIPLE, limit)


def trim(model: Any, cond: Cond, tokens: int | None) -> Cond:
    """Trim conditioning, with or without guidance, to a number of tokens; None leaves it unchanged.

    Args:
        model: model for which `trims_padding` holds, if a number is given.
        cond: conditioning as `encode` returns it, or `Guided`.
        tokens: number of tokens that no prompt exceeds.
    """
    if tokens is None:
        return cond
    if isinstance(cond, Guided):
        return cond._replace(cond=model.trim_cond(cond.cond, tokens), uncond=model.trim_cond(cond.uncond, tokens))
    return model.trim_cond(cond, tokens)
