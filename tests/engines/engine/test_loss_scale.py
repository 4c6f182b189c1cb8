"""Loss scaling: powers of two change nothing in float32, float16 keeps small gradients, and an overflow skips one step."""

import math
import warnings
from typing import Any

import pytest
import torch
from helpers.tiny_models import Net, data, gather_state, squared

from fluvial.engines.engine import engine as engines
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World


def build(one: World, compute: Any = "float16") -> Engine:
    net = Net()
    config = OptimizerConfig(lr=0.01, max_grad_norm=0.1, eps=1e-14)
    return Engine(net, list(net.blocks), config, one, updates=9, sharding=EngineConfig(compute=compute))


def update(engine: Engine, factor: float = 1.0) -> Any:
    """Take an update on a loss times a factor."""
    items, weight = data(5)
    return engine.update(items, squared(engine.module), factor * weight, count=5, micro_batch=2, pad_to=5)


@pytest.mark.parametrize("power", [-20, 5, 16])
def test_powers_of_two_change_no_bit_in_float32(one: World, power: int) -> None:
    """Of losses, norms, clipped steps and moments; also through `backward` and `step`."""
    plain, scaled = build(one, "float32"), build(one, "float32")
    assert plain.scale == 1
    scaled.scale = 2.0**power
    for _ in range(3):
        assert update(scaled)._replace(memory=()) == update(plain)._replace(memory=())
    for each in (plain, scaled):
        items = data(5)[0]
        each.backward([lambda each=each, items=items: squared(each.module)(items)[0].sum()])  # type: ignore[misc]
        each.step()
    assert same(scaled, plain)


def same(left: Engine, right: Engine) -> bool:
    found, expected = gather_state(left), gather_state(right)
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_small_gradients_are_kept_in_float16(one: World) -> None:
    """Those of 1e-9 are 0 in float16 without a scale, and to rounding those of float32 with it."""
    norms = {}
    for name, compute, scale in (("exact", "float32", 1.0), ("scaled", "float16", 2.0**16), ("plain", "float16", 1.0)):
        engine = build(one, compute)
        engine.scale = scale
        norms[name] = update(engine, 1e-8).grad_norm
    assert norms["scaled"] == pytest.approx(norms["exact"], rel=2e-2)
    assert norms["plain"] < 0.5 * norms["exact"]


def test_the_scale_follows_torchs(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through overflows and growth; an overflow leaves weights and moments alone, is said, and a resumed engine goes on."""
    monkeypatch.setattr(engines, "GROWTH_INTERVAL", 3)
    engine, theirs = build(one), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    assert engine.scale == theirs.get_scale()
    for number, overflows in enumerate([False, True, True, False, False, False, False, True, False], start=1):
        before = gather_state(engine)
        if overflows:
            with pytest.warns(
                UserWarning, match=rf"update {number}: the gradient overflowed, .* scale is {engine.scale / 2:g} now"
            ):
                info = update(engine, math.inf)
            found = gather_state(engine)
            assert info.skipped
            assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
        else:
            assert not update(engine).skipped
        theirs.scale(weight.sum() * (math.inf if overflows else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert engine.scale == theirs.get_scale()
    assert (engine.skipped, engine.skipped_in_a_row) == (3, 0)
    resumed = build(one)
    resumed.restore(engine.state(), engine.counters())
    assert resumed.counters() == engine.counters()
    for each in (engine, resumed):
        update(each)
    assert same(resumed, engine)


def test_a_scale_of_one_is_not_the_cause(one: World) -> None:
    """Then a gradient that is never finite ends the run, as in other dtypes; no record of them holds a scale."""
    engine = build(one)
    engine.scale = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(10):
            update(engine, math.inf)
        with pytest.raises(engines.RunError, match="not finite in 10 updates in a row"):
            update(engine, math.inf)
    assert engine.scale == 1
    assert "scale" not in build(one, "bfloat16").counters()
