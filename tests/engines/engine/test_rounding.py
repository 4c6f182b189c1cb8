"""Trained weights in bfloat16: rounded stochastically without bias, by draws that neither ranks nor restarts change."""

import math
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.tiny_models import Net, Wide, data, gather_state, squared, take_updates

from fluvial.core.random import bits, fold_in, key
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.optimizers import round_stochastically, write_rounded
from fluvial.engines.engine.world import World
from fluvial.engines.extensions.plan.check import measure
from fluvial.engines.extensions.plan.memory import ActivationSpan, account

HALF = EngineConfig(masters="bfloat16")


def engine(one: World, name: Any = "adamw", *, seed: int = 0, sharding: EngineConfig = HALF, **config: Any) -> Engine:
    """Return an engine over a fresh net."""
    values: dict[str, Any] = {"lr": 0.01, "ema_decay": 0.9, **config}
    return Engine(Wide(seed), config=OptimizerConfig(name=name, **values), world=one, updates=20, sharding=sharding)


@pytest.mark.parametrize("value", [1.0 + 2**-10, -3.14159, 1e-30, 65504.0, 2**-133])
def test_the_mean_is_the_value(value: float) -> None:
    """To five standard errors of draws that round to one of the two neighbours; a value of bfloat16 stays as it is."""
    count = 2**16
    x = torch.full((count,), value)
    found = round_stochastically(x, bits(key(1), (count,)))
    assert found.dtype == torch.bfloat16
    neighbours = found.unique().double()
    assert len(neighbours) <= 2
    distance = float(neighbours[-1] - neighbours[0])
    assert abs(float(found.double().mean()) - float(x[0].double())) <= 5 * distance / 2 / math.sqrt(count)
    exact = x.bfloat16().float()
    assert torch.equal(round_stochastically(exact, bits(key(2), (count,))).float(), exact)


def test_infinities_and_nan_stay() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan])
    found = round_stochastically(x, torch.full((3,), 0xFFFF))
    assert found[:2].tolist() == [math.inf, -math.inf]
    assert found[2].isnan()


def test_steps_below_half_the_distance_of_neighbours_add_up() -> None:
    """1000 steps of 1e-4 from 1, whose neighbour is 2^-7 above: rounding to the nearest would stay at 1."""
    weight = torch.ones(64, 4, dtype=torch.bfloat16)
    for step in range(1000):
        write_rounded(weight, weight.float() + 1e-4, fold_in(key(0), step), row=0)
    error = 5 * math.sqrt(1000 * 1e-4 * 2**-7 / weight.numel())
    assert float(weight.double().mean()) == pytest.approx(1.1, abs=error)
    assert torch.ones(1).bfloat16() + 1e-4 == 1


def test_a_draw_depends_on_the_row_alone() -> None:
    """Not on how the rows are dealt to ranks, nor on how many are drawn at once."""
    value, whole = torch.randn(7, 30), torch.zeros(7, 30, dtype=torch.bfloat16)
    write_rounded(whole, value, key(5), row=0)
    for first, last in ((0, 3), (3, 7)):
        part = torch.zeros(last - first, 30, dtype=torch.bfloat16)
        write_rounded(part, value[first:last], key(5), row=first)
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_training_is_that_of_float32_weights_to_rounding(one: World, name: str) -> None:
    """Moments and the moving average stay in float32."""
    half = engine(one, name, lr=0.05)
    losses = take_updates(half, 12)
    assert losses[-1] < 0.8 * losses[0]
    dtypes = {key.split(".")[0]: tensor.dtype for key, tensor in half.state().items()}
    assert dtypes.pop("weight") == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in half.weights(average=False))
    full = engine(one, name, lr=0.05, sharding=EngineConfig())
    for mine, expected in zip(losses, take_updates(full, 12), strict=True):
        assert mine == pytest.approx(expected, rel=0.1)


def test_draws_follow_from_the_number_of_the_update(one: World) -> None:
    trained, again = engine(one), engine(one)
    again.updates = 1  # draws of other updates
    for each in (trained, again):
        take_updates(each, 3)
    assert not torch.equal(gather_state(again)["weight.first.weight"], gather_state(trained)["weight.first.weight"])


@pytest.mark.long
def test_ranks_round_as_one_process_does(one: World) -> None:
    """Each row alike, so weights differ by the rounding of gradients alone."""
    trained = engine(one)
    take_updates(trained, 3)
    expected = gather_state(trained)
    found = launch.on_ranks(3, "workers.ranks:step_in_bfloat16")[0]
    weight = torch.tensor(found["weight.first.weight"])
    assert (weight == expected["weight.first.weight"].float()).float().mean() > 0.95


@pytest.mark.parametrize("lies", [{}, {"comm": "reshard"}, {"compute": "bfloat16", "reduce": "bfloat16"}], ids=str)
def test_the_plan_knows_the_bytes(one: World, lies: dict[str, Any]) -> None:
    """To the byte: half of the weights and of the gradients."""
    sharding, config = EngineConfig(masters="bfloat16", **lies), OptimizerConfig(ema_decay=0.9)
    shapes = Net().to("meta")
    options: dict[str, Any] = {"optimizer": config, "engine": sharding, "device": torch.device("cpu"), "ranks": 1}
    paper = account(shapes, list(shapes.blocks), activations=[ActivationSpan(0, 0)], **options)
    module = Net()
    made = Engine(module, list(module.blocks), config, one, updates=5, sharding=sharding)
    items, weight = data(6)
    measured = measure(made, items, weight, squared(module), micro_batch=2)
    for kind in ("parameters", "buffers", "moments", "average"):
        assert paper._asdict()[kind] == measured._asdict()[kind], kind
    assert paper.parameters == 2 * sum(p.numel() for p in shapes.parameters())
    assert paper.gradients == paper.parameters
