"""The engine against plain PyTorch, its collectives counted, and what it does when a gradient is not finite."""

import contextvars
import math
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.tiny_models import Net, data, gather_state, squared, take_plain_step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.models.handwriting import Handwriting
from fluvial.models.lora import LoraConfig, add_lora, blend_adapter, find_adapter_parameters


def engine(one: World, *, comm: Any = "keep", sharding: dict[str, Any] | None = None, **config: Any) -> Engine:
    """Return an engine over a fresh net."""
    net = Net()
    lies = EngineConfig(**{"comm": comm, **(sharding or {})})
    return Engine(net, list(net.blocks), OptimizerConfig(**{"lr": 0.01, **config}), one, updates=100, sharding=lies)


def full(trained: Engine) -> dict[str, Tensor]:
    """Return the weights, gathered."""
    return dict(trained.weights(average=False))


@settings(max_examples=25)
@given(
    count=st.integers(1, 13), micro_batch=st.integers(1, 6), pad=st.integers(0, 9), comm=st.sampled_from(["keep", "reshard"])
)
def test_an_update_is_that_of_plain_torch(one: World, count: int, micro_batch: int, pad: int, comm: str) -> None:
    """Whatever the micro-batch, the padding, the last chunk and the way of communicating."""
    items, weight = data(count)
    trained = engine(one, comm=comm)
    info = trained.update(items, squared(trained.module), weight, count=7, micro_batch=micro_batch, pad_to=count + pad)
    expected = take_plain_step(squared, Net(), items=count, count=7)
    for name, tensor in full(trained).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    error = squared(Net())(items)[1].error
    assert info.items == count
    assert info.mean["error"] == pytest.approx(float(error.mean()), rel=1e-5)
    assert info.max_abs["error"] == pytest.approx(float(error.max()), rel=1e-5)
    assert info.loss == pytest.approx(float((error * weight).sum() / 7), rel=1e-5)


def test_the_gradient_is_clipped_to_the_norm(one: World) -> None:
    """Two updates from one state differ by the clip alone where momentum has no say: the clipped one is as plain torch's."""
    items, weight = data(6)
    trained = engine(one, max_grad_norm=1e-3)
    info = trained.update(items, squared(trained.module), weight, count=1, micro_batch=6, pad_to=6)
    assert info.grad_norm > 1e-3
    moments = gather_state(trained)
    squares = sum(float((moments[f"exp_avg.{name}"] ** 2).sum()) for name in trained.trainable)
    assert squares**0.5 == pytest.approx(0.1 * 1e-3, rel=1e-3)  # exp_avg = (1 - beta1) * clipped gradient


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])  # whose norm overflows
def test_a_gradient_that_is_not_finite_skips_the_step(one: World, bad: float) -> None:
    """Weights, moments and average stay; the skip is counted and reported; the next update goes on."""
    items, weight = data(4)
    trained = engine(one, ema_decay=0.5)
    trained.update(items, squared(trained.module), weight, micro_batch=2)
    before = gather_state(trained)
    poisoned = {**items, "y": torch.tensor([0.0, bad, 0.0, 0.0])}
    assert trained.update(poisoned, squared(trained.module), weight, micro_batch=2).skipped
    assert trained.counters() == {"updates": 2, "skipped": 1, "skipped_in_a_row": 1}
    for name, tensor in gather_state(trained).items():
        assert torch.equal(tensor, before[name]), name
    assert not trained.update(items, squared(trained.module), weight, micro_batch=2).skipped
    assert trained.skipped_in_a_row == 0


# Before each update of eight: a warm-up of three updates, and the half cosine from the third on.
RATES = [1 / 3, 2 / 3, 1.0, *((1 + math.cos(math.pi * n / 6)) / 2 for n in range(1, 6))]


def test_updates_with_a_schedule_and_an_average_are_those_of_plain_torch(one: World) -> None:
    """Weights and moving average of eight updates are those of a loop with torch alone, at `RATES`."""
    items, weight = data(5)
    net, plain = Net(), Net()
    config = OptimizerConfig(lr=0.01, ema_decay=0.9, schedule="cosine", warmup=3)
    trained = Engine(net, list(net.blocks), config, one, updates=8)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    average = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for n, rate in enumerate(RATES):
        assert trained.update(items, squared(net), weight, micro_batch=2).lr == pytest.approx(0.01 * rate)
        optimizer.param_groups[0]["lr"] = 0.01 * rate
        ((squared(plain)(items)[0] * weight).sum() / 5).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.9, (1 + n) / (10 + n))
        average = {name: decay * average[name] + (1 - decay) * tensor for name, tensor in plain.state_dict().items()}
    state = gather_state(trained)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[f"weight.{name}"], tensor, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(state[f"average.{name}"], average[name], rtol=1e-4, atol=1e-6)


def test_each_update_moves_the_weights_at_its_own_rate(one: World) -> None:
    """SGD without momentum moves a weight by the rate of the schedule times its gradient; every update has its own."""
    net = nn.Linear(1, 1, bias=False)
    config = OptimizerConfig("sgd", lr=0.5, betas=(0.0, 0.999), schedule="cosine", warmup=3, max_grad_norm=1e9)
    trained = Engine(net, config=config, world=one, updates=8)
    x, moves = torch.ones(4, 1), []
    for _ in range(8):
        before = float(next(trained.weights())[1])
        trained.update(x, lambda x: net(x)[:, 0])  # the gradient is 1
        moves.append((before - float(next(trained.weights())[1])) / 0.5)
    assert moves == pytest.approx(RATES, abs=1e-5)


def test_a_skipped_update_is_no_step_of_the_restored_optimizer(one: World) -> None:
    """Adam's bias correction counts steps: with one skipped of three, a restored engine goes on to the bit."""
    items, weight = data(4)
    poisoned = {**items, "y": torch.full((4,), torch.nan)}
    first = engine(one)
    for batch in (items, poisoned, items):
        first.update(batch, squared(first.module), weight)
    second = engine(one)
    second.restore({name: tensor.clone() for name, tensor in first.state().items()}, first.counters())
    assert {float(state["step"]) for state in second.optimizer.state.values()} == {2.0}
    for trained in (first, second):
        trained.update(items, squared(trained.module), weight)
    for name, tensor in gather_state(first).items():
        assert torch.equal(tensor, gather_state(second)[name]), name


def test_skips_in_a_row_go_on_counting_after_a_restoration(one: World) -> None:
    """Three end the run, two before it and one after, too; the message says after which update."""
    items, weight = data(2)
    items["y"][0] = torch.nan
    first, second = engine(one, max_skipped=3), engine(one, max_skipped=3)
    for _ in range(2):
        first.update(items, squared(first.module), weight)
    second.restore(first.state(), first.counters())
    for trained in (first, second):
        with pytest.raises(RunError, match=r"3 updates in a row \(up to update 3\)"):
            trained.update(items, squared(trained.module), weight)


def test_an_update_needs_no_more_than_items_and_a_loss(one: World) -> None:
    """The defaults are weights of 1, the number of items, and one micro-batch; a loss alone has no diagnostics."""
    items, _ = data(5)
    short, long = engine(one), engine(one)
    info = short.update(items, lambda batch: squared(short.module)(batch)[0])
    told = long.update(items, squared(long.module), torch.ones(5), count=5, micro_batch=5, pad_to=5)
    assert (info.mean, info.max_abs) == ({}, {})
    assert info == told._replace(mean={}, max_abs={})
    for name, tensor in full(short).items():
        assert torch.equal(tensor, full(long)[name]), name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"items": {"x": torch.zeros(4, 3), "y": torch.zeros(3)}}, r"items have shapes \[\[4, 3\], \[3\]\], expected"),
        ({"items": {"x": torch.zeros(0, 3), "y": torch.zeros(0)}}, r"P >= 1"),
        ({"items": {}}, r"P >= 1"),
        ({"weight": torch.ones(3)}, r"weight has shape \[3\], expected \[4\]"),
        ({"weight": torch.ones(4, 1)}, r"weight has shape \[4, 1\], expected \[4\]"),
        ({"micro_batch": 0}, "micro_batch is 0, expected at least 1"),
        ({"pad_to": 3}, "pad_to is 3, expected at least the 4 items of this rank"),
        ({"loss_fn": lambda batch: batch["x"].sum()}, r"loss_fn returned shape \[\], expected \[4\], one loss per item"),
    ],
)
def test_arguments_of_the_wrong_shape_are_refused(one: World, changes: dict[str, Any], says: str) -> None:
    """In one line that has what was given and what was expected."""
    trained = engine(one)
    arguments = {"items": data(4)[0], "loss_fn": squared(trained.module), **changes}
    with pytest.raises(ValueError, match=says) as error:
        trained.update(**arguments)
    assert "\n" not in str(error.value)


def test_an_engine_needs_no_more_than_a_module(one: World) -> None:
    """Its blocks are found, and its world is that of the enclosing context; without one the message says so."""
    net = Net()
    trained = Engine(net)
    assert trained.world == one
    assert trained.sharded.units == [net, *net.blocks]
    with pytest.raises(ValueError, match="sharded already: give each engine a module of its own"):
        Engine(net)
    with pytest.raises(ValueError, match=r"optimizer\.schedule is 'cosine': it depends on the number of updates"):
        Engine(Net(), config=OptimizerConfig(schedule="cosine"))
    with pytest.raises(UsageError, match="create the engine within `with init_world"):
        contextvars.Context().run(Engine, Net())


def test_frozen_adapters_are_in_the_state(one: World) -> None:
    """An old policy that follows the trained one is found again, to the bit, and the reference too."""

    def adapted() -> Engine:
        model = Handwriting()
        net = model.build()
        add_lora(net, LoraConfig(rank=2), model.lora_targets, adapters=("default", "old", "ref"))
        return Engine(net, model.blocks(net), OptimizerConfig(lr=0.01), one, updates=9)

    first = adapted()
    with torch.no_grad():
        for number, parameter in enumerate(first.trainable.values()):
            parameter.add_(0.01 * number)
    blend_adapter(first.module, "default", "old", 0.25)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    second = adapted()
    second.restore(saved, first.counters())
    for name in ("default", "old", "ref"):
        ours, theirs = (find_adapter_parameters(engine.module, name) for engine in (first, second))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    old, ref = (find_adapter_parameters(second.module, name) for name in ("old", "ref"))
    assert any(not torch.equal(old[key], ref[key]) for key in old)


def test_the_average_is_swapped_in_and_out(one: World) -> None:
    """Inference on the average sees it, and leaves the weights as they were."""
    items, weight = data(5)
    trained = engine(one, ema_decay=0.9)
    start = {name: tensor.clone() for name, tensor in full(trained).items()}
    trained.update(items, squared(trained.module), weight)
    stepped, net = full(trained), Net()
    # After the first update the warmed decay is 1/10.
    for average, weights in ((False, stepped), (True, {name: 0.1 * start[name] + 0.9 * stepped[name] for name in start})):
        with trained.inference(average=average) as module:
            found = module(items["x"])
        net.load_state_dict(weights)
        torch.testing.assert_close(found, net(items["x"]).detach())
    for name, tensor in full(trained).items():
        assert torch.equal(tensor, stepped[name])


def gathered_units(trained: Engine) -> int:
    """Return how many units hold parameters of the computation's dtype: whole copies that were cast, or gathered shards."""
    own = [next(iter(unit.parameters(recurse=True))) for unit in trained.sharded.units]
    return sum(parameter.dtype == torch.bfloat16 for parameter in own)


@pytest.mark.parametrize("offload", ["none", "always"])  # whole copies, and FSDP2
def test_what_inference_gathers_stays_for_the_update_that_follows(one: World, offload: str) -> None:
    """With comm=keep within `gathered_once`; the bits are the same, and nothing stays after the update or an error."""
    items, weight = data(4)
    plain, trained = (engine(one, sharding={"offload": offload, "compute": "bfloat16"}, ema_decay=0.9) for _ in range(2))
    for number in range(2):
        with plain.inference() as module:
            expected = module(items["x"])
        assert gathered_units(plain) == 0
        plain.update(items, squared(plain.module), weight, micro_batch=2)
        with trained.gathered_once():
            with trained.inference() as module:
                assert torch.equal(module(items["x"]), expected), number
            assert gathered_units(trained) > 0
            trained.update(items, squared(trained.module), weight, micro_batch=2)
            assert gathered_units(trained) == 0
    for name, tensor in full(trained).items():
        assert torch.equal(tensor, full(plain)[name]), name
    with plain.inference(average=True) as module:
        averaged = module(items["x"])

    def ended() -> None:
        with trained.gathered_once():
            with trained.inference() as module:
                module(items["x"])
            with trained.inference(average=True) as module:  # written to shards that were gathered before
                assert torch.equal(module(items["x"]), averaged)
            with trained.inference() as module:
                module(items["x"])
            raise RuntimeError("ends")

    with pytest.raises(RuntimeError, match="ends"):
        ended()
    assert gathered_units(trained) == 0


def test_nothing_stays_gathered_with_reshard(one: World) -> None:
    """Its promise is that parameters of two blocks are gathered at most."""
    trained = engine(one, comm="reshard", sharding={"offload": "always", "compute": "bfloat16"})
    with trained.gathered_once():
        with trained.inference() as module:
            module(data(4)[0]["x"])
        assert gathered_units(trained) == 0


def test_switching_modes_walks_over_no_modules(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rollout and update does so, and a walk takes as long as a step of a small network."""
    trained = engine(one)
    monkeypatch.setattr(nn.Module, "named_modules", lambda *_, **__: pytest.fail("walked"))
    with trained.inference() as module:
        assert not module.training
        assert not any(part.training for part in trained.sharded.parts)
    with trained.sharded.train():
        assert all(part.training for part in trained.sharded.parts)


def test_diagnostics_by_part_change_no_bit(one: World) -> None:
    """Of the weights, and of the other numbers."""
    items, weight = data(7)
    found = []
    for parts in (None, torch.arange(7)[:, None] % 3 == torch.arange(3)):
        trained = engine(one)
        infos = [
            trained.update(items, squared(trained.module), weight, count=7, micro_batch=2, pad_to=7, parts=parts)
            for _ in range(2)
        ]
        found.append((full(trained), [info._replace(parts=None, memory=()) for info in infos]))
    assert infos[0].parts is not None
    assert infos[0].parts.items == [3, 2, 2]
    assert found[0][1] == found[1][1]
    assert all(torch.equal(found[0][0][name], tensor) for name, tensor in found[1][0].items())


def test_items_of_weight_0_are_in_no_number(one: World) -> None:
    """As the row of a rank that has none, which fills its passes alone."""
    items, weight = data(7)
    parts, found = torch.arange(7)[:, None] % 3 == torch.arange(3), []
    for held in (5, 7):
        trained, some = engine(one), {name: tensor[:held] for name, tensor in items.items()}
        weights = weight[:held] * (torch.arange(held) < 5)
        found.append(trained.update(some, squared(trained.module), weights, count=5, parts=parts[:held]))
    assert found[0].items == found[1].items == 5
    assert found[1].parts == found[0].parts
    assert found[1]._replace(parts=None, memory=(), flops=0) == found[0]._replace(parts=None, memory=(), flops=0)


def test_one_read_back_an_update(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers leave the device once per update, however many micro-batches it has, and parts that it is split into."""
    reads: Counter[str] = Counter()

    def spied(name: str) -> Any:
        real = getattr(Tensor, name)

        def spy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads[name] += 1
            return real(self, *args, **kwargs)

        return spy

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        monkeypatch.setattr(Tensor, name, spied(name))
    items, weight = data(16)
    trained = engine(one)
    for parts in (None, torch.eye(16, dtype=torch.bool)):
        reads.clear()
        trained.update(items, squared(trained.module), weight, count=5, micro_batch=2, pad_to=16, parts=parts)
        assert reads == {"tolist": 1}
