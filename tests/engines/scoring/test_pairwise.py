"""Comparisons of pairs: the reward of wins, by a judge or by scores, and Bradley-Terry strengths."""

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from helpers.tables import normals
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fluvial.core.advantages import group_advantages
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.scoring.pairwise import Pairwise, bradley_terry, win_rates
from fluvial.engines.scoring.registry import select
from fluvial.engines.scoring.signature import signature_of

PROMPTS = ["a cat"] * 5


def images(*values: float) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)


def brighter(first: Tensor, second: Tensor, prompts: Sequence[str]) -> list[float]:
    return [(float(a.mean() > b.mean()) + float(a.mean() >= b.mean())) / 2 for a, b in zip(first, second, strict=True)]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, float("nan")]), min_size=10, max_size=10))
def test_the_rate_of_a_sample_is_its_wins_over_its_comparisons(won: list[float]) -> None:
    """As a loop counts them; NaN compares nothing."""
    wins, counts = [0.0] * 5, [0] * 5
    for (first, second), value in zip(combinations(range(5), 2), won, strict=True):
        if value == value:
            wins[first], wins[second] = wins[first] + value, wins[second] + 1 - value
            counts[first], counts[second] = counts[first] + 1, counts[second] + 1
    expected = [win / count if count else float("nan") for win, count in zip(wins, counts, strict=True)]
    assert win_rates(torch.tensor(won), 5).tolist() == pytest.approx(expected, nan_ok=True)


def test_a_transitive_judge_ranks_the_group() -> None:
    """The best wins all, the worst none, ties half; the mean is 1/2, and only the order of a score matters."""
    assert Pairwise(brighter)(images(0.1, 0.9, 0.3, 0.2, 0.0), PROMPTS, 0).tolist() == [0.25, 1.0, 0.75, 0.5, 0.0]
    assert Pairwise(brighter)(images(0.5, 0.5, 0.1), PROMPTS[:3], 0).tolist() == [0.75, 0.75, 0.0]
    scores, group = torch.sigmoid(normals(0, 5)), torch.zeros(5, dtype=torch.long)
    first, second = (Pairwise(brighter)(images(*each.tolist()), PROMPTS, 0) for each in (scores, scores**3))
    assert torch.equal(group_advantages(first, group), group_advantages(second, group))
    assert float(first.mean()) == 0.5


def shown(images: Tensor, prompts: Sequence[str], condition_videos: Any, model_inputs: Any) -> Tensor:
    return images.mean((1, 2, 3))


def test_a_missing_verdict_costs_one_comparison() -> None:
    """None is no verdict, as NaN; a number that is no verdict is an error."""
    values = images(0.1, 0.9, 0.3)
    for missing in (None, float("nan")):
        assert Pairwise(lambda *pairs, missing=missing: [0, missing, 1.0])(values, PROMPTS[:3], 0).tolist() == [0, 1, 0]
    for wrong, line in ([-1, 1, 1], "the judge returned -1, expected"), ([1, 1], r"returned shape \[2\] for 3 images"):
        with pytest.raises(RunError, match=line):
            Pairwise(lambda *pairs, wrong=wrong: wrong)(values, PROMPTS[:3], 0)


def test_a_judge_by_name(one: World, tmp_path: Path) -> None:
    """A reward of the job, or a function; a run learns from the rates of whole groups."""
    by_score = select({"brightness": tiny.brightness}, ["pairwise:judge=brightness=0.5"])["pairwise"]
    assert by_score[1] == 0.5
    assert signature_of(by_score[0]).takes("group")
    values = images(0.1, 0.9, 0.3, 0.2, 0.0)
    found: Any = by_score[0](values, PROMPTS, group=0)
    assert torch.equal(found, Pairwise(brighter)(values, PROMPTS, 0))
    refuses(
        r"judge 'helpers\.tiny_jobs:brightness' has the signature",
        select,
        {},
        ["pairwise:judge=helpers.tiny_jobs:brightness"],
    )
    refuses(
        "a reward of images and prompts alone: told needs metadata",
        select,
        {"told": lambda images, prompts, metadata: images.mean((1, 2, 3))},
        ["pairwise:judge=told"],
    )
    refuses("told needs condition_videos and model_inputs", select, {"told": shown}, ["pairwise:judge=told"])
    mapped = {"mapped": lambda images, prompts: {"score": tiny.brightness(images, prompts)}}
    judged: Any = select(mapped, ["pairwise:judge=mapped"])["pairwise"][0]
    assert torch.equal(judged(values, PROMPTS, group=0), found)
    refuses("needs the option judge", select, {}, ["pairwise"])
    with pytest.raises(RunError, match=r"set sampling.group to 2 or more"):
        Pairwise(brighter)(values[:1], PROMPTS[:1], 0)
    sampling = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS)
    record = tiny.Run(tiny.config(tmp_path, sampling=sampling, rewards=("pairwise:judge=brightness",)), one).rollout()
    assert record["reward"]["mean"] == 0.5


@st.composite
def comparisons(draw: Any) -> Tensor:
    """Draw how often each of up to 6 items was preferred to each other, halves for ties; many pairs are not compared."""
    size = draw(st.integers(1, 6))
    counts = draw(st.lists(st.sampled_from([0, 0, 0.5, 1, 2, 7]), min_size=size * size, max_size=size * size))
    return torch.tensor(counts, dtype=torch.float64).view(size, size).fill_diagonal_(0)


def log_posterior(wins: Tensor, theta: Tensor, prior: float) -> Tensor:
    """Return sum_ij w_ij log P(i beats j) and the prior, as they are written."""
    beats = torch.nn.functional.logsigmoid(theta[:, None] - theta[None, :])
    against = torch.nn.functional.logsigmoid(theta) + torch.nn.functional.logsigmoid(-theta)
    return (wins * beats).sum() + prior * against.sum()


@given(comparisons(), st.sampled_from([0.1, 0.5, 3.0]))
def test_the_strengths_are_the_maximum(wins: Tensor, prior: float) -> None:
    """The gradient of the log-posterior, which is strictly concave, is 0 there."""
    theta = bradley_terry(wins, prior=prior).requires_grad_()
    (gradient,) = torch.autograd.grad(log_posterior(wins, theta, prior), theta)
    assert torch.isfinite(theta).all()
    assert gradient.abs().max() < 1e-6 * (1 + wins.sum())


@given(comparisons())
def test_who_wins_for_who_loses_turns_the_signs(wins: Tensor) -> None:
    assert torch.allclose(bradley_terry(wins.T), -bradley_terry(wins), atol=1e-6)


@given(comparisons(), st.randoms(use_true_random=False))
def test_the_order_of_the_items_does_not_matter(wins: Tensor, random: Any) -> None:
    order = list(range(len(wins)))
    random.shuffle(order)
    assert torch.allclose(bradley_terry(wins[order][:, order]), bradley_terry(wins)[order], atol=1e-6)


def test_known_answers() -> None:
    """No comparisons and ties are 0; a winner is above its loser, however unlikely; many votes give about the log odds."""
    assert bradley_terry(torch.zeros(3, 3)).tolist() == [0, 0, 0]
    assert bradley_terry(torch.tensor([[0, 0.5], [0.5, 0]])).tolist() == [0, 0]
    chain = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0, 0.0]])  # 0 beats 1 beats 2: no maximum without a prior
    first, second, third = bradley_terry(chain).tolist()
    assert first > second > third
    assert second == pytest.approx(0, abs=1e-9)
    first, second = bradley_terry(torch.tensor([[0, 3e3], [1e3, 0]])).tolist()
    assert first - second == pytest.approx(math.log(3), rel=1e-2)
    assert bradley_terry(torch.zeros(0, 0)).shape == (0,)


@pytest.mark.parametrize(
    ("wins", "prior", "says"),
    [
        (torch.zeros(2, 3), 0.5, r"shape \[2, 3\], expected \[n, n\]"),
        (torch.tensor([[0, -1.0], [0, 0]]), 0.5, "numbers >= 0"),
        (torch.tensor([[0, math.nan], [0, 0]]), 0.5, "finite numbers"),
        (torch.eye(2), 0.5, "diagonal of 0"),
        (torch.zeros(2, 2), 0.0, "prior"),
    ],
)
def test_what_is_no_count_is_refused(wins: Tensor, prior: float, says: str) -> None:
    refuses(says, bradley_terry, wins, prior=prior)
