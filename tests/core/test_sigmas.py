"""Schedules against their formulas and against diffusers, and windows of stochastic steps."""

import math
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from helpers.refusals import refuses
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fluvial.core.random import fold_in, key
from fluvial.core.sigmas import (
    check_sigmas,
    dynamic_shift,
    from_scheduler,
    linear,
    moving_window,
    sde_window,
    shifted,
    shifted_twice,
)

steps = st.integers(1, 60)
shifts = st.floats(0.1, 10)
EPS = torch.finfo(torch.float32).eps


def is_schedule(sigmas: torch.Tensor, T: int) -> bool:
    check_sigmas(sigmas)
    return sigmas.shape == (T + 1,) and sigmas.dtype == torch.float32 and [sigmas[0].item(), sigmas[-1].item()] == [1, 0]


@given(T=steps)
def test_linear(T: int) -> None:
    assert is_schedule(linear(T), T)
    assert_close(linear(T).double(), torch.tensor([1 - i / T for i in range(T + 1)]).double(), rtol=EPS, atol=EPS / 2)


@given(T=steps, shift=shifts)
def test_shifted_is_the_formula(T: int, shift: float) -> None:
    assert is_schedule(shifted(T, shift), T)
    assert torch.equal(shifted(T, 1), linear(T))
    want = [shift * s / (1 + (shift - 1) * s) for s in (1 - i / T for i in range(T + 1))]
    assert_close(shifted(T, shift).double(), torch.tensor(want).double(), rtol=2 * EPS, atol=1e-12)


@given(T=steps, seq_len=st.integers(256, 8192), kind=st.sampled_from(("exponential", "linear")))
def test_dynamic_shift_is_that_of_diffusers(T: int, seq_len: int, kind: Literal["exponential", "linear"]) -> None:
    # Pipelines of FLUX and Qwen-Image pass the unshifted levels themselves.
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=kind)
    mu = 0.5 + (seq_len - 256) * (1.15 - 0.5) / (4096 - 256)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / T, T).tolist(), mu=mu)
    assert_close(dynamic_shift(T, seq_len, kind=kind), scheduler.sigmas, rtol=0, atol=1e-6)


def test_dynamic_shift_takes_a_models_own_numbers() -> None:
    numbers: dict[str, Any] = {"base_seq_len": 100, "max_seq_len": 900, "base_shift": 0.3, "max_shift": 0.9}
    assert_close(dynamic_shift(8, 500, **numbers), shifted(8, math.exp(0.6)))
    assert_close(dynamic_shift(8, 500, **numbers, kind="linear"), shifted(8, 0.6))


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"num_inference_steps": 10}),
    "shift 3": ({"shift": 3.0}, {"num_inference_steps": 28}),
    "one step": ({}, {"num_inference_steps": 1}),
    "given sigmas": ({"shift": 3.0}, {"sigmas": [1.0, 0.75, 0.5, 0.25]}),
    "exponential mu": ({"use_dynamic_shifting": True}, {"num_inference_steps": 9, "mu": 0.8}),
    "linear mu": ({"use_dynamic_shifting": True, "time_shift_type": "linear"}, {"num_inference_steps": 9, "mu": 0.8}),
    "shift_terminal": ({"shift_terminal": 0.1, "shift": 2.0}, {"num_inference_steps": 7}),
    "karras": ({"use_karras_sigmas": True}, {"num_inference_steps": 7}),
    "exponential": ({"use_exponential_sigmas": True}, {"num_inference_steps": 7}),
}


@pytest.mark.parametrize(("config", "call"), CONFIGS.values(), ids=CONFIGS.keys())
def test_from_scheduler_is_exact(config: dict[str, Any], call: dict[str, Any]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(**call)
    sigmas = from_scheduler(scheduler)
    assert sigmas.dtype == torch.float32
    assert torch.equal(sigmas, scheduler.sigmas)
    # The scheduler really walks these levels: with output 1 and sample 0 it returns the step it took.
    zero = torch.zeros(1)
    walked = [scheduler.step(torch.ones(1), t, zero, return_dict=False)[0] for t in scheduler.timesteps]
    assert torch.equal(torch.cat(walked), sigmas[1:] - sigmas[:-1])


def test_from_scheduler_wants_a_schedule() -> None:
    refuses("set_timesteps", from_scheduler, FlowMatchEulerDiscreteScheduler())
    rising = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    rising.set_timesteps(4)
    refuses("expected from at most 1 down to exactly 0", from_scheduler, rising)


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        (torch.tensor(0.0), "shape"),
        (torch.zeros(2, 2, 2), "shape"),
        (torch.zeros(1), "shape"),
        (torch.tensor([1.5, 0.5, 0.0]), "run from 1.5 to 0"),
        (torch.tensor([1.0, 0.5]), "run from 1 to 0.5"),
        (torch.tensor([1.0, torch.nan, 0.0]), "run from"),
        (torch.tensor([1.0, 0.5, 0.7, 0.0]), r"rise at step 1 \(0.5 to 0.7\)"),
        (torch.tensor([1.0, 0.5, 0.5, 0.0]), "rise at step 1"),
    ],
)
def test_check_sigmas(sigmas: torch.Tensor, message: str) -> None:
    refuses(message, check_sigmas, sigmas)


@given(seed=st.integers(0, 2**64 - 1), data=st.data())
def test_a_window_is_contiguous_and_within_range(seed: int, data: st.DataObject) -> None:
    T = data.draw(steps)
    lo = data.draw(st.integers(0, T - 1))
    hi = data.draw(st.integers(lo + 1, T))
    size = data.draw(st.integers(1, hi - lo))
    window = sde_window(key(seed), T, size, lo, hi)
    assert (window.step, len(window)) == (1, size)
    assert lo <= window.start
    assert window.stop <= hi
    assert window == sde_window(key(seed), T, size, lo, hi)
    if hi == T:
        assert window == sde_window(key(seed), T, size, lo)


def test_windows_are_uniform() -> None:
    # 9 starts, 1,800 keys: chi-square with 8 degrees of freedom exceeds 26.1 once in a thousand fixed keys.
    starts = [sde_window(fold_in(key(0), i), 12, 3, 1).start for i in range(1800)]
    counts = [starts.count(start) for start in range(1, 10)]
    assert sum(counts) == len(starts)
    assert sum((count - 200) ** 2 / 200 for count in counts) < 26.1


@pytest.mark.parametrize(
    ("T", "size", "lo", "hi", "message"),
    [
        (4, 0, 0, None, "size is 0, expected 1 to 4"),
        (4, 5, 0, None, "size is 5, expected 1 to 4"),
        (4, 3, 1, 3, "size is 3, expected 1 to 2"),
        (4, 1, 4, None, "steps 4 to 4"),
        (4, 1, -1, None, "steps -1 to 4"),
        (4, 1, 0, 5, "steps 0 to 5"),
        (4, 1, 3, 2, "steps 3 to 2"),
    ],
)
def test_an_impossible_window(T: int, size: int, lo: int, hi: int | None, message: str) -> None:
    refuses(message, sde_window, key(0), T, size, lo, hi)


@given(T=st.integers(2, 60), shift=shifts)
def test_the_shift_of_sd3_is_diffusers(T: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(T)
    assert is_schedule(shifted_twice(T, shift), T)
    assert_close(shifted_twice(T, shift), scheduler.sigmas, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(shifted_twice(T, shift), shifted(T, shift), atol=1e-4)


@given(T=st.integers(2, 60), seq_len=st.integers(256, 8192), terminal=st.floats(0.005, 0.2))
def test_a_terminal_level_is_diffusers(T: int, seq_len: int, terminal: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=terminal)
    mu = 0.5 + (seq_len - 256) * (1.15 - 0.5) / (4096 - 256)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / T, T).tolist(), mu=mu)
    found = dynamic_shift(T, seq_len, shift_terminal=terminal)
    assert is_schedule(found, T)
    assert_close(found, scheduler.sigmas, rtol=1e-5, atol=1e-6)
    assert float(found[-2]) == pytest.approx(terminal, rel=1e-5)


def test_schedules_of_one_step_have_no_ends_to_space() -> None:
    refuses("T is 1, expected at least 2", shifted_twice, 1, 3.0)
    refuses("T is 1, expected at least 2", dynamic_shift, 1, 1024, shift_terminal=0.02)


def places(rollouts: int, *args: int, **options: float) -> list[tuple[int, int]]:
    starts = [moving_window(done, *args, **options).start for done in range(rollouts)]  # type: ignore[arg-type]
    return [(start, len(list(same))) for start, same in groupby(starts)]


def test_a_progressive_window() -> None:
    """MixGRPO's: 4 of 25 steps within 0 to 22, one step further every 25 rollouts; 300 rollouts reach start 11."""
    assert places(300, 25, 4, 0, 23, every=25) == [(start, 25) for start in range(12)]
    assert moving_window(0, 25, 4, 0, 23, every=25) == range(4)
    assert moving_window(25 * 20, 25, 4, 0, 23, every=25) == range(4)  # start 19 was the last that fits


def test_a_stride_and_the_last_position() -> None:
    assert places(14, 10, 4, every=2, stride=3) == [(0, 2), (3, 2), (6, 2), (0, 2), (3, 2), (6, 2), (0, 2)]
    assert places(12, 10, 4, every=2, stride=3, repeat=False) == [(0, 2), (3, 2), (6, 8)]


def test_an_exponential_decay() -> None:
    """A start beyond the threshold stays for ceil(every exp(-k (start - threshold))) rollouts."""
    stays = [5 if start <= 2 else math.ceil(5 * math.exp(-0.5 * (start - 2))) for start in range(6)]
    assert places(sum(stays), 8, 3, every=5, decay=0.5, decay_from=2) == list(enumerate(stays))
    assert stays[-1] == 2


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1, "stride": 0}])
def test_a_window_that_cannot_move(options: dict[str, Any]) -> None:
    refuses("expected at least 1", moving_window, 0, 8, 3, **options)
    refuses("moving_window: size is 9", moving_window, 0, 8, 9, every=1)
