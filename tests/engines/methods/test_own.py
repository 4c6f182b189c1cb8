"""User-defined objectives and samplers: they train, are recorded and resumed, and a broken one is one line."""

import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import pages
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from torch import Tensor

from fluvial import kernels
from fluvial.core.random import Key
from fluvial.core.transitions import Transition
from fluvial.engines.cli.parse import parse_config
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.engine.world import World
from fluvial.engines.errors import FluvialError, UsageError
from fluvial.engines.methods import ErrorInfo, Follower, Method, Needs, NoisingConfig
from fluvial.engines.methods.table import method_type
from fluvial.engines.run import train
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.settings import MachineConfig
from fluvial.engines.run.method import check_method
from fluvial.engines.run.record import as_record, read_record
from fluvial.engines.run.run import Run
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import NoisedSamples, RecordedSteps
from fluvial.engines.sampling.samplers import Ode, SamplerRule, Stochastic
from fluvial.kernels import velocity_error

ODE = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Ode())

SOURCE = '''
from dataclasses import dataclass
import torch
from fluvial.core.transitions import Transition
from fluvial.engines.methods import ErrorInfo, Method, NoisingConfig, PassesConfig, SamplingConfig
from fluvial.kernels import velocity_error

@dataclass(frozen=True)
class Weighted(Method):
    """Fit samples by their advantage's sigmoid.

    Args:
        sampling: How samples are made.
        noising: Noise levels.
        passes: How often a batch is learnt from.
        temperature: Advantage that counts as large.
    """

    sampling: SamplingConfig = SamplingConfig()
    noising: NoisingConfig = NoisingConfig()
    passes: PassesConfig = PassesConfig()
    temperature: float = 1.0

    def learn(self, run, batch, key):
        grades = run.grade(batch)
        good = torch.sigmoid(grades.advantage / self.temperature)
        items = run.noise_samples(batch, self.noising, key, good, keep=grades.keep)
        for part in run.minibatches(items, key, self.passes):
            yield run.update(part, self.loss)

    def loss(self, v, rows):
        error = velocity_error(v, rows.target)
        return rows.signal * error, ErrorInfo(error.detach(), torch.zeros_like(error))

def drift(level, level_next, *, eta):
    dt = level_next - level
    return Transition(torch.ones_like(level), dt, eta * torch.sqrt(-dt))
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `own_objects` in a folder that Python searches."""
    (tmp_path / "own_objects.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_objects", None)


class RewardInfo(NamedTuple):
    """Diagnostics of `Reinforce`."""

    log_ratio: Tensor


@dataclass(frozen=True)
class Reinforce(Method):
    """The plain policy gradient on recorded steps, with a log-probability written out here."""

    needs = Needs(ratio=True)
    sampling: SamplingConfig = SamplingConfig()
    scale: float = 1.0

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Weigh every step by the advantage of its sample, scaled."""
        grades = run.grade(batch)
        steps = run.record_steps(batch, key, self.scale * grades.advantage, keep=grades.keep, skip_zero=True)
        for part in run.minibatches(steps, key, self.passes):
            yield run.update(part, self.loss)

    def loss(self, v: Tensor, items: RecordedSteps) -> tuple[Tensor, RewardInfo]:
        """-A log p; the ratio's constant takes no part in the gradient."""
        a, b, std = (part[:, None, None, None] for part in items.transition)
        log_prob = (-((items.x_next - a * items.x - b * v) ** 2) / (2 * std**2)).mean((1, 2, 3))
        return -items.signal * log_prob, RewardInfo(torch.zeros_like(log_prob.detach()))


def drift(level: Tensor, level_next: Tensor, *, eta: float) -> Transition:
    """Return Euler's step with noise of a constant rate on top."""
    dt = level_next - level
    return Transition(torch.ones_like(level), dt, eta * torch.sqrt(-dt))


@pytest.mark.slow
def test_they_train_the_built_in_job(tmp_path: Path, own: None) -> None:
    """Named by their module they are in config.json, from which the run goes on."""
    config = TrainConfig(
        tmp_path / "run",
        train="lora",
        updates=1,
        method=method_type("own_objects:Weighted")(  # type: ignore[call-arg]
            temperature=0.5,
            sampling=SamplingConfig(prompts=2, group=2, steps=4, sampler=Stochastic("own_objects:drift", eta=0.3)),
        ),
        evaluation=EvaluationConfig(samples=2, final_samples=2),
        engine=MachineConfig(micro_batch=4, update_micro_batch="rollout"),
    )
    summary = train(config)
    assert summary["updates"] == 1
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["method"]["name"] == "own_objects:Weighted"
    assert record["method"]["temperature"] == 0.5
    assert record["method"]["sampling"]["sampler"] == {"kind": "own_objects:drift", "eta": 0.3}
    del sys.modules["own_objects"]  # another process loads it again
    again = read_record(record)
    assert type(again.method) is method_type("own_objects:Weighted")
    summary = train(replace(again, updates=2, resume=True))
    assert summary["updates"] == 2
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["update"] for record in metrics if "loss" in record] == [1, 2]


def test_objects_of_this_file_train(one: World, tmp_path: Path) -> None:
    """Passed in Python, without a name: the noise is the sampler's, and the gradient that of the loss."""
    rollout = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(drift, eta=0.3))
    run = tiny.Run(tiny.config(tmp_path, sampling=rollout, method=Reinforce()), one)
    run.rollout()
    doubled = tiny.Run(tiny.config(tmp_path, sampling=rollout, method=Reinforce(scale=2.0)), one)
    doubled.rollout()
    assert run.infos[0].grad_norm > 0
    assert doubled.infos[0].grad_norm == pytest.approx(2 * run.infos[0].grad_norm, rel=1e-4)
    levels = run.trainer.schedule.levels
    step = run.trainer.sampler.schedules.of(run.trainer.job.shape)[1](levels[:-1], levels[1:])
    torch.testing.assert_close(step.std, 0.3 * (levels[:-1] - levels[1:]).sqrt())


def test_their_records() -> None:
    """An object without a name outside of this file is recorded, too; only reading it back says that it is not found."""
    config = tiny.config(
        Path("out"), sampling=SamplingConfig(prompts=2, group=4, sampler=Stochastic(drift)), method=Reinforce(scale=2.0)
    )
    record = json.loads(json.dumps(as_record(config)))
    assert record["method"]["name"] == config.method.method_name == f"{__name__}:Reinforce"
    assert record["method"]["sampling"]["sampler"] == {"kind": f"{__name__}:drift", "eta": 0.8}

    def local(level: Tensor, level_next: Tensor, *, eta: float) -> Transition:
        return drift(level, level_next, eta=eta)

    record = as_record(with_values(config, {"sampling.sampler": Stochastic(local, eta=0.5)}))
    refuses(r"<locals>.local' is defined inside of a function", read_record, record)


def test_a_rule_says_more_of_a_sampler() -> None:
    """What is refused of a built-in sampler is refused of one's own with the same rule."""
    rule = SamplerRule(lambda eta, levels: lambda a, b: drift(a, b, eta=eta), max_eta=0.5, prediction="epsilon")
    assert Stochastic(rule, eta=0.5).rule is rule
    refuses(r"sampling.sampler.eta is 0.8, expected at most 0.5", Stochastic, rule, eta=0.8)


# What is broken ends in one line.


@dataclass
class Thawed:
    """Not frozen."""


@dataclass(frozen=True)
class NoMethod:
    """Of another class."""


@dataclass(frozen=True)
class NoLearn(Method):
    """Without a way to learn."""


@dataclass(frozen=True)
class FewArguments(NoLearn):
    """Learns from nothing."""

    def learn(self, run: Run) -> Any:  # type: ignore[override]
        """Nothing."""


@dataclass(frozen=True)
class WrongRows(NoLearn):
    """A property of a wrong type."""

    @property
    def rows(self) -> Any:
        """No rows."""
        return "steps"

    def learn(self, run: Run, batch: Batch, key: Key) -> Any:
        """Nothing."""


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (object(), "object is not a frozen dataclass: decorate it"),
        (Thawed(), "Thawed is not a frozen dataclass: decorate it with @dataclass"),
        (NoMethod(), "NoMethod is not a method: let it inherit from fluvial.engines.methods.Method"),
        (NoLearn(), r"NoLearn has no method learn\(self, run, batch, key\)"),
        (FewArguments(), r"FewArguments has learn\(self, run: .*, expected learn\(self, run, batch, key\): too many"),
        (Reinforce, r"method is the class Reinforce, expected an instance: Reinforce\(\)"),
        ("clipped", "str is not a frozen dataclass"),
    ],
)
def test_what_is_no_method(method: Any, words: str) -> None:
    """It is refused when the run is built."""
    refuses(words, TrainConfig, Path("out"), method)
    with pytest.raises(UsageError):
        check_method(method)


def test_what_a_method_declares_is_checked() -> None:
    """When it is made, in one line."""
    refuses(r"WrongRows has rows of type str, expected RecordedRows or NoisedRows$", WrongRows)
    refuses(r"Follower has decay 0.9, expected a function of \(rollouts, updates\)$", Follower, 0.9)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("sde", r"sampling.sampler is 'sde', expected one of flow_sde, .* or module:name"),
        ("flow_sd", "did you mean 'flow_sde'"),
        ("own_objects:drft", "own_objects has no 'drft'; did you mean 'drift'"),
        ("own_objects:Weighted", r"is a class, expected a function of \(level, level_next, \*, eta\), or a SamplerRule"),
        (3, "sampling.sampler is of type int, expected a function"),
        (lambda level: level, "sampling.sampler has the signature .*, expected a function"),
    ],
)
def test_what_is_no_sampler(own: None, sampler: Any, words: str) -> None:
    """It is refused when the rollout's configuration is built."""
    refuses(words, lambda: SamplingConfig(sampler=Stochastic(sampler)))


@dataclass(frozen=True)
class Returns(Method):
    """A method that does what it is told to."""

    sampling: SamplingConfig = SamplingConfig()
    noising: NoisingConfig = NoisingConfig()
    what: str = "mean"

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """A ratio, or nothing."""
        return Needs(ratio=self.what == "ratio")

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Learn from one number, or one per sample, as the field says; with a failure, or without an update."""
        signal = run.grade(batch).reward
        if self.what == "raises":
            raise KeyError("no such\nthing")
        chosen = {"nan": signal / 0 * 0, "signal": signal.sum()}.get(self.what, signal)
        for part in run.minibatches(run.noise_samples(batch, self.noising, key, chosen), key, self.passes):
            info = run.update(part, self.loss)
            if self.what != "silent":
                yield info

    def loss(self, v: Tensor, items: NoisedSamples) -> Any:
        """Return a mean, numbers with a dimension too many, wrong diagnostics, or none."""
        error = velocity_error(v, items.target)
        info = ErrorInfo(error.detach(), torch.zeros_like(error))
        return {
            "mean": (error.mean(), info),
            "column": (error[:, None], info),
            "number": (1.0, info),
            "dict": (error, {"error": error}),
            "empty": (error, ()),
            "info": (error, info._replace(error=error.mean())),
        }.get(self.what, (error, info))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("mean", r":Returns returned a loss of shape \[\], expected \[2\], one number per item"),
        ("column", r"returned a loss of shape \[2, 1\], expected \[2\]"),
        ("number", r"returned a loss of type float, expected \[2\]"),
        ("dict", "returned diagnostics of type dict, expected a NamedTuple"),
        ("empty", "returned diagnostics of type tuple, expected a NamedTuple"),
        ("info", r"returned a diagnostic error of shape \[\], expected \[2\]"),
        ("ratio", r"returned no diagnostic log_ratio, which Needs\(ratio=True\) requires"),
        ("signal", r"signal has shape \[\], expected \[8\], a number per sample"),
        ("nan", "signal is not finite"),
        ("silent", "yielded 0 updates of a batch, expected epochs x minibatches = 1"),
        ("raises", "raised KeyError in learn: 'no such"),
    ],
)
def test_what_an_objective_returns(one: World, tmp_path: Path, what: str, words: str) -> None:
    """It is checked on the first batch: a wrong shape would broadcast."""
    run = tiny.Run(tiny.config(tmp_path, sampling=ODE, method=Returns(what=what)), one)
    with pytest.raises(FluvialError, match=words) as refused:
        run.rollout()
    assert "\n" not in str(refused.value)


def test_the_diff_of_a_falling_kl(one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's change to GRPO applies to its file, opens at most five, and its flag halves the weight of the KL."""
    page = "engines/methods/README.md"
    about = (pages.ROOT / page).read_text().rpartition("To make it a setting of the built-in GRPO")[2]
    assert len(re.findall(r"\]\(\S+[.]py\)", about)) <= 5
    (tmp_path / (name := "engines/methods/grpo.py")).parent.mkdir(parents=True)
    shutil.copy(pages.ROOT / name, tmp_path / name)
    subprocess.run(["git", "apply", "-"], input=pages.blocks(page, "diff")[0], text=True, cwd=tmp_path, check=True)
    monkeypatch.setitem(sys.modules, "changed", changed := types.ModuleType("changed"))
    exec((tmp_path / name).read_text(), changed.__dict__)
    rollout = SamplingConfig(prompts=2, group=2, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
    method = changed.__dict__["Grpo"]()
    config = tiny.config(tmp_path / "run", sampling=rollout, method=method, train="lora", **{"kl.coef": 0.1})
    config, seen = parse_config(config, "fluvial train", ["--kl-decay", "0.5", "--updates", "2"]), set()

    def policy_loss(*args: Any, kl_coef: float, **options: Any) -> Any:
        seen.add(kl_coef)
        return kernels.policy_loss(*args, kl_coef=kl_coef, **options)

    monkeypatch.setattr(changed, "policy_loss", policy_loss)
    run = tiny.Run(config, one)
    run.rollout()
    run.rollout()
    assert seen == {0.1, 0.05}
