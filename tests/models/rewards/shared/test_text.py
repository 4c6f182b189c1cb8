"""The score of all OCR rewards: its formula on given readings."""

import pytest
import torch
from helpers.refusals import refuses
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fluvial.models.rewards.shared.text import extract_quoted, levenshtein, score_text, score_texts

WORDS = st.text(alphabet="abcd", max_size=6)


def distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))


@given(a=st.text(alphabet="abc", max_size=4), b=st.text(alphabet="abc", max_size=4))
def test_the_distance_is_its_recursion(a: str, b: str) -> None:
    assert levenshtein(a, b) == distance(a, b)


@given(recognised=WORDS, target=WORDS.filter(bool))
def test_the_score_is_the_formula(recognised: str, target: str) -> None:
    whole = target in recognised
    wanted = 1.0 if whole else 1 - min(distance(recognised, target), len(target)) / len(target)
    assert score_text(recognised, target) == wanted
    assert 0 <= wanted <= 1


@pytest.mark.parametrize(
    ("found", "target", "score"),
    [
        ("OPEN", "open", 1.0),
        ("we are o p e n today", "Open", 1.0),
        ("OPFN", "OPEN", 0.75),
        ("", "OPEN", 0.0),
        ("a wholly other text", "OPEN", 0.0),
        ("new\nyork", "New York", 1.0),
    ],
)
def test_blanks_and_case_do_not_count(found: str, target: str, score: float) -> None:
    assert score_text(found, target) == score


def test_the_target_is_between_the_first_double_quotes() -> None:
    assert extract_quoted('a shop with the sign "OPEN" and "CLOSED"') == "OPEN"
    assert extract_quoted("a cake that says “Happy Day”") == "Happy Day"
    assert extract_quoted("says „Guten Tag“ and «salut»") == "Guten Tag"
    for prompt in ("a shop", 'a sign "" in red', 'a sign "', "it's 'single'", "“open", "“”"):
        refuses("has no text in double quotes", extract_quoted, prompt)
    refuses("is empty", score_text, "x", "  ")


@given(prompt=st.text(alphabet='ab "“”', max_size=9).filter(lambda text: text.count('"') > 0))
def test_the_target_is_that_of_flow_grpo(prompt: str) -> None:
    """`prompt.split('"')[1]` in its `ocr.py`, where that is a text to draw; typographic quotes are a part of it."""
    target = prompt.split('"')[1]
    if target.strip():
        assert extract_quoted(prompt) == target
    else:  # flow_grpo divides by 0
        refuses("has no text in double quotes", extract_quoted, prompt)


def test_readings_of_frames_are_averaged() -> None:
    """The recogniser gets whole numbers, channels last; frames of a video stay with their prompt."""
    seen: list[Tensor] = []

    def read(images: Tensor) -> list[str]:
        seen.append(images)
        return ["open" if image.float().mean() > 127 else "shut" for image in images]

    dark, light = torch.zeros(3, 4, 5), torch.ones(3, 4, 5)
    prompts = ['"open"', '"shut"']
    scores = score_texts(read, extract_quoted, torch.stack([light, light]), prompts, 4)
    assert scores.tolist() == [1.0, 0.0]
    assert (seen[0].dtype, seen[0].shape, int(seen[0].max())) == (torch.uint8, (2, 4, 5, 3), 255)
    videos = torch.stack([torch.stack([light, dark], 1), torch.stack([dark, dark], 1)])
    assert score_texts(read, extract_quoted, videos, prompts, 4).tolist() == [0.5, 1.0]
    refuses("2 images and 1 prompts", score_texts, read, extract_quoted, torch.stack([light, light]), prompts[:1], 4)
