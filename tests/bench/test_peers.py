"""The comparison with other projects' code, without a clone: a stand-in project, its refusals, its rows and its options."""

import csv
import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.bench.__main__ import main
from fluvial.bench.peers import clone, report
from fluvial.bench.peers.pipeline import adapter_of, build_pipeline, first_moments
from fluvial.bench.peers.report import Agreement, PeerRow, PeersConfig, Project, check_agreement, measure, run, time_pairs
from fluvial.bench.peers.work import Sampled, Stored, Work
from fluvial.bench.update.cases import SIZES
from fluvial.engines.errors import RunError, UsageError


class StandIn:
    """A project in plain torch: Flow-SDE, its log-probability and the clipped surrogate, with LoRA by peft.

    Args:
        folder: clone, which it does not need.
        work: what is done.
        scale: factor of the guidance scale; anything but 1 is another model.
        slope: factor of the gradient of one parameter; anything but 1 is another gradient.
    """

    def __init__(self, folder: Path, work: Work, *, scale: float = 1.0, slope: float = 1.0) -> None:
        self.work, self.scale, self.slope = work, scale * work.scale, slope
        self.module = build_pipeline(work).transformer
        self.optimizer = torch.optim.AdamW([p for p in self.module.parameters() if p.requires_grad], lr=work.lr)
        scheduler = work.scheduler()
        self.sigmas, self.timesteps = scheduler.sigmas, scheduler.timesteps
        self.inputs = [torch.cat(halves) for halves in zip(work.uncond, work.cond, strict=True)]

    def mean_std(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the mean and the std of a step, as arXiv 2505.05470 has them."""
        timestep = self.timesteps[step].expand(2 * len(x))
        v = self.module(torch.cat([x, x]), self.inputs[0], self.inputs[1], timestep, return_dict=False)[0]
        v_uncond, v = v.chunk(2)
        v = v_uncond + self.scale * (v - v_uncond)
        sigma, after = self.sigmas[step], self.sigmas[step + 1]
        dt, rate = after - sigma, self.work.eta * (sigma / (1 - min(sigma, self.sigmas[1]))).sqrt()
        mean = x * (1 + rate**2 / (2 * sigma) * dt) + v * (1 + rate**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, rate * (-dt).sqrt()

    def scored(self, x: Tensor, x_next: Tensor, step: int) -> Tensor:
        """Return the log-probability of a step."""
        mean, std = self.mean_std(x, step)
        error = ((x_next - mean) ** 2).flatten(1).mean(1)
        return -error / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2

    @torch.no_grad()
    def rollout(self) -> Sampled:
        """Return a rollout from noise of torch."""
        x, log_probs = [torch.randn(self.work.samples, *self.work.size.event)], []
        for step in range(self.work.steps):
            mean, std = self.mean_std(x[-1], step)
            x.append(mean + std * torch.randn_like(mean))
            log_probs.append(self.scored(x[-2], x[-1], step))
        return Sampled(torch.stack(x, 1), torch.stack(log_probs, 1))

    @torch.no_grad()
    def log_prob(self, x: Tensor, x_next: Tensor) -> Tensor:
        """Return the log-probabilities of given steps."""
        return torch.stack([self.scored(x[:, j], x_next[:, j], j) for j in range(self.work.steps)], 1)

    def update(self, stored: Stored) -> float:
        """Take one step of AdamW."""
        total = 0.0
        for step in range(self.work.steps):
            log_prob = self.scored(stored.x[:, step], stored.x_next[:, step], step)
            ratio = (log_prob - stored.log_prob[:, step]).exp()
            held = ratio.clamp(1 - self.work.clip, 1 + self.work.clip)
            loss = torch.maximum(-stored.advantage * ratio, -stored.advantage * held).mean() / self.work.steps
            loss.backward()
            total += float(loss.detach())
        first = next(iter(adapter_of(self.module).values()))
        assert first.grad is not None
        first.grad *= self.slope
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the first update."""
        return first_moments(self.module, self.optimizer)


def projects(tmp_path: Path, build: Callable[..., Any] = StandIn) -> dict[str, Project]:
    """Return a table of projects with the stand-in, whose clone is there."""
    (tmp_path / "clones" / "stand-in").mkdir(parents=True)
    return {
        "flow_grpo": Project("stand-in", build, "both"),
        "flow_factory": Project("absent", build, "both"),
        "unirl": Project("absent", build, "both"),
    }


def config(tmp_path: Path, **changes: Any) -> PeersConfig:
    """Return the configuration of a small comparison."""
    base = PeersConfig(tmp_path / "clones", sizes=("tiny",), pairs=(2, 6), samples=2, steps=3, runs=3, out=tmp_path / "out")
    return replace(base, **changes)


@pytest.mark.slow
def test_rows_hold_both_sides_and_a_missing_clone_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row for the rollout and one for each number of pairs, with ratios of the same rounds, distances and versions."""
    rows = run(config(tmp_path), projects(tmp_path))
    told = capsys.readouterr().out
    assert f"flow_factory: skipped, {tmp_path / 'clones' / 'absent'} is not a folder" in " ".join(told.split("\n"))
    assert [(row.peer, row.what, row.pairs, row.peer_pairs) for row in rows] == [
        ("flow_grpo", "rollout", 2, 2), ("flow_grpo", "update", 2, 2), ("flow_grpo", "update", 6, 2)
    ]  # fmt: skip
    written = list(csv.DictReader((tmp_path / "out" / "peers.csv").read_text().splitlines()))
    assert len(written) == 3
    assert list(written[0]) == [field.name for field in fields(PeerRow)]
    for row, text in zip(rows, written, strict=True):
        assert row.runs == 3
        assert 0 < row.p20 <= row.p50 <= row.p80
        assert row.seconds > 0
        assert row.peer_seconds > 0
        assert row.peak_bytes > 0
        assert row.peer_peak_bytes > 0
        assert row.log_prob_distance < 1e-6
        assert 0 < row.gradient_distance < 1e-5
        assert all(text[name] for name in text)
        assert text["commit"] == "unknown"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "what"), [({"scale": 1.01}, "log-prob"), ({"slope": 1.01}, "gradient")], ids=["model", "gradient"]
)
def test_a_project_that_disagrees_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], what: str
) -> None:
    """The error names what differs, and nothing is written."""
    monkeypatch.setattr(report, "time_pairs", lambda *arguments: pytest.fail("it was timed"))
    with pytest.raises(RunError, match=f"flow_grpo: the {what} is .* apart, expected at most 1e-05, so nothing was timed"):
        run(config(tmp_path), projects(tmp_path, partial(StandIn, **changes)))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_side_of_the_gradient_matters(tmp_path: Path) -> None:
    """A project that differentiates both halves of guidance does not agree with an update of the conditional half."""
    project = Project("stand-in", StandIn, "conditional")
    with pytest.raises(RunError, match="gradient"):
        measure("stand-in", project, tmp_path, "tiny", config(tmp_path))


@pytest.mark.parametrize("what", Agreement._fields)
@pytest.mark.parametrize("value", [2e-5, math.nan])
def test_each_distance_is_checked(what: str, value: float) -> None:
    """NaN is no agreement."""
    good = Agreement(1e-7, 0.0, 9e-6)
    check_agreement("p", good)
    with pytest.raises(RunError, match=f"p: the {what.replace('_', '-')} is"):
        check_agreement("p", good._replace(**{what: value}))


def test_the_two_sides_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up is not counted, the first side changes, and CPU time is what counts."""
    calls: list[str] = []
    clock = iter(range(100))
    monkeypatch.setattr(report.time, "process_time", lambda: float(next(clock)))
    seconds = time_pairs(3, lambda: calls.append("a"), lambda: calls.append("b"))
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab"
    assert seconds == ([1.0] * 3, [1.0] * 3)


def test_a_ratio_is_fluvials_time_over_the_projects() -> None:
    """Of each round, and only then the percentiles."""
    seconds = ([1.0, 2.0, 6.0], [2.0, 1.0, 2.0])
    row = report._row("p", "c", "tiny", "update", 4, seconds, (5, 6), Agreement(1e-7, 0.0, 1e-6), PeersConfig(samples=2))
    assert (row.p50, row.seconds, row.peer_seconds) == (2.0, 2.0, 2.0)
    assert [row.p20, row.p80] == pytest.approx([1.1, 2.6])
    assert (row.runs, row.pairs, row.peer_pairs) == (3, 4, 2)
    assert (row.peak_bytes, row.peer_peak_bytes) == (5, 6)


def test_the_peak_holds_what_a_call_makes() -> None:
    """What existed before does not count, and what is freed in between counts once at a time."""
    held = torch.ones(1000)

    def call() -> None:
        for _ in range(3):
            assert (held * 2).sum() == 2000

    assert 4000 <= report.peak_bytes(call) < 8000


def test_old_log_probs_put_ratios_inside_and_outside_the_clip() -> None:
    """So that the comparison of the gradients covers the clip."""
    work = Work(SIZES["tiny"])
    log_prob = torch.zeros(work.samples, work.steps)
    ratio = (log_prob - work.old_log_prob(log_prob)).exp()
    inside = ((ratio - 1).abs() < work.clip).float().mean()
    assert 0.2 < float(inside) < 0.8


def test_no_clone_at_all_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line, too; it says which folders it expects."""
    with pytest.raises(UsageError, match="holds no clone: expected flow_grpo, Flow-Factory, UniRL"):
        main(["peers", "--clones", str(tmp_path), "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("skipped") == 3


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"pairs": ()}, {"pairs": (0,)}, {"peers": ("other",)}, {"sizes": ("huge",)}])
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]) -> None:
    """In one line."""
    with pytest.raises(ValueError, match="peers: ") as error:
        PeersConfig(**wrong)
    assert "\n" not in str(error.value)


SCRIPT = """
raise RuntimeError("the script itself must not run")

def double(x):
    return factor * x

def main(_):
    unused = 1
    for epoch in range(2):
        for inner in range(3):
            total = total + inner
            told.append(total)
"""


def test_parts_of_a_script_run_as_they_stand(tmp_path: Path) -> None:
    """A function, and a loop inside another function; a script that has neither is named with what is missing."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert clone.function(path, "double", {"factor": 3})(2) == 6
    told: list[int] = []
    clone.loop(path, "main", "inner", {"told": told}, arguments=("total",))(10)
    assert told == [10, 11, 13]
    with pytest.raises(RunError, match=r"script.py has no function triple"):
        clone.function(path, "triple", {})
    with pytest.raises(RunError, match="main has 0 loops over outer, expected 1"):
        clone.loop(path, "main", "outer", {}, arguments=())
    with pytest.raises(RunError, match="expected a clone of the project"):
        clone.function(tmp_path / "absent.py", "double", {})


def test_packages_that_are_not_installed_are_replaced_for_an_import(tmp_path: Path) -> None:
    """Only inside the context, only those that are named, and never an installed one."""
    (tmp_path / "toy_clone_module.py").write_text(
        "import math\nfrom absent_package.deep import Base\nclass Kind(Base):\n    root = math.sqrt(4)\n"
    )
    before = list(sys.path), list(sys.meta_path)
    with clone.importable(tmp_path, stand_ins=("absent_package", "math")):
        module = __import__("toy_clone_module")
    assert module.Kind.root == 2
    assert (list(sys.path), list(sys.meta_path)) == before
    assert "absent_package" not in sys.modules
    del sys.modules["toy_clone_module"]
    with clone.importable(tmp_path), pytest.raises(ModuleNotFoundError, match="absent_package"):
        __import__("toy_clone_module")


def test_the_commit_of_a_folder(tmp_path: Path) -> None:
    """A folder that is not the top of a checkout has none, even inside another checkout."""
    root = Path(report.__file__).resolve().parents[2]
    assert clone.commit(tmp_path) == clone.commit(root / "bench") == "unknown"
