"""The report of a dry run: a table for people, JSON for programs, and an image of the memory over the operations."""

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
LINES, FEW = 12, 3  # that hold most: at the largest peak, and at the others when they are printed
READS, COPY = ("read", "synchronisation"), "blocking copy to the device"  # kinds of host waits
NOT_SIMULATED = (
    "gaps of the allocator and its rounding to 512 bytes",
    "workspaces of cuBLAS and cuDNN, the CUDA context (0.5 to 1 GiB), and buffers of NCCL (about 1 GiB)",
    "time: overlap of communication and computation, and memory that a stream holds longer for it",
    "what kernels compute: a value that is read from the device is 0",
    "other ranks: all are taken to do what rank 0 does",
)


@dataclass(frozen=True)
class Line:
    """Bytes that a line of the program holds."""

    line: str
    bytes: int


@dataclass(frozen=True)
class Communication:
    """Collectives of a kind and a line."""

    name: str
    ranks: int
    line: str
    calls: int
    bytes: int  # that each rank sends, in a ring


@dataclass(frozen=True, order=True)
class HostWait:
    """Host reads, blocking copies and synchronisations of a line."""

    kind: str
    operation: str
    line: str
    times: int


@dataclass(frozen=True)
class PhaseReport:
    """A phase of a run.

    Args:
        name: build, rollout, decode, rewards, update, evaluation or checkpoint.
        before, peak, after: bytes on the device.
        stored: bytes of `peak` that are computed: samples of further chunks of the rollout.
        lines: lines that hold most at the peak.
        communication: collectives.
        waits: where the host waits for the device.
        flops: floating-point operations on this rank, repeated ones of activation checkpointing included.
        operations: number of operations on the device.
        copied: bytes that are copied from the host.
    """

    name: str
    before: int
    peak: int
    after: int
    stored: int
    lines: tuple[Line, ...]
    communication: tuple[Communication, ...]
    waits: tuple[HostWait, ...]
    flops: int
    operations: int
    copied: int

    @property
    def sent(self) -> int:
        """Bytes that this rank sends."""
        return sum(each.bytes for each in self.communication)

    @property
    def calls(self) -> int:
        """Number of collectives."""
        return sum(each.calls for each in self.communication)

    def count_waits(self, *kinds: str) -> int:
        """Return how often the host waits, by kinds."""
        return sum(each.times for each in self.waits if each.kind in kinds)


@dataclass(frozen=True)
class CheckpointLayout:
    """Sizes of a checkpoint, and of the export at the end of a run."""

    tensors: int
    bytes_of_rank: int
    bytes: int
    exported_bytes: int
    largest_gathered: int  # bytes of the largest tensor that is gathered for the export


@dataclass(frozen=True)
class Report:
    """Memory, communication, FLOPs and host waits of a training run on its GPUs, by phase.

    Args:
        ranks: number of GPUs.
        accelerator: the GPU.
        reserve: bytes that stay free for what is not simulated.
        phases: the phases, in the order in which they first ran.
        micro_batches: number of micro-batches of an update of the run; two are traced.
        concurrent: bytes by which rollouts ahead of the updates add to the largest peak, as they run at the same time.
        layout: what a checkpoint holds; None if the run did not get so far.
        error: what ended the run, None if nothing did.
        notes: what of this run is not simulated.
        curve: entries of the ledger, and what each line holds there, for the image.
        marks: phase and entry at which it begins.
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
    def of(
        cls, simulation: Simulation, config: TrainConfig, *, ranks: int, accelerator: Accelerator, reserve: int,
        notes: Sequence[str], error: str | None, stored: int, micro_batches: int, layout: CheckpointLayout | None,
    ) -> "Report":  # fmt: skip
        """Return the report of a simulation."""
        mode, phase_of = simulation.mode, simulation.phases.by_name
        ran = [name for name in ORDER if name in phase_of]
        phases = tuple(_phase(name, simulation, stored if name in HOLDING else 0) for name in ran)
        highest = max(phases, key=lambda phase: phase.peak)
        lines = [*mode.ledger.find_holders(phase_of[highest.name].peak_entry)][:LINES]
        rollouts = [phase for phase in phases if phase.name == "rollout" and config.rollout.ahead]
        concurrent = max((rollout.peak - rollout.before for rollout in rollouts), default=0)
        marks = sorted((span[0], name) for name, phase in phase_of.items() for span in phase.spans if span[1] > span[0])
        return cls(
            ranks, accelerator, reserve, phases, micro_batches, concurrent, layout, error, (*notes, *NOT_SIMULATED),
            mode.ledger.curves(lines), tuple((name, entry) for entry, name in marks),
        )  # fmt: skip

    @property
    def peak(self) -> int:
        """Bytes on each GPU at the largest peak."""
        return max(phase.peak for phase in self.phases) + self.concurrent

    @property
    def fits(self) -> bool:
        """Whether the largest peak leaves the reserve free."""
        return self.peak + self.reserve <= self.accelerator.memory

    def phase(self, name: str) -> PhaseReport:
        """Return a phase by name."""
        return next(phase for phase in self.phases if phase.name == name)

    def record(self) -> dict[str, Any]:
        """Return everything but the curve as values that JSON can hold."""
        phases = {phase.name: {**asdict(phase), "sent": phase.sent, "calls": phase.calls} for phase in self.phases}
        return {
            "ranks": self.ranks, "gpu": self.accelerator._asdict(), "reserve": self.reserve, "peak": self.peak,
            "fits": self.fits, "error": self.error, "micro_batches": self.micro_batches, "concurrent": self.concurrent,
            "checkpoint": None if self.layout is None else asdict(self.layout), "phases": phases,
            "not_simulated": list(self.notes),
        }  # fmt: skip

    def show(self, console: Console) -> None:
        """Print a table of the phases, the lines that hold their peaks, what is sent, and where the host waits."""
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
        held, sent, waits = list[tuple[str, ...]](), list[tuple[str, ...]](), list[tuple[str, ...]]()
        for phase in self.phases:
            most = phase.lines[: LINES if phase is highest else FEW]
            held += [(phase.name, f"{each.bytes / unit:.2f}", each.line) for each in most]
            for call in phase.communication:
                sent.append((phase.name, str(call.calls), f"{call.bytes / unit:.3g}", f"{call.name} at {call.line}"))
            for wait in phase.waits if phase.name != "build" else ():
                if wait.kind in (*READS, COPY):
                    waits.append((phase.name, str(wait.times), f"{wait.kind} ({wait.operation}) at {wait.line}"))
        for head, columns, listed in (
            ("Held at the peak of each phase, most first", ("", name, "made at"), held),
            ("Sent by each rank", ("", "calls", name, "collective"), sent),
            ("The host waits for the device", ("", "times", "where"), waits),
        ):
            if listed:
                console.print(_listing(head, columns, listed), highlight=False)
        self._verdict(console, unit, name)

    def _verdict(self, console: Console, unit: int, name: str) -> None:
        """Print whether it fits, what a checkpoint holds, and what is not simulated."""
        layout, said = self.layout, list[str]()
        if layout is not None:
            said.append(
                f"A checkpoint holds {layout.tensors} tensors of {layout.bytes / unit:.2f} {name}, of which a rank "
                f"writes about {layout.bytes_of_rank / unit:.2f}; the export writes {layout.exported_bytes / unit:.2f}."
            )
        if self.concurrent:
            more = f"{self.concurrent / unit:.2f} {name}"
            said.append(f"Rollouts ahead of the updates run beside them, which adds up to {more}.")
        peaks = find_peaks(self.accelerator.name)
        if peaks is not None:  # fractions of a second are of inputs
            copies = {each.name: each.copied / peaks.link for each in self.phases if each.copied >= GIB}
            listed = ", ".join(f"{seconds:.3g} s in the phase {name}" for name, seconds in copies.items())
            said += [f"Copies from the host take, at {peaks.link / 1e9:g} GB/s: {listed}."] if copies else []
        room = f"{self.accelerator.memory / GIB:.0f} GiB with {self.reserve / GIB:g} GiB kept free"
        verdict = f"{'It fits' if self.fits else 'It does not fit'} into {room}: {self.peak / unit:.2f} {name}."
        said.append(verdict if self.error is None else f"The run ended in the phase {self.error}")
        for line in (*said, "Not simulated:", *(f"- {note}" for note in self.notes)):
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def _listing(title: str, heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table whose first column is left empty where it repeats, and whose last column is text."""
    sheet = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        sheet.add_column(head, justify="left" if number in (0, len(heads) - 1) else "right", overflow="fold")
    before = None
    for first, *cells in rows:
        sheet.add_row("" if first == before else first, *map(escape, cells))
        before = first
    return sheet


def _phase(name: str, simulation: Simulation, stored: int) -> PhaseReport:
    mode, phase = simulation.mode, simulation.phases.by_name[name]
    held = mode.ledger.find_holders(phase.peak_entry) if phase.peak else {}
    lines = tuple(Line(line, size) for line, size in held.items())[:LINES]
    calls = [(kind, count) for kind, count in mode.calls.most_common() if kind.phase == name]
    waits = [(wait, times) for wait, times in mode.waits.most_common() if wait.phase == name]
    return PhaseReport(
        name, phase.before, phase.peak + stored, phase.after, stored, lines,
        tuple(Communication(kind.name, kind.ranks, kind.line, count, mode.sent[kind]) for kind, count in calls),
        tuple(HostWait(wait.kind, wait.operation, wait.line, times) for wait, times in waits),
        mode.flops[name], mode.operations[name], mode.copied[name],
    )  # fmt: skip


def draw(report: Report, file: Path) -> None:
    """Draw the memory over the operations, with the lines that hold most at the peak."""
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
