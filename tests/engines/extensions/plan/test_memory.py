"""Live storages against what is worked out on paper, and the engine's accounting against what an engine holds."""

import copy
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from helpers.tiny_models import Net, data, squared
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.extensions.plan.check import measure
from fluvial.engines.extensions.plan.memory import Accounting, ActivationSpan, account, measure_activations
from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.quantised import FORMATS

CPU = torch.device("cpu")


def test_a_storage_counts_once_and_until_it_is_freed() -> None:
    """However many views there are of it, and also when it is emptied without an operation, as FSDP does."""
    with LiveStorages() as live:
        a = torch.zeros(100)
        view = a.view(10, 10).t()
        assert live.now == 400
        del a
        assert live.now == 400
        del view
        assert live.now == 0
        b = torch.zeros(50)
        b.untyped_storage().resize_(0)
        assert live.now == 0
        b.untyped_storage().resize_(200)
        b.zero_()
        assert live.now == 200
    assert live.peak == 400


def test_an_operation_reads_the_sizes_of_its_own_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of all that are alive: a pass that keeps thousands would take the square of its time."""
    reads: Counter[str] = Counter()
    nbytes = torch.UntypedStorage.nbytes

    def read(storage: torch.UntypedStorage) -> int:
        reads["nbytes"] += 1
        return nbytes(storage)

    with LiveStorages() as live:
        alive = [torch.zeros(10) for _ in range(50)]
        monkeypatch.setattr(torch.UntypedStorage, "nbytes", read)
        alive[0] + alive[1]
    assert (reads["nbytes"], live.peak) == (3, 51 * 40)


def test_what_counts(one: World) -> None:
    """What was there before can be left out, whether it is written to, viewed or read; of a sharded tensor this rank's part.

    On the meta device nothing else counts.
    """
    before, other = torch.ones(100), torch.ones(10)
    with LiveStorages([before]) as live:
        before.add_(1)
        before[3:].sum()
        other.sum()
    assert (live.now, live.peak) == (40, 44)  # with the sum
    with LiveStorages() as live:
        a = distribute_tensor(torch.zeros(6, 5), one.mesh, [Shard(0)])
        b = a + 1
        assert live.now == 2 * 6 * 5 * 4
        del b
        assert live.now == 6 * 5 * 4
    with LiveStorages(meta=True) as live:
        c = torch.zeros(1000, device="meta")
        d = c + 1
        torch.zeros(77)
        del c
        assert live.now == 4000
        del d
    assert (live.now, live.peak) == (0, 8000)


def test_a_backward_pass_is_seen() -> None:
    """y = sin(2 w): 2 w is saved, and freed in the backward pass, where gradients come up one after another."""
    w = torch.ones(1000, requires_grad=True)
    with LiveStorages([w]) as live:
        y = (w * 2).sin()
        assert live.now == 8000
        y.sum().backward()
        assert live.now == 8000  # y, and the gradient
    assert live.peak == 4 * 4000 + 2 * 4  # y, 2 w, cos(2 w), its product with the gradient; the sum and its gradient


def net(train: str, *, meta: bool) -> Net:
    """Return the test's net, with adapters on its blocks if they are trained."""
    made = Net()
    if train == "lora":
        add_lora(made, LoraConfig(rank=2), ["blocks.0.0", "blocks.1.0"])
    return made.to("meta") if meta else made


LIES: list[dict[str, Any]] = [
    {},
    {"comm": "reshard"},
    {"grad_sync": "every"},
    {"comm": "reshard", "checkpointing": "block"},
    {"checkpointing": "selective", "compute": "bfloat16"},
]


@pytest.mark.parametrize(
    ("train", "lies"),
    [*product(["full", "lora"], LIES), *(("lora", {"base": base, "comm": "reshard"}) for base in FORMATS)],
    ids=str,
)
@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_what_an_engine_holds_is_accounted_for(one: World, train: str, lies: dict[str, Any], ema_decay: float) -> None:
    config, sharding = OptimizerConfig(ema_decay=ema_decay), EngineConfig(**lies)
    shapes = net(train, meta=True)
    options: dict[str, Any] = {"optimizer": config, "engine": sharding, "device": CPU, "activations": [ActivationSpan(0, 0)]}
    paper = account(shapes, list(shapes.blocks), ranks=1, **options)
    module = net(train, meta=False)
    engine = Engine(module, list(module.blocks), config, one, updates=5, sharding=sharding)
    items, weight = data(6)
    measured = measure(engine, items, weight, squared(module), micro_batch=2)
    for kind in ("parameters", "buffers", "moments", "average", "gradients"):
        assert paper._asdict()[kind] == measured._asdict()[kind], kind


# Of two blocks, backwards: the gradients of the second are there first.
STRETCHES = [
    ActivationSpan(1, 1000, 960, backward=True, reduces=True),
    ActivationSpan(0, 990, 900, backward=True, reduces=True),
]


def on_paper(*, ranks: int = 1, micro_batches: int = 2, frozen: int = 0, phase: Any = "update", **lies: Any) -> Accounting:
    """Return the account of the test's net: two blocks of 9 + 3 weights, and a head of 3 + 1."""
    module = Net()
    kept: dict[str, Any] = {"optimizer": OptimizerConfig(ema_decay=0.9), "device": CPU, "activations": STRETCHES}
    asked: dict[str, Any] = {"micro_batches": micro_batches, "frozen": frozen, "phase": phase, "ranks": ranks}
    return account(module, list(module.blocks), engine=EngineConfig(**lies), trajectory=100, **kept, **asked)


def test_the_account_is_that_on_paper() -> None:
    """Two ranks of one replica: of 3 rows the first has 2, of 1 row 1."""
    shard = 2 * (2 * 3 + 2) + 3 + 1
    shards: Any = dict.fromkeys(("parameters", "average", "gradients"), 4 * shard)
    communicated: Any = {"gathered": 2 * 28, "unsharded_gradients": 4 * 28 - 4 * shard}
    communicated["communication"] = 4 * 12 - 40  # when the first unit is reduced, its activations are freed
    others: Any = {"buffers": 0, "moments": 8 * shard + 4 * 6, "reference": 0, "trajectory": 100, "host": 0}
    assert on_paper(ranks=2, compute="bfloat16") == Accounting(**shards, **communicated, **others, activations=1000)


def test_each_setting_changes_what_it_should() -> None:
    plain = on_paper(ranks=2)
    held = {kind: plain._asdict()[kind] for kind in ("parameters", "moments", "average", "gradients")}
    changes: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"comm": "reshard"}, {"gathered": 4 * 28}),  # there are but two blocks
        ({"compute": "bfloat16", "reduce": "bfloat16"}, {"gathered": 56, "unsharded_gradients": 0, "communication": 0}),
        ({"grad_sync": "every"}, {"unsharded_gradients": 0, "communication": 2 * 48 - 40}),
        ({"micro_batches": 1}, {"unsharded_gradients": 0, "communication": 2 * 48 - 40}),
        ({"offload": "phases"}, {}),
        ({"frozen": 1}, {"reference": plain.parameters}),
        ({"frozen": 1, "offload": "phases"}, {"reference": plain.parameters}),
        ({"offload": "always"}, {**dict.fromkeys(held, 0), "unsharded_gradients": 4 * 28, "host": sum(held.values())}),
    ]
    for lies, expected in changes:
        assert on_paper(ranks=2, **lies) == plain._replace(**expected), lies
    assert on_paper(ranks=4, replicas=2) == plain
    assert on_paper(ranks=1, comm="reshard", offload="always").gathered == 4 * (12 + 4)
    alone = on_paper(ranks=1)  # it computes with its shards
    assert (alone.gathered, alone.unsharded_gradients, alone.communication) == (0, 0, 0)
    assert on_paper(ranks=2, replicas=2) == alone  # a bucket of all gradients, when the activations are freed
    # Copies that bfloat16 computes with: the masters are cast, and gradients in bfloat16 lie beside the shards' own.
    lies = {"compute": "bfloat16", "reduce": "bfloat16"}
    halved = alone._replace(gathered=2 * 28, unsharded_gradients=2 * 28)
    assert on_paper(ranks=1, **lies) == halved
    assert on_paper(ranks=2, replicas=2, **lies) == halved
    with pytest.raises(ValueError, match="3 ranks, expected a multiple of the 2 replicas"):
        on_paper(ranks=3, replicas=2)


def test_with_reshard_the_block_that_computes_is_gathered() -> None:
    """And what it arrived in; backwards the next one. So the highest activations need not be in the highest sum."""
    blocks = [nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False), nn.Linear(8, 1, bias=False)]
    options: dict[str, Any] = {"optimizer": OptimizerConfig(), "engine": EngineConfig(comm="reshard"), "device": CPU}

    def highest(stretches: list[ActivationSpan], **more: Any) -> tuple[int, int]:
        found = account(nn.Sequential(*blocks), blocks, ranks=2, activations=stretches, **options, **more)
        return found.gathered, found.activations

    forward = [ActivationSpan(0, 200), ActivationSpan(1, 90), ActivationSpan(2, 210)]
    assert highest(forward, phase="rollout") == (4 * 2 * 32, 90)
    backward = [stretch._replace(backward=True) for stretch in forward[::-1]]
    assert highest(backward) == (4 * (8 + 32), 210)


def test_a_rollout_holds_no_gradients() -> None:
    """With offload in phases neither moments nor average nor a reference."""
    rollout = on_paper(phase="rollout")
    assert (rollout.gradients, rollout.unsharded_gradients, rollout.communication) == (0, 0, 0)
    phases = on_paper(phase="rollout", offload="phases", frozen=1)
    assert phases == rollout._replace(moments=0, average=0, host=rollout.moments + rollout.average + rollout.parameters)
    assert phases.total == rollout.total - rollout.moments - rollout.average


class Wide(nn.Module):
    """Blocks whose insides are wider than what goes between them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 256, bias=False), nn.Tanh(), nn.Linear(256, 16, bias=False)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def live(count: int, *, grad: bool = True, **lies: Any) -> int:
    with torch.device("meta"):
        module, x = Wide(count), torch.zeros(8, 16)
    before = copy.deepcopy(module)
    engine = EngineConfig(**lies)
    found = measure_activations(module, list(module.blocks), lambda made: made(x), engine=engine, device=CPU, grad=grad)
    # The module that was given is left as it was.
    assert [(n, p.dtype, p.grad) for n, p in module.named_parameters()] == [
        (n, p.dtype, p.grad) for n, p in before.named_parameters()
    ]
    assert not any("forward" in vars(unit) for unit in module.modules())
    return max(stretch.peak for stretch in found)


def test_activations_grow_with_the_blocks_by_what_they_save() -> None:
    """All of it without checkpointing, the input alone with it, and nothing without a backward pass."""
    row = 8 * 4
    assert live(9) - live(8) == row * (256 + 16)  # tanh's output, which is the second layer's input; the block's output
    assert live(9, checkpointing="block") - live(8, checkpointing="block") == row * 16
    # The input, the block's input, and the first layer's output beside tanh's.
    assert live(9, grad=False) == live(8, grad=False) == row * (16 + 16 + 256 + 256)
    between = live(9, checkpointing="selective") - live(8, checkpointing="selective")
    assert row * 16 < between <= row * (256 + 16)
    assert live(9, compute="bfloat16") - live(8, compute="bfloat16") == row * (256 + 16) // 2
    with pytest.raises(ValueError, match="expected it on the meta device"):
        measure_activations(Net(), [], lambda made: made(torch.zeros(2, 3)), engine=EngineConfig(), device=CPU, grad=True)
