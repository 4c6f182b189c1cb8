"""Requests of each client and how it reads the reply, by the formats of the servers that exist."""

import base64
import io
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import fake_servers
from helpers import tiny_jobs as tiny
from helpers.fake_servers import chat_reply, client, loopback
from PIL import Image
from torch import Tensor

from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.judges.batches import pick_frames
from fluvial.engines.extensions.judges.formats import FlowFactory, FlowGrpo, UniRL
from fluvial.engines.extensions.judges.table import CLIENTS, build_maker
from fluvial.engines.extensions.judges.vlm import Questions, Rating, UnifiedReward, YesNo, spell
from fluvial.engines.extensions.wire.client import HttpClient, Reply
from fluvial.engines.scoring.options import from_factory

PROMPTS = ("a cat", "a dog", "a cow")
NAN = float("nan")


def images(count: int = 3, *event: int) -> Tensor:
    made = torch.zeros(count, *(event or (3, 4, 6)))
    made[:, 0] = torch.arange(count).view(-1, *[1] * (made.ndim - 2)) / 255
    return made


def sent(server: HttpClient, number: int = 0) -> Any:
    return server.transport.sent(number)  # type: ignore[attr-defined]


def red(file: bytes) -> int:
    image = Image.open(io.BytesIO(file))
    assert image.size == (6, 4)
    return int(np.asarray(image.convert("RGB"))[0, 0, 0])


def same(scores: Any, expected: list[float]) -> bool:
    return torch.equal(scores.nan_to_num(-7), torch.tensor(expected, dtype=torch.float32).nan_to_num(-7))


def test_flow_factory_takes_and_gives_json() -> None:
    server = client({"rewards": [1, 0.5]}, {"rewards": [None]}, in_flight=1)
    assert same(FlowFactory(server, batch=2)(images(), PROMPTS, [*images(6)[3:]]), [1, 0.5, NAN])
    first, second = sent(server), sent(server, 1)
    before = [red(base64.b64decode(file)) for each in (first, second) for (file,) in each["condition_images"]]
    assert before == [3, 4, 5]
    assert set(first) == {"prompt", "image", "video", "condition_images", "condition_videos"}
    assert first["prompt"] == ["a cat", "a dog"]
    assert [red(base64.b64decode(file)) for file in first["image"]] == [0, 1]
    assert first["video"] is None
    assert server.transport.requests[0].path == "/compute"  # type: ignore[attr-defined]
    videos = client({"rewards": [1, 2]})
    FlowFactory(videos)(images(2, 3, 5, 4, 6), PROMPTS[:2])
    assert [len(frames) for frames in sent(videos)["video"]] == [5, 5]
    assert sent(videos)["image"] is None


def test_unirl_takes_metadata_and_gives_several_rewards() -> None:
    """The first number of each reward counts; they are added, and each is returned as well."""
    results = [{"pick": {"score": 0.5, "other": 3}, "ocr": {"acc": 1}}, {"pick": {"score": 0.25}, "ocr": {"acc": 0.5}}]
    server = client({"results": results, "errors": [{}, {}]}, url="http://server:1/base")
    records: Any = [{"tag": "x", "image": b"bytes"}, {}]
    found = UniRL(server, rewards=("pick", "ocr"))(images(2), PROMPTS[:2], records)
    assert isinstance(found, dict)
    expected = {"score": [1.5, 0.75], "pick": [0.5, 0.25], "ocr": [1, 0.5]}
    assert {name: values.tolist() for name, values in found.items()} == expected
    request = sent(server)["requests"][1]
    assert request["required_rewards"] == ["pick", "ocr"]
    assert request["history"][0]["text"] == "a dog"
    assert abs(red(base64.b64decode(request["history"][0]["image_b64"])) - 1) <= 2  # JPEG
    assert sent(server)["requests"][0]["metadata"] == {"tag": "x"}  # what JSON does not hold is left out
    assert server.transport.requests[0].path == "/base/score"  # type: ignore[attr-defined]
    metrics: dict[Any, float] = {"first": 1.0, "mean": 2.0, "max": 3.0}
    for metric, score in metrics.items():  # the numbers of one reward become one
        one = client({"results": [{"vq": {"a": 1, "b": 3, "c": 2}}]})
        assert same(UniRL(one, rewards=("vq",), metric=metric)(images(1), PROMPTS[:1], [{}]), [score])


def test_a_reward_that_fails_on_one_sample_of_unirl_has_no_score_there() -> None:
    answer = {"results": [{"ocr": {"acc": 1}}, {}], "errors": [{}, {"ocr": "out of memory"}]}
    assert same(UniRL(client(answer), rewards=("ocr",))(images(2), PROMPTS[:2], [{}, {}]), [1, NAN])
    nothing = {"results": [{}, {}], "errors": [{"ocr": "out of memory"}] * 2}
    with pytest.raises(RunError, match="no score of any sample: ocr: out of memory"):
        UniRL(client(nothing), rewards=("ocr",))(images(2), PROMPTS[:2], [{}, {}])
    bad = {"results": [{"vq": {"a": 1, "b": NAN}}]}
    assert same(UniRL(client(bad), rewards=("vq",), metric="max")(images(1), PROMPTS[:1], [{}]), [NAN])


@pytest.mark.parametrize("bad", [None, "good", NAN, [1], {"a": "good"}, 10**400], ids=repr)
def test_one_bad_value_of_a_reply_costs_one_sample(bad: Any) -> None:
    """Whatever the format of the server; a reply without any number is another form, in one line."""

    def ocr(server: HttpClient) -> Any:
        return UniRL(server, rewards=("ocr",))(images(2), PROMPTS[:2], [{}, {}])

    clients: list[tuple[Callable[[HttpClient], Any], Callable[[list[Any]], Any]]] = [
        (lambda server: FlowFactory(server)(images(2), PROMPTS[:2]), lambda values: {"rewards": values}),
        (
            lambda server: FlowGrpo(server, trust_pickle=True)(images(2), PROMPTS[:2], [{}, {}]),
            lambda values: pickle.dumps({"scores": values}),
        ),
        (ocr, lambda values: {"results": [{"ocr": {"acc": value}} for value in values], "errors": [None, {}]}),
        (ocr, lambda values: {"results": [{"ocr": {"acc": values[0]}}, {"ocr": values[1]}]}),
        (ocr, lambda values: {"results": [{"ocr": {"acc": values[0]}}, values[1]]}),
    ]
    for scored, reply in clients:
        assert same(scored(client(reply([0.5, bad]))), [0.5, NAN])
    if isinstance(bad, str):
        with pytest.raises(RunError, match=r"answered with another form: rewards is a list that holds a str \('good'\)"):
            clients[0][0](client({"rewards": [bad, bad]}))


@pytest.mark.parametrize(
    ("form", "fields", "answer"),
    [
        ("verl", {"images", "prompts", "metadata"}, {"scores": [0.5, 2]}),
        ("unified", {"images", "prompts"}, {"outputs": [0.5, 2]}),
        ("deqa", {"images"}, {"outputs": [np.float64(0.5), np.float32(2)]}),
        ("geneval", {"images", "meta_datas", "only_strict"}, {"scores": [0.5, 2], "group_rewards": {"a": [1]}}),
    ],
)
def test_flow_grpo_speaks_in_pickles(form: Any, fields: set[str], answer: Any) -> None:
    """JPEG files there, and back what a pickle may hold without any code; numbers of numpy are numbers."""
    server = client(pickle.dumps(answer))
    assert same(FlowGrpo(server, trust_pickle=True, form=form)(images(2), PROMPTS[:2], [{"tag": "two"}, {}]), [0.5, 2])
    (request,) = server.transport.requests  # type: ignore[attr-defined]
    body = pickle.loads(request.body)
    assert set(body) == fields
    assert abs(red(body["images"][1]) - 1) <= 2
    if form == "geneval":
        assert body["meta_datas"] == [{"prompt": "a cat", "tag": "two"}, {"prompt": "a dog", "tag": ""}]
    with pytest.raises(UsageError, match="trust_pickle is False, and http://server:1 uses pickles"):
        FlowGrpo(server)


def test_a_yes_or_no_question_is_answered_in_probabilities() -> None:
    half = float(np.log(0.25))
    first = {"Yes": half, " yes": half, "No": half, "maybe": half}
    server = client({"data": [{"id": "Qwen3-VL"}]}, chat_reply("Yes", first), url="http://server:1")
    assert YesNo(server)(images(1), PROMPTS[:1]).item() == pytest.approx(2 / 3)
    paths = [request.path for request in server.transport.requests]  # type: ignore[attr-defined]
    assert paths == ["/v1/models", "/v1/chat/completions"]
    request = sent(server, 1)
    assert {"model": "Qwen3-VL", "max_tokens": 1, "logprobs": True, "top_logprobs": 20}.items() <= request.items()
    image, text = request["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert red(base64.b64decode(image["image_url"]["url"].partition(",")[2])) == 0
    assert text["text"] == 'Does this image show "a cat"? Answer the question with Yes or No.'


def test_neither_yes_nor_no_is_no_score() -> None:
    server = client(chat_reply("x", {"a": -1.0}), chat_reply("x", {"Yes": -1.0}), in_flight=1, url="http://server/v1")
    assert same(YesNo(server, model="m")(images(2), PROMPTS[:2]), [NAN, 1.0])
    assert server.transport.requests[0].path == "/v1/chat/completions"  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="gives no log-probabilities: use vlm_rating"):
        YesNo(client(chat_reply("Yes")), model="m")(images(1), PROMPTS[:1])
    with pytest.raises(RunError, match=r"lists 2 models \(a, b\): set model to the name of one"):
        YesNo(client({"data": [{"id": "a"}, {"id": "b"}]}))(images(1), PROMPTS[:1])
    with pytest.raises(RunError, match="3 images came with 2 prompts"):
        YesNo(server, model="m")(images(), PROMPTS[:2])


NO_SCORES = '{"score": 11}', '{"score": "10"}', '{"score": true}', '{"score": NaN}', '{"score": null}'
NO_RATINGS = *NO_SCORES, "I would say 7 out of 10.", '{"rating": 3}', "[7]", ""
RATINGS = {'{"score": 10}': 1.0, '{"score": 5.5}': 0.5, '```json\n{"score": 1}\n```': 0.0, **dict.fromkeys(NO_RATINGS, NAN)}


@pytest.mark.parametrize("text", [*RATINGS, None])
def test_a_rating_is_a_number_in_json(text: str | None) -> None:
    server = client(chat_reply(text))
    assert same(Rating(server, model="m")(images(1), PROMPTS[:1]), [RATINGS.get(text or "", NAN)])
    assert sent(server)["response_format"]["json_schema"]["schema"]["properties"]["score"]["maximum"] == 10
    assert "from 1 (worst) to 10 (best)" in sent(server)["messages"][0]["content"][1]["text"]


@pytest.mark.parametrize(("text", "score"), [("Fine.\nFinal Score: 4.5", 0.9), ("Final Score: 5.9", NAN), ("good", NAN)])
def test_unified_reward_is_read_from_its_last_line(text: str, score: float) -> None:
    server = client(chat_reply(text))
    assert same(UnifiedReward(server, model="m")(images(1), PROMPTS[:1]), [score])
    image, question = sent(server)["messages"][0]["content"]
    assert Image.open(io.BytesIO(base64.b64decode(image["image_url"]["url"].partition(",")[2]))).size == (512, 512)
    assert question["text"].endswith("Text Caption: [a cat]")


def test_lists_of_questions_are_averaged() -> None:
    """Soft-TIFA: the probability of the expected answer, a count as a word or a digit."""

    def answer(request: Any) -> Any:
        text = request.body.decode()
        first = {"three": np.log(0.3), " 3": np.log(0.2), "two": np.log(0.5)} if "How many" in text else {"Yes": np.log(0.9)}
        return chat_reply("x", {token: float(value) for token, value in first.items()})

    record = {"vqa_list": [["How many cows are there?", "three"], ["Are they white?", "Yes"]]}
    found = Questions(client(answer), model="m")(images(1), PROMPTS[:1], [record])
    assert found.item() == pytest.approx((0.5 + 0.9) / 2)
    geometric = Questions(client(answer), model="m", mean="geometric")(images(1), PROMPTS[:1], [record])
    assert geometric.item() == pytest.approx((0.5 * 0.9) ** 0.5)
    assert spell(" Ten") == ["ten", "10"]
    lists: list[Any] = [None, "How many?", [], [["How many?"]], [1]]
    for wrong in lists:
        with pytest.raises(RunError, match=r"prompt 'a cat' has .*vqa_list"):
            Questions(client({}), model="m")(images(1), PROMPTS[:1], [{"vqa_list": wrong}])


def test_a_question_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "question.txt"
    path.write_text("Is {prompt} {nice}?\n")
    server = client(chat_reply("Yes", {"Yes": 0.0}))
    YesNo(server, model="m", template=path)(images(1), ["{a} cat"])
    assert sent(server)["messages"][0]["content"][1]["text"] == "Is {a} cat {nice}?"
    path.write_text(" ")
    for wrong in (path, tmp_path / "none.txt", tmp_path):
        with pytest.raises(UsageError, match=f"template is {wrong}, which"):
            YesNo(server, template=wrong)


def test_some_failures_cost_their_own_samples_alone() -> None:
    """A hosted server refuses an image; the samples of the other requests keep their scores, and a warning says why."""
    replies = ({"rewards": [1.0]}, Reply(400, {}, b"content policy"), {"rewards": [3.0]})
    with pytest.warns(RuntimeWarning, match="1 of 3 samples have no score: .*answered 400: content policy"):
        found = FlowFactory(client(*replies, in_flight=1), batch=1)(images(), PROMPTS)
    assert same(found, [1, NAN, 3])
    with pytest.raises(RunError, match="content policy"):
        FlowFactory(client(replies[1]), batch=1)(images(), PROMPTS)


def test_scores_come_back_in_order_whatever_the_order_of_the_replies() -> None:
    """And frames of a video are spread."""

    def answer(request: Any) -> Any:
        time.sleep(0.002 * (int.from_bytes(request.body, "little") % 7 % 3))
        return {"rewards": [red(base64.b64decode(file)) for file in json.loads(request.body)["image"]]}

    found = FlowFactory(client(answer, in_flight=5), batch=2)(images(19), ["x"] * 19)
    assert found.tolist() == list(range(19))
    video = torch.arange(21.0).view(1, 21, 1, 1)
    assert [frame.item() for frame in pick_frames(video, 5)] == [0, 5, 10, 15, 20]
    assert (len(pick_frames(video[:, :3], 5)), len(pick_frames(video, 1))) == (3, 1)


def build(name: str, options: dict[str, str]) -> Any:
    return from_factory(name, build_maker(name), options)


def test_every_client_is_made_by_name_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build("unirl", {"url": "http://a:1", "rewards": "pick+ocr", "timeout": "5", "batch": "3", "metric": "max"})
    assert isinstance(made, UniRL)
    assert (made.rewards, made.batch, made.metric, made.server.timeout) == (("pick", "ocr"), 3, "max", 5.0)
    extra = {"unirl": {"rewards": "x"}, "flow_grpo": {"trust_pickle": "true"}}
    for name, kind in CLIENTS.items():
        assert isinstance(build(name, {"url": "http://a:1", **extra.get(name, {})}), kind)


def test_wrong_options_are_one_line() -> None:
    wrong: list[tuple[str, dict[str, str], str]] = [
        ("unirl", {}, "unirl needs the option rewards"),
        ("flow_factory", {"bach": "3"}, "no option 'bach', expected url, .*; did you mean 'batch'"),
        ("flow_factory", {"batch": "many"}, "batch is 'many', expected a whole number"),
        ("flow_factory", {"timeout": "long"}, "timeout is 'long', expected a number"),
        ("flow_factory", {"batch": "0"}, "batch is 0, expected at least 1"),
        ("flow_grpo", {"trust_pickle": "perhaps"}, "trust_pickle is 'perhaps', expected true or false"),
        ("flow_grpo", {"trust_pickle": "true", "form": "x"}, "form is 'x', expected verl or"),
        ("unirl", {"rewards": "a+a"}, "rewards is .*, expected names that the server has, each once"),
        ("unirl", {"rewards": "a", "metric": "sum"}, "metric is 'sum'"),
        ("vlm_rating", {"low": "3", "high": "2"}, "low is 3 and high is 2"),
        ("vlm_questions", {"mean": "median"}, "mean is 'median'"),
        ("flow_factory", {"transport": "x"}, "no option 'transport'"),
    ]
    for name, options, says in wrong:
        with pytest.raises(UsageError, match=rf"^(?=.*{says})[^\n]*$"):
            build(name, {"url": "http://a", **options})
    with pytest.raises(UsageError, match="flow_factory needs the option url: write url=value"):
        build("flow_factory", {})


def test_a_run_learns_from_a_vlm_judge_and_stops_without_one(tmp_path: Path) -> None:
    """The VLM judge finds bright images good; a run whose server is away ends in one line before its first rollout."""
    vlm = fake_servers.YesNo()
    with init_world() as world:
        with loopback(vlm) as url:
            config = tiny.config(tmp_path / "run", rewards=(f"vlm_yes_no:url={url},timeout=20",))
            run = tiny.Run(config, world, tiny.job())
            record = run.rollout()
        assert 0 < record["reward"]["mean"] < 1
        assert all(text.startswith('Does this image show "') for text in vlm.questions)
        assert len(set(vlm.questions)) >= 2
        assert any(bool(tensor.any()) for tensor in run.gradient().values())
        away = tiny.config(tmp_path / "away", rewards=(f"vlm_yes_no:url={url},patience=0",))
        with pytest.raises(
            RunError, match=r"reward 'vlm_yes_no': http://127.0.0.1:\d+/v1/models cannot be reached: .*refused"
        ):
            tiny.Run(away, world, tiny.job()).rollout()
