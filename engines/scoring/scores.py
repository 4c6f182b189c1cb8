"""Validation of scores: one float32 number per image, and one line per invalid score."""

import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.engines.errors import RunError

SHOWN = 60  # characters of a value in a message
SCORE = "score"  # key of the score in a mapping that is trained on
LARGEST = 1e9  # largest magnitude of a score; beyond it, rounding would hide differences within a group


class Scored(NamedTuple):
    """The scores of N samples by one reward."""

    scores: Tensor  # [N] float32 on the CPU; NaN for a sample that has no valid score
    parts: dict[str, Tensor] = {}  # noqa: RUF012  # [N] each, additional scores, which are only logged
    problems: tuple[str, ...] = ()  # one line per reason of an invalid score
    failed: bool = False  # the reward raised, or did not return scores
    abandoned: bool = False  # pending scores were not awaited


def make_invalid(count: int, problem: str) -> Scored:
    """Return the result of a call without any valid score."""
    return Scored(torch.full((count,), math.nan), {}, (problem,), failed=True)


def concatenate(parts: Sequence[Scored]) -> Scored:
    """Concatenate results; missing parts are NaN."""
    names = dict.fromkeys(name for part in parts for name in part.parts)
    columns = {
        name: torch.cat([part.parts.get(name, torch.full((len(part.scores),), math.nan)) for part in parts])
        for name in names
    }
    scores = torch.cat([part.scores for part in parts]) if parts else torch.empty(0)
    problems = tuple(problem for part in parts for problem in part.problems)
    return Scored(scores, columns, problems, any(part.failed for part in parts), any(part.abandoned for part in parts))


def read_scores(returned: Any, prompts: Sequence[str], *, label: str) -> Scored:
    """Read the scores that a reward returned: numbers, or a mapping with the key `score`; gradients are dropped.

    A score that is not a number, not finite, or above `LARGEST` in size, is invalid: it becomes NaN, with a line in
    `problems`.

    Args:
        prompts: prompts of the scored samples.
        label: start of a message, e.g. "reward 'bright'".

    Raises:
        RunError: the value is not one real number per sample; the message describes it, and names the prompts.
    """
    parts: dict[str, Tensor] = {}
    if isinstance(returned, Mapping) and SCORE in returned:
        parts = {
            str(name): _read_numbers(values, prompts, label=f"{label}, {name},")
            for name, values in returned.items()
            if name != SCORE
        }
        returned = returned[SCORE]
    scores = _read_numbers(returned, prompts, label=label)
    invalid = ~(scores.abs() <= LARGEST)  # NaN too
    elements = _list_elements(returned) or scores.tolist()
    problems = [_describe_problem(elements[i], prompts[i], label) for i in torch.nonzero(invalid).flatten().tolist()]
    return Scored(scores.masked_fill(invalid, math.nan), parts, tuple(problems))


def _describe_problem(element: Any, prompt: str, label: str) -> str:
    """Describe why a score is invalid."""
    score = read_number(element)
    if score is None:
        return f"{label} is {describe(element)} for {format_prompts([prompt])}, expected a finite number"
    if math.isfinite(score):
        return f"{label} is {score:g} for {format_prompts([prompt])}, expected a number of at most {LARGEST:g} in size"
    return f"{label} is {score:g} for {format_prompts([prompt])}, expected a finite number"


def _read_numbers(returned: Any, prompts: Sequence[str], *, label: str) -> Tensor:
    """Return one real number per sample, finite or not; raise RunError for anything else."""
    count = len(prompts)
    try:
        scores = _read_tensor(returned)
    except Exception as error:
        raise RunError(
            f"{label} returned {describe(returned)} that cannot be read as numbers ({one_line(error)}), expected {count} "
            f"numbers ({format_prompts(prompts)})"
        ) from error
    if scores is None:
        raise RunError(
            f"{label} returned {describe(returned)}, expected a tensor or a list of {count} numbers, one per image"
            f"{_advise(returned)} ({format_prompts(prompts)})"
        )
    if scores.shape != (count,):
        raise RunError(
            f"{label} returned shape {list(scores.shape)} for {count} image{'s' if count > 1 else ''}, expected [{count}] "
            f"({format_prompts(prompts)})"
        )
    return scores


def describe(value: Any) -> str:
    """Describe a value for a message, e.g. "a dict with the keys 'score'"."""
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
        inner = next((element for element in value if read_number(element) is None), None)
        return f"{article} {kind} that holds {describe(inner)}"
    return f"{article} {kind}"


def format_prompts(prompts: Sequence[str]) -> str:
    """Format up to three prompts for a message."""
    unique = list(dict.fromkeys(prompts))
    shown = ", ".join(repr(prompt) for prompt in unique[:3])
    return f"prompt{'s' if len(unique) > 1 else ''} {shown}{', ...' if len(unique) > 3 else ''}"


def one_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split())


def _read_tensor(returned: Any) -> Tensor | None:
    """Convert numbers to a float32 tensor; None if the value is not an array or a list of real numbers."""
    if isinstance(returned, Tensor):
        if returned.dtype.is_complex:
            return None
        return returned.detach().to(device="cpu", dtype=torch.float32, copy=True)  # the reward may reuse its buffer
    if isinstance(returned, Real) and not isinstance(returned, bool):
        return torch.tensor(float(returned))
    if (elements := _list_elements(returned)) is not None:
        numbers = read_numbers(elements)
        return None if numbers is None else torch.tensor(numbers, dtype=torch.float32)
    if hasattr(returned, "__array__"):
        import numpy as np

        array = np.asarray(returned)
        return torch.from_numpy(array.astype(np.float32)) if array.dtype.kind in "biuf" else None
    return None


def _list_elements(returned: Any) -> Sequence[Any] | None:
    """Return the elements of a list or an object array (numpy's type for numbers and None), else None."""
    if isinstance(returned, list | tuple):
        return returned
    kind = getattr(returned, "dtype", None)
    return list(returned) if getattr(kind, "kind", "") == "O" and getattr(returned, "ndim", 0) == 1 else None


def read_numbers(elements: Sequence[Any]) -> list[float] | None:
    """Convert elements to numbers, NaN for anything else; None if there are elements but no numbers."""
    numbers = [read_number(element) for element in elements]
    if any(element is not None for element in elements) and all(number is None for number in numbers):
        return None
    return [math.nan if number is None else number for number in numbers]


def read_number(element: Any) -> float | None:
    """Convert a real number (Python, numpy, 0-d tensor) to a float; None for anything else."""
    if isinstance(element, Tensor):
        return float(element.detach()) if element.ndim == 0 and not element.dtype.is_complex else None
    if not isinstance(element, Real) and type(element).__name__ != "bool":  # numpy's bool is not a Real
        return None
    try:
        return float(element)
    except OverflowError:  # an int beyond the range of floats
        return math.inf


def _advise(returned: Any) -> str:
    """Return advice on a common mistake, and close a coroutine, which would warn later."""
    if inspect.iscoroutine(returned):
        returned.close()
        return ": define it with def, not async def"
    if isinstance(returned, Mapping):
        return f": name the one that is learnt from {SCORE!r}"
    if isinstance(returned, list | tuple) and len(returned) == 2:
        return ": return the scores alone"
    return ": it has no return statement" if returned is None else ""


def parse_weight(text: str) -> float | None:
    """Return the number of a weight, or None if the text is not a finite number other than 0."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value != 0 else None
