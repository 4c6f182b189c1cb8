"""However the module lies on the ranks, an update is the one that plain PyTorch takes; the collectives are counted."""

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.marks import long
from helpers.tiny_models import SHARDINGS, Info, Net, data, squared, take_plain_step
from torch import Tensor, nn

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World

UNITS = 3  # two blocks and the root


@cache
def measured(ranks: int) -> dict[str, Any]:
    """Return what a number of ranks measure."""
    found: dict[str, Any] = launch.on_ranks(ranks, "workers.ranks:measure")[0]
    return found


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    """Return the number of ranks, and the result of their updates."""
    return request.param, measured(request.param)["updates"]


def test_an_update_of_two_terms_is_one_of_their_sum() -> None:
    """It has the weights, and as many reductions, of plain PyTorch's update on the sum, unless each pass reduces."""
    for name, result in measured(2)["split"].items():
        check(name, {parameter: torch.tensor(values) for parameter, values in result["weights"].items()})
        if not {"replicas", "grad_sync"} & SHARDINGS[name].keys():
            assert result["counts"]["_reduce_scatter_base_"] == UNITS, name


def check(name: str, weights: dict[str, Tensor]) -> None:
    """Compare with plain PyTorch; in bfloat16 a step of AdamW is as long, and nearly everywhere in the same direction."""
    half = "bfloat16" in name
    for parameter, want in take_plain_step(squared, Net(), items=7).items():
        error = (weights[parameter] - want).abs()
        assert error.max() <= (0.02 if half else 1e-6 + 1e-5 * want.abs().max())
        assert error.mean() <= (0.004 if half else 1e-6)


@pytest.mark.parametrize("name", SHARDINGS)
def test_an_update_on_ranks_is_that_of_plain_torch(ranks: tuple[int, dict[str, Any]], name: str) -> None:
    _, result = ranks
    check(name, {parameter: torch.tensor(values) for parameter, values in result[name]["weights"].items()})


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize(
    "name", [long(name) if name == "compile" else name for name in SHARDINGS if "replicas" not in SHARDINGS[name]]
)
def test_an_update_of_one_process_is_that_of_plain_torch(one: World, name: str) -> None:
    net, (items, weight) = Net(), data(7)
    sharding = EngineConfig(**SHARDINGS[name])
    engine = Engine(net, list(net.blocks), OptimizerConfig(lr=0.01), one, updates=1, sharding=sharding)
    engine.update(items, squared(net), weight, count=7, micro_batch=2, pad_to=7)
    check(name, dict(engine.weights(average=False)))


@pytest.mark.parametrize("name", SHARDINGS)
def test_collectives(ranks: tuple[int, dict[str, Any]], name: str) -> None:
    """Gradients are reduced, and parameters gathered, once per update, or per micro-batch if the configuration says so."""
    size, result = ranks
    counts, n = Counter(result[name]["counts"]), result[name]["micro_batches"]
    assert n > 1
    if size == SHARDINGS[name].get("replicas"):  # each rank has it all: there is nothing to gather or to scatter
        assert counts == {"allreduce_": 1, "allgather_": 1}  # gradients, metrics
        return
    assert counts["_reduce_scatter_base_"] == UNITS * (n if SHARDINGS[name].get("grad_sync") == "every" else 1)
    if "replicas" not in SHARDINGS[name]:  # the norm, and the numbers
        assert {kind: count for kind, count in counts.items() if "base" not in kind} == {"all_reduce": 1, "allgather_": 1}
    if SHARDINGS[name].get("comm") == "reshard":
        assert n * UNITS <= counts["_allgather_base_"] <= 2 * n * UNITS
    else:
        assert counts["_allgather_base_"] == UNITS


def test_a_replica_has_its_share_of_the_ranks(ranks: tuple[int, dict[str, Any]]) -> None:
    """Two replicas on 2 ranks hold all of it each, on 4 as much as 2 ranks do; they reduce gradients among themselves."""
    size, result = ranks
    everything, half = sum(p.numel() for p in Net().parameters()), 20  # of 28 in rows of 3, the first rank has 2 and 1
    assert result["two replicas"]["shard"] == {2: everything, 4: half}[size]
    assert result["keep"]["shard"] < result["two replicas"]["shard"]
    assert result["two replicas"]["counts"]["allreduce_"] == {2: 1, 4: UNITS}[size]
    assert "allreduce_" not in result["keep"]["counts"]


def test_numbers_per_sample_keep_their_digits(one: World) -> None:
    """In bfloat16 987.5 is 988: samples are cast, timesteps are not, and results come in the computation's dtype."""
    seen: dict[str, torch.dtype] = {}

    class Timed(Net):
        def forward(self, x: Tensor, *, timestep: Tensor) -> Tensor:  # type: ignore[override]
            seen.update(x=x.dtype, timestep=timestep.dtype)
            assert timestep.tolist() == [987.5, 3.25]
            return super().forward(x)

    net = Timed()
    engine = Engine(net, list(net.blocks), OptimizerConfig(), one, updates=1, sharding=EngineConfig(compute="bfloat16"))
    assert engine.module(torch.zeros(2, 3), timestep=torch.tensor([987.5, 3.25])).dtype == torch.bfloat16
    assert seen == {"x": torch.bfloat16, "timestep": torch.float32}
    assert {tensor.dtype for tensor in engine.state().values()} == {torch.float32}


def test_a_rank_with_fewer_items_keeps_the_size_of_a_pass() -> None:
    """The number of items of other ranks, which is asked for where it is not given, is no size of a pass."""
    assert measured(2)["passes"] == [[3, 3, 3]] * 2


def test_a_rank_that_waits_for_one_that_raised_ends_in_a_line() -> None:
    """Whatever its main thread waits in; no timeout of a collective is waited for."""
    with launch.started("workers.ranks:one_raises", ranks=2) as processes:
        assert launch._finished(processes, 120) == [1, 1]
        line = launch.one_line(processes[0].stderr)
    assert line == "fluvial: rank 0: rank 1 failed, and this one waited for it; its own message says why"


def twice(net: nn.Module) -> Any:
    """Return a loss that runs the blocks two times, as guidance in two passes does."""

    def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        error = (net(items["x"]) * net(items["x"] + 1) - items["y"]) ** 2
        return error, Info(error.detach())

    return loss


def update(one: World, net: Net, loss: Any, *, micro_batch: int, **sharding: Any) -> dict[str, Tensor]:
    """Return the weights after an update of six items."""
    engine = Engine(net, list(net.blocks), OptimizerConfig(lr=0.01), one, updates=1, sharding=EngineConfig(**sharding))
    items, weight = data(6)
    engine.update(items, loss, weight, count=6, micro_batch=micro_batch, pad_to=6)
    return dict(engine.weights(average=False))


USES: list[dict[str, Any]] = [
    {},
    {"comm": "reshard"},
    {"checkpointing": "block"},
    {"offload": "always"},
    {"offload": "always", "comm": "reshard"},
    {"offload": "always", "grad_sync": "every"},
]


@pytest.mark.parametrize("sharding", USES, ids=str)
@pytest.mark.parametrize("micro_batch", [2, 6])
def test_two_uses_in_a_loss_take_the_step_of_plain_torch(one: World, sharding: dict[str, Any], micro_batch: int) -> None:
    """Both parts of the gradient are in it, and what earlier micro-batches left."""

    net = Net()
    weights = update(one, net, twice(net), micro_batch=micro_batch, **sharding)
    for name, tensor in take_plain_step(twice, Net()).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sharding", [{}, {"offload": "always"}], ids=["whole copies", "FSDP2"])
def test_a_pass_that_the_loss_does_not_need_is_refused(one: World, sharding: dict[str, Any]) -> None:
    """Its backward pass never comes, so gradients would wait for it unreduced; without gradient it is fine."""
    net = Net()

    def wasteful(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        net(items["x"])
        return squared(net)(items)

    def thrifty(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        with torch.no_grad():
            net(items["x"])
        return squared(net)(items)

    with pytest.raises(ValueError, match=r"the loss does not need.*no_grad"):
        update(one, net, wasteful, micro_batch=3, **sharding)
    net = Net()
    update(one, net, thrifty, micro_batch=3, **sharding)
