"""The comparison with other projects' code, without a clone: a stand-in project, its refusals, its rows and its options."""

import csv
import gc
import importlib
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.bench import harness
from fluvial.bench.__main__ import main
from fluvial.bench.peers import clone, measure, ours, report, verl_omni
from fluvial.bench.peers.config import PROJECTS, PeerCase, PeerRow, PeersConfig, Project
from fluvial.bench.peers.measure import (
    Agreement,
    check_agreement,
    count_live_bytes,
    measure_peak_bytes,
    merge_agreements,
    time_calls,
    time_in_turn,
)
from fluvial.bench.peers.ours import Spent
from fluvial.bench.peers.pipeline import Peer, list_adapter_parameters
from fluvial.bench.peers.report import is_done, list_cases, run
from fluvial.bench.peers.work import CPU, PeerRollout, Sampled, Work
from fluvial.bench.update.cases import SIZES
from fluvial.engines.errors import RunError, UsageError

pytestmark = pytest.mark.long


class StandIn(Peer):
    """A project in plain torch: Flow-SDE, its log-probability and the clipped surrogate, with LoRA by peft."""

    def __init__(self, folder: Path, work: Work, *, scale: float = 1.0, slope: float = 1.0) -> None:
        super().__init__(work)
        self.scale, self.slope, self.per_pass = scale * work.scale, slope, work.samples
        scheduler = work.make_scheduler()
        self.sigmas, self.timesteps = scheduler.sigmas, scheduler.timesteps
        self.inputs = [torch.stack(halves) for halves in zip(work.uncond, work.cond, strict=True)]

    def mean_std(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        timestep = self.timesteps[step].expand(2 * len(x))
        inputs = (table[:, : len(x)].flatten(0, 1) for table in self.inputs)  # the same for every sample of a group
        v = self.module(torch.cat([x, x]), *inputs, timestep, return_dict=False)[0]
        v_uncond, v = v.chunk(2)
        v = v_uncond + self.scale * (v - v_uncond)
        sigma, after = self.sigmas[step], self.sigmas[step + 1]
        dt, rate = after - sigma, self.work.eta * (sigma / (1 - min(sigma, self.sigmas[1]))).sqrt()
        mean = x * (1 + rate**2 / (2 * sigma) * dt) + v * (1 + rate**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, rate * (-dt).sqrt()

    def scored(self, x: Tensor, x_next: Tensor, step: int) -> Tensor:
        mean, std = self.mean_std(x, step)
        error = ((x_next - mean) ** 2).flatten(1).mean(1)
        return -error / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2

    def kl_rate(self, x: Tensor, step: int) -> Tensor:
        """Return the KL of a step to the network without adapters, divided by its length."""
        mean, std = self.mean_std(x, step)
        with torch.no_grad(), self.module.disable_adapter():
            reference, _ = self.mean_std(x, step)
        dt = self.sigmas[step] - self.sigmas[step + 1]
        return ((mean - reference) ** 2).flatten(1).mean(1) * dt / (2 * std**2)

    @torch.no_grad()
    def rollout(self) -> Sampled:
        made, log_probs = [torch.randn(self.work.samples, *self.work.size.event)], []
        for step in range(self.work.recorded.stop):
            mean, std = self.mean_std(made[-1], step)
            made.append(mean + std * torch.randn_like(mean))
            if step in self.work.recorded:
                log_probs.append(self.scored(made[-2], made[-1], step))
        return Sampled(torch.stack(made[self.work.recorded.start :], 1), torch.stack(log_probs, 1))

    @torch.no_grad()
    def log_prob(self, x: Tensor, x_next: Tensor) -> Tensor:
        return torch.stack([self.scored(x[:, j], x_next[:, j], step) for j, step in enumerate(self.work.recorded)], 1)

    def set_micro_batch(self, samples: int) -> None:
        self.per_pass = samples

    def update(self, stored: PeerRollout) -> float:
        total = 0.0
        parts = zip(*(tensor.split(self.per_pass) for tensor in stored), strict=True)
        for part, (place, step) in itertools.product(map(PeerRollout._make, parts), enumerate(self.work.recorded)):
            log_prob = self.scored(part.x[:, place], part.x_next[:, place], step)
            ratio = (log_prob - part.log_prob[:, place]).exp()
            held = ratio.clamp(1 - self.work.clip, 1 + self.work.clip)
            losses = torch.maximum(-part.advantage * ratio, -part.advantage * held)
            if self.work.kl:
                losses = losses + self.work.kl * self.kl_rate(part.x[:, place], step)
            loss = losses.sum() / stored.log_prob.numel()
            loss.backward()
            total += float(loss.detach())
        first = next(iter(list_adapter_parameters(self.module).values()))
        assert first.grad is not None
        first.grad *= self.slope
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def projects(tmp_path: Path, build: Callable[..., Any] = StandIn) -> dict[str, Project]:
    (tmp_path / "clones" / "stand-in").mkdir(parents=True, exist_ok=True)
    return {
        "flow_grpo": Project("stand-in", build, kl="rate"),
        "flow_factory": Project("absent", build),
        "unirl": Project("stand-in", build, samples=False),
    }


def config(tmp_path: Path, **changes: Any) -> PeersConfig:
    few: dict[str, Any] = {"sizes": ("tiny",), "pairs": (2,), "samples": 2, "steps": 3, "runs": 3, "out": tmp_path / "out"}
    return PeersConfig(**{"clones": tmp_path / "clones", "peers": ("flow_grpo", "flow_factory"), **few, **changes})


def a_row(**changes: Any) -> PeerRow:
    case, agreement = PeerCase("flow_grpo", "small", 1, 0), Agreement(1e-7, 0.0, 1e-6)
    row = measure.make_row(
        measure.list_common_columns(case, "abc", agreement, (8_000_000, 9_000_000), PeersConfig()),
        "update",
        (8, 8),
        ([Spent(cpu, 3 * cpu) for cpu in (1.0, 2.0, 6.0)], [Spent(cpu, cpu) for cpu in (2.0, 1.0, 2.0)]),
        (5_000_000, 6_000_000),
        ([Spent(0.04, 1.0), Spent(0.03, 1.0)], [Spent(0.02, 1.0), Spent(0.05, 1.0)]),
    )
    return replace(row, **changes)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Hide the objects of other tests from the collector, which goes through all of them whenever bytes are counted."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_rows_hold_both_sides_and_a_missing_clone_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row for the rollout and one for each number of pairs, with ratios of the same rounds, distances and versions.

    A second run that skips what is done measures nothing; a project without a rollout here has updates only.
    """
    monkeypatch.setattr(measure, "REST_ROUNDS", 1)
    asked = config(tmp_path, steps=2, windows=(0, 1), runs=1)
    rows = run(asked, projects(tmp_path))
    told = capsys.readouterr().out
    assert f"flow_factory: skipped, {tmp_path / 'clones' / 'absent'} is not a folder" in " ".join(told.split("\n"))
    assert {row.peer for row in rows} == {"flow_grpo"}
    for window in (0, 1):
        of_window = [(row.what, row.pairs, row.peer_pairs) for row in rows if row.window == window]
        chosen = of_window[1][1]
        assert chosen in (2, 4)
        assert of_window[:3] == [("rollout", 2, 2), ("update", chosen, 2), ("whole", chosen, 2)]
        assert ("update", 2, 2) in of_window  # equal pairs per pass
        assert len(of_window) == len(set(of_window))
    path = tmp_path / "out" / "peers.csv"
    written = list(csv.DictReader(path.read_text().splitlines()))
    assert len(written) == len(rows) >= 6
    assert list(written[0]) == [field.name for field in fields(PeerRow)]
    for row, text in zip(rows, written, strict=True):
        assert row.runs == 1
        assert 0 < row.p20 <= row.p50 <= row.p80
        counted = "seconds", "wall_seconds", "rest_seconds", "peak_bytes"
        assert all(getattr(row, side + name) > 0 for name in counted for side in ("", "peer_"))
        assert row.wall_p50 > 0
        assert row.log_prob_distance < 1e-6
        assert 0 < row.gradient_distance < 1e-5
        assert all(text[name] for name in text)
        assert text["commit"] == "unknown"
        # Both hold the same parameters in float32, and two moments of those that are trained.
        assert row.held_bytes == pytest.approx(row.peer_held_bytes, rel=0.1)
    assert rows == harness.read(path, PeerRow)
    assert run(replace(asked, skip_done=True), projects(tmp_path)) == []
    offline = run(replace(asked, peers=("unirl",), windows=(1,), skip_done=True), projects(tmp_path))
    assert {(row.peer, row.what, row.pairs) for row in offline} == {("unirl", "update", 2)}


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"scale": 1.01}, "log-prob"),
        ({"slope": 1.01}, "gradient"),
        ({"gradient": lambda clone: "conditional"}, "gradient"),
        ({"kl": "exact"}, "loss"),
    ],
)
def test_a_project_that_disagrees_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, what: str
) -> None:
    """In its model, its gradient, the halves of guidance that it differentiates, or its KL; nothing is written."""
    monkeypatch.setattr(measure, "time_in_turn", lambda *arguments: pytest.fail("it was timed"))
    table = projects(tmp_path, StandIn if "kl" in changes or "gradient" in changes else partial(StandIn, **changes))
    if table["flow_grpo"].build is StandIn:
        table["flow_grpo"] = table["flow_grpo"]._replace(**changes)
    with pytest.raises(RunError, match=f"flow_grpo: the {what} is .* apart, expected at most 1e-05, so nothing was timed"):
        run(config(tmp_path, kl=4.0), table)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("few_objects")
def test_a_kl_term_is_that_of_the_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows hold the weight, and a project without the term is skipped."""
    asked = config(tmp_path, kl=4.0, steps=2, runs=1, peers=("flow_grpo", "unirl"))
    rows = run(asked, projects(tmp_path))
    assert {(row.peer, row.kl) for row in rows} == {("flow_grpo", 4.0)}
    assert "unirl: skipped, its loss has no KL term here" in capsys.readouterr().out


@pytest.mark.usefixtures("few_objects")
def test_the_transformer_alone_needs_no_clone(tmp_path: Path) -> None:
    """Its passes with fluvial's and with peft's LoRA give the same prediction."""
    rows = run(config(tmp_path, peers=("transformer",), runs=1), {})
    assert [(row.what, row.pairs) for row in rows] == [("rollout", 2), ("update", 2)]
    assert all(row.log_prob_distance < 1e-6 for row in rows)


@pytest.mark.parametrize("what", Agreement._fields)
def test_each_distance_is_checked(what: str) -> None:
    """NaN is no agreement; of several ranks the largest counts, and the loss of rank 0, where alone a project may log it."""
    good = Agreement(1e-7, 0.0, 9e-6)
    check_agreement("p", good)
    for value in (2e-5, math.nan):
        with pytest.raises(RunError, match=f"p: the {what.replace('_', '-')} is"):
            check_agreement("p", good._replace(**{what: value}))
    found = merge_agreements([Agreement(1e-7, 1e-8, 2e-6), Agreement(3e-7, math.nan, 1e-6)])
    assert found == Agreement(3e-7, 1e-8, 2e-6)


def test_the_sides_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up is not counted, the first side changes, CPU time is what counts; the whole is the sum of its phases."""
    calls: list[str] = []
    clock, walls = iter(range(100)), iter(range(0, 1000, 10))
    monkeypatch.setattr(ours.time, "process_time", lambda: float(next(clock)))
    monkeypatch.setattr(ours.time, "perf_counter", lambda: float(next(walls)))
    found = time_in_turn(3, [time_calls(CPU, update=partial(calls.append, name)) for name in "abc"])
    assert "".join(calls) == "cab" + "abc" + "bca" + "cab"
    assert found == [{"update": [Spent(1.0, 10.0)] * 3}] * 3
    phase = Spent(1.0, 10.0)
    assert time_calls(CPU, rollout=list, update=list)() == {"rollout": phase, "update": phase, "whole": Spent(2.0, 20.0)}


def test_rows_of_equal_pairs_of_defaults_and_of_each_sides_best() -> None:
    """The default is what each side takes; the best, the fastest of what was timed, may be another number on both sides."""

    def side(**seconds: float) -> measure.Side:
        return lambda: {what: Spent(each, each) for what, each in seconds.items()}

    own = {None: side(rollout=1.0, update=5.0, whole=6.0), 8: side(update=8.0), 40: side(update=3.0)}
    others = {8: side(rollout=2.0, update=10.0, whole=12.0), 2: side(update=9.0), 4: side(update=6.0)}
    world: Any = SimpleNamespace(size=1, gather=lambda table: table, gather_items=lambda item: [item])
    peaks: Any = defaultdict(int)
    common = measure.list_common_columns(
        PeerCase("flow_grpo", "small", 1, 0), "abc", Agreement(0, 0, 0), (0, 0), PeersConfig()
    )
    for project, expected in (
        (others, [("update", 40, 4, 0.5)]),
        ({8: others[8]}, []),  # its default is its best
    ):
        found = measure._MeasuredSides(own, project, peaks, peaks, 80)
        rows = list(measure._list_rows(found, common, PeersConfig(runs=2), world))
        assert [(row.what, row.pairs, row.peer_pairs, row.p50) for row in rows] == [
            ("rollout", 8, 8, 0.5), ("update", 80, 8, 0.5), ("whole", 80, 8, 0.5),
            ("update", 8, 8, 0.8), ("update", 40, 8, 0.3), *expected,
        ]  # fmt: skip
        phases = report._Phases.select({(row.what, row.pairs, row.peer_pairs): row for row in rows})
        assert phases == (rows[0], rows[3], rows[1], rows[5 if expected else 4])


def test_an_accelerator_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """In milliseconds of the device's stream, once it has done what was asked of it."""
    clock = itertools.count(0.0, 250.0)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at, self.waited = math.nan, False

        def record(self) -> None:
            self.at = next(clock)

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, last: "Event") -> float:
            assert last.waited
            return last.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(ours.time, "perf_counter", lambda: 0.0)
    found = time_calls(torch.device("cuda"), rollout=list, update=list)()
    assert found == {"rollout": Spent(0.25, 0.0), "update": Spent(0.25, 0.0), "whole": Spent(0.5, 0.0)}


@pytest.mark.usefixtures("few_objects")
def test_bytes_are_counted() -> None:
    """A storage once, however many views it has; in a peak, what is freed in between counts once at a time."""
    before = count_live_bytes()
    held = torch.ones(1000)
    views = [held[:10], held.view(10, 100)]
    assert count_live_bytes() - before == 4000
    assert 4000 <= measure_peak_bytes(lambda: [(held * 2).sum() for _ in range(3)]) < 8000
    del held, views
    assert count_live_bytes() == before


def test_a_project_shards_its_network_before_its_optimizer_takes_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several processes alone; their losses are averaged, as its driver does."""
    monkeypatch.setattr(StandIn, "shard", lambda peer: peer.module.requires_grad_(False).proj_out.requires_grad_(True))
    trained = [
        len(StandIn(Path(), Work(SIZES["tiny"], ranks=ranks)).optimizer.param_groups[0]["params"]) for ranks in (1, 2)
    ]
    assert trained[1] == 2 < trained[0]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.mul_(3))
    assert StandIn(Path(), Work(SIZES["tiny"])).average_over_ranks(0.5) == 0.5
    assert StandIn(Path(), Work(SIZES["tiny"], ranks=2)).average_over_ranks(0.5) == 0.75


def test_old_log_probs_put_ratios_inside_and_outside_the_clip() -> None:
    work = Work(SIZES["tiny"])
    log_prob = torch.zeros(work.samples, work.steps)
    ratio = (log_prob - work.shift_log_prob(log_prob)).exp()
    inside = ((ratio - 1).abs() < work.clip).float().mean()
    assert 0.2 < float(inside) < 0.8


def test_cases_are_those_that_run() -> None:
    """Several processes only for projects that run on several; no more pairs per pass than there are."""
    some = PeersConfig(Path("none"), ("flow_grpo", "unirl", "transformer"), ("small",), windows=(0, 3), ranks=(1, 2))
    assert PeerCase("unirl", "small", 1, 3).list_pairs(some) == (8, 24)
    assert PeerCase("unirl", "small", 1, 0).list_pairs(some) == (8, 16, 40, 80)
    some = replace(some, pairs=(40,))
    table = {"flow_grpo": Project(".", StandIn, ranks=True), "unirl": Project(".", StandIn)}
    found = list_cases(replace(some, clones=Path()), table)
    assert [case for case in found if case.ranks == 2] == [("flow_grpo", "small", 2, 0), ("flow_grpo", "small", 2, 3)]
    assert len(found) == 6 + 2
    assert found[0].list_pairs(some) == (8, 40)
    assert PeerCase("unirl", "small", 1, 3).list_pairs(some) == (8, 24)
    works = [PeerCase("unirl", "small", 2, 3).build_work(some, rank=rank) for rank in range(2)]
    assert list(works[0].recorded) == [1, 2, 3]
    assert [work.prompts[0] for work in works] == ["1", "9"]
    assert torch.equal(torch.cat([work.advantage for work in works]), Work(SIZES["small"], samples=16).advantage)


def test_what_is_done_is_known_by_its_commits_and_rounds(tmp_path: Path) -> None:
    asked, case = config(tmp_path, samples=8, steps=10, pairs=(8, 40)), PeerCase("flow_grpo", "small", 1, 0)
    rows = [
        a_row(what=what, pairs=pairs, commit="unknown")
        for what, pairs in (("rollout", 8), ("update", 8), ("update", 40), ("whole", 8))
    ]
    known = projects(tmp_path)
    assert is_done(case, asked, known, rows)
    assert not is_done(case, asked, known, rows[1:])
    assert not is_done(case, asked, known, rows[:3])
    assert is_done(case, asked, {"flow_grpo": known["flow_grpo"]._replace(samples=False)}, rows[1:])
    others: dict[str, Any] = {
        "commit": "other",
        "fluvial": "other",
        "runs": 2,
        "window": 3,
        "ranks": 2,
        "steps": 9,
        "kl": 1.0,
    }
    for name, value in others.items():
        assert not is_done(case, asked, known, [*rows[:2], replace(rows[2], **{name: value}), rows[3]])


def test_the_tables_are_those_of_the_newest_commit_of_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios, the transformer's share and what is left to win, and memory; the last of equal rows counts."""
    ratio: dict[str, Any] = {"p20": 0.8, "p50": 0.9, "p80": 1.0}
    row = a_row()  # a ratio is that of fluvial's time to the project's in each round, and only then the percentiles
    assert (row.p50, row.seconds, row.peer_seconds) == (2.0, 2.0, 2.0)
    assert [row.p20, row.p80] == pytest.approx([1.1, 2.6])
    rows = [
        a_row(fluvial="older", p50=7.0),
        a_row(p50=6.0),
        a_row(**ratio, seconds=1.8, peer_seconds=2.0),
        a_row(pairs=40, p20=0.4, p50=0.5, p80=0.6),
        a_row(pairs=16, p20=0.6, p50=0.7, p80=0.8),
        a_row(what="rollout", seconds=1.0, peer_seconds=1.0, **ratio),
        a_row(what="whole", pairs=40, **ratio),
        a_row(peer="transformer", p50=0.5),
        a_row(peer="transformer", what="rollout", p50=1.5),
        a_row(fluvial="older", ranks=2, window=3, **ratio),
    ]
    harness.append(tmp_path / "peers.csv", rows, PeerRow)
    assert main(["peers", "--table", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.strip() == report.format_markdown(rows)
    cell = "0.90 (0.80 to 1.00)"
    own = f"8 and 8: {cell} | 40 and 8: 0.50 (0.40 to 0.60)"
    assert f"| Flow-GRPO | small | 1 | 10 of 10 | no | {cell} | {cell} | {own} | {cell} | 6.00 | {rows[1].fluvial} |" in told
    own = f"8 and 8: {cell} | 8 and 8: {cell}"
    assert f"| Flow-GRPO | small | 2 | 3 of 10 | no | - | {cell} | {own} | - | - | older |" in told
    rest = "30, 20 of"
    assert f"| Flow-GRPO | small | 1 | 10 of 10 | no | 0.98 | 1.47 | {rest} 1000 ms | 0.99 | 0.49 | {rest} 2000 ms |" in told
    assert "| 8.0 MB, 9.0 MB | 5.0 MB, 6.0 MB | 5.0 MB, 6.0 MB | 5.0 MB, 6.0 MB | 5.0 MB, 6.0 MB |" in told
    assert "Flow-GRPO at `abc`" in told
    assert "medians of 3 rounds" in told
    assert report.format_markdown([a_row(peer="transformer")]) == "peers.csv has no row of a project"


def test_wrong_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line; and so are folders without a clone."""
    wrong: list[dict[str, Any]] = [{"runs": 0}, {"pairs": (0,)}, {"ranks": ()}, {"ranks": (0,)}, {"windows": (10,)}]
    for settings in (*wrong, {"peers": ("other",)}, {"sizes": ("huge",)}):
        with pytest.raises(ValueError, match=r"^peers: [^\n]*$"):
            PeersConfig(**settings)
    with pytest.raises(UsageError, match="holds no clone: expected flow_grpo, Flow-Factory, UniRL, verl-omni"):
        main(["peers", "--clones", str(tmp_path), "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("skipped") == 5


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
    assert clone.compile_function(path, "double", {"factor": 3})(2) == 6
    told: list[int] = []
    clone.compile_loop(path, "main", "inner", {"told": told}, arguments=("total",))(10)
    assert told == [10, 11, 13]
    with pytest.raises(RunError, match=r"script.py has no function triple"):
        clone.compile_function(path, "triple", {})
    with pytest.raises(RunError, match="main has 0 loops over outer, expected 1"):
        clone.compile_loop(path, "main", "outer", {}, arguments=())
    with pytest.raises(RunError, match="expected a clone of the project"):
        clone.compile_function(tmp_path / "absent.py", "double", {})


def test_packages_that_are_not_installed_are_replaced_for_an_import(tmp_path: Path) -> None:
    """Only inside the context, only those that are named, and never an installed one."""
    (tmp_path / "toy_clone_module.py").write_text(
        "import math\nfrom absent_package.deep import Base\nclass Kind(Base):\n    root = math.sqrt(4)\n"
    )
    before = list(sys.path), list(sys.meta_path)
    with clone.make_importable(tmp_path, stand_ins=("absent_package", "math")):
        module = __import__("toy_clone_module")
    assert module.Kind.root == 2
    assert (list(sys.path), list(sys.meta_path)) == before
    assert "absent_package" not in sys.modules
    del sys.modules["toy_clone_module"]
    with clone.make_importable(tmp_path), pytest.raises(ModuleNotFoundError, match="absent_package"):
        __import__("toy_clone_module")


def test_a_package_of_a_clone_without_its_init(tmp_path: Path) -> None:
    """Its modules are the clone's own, save those that are replaced; a stand-in holds what it is given."""
    inner = tmp_path / "toy_heavy_package" / "deep"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("raise RuntimeError('it must not run')")
    (inner / "work.py").write_text(
        "from toy_heavy_package.other import Thing\nfrom absent_package.deep import double\nvalue = double(2)\n"
    )
    (inner.parent / "other.py").write_text("raise RuntimeError('it must not run')")
    names = {
        "stand_ins": ("absent_package",),
        "contents": {"absent_package.deep": {"double": lambda x: 2 * x}},
        "replaced": ("toy_heavy_package.other",),
        "bare": ("toy_heavy_package", "toy_heavy_package.deep"),
    }
    before = list(sys.meta_path)
    with clone.make_importable(tmp_path, **names):  # type: ignore[arg-type]
        module = importlib.import_module("toy_heavy_package.deep.work")
    assert module.value == 4
    assert isinstance(module.Thing, type)
    assert sys.meta_path == before
    assert "toy_heavy_package.other" not in sys.modules
    for name in [name for name in sys.modules if name.startswith("toy_heavy_package")]:
        del sys.modules[name]


def test_what_projects_get_in_place_of_packages(tmp_path: Path) -> None:
    """verl-omni's batch is a dictionary, on which functions of tensor dictionaries work; settings are read both ways."""
    functions = verl_omni.CONTENTS["verl.utils"]["tensordict_utils"]
    batch = functions.get_tensordict({"a": 1})
    functions.assign_non_tensor(batch, b=2)
    assert batch == {"a": 1, "b": 2}
    assert batch.to("cpu") is batch
    assert [functions.get_non_tensor_data(batch, name, default=None) for name in "bc"] == [2, None]
    totals: dict[str, list[Any]] = {}
    for value in (1, 2):
        verl_omni.CONTENTS["verl.utils.py_functional"]["append_to_dict"](totals, {"loss": value})
    assert totals == {"loss": [1, 2]}
    settings = clone.CloneSettings(scale=2)
    assert settings.scale == settings["scale"] == 2
    with pytest.raises(AttributeError, match="other"):
        _ = settings.other
    (tmp_path / "scripts").mkdir()  # the gradient of guidance follows the clone; Flow-GRPO's commits differ in it
    for line, side in (("uncond = noise_pred_uncond.detach()", "conditional"), ("pass", "both")):
        (tmp_path / "scripts" / "train_sd3.py").write_text(line)
        assert (PROJECTS["flow_grpo"].gradient(tmp_path), PROJECTS["unirl"].gradient(tmp_path)) == (side, "both")
    # A folder that is not the top of a checkout has no commit, even inside another checkout.
    assert clone.read_commit(tmp_path) == clone.read_commit(Path(__file__).parent) == "unknown"
