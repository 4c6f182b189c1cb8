"""The moving average: its equation over any tree, its ends, and what it leaves alone."""

from typing import Any

import torch
from helpers.tables import normals
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fluvial.core import ema


def tree(seed: int) -> dict[str, Any]:
    return {"a": normals(seed, 41), "b": [normals(seed + 1, 3, 5), (normals(seed + 2),)]}


@given(decay=st.floats(0, 1))
def test_update_is_the_equation_over_a_tree(decay: float) -> None:
    average, params = tree(0), tree(10)
    got = ema.update(average, params, decay)
    assert list(got) == ["a", "b"]
    for new, old, param in (
        (got["a"], average["a"], params["a"]),
        (got["b"][0], average["b"][0], params["b"][0]),
        (got["b"][1][0], average["b"][1][0], params["b"][1][0]),
    ):
        assert_close(new, decay * old + (1 - decay) * param, rtol=1e-14, atol=1e-14)


def test_the_ends_are_exact() -> None:
    average, params = {"w": normals(0, 1271, dtype=torch.float32)}, {"w": normals(1, 1271, dtype=torch.float32)}
    assert torch.equal(ema.update(average, params, 1)["w"], average["w"])
    assert torch.equal(ema.update(average, params, 0)["w"], params["w"])
    assert torch.equal(ema.update(params, params, 0.37)["w"], params["w"])


def test_nothing_is_shared_changed_or_tracked() -> None:
    params = {"w": normals(0, 5).requires_grad_()}
    average = ema.init(params)
    before = params["w"].detach().clone()
    updated = ema.update(average, params, 0.5)
    assert not average["w"].requires_grad
    assert not updated["w"].requires_grad
    with torch.no_grad():
        params["w"].add_(1)
    assert torch.equal(average["w"], before)
    assert torch.equal(updated["w"], before)
    params = {"w": torch.ones(3, dtype=torch.bfloat16), "u": torch.ones(3, dtype=torch.float64)}
    got = ema.update(ema.init(params), params, 0.5)
    assert (got["w"].dtype, got["u"].dtype) == (torch.bfloat16, torch.float64)


def test_the_warm_up() -> None:
    assert ema.warm_up_decay(0.9999, 0) == 1 / 10
    assert ema.warm_up_decay(0.9999, 90) == 91 / 100
    assert ema.warm_up_decay(0.9999, 10**9) == 0.9999
    assert ema.warm_up_decay(0.05, 0) == 0.05
    decays = [ema.warm_up_decay(0.99, n) for n in range(2000)]
    assert decays == sorted(decays)
