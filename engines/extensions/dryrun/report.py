"""Report of a dry run: tables on the terminal, JSON, and a plot of the memory over the operations."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fluvial.engines.extensions.dryrun.passes import MICRO_BATCHES as TRACED
from fluvial.engines.extensions.simulate.device import GIB, Accelerator
from fluvial.engines.extensions.simulate.simulation import Simulation
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.log.progress import table
from fluvial.engines.run.metrics import find_peaks

# Phases in which the samples of a rollout are held.
HOLDING = ("rollout", "decode", "rewards", "update")
ORDER = ("build", *HOLDING, "evaluation", "checkpoint")
LINES, FEW = 12, 3  # lines shown at a peak, largest first: at the largest peak, and at the others when printed
READS, COPY = ("read", "synchronisation"), "blocking copy to the device"  # kinds of host waits
NOT_SIMULATED = (
    "gaps of the allocator and its rounding to 512 bytes",
    "workspaces of cuBLAS and cuDNN, the CUDA context (0.5 to 1 GiB), and buffers of NCCL (about 1 GiB)",
    "time: overlap of communication and computation, and memory that a stream holds longer for it",
    "values on the device: each one that is read is 0",
    "other ranks: all are assumed to do what rank 0 does",
)


@dataclass(frozen=True)
class LineBytes:
    """Bytes held by a line of the program."""

    line: str
    bytes: int


@dataclass(frozen=True)
class Communication:
    """Collectives of one kind in one line of the program."""

    name: str
    ranks: int
    line: str
    calls: int
    bytes: int  # sent by each rank, in a ring


@dataclass(frozen=True, order=True)
class HostWait:
    """Host reads, blocking copies or synchronisations in one line of the program."""

    kind: str
    operation: str
    line: str
    times: int


@dataclass(frozen=True)
class PhaseReport:
    """Costs of a phase of a run.

    Args:
        name: build, rollout, decode, rewards, update, evaluation or checkpoint.
        before, peak, after: bytes on the device.
        stored: part of `peak` that is computed, not traced: samples of further chunks of the rollout.
        lines: lines of the program that hold most at the peak.
        communication: collectives.
        waits: places where the host waits for the device.
        flops: floating-point operations on this rank, including those repeated by activation checkpointing.
        operations: number of operations on the device.
        copied: bytes copied from the host.
    """

    name: str
    before: int
    peak: int
    after: int
    stored: int
    lines: tuple[LineBytes, ...]
    communication: tuple[Communication, ...]
    waits: tuple[HostWait, ...]
    flops: int
    operations: int
    copied: int

    @property
    def sent(self) -> int:
        """Bytes sent by this rank."""
        return sum(each.bytes for each in self.communication)

    @property
    def calls(self) -> int:
        """Number of collectives."""
        return sum(each.calls for each in self.communication)

    def count_waits(self, *kinds: str) -> int:
        """Return how often the host waits in one of the given ways."""
        return sum(each.times for each in self.waits if each.kind in kinds)


@dataclass(frozen=True)
class CheckpointLayout:
    """Sizes of a checkpoint and of the final export."""

    tensors: int
    bytes_of_rank: int
    bytes: int
    exported_bytes: int
    largest_gathered: int  # bytes of the largest tensor gathered for the export


@dataclass(frozen=True)
class Report:
    """Memory, communication, FLOPs and host waits of a training run on its GPUs, by phase.

    Args:
        ranks: number of GPUs.
        accelerator: simulated GPU.
        reserve: bytes kept free for what is not simulated.
        phases: phases in the order in which they first ran.
        micro_batches: number of micro-batches per update of the run; two are traced.
        concurrent: bytes that rollouts ahead of the updates add to the largest peak, because they run at the same time.
        layout: sizes of a checkpoint; None if the run ended before it.
        error: phase and error that ended the run, or None.
        notes: parts of the run that are not simulated.
        curve: entries of the ledger, and the bytes held by each line at these, for the plot.
        marks: start of each phase, as (name, entry).
    """

    ranks: int
    accelerator: Accelerator
    reserve: int
    phases: tuple[PhaseReport, ...]
    micro_batches: int
    concurrent: int
    layout: CheckpointLayout | None
    error: str | None
    notes: tuple[str, ...]
    curve: tuple[list[int], dict[str, list[int]]]
    marks: tuple[tuple[str, int], ...]

    @classmethod
    def from_simulation(
        cls, simulation: Simulation, config: TrainConfig, *, ranks: int, accelerator: Accelerator, reserve: int,
        notes: Sequence[str], error: str | None, stored: int, micro_batches: int, layout: CheckpointLayout | None,
    ) -> "Report":  # fmt: skip
        """Build the report of a simulation; see the class for the arguments."""
        mode, phase_of = simulation.mode, simulation.phases.by_name
        ran = [name for name in ORDER if name in phase_of]
        phases = tuple(_build_phase(name, simulation, stored if name in HOLDING else 0) for name in ran)
        highest = max(phases, key=lambda phase: phase.peak)
        lines = [*mode.ledger.find_holders(phase_of[highest.name].peak_entry)][:LINES]
        rollouts = [phase for phase in phases if phase.name == "rollout" and config.rollout.ahead]
        concurrent = max((rollout.peak - rollout.before for rollout in rollouts), default=0)
        marks = sorted((span[0], name) for name, phase in phase_of.items() for span in phase.spans if span[1] > span[0])
        return cls(
            ranks, accelerator, reserve, phases, micro_batches, concurrent, layout, error, (*notes, *NOT_SIMULATED),
            mode.ledger.sample_curves(lines), tuple((name, entry) for entry, name in marks),
        )  # fmt: skip

    @property
    def peak(self) -> int:
        """Bytes on each GPU at the largest peak."""
        return max(phase.peak for phase in self.phases) + self.concurrent

    @property
    def fits(self) -> bool:
        """Whether the largest peak leaves the reserve free."""
        return self.peak + self.reserve <= self.accelerator.memory

    def find_phase(self, name: str) -> PhaseReport:
        """Return the phase of a name."""
        return next(phase for phase in self.phases if phase.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the curve as a JSON-serialisable dict."""
        phases = {phase.name: {**asdict(phase), "sent": phase.sent, "calls": phase.calls} for phase in self.phases}
        return {
            "ranks": self.ranks, "gpu": self.accelerator._asdict(), "reserve": self.reserve, "peak": self.peak,
            "fits": self.fits, "error": self.error, "micro_batches": self.micro_batches, "concurrent": self.concurrent,
            "checkpoint": None if self.layout is None else asdict(self.layout), "phases": phases,
            "not_simulated": list(self.notes),
        }  # fmt: skip

    def show(self, console: Console) -> None:
        """Print the phases, the memory at their peaks by line, the communication, and the waits of the host."""
        unit, name = (GIB, "GiB") if self.peak >= GIB else (2**20, "MiB")
        plural = "s" if self.ranks > 1 else ""
        console.print(f"rank 0 of {self.ranks} GPU{plural} ({self.accelerator.name}), simulated", highlight=False)
        heads = ("peak", "after", "sent", "calls", "TFLOP", "reads", "copies", "from host")
        rows = {
            phase.name: (
                f"{phase.peak / unit:.2f}", f"{phase.after / unit:.2f}", f"{phase.sent / unit:.2f}", str(phase.calls),
                f"{phase.flops / 1e12:.3g}", str(phase.count_waits(*READS)), str(phase.count_waits(COPY)),
                f"{phase.copied / unit:.2f}",
            )
            for phase in self.phases
        }  # fmt: skip
        title = f"Phases in {name}; an update has {TRACED} micro-batches here"
        console.print(table(title, heads, rows), highlight=False)
        highest = max(self.phases, key=lambda phase: phase.peak)
        peaks, sent, waits = list[tuple[str, ...]](), list[tuple[str, ...]](), list[tuple[str, ...]]()
        for phase in self.phases:
            most = phase.lines[: LINES if phase is highest else FEW]
            peaks += [(phase.name, f"{each.bytes / unit:.2f}", each.line) for each in most]
            for call in phase.communication:
                sent.append((phase.name, str(call.calls), f"{call.bytes / unit:.3g}", f"{call.name} at {call.line}"))
            for wait in phase.waits if phase.name != "build" else ():
                if wait.kind in (*READS, COPY):
                    waits.append((phase.name, str(wait.times), f"{wait.kind} ({wait.operation}) at {wait.line}"))
        for head, columns, listed in (
            ("Held at the peak of each phase, most first", ("", name, "made at"), peaks),
            ("Sent by each rank", ("", "calls", name, "collective"), sent),
            ("The host waits for the device", ("", "times", "where"), waits),
        ):
            if listed:
                console.print(_build_listing(head, columns, listed), highlight=False)
        self._show_verdict(console, unit, name)

    def _show_verdict(self, console: Console, unit: int, name: str) -> None:
        """Print whether the run fits, the size of a checkpoint, and the parts that are not simulated."""
        layout, lines = self.layout, list[str]()
        if layout is not None:
            lines.append(
                f"A checkpoint holds {layout.tensors} tensors, {layout.bytes / unit:.2f} {name}; each rank writes "
                f"about {layout.bytes_of_rank / unit:.2f}. The export writes {layout.exported_bytes / unit:.2f}."
            )
        if self.concurrent:
            more = f"{self.concurrent / unit:.2f} {name}"
            lines.append(f"Rollouts ahead of the updates run at the same time, which adds up to {more}.")
        peaks = find_peaks(self.accelerator.name)
        if peaks is not None:  # copies of inputs take only fractions of a second
            copies = {each.name: each.copied / peaks.link for each in self.phases if each.copied >= GIB}
            listed = ", ".join(f"{seconds:.3g} s in the phase {name}" for name, seconds in copies.items())
            lines += [f"Copies from the host take, at {peaks.link / 1e9:g} GB/s: {listed}."] if copies else []
        room = f"{self.accelerator.memory / GIB:.0f} GiB with {self.reserve / GIB:g} GiB kept free"
        verdict = f"{'It fits' if self.fits else 'It does not fit'} into {room}: {self.peak / unit:.2f} {name}."
        lines.append(verdict if self.error is None else f"The run ended in the phase {self.error}")
        for line in (*lines, "Not simulated:", *(f"- {note}" for note in self.notes)):
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def _build_listing(title: str, heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table that shows a repeated first cell once, and whose last column is text."""
    listing = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        listing.add_column(head, justify="left" if number in (0, len(heads) - 1) else "right", overflow="fold")
    before = None
    for first, *cells in rows:
        listing.add_row("" if first == before else first, *map(escape, cells))
        before = first
    return listing


def _build_phase(name: str, simulation: Simulation, stored: int) -> PhaseReport:
    mode, phase = simulation.mode, simulation.phases.by_name[name]
    holders = mode.ledger.find_holders(phase.peak_entry) if phase.peak else {}
    lines = tuple(LineBytes(line, size) for line, size in holders.items())[:LINES]
    calls = [(kind, count) for kind, count in mode.calls.most_common() if kind.phase == name]
    waits = [(wait, times) for wait, times in mode.waits.most_common() if wait.phase == name]
    return PhaseReport(
        name, phase.before, phase.peak + stored, phase.after, stored, lines,
        tuple(Communication(kind.name, kind.ranks, kind.line, count, mode.sent[kind]) for kind, count in calls),
        tuple(HostWait(wait.kind, wait.operation, wait.line, times) for wait, times in waits),
        mode.flops[name], mode.operations[name], mode.copied[name],
    )  # fmt: skip


def draw(report: Report, file: Path) -> None:
    """Plot the memory over the operations, split by the lines of the program that hold most at the peak."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    at, curves = report.curve
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    names = [*curves][::-1]
    axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
    axes.stackplot(at, [[size / GIB for size in curves[name]] for name in names], labels=names, step="post")
    axes.axhline(report.accelerator.memory / GIB, color="black", linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.1 * max(report.peak, min(report.accelerator.memory, 2 * report.peak)) / GIB)
    last = -1.0
    for name, entry in report.marks:
        if entry - last > (at[-1] if at else 1) / 40:
            axes.axvline(entry, color="grey", linewidth=0.5)
            axes.text(entry, axes.get_ylim()[1], name, rotation=90, va="top", fontsize=7)
            last = entry
    axes.set_xlabel("changes of the memory, in the order of the operations")
    axes.set_ylabel("GiB on each GPU")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=6)
    figure.savefig(file)
