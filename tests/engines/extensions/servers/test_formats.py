"""Requests become samples, or one line with a status; sizes are known before an image is decoded."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_servers import bomb
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fluvial.engines.data.records import texts
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.engines.extensions.servers.formats import (
    ComputeBody,
    SampleToScore,
    ScoreBody,
    ScoreRequest,
    ScoringLimits,
    read_flow_factory,
    read_unirl,
    stack_samples,
)
from fluvial.engines.extensions.wire.decode import WireError, decode

LIMITS = ScoringLimits(most_pixels=100)


def file(value: int = 0, size: tuple[int, int] = (4, 2), kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


def computed(body: Any, limits: ScoringLimits = LIMITS) -> list[SampleToScore]:
    return read_flow_factory(decode(json.dumps(body).encode(), ComputeBody), limits)


def scored(body: Any) -> list[ScoreRequest]:
    return read_unirl(decode(json.dumps(body).encode(), ScoreBody), LIMITS)


def test_requests_of_flow_factory() -> None:
    found = computed({"prompt": ["a", "b"], "image": [file(1), file(2, kind="JPEG")], "video": None})
    assert [sample.prompt.text for sample in found] == ["a", "b"]
    images, prompts = stack_samples(found)
    assert images.shape == (2, 3, 2, 4)
    assert torch.allclose(images[:, 0, 0, 0] * 255, torch.tensor([1.0, 2.0]))
    assert texts(prompts) == ["a", "b"]
    (sample,) = computed({"prompt": ["a"], "video": [[file(1), file(2), file(3)]], "condition_images": [[file(9)]]})
    assert sample.image.shape == (3, 3, 2, 4)
    assert sample.image[0, :, 0, 0].tolist() == [1, 2, 3]
    assert isinstance(sample.prompt.image, bytes)
    assert np.asarray(Image.open(io.BytesIO(sample.prompt.image)))[0, 0, 0] == 9


def test_requests_of_unirl() -> None:
    turns = [{"text": "no"}, {"text": "a", "image_b64": file(5)}]
    body = {"requests": [{"history": turns, "required_rewards": ["x", "y", "x"], "metadata": {"tag": "t"}}]}
    (request,) = scored(body)
    assert request.rewards == ("x", "y")
    assert (request.sample.prompt.text, request.sample.prompt.metadata) == ("a", {"tag": "t"})
    assert int(request.sample.image[0, 0, 0]) == 5
    assert scored({"requests": []}) == []


IMAGE = file()


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "missing required field `prompt`"),
        ({"prompt": [], "image": []}, 400, "prompt: Expected `array` of length >= 1"),
        ({"prompt": ["a"]}, 400, "expected one of them"),
        ({"prompt": ["a"], "image": [IMAGE], "video": [[IMAGE]]}, 400, "expected one of them"),
        ({"prompt": ["a", "b"], "image": [IMAGE]}, 400, "2 prompts and 1 of image"),
        ({"prompt": ["a"], "image": ["?"]}, 400, "is not base64"),
        ({"prompt": ["a"], "image": ["é"]}, 400, "is not base64"),
        ({"prompt": ["a"], "image": ["aGVsbG8="]}, 400, "is not an image file, expected one of PNG"),
        ({"prompt": ["a"], "image": [file(kind="GIF")]}, 400, "is not an image file"),
        ({"prompt": ["a"], "image": [base64.b64encode(base64.b64decode(IMAGE)[:-20]).decode()]}, 400, "damaged image"),
        ({"prompt": ["a"], "image": [file(size=(11, 10))]}, 413, "more than 0.0001 megapixels"),
        ({"prompt": ["a"] * 13, "image": [IMAGE] * 13}, 413, "more than 0.0001 megapixels: send fewer at once"),
        ({"prompt": ["a"], "video": [[IMAGE, file(size=(2, 4))]]}, 400, "frames of several sizes"),
        ({"prompt": ["a"], "video": [[]]}, 400, "has no frames"),
        ({"prompt": ["a"], "image": [IMAGE], "condition_images": [[IMAGE, IMAGE]]}, 400, "length <= 1"),
        ({"prompt": ["a"], "image": [IMAGE], "condition_videos": [[]]}, 400, "condition_videos is set"),
    ],
)
def test_wrong_requests_to_compute(body: Any, status: int, says: str) -> None:
    with pytest.raises((RequestError, WireError), match=says) as error:
        computed(body)
    assert getattr(error.value, "status", 400) == status


def test_wrong_requests_to_score() -> None:
    """And an image that is a bomb is refused by its header."""
    history = {"history": [{"text": "a", "image_b64": IMAGE}]}
    wrong: dict[str, dict[str, Any]] = {
        "history: Expected `array` of length >= 1": {"history": []},
        "has a video": {"history": [{"text": "a", "video_path": "/etc/passwd"}]},
        "image_b64 is missing": {"history": [{"text": "a"}]},
        "text is missing": {"history": [{"image_b64": IMAGE}]},
        r"metadata: Expected `object [|] null`": {**history, "metadata": []},
    }
    for says, request in wrong.items():
        with pytest.raises((RequestError, WireError), match=says) as error:
            scored({"requests": [{"required_rewards": ["x"], **request}]})
        assert getattr(error.value, "status", 400) == 400
    with pytest.raises(WireError, match="missing required field `required_rewards`"):
        scored({"requests": [history]})
    with pytest.raises(RequestError) as bombed:
        computed({"prompt": ["a"], "image": [base64.b64encode(bomb(60_000)).decode()]}, ScoringLimits())
    assert bombed.value.status in (400, 413)


NAMES = "prompt", "image", "video", "requests", "history", "text", "image_b64", "required_rewards"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([IMAGE, "a", "", "text"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=10,
)


@given(VALUES)
def test_any_json_is_samples_or_a_request_error(value: Any) -> None:
    for parse in (computed, scored):
        try:
            found: Any = parse(value)
        except (RequestError, WireError) as error:
            problem = error
        else:
            assert all(isinstance(getattr(each, "sample", each), SampleToScore) for each in found)
            continue
        assert getattr(problem, "status", 400) in (400, 413)
        assert "\n" not in str(problem)
