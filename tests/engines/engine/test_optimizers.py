"""Each optimizer of the table: its step, its state in a checkpoint, on the host and on paper."""

import copy
import math
import sys
import warnings
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import pytest
import torch
from helpers import launch, real_torchao
from helpers.marks import long
from helpers.tiny_models import Wide, data, gather_state, squared, take_updates
from torch import Tensor
from torch.distributed.tensor import DTensor, debug

from fluvial.engines.engine import optimizers
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.optimizers import OPTIMIZERS, Buffer
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError

NAMES = sorted(OPTIMIZERS)
SHARDS = EngineConfig(offload="always")  # parameters are sharded, even over one rank


def engine(one: World, name: Any, *, seed: int = 0, sharding: EngineConfig | None = None, **config: Any) -> Engine:
    """Return an engine over a fresh net."""
    values: dict[str, Any] = {"lr": 0.01, "ema_decay": 0.9, "schedule": "cosine", "warmup": 2, **config}
    values["lr"] = 1.0 if name == "prodigy" else values["lr"]  # of which it makes a step size
    return Engine(Wide(seed), config=OptimizerConfig(name=name, **values), world=one, updates=8, sharding=sharding)


@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_trains(one: World, name: str) -> None:
    """The loss falls to a part of what it was; Prodigy has to find its step size first."""
    with real_torchao.available(name):
        trained = engine(one, name, lr=0.05, schedule="constant", warmup=0, ema_decay=0.0)
        losses = take_updates(trained, 40 if name == "prodigy" else 12)
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_of_plain_tensors_is_that_of_sharded_ones(one: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """To the bit, where gradients are clipped too; and the optimizer holds the sharded tensors again."""
    assert {key for key, row in OPTIMIZERS.items() if row.elementwise} == {"adamw", "sgd"}
    trained, expected = (engine(one, name, sharding=SHARDS, max_grad_norm=0.01, weight_decay=0.1) for _ in range(2))
    take_updates(trained, 3)
    assert all(isinstance(t, DTensor) for t in trained.state().values() if t.ndim)
    assert [id(p) for group in trained.optimizer.param_groups for p in group["params"]] == [
        id(p) for p in trained.trainable.values()
    ]
    monkeypatch.setattr(optimizers, "plain", lambda optimizer: nullcontext())
    take_updates(expected, 3)
    found, sharded = gather_state(trained), gather_state(expected)
    assert found.keys() == sharded.keys()
    assert all(torch.equal(found[key], sharded[key]) for key in found)


NORM = {"aten._foreach_norm.Scalar", "aten.stack.default", "aten.linalg_vector_norm.default"}


def test_a_step_of_shards_works_out_no_layouts(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor does so for each tensor of a list at its first call, which takes seconds. The norm alone is over all ranks."""
    trained, calls, dispatcher = engine(one, "adamw", sharding=SHARDS), list[object](), DTensor._op_dispatcher
    real = dispatcher._propagate_op_sharding_dispatch_slow_path

    def counted(*args: Any) -> Any:
        calls.append(args[0])
        return real(*args)

    monkeypatch.setattr(dispatcher, "_propagate_op_sharding_dispatch_slow_path", counted)
    debug._clear_sharding_prop_cache()  # what earlier tests have worked out would not be worked out again
    take_updates(trained, 2)
    assert {str(call) for call in calls} == NORM
    monkeypatch.setattr(optimizers, "plain", lambda optimizer: nullcontext())
    take_updates(trained, 1)
    assert {str(call) for call in calls} > NORM  # so they are seen: clipping, and the step


def plain(name: str, net: Wide, updates: int) -> dict[str, Tensor]:
    """Return the weights after updates with the optimizer of a library, at a constant learning rate."""
    from transformers.optimization import Adafactor

    kinds: dict[str, Any] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1),
        "muon": matrices_and_others,
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.8, weight_decay=0.1),
        "adafactor": lambda p: Adafactor(
            p, lr=0.01, weight_decay=0.1, relative_step=False, scale_parameter=False, warmup_init=False
        ),
    }
    if name == "prodigy":
        return estimated(net, updates)
    optimizer = kinds[name](net.parameters())
    items, weight = data(12)
    for _ in range(updates):
        ((squared(net)(items)[0] * weight).sum() / 12).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def estimated(net: Wide, updates: int) -> dict[str, Tensor]:
    """Return the weights after updates with Prodigy's rule, written over one flat vector in float64, at lr 1."""
    (b1, b2), eps, decay, d, r = (0.8, 0.95), 1e-5, 0.1, 1e-6, 0.0
    items, weight = data(12)
    first = torch.nn.utils.parameters_to_vector(net.parameters()).detach().double()
    w, m, v, s = first, *torch.zeros(3, len(first)).double()
    for _ in range(updates):
        net.zero_grad()
        ((squared(net)(items)[0] * weight).sum() / 12).backward()
        g = torch.nn.utils.parameters_to_vector([p.grad for p in net.parameters() if p.grad is not None]).double()
        m, v = b1 * m + (1 - b1) * d * g, b2 * v + (1 - b2) * (d * g) ** 2
        s, r = b2**0.5 * s + d * d * g / 1e-6, b2**0.5 * r + d * d * float(g @ (first - w)) / 1e-6
        after = max(d, r / float(s.abs().sum()))
        w = w * (1 - decay * d) - d * m / (v.sqrt() + after * eps)
        d = after
        torch.nn.utils.vector_to_parameters(w.float(), net.parameters())
    return net.state_dict()


def matrices_and_others(parameters: Any) -> Any:
    """Return torch's Muon with an AdamW for what is no matrix, as one optimizer."""
    held: list[Tensor] = list(parameters)
    both: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    others = torch.optim.AdamW([p for p in held if p.ndim != 2], betas=(0.8, 0.95), eps=1e-5, **both)
    matrices = torch.optim.Muon([p for p in held if p.ndim == 2], adjust_lr_fn="match_rms_adamw", **both)
    matrices.register_step_post_hook(lambda *_: (others.step(), others.zero_grad())[1])
    return matrices


SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1} for name in ("adamw", "muon", "prodigy")},
    "sgd": {"betas": (0.8, 0.9), "weight_decay": 0.1},
    "adafactor": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_optimizer_steps_as_its_library_does(one: World, name: str) -> None:
    """Betas, eps and weight decay reach it: AdamW, SGD and Muon of torch, transformers' Adafactor, and Prodigy's rule."""
    trained = engine(one, name, schedule="constant", warmup=0, ema_decay=0.0, max_grad_norm=1e9, **SETTINGS[name])
    count = 20 if name == "prodigy" else 4  # whose first steps are tiny
    take_updates(trained, count)
    for key, tensor in plain(name, Wide(), count).items():
        torch.testing.assert_close(dict(trained.weights())[key], tensor, rtol=1e-5, atol=1e-5 if count > 4 else 1e-6)


QUICK = ("adafactor", "adamw8bit", "muon", "prodigy", "sgd")


@cache
def states_of_ranks(ranks: int, *names: str) -> dict[str, dict[str, Any]]:
    """Return the states that a number of ranks reach, by optimizer."""
    found: dict[str, dict[str, Any]] = launch.on_ranks(ranks, "workers.ranks:step_optimizers", *names)[0]
    return found


@pytest.mark.parametrize("name", [*QUICK, long("adamw4bit")])
def test_ranks_step_as_one_process_does(one: World, name: str) -> None:
    """Two and three ranks, with rows that do not divide, and a rank without rows."""
    with real_torchao.available(name):
        trained = engine(one, name)
        take_updates(trained, 3)
    expected = gather_state(trained)
    for ranks in (2, 3):
        found = states_of_ranks(ranks, *(QUICK if name in QUICK else (name,)))[name]
        assert set(found) == set(expected)
        for key, tensor in expected.items():
            atol = 1 if ".codes." in key else 1e-3 if name.startswith("adamw") else 1e-6  # a code may round to its neighbour
            atol = 0 if key.startswith("estimate.") else atol
            torch.testing.assert_close(torch.tensor(found[key], dtype=tensor.dtype), tensor, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_knows_each_optimizers_state(one: World, name: str) -> None:
    """Bytes of all tensors that the optimizer holds after a step."""
    from fluvial.engines.extensions.plan.check import _list_parts

    with real_torchao.available(name):
        trained = engine(one, name)
        take_updates(trained, 1)
        states = [tensor for state in trained.optimizer.state.values() for tensor in state.values()]
    held = sum(part.untyped_storage().nbytes() for tensor in states for part in _list_parts(tensor))
    shapes = [tuple(p.shape) for p in trained.trainable.values()]
    assert sum(OPTIMIZERS[trained.config.name].nbytes(shape, trained.config, ranks=1) for shape in shapes) == held
    assert (held < 4 * sum(map(math.prod, shapes))) == (name in ("adafactor", "adamw8bit", "adamw4bit"))


def test_prodigy_estimates_whatever_the_gradients_scale(one: World) -> None:
    """d never falls, and with eps far below the gradients neither it nor the weights depend on their scale."""
    items, weight = data(12)
    found, plain_steps = list[Any](), {"eps": 1e-30, "max_grad_norm": 1e9, "schedule": "constant", "warmup": 0}
    for scale in (1.0, 1e-3):
        trained, estimates = engine(one, "prodigy", **cast(Any, plain_steps)), list[float]()
        for _ in range(20):
            trained.update(items, squared(trained.module), weight * scale)
            estimates.append(float(next(iter(trained.optimizer.state.values()))["estimate"][0]))
        assert estimates == sorted(estimates)
        assert estimates[-1] > 100 * estimates[0] > 0
        found.append((torch.tensor(estimates), dict(trained.weights(average=False))))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_a_buffer_in_8_bits_takes_a_quarter_and_one_in_4_an_eighth() -> None:
    """Codes of a byte or half of one, a scale per block, and the table; rows that are no whole blocks stay in float32."""
    assert Buffer((64, 512), bits="signed8").nbytes(2) == 32 * 512 + 4 * 32 * 2 + 1024
    assert Buffer((64, 500), bits="signed8").nbytes(2) == 4 * 32 * 500
    assert Buffer((2, 512), bits="signed8").nbytes(1) == 4 * 1024  # too small
    assert Buffer((64, 512), bits="unsigned4").nbytes(2) == 32 * 256 + 4 * 32 * 4 + 64
    assert Buffer((64, 384), bits="unsigned4").quantised
    assert not Buffer((64, 384), bits="unsigned8").quantised


@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit"])
def test_a_missing_package_is_named(one: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In one line, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UsageError, match=r"needs the package torchao .*pip install 'fluvial\[lowbit\]'") as error:
        engine(one, name)
    assert "\n" not in str(error.value)


def test_gradients_below_eps_are_warned_of_once(one: World) -> None:
    """The message has the gradient's RMS and a value that works; a gradient of 0, and other optimizers, are no reason."""
    items, weight = data(12)

    def update(trained: Engine, scale: float) -> None:
        trained.update(items, squared(trained.module), weight * scale)

    frozen, says = (engine(one, "adamw"), r"RMS of \d\.\de-1\d at update 1, below optimizer.eps \(1e-08\).*\de-1\d or less")
    with pytest.warns(UserWarning, match=says):
        update(frozen, 1e-9)
    update(frozen, 1e-9)  # from here on a warning is an error
    update(engine(one, "adamw"), 0.0)
    update(engine(one, "adamw"), 1.0)
    update(engine(one, "adamw", eps=1e-15), 1e-9)
    update(engine(one, "sgd"), 1e-9)


def test_a_small_eps_trains_on_small_gradients(one: World) -> None:
    """With gradients of RMS 1e-9 the default eps shrinks a step to a tenth; one well below leaves it as it is."""
    items, weight = data(12)

    def moved(eps: float) -> float:
        trained = engine(one, "adamw", eps=eps, schedule="constant", warmup=0)
        before = copy.deepcopy(dict(trained.weights(average=False)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained.update(items, squared(trained.module), weight * 1e-9)
        after = dict(trained.weights(average=False))
        return max(float((after[key] - before[key]).abs().max()) for key in before)

    assert moved(1e-16) == pytest.approx(0.01, rel=0.05)
    assert moved(1e-8) < 0.005
