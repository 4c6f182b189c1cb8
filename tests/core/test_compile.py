"""The hot functions compile whole (fullgraph) and give what they give when run eagerly.

It runs without run-time type checks (see tests/sessions.py), which no graph can hold.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if os.environ.get("FLUVIAL_NO_TYPECHECK") != "1":
    pytest.skip("runs in the session without type checks (tests/sessions.py)", allow_module_level=True)

import torch
from tables import OBJECTIVES, SAMPLERS, ObjectiveRow, SamplerRow, normals, objective_inputs
from torch import Tensor
from torch.testing import assert_close

from fluvial.core import advantages, correction, dpo, flow_matching, gaussian, policy
from fluvial.core.gaussian import FORMS, Form
from fluvial.core.random import fold_in, key, normal
from fluvial.core.transitions import Transition, cps, dance_sde

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

STEP = dance_sde(torch.tensor([0.9, 0.5, 0.3]), torch.tensor([0.7, 0.4, 0.1]), eta=0.6)
X, V, X_NEXT = normals(0, 3, 3, 41, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # aot_eager traces forward and backward and runs the same kernels: what breaks a graph breaks here, with no C++ compiler.
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("row", SAMPLERS, ids=lambda row: row.name)
def test_a_sampler_and_its_step(row: SamplerRow) -> None:
    grid = row.grid(8)
    sigma, sigma_next = grid[2:5], grid[3:6]

    def step(sigma: Tensor, sigma_next: Tensor, x: Tensor, v: Tensor, noise: Tensor) -> tuple[Transition, Tensor]:
        transition = row.bind(0.6)(sigma, sigma_next)
        return transition, gaussian.sample(transition, x, v, noise)

    arguments = (sigma, sigma_next, X, V, X_NEXT)
    assert_close(compiled(step)(*arguments), step(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_log_prob_and_kl_with_their_gradients(form: Form) -> None:
    def loss(v: Tensor) -> Tensor:
        log_prob = gaussian.log_prob(STEP, X, v, X_NEXT, form=form)
        return log_prob + gaussian.kl(STEP, v, X)

    results = []
    for function in (loss, compiled(loss)):
        v = V.clone().requires_grad_()
        value = function(v)
        (gradient,) = torch.autograd.grad(value, v, torch.tensor([1.0, -2.0, 0.5]))
        results.append((value.detach(), gradient))
    eps = torch.finfo(torch.float32).eps
    assert_close(results[0], results[1], rtol=8 * eps, atol=8 * eps)


def test_a_deterministic_step_is_nan_in_a_graph() -> None:
    step = STEP._replace(std=torch.tensor([0.1, 0.0, 0.2]))
    got = compiled(lambda v: (gaussian.log_prob(step, X, v, X_NEXT), gaussian.kl(step, v, X)))(V)
    for value in got:
        assert value.isnan().tolist() == [False, True, False]
    last = cps(torch.tensor([0.3, 0.2, 0.1]), 0.0, eta=0.5)
    assert compiled(lambda v: gaussian.log_prob(last, X, v, X_NEXT))(V).isnan().all()


def test_the_policy_step_as_a_trainer_composes_it() -> None:
    group = torch.tensor([0, 0, 1])

    def step(v: Tensor, reward: Tensor) -> tuple[Tensor, policy.PolicyInfo]:
        advantage = advantages.group_advantages(reward, group)
        log_prob = gaussian.log_prob(STEP, X, v, X_NEXT)
        return policy.clipped_surrogate(log_prob, log_prob.detach() - 0.01, advantage, clip_low=0.2, clip_high=0.2)

    reward = torch.tensor([1.0, 0.0, 0.5])
    eps = torch.finfo(torch.float32).eps
    assert_close(compiled(step)(V, reward), step(V, reward), rtol=8 * eps, atol=8 * eps)


def test_noise_is_the_same_bits() -> None:
    def draw(ids: Tensor) -> Tensor:
        return normal(fold_in(fold_in(key(2**63 + 1), ids), 7), (3, 41))

    ids = torch.tensor([0, 5, 2**40])
    assert torch.equal(compiled(draw)(ids), draw(ids))


def test_flow_matching() -> None:
    def loss(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        return flow_matching.velocity_error(flow_matching.interpolate(x0, noise, sigma), noise - x0)

    sigma = torch.tensor([0.1, 0.5, 0.9])
    eps = torch.finfo(torch.float32).eps
    assert_close(compiled(loss)(X, V, sigma), loss(X, V, sigma), rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("row", OBJECTIVES, ids=lambda row: row.name)
def test_an_objective_with_its_gradients(row: ObjectiveRow) -> None:
    inputs = objective_inputs(row, 5)
    results = []
    for function in (row.call, compiled(row.call)):
        tensors = {name: tensor.clone().requires_grad_(name in row.policy) for name, tensor in inputs.items()}
        value = function(**tensors)
        of = [tensors[name] for name in row.policy]
        gradients = torch.autograd.grad(value, of, torch.linspace(-1, 2, 5).double()) if of else ()
        results.append((value.detach(), *gradients))
    assert_close(results[1], results[0], rtol=1e-13, atol=1e-15)


def test_diagnostics_and_pairs_are_in_the_graph() -> None:
    old, rollout = normals(0, 2, 3, 4) / 5

    def step(old: Tensor, rollout: Tensor, reward: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        pairs = dpo.best_and_worst(reward, torch.tensor([0, 0, 1, 1, 1]))
        info = correction.rollout_weights(old, rollout, mode="reject", threshold=1.1, level="trajectory")[1]
        return tuple(pairs), tuple(info)

    arguments = (old, rollout, torch.tensor([1.0, 0.0, 0.5, 0.5, 0.7]))
    assert_close(compiled(step)(*arguments), step(*arguments), rtol=1e-13, atol=1e-15)
