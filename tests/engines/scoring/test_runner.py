"""Reward threads: what a failing call costs, which samples keep their scores, and whole groups for rewards that compare."""

import math
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import launch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fluvial.engines.data.records import Prompt, as_prompts
from fluvial.engines.errors import RunError
from fluvial.engines.scoring.runner import GroupBuffer, RewardRunner, RewardRunners
from fluvial.engines.scoring.scores import Scored
from fluvial.engines.scoring.signature import Samples

IMAGES, PROMPTS = torch.arange(4.0)[:, None, None, None].expand(4, 1, 2, 2), ["a", "b", "c", "d"]


def scored(reward: Any, **options: Any) -> Scored:
    """Return what a runner says of one chunk."""
    runner = RewardRunner(reward, label="reward 'it'", **options)
    runner.submit(IMAGES, as_prompts(PROMPTS))
    (found,) = runner.results()
    runner.close()
    return found


def values(scores: Tensor) -> list[float | None]:
    """Return scores with None for NaN."""
    return [None if math.isnan(score) else score for score in scores.tolist()]


def test_several_numbers() -> None:
    """The score is learnt from; the others come along, finite or not."""
    parts = {"score": [1.0, 2.0, 3.0, 4.0], "layout": torch.tensor([1, 2, 3, 4]), "colour": [math.nan, 0, 0, 0]}
    found = scored(lambda images, prompts: parts)
    assert found.scores.tolist() == [1, 2, 3, 4]
    assert found.parts["layout"].tolist() == [1, 2, 3, 4]
    assert values(found.parts["colour"]) == [None, 0, 0, 0]
    assert not found.problems


class Picky:
    """Raises for some prompts, and counts its calls."""

    def __init__(self, *bad: str, error: type[BaseException] = KeyError) -> None:
        self.bad, self.error, self.calls = bad, error, 0

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self.calls += 1
        if {*self.bad} & {*prompts}:
            raise self.error("no such\nthing")
        return images.mean((1, 2, 3))


@pytest.mark.parametrize(
    ("bad", "kept", "calls"),
    [
        (("b",), [0, None, 2, 3], 5),
        (("a", "b"), [None] * 4, 3),
        (("b", "c"), [0, None, None, None], 4),
        ((), [0, 1, 2, 3], 1),
    ],
)
def test_one_bad_sample_costs_no_other(bad: tuple[str, ...], kept: list[float | None], calls: int) -> None:
    """After a call that raises, samples are scored alone; after two that fail the rest is given up."""
    reward = Picky(*bad)
    found = scored(reward)
    assert values(found.scores) == kept
    assert reward.calls == calls
    assert found.failed == bool(bad)
    assert found.problems == ((f"reward 'it' raised KeyError ('no such\\nthing') for prompt {bad[0]!r}",) if bad else ())


@pytest.mark.parametrize("error", [ConnectionError, TimeoutError, RunError])
def test_a_reward_out_of_reach_is_called_once(error: type[BaseException]) -> None:
    """Each sample would cost all its retries again."""
    reward = Picky(*PROMPTS, error=error)
    assert values(scored(reward).scores) == [None] * 4
    assert reward.calls == 1


def test_the_end_of_the_process_is_an_error_like_others() -> None:
    """A reward that calls sys.exit ends neither thread nor run."""
    found = scored(Picky("d", error=SystemExit))
    assert values(found.scores) == [0, 1, 2, None]
    assert "raised SystemExit" in found.problems[0]


def test_a_reward_that_has_failed_too_often_is_not_called_any_more() -> None:
    """The rollout stops the run anyway; the next one calls it again."""
    reward = Picky(*PROMPTS, error=ConnectionError)
    runner = RewardRunner(reward, tolerated=4)
    for _ in range(5):
        runner.submit(IMAGES, as_prompts(PROMPTS))
    assert [values(found.scores) for found in runner.results()] == [[None] * 4] * 5
    assert reward.calls == 2
    reward.bad = ()
    runner.submit(IMAGES, as_prompts(PROMPTS))
    assert runner.collect().tolist() == [0, 1, 2, 3]
    runner.close()


def test_the_seconds_of_rewards_are_computed_or_waited_for() -> None:
    """What a reward computed while something else ran is not waited for."""

    def slow(images: Tensor, prompts: Sequence[str]) -> Tensor:
        time.sleep(0.5)
        return images.mean((1, 2, 3))

    runners = RewardRunners({"slow": (slow, 1.0), "fast": (Picky(), 2.0)})
    runners.submit(IMAGES, as_prompts(PROMPTS))
    while runners.runners[0].tally.seconds == 0:
        time.sleep(0.001)
    hidden = runners.collect()
    runners.submit(IMAGES, as_prompts(PROMPTS))
    waited = runners.collect()
    runners.close()
    assert hidden.computed >= 0.5 > hidden.waited
    assert waited.waited >= 0.1
    assert waited.scores.tolist() == [[i, i] for i in range(4)]


def test_the_ids_of_samples_say_where_their_scores_are() -> None:
    """A repeat has none, and other ranks' samples are 0."""
    runners = RewardRunners({"it": (Picky(), 1.0)})
    runners.submit(IMAGES, as_prompts(PROMPTS), ids=[4, 5, -1, -1])
    assert runners.collect(batch=6).scores.tolist() == [[0], [0], [0], [0], [0], [1]]
    runners.close()


def test_rollouts_that_are_scored_at_once_are_collected_apart() -> None:
    """On one thread, each with its own samples, groups, failures and seconds."""

    def neat(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        if "bad" in prompts:
            raise ValueError("no")
        return images.mean((1, 2, 3))

    def spread(images: torch.Tensor, prompts: Sequence[str], group: int) -> torch.Tensor:
        return images.mean((1, 2, 3)) - images.mean()

    runners = RewardRunners({"neat": (neat, 1.0), "spread": (spread, 1.0)}, group=2, tolerated=1)
    one, two = runners.fork(), runners.fork()
    images = torch.arange(8.0)[:, None, None, None].expand(8, 1, 2, 2)
    two.submit(images[4:6], as_prompts(["bad", "x"]))
    one.submit(images[:2], as_prompts(["x", "x"]))
    two.submit(images[6:], as_prompts(["bad", "x"]))
    one.submit(images[2:4], as_prompts(["x", "x"]))
    found, other = one.collect(), two.collect()
    runners.close()
    assert torch.equal(found.scores, torch.tensor([[0.0, -0.5], [1.0, 0.5], [2.0, -0.5], [3.0, 0.5]]))
    assert torch.equal(other.scores[:, 1], torch.tensor([-0.5, 0.5, -0.5, 0.5]))
    assert other.scores[:, 0].isnan().tolist() == [True, False, True, False]
    assert not found.problems
    assert other.problems
    assert not runners.collect().scores.numel()


def test_the_thread_of_a_reward_computes_on_the_device_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread has the first device of the machine, whatever the rank's main thread has."""
    of_thread, seen = threading.local(), list[int]()
    module = SimpleNamespace(
        set_device=lambda device: setattr(of_thread, "index", torch.device(device).index), current_stream=lambda device: None
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(FakeTensor, "record_stream", lambda tensor, stream: None)

    def reward(images: Tensor, prompts: Sequence[str]) -> list[float]:
        seen.append(getattr(of_thread, "index", 0))
        return [0.0] * len(prompts)

    with FakeTensorMode():
        images = torch.zeros(2, 1, 4, 4, device="cuda:3")
    runner = RewardRunner(reward)
    runner.submit(images, as_prompts(["a", "b"]))
    runner.collect()
    runner.close()
    assert seen == [3]


def later(scores: "Future[Any]") -> RewardRunner:
    """Return a runner whose reward promises the scores of a chunk, and which has been given one."""
    runner = RewardRunner(lambda images, prompts: scores, label="reward 'it'", timeout=0.5)
    runner.submit(IMAGES, as_prompts(PROMPTS))
    return runner


def test_scores_may_come_later() -> None:
    """Than the limit of a call, and after the calls for the next samples."""
    promised = [Future[Any](), Future[Any]()]
    given = iter(promised)
    runner = RewardRunner(lambda images, prompts: next(given), timeout=0.5)
    for _ in promised:
        runner.submit(IMAGES, as_prompts(PROMPTS))
    threading.Timer(0.6, promised[1].set_result, [[1.0] * 4]).start()
    threading.Timer(0.7, promised[0].set_result, [{"score": [2.0] * 4, "votes": [3.0] * 4}]).start()
    first, second = runner.results()
    assert first.scores.tolist() == [2.0] * 4
    assert first.parts["votes"].tolist() == [3.0] * 4
    assert second.scores.tolist() == [1.0] * 4
    runner.close()


@pytest.mark.parametrize(
    ("result", "says"), [([1.0], r"returned shape \[1\] for 4 images"), (ValueError("lost"), r"raised ValueError \(lost\)")]
)
def test_promised_scores_may_fail(result: Any, says: str) -> None:
    scores = Future[Any]()
    if isinstance(result, Exception):
        scores.set_exception(result)
    else:
        scores.set_result(result)
    (found,) = later(scores).results()
    assert found.scores.isnan().all()
    assert found.failed
    assert not found.abandoned
    assert re.search(says, found.problems[0])


def test_who_is_asked_to_stop_waits_for_nobody() -> None:
    """Scores that are there count; those that are promised are abandoned."""
    stop = threading.Event()
    runner = later(Future())
    threading.Timer(0.1, stop.set).start()
    (found,) = runner.results(stop.is_set)
    assert found.abandoned
    assert found.scores.isnan().all()
    there = Future[Any]()
    there.set_result([1.0] * 4)
    (found,) = later(there).results(stop.is_set)
    assert not found.abandoned
    assert found.scores.tolist() == [1.0] * 4


def samples(ids: Sequence[int], size: int) -> Samples:
    """Return samples whose image, prompt and latent say their number."""
    numbers = torch.tensor([float(i) for i in ids])
    images = numbers[:, None, None, None].expand(len(ids), 1, 2, 2)
    return Samples(images, [Prompt(f"prompt {i // size}") for i in ids], numbers[:, None])


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 12])
def test_groups_are_whole_whatever_the_chunks(chunk: int) -> None:
    """Each is started once, when its last sample is there."""
    buffer, found = GroupBuffer(4), list[Samples]()
    for start in range(0, 12, chunk):
        ids = list(range(start, min(start + chunk, 12)))
        found += buffer.add(samples(ids, 4), ids)
        assert len(found) == (ids[-1] + 1) // 4
    assert [group.group for group in found] == [0, 1, 2]
    for number, group in enumerate(found):
        assert group.images[:, 0, 0, 0].tolist() == [4 * number + i for i in range(4)]
        assert group.prompts == [Prompt(f"prompt {number}")] * 4
        assert group.latents is not None
        assert group.latents[:, 0].tolist() == group.images[:, 0, 0, 0].tolist()


def rank_in_group(images: Tensor, prompts: Sequence[str], group: int) -> dict[str, Any]:
    """Score each sample by how many of its group it is brighter than."""
    assert len({*prompts}) == 1
    bright = images.mean((1, 2, 3))
    return {"score": (bright[:, None] > bright).float().sum(1), "group": [float(group)] * len(prompts)}


def test_a_reward_of_groups_beside_one_of_samples() -> None:
    """Both columns are in the order of the samples; a group without a score is invalid as a whole."""

    def picky(images: Tensor, prompts: Sequence[str], group: int) -> Tensor:
        if group == 1:
            raise ValueError("no group of mine")
        return images.mean((1, 2, 3))

    rewards: Any = {"rank": (rank_in_group, 1.0), "bright": (lambda x, p: x.mean((1, 2, 3)), 1.0), "picky": (picky, 1.0)}
    runners = RewardRunners(rewards, group=4)
    for ids in ([0, 1, 2], [3, 4, 5], [6, 7, -1]):
        runners.submit(*samples(ids, 4)[:3], ids=ids)
    found = runners.collect()
    runners.close()
    assert found.scores[:8, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert found.scores[:8, 1].tolist() == list(range(8))
    assert found.scores[:4, 2].tolist() == [0, 1, 2, 3]
    assert found.scores[4:8, 2].isnan().all()
    assert found.problems == ["reward 'picky' raised ValueError (no group of mine) for prompt 'prompt 1'"]
    assert found.parts["rank/group"] == {i: i // 4 for i in range(8)}


@pytest.mark.parametrize(("ranks", "prompts", "group", "micro_batch"), [(2, 3, 4, 2), (3, 2, 5, 1)])
def test_groups_on_several_ranks_are_those_of_one(ranks: int, prompts: int, group: int, micro_batch: int) -> None:
    """A group that lies on several ranks is scored once, and every rank has all scores."""
    batch = prompts * group
    found = launch.on_ranks(ranks, "workers.groupwise:scores", prompts, group, micro_batch)
    for rank in found:
        assert rank["scores"] == [[i % group, i] for i in range(batch)]
        assert rank["invalid"] == {"samples": 0, "groups": 0}
        assert rank["parts"] == {"rank": {"group": pytest.approx(sum(i // group for i in range(batch)) / batch)}}
    assert sorted(number for rank in found for number in rank["called"]) == list(range(prompts))
