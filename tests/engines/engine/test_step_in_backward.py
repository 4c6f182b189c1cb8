"""Steps within the backward pass: those of an update with all gradients, of which only one is held at a time."""

import math
import weakref
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from tiny_models import Wide, data, squared
from torch import Tensor
from torch.distributed.tensor import DTensor

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.plan.memory import Stretch, account
from fluvial.engines.run.checkpoint import checkpoint


def engine(one: World, name: Any = "adamw", *, seed: int = 0, grad_sync: Any = "step", **sharding: Any) -> Engine:
    """Return an engine over a fresh net, which clips no gradient."""
    config = OptimizerConfig(name=name, lr=0.01, ema_decay=0.9, schedule="cosine", warmup=2, max_grad_norm=1e9)
    module, sharded = Wide(seed), EngineConfig(grad_sync=grad_sync, **sharding)
    blocks = [module.first] if "checkpointing" in sharding else []
    return Engine(module, blocks, config, one, updates=8, sharding=sharded)


def steps(trained: Engine, count: int) -> list[tuple[float, float]]:
    """Take updates of one pass, and return their losses and gradient norms."""
    items, weight = data(12)
    found = [trained.update(items, squared(trained.module), weight) for _ in range(count)]
    return [(info.loss, info.grad_norm) for info in found]


def values(trained: Engine) -> dict[str, Tensor]:
    """Return the state, copied."""
    return {key: t.full_tensor().clone() for key, t in trained.state().items() if isinstance(t, DTensor)}


@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        ("adamw", {}),
        ("sgd", {}),
        ("adamw", {"masters": "bfloat16", "compute": "bfloat16"}),
        ("adamw", {"compute": "bfloat16", "checkpointing": "block"}),
    ],
    ids=str,
)
def test_the_bits_are_those_of_steps_after_the_backward_pass(one: World, name: str, sharding: dict[str, Any]) -> None:
    """Weights, moments, moving average and losses; norms to rounding."""
    stepped, expected = engine(one, name, **sharding), engine(one, name, grad_sync="last", **sharding)
    for found, other in zip(steps(stepped, 4), steps(expected, 4), strict=True):
        assert found[0] == other[0]
        assert found[1] == pytest.approx(other[1], rel=0.01 if "masters" in sharding else 1e-5)
    mine, theirs = values(stepped), values(expected)
    assert mine.keys() == theirs.keys()
    assert {key for key in theirs if not torch.equal(mine[key], theirs[key])} == set()


def test_one_gradient_is_held_at_a_time(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a parameter steps, the gradients of those before it are freed; the plan counts the largest."""
    trained = engine(one)
    alive, most = weakref.WeakSet[Tensor](), list[int]()
    real = trained._step_parameter

    def arrived(parameter: Any) -> None:
        alive.add(parameter.grad._local_tensor)
        most.append(len(alive))
        real(parameter)

    monkeypatch.setattr(trained, "_step_parameter", arrived)
    steps(trained, 2)
    assert most == [1] * 2 * len(trained.trainable)
    assert all(parameter.grad is None for parameter in trained.trainable.values())
    options: dict[str, Any] = {"optimizer": trained.config, "device": torch.device("cpu"), "ranks": 1}
    shapes = Wide().to("meta")
    paper = account(shapes, [], engine=trained.sharding, activations=[Stretch(0, 0)], **options)
    assert paper.gradients == 4 * max(p.numel() for p in shapes.parameters())
    assert paper.unsharded_gradients == 0


def test_a_run_resumes_to_the_bit(one: World, tmp_path: Path) -> None:
    told: dict[str, Any] = {"fingerprint": {}, "world": one}
    straight = engine(one, masters="bfloat16")
    steps(straight, 3)
    path = checkpoint.save(tmp_path, straight.state(), straight.counters(), update=3, keep=1, **told)
    expected = steps(straight, 3)
    resumed = engine(one, seed=1, masters="bfloat16")
    state = resumed.state()
    resumed.restore(state, checkpoint.load(path, state, **told))
    assert steps(resumed, 3) == expected


def test_the_bound_is_for_each_parameter_alone(one: World) -> None:
    """sgd without momentum moves each by at most lr times the bound."""
    config = OptimizerConfig(name="sgd", lr=1.0, betas=(0.0, 0.999), max_grad_norm=1e-3)
    trained = Engine(Wide(), config=config, world=one, updates=8, sharding=EngineConfig(grad_sync="step"))
    before = values(trained)
    steps(trained, 1)
    for name, tensor in values(trained).items():
        assert float((tensor - before[name]).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_a_gradient_that_is_not_finite_ends_the_run(one: World) -> None:
    trained = engine(one)
    items, weight = data(12)
    with pytest.raises(RunError, match=r"gradient of update 1 was not finite, and engine.grad_sync step took its steps"):
        trained.update(items, squared(trained.module), weight * math.inf)


def test_what_cannot_step_in_the_backward_pass_is_refused(one: World) -> None:
    """Several passes, an optimizer over whole matrices, and parameters that are sharded."""
    items, weight = data(12)
    trained = engine(one)
    with pytest.raises(UsageError, match=r"engine.grad_sync is 'step', expected last: an update has 3 passes"):
        trained.update(items, squared(trained.module), weight, micro_batch=5)
    with pytest.raises(UsageError, match=r"optimizer.name is 'adafactor', expected adamw or sgd: engine.grad_sync is step"):
        engine(one, "adafactor")
    with pytest.raises(UsageError, match=r"engine.grad_sync is 'step', expected last or every: parameters are sharded"):
        engine(one, offload="always")


@pytest.mark.long
def test_ranks_with_whole_copies_step_as_one_process_does(one: World) -> None:
    """Each gradient is summed over the ranks as it arrives."""
    trained = engine(one)
    steps(trained, 3)
    found = launch.on_ranks(2, "optimizers:updates_in_backward")[0]
    for key, tensor in values(trained).items():
        torch.testing.assert_close(torch.tensor(found[key]), tensor, rtol=1e-3, atol=1e-5)
