"""Ranks that share the tokens of a sample take the update of a single process, and return whole velocities."""

from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers import launch, tiny_transformers
from helpers.refusals import refuses

from fluvial.engines.attention import split_tokens
from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.models.tiny.modular import _read_rows


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
    size, result = ranks
    check(result, one, model, lies, size=size, degree=2)


def check(result: dict[str, Any], one: World, model: str, lies: str, *, size: int, degree: int) -> None:
    """Assert that velocities, loss, and every gradient are those of one process."""
    build, velocity = tiny_transformers.WITH_VIDEO[model]
    net, items, found = build(), tiny_transformers.data(), result[model][lies]
    with torch.no_grad():
        whole = velocity(net, items)
    engine = Engine(net, tiny_transformers.blocks(net), OptimizerConfig(lr=0.01), one, updates=1)
    info = engine.update(items, tiny_transformers.loss_of(velocity, net), micro_batch=2)
    assert found["info"]["items"] == tiny_transformers.ITEMS
    assert found["info"]["loss"] == pytest.approx(info.loss, rel=1e-5)
    assert found["info"]["grad_norm"] == pytest.approx(info.grad_norm, rel=1e-5)
    assert found["info"]["flops"] < info.flops
    copies = torch.tensor(found["velocity"]).reshape(size // degree, degree, -1, *whole.shape[1:])
    assert all(torch.equal(copies[:, 0], copies[:, other]) for other in range(degree))  # so are log-probs
    torch.testing.assert_close(copies[:, 0].flatten(0, 1), whole, rtol=1e-5, atol=1e-5)
    for name, gradient in tiny_transformers.gradients(engine).items():
        torch.testing.assert_close(torch.tensor(found["gradients"][name]), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", tiny_transformers.MODELS)
def test_tokens_that_do_not_divide_are_refused(ranks: tuple[int, dict[str, Any]], model: str) -> None:
    """By the name of the input and its number of tokens."""
    _, result = ranks
    assert "context_parallel is 2: encoder_hidden_states has 3 tokens" in result[model]["odd"]


def test_a_plan_that_splits_each_layer_is_refused() -> None:
    """That of Helios: what is between its layers is computed whole by every rank, so a sum counts its gradients twice."""
    network, mesh, cpu = _read_rows()["HeliosModularPipeline"].parts["transformer"](), cast(Any, None), torch.device("cpu")
    says = "context_parallel is 2: diffusers splits Helios.* layer by layer"
    refuses(says, split_tokens, network, 2, mesh, rank=0, size=2, device=cpu)


@pytest.mark.long
def test_a_ring_of_ranks_that_exchange_heads_takes_the_update_of_one_process(one: World) -> None:
    """Four ranks share each sample of a network with two heads, two by two; also where activations are computed again."""
    found = launch.on_ranks(4, "workers.context:ring_updates")[0]
    for model, lies in product(("flux", "wan"), tiny_transformers.LIES):
        check(found, one, model, lies, size=4, degree=4)
    begins = "engine.ring is 2, expected 1: the attention cannot be computed: "
    assert [each.startswith(begins) for each in found["refused"]] == [True, True]
    assert ["Could not run" in found["refused"][0], "attn_mask" in found["refused"][1]] == [True, True]
    with pytest.raises(UsageError, match=r"engine.ring is 3, expected a divisor of engine.context_parallel, 4"):
        EngineConfig(context_parallel=4, ring=3)


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
