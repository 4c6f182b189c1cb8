"""Properties of methods: the built-in ones have them, methods with a fault lack the property that it breaks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import long
from torch import Tensor
from workers.objective_ranks import RUNS

from fluvial.core.random import Key
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.methods import ErrorInfo, Grpo, Method, NoisingConfig
from fluvial.engines.methods.table import Dpo
from fluvial.engines.run.run import Run
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.engines.sampling.samplers import Ode
from fluvial.kernels import velocity_error
from fluvial.testing import PROPERTIES, check_method
from fluvial.testing.methods import is_the_same_on_two_ranks

ALONE = [name for name in PROPERTIES if name != is_the_same_on_two_ranks.__name__]
# Two teachers need a job whose prompts have sources; a correction takes a ratio that is not 1.
BUILT_IN = [name for name in RUNS if name not in ("distill by source", "correction")]


@pytest.mark.parametrize("name", [long(name) for name in BUILT_IN])
def test_built_in_methods_have_every_property(one: World, name: str) -> None:
    changes = dict(RUNS[name])
    check_method(changes.pop("method", Grpo()), ALONE, world=one, **changes)


@dataclass(frozen=True)
class Weighted(Method):
    """Fits samples by their reward; a fault can be chosen."""

    sampling: SamplingConfig = SamplingConfig(prompts=2, group=4, steps=4, sampler=Ode())
    noising: NoisingConfig = NoisingConfig()
    fault: str = ""
    seen: list[int] = field(default_factory=list, compare=False)

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Weigh samples by their reward."""
        self.seen.append(1)
        weight = run.grade(batch).reward * (len(self.seen) if self.fault == "memory" else self.fault != "nothing")
        weight = weight * (1 + run.world.rank * (self.fault == "rank"))
        for part in run.minibatches(run.noise_samples(batch, self.noising, key, weight), key, self.passes):
            yield run.update(part, self.loss)

    def loss(self, v: Tensor, items: NoisedSamples) -> tuple[Tensor, ErrorInfo]:
        """Return the weighted error."""
        error = velocity_error(v, items.target)
        signal = items.signal - (items.signal.mean() if self.fault == "pass" else 0)
        return signal * error, ErrorInfo(error.detach(), torch.zeros_like(error))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", None),
        ("nothing", r"the first update has a gradient of norm 0, expected"),
        ("memory", r"a resumed run has the loss .*: what a method remembers between batches belongs to `run.state`"),
        ("pass", r"the gradient differs by .* of its norm, .*: the loss of a row depends on other rows"),
    ],
)
def test_a_fault_lacks_a_property(one: World, fault: str, words: str | None) -> None:
    if words is None:
        check_method(Weighted(), ALONE, world=one)
        return
    with pytest.raises(AssertionError, match=words) as refused:
        check_method(Weighted(fault=fault), ALONE, world=one)
    assert "\n" not in str(refused.value).partition("\nassert")[0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [long(""), long("rank")])
def test_ranks_are_started_for_a_method_of_a_test_file(one: World, fault: str) -> None:
    """This file is on no path of theirs."""
    method = Weighted(fault=fault)
    if not fault:
        check_method(method, [is_the_same_on_two_ranks.__name__], world=one)
        return
    with pytest.raises(AssertionError, match=r"differs by .* on 2 ranks: take statistics over all of them"):
        check_method(method, [is_the_same_on_two_ranks.__name__], world=one)


def test_what_cannot_be_checked_is_said(one: World) -> None:
    """A property of no name, a method of given preferences, and one that other processes cannot import."""

    @dataclass(frozen=True)
    class Local(Weighted):
        pass

    for method, properties, words in (
        (Weighted(), ["learn"], "properties is 'learn', expected one of learns"),
        (Dpo(preferences=Path("pairs")), ALONE, "dpo learns from the folder pairs, and check_method has none"),
        (Local(), [is_the_same_on_two_ranks.__name__], "cannot be sent to other ranks: define it in a module"),
    ):
        checked: Any = method
        with pytest.raises(UsageError, match=words):
            check_method(checked, properties, world=one)
