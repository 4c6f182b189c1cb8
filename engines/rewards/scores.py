"""What a reward returned, as one finite float32 number per image, or one line that says why it is not."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fluvial.engines.data.records import metadata_of
from fluvial.engines.errors import RunError

SHOWN = 60  # characters of a value in a message


def as_scores(returned: Any, prompts: Sequence[str], *, label: str) -> Tensor:
    """Return what a reward returned as float32 `[B]` on the CPU, without gradient.

    Args:
        returned: anything.
        prompts: prompts of the images that it was called with.
        label: start of the message, e.g. "reward 'bright'".

    Raises:
        RunError: it is not one finite real number per image; the message says what it is, and names the prompts.
    """
    count = len(prompts)
    try:
        scores = _tensor(returned)
    except Exception as error:
        raise RunError(
            f"{label} returned {described(returned)} that cannot be read as numbers ({one_line(error)}), expected {count} "
            f"numbers ({named(prompts)})"
        ) from error
    if scores is None:
        raise RunError(
            f"{label} returned {described(returned)}, expected a tensor or a list of {count} numbers, one per image"
            f"{_advice(returned)} ({named(prompts)})"
        )
    if scores.shape != (count,):
        raise RunError(
            f"{label} returned shape {list(scores.shape)} for {count} image{'s' if count > 1 else ''}, expected [{count}] "
            f"({named(prompts)})"
        )
    for i in torch.nonzero(~torch.isfinite(scores)).flatten().tolist():
        raise RunError(f"{label} is {scores[i]:g} for {named([prompts[i]])}, expected a finite number")
    return scores


def described(value: Any) -> str:
    """Return a value as it is named in a message, e.g. "a dict with the keys 'score'"."""
    if value is None:
        return "None"
    if inspect.iscoroutine(value):
        return "a coroutine"
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, list(value)[:3]))}"
    kind = type(value).__name__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    if isinstance(value, str | bytes):
        text = repr(value)
        return f"{article} {kind} ({text if len(text) <= SHOWN else text[: SHOWN - 3] + '...'})"
    if isinstance(value, list | tuple):
        inner = next((element for element in value if not _is_number(element)), None)
        return f"{article} {kind} that holds {described(inner)}"
    return f"{article} {kind}"


def named(prompts: Sequence[str]) -> str:
    """Return up to three prompts as they are named in a message."""
    unique = list(dict.fromkeys(prompts))
    shown = ", ".join(repr(prompt) for prompt in unique[:3])
    return f"prompt{'s' if len(unique) > 1 else ''} {shown}{', ...' if len(unique) > 3 else ''}"


def one_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split())


def reward_problem(found: Any) -> str | None:
    """Return why an object cannot be called as a reward, or None; a check for `plugins.load`."""
    from fluvial.engines.plugins import callable_with

    check: Callable[[Any], str | None] = callable_with("images", "prompts")
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004
        return "is an async function, expected a function of (images, prompts): define it with def"
    if not isinstance(found, type) and _takes_metadata(found):
        return None if callable(found) and _binds(found) else check(found)
    return check(found)


def with_metadata(reward: Callable[..., Any]) -> Callable[[Tensor, Sequence[str]], Any]:
    """Return a reward as a function of images and prompts; one with an argument `metadata` gets the prompts' records."""
    if not _takes_metadata(reward):
        return reward
    return lambda images, prompts: reward(images, prompts, metadata=metadata_of(prompts))


def _takes_metadata(reward: Any) -> bool:
    """Return whether a function has an argument named `metadata`."""
    try:
        found = inspect.signature(reward).parameters.get("metadata")
    except (TypeError, ValueError):  # not a function, or one written in C
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def _binds(reward: Callable[..., Any]) -> bool:
    """Return whether a function can be called with images, prompts and metadata."""
    try:
        inspect.signature(reward).bind("images", "prompts", metadata=[])
    except TypeError:
        return False
    return True


def _tensor(returned: Any) -> Tensor | None:
    """Return numbers as a float32 tensor, or None for what is no array and no list of real numbers."""
    if isinstance(returned, Tensor):
        if returned.dtype.is_complex:
            return None
        return returned.detach().to(device="cpu", dtype=torch.float32)
    if isinstance(returned, Real) and not isinstance(returned, bool):
        return torch.tensor(float(returned))
    if isinstance(returned, list | tuple):
        if not all(map(_is_number, returned)):
            return None
        return torch.tensor([float(element) for element in returned], dtype=torch.float32)
    if hasattr(returned, "__array__"):
        import numpy as np

        array = np.asarray(returned)
        return torch.from_numpy(array.astype(np.float32)) if array.dtype.kind in "biuf" else None
    return None


def _is_number(element: Any) -> bool:
    """Return whether an element of a list is a real number: of Python, numpy, or a tensor without dimensions."""
    if isinstance(element, Tensor):
        return element.ndim == 0 and not element.dtype.is_complex
    return isinstance(element, Real) or type(element).__name__ == "bool"  # numpy's bool is no Real


def _advice(returned: Any) -> str:
    """Return what to do about a common mistake, and let go of what would warn later."""
    if inspect.iscoroutine(returned):
        returned.close()
        return ": define it with def, not async def"
    if isinstance(returned, Mapping):
        return ": return the values alone"
    if isinstance(returned, list | tuple) and len(returned) == 2:
        return ": return the scores alone"
    return ": it has no return statement" if returned is None else ""


def weight_of(text: str) -> float | None:
    """Return the number of a weight, or None if the text is not a finite number other than 0."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value != 0 else None
