"""Values that a reward may return, and the error for anything else."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import fails
from torch import Tensor

from fluvial.engines.errors import RunError
from fluvial.engines.scoring.runner import score
from fluvial.engines.scoring.scores import read_scores

PROMPTS = ("a", "b", "c")


class Array:
    """A foreign array."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([0.5, 1.0, 2.0])


class Broken(Array):
    """A foreign array that cannot be read."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("the device\nis gone")


def as_scores(returned: Any, prompts: Sequence[str], *, label: str) -> Tensor:
    """Return the scores of a reward that returns this."""
    return score(lambda images, prompts: returned, torch.zeros(len(prompts), 1, 4, 4), prompts, label=label)


def objects(values: list[Any]) -> np.ndarray:
    """Return an array of objects, as numpy makes it of numbers and None."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


async def coroutine() -> Tensor:
    return torch.ones(3)


NUMBERS = [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (torch.tensor(NUMBERS), NUMBERS),
        (torch.tensor(NUMBERS, dtype=torch.bfloat16), NUMBERS),
        (torch.tensor(NUMBERS, dtype=torch.float64, requires_grad=True), NUMBERS),
        ([0.5, 1, 2.0], NUMBERS),
        ((0.5, 1.0, np.float32(2)), NUMBERS),
        ([torch.tensor(0.5), torch.tensor(1), 2], NUMBERS),
        (np.array(NUMBERS), NUMBERS),
        (Array(), NUMBERS),
        (torch.tensor([True, False, True]), [1.0, 0.0, 1.0]),
        ([True, np.bool_(False), True], [1.0, 0.0, 1.0]),
        (np.array([1, 0, 1]), [1.0, 0.0, 1.0]),
    ],
)
def test_what_counts_as_scores(returned: Any, expected: list[float]) -> None:
    """Tensors of any real dtype, arrays, and lists of numbers and bools; float32, on the host and without gradient."""
    scores = as_scores(returned, PROMPTS, label="reward")
    assert scores.tolist() == expected
    assert scores.dtype == torch.float32
    assert not scores.requires_grad


WRONG: list[tuple[Any, str]] = [
    (None, r"returned None, expected a tensor or a list of 3 numbers, one per image: it has no return statement"),
    ("good", r"returned a str \('good'\), expected a tensor or a list of 3 numbers"),
    ("x" * 500, r"returned a str \('x{40,60}\.\.\.\)"),
    (
        {"points": [1, 2, 3]},
        r"returned a dict with the keys 'points', expected .*: name the one that is learnt from 'score'",
    ),
    ({}, r"returned a dict with the keys "),
    (torch.ones(3, dtype=torch.complex64), r"returned a tensor of torch.complex64, expected"),
    (np.ones(3) * 1j, r"returned a ndarray, expected"),
    (np.array(["a", "b", "c"]), r"returned a ndarray, expected"),
    ([1j, 2j, 3j], r"returned a list that holds a complex, expected"),
    (["good", "bad", "bad"], r"returned a list that holds a str \('good'\)"),
    ([None, None, None], r"is None for prompt 'a', expected a finite number"),
    (["good", None, None], r"returned a list that holds a str \('good'\)"),
    ([[1.0], [2.0], [3.0]], r"returned a list that holds a list"),
    ([torch.ones(2)] * 3, r"returned a list that holds a tensor of torch.float32"),
    (([1.0, 2.0, 3.0], {"seconds": 3}), r"returned a tuple that holds a list .*: return the scores alone"),
    (True, r"returned a bool, expected"),
    (object(), r"returned an object, expected"),
    ((number for number in (1, 2, 3)), r"returned a generator, expected"),
    (3.0, r"returned shape \[\] for 3 images, expected \[3\]"),
    (torch.ones(2), r"returned shape \[2\] for 3 images, expected \[3\]"),
    (torch.ones(3, 1), r"returned shape \[3, 1\] for 3 images, expected \[3\]"),
    ([], r"returned shape \[0\] for 3 images, expected \[3\]"),
    (torch.tensor([1.0, torch.nan, 1.0]), r"is nan for prompt 'b', expected a finite number"),
    ([1.0, 2.0, 1e300], r"is 1e\+300 for prompt 'c', expected a number of at most 1e\+09 in size"),
    (Broken(), r"returned a Broken that cannot be read as numbers \(the device is gone\), expected 3 numbers"),
    (torch.empty(3, device="meta"), r"returned a tensor of torch.float32 that cannot be read"),
]


@pytest.mark.parametrize(("returned", "says"), WRONG, ids=[f"{i}-{type(row[0]).__name__}" for i, row in enumerate(WRONG)])
def test_what_does_not(returned: Any, says: str) -> None:
    """One line that names the reward, what it returned, what was expected and the prompts."""
    with pytest.raises(RunError, match=says) as error:
        as_scores(returned, PROMPTS, label="reward 'neat'")
    said = str(error.value)
    assert said.startswith("reward 'neat' ")
    assert "prompt" in said
    assert "\n" not in said


BAD = [None, "good", math.nan, [1.0], {}, 1j, 10**400, torch.ones(2), object()]
FORMS: list[Callable[[list[Any]], Any]] = [list, tuple, objects, lambda values: {"score": values, "part": values}]


@pytest.mark.parametrize("form", FORMS, ids=["list", "tuple", "array", "mapping"])
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: type(bad).__name__)
def test_one_bad_value_costs_one_sample(bad: Any, form: Callable[[list[Any]], Any]) -> None:
    """The others keep their scores, and a line names its prompt; so it is in each chunk, however many samples that has."""
    found = read_scores(form([0.5, bad, np.float32(2)]), PROMPTS, label="reward 'neat'")
    assert found.scores.nan_to_num(-7).tolist() == [0.5, -7.0, 2.0]
    assert all(part[::2].tolist() == [0.5, 2.0] for part in found.parts.values())
    assert not found.failed
    (problem,) = found.problems
    assert problem.startswith("reward 'neat' is ")
    assert "for prompt 'b', expected" in problem


def test_scores_are_copied() -> None:
    """A reward may fill the same buffer in each call."""
    buffer = torch.tensor([0.5, 1.0, 2.0])
    found = read_scores({"score": buffer, "part": buffer}, PROMPTS, label="reward")
    buffer.zero_()
    assert found.scores.tolist() == found.parts["part"].tolist() == [0.5, 1.0, 2.0]


def test_a_coroutine_is_closed() -> None:
    """It is named, and Python has nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fails(
            r"returned a coroutine, expected .*: define it with def, not async def",
            as_scores,
            coroutine(),
            PROMPTS,
            label="the reward",
        )


def test_a_call_that_raises_is_one_line() -> None:
    """The message of the error is folded."""

    def raising(images: Tensor, prompts: Any) -> Tensor:
        raise ValueError("two\nlines")

    fails(r"^the reward raised ValueError \(two lines\) for prompt 'a'$", score, raising, torch.zeros(3, 1, 4, 4), PROMPTS)
