"""Gradients of a reward through the last steps of a rollout."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from torch import Tensor

from fluvial.core.random import key
from fluvial.engines.engine.world import World
from fluvial.engines.methods.table import AlignProp
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.sampling.backprop import number_of_steps
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.models.handwriting import likeness, load_digits


def smooth(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return a reward whose gradient is nowhere 0."""
    return images.flatten(1).mean(1)


def configured(out: Path, objective: AlignProp, **changes: Any) -> TrainConfig:
    """Return a run on 4 steps."""
    rollout = SamplingConfig(**{"prompts": 4, "group": 1, "steps": tiny.STEPS, **changes})
    return tiny.config(out, method=objective, sampling=rollout, train="lora", **{"engine.micro_batch": 2})


SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ode": ("velocity", {"sampler": Ode()}),
    "flow_sde": ("velocity", {"sampler": Stochastic("flow_sde", eta=0.7)}),
    "cps": ("velocity", {"sampler": Stochastic("cps", eta=0.7)}),
    "ddim": ("epsilon", {"sampler": Stochastic("ddim", eta=1.0)}),
}


@pytest.mark.parametrize("last", [1, 3, tiny.STEPS])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_last_steps_lead_to_the_samples_of_the_rollout(one: World, tmp_path: Path, sampler: str, last: int) -> None:
    """Before the policy moves, the loss is minus the mean reward of the rollout, with the same noise in each step."""
    prediction, settings = SAMPLERS[sampler]
    run = tiny.Run(
        configured(tmp_path, AlignProp(last=last), **settings), one, tiny.job(prediction, rewards={"smooth": smooth})
    )
    record = run.rollout()
    assert run.infos[0].loss == pytest.approx(-record["reward"]["mean"], abs=1e-6)
    assert run.infos[0].items == 4
    assert run.infos[0].grad_norm > 0


def test_a_reward_without_a_gradient_is_an_error_of_one_line(one: World, tmp_path: Path) -> None:
    """It names the reward."""

    def counted(images: Tensor, prompts: Sequence[str]) -> list[float]:
        return [1.0] * len(images)

    config = configured(tmp_path, AlignProp(last=1), sampler=Ode())
    run = tiny.Run(config, one, tiny.job(rewards={"counted": counted}))
    refuses("reward 'counted' gives no gradient, and alignprop follows it", run.rollout)


def test_the_number_of_steps_is_drawn_within_the_schedule() -> None:
    """About its usual value, the same for the same key, and at least 1."""
    assert number_of_steps(key(0), 50, last=8, spread=0.0) == 8
    drawn = [number_of_steps(key(seed), 50, last=8, spread=5.0) for seed in range(200)]
    assert drawn == [number_of_steps(key(seed), 50, last=8, spread=5.0) for seed in range(200)]
    assert 1 <= min(drawn) < max(drawn) < 50
    assert abs(sum(drawn) / len(drawn) - 8.7) < 1.5  # int() rounds towards more steps, and 0 is left out
    assert 3 < math.sqrt(sum((n - 8.7) ** 2 for n in drawn) / len(drawn)) < 6


def test_likeness_recognises_the_digits_that_are_written() -> None:
    """Images in [0, 1] of unseen digits are likeliest under their own code, and have a gradient."""
    half, wanted = load_digits("evaluation"), "0123456789" * 6
    places = [half.starts[int(digit)] + number // 10 for number, digit in enumerate(wanted)]
    rows = ((half.pixels[torch.stack(places)].reshape(-1, 4, 8, 8) + 1) / 2).transpose(1, 2).reshape(-1, 1, 8, 32)
    image = rows.clone().requires_grad_()
    found = torch.stack([likeness(image, [digit * 4] * len(rows)) for digit in "0123456789"])
    one = [wanted[4 * number : 4 * number + 4] for number in range(len(rows))]
    right = likeness(image, one)
    assert found.shape == (10, len(rows))
    assert float(right.detach().exp().mean()) > 0.8
    assert bool((right > found.max(0).values).all())  # no other digit in all four places
    right.sum().backward()
    assert image.grad is not None
    assert bool(torch.isfinite(image.grad).all())
    assert bool((image.grad.flatten(1).norm(dim=1) > 0).all())
