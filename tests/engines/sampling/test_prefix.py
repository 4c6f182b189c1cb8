"""Prefixes that a group shares: the steps before the window are computed once per group, and change no density."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from helpers.spied_runs import Spied
from torch import Tensor, nn

from fluvial.core.random import key
from fluvial.core.rollout import Trajectory
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import World
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Chunk, Guidance, Requests, Sampling, SharedPrefix, StochasticSteps, generate
from fluvial.engines.sampling.items import concatenate
from fluvial.engines.sampling.samplers import SAMPLERS, Stochastic, sampler_rule
from fluvial.engines.sampling.window import MovingWindow, RandomWindow
from fluvial.kernels import step_log_prob
from fluvial.models.guidance import guided_velocity

STEPS, GROUP, SAMPLES = 6, 4, 12
STOCHASTIC = [name for name in SAMPLERS if name != "ode"]
PLAIN, GUIDED, TWICE = Guidance(), Guidance(scale=2.0), Guidance(scale=2.0, forwards="two")
SHARED = SamplingConfig(
    prompts=2, group=4, steps=STEPS, sampler=Stochastic(eta=0.5), window=RandomWindow(2, low=2, share_prefix=True)
)


class Counted(tiny.Tiny):
    """The tiny model, which counts the rows of its forward passes by noise level."""

    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Any, *, timestep: Tensor | None = None) -> Tensor:
        """Return the net's output."""
        rows.extend(sigma.tolist())
        return super().predict(module, x, sigma, cond, timestep=timestep)


rows: list[float] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    rows.clear()


@cache
def net() -> nn.Module:
    """Return the tiny network."""
    return tiny.Tiny().build()


@dataclass(frozen=True)
class Case:
    """A sampler, a window and a guidance."""

    sampler: str = "flow_sde"
    window: tuple[int, ...] = (2, 4)
    guidance: Guidance = PLAIN

    @property
    def model(self) -> Counted:
        """The model that the sampler is for."""
        return Counted("epsilon" if self.sampler == "ddim" else "velocity")

    def sampling(self, *, shared: bool) -> Sampling:
        """Return how the samples are made."""
        schedule = self.model.schedule(STEPS, tiny.SHAPE)
        bound = sampler_rule(self.sampler).bind(0.6, schedule.levels)
        steps = StochasticSteps(bound, self.window, keep_velocity=True)
        prefix = SharedPrefix(min(self.window), GROUP) if shared else None
        return Sampling(tiny.SHAPE, schedule, self.guidance, stochastic=steps, prefix=prefix)

    def made(self, ids: range = range(SAMPLES), *, shared: bool = True, micro_batch: int = 4) -> Trajectory:
        """Return the trajectories of samples whose groups start from the same noise."""
        chunks = self.chunks(ids, shared=shared, micro_batch=micro_batch)
        return concatenate([chunk.trajectory for chunk in chunks])

    def chunks(self, ids: range, *, shared: bool, micro_batch: int) -> list[Chunk]:
        """Return the same in chunks."""
        groups = [i // GROUP for i in ids]
        requests = Requests([Prompt(tiny.PROMPTS[group]) for group in groups], ids, key(5), groups)
        return list(generate(self.model, net(), requests, self.sampling(shared=shared), micro_batch=micro_batch))


CASES = [Case(sampler) for sampler in STOCHASTIC] + [
    Case(window=(1,)),
    Case(window=(3, 4, 5)),
    Case(guidance=GUIDED),
    Case(guidance=TWICE),
    Case("cps", guidance=GUIDED),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_rollout_of_groups_that_start_from_the_same_noise(case: Case) -> None:
    """To rounding, with the noise of each sample's own key; until the window a group's samples are one."""
    found, expected = case.made(), case.made(shared=False)
    assert found.steps.tolist() == expected.steps.tolist() == [list(case.window)] * len(found.final)
    for one, two in zip(found[:5], expected[:5], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.final, expected.final, rtol=1e-4, atol=1e-5)
    begun, ended = found.x[:, 0].unflatten(0, (-1, GROUP)), found.final.unflatten(0, (-1, GROUP))
    assert torch.equal(begun, begun[:, :1].expand_as(begun))
    assert not torch.allclose(begun[0, 0], begun[1, 0], atol=0.1)
    assert float((ended[:, 0] - ended[:, 1]).abs().max()) > 0.1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_probs_are_those_of_the_stored_steps(case: Case) -> None:
    """Exactly, computed as an update does."""
    sampling = case.sampling(shared=True)
    assert sampling.stochastic is not None
    for chunk in case.chunks(range(SAMPLES), shared=True, micro_batch=4):
        for place, step in enumerate(case.window):
            x, x_next = chunk.trajectory.x[:, place], chunk.trajectory.x_next[:, place]
            level, level_next = (sampling.schedule.levels[i].expand(len(x)).contiguous() for i in (step, step + 1))
            forwards = case.guidance.forwards
            with torch.no_grad():
                v = guided_velocity(case.model, net(), x, level, chunk.cond, forwards=forwards)
            transition = sampling.stochastic.transition(level, level_next)
            assert torch.equal(step_log_prob(transition, x, v, x_next)[0], chunk.trajectory.log_prob[:, place])


@pytest.mark.parametrize(("case", "each"), [(Case(), 1), (Case(guidance=GUIDED), 2), (Case(guidance=TWICE), 2)], ids=str)
def test_a_prefix_costs_one_row_per_group(case: Case, each: int) -> None:
    """Of the transformer: 3 groups before the window and 12 samples after it begins, not 12 samples at every step."""
    case.made()
    prefix, groups = min(case.window), SAMPLES // GROUP
    assert len(rows) == each * (prefix * groups + (STEPS - prefix) * SAMPLES) == each * 54
    rows.clear()
    case.made(shared=False)
    assert len(rows) == each * STEPS * SAMPLES == each * 72


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6])
def test_bits_do_not_depend_on_the_rank(micro_batch: int) -> None:
    """A group that two ranks hold a part of is computed by both, and is the same on both, in chunks of the same sizes."""
    whole = Case().made(micro_batch=micro_batch)
    parts = [Case().made(ids, micro_batch=micro_batch) for ids in (range(6), range(6, 12))]
    for one, *two in zip(whole[:5], *(part[:5] for part in parts), strict=True):
        assert torch.equal(one, torch.cat(two)) or torch.equal(one, two[0])  # the steps have no batch
    assert torch.equal(whole.final, torch.cat([part.final for part in parts]))


def test_chunks_change_results_by_rounding_alone() -> None:
    """Whatever part of a group a chunk holds."""
    for micro_batch in (1, 3, 5, 12):
        chunked = concatenate(
            [chunk.trajectory for chunk in Case().chunks(range(SAMPLES), shared=True, micro_batch=micro_batch)]
        )
        torch.testing.assert_close(chunked.final, Case().made().final, rtol=1e-4, atol=1e-5)


RUNS: list[dict[str, Any]] = [
    {},
    {"guidance": GUIDED},
    {"sampler": Stochastic("cps", eta=0.5), "window": replace(SHARED.window, high=5)},
    {"window": RandomWindow(2, low=2, draw="sample", share_prefix=True)},
    {"window": RandomWindow(2, low=2, draw="call", share_prefix=True)},
    {"window": MovingWindow(2, low=2, share_prefix=True)},
]


@pytest.mark.parametrize("changes", RUNS, ids=str)
def test_a_run_starts_on_policy(one: World, tmp_path: Path, changes: dict[str, Any]) -> None:
    """The ratio of its first pass is exactly 1 with chunks that split a group, and its rewards differ within groups."""
    config = tiny.config(tmp_path, sampling=replace(SHARED, **changes), updates=2, **{"engine.micro_batch": 8})
    run = Spied(config, one)
    for _ in range(2):
        record = run.rollout()
        assert record["first_pass_max_abs_log_ratio"] == 0
        assert record["diversity"] > 0.01
        trajectory = run.trajectories[-1]
        begun = trajectory.x[:, 0].unflatten(0, (2, 4))
        alike = torch.equal(begun, begun[:, :1].expand_as(begun))
        same = changes.get("window", SHARED.window).draw == "call"
        assert alike == (trajectory.steps == trajectory.steps[:1]).all() or same


def test_a_prefix_ends_before_the_window() -> None:
    """A stochastic step that the group would share is refused."""
    sampling = replace(Case().sampling(shared=True), prefix=SharedPrefix(3, GROUP))
    requests = Requests([Prompt("0")] * GROUP, range(GROUP), key(5), [0] * GROUP)
    refuses(
        r"window holds steps \[2\], expected 3 to 5, the steps taken",
        list,
        generate(Case().model, net(), requests, sampling, micro_batch=GROUP),
    )
