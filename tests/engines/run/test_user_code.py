"""User code may keep and change whatever it is given and returns: the run has the same bits."""

from collections.abc import Callable, Iterator
from dataclasses import fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.marks import long
from helpers.objective_rows import OBJECTIVE_ROWS
from helpers.spied_runs import ODE, STEPS
from torch import Tensor

from fluvial.core import transitions
from fluvial.core.random import Key
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.engine.world import World
from fluvial.engines.methods.sft import Sft
from fluvial.engines.run.run import Run
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.config import ReadingConfig, SamplingConfig
from fluvial.engines.sampling.samplers import SamplerRule, Stochastic
from fluvial.models.replay.media import MediaPrompt

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
PROMPTS = [Prompt(text, metadata={"words": [text, "x"], "n": {"deep": [int(text)]}}) for text in tiny.PROMPTS]


@torch.no_grad()
def destroy(value: Any) -> None:
    """Change a value in place, and all that it holds."""
    if isinstance(value, Tensor):
        value.detach().fill_(7)
    elif isinstance(value, Prompt | MediaPrompt):
        destroy(value.__dict__["media"])
        destroy(getattr(value, "metadata", {}))
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            destroy(inner)
        if not isinstance(value, tuple):
            value.clear()


def pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as it is."""
    return function


def destroying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes with copies, and then destroys its arguments and its last result."""
    last: list[Any] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        destroy(last)
        copies = optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        result = function(*copies[0], **copies[1])
        last.append(result)
        destroy([args, kwargs])
        return result

    called.__dict__["__wrapped__"] = function  # whose signature it has
    return called


def scored(images: Tensor, prompts: Any, metadata: Any, latents: Tensor, model_inputs: Any) -> Tensor:
    """Score samples by all that a reward may take."""
    known = torch.tensor([len(record["words"]) + record["n"]["deep"][0] for record in metadata])
    return images.mean((1, 2, 3)) + latents.std((1, 2, 3)) + known * torch.tensor([float(text) for text in model_inputs])


def grouped(images: Tensor, prompts: Any, metadata: Any, group: int) -> Tensor:
    """Score samples by their place in the group."""
    return images.mean((1, 2, 3)).argsort().argsort().float() + metadata[0]["n"]["deep"][0]


def bright(images: Tensor, prompts: Any) -> Tensor:
    """Score samples with a gradient."""
    return images.mean((1, 2, 3))


class Decodes(tiny.Tiny):
    """A model whose images are made by a function."""

    decoded: Any

    def decode(self, latents: Tensor) -> Tensor:
        """Return grey images."""
        images: Tensor = self.decoded(latents)
        return images.clone()


def model(wrap: Wrap) -> tiny.Tiny:
    """Return a model that decodes by a function."""
    made = Decodes()
    object.__setattr__(made, "decoded", wrap(made.__class__.__base__.decode.__get__(made)))  # type: ignore[union-attr]
    return made


def objective(name: str, wrap: Wrap) -> Any:
    """Return a custom objective that is a built-in one, of functions of tensors that are wrapped."""
    row: Any = OBJECTIVE_ROWS[name]

    def method(name: str) -> Callable[..., Any]:
        function = wrap(getattr(row, name))
        return lambda self, *args, **known: function(*args, **known)

    def learn(self: Any, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        record = wrap(lambda grades: run.record_steps(batch, key, grades.advantage, keep=grades.keep))
        for part in run.minibatches(record(run.grade(batch)), key, self.passes):
            yield run.update(part, self.loss)
        wrap(lambda *held: None)([*batch.prompts, batch.prompt(0)], batch.rewards)

    space = {name: method(name) for name in ("loss", "implicit_reward", "centre") if hasattr(row, name)}
    space |= {"learn": learn} if name == "clipped" else {}
    values = {each.name: getattr(row, each.name) for each in fields(row)}
    return make_dataclass("Own", [], bases=(type(row),), frozen=True, namespace=space)(**values)


def drift(level: Tensor, level_next: Tensor, *, eta: float) -> transitions.Transition:
    """Return Euler's step with noise of a constant rate on top."""
    dt = level_next - level
    return transitions.Transition(torch.ones_like(level), dt, eta * torch.sqrt(-dt))


def sampler(wrap: Wrap, *, rule: bool) -> SamplingConfig:
    """Return a rollout with a custom sampler, a function or a rule that binds one."""

    step = wrap(drift)
    bind = wrap(lambda eta, levels: partial(step, eta=eta))
    return replace(STEPS, sampler=Stochastic(SamplerRule(bind) if rule else step, eta=0.3))


READ = ReadingConfig(prompts=8, steps=STEPS.steps)
CUSTOM = ("clipped", "nft, linear", "crd", "dpo, online", "alignprop")  # objectives whose functions a custom one has
KINDS: dict[str, Callable[[Wrap], tuple[dict[str, Any], dict[str, Any]]]] = {
    "reward": lambda wrap: ({}, {"rewards": {"first": wrap(scored), "bright": bright}}),
    "reward of groups": lambda wrap: ({}, {"rewards": {"first": wrap(grouped), "bright": bright}}),
    "reward with a gradient": lambda wrap: ({"method": OBJECTIVE_ROWS["alignprop"]}, {"rewards": wrap(bright)}),
    "evaluator": lambda wrap: ({}, {"evaluators": {"first": wrap(scored), "heldout": bright}}),
    "decoding": lambda wrap: ({"method": OBJECTIVE_ROWS["nft, none"]}, {"model": model(wrap)}),
    "data": lambda wrap: ({"method": OBJECTIVE_ROWS["sft"]}, {"data": wrap(tiny.drawn)}),
    "sampler": lambda wrap: ({"sampling": sampler(wrap, rule=False)}, {}),
    "rule of a sampler": lambda wrap: ({"sampling": sampler(wrap, rule=True)}, {}),
    **{name: lambda wrap, name=name: ({"method": objective(name, wrap)}, {}) for name in CUSTOM},  # type: ignore[misc]
    # its batch has prompts whose records the evaluator reads
    "clipped": lambda wrap: ({"method": objective("clipped", wrap)}, {"evaluators": {"first": scored}}),
}


LONG = ("reward of groups", "rule of a sampler", "nft, linear", "dpo, online", "alignprop")  # like one of the others


def digest(kind: str, wrap: Wrap, world: World) -> str:
    """Return all numbers and weights of a rollout's updates and an evaluation."""
    changes, of_job = KINDS[kind](wrap)
    method = changes.get("method", OBJECTIVE_ROWS["clipped"])
    default = READ if isinstance(method, Sft) else ODE if method.recorded is None else STEPS
    changes = {"sampling": default, **changes}
    passes = {} if method.needs.rewards == "gradients" else {"passes.minibatches": 2}
    job = tiny.job(**{"prompts": PROMPTS, "heldout": PROMPTS[:2], **of_job})
    config = tiny.config(
        Path("out"),
        updates=passes.get("passes.minibatches", 1),
        **{"engine.micro_batch": 4, "train": "lora", **passes, **changes},
    )
    names = tuple(job.rewards) if "rewards" in of_job and config.method.is_scored else config.rewards
    kept: list[Any] = []
    with Trainer(replace(config, rewards=names), job, world) as trainer:
        record = trainer.update()
        result = trainer.evaluate(8, keep=wrap(lambda names, images: kept.append([list(names), images.clone()])))
        weights = trainer.engine.sharded.shards()
        for name in ("seconds", "speed", "memory"):
            record.pop(name, None)
        values = [record, kept, result.score, result.exact, result.images, result.scores.values, dict(weights)]
        return repr(optree.tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else leaf, values))


@pytest.mark.bits
@pytest.mark.parametrize("kind", [long(kind) if kind in LONG else kind for kind in KINDS])
def test_what_it_does_to_its_arguments_changes_nothing(kind: str, one: World) -> None:
    """Nor what it does to what it has returned."""
    expected = digest(kind, pure, one)
    assert digest(kind, destroying, one) == expected
