"""Ranks that share the tokens of a sample take the update of a single process, and return whole velocities."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch, tiny_transformers

from fluvial.engines.engine.engine import Engine, OptimizerConfig
from fluvial.engines.engine.world import World


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 ranks"), pytest.param(4, id="4 ranks", marks=pytest.mark.long)]
)
def ranks(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    """Return the number of ranks, in pairs, and the result of their updates."""
    return request.param, launch.on_ranks(request.param, "workers.context:updates")[0]


@pytest.mark.parametrize("lies", tiny_transformers.LIES)
@pytest.mark.parametrize("model", tiny_transformers.MODELS)
def test_loss_and_gradients_are_those_of_one_process(
    ranks: tuple[int, dict[str, Any]], one: World, model: str, lies: str
) -> None:
    """Velocities, loss, and every gradient."""
    size, result = ranks
    build, velocity = tiny_transformers.MODELS[model]
    net, items, found = build(), tiny_transformers.data(), result[model][lies]
    with torch.no_grad():
        whole = velocity(net, items)
    engine = Engine(net, tiny_transformers.blocks(net), OptimizerConfig(lr=0.01), one, updates=1)
    info = engine.update(items, tiny_transformers.loss_of(velocity, net), micro_batch=2)
    assert found["info"]["items"] == tiny_transformers.ITEMS
    assert found["info"]["loss"] == pytest.approx(info.loss, rel=1e-5)
    assert found["info"]["grad_norm"] == pytest.approx(info.grad_norm, rel=1e-5)
    assert found["info"]["flops"] < info.flops
    copies = torch.tensor(found["velocity"]).reshape(size // 2, 2, -1, *whole.shape[1:])
    assert torch.equal(copies[:, 0], copies[:, 1])  # every rank of a pair has the same, so its log-probs have
    torch.testing.assert_close(copies[:, 0].flatten(0, 1), whole, rtol=1e-5, atol=1e-5)
    for name, gradient in tiny_transformers.gradients(engine).items():
        torch.testing.assert_close(torch.tensor(found["gradients"][name]), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", tiny_transformers.MODELS)
def test_tokens_that_do_not_divide_are_refused(ranks: tuple[int, dict[str, Any]], model: str) -> None:
    """By the name of the input and its number of tokens."""
    _, result = ranks
    assert "context_parallel is 2: encoder_hidden_states has 3 tokens" in result[model]["odd"]


@pytest.mark.long
def test_training_with_split_samples_is_training_without(tmp_path: Path) -> None:
    """Rollout, reward and update, with guidance and a KL, on 1 rank and on a pair."""
    found = {ranks: launch.on_ranks(ranks, "workers.split:updates", tmp_path)[0] for ranks in (1, 2)}
    for train, expected in found[1].items():
        split = found[2][train]
        assert split["pairs"] == expected["pairs"] == [16, 16]
        assert split["ratios"] == expected["ratios"] == [0.0, 0.0]
        for reward, one in zip(split["rewards"], expected["rewards"], strict=True):
            assert reward == pytest.approx(one, rel=1e-4)
        assert split["norms"] == pytest.approx(expected["norms"], rel=1e-3)
        for name, gradient in expected["gradient"].items():
            torch.testing.assert_close(torch.tensor(split["gradient"][name]), torch.tensor(gradient), rtol=1e-3, atol=1e-5)
