"""Samples whose rows have noise levels of their own: K pieces together are the K pieces apart, for every sampler."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from helpers.tables import SAMPLERS, STOCHASTIC, SamplerRow, normals
from helpers.tolerances import tolerance
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fluvial.core import gaussian, sigmas, transitions
from fluvial.core.awm import awm_log_prob
from fluvial.core.distill import scaled_mse
from fluvial.core.flow_matching import interpolate, recover
from fluvial.core.gaussian import FORMS, REDUCTIONS
from fluvial.core.nft import nft_loss
from fluvial.core.random import key
from fluvial.core.rollout import Record, rollout
from fluvial.core.step import KLWeight, kl_factor, weigh_kl
from fluvial.core.transitions import Transition

WIDTH = 5  # numbers per row
WEIGHED: tuple[KLWeight, ...] = ("rate", "mse")  # weights of a KL that differ between rows


@pytest.mark.parametrize("row", STOCHASTIC, ids=lambda row: row.name)
@given(
    data=st.data(),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    form=st.sampled_from(FORMS),
    reduction=st.sampled_from(REDUCTIONS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=8)
def test_pieces_together_are_the_pieces_apart(
    row: SamplerRow, data: st.DataObject, counts: list[int], form: gaussian.Form, reduction: gaussian.Reduction, seed: int
) -> None:
    """Samples, log-probs and KLs, which are weighted by the sizes of the pieces; one piece is no pieces."""
    batch, sampler = 2, row.bind(0.6)
    pairs = [tuple(level[:1] for level in data.draw(row.levels)) for _ in counts]
    apart = [sampler(*(level.expand(batch) for level in pair)) for pair in pairs]
    together = sampler(
        *(
            torch.cat([pair[side].expand(batch, count) for pair, count in zip(pairs, counts, strict=True)], dim=1)
            for side in (0, 1)
        )
    )
    x, v, v_ref, noise = normals(seed, 4, batch, sum(counts), WIDTH)
    x_next, log_prob = gaussian.draw(together, x, v, noise, form=form, reduction=reduction)
    assert torch.equal(x_next, gaussian.sample(together, x, v, noise))
    kl = gaussian.kl(together, v, v_ref, reduction=reduction)
    dt = torch.cat([(pair[1] - pair[0]).expand(batch, count) for pair, count in zip(pairs, counts, strict=True)], dim=1)
    weighed = [weigh_kl(kl, 0.5, kl_factor(together, dt, each), together, v, v_ref, reduction) for each in WEIGHED]
    assert log_prob.shape == kl.shape == (batch,)
    share = [1.0 if reduction == "sum" else count / sum(counts) for count in counts]
    parts = zip(*(tensor.split(counts, dim=1) for tensor in (x, v, v_ref, noise, x_next)), strict=True)
    scores, kls, parts_weighed = [], [], [list[Tensor]() for _ in WEIGHED]
    for step, (x_k, v_k, ref_k, noise_k, next_k) in zip(apart, parts, strict=True):
        assert torch.equal(next_k, gaussian.sample(step, x_k, v_k, noise_k))
        scores.append(gaussian.log_prob(step, x_k, v_k, next_k, form=form, reduction=reduction))
        kls.append(gaussian.kl(step, v_k, ref_k, reduction=reduction))
        for found, each in zip(parts_weighed, WEIGHED, strict=True):
            dt_k = pairs[len(kls) - 1][1] - pairs[len(kls) - 1][0]
            found.append(weigh_kl(kls[-1], 0.5, kl_factor(step, dt_k, each), step, v_k, ref_k, reduction))
    limit = tolerance("coefficients", torch.float64, condition=1e3)
    for mine, theirs in ((log_prob, scores), (kl, kls), *zip(weighed, parts_weighed, strict=True)):
        assert_close(mine, sum(weight * each for weight, each in zip(share, theirs, strict=True)), **limit)


@pytest.mark.parametrize("row", SAMPLERS, ids=lambda row: row.name)
def test_a_rollout_takes_each_piece_along_its_own_schedule(row: SamplerRow) -> None:
    """Of three rows, two on one schedule and one on another; of one schedule, the samples are those of no pieces."""
    T, batch = 4, 3
    grids = [row.grid(T).double(), row.grid(2 * T).double()[[0, *range(T + 1, 2 * T + 1)]]]
    sampler = row.bind(0.6) if row.stochastic else transitions.ode
    plain = row.bind(0.0)
    window = range(1, 3) if row.stochastic else ()
    record = Record(range(T), form="unscaled", debug=True)
    x = normals(0, batch, 3, WIDTH)

    def run(levels: torch.Tensor) -> torch.Tensor:
        def velocity(x: torch.Tensor, level: torch.Tensor, step: int) -> torch.Tensor:
            assert level.shape == (batch, *levels.shape[1:])
            return 0.3 * x

        made = rollout(
            velocity, x, levels, transition=sampler, deterministic=plain, key=key(3), window=window, record=record
        )
        assert made.debug is not None
        columns = levels.reshape(T + 1, -1).expand(-1, 3).unbind(1)
        for number, column in enumerate(columns):
            for step, pair in enumerate(pairwise(column)):
                own = (sampler if step in window else plain)(*(level.expand(batch) for level in pair))
                tensors = (made.x, made.debug.velocity, made.debug.noise, made.x_next)
                here, v, noise, after = (tensor[:, step, number] for tensor in tensors)
                assert_close(after, gaussian.sample(own, here, v, noise), rtol=0, atol=1e-12)
        return made.final

    apart, one = torch.stack([grids[0], grids[1], grids[0]], dim=1), grids[0][:, None].expand(-1, 3)
    assert torch.equal(run(one), run(grids[0]))
    assert not torch.equal(run(apart), run(one))


def test_objectives_on_noised_samples_take_a_level_per_row() -> None:
    """What a loss computes of a sample and its level is what it computes of each row."""
    level = torch.tensor([[0.2, 0.7, 0.7], [0.9, 0.4, 0.4]], dtype=torch.float64)
    x0, noise, v, v_old = normals(1, 4, 2, 3, WIDTH)
    x = interpolate(x0, noise, level)
    lower = level / 2
    back = recover(x, v, noise, level, lower)
    for number in range(3):
        assert torch.equal(x[:, number], interpolate(x0[:, number], noise[:, number], level[:, number]))
        own = (tensor[:, number] for tensor in (x, v, noise, level, lower))
        assert torch.equal(back[:, number], recover(*own))
    # Both know the velocity times the level alone.
    scaled = level[..., None] * v, level[..., None] * v_old
    prob = torch.tensor([0.2, 0.9], dtype=torch.float64)
    numbers: dict[str, Any] = {"beta": 0.3, "adv_clip": 5.0}
    assert_close(nft_loss(v, v_old, x0, x, level, prob, **numbers), nft_loss(*scaled, x0, x, 1.0, prob, **numbers))
    assert_close(scaled_mse(v, v_old, level), scaled_mse(*scaled, 1.0))
    error = prob + 1
    assert torch.equal(awm_log_prob(error, level, weighting="t"), awm_log_prob(error, level[:, 0], weighting="t"))


def test_a_wrong_number_of_levels_is_refused() -> None:
    x, rows = normals(0, 2, 3, WIDTH), torch.full((2, 3), 0.5)
    step = Transition(rows, rows, rows)
    short, mixed = Transition(*(number[:, :2] for number in step)), step._replace(b=rows[:, 0])
    refuses(r"log_prob: a has shape \[2, 2\], expected \[\] or \[2\] or \[2, 3\]", gaussian.log_prob, short, x, x, x)
    refuses(r"log_prob: b has shape \[2\], expected \[\] or \[2, 3\]", gaussian.log_prob, mixed, x, x, x)
    assert gaussian.log_prob(step._replace(a=torch.tensor(1.0)), x, x, x).shape == (2,)
    per_sample = {"eta": torch.ones(2), "sigma_max": 0.9}
    refuses(r"flow_sde: eta has shape \[2\], expected \[\] or \[2, 3\]", transitions.flow_sde, rows, rows / 2, **per_sample)
    rising = torch.tensor([[1, 1], [0.7, 0.5], [0.5, 0.6], [0, 0]])
    refuses(r"rise at step 1 \(0.5 to 0.6\)", sigmas.check_sigmas, rising)


def test_the_first_step_of_a_row_has_the_second_level_of_its_own_schedule() -> None:
    levels = torch.stack([sigmas.shifted(4, 12.0), sigmas.shifted(4, 3.0)], dim=1)
    together = transitions.bind("flow_sde", 0.7, levels)(levels[:-1], levels[1:])
    for number, column in enumerate(levels.unbind(1)):
        alone = transitions.bind("flow_sde", 0.7, column)(column[:-1], column[1:])
        assert all(torch.equal(mine[:, number], theirs) for mine, theirs in zip(together, alone, strict=True))
    assert math.isclose(float(together.std[0, 0]), 0.7, rel_tol=1e-5)
