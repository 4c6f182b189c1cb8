"""Settings of the comparison, its projects, and its rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from fluvial.bench import harness
from fluvial.bench.peers.flow_factory import FlowFactoryPeer
from fluvial.bench.peers.flow_grpo import FlowGrpoPeer, find_halves
from fluvial.bench.peers.pipeline import Peer
from fluvial.bench.peers.unirl import UniRLPeer
from fluvial.bench.peers.verl_omni import VerlOmni
from fluvial.bench.peers.work import CPU, Halves, Work
from fluvial.bench.update.cases import SIZES
from fluvial.core.checks import check_choice, check_number
from fluvial.core.step import KLWeight
from fluvial.engines.run.passes import micro_batch

TRANSFORMER = "transformer"  # the forward and backward passes alone, which both sides have to make
WINDOW_START = 1  # first step of a window


def differentiate_both(folder: Path) -> Halves:
    """Return the halves of guidance that an update differentiates: both."""
    return "both"


class Project(NamedTuple):
    """A project to compare with."""

    folder: str  # name of its clone
    build: Callable[[Path, Work], Peer]
    gradient: Callable[[Path], Halves] = differentiate_both  # halves of guidance that the update of a clone differentiates
    samples: bool = True  # whether its rollout runs here
    ranks: bool = False  # whether it runs on several processes here
    micro_batches: bool = True  # whether its update is also timed with fewer samples per pass
    accelerators: bool = False  # whether it runs on an accelerator here
    recomputes: bool = False  # whether its update ignores the stored log-probabilities
    kl: KLWeight | None = None  # weight of a step's KL in its loss; None is a loss without a KL term here


PROJECTS: dict[str, Project] = {
    "flow_grpo": Project("flow_grpo", FlowGrpoPeer, find_halves, ranks=True, accelerators=True, kl="rate"),
    "flow_factory": Project("Flow-Factory", FlowFactoryPeer, ranks=True, kl="mse"),
    "unirl": Project("UniRL", UniRLPeer, ranks=True),
    "verl_omni": Project("verl-omni", VerlOmni, samples=False, ranks=True, micro_batches=False),
    "verl_omni_default": Project(
        "verl-omni", partial(VerlOmni, recomputes=True), samples=False, ranks=True, micro_batches=False, recomputes=True
    ),
}
KNOWN = (TRANSFORMER, *PROJECTS)


@dataclass(frozen=True)
class PeersConfig:
    """Time rollout and update beside the code of other projects, as CPU time, or as time of an accelerator's stream.

    Args:
        clones: folder with the clones, each under the name of its repository; projects without a clone are skipped.
        peers: projects: flow_grpo, flow_factory, unirl, verl_omni (with stored log-probabilities) and verl_omni_default
            (which recomputes them); and transformer: only the forward and backward passes, fluvial's LoRA beside peft's.
        sizes: model sizes: tiny, small, medium.
        pairs: numbers of (sample, step) pairs per pass of fluvial's update, besides the chosen one; by default multiples of
            the samples. A pass of the projects' loops has the samples of one step, or a part of them.
        samples: samples per rollout and process.
        steps: steps of the schedule.
        windows: numbers of stochastic steps, which are recorded and trained on; 0 is all steps.
        ranks: numbers of processes; above 1 only for projects that run on several.
        kl: weight of a KL term to the network without adapters; above 0 only for projects whose loss has one.
        runs: number of timed rounds.
        threads: CPU threads per process.
        skip_done: skip cases that peers.csv has for these commits with at least as many rounds.
        table: only print the tables of bench/NOTEBOOK.md from peers.csv.
        out: folder of peers.csv; each row is appended when it is measured.
    """

    clones: Path = Path("clones")
    peers: tuple[str, ...] = KNOWN
    sizes: tuple[str, ...] = ("small", "medium")
    pairs: tuple[int, ...] = ()
    samples: int = 8
    steps: int = 10
    windows: tuple[int, ...] = (0,)
    ranks: tuple[int, ...] = (1,)
    kl: float = 0.0
    runs: int = 7
    threads: int = 1
    skip_done: bool = False
    table: bool = False
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "runs", "threads"):
            check_number("peers", name, getattr(self, name), low=1)
        check_number("peers", "kl", self.kl, low=0)
        for name in ("pairs", "ranks"):
            if min(getattr(self, name), default=1) < 1 or not self.ranks:
                raise ValueError(f"peers: {name} is {getattr(self, name)}, expected numbers of at least 1")
        most = self.steps - WINDOW_START
        if not self.windows or not all(0 <= size <= most for size in self.windows):
            raise ValueError(f"peers: windows is {self.windows}, expected numbers from 0 to {most}")
        for peer in self.peers:
            check_choice("peers", "peers", peer, KNOWN)
        for size in self.sizes:
            check_choice("peers", "sizes", size, SIZES)


class PeerCase(NamedTuple):
    """One comparison: all rows of a project, a size, a number of processes and a window."""

    peer: str
    size: str
    ranks: int
    window: int  # stochastic steps; 0 is all

    def build_work(
        self,
        config: PeersConfig,
        *,
        rank: int = 0,
        gradient: Halves = "both",
        kl_weight: KLWeight | None = None,
        device: torch.device = CPU,
    ) -> Work:
        """Build the work of a rank."""
        return Work(
            SIZES[self.size],
            samples=config.samples,
            steps=config.steps,
            window=range(WINDOW_START, WINDOW_START + self.window) if self.window else None,
            rank=rank,
            ranks=self.ranks,
            gradient=gradient,
            kl=0.0 if kl_weight is None else config.kl,
            kl_weight=kl_weight or "rate",
            device=device,
        )

    def list_pairs(self, config: PeersConfig) -> tuple[int, ...]:
        """Return the numbers of pairs per pass, at most all pairs; the first is that of a project's loop."""
        steps = self.window or config.steps
        sizes = config.pairs or [config.samples * times for times in micro_batch.list_sizes(steps)]
        return tuple(dict.fromkeys(min(pairs, config.samples * steps) for pairs in (config.samples, *sizes)))


@dataclass(frozen=True)
class PeerRow:
    """Ratio of fluvial's CPU time to a project's in the same round; below 1 fluvial is faster.

    The phase whole is one `Trainer.update` (rollout, rewards and optimizer updates), beside the project's rollout and
    update. CPU time is the sum over processes, bytes are the maximum.
    """

    peer: str
    commit: str  # of the project
    fluvial: str  # commit of fluvial; "unknown" outside a checkout
    size: str
    ranks: int
    what: str
    samples: int  # per process
    steps: int
    window: int  # stochastic steps, recorded and trained on; 0 is all
    pairs: int  # per pass, fluvial
    peer_pairs: int  # per pass, the project
    runs: int
    p20: float
    p50: float
    p80: float
    seconds: float  # CPU time of fluvial, median
    peer_seconds: float
    rest_seconds: float  # least CPU time without the network's passes: everything around them; 0 if not measured
    peer_rest_seconds: float
    held_bytes: int  # tensors that stay between calls: parameters, state of the optimizer
    peer_held_bytes: int
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
    wall_p50: float = 0.0  # ratio of wall times, of the slowest process; 0 if not measured
    wall_seconds: float = 0.0
    peer_wall_seconds: float = 0.0
    kl: float = 0.0  # weight of the KL term
