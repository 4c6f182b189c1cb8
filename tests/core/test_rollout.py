"""Rollouts: which steps are taken and recorded, in one part or two, and that an update recomputes the record exactly."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from helpers.refusals import refuses
from helpers.tables import EVENTS, SAMPLERS, SIGMA_MAX, STOCHASTIC, SamplerRow, normals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fluvial.core.rollout
from fluvial.core import gaussian
from fluvial.core.gaussian import FORMS, REDUCTIONS, Form, Reduction
from fluvial.core.policy import clipped_surrogate
from fluvial.core.random import fold_in, key, normal
from fluvial.core.rollout import Trajectory, rollout
from fluvial.core.sigmas import from_scheduler, linear
from fluvial.core.table import Record, plan
from fluvial.core.transitions import bind, cps, dance_sde, ddim, flow_sde, ode

every_sampler = pytest.mark.parametrize("row", SAMPLERS, ids=lambda row: row.name)
every_stochastic_sampler = pytest.mark.parametrize("row", STOCHASTIC, ids=lambda row: row.name)
FLOW = partial(flow_sde, eta=0.7, sigma_max=SIGMA_MAX)


def velocity(x: Tensor, sigma: Tensor, step: int) -> Tensor:
    return 0.5 * x - sigma.reshape(-1, *[1] * (x.ndim - 1)).to(x.dtype)


def recompute(
    row: SamplerRow, trajectory: Trajectory, grid: Tensor, *, form: Form = "density", reduction: Reduction = "mean"
) -> Tensor:
    B, S = trajectory.log_prob.shape
    level, level_next = grid[trajectory.steps].flatten(), grid[trajectory.steps + 1].flatten()
    x, x_next = trajectory.x.flatten(0, 1), trajectory.x_next.flatten(0, 1)
    v = velocity(x.to(torch.promote_types(x.dtype, torch.float32)), level, 0)
    transition = row.bind(0.6)(level, level_next)
    return gaussian.log_prob(transition, x, v, x_next, form=form, reduction=reduction).reshape(B, S)


@every_stochastic_sampler
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("event", [(), (41,), (4, 9, 9)], ids=str)
def test_the_on_policy_ratio_is_exactly_one(row: SamplerRow, stored: torch.dtype, event: tuple[int, ...]) -> None:
    dtype = torch.promote_types(stored, torch.float32)
    grid = row.grid(6).to(dtype)
    start = normals(0, 5, *event, dtype=dtype)
    for form in FORMS:
        for reduction in REDUCTIONS:
            record = Record(range(5), form=form, reduction=reduction, dtype=stored)
            trajectory = rollout(velocity, start, grid, transition=row.bind(0.6), key=key(1), record=record)
            assert trajectory.x.dtype == trajectory.x_next.dtype == stored
            assert trajectory.log_prob.dtype == trajectory.final.dtype == dtype
            log_prob = recompute(row, trajectory, grid, form=form, reduction=reduction)
            assert torch.equal(log_prob, trajectory.log_prob)
            flat = log_prob.flatten()
            ones = torch.ones_like(flat)
            _, info = clipped_surrogate(flat, trajectory.log_prob.flatten(), ones, clip_low=1e-4, clip_high=1e-4)
            assert torch.equal(info.ratio, ones)


@every_sampler
def test_a_rollout_is_the_plain_loop(row: SamplerRow) -> None:
    grid, sampler = row.grid(5), row.bind(0.6)
    x = start = normals(0, 3, 41, dtype=torch.float32)
    keys = fold_in(key(8), torch.arange(3))
    path = [x]
    for step in range(5):
        sigma, sigma_next = grid[step].repeat(3), grid[step + 1].repeat(3)
        noise = normal(fold_in(keys, step), (3, 41))
        x = gaussian.sample(sampler(sigma, sigma_next), x, velocity(x, sigma, step), noise)
        path.append(x)
    trajectory = rollout(velocity, start, grid, transition=sampler, key=key(8), record=Record(range(5), form="unscaled"))
    assert trajectory.steps.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert trajectory.debug is None
    assert torch.equal(trajectory.x, torch.stack(path[:-1], dim=1))
    assert torch.equal(trajectory.x_next, torch.stack(path[1:], dim=1))
    assert torch.equal(trajectory.final, path[-1])


@pytest.mark.parametrize("config", [{}, {"shift": 3.0}, {"use_dynamic_shifting": True}], ids=str)
def test_the_ode_is_the_steps_of_diffusers_bit_for_bit(config: dict[str, bool | float]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    sigmas = np.linspace(1.0, 0.1, 10).tolist()
    scheduler.set_timesteps(sigmas=sigmas, mu=0.7 if config.get("use_dynamic_shifting") else None)
    grid = from_scheduler(scheduler)

    def model(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        return torch.sin(3 * x) + sigma[:, None, None]

    x = start = normals(0, 3, 7, 41, dtype=torch.float32)
    path = [x]
    for step, t in enumerate(scheduler.timesteps):
        x = scheduler.step(model(x, grid[step].repeat(3), step), t, x, return_dict=False)[0]
        path.append(x)
    trajectory = rollout(model, start, grid, transition=ode, key=key(0), record=Record(range(10), form="unscaled"))
    assert torch.equal(trajectory.final, x)
    assert torch.equal(trajectory.x_next, torch.stack(path[1:], dim=1))


@every_sampler
def test_the_velocity_is_given_the_schedule(row: SamplerRow) -> None:
    seen = []

    def watch(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        assert (x.dtype, sigma.dtype) == (torch.float32, torch.float32)
        seen.append((sigma.tolist(), step))
        return velocity(x, sigma, step)

    grid = row.grid(3)
    rollout(watch, torch.zeros(2, 4), grid, transition=row.bind(0.5), key=key(0), record=[])
    assert seen == [([grid[step].item()] * 2, step) for step in range(3)]


@every_stochastic_sampler
@given(data=st.data())
@settings(max_examples=10)
def test_a_sample_does_not_depend_on_its_batch(row: SamplerRow, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=5, unique=True))
    chosen = data.draw(st.lists(st.sampled_from(range(len(ids))), min_size=1, max_size=5, unique=True))
    event = data.draw(st.sampled_from([(), (1,), (41,), (3, 5)]))
    x = normals(0, len(ids), *event, dtype=torch.float32)

    def walk(places: list[int]) -> Trajectory:
        keys = fold_in(key(5), torch.tensor([ids[place] for place in places]))
        return rollout(
            velocity, x[places], row.grid(4), transition=row.bind(0.6), key=keys, record=Record([0, 2], debug=True)
        )

    whole, part = walk(list(range(len(ids)))), walk(chosen)
    assert whole.debug is not None
    assert part.debug is not None
    for of_whole, of_part in (
        *((getattr(whole, name), getattr(part, name)) for name in ("x", "x_next", "log_prob", "final")),
        *zip(whole.debug, part.debug, strict=True),
    ):
        assert torch.equal(of_whole[chosen], of_part)


def test_noise_is_that_of_the_key_the_sample_and_the_step() -> None:
    x = normals(0, 5, 41, dtype=torch.float32)
    arguments: dict[str, Any] = {"sigmas": linear(4), "transition": FLOW}
    whole = rollout(velocity, x, **arguments, key=key(2))
    assert torch.equal(rollout(velocity, x[:2], **arguments, key=key(2)).final, whole.final[:2])
    keys = fold_in(key(2), torch.arange(5))
    assert torch.equal(rollout(velocity, x, **arguments, key=keys).final, whole.final)
    assert not torch.equal(rollout(velocity, x, **arguments, key=key(3)).final, whole.final)
    trajectory = rollout(velocity, torch.zeros(3, 41), linear(4), transition=FLOW, key=key(0), record=Record(debug=True))
    assert trajectory.debug is not None
    noises = trajectory.debug.noise.flatten(0, 1)
    assert len({tuple(noise.tolist()) for noise in noises}) == 3 * 4
    x = normals(0, 41, 3, dtype=torch.float32)
    one, other = (rollout(velocity, start, linear(4), transition=FLOW, key=key(1)) for start in (x.T, x.T.contiguous()))
    assert torch.equal(one.final, other.final)


@every_sampler
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_the_debug_tensors_are_what_the_steps_were_made_of(row: SamplerRow, stored: torch.dtype) -> None:
    grid, steps, start = row.grid(5), [1, 3], normals(0, 3, 41, dtype=torch.float32)
    record = Record(steps, form="unscaled", dtype=stored, debug=True)
    trajectory = rollout(velocity, start, grid, transition=row.bind(0.6), key=key(1), record=record)
    debug = trajectory.debug
    assert debug is not None
    assert debug.noise.shape == debug.mean.shape == debug.velocity.shape == trajectory.x.shape == (3, 2, 41)
    assert debug.std.shape == (3, 2)
    assert torch.equal((debug.mean + debug.std[..., None] * debug.noise).to(stored), trajectory.x_next)
    for place, step in enumerate(steps):
        x = trajectory.x[:, place].float()
        sigma, sigma_next = grid[step].repeat(3), grid[step + 1].repeat(3)
        transition = row.bind(0.6)(sigma, sigma_next)
        assert torch.equal(debug.std[:, place], transition.std)
        assert torch.equal(debug.velocity[:, place], velocity(x, sigma, step))
        assert torch.equal(debug.mean[:, place], gaussian.mean(transition, x, debug.velocity[:, place]))
        if row.stochastic:
            assert torch.equal(debug.noise[:, place], normal(fold_in(fold_in(key(1), torch.arange(3)), step), (3, 41)))


def test_steps_outside_the_window_are_the_ode() -> None:
    grid = linear(6)
    x, record = normals(0, 3, 41, dtype=torch.float32), Record(range(6), form="unscaled", debug=True)
    trajectory = rollout(velocity, x, grid, transition=FLOW, key=key(1), window=[2, 3], record=record)
    assert trajectory.debug is not None
    assert (trajectory.debug.std > 0).all(0).tolist() == [False, False, True, True, False, False]
    for step in (0, 1, 4, 5):
        x, sigma = trajectory.x[:, step], grid[step].repeat(3)
        euler = x + (grid[step + 1] - grid[step]) * velocity(x, sigma, step)
        assert torch.equal(trajectory.x_next[:, step], euler)
        assert not bool(trajectory.debug.noise[:, step].any())
    # A stochastic step draws the same noise whichever window it is in.
    everywhere = rollout(velocity, torch.zeros(3, 41), grid, transition=FLOW, key=key(1), record=Record(debug=True))
    assert everywhere.debug is not None
    assert torch.equal(everywhere.debug.noise[:, 2:4], trajectory.debug.noise[:, 2:4])


@pytest.mark.parametrize("window", [None, [1, 2], range(2, 4), {3}], ids=str)
def test_by_default_the_stochastic_steps_of_the_window_are_recorded(window: list[int] | None) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 3), "sigmas": linear(4), "key": key(0), "window": window}
    inside = list(range(4)) if window is None else sorted(window)
    assert rollout(velocity, **arguments, transition=FLOW).steps.tolist() == [inside] * 2
    # The last step of cps has no noise.
    without_last = [step for step in inside if step < 3]
    if without_last:
        assert rollout(velocity, **arguments, transition=partial(cps, eta=0.5)).steps.tolist() == [without_last] * 2
    assert (
        rollout(velocity, **arguments, transition=partial(cps, eta=0.5), record=Record(form="unscaled")).steps.tolist()
        == [inside] * 2
    )


def test_recording_does_not_change_the_samples() -> None:
    x = normals(0, 3, 41, dtype=torch.float32)
    whole = rollout(velocity, x, linear(6), transition=FLOW, key=key(1))
    some = rollout(velocity, x, linear(6), transition=FLOW, key=key(1), record=[4, 1, 1])
    assert some.steps.tolist() == [[1, 4]] * 3
    for name in ("x", "x_next", "log_prob"):
        assert torch.equal(getattr(some, name), getattr(whole, name)[:, [1, 4]])
    assert torch.equal(some.final, whole.final)
    assert torch.equal(whole.x[:, 1:], whole.x_next[:, :-1])
    assert torch.equal(whole.x[:, 0], x)
    assert torch.equal(whole.x_next[:, -1], whole.final)


@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_shapes(event: tuple[int, ...], batch: int) -> None:
    x = torch.zeros(batch, *event)
    for steps in ([0, 2], []):
        got = rollout(
            velocity, x, linear(3), transition=FLOW, key=key(0), record=Record(steps, dtype=torch.bfloat16, debug=True)
        )
        S = len(steps)
        assert got.x.shape == got.x_next.shape == (batch, S, *event)
        assert got.log_prob.shape == (batch, S)
        assert got.steps.shape == (batch, S)
        assert got.final.shape == x.shape
        assert got.steps.dtype == torch.int64
        assert got.x.dtype == got.x_next.dtype == torch.bfloat16
        assert got.log_prob.dtype == torch.float32
        assert got.debug is not None  # also where nothing is recorded
        assert got.debug.noise.shape == got.debug.mean.shape == got.debug.velocity.shape == (batch, S, *event)
        assert got.debug.std.shape == (batch, S)


def test_steps_in_low_precision() -> None:
    x = normals(0, 3, 41, dtype=torch.float32)
    rounded = rollout(velocity, x, linear(6), transition=FLOW, key=key(1), record=Record(dtype=torch.bfloat16))
    assert torch.equal(rounded.x[:, 0], x.bfloat16())
    assert torch.equal(rounded.final.bfloat16().to(rounded.final.dtype), rounded.final)
    assert torch.equal(rounded.x[:, 1:], rounded.x_next[:, :-1])

    def low(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        return velocity(x, sigma, step).bfloat16()

    def upcast(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        return low(x, sigma, step).float()

    one, other = (rollout(model, x, linear(5), transition=FLOW, key=key(1)) for model in (low, upcast))
    assert one.final.dtype == torch.float32
    assert torch.equal(one.final, other.final)
    assert torch.equal(one.log_prob, other.log_prob)


@pytest.mark.parametrize("shape", [(3,), (5, 41), (2, 3, 7)], ids=str)
@pytest.mark.parametrize("window", [None, [1, 3], [2]], ids=str)
def test_noise_drawn_for_many_steps_has_the_bits_of_single_draws(
    shape: tuple[int, ...], window: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, steps = fold_in(key(1), torch.arange(shape[0])), window or range(4)
    for at_once in (1, 2 * math.prod(shape), 2**20):  # one step, two steps, all of them
        monkeypatch.setattr(fluvial.core.random, "DRAWN_AT_ONCE", at_once)
        record = Record(steps=window, debug=True)
        found = rollout(velocity, torch.zeros(shape), linear(4), transition=FLOW, key=keys, window=window, record=record)
        assert found.debug is not None
        for row, step in enumerate(steps):
            assert torch.equal(found.debug.noise[:, row], normal(fold_in(keys, step), shape))


def test_coefficients_are_computed_once_per_sampler() -> None:
    calls = []

    def counting(level: Tensor, level_next: Tensor) -> gaussian.Transition:
        calls.append(level.tolist())
        return FLOW(level, level_next)

    found = rollout(velocity, torch.zeros(2, 3), linear(4), transition=counting, key=key(1), window=[1, 2])
    assert calls == [[1.0, 0.75, 0.5, 0.25]]
    expected = FLOW(torch.tensor([0.75, 0.75]), torch.tensor([0.5, 0.5]))
    x, noise = found.x[:, 0], normal(fold_in(fold_in(key(1), torch.arange(2)), 1), (2, 3))
    v = velocity(x, torch.tensor([0.75, 0.75]), 1)
    assert torch.equal(found.x_next[:, 0], gaussian.sample(expected, x, v, noise))


@pytest.mark.parametrize(
    ("transition", "record", "window", "message"),
    [
        (partial(cps, eta=0.5), [0, 3], None, r"cps has std 0 at step 3 \(level 0.25 to 0\)"),
        (partial(cps, eta=0), [1], None, r"cps has std 0 at step 1 \(level 0.75 to 0.5\)"),
        (partial(flow_sde, eta=0, sigma_max=0.75), [0], None, "flow_sde has std 0 at step 0"),
        (ode, [2], None, "ode has std 0 at step 2"),
        (partial(dance_sde, eta=0.5), [0], [1, 2], "ode has std 0 at step 0"),
        (ode, None, None, "ode takes no stochastic step"),
        (partial(cps, eta=0.5), None, [3], "cps takes no stochastic step"),
    ],
)
def test_a_recorded_step_needs_a_density(
    transition: partial, record: list[int] | None, window: list[int] | None, message: str
) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 3), "sigmas": linear(4), "transition": transition, "key": key(0)}
    for form in FORMS[:2]:
        with pytest.raises(ValueError, match=message) as error:
            rollout(velocity, **arguments, record=Record(record, form=form), window=window)
        assert "\n" not in str(error.value)
        assert "eta > 0" in str(error.value)
        assert "unscaled" in str(error.value)
    unscaled = rollout(velocity, **arguments, record=Record(record, form="unscaled"), window=window)
    assert unscaled.log_prob.isfinite().all()


def test_a_plan_is_one_table_of_transitions() -> None:
    """The coefficients of every step and sample: the stochastic sampler's in the sample's window, the ODE's elsewhere."""
    grid, windows = linear(4), torch.tensor([[0, 1], [2, 3], [1, 2]])
    table = plan(grid, FLOW, batch=3, window=windows).table
    for step in range(4):
        for sample in range(3):
            sampler = FLOW if step in windows[sample] else ode
            for coefficient, expected in zip(table, sampler(grid[step], grid[step + 1]), strict=True):
                assert coefficient.shape == (4, 3)
                assert coefficient[step, sample] == expected
    make = partial(plan, linear(4), partial(cps, eta=0.5), batch=2)
    assert make(record=[0, 1, 2]).recorded == ((0, 1, 2),)
    assert make(record=Record(range(4), form="unscaled")).recorded == ((0, 1, 2, 3),)


def test_ddim_keeps_its_own_deterministic_steps() -> None:
    """Outside the window they are DDIM's at eta 0, which rollout is given; the ODE's would be of another schedule."""
    grid, x = torch.tensor([0.1, 0.4, 0.7, 0.95]), normal(fold_in(key(0), torch.arange(2)), (2, 5))
    mixed = rollout(
        velocity, x, grid, transition=partial(ddim, eta=0.8), key=key(1), window=[1], deterministic=partial(ddim, eta=0)
    )
    expected = x
    for step in (0, 1):
        if step == 1:
            assert torch.equal(mixed.x[:, 0], expected)
        expected = gaussian.mean(ddim(grid[step], grid[step + 1], eta=0), expected, velocity(expected, grid[step], step))


@pytest.mark.parametrize("name", ["window", "record"])
@pytest.mark.parametrize("steps", [[-1], [4], [0, 9]], ids=str)
def test_a_step_out_of_range(name: str, steps: list[int]) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 3), "sigmas": linear(4), "transition": FLOW, "key": key(0), name: steps}
    refuses(f"rollout: {name} holds steps .*expected 0 to 3", rollout, velocity, **arguments)


def counted(x: Tensor, sigma: Tensor, step: int) -> Tensor:
    """Return a velocity that depends on the number of the step, too."""
    return velocity(x, sigma, step) * (1 + step)


@pytest.mark.parametrize("window", [range(2, 5), range(3, 4), [2, 4]], ids=str)
@every_stochastic_sampler
def test_two_parts_are_the_whole(row: SamplerRow, window: list[int] | range) -> None:
    grid = row.grid(6)
    still = partial(ddim, eta=0.0) if row.name == "ddim" else ode
    run = partial(rollout, counted, sigmas=grid, transition=row.bind(0.6), deterministic=still, key=key(1))
    x = normal(key(0), (3, 5))
    whole = run(x, window=window, record=Record(velocity=True))
    first = run(x, window=(), record=(), steps=range(2))
    assert first.log_prob.shape == (3, 0)
    rest = run(first.final, window=window, record=Record(velocity=True), steps=range(2, 6))
    for one, two in zip(whole, rest, strict=True):
        assert (one is None and two is None) or torch.equal(one, two)  # type: ignore[arg-type]
    assert not torch.equal(first.final, whole.final)


@pytest.mark.parametrize(
    ("steps", "window", "said"),
    [
        (range(2, 8), [3], "steps is range(2, 8), expected a contiguous range within 0 to 6"),
        (range(0, 6, 2), [2], "expected a contiguous range"),
        (range(3, 1), [2], "expected a contiguous range"),
        (range(2, 6), [1, 3], "window holds steps [1], expected 2 to 5, the steps taken"),
        (range(2), [0, 3], "window holds steps [3], expected 0 to 1, the steps taken"),
    ],
)
def test_a_part_that_does_not_fit(steps: range, window: list[int], said: str) -> None:
    grid = STOCHASTIC[0].grid(6)
    with pytest.raises(ValueError, match="rollout: ") as raised:
        rollout(velocity, torch.ones(1, 2), grid, transition=STOCHASTIC[0].bind(0.5), key=key(0), window=window, steps=steps)
    assert said in str(raised.value)


def test_a_recorded_step_lies_within_the_part() -> None:
    run = partial(rollout, velocity, torch.ones(1, 2), linear(6), key=key(0), steps=range(4))
    step, record = partial(dance_sde, eta=0.5), Record(steps=[1, 5], form="unscaled")
    refuses(r"record holds steps \[5\], expected 0 to 3", run, transition=step, record=record)


GRID = linear(6)
WINDOWS = torch.tensor([[0, 1], [3, 4], [1, 4], [0, 1]])


def test_each_sample_follows_its_own_window() -> None:
    x, sampler, keys = (
        normals(0, 4, 3, 5, dtype=torch.float32),
        bind("flow_sde", 0.7, GRID),
        fold_in(key(1), torch.arange(4)),
    )
    together = rollout(velocity, x, GRID, transition=sampler, key=keys, window=WINDOWS)
    assert torch.equal(together.steps, WINDOWS)
    for i in range(4):
        one = fold_in(key(1), torch.tensor([i]))
        alone = rollout(velocity, x[i : i + 1], GRID, transition=sampler, key=one, window=WINDOWS[i].tolist())
        assert torch.equal(alone.final[0], together.final[i])
        assert torch.equal(alone.x[0], together.x[i])
        assert torch.equal(alone.x_next[0], together.x_next[i])
        assert torch.equal(alone.log_prob[0], together.log_prob[i])
    level, level_next = GRID[together.steps].flatten(), GRID[together.steps + 1].flatten()
    step = sampler(level, level_next)
    flat = together.x.flatten(0, 1)
    again = gaussian.log_prob(step, flat, velocity(flat, level, 0), together.x_next.flatten(0, 1))
    assert torch.equal(again, together.log_prob.flatten())


def test_nothing_is_recorded_where_nothing_is_asked_for() -> None:
    """A rollout for an objective on clean samples takes the noise of each sample's window, and records no step."""
    x, sampler = normals(0, 4, 3, dtype=torch.float32), bind("flow_sde", 0.7, GRID)
    recorded = rollout(velocity, x, GRID, transition=sampler, key=key(1), window=WINDOWS)
    without = rollout(velocity, x, GRID, transition=sampler, key=key(1), window=WINDOWS, record=())
    assert torch.equal(recorded.final, without.final)
    assert without.log_prob.shape == (4, 0)


@pytest.mark.parametrize(
    ("window", "says"),
    [
        (WINDOWS[:3], r"expected int64 \[4, S\] on the CPU"),
        (WINDOWS.float(), r"window is torch.float32"),
        (WINDOWS.flip(1), "does not rise"),
        (torch.full((4, 1), 6), r"window holds steps \[6\], expected 0 to 5"),
    ],
)
def test_a_window_per_sample_is_checked(window: Tensor, says: str) -> None:
    x, sampler = normals(0, 4, 3, dtype=torch.float32), bind("flow_sde", 0.7, GRID)
    refuses(says, rollout, velocity, x, GRID, transition=sampler, key=key(1), window=window)


def test_samples_may_not_differ_in_their_number_of_recorded_steps() -> None:
    x, ends = normals(0, 2, 3, dtype=torch.float32), torch.tensor([[0, 1], [4, 5]])
    with pytest.raises(ValueError, match=r"window holds steps \[5\], which are deterministic"):
        rollout(velocity, x, GRID, transition=lambda a, b: cps(a, b, eta=0.8), key=key(1), window=ends)
    with pytest.raises(ValueError, match=r"ode has std 0 at step 0 "):
        rollout(velocity, x, GRID, transition=bind("flow_sde", 0.7, GRID), key=key(1), window=ends, record=[0])
