"""GPU hours of a run, as computed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fluvial.engines.cli.train import configure
from fluvial.engines.extensions.plan.hours import PEAK, SHARE, count_pass, count_run
from fluvial.engines.extensions.published.resolve import resolve
from fluvial.engines.extensions.published.runs import find_run
from fluvial.engines.run.config import with_values
from fluvial.engines.run.recipes import RECIPES
from fluvial.models.flops import FlopCounter
from fluvial.models.lora import LoraConfig
from fluvial.models.shapes import ModelShape, PassShape, find_model_shape

PAGE = Path(__file__).parents[4] / "engines" / "extensions" / "published" / "README.md"


def test_a_pass_is_what_is_counted_with_values() -> None:
    """The backward pass of a full fine-tuning counts twice the forward one, but for the first layers; of adapters less."""
    shape = find_model_shape("handwriting")
    assert isinstance(shape, ModelShape)
    module = shape.build()
    with FlopCounter() as counter, torch.no_grad():
        module(**{name: torch.zeros_like(each, device="cpu") for name, each in shape.inputs(1, 0).items()})
    full, adapters = (count_pass("handwriting", adapts, LoraConfig(rank=2), PassShape(0)) for adapts in (False, True))
    assert full[0] == counter.model
    assert 2.7 * full[0] < full[1] <= 3.3 * full[0]
    assert 1.5 * adapters[0] < adapters[1] < full[1]


def test_operations_of_a_run_are_those_of_its_passes() -> None:
    """Of samples and steps, both halves of guidance, each recorded step once per epoch, and the networks beside it."""
    run = with_values(RECIPES["grpo"]("handwriting"), {"updates": 20})
    sampling, halves = run.method.sampling, 1 + (run.method.sampling.guidance.scale != 1)
    forward, both = count_pass("handwriting", run.train == "lora", run.lora, PassShape(0))
    found, samples = count_run(run, "handwriting"), sampling.batch * 20 / run.updates_per_rollout
    rows: Any = run.method.rows
    pairs = samples * rows.trained.count(sampling.window.count(sampling.steps))
    assert found.rollouts == samples * sampling.steps * forward * halves
    assert found.updates == pairs * halves * both
    assert found.hours == pytest.approx((found.rollouts + found.updates) / (PEAK * SHARE * 3600))
    guarded = with_values(run, {"kl.coef": 0.1})
    assert count_run(guarded, "handwriting").updates == pairs * halves * (both + forward)
    assert count_run(with_values(run, {"updates": 40}), "handwriting").hours == pytest.approx(2 * found.hours)


@pytest.mark.long
def test_hours_of_the_page_are_those_of_the_plan() -> None:
    """And where a source states hours, the network alone takes less."""
    commands = re.findall(r"^fluvial train (.+(?:\\\n.+)*?) +# (\d+)", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 10
    for command, hours in commands:
        words = command.replace("\\\n", " ").replace("--processes 8", "").split()
        run = configure("config", words)
        assert f"{count_run(run, run.model).hours:.0f}" == hours, command
    for name, most in (("dancegrpo/flux.1-dev/hpsv2-16gpu", 12 * 16), ("dancegrpo/flux.1-dev/hpsv2-8gpu", 24 * 8)):
        run = resolve(find_run(name))
        assert most / 10 < count_run(run, run.model).hours < most
