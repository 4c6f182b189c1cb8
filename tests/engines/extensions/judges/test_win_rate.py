"""Win rates within a group, and UnifiedReward 2's scores, from the replies of a chat server."""

import base64
import io
import json
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_servers import chat_reply, client
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.judges.vlm import KINDS, UnifiedReward2, WinRate, parse_verdict
from fluvial.engines.extensions.wire.client import Reply
from fluvial.engines.scoring.signature import signature_of

PROMPTS = ["a cat"] * 4


def images(*reds: int) -> Tensor:
    made = torch.zeros(len(reds), 3, 4, 6)
    made[:, 0] = torch.tensor(reds).view(-1, 1, 1) / 255
    return made


def shown(request: Any) -> list[int]:
    content = json.loads(request.body)["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    files = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    return [int(np.asarray(file.convert("RGB"))[0, 0, 0]) for file in files]


def prefers_red(kind: str, first: int = 0) -> Any:
    """Return a VLM judge that finds the redder image better, equal ones alike; `first` images come before the two."""

    def answer(request: Any) -> Any:
        values = shown(request)[first:]
        left, right = values[0], values[len(values) // 2]
        said = "they are alike" if left == right else f"{kind} {1 if left > right else 2} is better"
        return chat_reply(f"<think>Image 2 is better at first sight</think>\n<answer>{said}</answer>")

    return answer


def test_each_sample_has_the_share_of_its_comparisons_that_it_wins() -> None:
    """A group of four takes six requests; a tie is half a win; the mean of all rates is 1/2."""
    server = client(prefers_red("Image"))
    found = WinRate(server, model="m")(images(10, 200, 10, 90), PROMPTS, 0)
    assert found.tolist() == pytest.approx([0.5 / 3, 1, 0.5 / 3, 2 / 3])
    assert float(found.mean()) == pytest.approx(0.5)
    pairs = [tuple(shown(request)) for request in server.transport.requests]  # type: ignore[attr-defined]
    assert sorted(pairs) == sorted(combinations([10, 200, 10, 90], 2))
    text = json.loads(server.transport.requests[0].body)["messages"][0]["content"][-1]["text"]  # type: ignore[attr-defined]
    assert "「a cat」" in text
    assert "{prompt}" not in text
    assert signature_of(WinRate(server, model="m")).takes("group")


@given(said=st.lists(st.sampled_from(["Image 1 is better", "Image 2 is better", "alike", None]), min_size=3, max_size=3))
def test_win_rates_are_those_of_pref_grpo(said: list[str | None]) -> None:
    """Its counts: a win is 1, a reply that names neither, or lacks an answer, is half for both, divided by comparisons.

    Source: `fastvideo/rewards/unifiedreward_think.py`, `_pairwise_win_rate`.
    """
    wins, pairs = [0.0] * 3, list(combinations(range(3), 2))
    for (i, j), words in zip(pairs, said, strict=True):
        value = 0.5 if words in (None, "alike") else float(words == "Image 1 is better")
        wins[i] += value
        wins[j] += 1 - value
    replies = [chat_reply("nothing" if words is None else f"<think/><answer>{words}</answer>") for words in said]
    found = WinRate(client(*replies, in_flight=1), model="m")(images(1, 2, 3), PROMPTS[:3], 0)
    assert found.tolist() == pytest.approx([each / 2 for each in wins])


def test_videos_and_edits_have_their_own_questions() -> None:
    """The frames of the first come before those of the second; the image before the edit comes first."""
    videos = images(10, 200).unsqueeze(2).repeat(1, 1, 3, 1, 1)
    server = client(prefers_red("Video"))
    assert WinRate(server, model="m")(videos, PROMPTS[:2], 0).tolist() == [0, 1]
    assert shown(server.transport.requests[0]) == [10, 10, 10, 200, 200, 200]  # type: ignore[attr-defined]
    server = client(prefers_red("Edited image", first=1))
    assert WinRate(server, model="m")(images(10, 200), PROMPTS[:2], 0, [images(77)[0]] * 2).tolist() == [0, 1]
    assert shown(server.transport.requests[0]) == [77, 10, 200]  # type: ignore[attr-defined]


def test_verdicts() -> None:
    for text, kind, value in (
        ("<answer>Image 1 is better</answer>", "Image", 1),
        ("<answer>\nimage 2 is better.\n</answer>", "Image", 0),
        ("Image 1 is better", "Image", 0.5),
        ("<think>Image 1 is better</think><answer>Both</answer>", "Image", 0.5),
        ("Edited Image 2 is better, because", "Edited image", 0),
        ("Edited image 1 is better <answer>so</answer>", "Edited image", 1),
        ("", "Image", 0.5),
    ):
        assert parse_verdict(text, kind) == value, text


def test_a_failed_comparison_does_not_count() -> None:
    """For either of its samples; a sample without any has no score, and a group of one sample cannot be compared."""
    wrong, right = Reply(400, {}, b"content policy"), chat_reply("<answer>Image 1 is better</answer>")
    with pytest.warns(RuntimeWarning, match="1 of 3 samples have no score"):
        found = WinRate(client(wrong, right, right, in_flight=1), model="m")(images(1, 2, 3), PROMPTS[:3], 0)
    assert found.tolist() == [1, 1, 0]
    with pytest.warns(RuntimeWarning, match="2 of 3 samples"):
        found = WinRate(client(wrong, wrong, right, in_flight=1), model="m")(images(1, 2, 3), PROMPTS[:3], 0)
    assert torch.isnan(found).tolist() == [True, False, False]
    with pytest.raises(RunError, match="content policy"):
        WinRate(client(wrong), model="m")(images(1, 2), PROMPTS[:2], 0)
    with pytest.raises(RunError, match=r"a group has one: set sampling\.group to 2 or more"):
        WinRate(client(right), model="m")(images(1), PROMPTS[:1], 0)


def test_unified_reward_2_has_three_scores() -> None:
    """By Pref-GRPO's pattern, divided by 5; what a reply lacks is NaN, and so is a mean without it."""
    full = "Alignment Score (1-5): 4.5\nCoherence Score (1-5): 3\nStyle Score (1-5): 5"
    replies = chat_reply(full), chat_reply("Alignment Score (1-5): 2")
    found = UnifiedReward2(client(*replies, in_flight=1), model="m")(images(1, 2), PROMPTS[:2])
    assert found["alignment"].tolist() == pytest.approx([0.9, 0.4])
    assert found["style"].nan_to_num(-1).tolist() == [1, -1]
    assert found["score"].nan_to_num(-1).tolist() == pytest.approx([(4.5 + 3 + 5) / 15, -1])
    only = UnifiedReward2(client(*replies, in_flight=1), model="m", score="alignment")(images(1, 2), PROMPTS[:2])
    assert only["score"].tolist() == pytest.approx([0.9, 0.4])
    with pytest.raises(UsageError, match="score is 'beauty', expected one of mean, alignment, coherence, style"):
        UnifiedReward2(client({}), score="beauty")  # type: ignore[arg-type]
    assert set(KINDS) == {"pairwise", "pairwise_video", "pairwise_edit"}
