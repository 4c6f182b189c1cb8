"""A simulated device: what it computes, counts and refuses, each against numbers worked out by hand."""

import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fluvial.engines.data.records import as_prompts
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.extensions.simulate.mode import LARGE, Wait
from fluvial.engines.extensions.simulate.simulation import Simulation, simulate
from fluvial.engines.scoring.runner import RewardRunner
from fluvial.models.device import find_default_device
from fluvial.models.host_values import to_device

pytestmark = pytest.mark.simulated


def test_the_device_is_the_accelerator_while_it_is_simulated() -> None:
    """And the CPU again afterwards; its tensors have a shape and a device, and no values."""
    with simulate() as simulation:
        assert find_default_device().type == "simulated"
        product = torch.ones(2, 3, device=simulation.world.device) @ torch.ones(3, 4, device=simulation.world.device)
        assert (tuple(product.shape), product.device.type) == ((2, 4), "simulated")
    assert find_default_device().type == "cpu"


def test_memory_is_counted_to_the_byte_by_line() -> None:
    """A storage counts once, until nothing refers to it; the peak is known with its lines."""
    with simulate() as simulation:
        ledger, device = simulation.mode.ledger, simulation.world.device
        first = torch.zeros(100, device=device)
        view = first.view(10, 10)
        assert ledger.now == 400
        second = torch.zeros(50, device=device)
        del first
        assert ledger.now == 600
        del view, second
        assert (ledger.now, ledger.peak) == (0, 600)
        emptied = torch.zeros(20, device=device)
        for size, held in ((0, 0), (80, 80)):
            emptied.untyped_storage().resize_(size)
            assert ledger.now == held
        del emptied
        lines = ledger.find_holders(ledger.peak_entry)
        assert sorted(lines.values()) == [200, 400]
        assert all("test_simulation.py" in line for line in lines)


def test_every_read_of_the_host_is_noted_with_its_line() -> None:
    """And copies to the device: from memory that is not pinned they block; one that does not block is named otherwise."""
    table: list[tuple[Callable[[torch.Tensor], object], str]] = [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: float(x[0]), "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "to"),
        (lambda x: x[x > 0], "index by a mask"),
        (lambda x: torch.nonzero(x), "nonzero"),
        (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
    ]
    for read, operation in table:
        with simulate() as simulation:
            read(torch.ones(4, device=simulation.world.device))
            (found,) = [wait for wait in simulation.mode.waits if wait.kind == "read"]
            assert found.operation == operation
            assert "test_simulation.py" in found.line
    with simulate() as simulation:
        torch.ones(4).to(simulation.world.device)
        torch.ones(4).to(simulation.world.device, non_blocking=True)
        assert [wait.kind for wait in simulation.mode.waits] == ["blocking copy to the device", "copy to the device"]


def test_attention_keeps_no_scores() -> None:
    """It is fused, with the memory of its inputs, its result and a number per query in float32."""
    with simulate() as simulation:
        query = torch.zeros(1, 2, 256, 64, device=simulation.world.device, dtype=torch.bfloat16, requires_grad=True)
        out = nn.functional.scaled_dot_product_attention(query, query, query)
        each = 2 * 256 * 64 * 2
        assert simulation.mode.ledger.now == pytest.approx(2 * each + 2 * 256 * 4, abs=64)
        out.float().sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape


def test_autocast_casts_as_on_cuda() -> None:
    with simulate() as simulation, torch.autocast("simulated", torch.bfloat16):
        x = torch.zeros(2, 8, device=simulation.world.device)
        assert (x @ x.T).dtype == torch.bfloat16
        assert nn.functional.layer_norm((x @ x.T), (2,)).dtype == torch.float32


def test_threads_run_on_the_device_too() -> None:
    """Dispatch modes are per thread, so every thread enters it when it starts."""
    found = []
    with simulate() as simulation:
        thread = threading.Thread(target=lambda: found.append(torch.zeros(8, device=simulation.world.device)))
        thread.start()
        thread.join()
        assert (found[0].device.type, simulation.mode.ledger.now) == ("simulated", 32)


def test_a_reward_thread_keeps_the_memory_of_its_images_until_it_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may come from another stream, whose allocator is told; afterwards nothing holds them."""
    told = list[torch.Size]()
    with simulate() as simulation:
        monkeypatch.setattr(FakeTensor, "record_stream", lambda tensor, stream: told.append(tensor.shape))
        runner = RewardRunner(lambda images, prompts: images.mean((1, 2, 3)))
        images, latents = (torch.zeros(2, *event, device=simulation.world.device) for event in ((3, 4, 4), (2, 2, 2)))
        runner.submit(images, as_prompts(["a", "b"]), latents)
        del images, latents
        wait([future for future, _ in runner.waiting])  # scored, and not collected yet
        assert (told, simulation.mode.ledger.now) == ([torch.Size([2, 3, 4, 4]), torch.Size([2, 2, 2, 2])], 0)
        runner.collect()
        runner.close()


def test_results_on_the_host_are_those_of_equal_ranks() -> None:
    """Large ones are fake, too, and arrive as zeros: images that an evaluation shows."""
    with simulate(ranks=3) as simulation:
        world = simulation.world
        assert world.gather(torch.tensor([2.0, 5.0])).tolist() == [2, 5, 2, 5, 2, 5]
        assert world.gather_items("rank") == ["rank"] * 3
        total = torch.ones(2)
        torch.distributed.all_reduce(total)
        assert total.tolist() == [3, 3]
        images = torch.ones(2, 3, 1024, 1024, device=world.device).cpu()
        found = world.gather_items((images * 255).byte())
        assert [(tuple(each.shape), each.dtype) for each in found] == [((2, 3, 1024, 1024), torch.uint8)] * 3
        assert not any(each.any() for each in found)


def update(simulation: Simulation, **options: Any) -> Engine:
    """Take two updates of two micro-batches of a small network, and return its engine."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
    sharding: Any = EngineConfig(compile=False, **options)
    module, optimizer = nn.Sequential(*blocks, nn.Linear(64, 64)), OptimizerConfig(ema_decay=0.9)
    engine = Engine(module, list(blocks), optimizer, simulation.world, sharding=sharding)
    x = torch.zeros(8, 64, device=simulation.world.device)
    for _ in range(2):
        with simulation.phases.enter("update"):
            engine.update(x, lambda rows: engine.module(rows).float().square().mean(1), micro_batch=4)
    return engine


@pytest.mark.parametrize("offload", ["none", "phases", "always"])
@pytest.mark.parametrize("comm", ["keep", "reshard"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_engine_updates_offloads_and_onloads(ranks: int, comm: str, offload: str) -> None:
    """Offloaded tensors leave the device, and come back to the byte."""
    with simulate(ranks=ranks) as simulation:
        engine = update(simulation, comm=comm, offload=offload)
        held = simulation.mode.ledger.now
        engine.offload()
        away = simulation.mode.ledger.now
        assert away < held if offload != "always" else away == held
        engine.onload()
        assert simulation.mode.ledger.now == held
        read = [times for wait, times in simulation.mode.waits.items() if wait.operation == "tolist"]
        assert read == [2], "one read-back per update"


def test_large_tensors_of_the_host_can_be_pinned() -> None:
    """Those have no values; FSDP2 pins the parameters that offload="always" keeps on the host.

    CUDA's pinned copy of an expanded one would have the same strides, and PyTorch refuses to write these.
    """
    with simulate(ranks=1) as simulation:
        held = simulation.mode.ledger.now
        large = torch.empty(LARGE // 4).pin_memory()
        assert isinstance(large, FakeTensor)
        assert large.is_pinned()
        assert torch.ones(3).pin_memory().tolist() == [1.0, 1.0, 1.0]
        assert simulation.mode.ledger.now == held
        shared = torch.tensor([2.0]).expand(3)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            shared.pin_memory()
        assert to_device(shared, simulation.world.device).tolist() == [2.0, 2.0, 2.0]


def test_gathers_and_reductions_are_one_per_unit_and_update() -> None:
    """With their bytes: a rank sends 7 of 8 parts of bfloat16 parameters, and of float32 gradients."""
    with simulate(ranks=8) as simulation:
        engine = update(simulation)
        units, size = len(engine.sharded.units), sum(p.numel() for p in engine.trainable.values())
        calls = {name: 0 for name in ("all_gather", "reduce_scatter")}
        sent = dict(calls)
        for kind, number in simulation.mode.calls.items():
            if kind.name in calls and "_fsdp_" in kind.line:
                calls[kind.name] += number
                sent[kind.name] += simulation.mode.sent[kind]
        assert calls == {"all_gather": 2 * units, "reduce_scatter": 2 * units}
        assert sent["all_gather"] == pytest.approx(2 * 7 / 8 * 2 * size, rel=0.1)  # parts are padded
        assert sent["reduce_scatter"] == pytest.approx(2 * 7 / 8 * 4 * size, rel=0.1)


def test_waits_name_their_phase() -> None:
    with simulate() as simulation:
        x = torch.ones(1, device=simulation.world.device)
        with simulation.phases.enter("outer"):
            x.item()
            with simulation.phases.enter("inner"):
                x.item()
        assert [(wait.phase, times) for wait, times in simulation.mode.waits.items() if isinstance(wait, Wait)] == [
            ("outer", 1), ("inner", 1),
        ]  # fmt: skip
        assert set(simulation.phases.by_name) == {"outer", "inner"}
