"""Checks that fluvial and another project's code agree, times them in turn, and appends the ratios to peers.csv.

python -P -m fluvial.bench peers --clones FOLDER

FOLDER holds the clones by the names of their repositories: flow_grpo, Flow-Factory, UniRL.
"""

import gc
import importlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fluvial.bench import harness
from fluvial.bench.peers import clone
from fluvial.bench.peers.ours import Ours
from fluvial.bench.peers.work import Peer, Stored, Work
from fluvial.bench.update.cases import SIZES
from fluvial.core.checks import check_number
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.fsdp.world import init_world
from fluvial.engines.plan.memory import LiveStorages

TOLERANCE = 1e-5  # of log-probabilities, the loss and gradients, relative to their scale


class Project(NamedTuple):
    """A project that fluvial is timed beside."""

    folder: str  # name of its clone
    build: Callable[[Path, Work], Peer]
    gradient: Literal["both", "conditional"]  # halves of guidance that its update differentiates


def _of_module(module: str, name: str) -> Callable[[Path, Work], Peer]:
    """Return a function that imports a project's module when it is used."""

    def build(folder: Path, work: Work) -> Peer:
        peer: Peer = getattr(importlib.import_module(f"fluvial.bench.peers.{module}"), name)(folder, work)
        return peer

    return build


PROJECTS: dict[str, Project] = {
    "flow_grpo": Project("flow_grpo", _of_module("flow_grpo", "FlowGrpo"), "conditional"),  # it detaches the other half
    "flow_factory": Project("Flow-Factory", _of_module("flow_factory", "FlowFactory"), "both"),
    "unirl": Project("UniRL", _of_module("unirl", "UniRL"), "both"),
}


@dataclass(frozen=True)
class PeersConfig:
    """Time rollout and update beside the code of other projects, as CPU time.

    Args:
        clones: folder with the clones, each under the name of its repository; a project that is not there is skipped.
        peers: projects: flow_grpo, flow_factory, unirl.
        sizes: model sizes: tiny, small, medium.
        pairs: numbers of (sample, step) pairs per pass of fluvial's update. The projects' loops put the samples of one step
            through a pass.
        samples: samples per rollout.
        steps: steps of the schedule.
        runs: number of timed pairs.
        threads: CPU threads.
        out: folder of peers.csv; rows are appended.
    """

    clones: Path = Path("clones")
    peers: tuple[str, ...] = tuple(PROJECTS)
    sizes: tuple[str, ...] = ("small", "medium")
    pairs: tuple[int, ...] = (8, 40)
    samples: int = 8
    steps: int = 10
    runs: int = 7
    threads: int = 1
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "runs", "threads"):
            check_number("peers", name, getattr(self, name), low=1)
        if not self.pairs or min(self.pairs) < 1:
            raise ValueError(f"peers: pairs is {self.pairs}, expected numbers of at least 1")
        for name, values, known in (("peers", self.peers, list(PROJECTS)), ("sizes", self.sizes, list(SIZES))):
            if unknown := [value for value in values if value not in known]:
                raise ValueError(f"peers: {name} has {unknown[0]!r}, expected some of {', '.join(known)}")


@dataclass(frozen=True)
class PeerRow:
    """The ratio of fluvial's CPU time to a project's in the same round: below 1 fluvial is faster."""

    peer: str
    commit: str  # of the project
    fluvial: str  # commit of fluvial; "unknown" outside a checkout
    size: str
    what: str
    samples: int
    steps: int
    pairs: int  # per pass, fluvial
    peer_pairs: int  # per pass, the project
    runs: int
    p20: float
    p50: float
    p80: float
    seconds: float  # CPU time of fluvial, median
    peer_seconds: float
    peak_bytes: int  # largest sum of the tensors that one rollout or update makes: activations, gradients, samples
    peer_peak_bytes: int
    log_prob_distance: float
    gradient_distance: float
    device: str
    threads: int
    torch: str
    diffusers: str
    peft: str
    accelerate: str
    python: str
    date: str


class Agreement(NamedTuple):
    """How far the two sides are apart, each relative to the scale of the project's numbers."""

    log_prob: float
    loss: float
    gradient: float


def compare(ours: Ours, peer: Peer, work: Work) -> tuple[Agreement, Stored]:
    """Return how far the sides are apart, and the stored rollout that both then update on.

    Each side scores the other's rollout, and both make their first update on fluvial's.
    """
    made = ours.rollout()
    x, x_next = made.x[:, :-1].contiguous(), made.x[:, 1:].contiguous()
    theirs = peer.rollout()
    log_prob = max(
        _apart(made.log_prob, peer.log_prob(x, x_next)),
        _apart(ours.log_prob(theirs.x[:, :-1], theirs.x[:, 1:]), theirs.log_prob),
    )
    stored = Stored(x, x_next, work.old_log_prob(made.log_prob), work.advantage)
    loss, own = peer.update(stored), ours.update(ours.items(stored), pairs=work.samples).loss
    left, right = ours.gradients(), peer.gradients()
    if left.keys() != right.keys():
        raise RunError(f"the sides train other parameters: {sorted(left.keys() ^ right.keys())[:3]}")
    distance = torch.cat([(left[name] - right[name]).flatten() for name in right]).norm()
    norm = torch.cat([gradient.flatten() for gradient in right.values()]).norm()
    scale = float(work.advantage.abs().mean())
    return Agreement(log_prob, abs(own - loss) / scale, float(distance / norm)), stored


def check_agreement(name: str, agreement: Agreement) -> None:
    """Raise RunError if the two sides do not compute the same thing: then their times say nothing."""
    for what, value in agreement._asdict().items():
        if not value <= TOLERANCE:  # NaN is refused too
            what = what.replace("_", "-")
            raise RunError(f"{name}: the {what} is {value:.2g} apart, expected at most {TOLERANCE:g}, so nothing was timed")


def time_pairs(runs: int, ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of both sides, run in turn; who is first changes from round to round.

    CPU time, because machines are shared: a process that has to wait for a core is not slower for it.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for run in range(-1, runs):  # one warm-up
        order = (0, 1) if run % 2 == 0 else (1, 0)
        for side in order:
            start = time.process_time()
            (ours, theirs)[side]()
            if run >= 0:
                seconds[side].append(time.process_time() - start)
    return seconds


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the largest sum of bytes of the tensors that a call makes, beyond those that exist before it."""
    there = [tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, nn.Parameter)]
    with LiveStorages(there) as memory:
        call()
    return memory.peak


def measure(name: str, project: Project, folder: Path, size: str, config: PeersConfig) -> list[PeerRow]:
    """Return the rows of a project at a size.

    Raises:
        RunError: the two sides disagree, or the clone does not have the code that runs here.
    """
    work = Work(SIZES[size], samples=config.samples, steps=config.steps, gradient=project.gradient)
    with init_world() as world:
        ours, peer = Ours(work, world), project.build(folder, work)
        agreement, stored = compare(ours, peer, work)
        check_agreement(name, agreement)
        items = ours.items(stored)
        theirs = partial(peer.update, stored)
        cases: list[tuple[str, int, Callable[[], object], Callable[[], object]]] = [
            ("rollout", config.samples, ours.rollout, peer.rollout),
            *(("update", pairs, partial(ours.update, items, pairs=pairs), theirs) for pairs in config.pairs),
        ]
        rows = []
        for what, pairs, own, other in cases:
            seconds, peaks = time_pairs(config.runs, own, other), (peak_bytes(own), peak_bytes(other))
            rows.append(_row(name, clone.commit(folder), size, what, pairs, seconds, peaks, agreement, config))
    gc.collect()  # hooks hold modules in reference cycles
    return rows


def run(config: PeersConfig, projects: Mapping[str, Project] = PROJECTS) -> Sequence[PeerRow]:
    """Measure every project whose clone is there, append to peers.csv and print a table.

    Raises:
        UsageError: there is no clone, or a GPU, whose time CPU time does not hold.
    """
    if torch.cuda.is_available():
        raise UsageError("peers: CPU time says nothing of work on a GPU: hide it with CUDA_VISIBLE_DEVICES=")
    torch.set_num_threads(config.threads)
    rows: list[PeerRow] = []
    for name in config.peers:
        folder = config.clones / projects[name].folder
        if not folder.is_dir():
            print(f"{name}: skipped, {folder} is not a folder")
            continue
        for size in config.sizes:
            measured = measure(name, projects[name], folder, size, config)
            harness.append(config.out / "peers.csv", measured, PeerRow)
            rows.extend(measured)
    if not rows:
        raise UsageError(f"peers: {config.clones} holds no clone: expected {', '.join(p.folder for p in projects.values())}")
    show(rows)
    return rows


def show(rows: Sequence[PeerRow]) -> None:
    """Print rows as a table."""
    table = Table(
        title="CPU time of fluvial, as a multiple of the project's; below 1 fluvial is faster", title_justify="left"
    )
    for name in (
        "peer",
        "size",
        "what",
        "pairs per pass",
        "theirs",
        "p20",
        "p50",
        "p80",
        "MB",
        "theirs, MB",
        "log-probs apart",
        "gradients apart",
    ):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row.peer, row.size, row.what, str(row.pairs), str(row.peer_pairs),
            *(f"{ratio:.2f}" for ratio in (row.p20, row.p50, row.p80)),
            f"{row.peak_bytes / 1e6:.1f}", f"{row.peer_peak_bytes / 1e6:.1f}",
            f"{row.log_prob_distance:.1g}", f"{row.gradient_distance:.1g}",
        )  # fmt: skip
    Console(width=max(Console().width, 140)).print(table, highlight=False)


def _row(
    name: str, commit: str, size: str, what: str, pairs: int, seconds: tuple[list[float], list[float]],
    peaks: tuple[int, int], agreement: Agreement, config: PeersConfig,
) -> PeerRow:  # fmt: skip
    own, other = (torch.tensor(times, dtype=torch.float64) for times in seconds)
    p20, p50, p80 = (own / other).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    versions = {package: metadata.version(package) for package in ("diffusers", "peft", "accelerate")}
    return PeerRow(
        peer=name, commit=commit, fluvial=clone.commit(Path(__file__).resolve().parents[2]), size=size, what=what,
        samples=config.samples, steps=config.steps, pairs=pairs, peer_pairs=config.samples, runs=len(own),
        p20=p20, p50=p50, p80=p80, seconds=float(own.median()), peer_seconds=float(other.median()),
        peak_bytes=peaks[0], peer_peak_bytes=peaks[1],
        log_prob_distance=agreement.log_prob, gradient_distance=agreement.gradient, device=harness.cpu(),
        threads=torch.get_num_threads(), torch=torch.__version__, python=platform.python_version(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"), **versions,
    )  # fmt: skip


def _apart(left: Tensor, right: Tensor) -> float:
    """Return the largest difference, as a fraction of the largest value on the right."""
    return float((left - right).abs().max() / right.abs().max())
