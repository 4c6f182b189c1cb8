"""Every public function of core under every transform, against what it returns eagerly in float64: one table.

It runs without run-time type checks (see tests/sessions.py), which no graph can hold.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if os.environ.get("FLUVIAL_NO_TYPECHECK") != "1":
    pytest.skip("runs in the session without type checks (tests/sessions.py)", allow_module_level=True)

import torch
from helpers.core_functions import BATCH, CHECKS, HOST, ROWS, FunctionCall, public
from helpers.tables import DTYPES
from helpers.tolerances import COMPUTE_DTYPE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map

# torch's table of forward-mode decompositions, imported at the first jvp, still scripts them.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
Arguments = dict[str, Tensor]


def rows(accept: Callable[[FunctionCall], object]) -> pytest.MarkDecorator:
    """Return the rows that are accepted as the tests of a function."""
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if accept(row)])


# A graph takes long to make: one holds the functions of a module, by default the first row of each alone.
FIRST = list({row.name.split()[0]: row for row in reversed(ROWS)}.values())


def graphs(accept: Callable[[FunctionCall], object]) -> pytest.MarkDecorator:
    """Return the rows that are accepted, by module, as the tests of a function that makes graphs."""
    found: dict[tuple[str, bool], list[FunctionCall]] = {}
    for row in filter(accept, ROWS):
        found.setdefault((row.name.split(".")[0], row in FIRST), []).append(row)
    return pytest.mark.parametrize(
        "several",
        [
            pytest.param(each, id=module if first else f"{module}, other forms", marks=() if first else pytest.mark.long)
            for (module, first), each in found.items()
        ],
    )


# Functions whose results have the dtype of what they are given, and those of one number per sample that depends on it alone.
KEEP = ("checks", "ema", "host", "sigmas", "step.kl", "table", "types")
OBJECTIVES = ("adjoint", "adversarial", "awm", "correction", "crd", "dgpo", "distill", "dpo", "guidance", "nft", "policy")
MATHEMATICS = (*OBJECTIVES, "flow_m", "gaussian", "step", "trans")
TOGETHER = ("dgpo.group_weight", "dpo.best_and_worst")


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def weights(place: int, tensor: Tensor) -> Tensor:
    return torch.cos(torch.arange(tensor.numel(), dtype=torch.float64) * 1.7 + place).reshape(tensor.shape)


def weigh(row: FunctionCall, arguments: Arguments) -> Tensor:
    floating = [leaf.double() for leaf in tensors(row.call(**arguments)) if leaf.is_floating_point()]
    weighed = [(leaf * weights(place, leaf)).sum() for place, leaf in enumerate(floating)]
    return torch.stack(weighed).sum() if weighed else torch.zeros(())


def split(row: FunctionCall, seed: int = 0) -> tuple[Arguments, Callable[[Arguments], Tensor]]:
    arguments, names = row.arguments(seed), row.learned()
    return {name: arguments[name] for name in names}, lambda learned: weigh(row, arguments | learned)


def equal(found: Any, expected: Any) -> None:
    left, right = tensors(found), tensors(expected)
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_every_public_function_is_in_the_table() -> None:
    named = {row.name.split()[0] for row in ROWS if "." in row.name}
    assert {*named, *HOST, *CHECKS} == set(public())


@rows(lambda row: not row.name.startswith(KEEP))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_computed_in_float32_or_float64(row: FunctionCall, dtype: torch.dtype) -> None:
    rounded = {name: t.to(dtype) if t.is_floating_point() else t for name, t in row.arguments().items()}
    found = tensors(row.call(**rounded))
    expected = tensors(row.call(**{name: t.double() if t.is_floating_point() else t for name, t in rounded.items()}))
    limit = 1000 * torch.finfo(COMPUTE_DTYPE[dtype]).eps
    for one, other in zip(found, expected, strict=True):
        if one.is_floating_point():
            assert one.dtype in (torch.float32, torch.float64)
        assert_close(one.double(), other.double(), rtol=limit, atol=limit)


@rows(lambda row: row.numbers)
def test_a_number_is_a_float_or_a_tensor(row: FunctionCall) -> None:
    arguments = row.arguments()
    equal(
        row.call(**arguments | row.numbers),
        row.call(**arguments | tree_map(lambda n: torch.full((BATCH,), n, dtype=torch.float64), row.numbers)),
    )
    equal(
        row.call(**arguments | row.numbers),
        row.call(**arguments | tree_map(lambda n: torch.tensor(n, dtype=torch.float64), row.numbers)),
    )


@rows(lambda row: row.name.startswith(MATHEMATICS) and not row.name.startswith(TOGETHER))
@pytest.mark.parametrize("batch", [0, 1])
def test_a_sample_does_not_depend_on_the_others(row: FunctionCall, batch: int) -> None:
    arguments = row.arguments()
    part = tensors(row.call(**{name: t[:batch] if t.ndim else t for name, t in arguments.items()}))
    for one, whole in zip(part, tensors(row.call(**arguments)), strict=True):
        if whole.ndim > 0:
            assert_close(one, whole[:batch], rtol=1e-13, atol=1e-15)


@rows(bool)
def test_grad(row: FunctionCall) -> None:
    learned, function = split(row)
    leaves = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in row.arguments().items()}
    floating = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    result = weigh(row, leaves)
    assert result.requires_grad == bool(learned)
    if not learned:
        return
    gradients = torch.autograd.grad(result, [*floating.values()], materialize_grads=True)
    moved = {name: gradient for name, gradient in zip(floating, gradients, strict=True) if gradient.any()}
    assert set(moved) == set(learned)
    equal(torch.func.grad(function)(learned), moved)
    if not row.held:
        values = tuple(tensor.requires_grad_() for tensor in learned.values())
        assert torch.autograd.gradcheck(lambda *values: function(dict(zip(learned, values, strict=True))), values)


@rows(FunctionCall.learned)
def test_jvp(row: FunctionCall) -> None:
    learned, function = split(row)
    direction = {name: weights(place, tensor) for place, (name, tensor) in enumerate(learned.items())}
    _, derivative = torch.func.jvp(function, (learned,), (direction,))  # type: ignore[misc]
    gradients = torch.func.grad(function)(learned)
    expected = torch.stack([(gradients[name] * direction[name]).sum() for name in learned]).sum()
    assert_close(derivative, expected, rtol=1e-8, atol=1e-12)


@rows(FunctionCall.learned)
def test_hessian(row: FunctionCall) -> None:
    learned, function = split(row)
    equal(torch.func.hessian(function)(learned), torch.func.jacrev(torch.func.grad(function))(learned))


@rows(bool)
def test_vmap(row: FunctionCall) -> None:
    each = [row.arguments(seed) for seed in range(3)]
    stacked = {name: torch.stack([arguments[name] for arguments in each]) for name in each[0]}
    found = torch.func.vmap(lambda arguments: tensors(row.call(**arguments)))(stacked)
    for place, arguments in enumerate(each):
        equal([tensor[place] for tensor in found], row.call(**arguments))


@rows(FunctionCall.learned)
def test_vmap_of_grad(row: FunctionCall) -> None:
    each = [split(row, seed) for seed in range(2)]
    whole = [row.arguments(seed) for seed in range(2)]
    stacked = {name: torch.stack([arguments[name] for arguments in whole]) for name in whole[0]}

    names = row.learned()

    def gradient(arguments: Arguments) -> Arguments:
        return torch.func.grad(lambda learned: weigh(row, arguments | learned))({name: arguments[name] for name in names})

    found = torch.func.vmap(gradient)(stacked)
    for place, (learned, function) in enumerate(each):
        equal({name: tensor[place] for name, tensor in found.items()}, torch.func.grad(function)(learned))


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """Compile a function whole; aot_eager traces forward and backward, and runs the same kernels, with no C++ compiler."""
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@graphs(lambda row: not row.not_compiled)
def test_compile(several: list[FunctionCall], compiled: Callable[..., Any]) -> None:
    def call(arguments: list[Arguments]) -> list[Any]:
        return [row.call(**each) for row, each in zip(several, arguments, strict=True)]

    results = []
    for function in (call, compiled(call)):
        arguments = [row.arguments() for row in several]
        learned = [
            each[name].requires_grad_() for row, each in zip(several, arguments, strict=True) for name in row.learned()
        ]
        found = tensors(function(arguments))
        loss = sum((t * weights(i, t)).sum() for i, t in enumerate(found) if t.requires_grad)
        gradients = torch.autograd.grad(loss, learned) if isinstance(loss, Tensor) else ()
        results.append([*(tensor.detach() for tensor in found), *gradients])
    equal(*results)


@rows(bool)
def test_fake(row: FunctionCall) -> None:
    expected = tensors(row.call(**row.arguments()))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = tensors(row.call(**{name: mode.from_tensor(tensor) for name, tensor in row.arguments().items()}))
    assert [(tensor.shape, tensor.dtype) for tensor in found] == [(tensor.shape, tensor.dtype) for tensor in expected]


class Forward(torch.nn.Module):
    """A module of a function, as `torch.export` takes one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Any:
        return self.function(*values)


def export(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: torch.export.export(Forward(function), values).module()


@graphs(bool)
@pytest.mark.parametrize("trace", [make_fx, pytest.param(export, marks=pytest.mark.long)])
def test_a_trace_has_no_value_of_its_arguments(several: list[FunctionCall], trace: Callable[..., Any]) -> None:
    several = [row for row in several if trace is make_fx or not row.not_compiled]

    def call(*values: Tensor) -> list[Tensor]:
        left = iter(values)
        return tensors([row.call(**{name: next(left) for name in row.arguments()}) for row in several])

    first, second = ([value for row in several for value in row.arguments(seed).values()] for seed in (0, 1))
    equal(trace(call)(*first)(*second), call(*second))


def state() -> tuple[dict[str, Any], dict[str, int]]:
    """Return what functions of core could leave behind (values of modules, torch's generator and defaults); cache sizes."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("fluvial.core")}
    values = {f"{name}.{key}": value for name, module in modules.items() for key, value in vars(module).items()}
    held = {name: repr(value) for name, value in values.items() if not callable(value) and "__" not in name}
    torchs = {"seed": torch.random.initial_seed(), "generator": torch.random.get_rng_state().tolist()}
    torchs |= {"dtype": torch.get_default_dtype(), "grad": torch.is_grad_enabled()}
    return held | torchs, {
        name: value.cache_info().currsize for name, value in values.items() if hasattr(value, "cache_info")
    }


def test_no_state_of_the_process_changes() -> None:
    """Caches know the types of a class's fields after one call; they do not grow with calls."""
    states = [state()]
    for seed in range(2):
        for row in ROWS:
            row.call(**row.arguments(seed))
        states.append(state())
    before, after, again = states
    assert before[0] == after[0]
    assert after == again
